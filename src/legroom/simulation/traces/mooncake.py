"""Mooncake: one JSON object a line with `timestamp` (ms), `input_length`, `output_length`, `hash_ids`."""

from __future__ import annotations

import json
from collections.abc import Iterable

from legroom.errors import LegroomError
from legroom.simulation.trace import NO_PREFIX, Trace

_TOKENS_A_HASH = 512


def looks_like(head: str) -> bool:
    """Whether the first line is such an object."""
    return '"input_length"' in head.split("\n", 1)[0]


def read(lines: Iterable[str], name: str) -> Trace:
    """`hash_ids` name blocks of 512 tokens: requests that begin with the same ids share those tokens."""
    trace = Trace(name, in_seconds=True)
    chains: list[list[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            trace.add(int(row["input_length"]), max(1, int(row["output_length"])), float(row["timestamp"]) / 1000)
            chains.append([int(item) for item in row.get("hash_ids", ())])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LegroomError(f"{name}, line {number}: not a Mooncake request ({error})") from None
    _share(trace, chains)
    return trace


def _share(trace: Trace, chains: list[list[int]]) -> None:
    """Turn chains of hashes into prefixes: a prefix is a path in the tree of chains, and begins with another one."""
    seen: dict[tuple[int, int], int] = {}
    uses: dict[int, int] = {}
    paths: list[list[int]] = []
    for chain in chains:
        node, path = -1, []
        for item in chain:
            node = seen.setdefault((node, item), len(seen))
            uses[node] = uses.get(node, 0) + 1
            path.append(node)
        paths.append(path)
    stream_of: dict[int, int] = {}
    for r, path in enumerate(paths):
        shared = [node for node in path if uses[node] > 1]
        if not shared:
            continue
        group = NO_PREFIX
        for depth, node in enumerate(shared):
            known = stream_of.get(node)
            if known is None:
                # The path leaves what is known here: go on in a stream of its own.
                if depth == 0 or stream_of[shared[depth - 1]] != group or _goes_on(trace, group, depth):
                    group = trace.add_prefix(f"hash{node}", group, depth * _TOKENS_A_HASH)
                stream_of[node] = group
                trace.prefix_reach[group] = depth + 1
            else:
                group = known
        trace.prefix_groups[r] = group
        trace.prefix_lens[r] = min(len(shared) * _TOKENS_A_HASH, trace.prompt_lens[r])


def _goes_on(trace: Trace, group: int, depth: int) -> bool:
    return trace.prefix_reach[group] > depth
