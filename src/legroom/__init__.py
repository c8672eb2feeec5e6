"""legroom: GPU memory in vLLM serving as a thing you know."""

__version__ = "0.1.0"
