"""vLLM as seen from outside: command lines in, settings out."""
