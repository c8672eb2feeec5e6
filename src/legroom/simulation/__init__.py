"""The block pool and the scheduler of vLLM, replaying a trace without a model."""
