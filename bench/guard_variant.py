#!/usr/bin/env python3
"""`legroom` with other constants of the guard than its own: what would they do?

guard_variant.py "pool.LOOKS=8 admission.LOOK_AHEAD=0.5" guard --upstream http://127.0.0.1:8000 --port 8100
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    for word in sys.argv[1].split():
        name, value = word.split("=")
        if name == "src":
            sys.path.insert(0, value)
            continue
        module, constant = name.split(".")
        place = importlib.import_module(f"legroom.guard.{module}")
        setattr(place, constant, type(getattr(place, constant))(value))
    del sys.argv[1]
    from legroom.__main__ import main as legroom

    sys.exit(legroom())


if __name__ == "__main__":
    main()
