"""What a serving vLLM shows of itself: scraped, read into samples, kept in a window."""
