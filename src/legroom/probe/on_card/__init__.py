"""Scripts that run under the Python of the user's vLLM. They import nothing of legroom."""
