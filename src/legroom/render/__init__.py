"""Drawing primitives: bars, tables, SVG. They know nothing of vLLM."""
