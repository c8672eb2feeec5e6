"""`legroom lint`: what is wrong in files that people already have, for one vLLM release."""
