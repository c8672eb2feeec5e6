"""One server on two vLLM releases."""
