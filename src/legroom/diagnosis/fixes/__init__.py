"""Fixes: the failed run as a plan, and every change of it tried on the memory model before it is offered."""
