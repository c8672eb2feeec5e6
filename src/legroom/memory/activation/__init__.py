"""What the profile run allocates above the weights."""
