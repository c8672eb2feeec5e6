"""The requests of a workload, one column per property."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf, isfinite
from typing import Any, NamedTuple

from legroom.errors import LegroomError
from legroom.units import round_up

NO_PREFIX = -1


class TraceRequest(NamedTuple):
    """One row of a trace."""

    id: str
    arrival: float
    prompt_len: int
    output_len: int
    prefix: tuple[tuple[str, int, int], ...] = ()
    """The shared start of the prompt: names for `stream_tokens`, each with the range of tokens that is used."""
    priority: int = 0


THINK_S = 30.0
"""Between the 7 s of TPC-W's shoppers and the minute that reading an answer of 300 tokens takes."""


@dataclass(frozen=True)
class Users:
    """People who each wait for an answer, think (`think_s` on average), and ask again."""

    count: int
    think_s: float = THINK_S

    def rate(self, answer_s: float) -> float:
        """Requests a second that all users send together if each answer takes `answer_s` seconds."""
        return self.count / (self.think_s + answer_s)


@dataclass
class Trace:
    """Columns rather than objects: a million requests take tens of megabytes."""

    name: str = "trace"
    in_seconds: bool = False
    """Whether `arrivals` are seconds (step times are estimated) or scheduler steps (exact)."""
    ids: list[str] | None = None
    """None: `r0`, `r1`, ... in the order of the file."""
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    prompt_lens: array[int] = field(default_factory=lambda: array("q"))
    output_lens: array[int] = field(default_factory=lambda: array("q"))
    priorities: array[int] = field(default_factory=lambda: array("q"))
    prefix_groups: array[int] = field(default_factory=lambda: array("q"))
    """Index into `prefix_names`, or NO_PREFIX."""
    prefix_lens: array[int] = field(default_factory=lambda: array("q"))
    prefix_names: list[str] = field(default_factory=list)
    prefix_parents: list[tuple[int, int]] = field(default_factory=list)
    """Per prefix: the prefix it begins with (or NO_PREFIX) and for how many tokens."""
    users: Users | None = None
    """Set where arrivals follow from the answers: each asks again after one, so no more run or wait than there are."""
    engines: int = 1
    """Data-parallel engines that share the load evenly; the trace is what one of them gets."""
    _group_of: dict[str, int] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def longest(self) -> int:
        """Prompt and output tokens of the longest request together; 1 for an empty trace."""
        return max(map(sum, zip(self.prompt_lens, self.output_lens, strict=True)), default=1)

    def add(
        self,
        prompt_len: int,
        output_len: int,
        arrival: float = 0,
        *,
        request_id: str | None = None,
        prefix_id: str | None = None,
        prefix_len: int = 0,
        priority: int = 0,
    ) -> None:
        """Appends a request arriving at `arrival` (s or step); those of a `prefix_id` share `prefix_len` tokens."""
        if request_id is not None and self.ids is None:
            self.ids = [f"r{i}" for i in range(len(self))]
        if self.ids is not None:
            self.ids.append(f"r{len(self)}" if request_id is None else request_id)
        group = NO_PREFIX
        if prefix_len > 0:
            # A prefix without a name is not shared.
            name = prefix_id if prefix_id is not None else self.id_of(len(self))
            known = self._group_of.get(name)
            group = self.add_prefix(name) if known is None else known
        self.arrivals.append(arrival)
        self.prompt_lens.append(prompt_len)
        self.output_lens.append(output_len)
        self.priorities.append(priority)
        self.prefix_groups.append(group)
        self.prefix_lens.append(min(prefix_len, prompt_len))

    def add_prefix(self, name: str, parent: int = NO_PREFIX, parent_len: int = 0) -> int:
        """Adds a shared prefix that begins with the first `parent_len` tokens of prefix number `parent`; its number."""
        group = self._group_of[name] = len(self.prefix_names)
        self.prefix_names.append(name)
        self.prefix_parents.append((parent, parent_len))
        return group

    def prefix_segments(self, group: int, length: int) -> list[tuple[str, int, int]]:
        """The first `length` tokens of prefix number `group`, as (name for `stream_tokens`, from, to) in order."""
        segments: list[tuple[str, int, int]] = []
        while length > 0:
            parent, parent_len = self.prefix_parents[group]
            start = min(parent_len, length)
            if start < length:
                segments.append((self.prefix_names[group], start, length))
            group, length = parent, start
        return segments[::-1]

    def id_of(self, index: int) -> str:
        """The request's own id; "r" and its index where the trace has none."""
        return f"r{index}" if self.ids is None else self.ids[index]

    def rows(self) -> Iterator[TraceRequest]:
        """Each request as a `TraceRequest`, in trace order."""
        for i in range(len(self)):
            group = self.prefix_groups[i]
            prefix = tuple(self.prefix_segments(group, self.prefix_lens[i])) if group != NO_PREFIX else ()
            yield TraceRequest(
                self.id_of(i), self.arrivals[i], self.prompt_lens[i], self.output_lens[i], prefix, self.priorities[i]
            )

    def checked(self) -> Trace:
        """This trace in order of arrival; LegroomError where it is empty or lengths, arrivals or ids are invalid."""
        if not len(self):
            raise LegroomError(f"{self.name} holds no requests")
        for name, column, minimum in (
            ("prompt_len", self.prompt_lens, 1),
            ("output_len", self.output_lens, 1),
            ("prefix_len", self.prefix_lens, 0),
            ("arrival", self.arrivals, 0),
        ):
            _check_column(self, name, column, minimum)
        if self.ids is not None and len(set(self.ids)) != len(self.ids):
            seen: set[str] = set()
            twice = next(name for name in self.ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise LegroomError(f"{self.name} uses the id {twice!r} twice", "ids tell requests apart: make them unique")
        arrivals = self.arrivals
        if all(arrivals[i] <= arrivals[i + 1] for i in range(len(arrivals) - 1)):
            return self
        return self.reordered(sorted(range(len(self)), key=arrivals.__getitem__))

    @property
    def arrives_at_once(self) -> bool:
        """Whether all requests arrive at the same time, so that there is no arrival rate."""
        return self.arrivals[0] == self.arrivals[-1]

    @property
    def requests_per_s(self) -> float:
        """The mean rate of arrivals; 0 where all arrive at once."""
        duration = self.arrivals[-1] - self.arrivals[0]
        return (len(self) - 1) / duration if duration else 0.0

    def faster(self, factor: float) -> Trace:
        """The same requests, arriving `factor` times as fast; users pause for 1/`factor` of the time."""
        users = self.users and replace(self.users, think_s=self.users.think_s / factor)
        return replace(self, arrivals=array("d", (at / factor for at in self.arrivals)), users=users)

    def first_questions(self, accepted: Sequence[int]) -> tuple[Trace, int, Sequence[float]]:
        """(the trace where only the users' first requests arrive, others at infinity; how many arrive; the pause in
        seconds before each). Without users (the trace, all, none). `accepted`: per request 1 if it can be served."""
        if not self.users:
            return self, len(self), ()
        asked = next((i for i, sofar in enumerate(accumulate(accepted), 1) if sofar == self.users.count), len(self))
        rng = random.Random(asked)
        # Exponential pauses: equal ones would keep together the users who were answered together.
        pauses_s = [rng.expovariate(1 / self.users.think_s) for _ in range(len(self))]
        arrivals = array("d", [*sorted(pauses_s[:asked]), *[inf] * (len(self) - asked)])
        return replace(self, arrivals=arrivals), asked, pauses_s

    def shares(self, replicas: int, most: int) -> Iterator[Trace]:
        """The requests of each of `replicas` servers, dealt in turn; of more than `most` servers an even sample."""
        if replicas == 1:
            yield self
            return
        for number in range(sampled := min(replicas, most, len(self))):
            server = number * replicas // sampled
            users = self.users and replace(self.users, count=-(-max(1, self.users.count - server) // replicas))
            yield replace(self.reordered(range(server, len(self), replicas)), users=users)

    def of_engine(self, engines: int) -> Trace:
        """The part of the trace that the first of `engines` data-parallel engines gets."""
        return replace(next(self.shares(engines, 1)), engines=engines)

    def repeated(self, times: int) -> Trace:
        """The trace `times` times in a row; requests of each round have their own prompt after the shared prefix."""
        count = len(self)
        longer = self.reordered([*range(count)] * times)
        # The pause between two rounds is the mean gap within them.
        duration = (self.arrivals[-1] - self.arrivals[0]) * count / max(1, count - 1)
        longer.ids = [f"{name}/{i // count}" for i, name in enumerate(longer.ids or ())]
        longer.arrivals = array("d", (at + i // count * duration for i, at in enumerate(longer.arrivals)))
        return longer

    def reordered(self, order: Sequence[int]) -> Trace:
        """A copy with the requests at these indices, in this order; each keeps its id."""
        names = ("arrivals", "prompt_lens", "output_lens", "priorities", "prefix_groups", "prefix_lens")
        columns = {name: getattr(self, name) for name in names}
        taken: dict[str, Any] = {
            name: array(column.typecode, (column[i] for i in order)) for name, column in columns.items()
        }
        return replace(self, ids=[self.id_of(i) for i in order], **taken)


def _check_column(trace: Trace, name: str, column: Sequence[float], minimum: int) -> None:
    """Raises LegroomError, naming field `name` and request, if a value is below `minimum` or not finite."""
    # The sum detects NaN and infinity, which min() may miss.
    if min(column) >= minimum and isfinite(sum(column)):
        return
    row = next((i for i, value in enumerate(column) if not minimum <= value < inf), None)
    if row is None:
        raise LegroomError(f"{trace.name}: {name} is too large to add up", "fix the trace")
    raise LegroomError(
        f"{trace.name}: request {row + 1} ({trace.id_of(row)}) has {name} {column[row]:g}; "
        f"it must be at least {minimum} and finite",
        "drop the request from the trace or fix it",
    )


SAMPLED_TOKEN = 7
_HIGH_BYTE = bytes(1 + value % 7 for value in range(256))  # Tokens are 256 to 2,047: ordinary ones of every vocabulary.


def stream_tokens(name: str, length: int) -> list[int]:
    """The first `length` pseudo-random token ids of a named stream; the same name gives the same ids."""
    words = round_up(length, 4)  # randbytes draws whole words of 4 bytes, the first ones first
    tokens = bytearray(2 * words)
    tokens[::2] = random.Random(name).randbytes(words)
    tokens[1::2] = random.Random(f"high {name}").randbytes(words).translate(_HIGH_BYTE)
    return [*struct.unpack(f"<{words}H", tokens)][:length]


def prompt_tokens(request: TraceRequest) -> list[int]:
    """Made-up token ids of the prompt; requests with the same prefix begin with the same ids."""
    shared = [token for name, start, end in request.prefix for token in stream_tokens("P" + name, end)[start:]]
    return shared + stream_tokens("U" + request.id, request.prompt_len - len(shared))


class BlockHasher:
    """Numbers the content of blocks: equal numbers mean equal tokens from the start of the sequence."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}

    def extend(self, hashes: list[int], tokens: list[int]) -> None:
        """Appends a hash for every full block of `tokens` after those that `hashes` already has."""
        while (len(hashes) + 1) * self.block_size <= len(tokens):
            start = len(hashes) * self.block_size
            content = (hashes[-1] if hashes else -1, tuple(tokens[start : start + self.block_size]))
            hashes.append(self._names.setdefault(content, len(self._names)))
