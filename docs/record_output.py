#!/usr/bin/env python3
"""What the pages show of legroom is what it prints: runs every ```console block of docs/ and writes its output anew.

    python docs/record_output.py            # rewrites the pages
    python docs/record_output.py --check    # says which would change, and ends with 1

A block holds commands behind `$ ` and what each of them prints. They run in bash in the repository's root, with 80
columns, an empty home and no network. Output that cannot be had here (a GPU, a real vLLM) stands in ```text blocks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*(?:(?<=[\\|])\n.*|(?<=; do)\n.*)*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
"""A line that ends in a backslash, a pipe or `; do` goes on in the next."""


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Every command of a page, and the output that the page shows for it."""
    for block in BLOCK.finditer(text):
        yield from COMMAND.findall(block[1])


def output(command: str) -> str:
    """What a command prints, standard error included."""
    with tempfile.TemporaryDirectory() as folder:
        legroom = Path(folder, "legroom")
        legroom.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m legroom "$@"\n')
        legroom.chmod(0o755)
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "LC_ALL") if name in os.environ}
        env = {
            **kept,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "LEGROOM_HOME": f"{folder}/home",
            "COLUMNS": "80",
            "HF_HUB_OFFLINE": "1",
            "TZ": "UTC",
            "PYTHONIOENCODING": "utf-8",
        }
        bash = ["bash", "-c", command]
        done = subprocess.run(bash, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return "".join(line.rstrip() + "\n" for line in done.stdout.decode().splitlines())


def recorded(text: str) -> str:
    """A page with every output as it is today."""

    def block(found: re.Match[str]) -> str:
        body = COMMAND.sub(lambda run: f"$ {run[1]}\n{output(run[1])}", found[1])
        return f"```console\n{body}```"

    return BLOCK.sub(block, text)


def main() -> int:
    stale = 0
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]):
        text = page.read_text("utf-8")
        if (fresh := recorded(text)) != text:
            stale += 1
            print(page.relative_to(ROOT))
            if "--check" not in sys.argv:
                page.write_text(fresh, "utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
