"""Shell text: split into words with their places, with functions and variables expanded."""
