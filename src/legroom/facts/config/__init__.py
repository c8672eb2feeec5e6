"""A model's config.json read into its facts, one file a part of the model."""
