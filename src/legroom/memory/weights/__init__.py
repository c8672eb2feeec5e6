"""What torch has allocated on one rank when the model is loaded."""
