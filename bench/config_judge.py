#!/usr/bin/env python3
"""legroom's yes or no to random settings, and what it resolves, beside vLLM's own configuration code: `config_judge.py
[--answers FILE] [--release 0.32.0]`. tests/vllm/config_answers.py records answers, with a new seed for first sight."""

import json
import sys

from bench_harness import ROOT, arguments, print_table

sys.path.append(str(ROOT / "tests/vllm"))
from config_answers import LIMITS, compared, read_answers

options = arguments(__doc__, answers=ROOT / "tests/fixtures/config_answers.jsonl.gz", release="0.32.0")
found = compared(read_answers(options.answers), options.release)
rates = found.rates()
rows = [(name, f"{rates[name]:.1%}", f"{limit:.1%}", f"{rates[name] / limit:.2f}") for name, limit in LIMITS.items()]
print_table([("rate", "measured", "limit", "ratio"), *rows])
print(json.dumps({"accepted": found.accepted, "refused": found.refused, "errors": found.errors()} | rates))
sys.exit(any(rates[name] > limit for name, limit in LIMITS.items()))
