"""Shell text: scanned, split into words that know their place, functions and variables followed."""
