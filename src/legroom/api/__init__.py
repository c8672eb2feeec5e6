"""The Python API, one file a verb: plain values in, a typed object out that shows itself as text, JSON or a picture."""
