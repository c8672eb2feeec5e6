"""The Python API: one module per function."""
