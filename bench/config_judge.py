#!/usr/bin/env python3
"""legroom's yes or no to random settings, and the values it resolves, beside those of vLLM's own configuration code.

    config_judge.py [--answers tests/fixtures/config_answers.jsonl.gz] [--release 0.32.0]

The answers are recorded by tests/vllm/config_answers.py (`--help` there), with a new seed for figures at first sight.
"""

from __future__ import annotations

import json
import sys

from bench_harness import ROOT, arguments, print_table

sys.path.append(str(ROOT / "tests/vllm"))
from config_answers import compared, read_answers

LIMITS = {"false_accepts": 0.02, "false_refusals": 0.005, "resolved_wrong": 0.01}


def main() -> int:
    options = arguments(__doc__, answers=ROOT / "tests/fixtures/config_answers.jsonl.gz", release="0.32.0")
    found = compared(read_answers(options.answers), options.release)
    rates = found.rates()
    rows = [
        (name, f"{rates[name]:.1%}", f"{limit:.1%}", f"{rates[name] / limit:.2f}") for name, limit in LIMITS.items()
    ]
    print_table([("rate", "measured", "limit", "ratio"), *rows])
    for error, count in found.errors().most_common(10):
        print(f"{count:4}  taken by legroom: {error}")
    counts = {"accepted": found.accepted, "refused": found.refused, "compared": found.compared}
    print(json.dumps(counts | rates))
    return int(any(rates[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
