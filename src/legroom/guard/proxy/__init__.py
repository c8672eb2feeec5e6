"""Admission as a reverse proxy: two small protocols on one event loop, no task and no copy for an ordinary request."""
