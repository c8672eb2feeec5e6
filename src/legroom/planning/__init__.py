"""Searches over settings for a goal; calibration."""
