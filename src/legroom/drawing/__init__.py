"""Drawing primitives for a terminal and for SVG; they know nothing of vLLM."""
