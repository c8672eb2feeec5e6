"""Reserved but unused GPU memory: where it lies, and which allocator settings would have served a failed request."""
