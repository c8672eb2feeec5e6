"""Settings for every test."""

from hypothesis import settings

# A busy machine must not fail a property: examples are not timed.
settings.register_profile("legroom", deadline=None)
settings.load_profile("legroom")
