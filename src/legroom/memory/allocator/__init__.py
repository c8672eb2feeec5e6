"""PyTorch's caching allocator for CUDA: its settings, its rules, and a model that answers requests as it does."""
