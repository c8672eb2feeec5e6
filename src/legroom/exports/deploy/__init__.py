"""A planned server in the forms that platforms start one from."""
