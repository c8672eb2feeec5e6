"""The load of a verification: how long the prompts and answers are, and how many of them the pool holds at once."""

from __future__ import annotations

import random
import re
from pathlib import Path

from legroom.errors import LegroomError
from legroom.records import dataclass
from legroom.simulation.trace import Trace
from legroom.simulation.traces import synthetic
from legroom.units import cdiv

PRESETS = {
    "chat": "prompt=lognormal(1020,0.5) output=lognormal(129,1.0)",
    "code": "prompt=lognormal(1500,0.8) output=lognormal(13,1.25)",
    "long-prompts": "prompt=lognormal(1020,0.5) output=lognormal(129,1.0) long=0.1,{long}",
    "full": "prompt={full} output={answer}",
}
"""Mixes in the words of `legroom simulate --synthetic`. Medians are those published for Azure's LLM inference traces of
2023 (conversation: 1020 in, 129 out; code: 1500 in, 13 out), spreads follow from their means (1155, 211; 2048, 28)."""

_PAIR = re.compile(r"(\d+)[/:,x](\d+)")
_PROCESSES = ("poisson", "uniform", "bursts")
_LONG_SHARE = 0.9


@dataclass(frozen=True)
class LoadRequest:
    prompt_len: int
    output_len: int
    prefix: tuple[tuple[str, int, int], ...] = ()
    """Shared beginnings: streams of tokens, and from where to where they are read."""
    was_cut: bool = False
    """It was longer than the context of the server."""

    @property
    def tokens(self) -> int:
        """What it grows to."""
        return self.prompt_len + self.output_len


@dataclass(frozen=True)
class Load:
    """The requests, in the order of sending."""

    name: str
    requests: tuple[LoadRequest, ...]

    def first(self, count: int) -> Load:
        """The first requests, from the start again where there are too few."""
        rows = self.requests
        return Load(self.name, tuple(rows[number % len(rows)] for number in range(count)))


def read_load(text: str, context: int, count: int, seed: int = 0) -> Load:
    """`chat`, `512/128`, a mix in simulate's words, or a trace file; every request fits the context."""
    if pair := _PAIR.fullmatch(text.strip()):
        trace = synthetic.read(f"poisson prompt={pair[1]} output={pair[2]} requests={count}", seed)
    elif text in PRESETS or ("=" in text and not Path(text).exists()):
        trace = synthetic.read(_mix(text, context, count), seed)
    else:
        trace = _file(text, count)
    trace = trace.checked()
    rows = tuple(_fitted(row.prompt_len, row.output_len, row.prefix, context) for row in trace.rows())
    return Load(text if text in PRESETS or pair else trace.name, rows)


def _mix(text: str, context: int, count: int) -> str:
    answer = max(1, min(128, context // 8))
    words = text
    if text in PRESETS:
        lengths = {"long": int(context * _LONG_SHARE), "full": max(1, context - answer), "answer": answer}
        words = PRESETS[text].format(**lengths)
    words = words if words.split()[0] in _PROCESSES else f"poisson {words}"
    return words if "requests=" in words else f"{words} requests={count}"


def _file(text: str, count: int) -> Trace:
    from legroom.simulation.traces.trace_files import read_trace

    if not Path(text).exists():
        raise LegroomError(
            f"--load {text!r} is neither a load nor a file",
            f"say {', '.join(PRESETS)}, lengths such as 512/128, a mix such as 'prompt=lognormal(800,0.5) output=100', "
            "or name a trace",
        )
    # Of a long trace only as much is read as may be sent; a few lines more, for headers.
    return read_trace(text, None, count + 16)


def _fitted(prompt: int, output: int, prefix: tuple[tuple[str, int, int], ...], context: int) -> LoadRequest:
    """What is too long is cut to the context: the answer to half of it, then the prompt to what is left."""
    if prompt + output <= context:
        return LoadRequest(prompt, output, prefix)
    short_output = min(output, max(1, context // 2))
    short_prompt = max(1, min(prompt, context - short_output))
    kept = tuple((name, start, min(stop, short_prompt)) for name, start, stop in prefix if start < short_prompt)
    return LoadRequest(short_prompt, short_output, kept, was_cut=True)


@dataclass(frozen=True)
class KvPool:
    """The KV cache of one engine, as the server or the plan gives it."""

    num_blocks: int
    block_size: int
    full_request_blocks: int | None = None
    """What a request of the full context takes; not what its tokens say where layers share the pool in groups."""

    @property
    def usable_blocks(self) -> int:
        """Without the null block."""
        return self.num_blocks - 1

    def blocks(self, tokens: int) -> int:
        """What a request of this length takes where all layers see all tokens."""
        return cdiv(tokens, self.block_size)

    def is_plain(self, context: int) -> bool:
        """Whether every token takes a slot of one kind: then need can be computed from lengths alone."""
        return self.full_request_blocks in (None, self.blocks(context))


def needed_blocks(load: Load, pool: KvPool, concurrency: int) -> int:
    """The most blocks that so many of the requests can take at once: the largest of them together."""
    sizes = sorted((pool.blocks(request.tokens) for request in load.requests), reverse=True)
    return sum(sizes[:concurrency])


def safe_concurrency(load: Load, pool: KvPool, context: int, most: int) -> int:
    """As many requests at a time as always fit, whichever of the load they are."""
    if not pool.is_plain(context):
        assert pool.full_request_blocks is not None
        return max(1, min(most, pool.usable_blocks // max(1, pool.full_request_blocks)))
    taken, count = 0, 0
    for blocks in sorted((pool.blocks(request.tokens) for request in load.requests), reverse=True):
        taken += blocks
        if taken > pool.usable_blocks or count >= most:
            break
        count += 1
    return max(1, count)


def token_ids(request: LoadRequest, vocabulary: tuple[int, ...], seed: int) -> list[int]:
    """The prompt: shared beginnings are the same for all that share them, the rest is its own."""
    own = random.Random(seed)
    ids: list[int] = []
    for name, start, stop in request.prefix:
        stream = random.Random(name)
        ids += [stream.choice(vocabulary) for _ in range(stop)][start:]
    return ids + own.choices(vocabulary, k=request.prompt_len - len(ids))
