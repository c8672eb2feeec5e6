"""`legroom run`: starts vLLM, fixes failed starts, and restarts it after crashes."""
