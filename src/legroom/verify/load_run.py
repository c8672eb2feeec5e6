"""The load of a verification: request lengths, how many requests the KV pool holds at once, and sending them. While the
load runs, the server's metrics and memory are sampled."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections.abc import Callable
from itertools import accumulate

from legroom.errors import LegroomError
from legroom.live.gpu_memory import bytes_on_gpus_of, nvml_devices, server_processes
from legroom.live.metrics.endpoint import port_of
from legroom.live.metrics.sample import Sample
from legroom.live.metrics.scrape import ScrapeFailed, scrape
from legroom.process_table import resident_bytes
from legroom.records import dataclass
from legroom.simulation.traces import synthetic
from legroom.units import cdiv
from legroom.verify.openai_client import RequestOutcome, ServerClient

PRESETS = {
    "chat": "prompt=lognormal(1020,0.5) output=lognormal(129,1.0)",
    "code": "prompt=lognormal(1500,0.8) output=lognormal(13,1.25)",
    "long-prompts": "prompt=lognormal(1020,0.5) output=lognormal(129,1.0) long=0.1,{long}",
    "full": "prompt={full} output={answer}",
}
"""Mixes in the words of `legroom simulate --synthetic`. Medians are those published for Azure's LLM inference traces of
2023 (conversation: 1020 in, 129 out; code: 1500 in, 13 out), spreads follow from their means (1155, 211; 2048, 28)."""

_PAIR = re.compile(r"(\d+)[/:,x](\d+)")


@dataclass(frozen=True)
class LoadRequest:
    prompt_len: int
    output_len: int
    prefix: tuple[tuple[str, int, int], ...] = ()
    """Shared prefixes: the name of a token stream, and the start and end of the part that is used."""
    was_cut: bool = False
    """Whether it was shortened to the context of the server."""

    @property
    def tokens(self) -> int:
        """Tokens of the request at its end: prompt and output."""
        return self.prompt_len + self.output_len


@dataclass(frozen=True)
class Load:
    """The requests of a test load, in the order in which they are sent."""

    name: str
    requests: tuple[LoadRequest, ...]

    def first(self, count: int) -> Load:
        """A load of the first `count` requests, which are repeated where there are fewer."""
        rows = self.requests
        return Load(self.name, tuple(rows[number % len(rows)] for number in range(count)))


def read_load(text: str, context: int, count: int, seed: int = 0) -> Load:
    """The requests of a preset, of lengths such as `512/128`, of a mix or of a trace file, cut to `context` tokens;
    `count` are drawn unless the text says how many. LegroomError for other texts."""
    is_file = os.path.exists(text)  # noqa: PTH110 - False for a text that is too long for a path
    if pair := _PAIR.fullmatch(text.strip()):
        trace = synthetic.read(f"poisson prompt={pair[1]} output={pair[2]} requests={count}", seed)
    elif text in PRESETS or ("=" in text and not is_file):
        answer = max(1, min(128, context // 8))
        lengths = {"long": int(context * 0.9), "full": max(1, context - answer), "answer": answer}
        words = PRESETS[text].format(**lengths) if text in PRESETS else text
        words = words if words.split()[0] in ("poisson", "uniform", "bursts") else f"poisson {words}"
        trace = synthetic.read((words if "requests=" in words else f"{words} requests={count}"), seed)
    else:
        # The first requests of a trace file; raises LegroomError where there is no such file.
        from legroom.simulation.traces.trace_files import read_trace

        if not is_file:
            mix = "a mix such as 'prompt=lognormal(800,0.5) output=100'"
            hint = f"say {', '.join(PRESETS)}, lengths such as 512/128, {mix}, or name a trace"
            raise LegroomError(f"--load {text!r} is neither a load nor a file", hint)
        # Reads only the requests that are sent, and some lines for headers.
        trace = read_trace(text, None, count + 16)
    trace = trace.checked()
    rows = tuple(_cut_to_context(row.prompt_len, row.output_len, row.prefix, context) for row in trace.rows())
    return Load(text if text in PRESETS or pair else trace.name, rows)


def _cut_to_context(prompt: int, output: int, prefixes: tuple[tuple[str, int, int], ...], context: int) -> LoadRequest:
    """A request of `prompt` and `output` tokens; beyond `context` tokens its output is cut to half of these, and its
    prompt to the rest. `prefixes`: (name, start, end) in tokens of prefixes shared with other requests."""
    if prompt + output <= context:
        return LoadRequest(prompt, output, prefixes)
    short_output = min(output, max(1, context // 2))
    short_prompt = max(1, min(prompt, context - short_output))
    kept = tuple((name, start, min(stop, short_prompt)) for name, start, stop in prefixes if start < short_prompt)
    return LoadRequest(short_prompt, short_output, kept, was_cut=True)


@dataclass(frozen=True)
class KvPool:
    num_blocks: int
    block_size: int
    full_request_blocks: int | None = None
    """Blocks of a request at full context; None if unknown. Layer groups sharing the pool need more than tokens say."""

    @property
    def usable_blocks(self) -> int:
        """KV blocks except vLLM's null block."""
        return self.num_blocks - 1

    def blocks(self, tokens: int) -> int:
        """KV blocks of a request of `tokens` tokens where all layers use full attention."""
        return cdiv(tokens, self.block_size)

    def has_one_group(self, context: int) -> bool:
        """Whether the pool is one KV cache group, by the blocks of a request of `context` tokens; True if unknown."""
        return self.full_request_blocks in (None, self.blocks(context))


