"""The incident journal, and the samples it keeps."""
