"""Text -> evidence -> causes -> fixes. One small file a cause in `causes/`; what messages look like is in `facts`."""
