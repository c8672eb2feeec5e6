"""A running vLLM: its metrics by release, samples, detectors (one file each), forecasts and the incident journal."""
