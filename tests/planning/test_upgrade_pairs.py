"""The same server on two releases, as it was published: the bench that checks it stays green."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "upgrade.py"


def test_published_upgrades_go_the_way_they_went_and_lie_in_their_bands():
    done = subprocess.run([sys.executable, BENCH], capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["not_planned"] == []
    assert summary["direction_right"] == summary["directions"] >= 16
    assert summary["in_band"] >= 0.9 * summary["figures"]
    assert summary["ends_right"] == summary["ends_known"]
