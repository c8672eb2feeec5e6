"""What a real server shows of itself on its metrics page."""

from __future__ import annotations

import urllib.request

RUNNING = "vllm:num_requests_running"


def metric(url: str, name: str) -> float:
    """A series, summed over its labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)
