"""Typed records of what vLLM prints: start-up lines, flags, memory accounting and failures of each release."""
