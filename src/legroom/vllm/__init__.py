"""vLLM from outside: words -> ServeArgs -> EngineSettings -> refusals, and settings -> words."""
