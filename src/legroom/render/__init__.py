"""Pictures: drawing primitives (terminal, bar, text, svg) and what a plan or a sizing table looks like in them."""
