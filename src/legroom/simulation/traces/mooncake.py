"""The Mooncake format: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`."""

import json
from collections.abc import Iterable

from legroom.errors import LegroomError
from legroom.simulation.trace import NO_PREFIX, Trace

_TOKENS_PER_HASH = 512  # The block size of the published traces.


def looks_like(head: str) -> bool:
    """Whether the first line of `head`, a file's beginning, has an "input_length", as Mooncake traces have."""
    return '"input_length"' in head.split("\n", 1)[0]


def read(lines: Iterable[str], name: str) -> Trace:
    """A Mooncake trace; `hash_ids` name 512-token blocks, equal leading ids a shared prefix; else LegroomError."""
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
    _add_prefixes(trace, chains)
    return trace


def _add_prefixes(trace: Trace, chains: list[list[int]]) -> None:
    """Sets each request's shared prefix: the leading hashes of its chain (block hashes) that another chain begins with,
    too. A prefix that continues another is stored with that one as its parent."""
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
    reach: dict[int, int] = {}
    for r, path in enumerate(paths):
        shared = [node for node in path if uses[node] > 1]
        if not shared:
            continue
        group = NO_PREFIX
        for depth, node in enumerate(shared):
            known = stream_of.get(node)
            if known is None:
                # The path leaves the known prefixes: it continues as a new one.
                if depth == 0 or stream_of[shared[depth - 1]] != group or reach[group] > depth:
                    group = trace.add_prefix(f"hash{node}", group, depth * _TOKENS_PER_HASH)
                stream_of[node] = group
                reach[group] = depth + 1
            else:
                group = known
        trace.prefix_groups[r] = group
        trace.prefix_lens[r] = min(len(shared) * _TOKENS_PER_HASH, trace.prompt_lens[r])
