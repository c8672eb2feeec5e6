"""What each answer looks like: text, SVG and pages, one file a kind of answer."""
