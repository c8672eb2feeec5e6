"""What the benches share: their arguments, processes, tables and files."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / folder) for folder in ("real_vllm", "sidecar", "simulation", "")]


def arguments(usage: str | None, *positional: str, **options: Any) -> argparse.Namespace:
    """The parsed command line. `name:path` is a path, `name?` may be left out, `name+` repeated. An option has the type
    of its default; a type in place of a default makes an option without one.
    """
    parser = argparse.ArgumentParser(description=usage, formatter_class=argparse.RawDescriptionHelpFormatter)
    for word in positional:
        name, _, kind = word.rstrip("?+").partition(":")
        count = word[-1] if word[-1] in "?+" else None
        parser.add_argument(name, nargs=count, type=Path if kind == "path" else str)
    for name, default in options.items():
        flag = "--" + name.replace("_", "-")
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        elif isinstance(default, tuple):
            parser.add_argument(flag, nargs="*", default=list(default), type=type(default[0]) if default else str)
        else:
            kind = Path if isinstance(default, Path) else type(default)
            parser.add_argument(flag, nargs="?", type=kind, default=default, const=default)
    return parser.parse_args()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def cpu_s(pid: int) -> float:
    """CPU seconds that a process and its threads have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median by order statistics."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(values) / 2 - half), int(len(values) / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def print_table(rows: Sequence[Sequence[object]]) -> None:
    """The first row is the header, the first column is aligned to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    cells.insert(1, ["-" * width for width in widths])
    for first, *others in cells:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]).rstrip())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file."""
    for line in path.read_text("utf-8").splitlines():
        if line.strip():
            yield json.loads(line)


def write_line(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_json(path: Path | None, document: object) -> None:
    """Nothing where no file was named."""
    if path:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
