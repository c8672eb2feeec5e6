"""One reader a kind of file: text in, what rules look at out."""
