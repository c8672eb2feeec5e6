"""What vLLM prints, read into typed records: start-up lines, flags, memory accounting and failures of each release."""
