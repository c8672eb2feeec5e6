"""What is true of the world, as data with a source."""