def needed_blocks(load: Load, pool: KvPool, concurrency: int) -> int:
    """KV blocks of the `concurrency` longest requests of the load together."""
    sizes = sorted((pool.blocks(request.tokens) for request in load.requests), reverse=True)
    return sum(sizes[:concurrency])


def safe_concurrency(load: Load, pool: KvPool, context: int, most: int) -> int:
    """How many of the load's requests, 1 to `most`, always fit the pool at once: the longest ones; with several KV
    groups, requests of `context` (max_model_len) tokens."""
    if not pool.has_one_group(context):
        assert pool.full_request_blocks is not None
        return max(1, min(most, pool.usable_blocks // max(1, pool.full_request_blocks)))
    sizes = sorted((pool.blocks(request.tokens) for request in load.requests), reverse=True)
    return max(1, sum(taken <= pool.usable_blocks for taken in accumulate(sizes[:most])))


def token_ids(request: LoadRequest, vocabulary: tuple[int, ...], seed: int) -> list[int]:
    """The prompt's token ids: its shared prefixes, equal in all requests, then random `vocabulary` ids by `seed`."""
    own = random.Random(seed)
    ids: list[int] = []
    for name, start, stop in request.prefix:
        stream = random.Random(name)
        ids += [stream.choice(vocabulary) for _ in range(stop)][start:]
    return ids + own.choices(vocabulary, k=request.prompt_len - len(ids))


_MEMORY_INTERVAL_S = 0.5


@dataclass(frozen=True)
class LoadSample:
    at_s: float
    """Seconds since the start of the load."""
    kv_use: float | None
    running: float
    waiting: float
    preemptions: float | None
    memory_bytes: int | None = None
    own_requests: int = 0
    """Open requests of this verification."""


@dataclass(frozen=True)
class LoadRun:
    name: str
    requests: int
    concurrency: int
    outcomes: tuple[RequestOutcome, ...]
    samples: tuple[LoadSample, ...]
    seconds: float
    preemptions: int | None
    interrupted: str = ""
    """Why the load ended early; empty where it did not."""

    @property
    def failed(self) -> tuple[RequestOutcome, ...]:
        """The outcomes of requests that ended with an error."""
        return tuple(outcome for outcome in self.outcomes if not outcome.ok)

    @property
    def peak_kv_use(self) -> float | None:
        """The highest sampled KV cache use, 0 to 1; None where it was not sampled."""
        return max((sample.kv_use for sample in self.samples if sample.kv_use is not None), default=None)


@dataclass(frozen=True)
class MemoryReader:
    """Reads the memory of the server's processes."""

    source: str
    """What is read: GPU memory or resident memory."""
    read: Callable[[], int | None]
    total_bytes: int | None = None


class LoadMonitor:
    """Scrapes /metrics at an interval until cancelled."""

    def __init__(
        self, server: ServerClient, interval_s: float, memory: MemoryReader | None, open_requests: Callable[[], int]
    ) -> None:
        self.samples: list[LoadSample] = []
        self.last: Sample | None = None
        self.problem = ""
        self._server, self._interval_s, self._memory = server, interval_s, memory
        self._open_requests = open_requests
        self._started_s = time.monotonic()
        self._memory_at = -_MEMORY_INTERVAL_S

    async def run(self) -> None:
        """Takes samples at the interval until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(self._interval_s)

    async def sample(self) -> Sample | None:
        """Scrapes the server once and records its figures; None if that fails, with the reason in `problem`."""
        try:
            sample = await scrape(self._server.session, self._server.metrics, 4.0)
        except ScrapeFailed as error:
            self.problem = error.message
            return None
        at = time.monotonic() - self._started_s
        memory = None
        if self._memory and at - self._memory_at >= _MEMORY_INTERVAL_S:
            self._memory_at, memory = at, self._memory.read()
        self.last = sample
        running, waiting, preemptions = sample.running or 0, sample.waiting or 0, sample.total("preemptions")
        own = self._open_requests()
        self.samples.append(LoadSample(at, sample.kv_use_max, running, waiting, preemptions, memory, own))
        return sample

    async def drained(self, limit_s: float = 15.0) -> bool:
        """Waits until the server has no request and takes a last sample; False after `limit_s` or a failed scrape."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            sample = await self.sample()
            if sample is None:
                return False
            if not sample.running and not sample.waiting:
                await asyncio.sleep(0.2)
                await self.sample()
                return True
            await asyncio.sleep(0.2)
        return False


def memory_reader(url: str) -> MemoryReader | None:
    """A reader of a local server's GPU memory (NVML), else resident memory; None where its processes are hidden."""
    pids = server_processes(port_of(url))
    if not pids:
        return None
    server_pids = frozenset(pids)
    cards = [card for card in nvml_devices() if any(pid in server_pids for pid, _ in card.processes)]
    if cards:
        total_bytes = sum(card.total_bytes for card in cards)
        return MemoryReader("GPU memory (NVML)", lambda: bytes_on_gpus_of(server_pids), total_bytes)
    return MemoryReader("resident memory of its processes", lambda: resident_bytes(pids))
