"""Sweeps: one function over many inputs, in processes of this machine or on a Ray cluster."""
