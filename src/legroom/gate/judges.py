"""Judgements by what decides them: made once by a worker process, then remembered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.gate.judgement import Judgement, Search
from legroom.gate.search_queue import SearchQueue
from legroom.gate.shared_judgements import SharedJudgements
from legroom.records import dataclass
from legroom.web.pool import WorkerLimits, WorkerPool

_REMEMBERED = 4_096
"""Objects; a judgement is some hundred characters."""
_WORKER = "legroom.gate.judge_worker"
_AT_ONCE_S = 0.036
"""What an answer may take before it is given without the flags that fix it: a promise of 50 ms, less the way there."""
_TRIES_S = 0.03
"""Within which another single change is tried: one takes ten milliseconds."""
_LONGEST_SEARCH_S = 60.0
"""On a core that others may want first."""
_LOOK_S = 0.01
_GIVEN_UP = "The search for flags that fix it took too long here: legroom gate --try does it without a limit."


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """What judgements depend on beside the object."""

    default_gpu: str = ""
    hub: bool = False
    deadline_s: float = 4.0
    """When Kubernetes has its answer, one way or the other."""
    wait_s: float = 0.0
    """How long a refusal waits for the flags that fix it; 0: as long as an answer is given at once."""
    workers: int = 2
    waiting: int = 256
    searches: int = 64
    """That may wait; then the oldest is dropped."""


class Undecided(Exception):
    """No judgement in time, or none at all; `reason` is a metric's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Judges:
    """Asks a worker where the answer is not known yet. Who asks for the same at the same time waits for one answer."""

    def __init__(
        self,
        options: JudgeOptions,
        shared: SharedJudgements | None = None,
        count: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._options, self._shared, self._count = options, shared or SharedJudgements(), count
        # A judgement that comes too late for its asker is still worth having for the next one.
        limits = WorkerLimits(options.workers, options.waiting, wait_s=30.0, call_s=30.0)
        self._pool = WorkerPool(limits, _WORKER)
        # No verdict waits for another object's search.
        self._search_pool = WorkerPool(replace(limits, workers=1, call_s=_LONGEST_SEARCH_S), _WORKER)
        self._searches = SearchQueue(self._search, self._dropped, options.searches)
        self._known: OrderedDict[bytes, Judgement] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Judgement]] = {}

    def known(self, part: Mapping[str, Any]) -> tuple[bytes, Judgement | None]:
        """The key of an object's deciding part, and its judgement where it is remembered."""
        key = hashlib.sha256(json.dumps(part, sort_keys=True, separators=(",", ":")).encode()).digest()
        judgement = self._known.get(key)
        if judgement is None or not judgement.is_searched:
            shared = self._shared.get(key)
            if shared is None:
                return key, judgement
            judgement = self._known[key] = shared.judgement
        self._known.move_to_end(key)
        return key, judgement

    async def decide(self, key: bytes, part: Mapping[str, Any]) -> Judgement:
        """The judgement within the deadline, or `Undecided`: with the flags that fix it if they are there at once, or
        within what was chosen to wait for them; otherwise it is not searched, and the search goes on."""
        began_s = time.monotonic()
        judgement, at_once_s = self._known.get(key), 0.0
        if judgement is None:
            judgement = await self._verdict(key, part, began_s + _TRIES_S)
            at_once_s = 0.0 if judgement.has_fixes else _AT_ONCE_S
        if judgement.is_searched:
            return judgement
        wait_s = max(self._options.wait_s, at_once_s)
        until_s = began_s + min(wait_s, self._options.deadline_s)
        return await self._searched(key, part, judgement, until_s) or judgement

    async def _verdict(self, key: bytes, part: Mapping[str, Any], answer_by_s: float) -> Judgement:
        task = self._under_way.get(key)
        if task is None:
            if len(self._under_way) >= self._options.waiting:
                raise Undecided("overload")
            task = self._under_way[key] = asyncio.create_task(self._judge(key, part, answer_by_s))
            task.add_done_callback(lambda done: self._ended(key, done))
        try:
            return await asyncio.wait_for(asyncio.shield(task), self._options.deadline_s)
        except TimeoutError:
            raise Undecided("timeout") from None
        except LegroomError:
            raise Undecided("error") from None

    async def _searched(
        self, key: bytes, part: Mapping[str, Any], judgement: Judgement, until_s: float
    ) -> Judgement | None:
        """What a search ends with, this process's own or another's; None where it lasts longer than `until_s`."""
        now_s = time.monotonic()
        shared = self._shared.get(key)
        if shared is not None and shared.searched_until_s > now_s and key not in self._searches:
            return await self._searched_elsewhere(key, until_s)
        if key not in self._searches:
            self._shared.put(key, judgement, now_s + _LONGEST_SEARCH_S)
        search = self._searches.ask(key, part)
        with suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(search), max(until_s - now_s, 0.0))
        return None

    async def _searched_elsewhere(self, key: bytes, until_s: float) -> Judgement | None:
        while (now_s := time.monotonic()) < until_s:
            await asyncio.sleep(min(_LOOK_S, until_s - now_s))
            shared = self._shared.get(key)
            if shared is not None and shared.judgement.is_searched:
                return shared.judgement
        return None

    async def warm_up(self) -> None:
        """Have every worker started, which loads what a plan needs, before the first object comes."""
        await asyncio.gather(*(self._ask(self._pool, {}, "quick") for _ in range(self._options.workers)))

    async def warm_up_search(self) -> None:
        await self._ask(self._search_pool, {}, "whole")

    async def close(self) -> None:
        self._searches.close()
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(self._pool.close(), self._search_pool.close())

    async def _judge(self, key: bytes, part: Mapping[str, Any], answer_by_s: float) -> Judgement:
        """The verdict, with a single change that fixes it where one is seen in time."""
        judgement = await self._ask(self._pool, part, "quick", answer_by_s)
        self._remember(key, judgement)
        return judgement

    async def _search(self, key: bytes, part: Mapping[str, Any]) -> Judgement:
        """The verdict with whatever it takes to fix it; the verdict stands, whatever becomes of the search."""
        try:
            judgement = await self._ask(self._search_pool, part, "whole")
        except LegroomError:
            verdict = self._known.get(key) or Judgement("not_understood")
            judgement = replace(verdict, sentences=(*verdict.sentences, _GIVEN_UP), is_searched=True)
        self._remember(key, judgement)
        return judgement

    def _dropped(self, key: bytes) -> None:
        """Too many searches wait: this one begins anew when somebody asks again."""
        self._count("searches_dropped")
        if (verdict := self._known.get(key)) is not None:
            self._shared.put(key, verdict)

    async def _ask(
        self, pool: WorkerPool, part: Mapping[str, Any], search: Search, answer_by_s: float = math.inf
    ) -> Judgement:
        options = self._options
        request = {
            "object": part,
            "default_gpu": options.default_gpu,
            "search": search,
            "hub": options.hub,
            "answer_by_s": answer_by_s,
        }
        answer = await pool.call("judge", json.dumps(request).encode())
        if answer.status != 200:
            raise LegroomError("the object could not be judged", "the gate's log shows where")
        return Judgement.from_record(json.loads(answer.body))

    def _remember(self, key: bytes, judgement: Judgement) -> None:
        if self._options.hub and judgement.outcome == "not_understood":
            return  # the Hub may answer the next time
        self._known[key] = judgement
        self._shared.put(key, judgement)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _ended(self, key: bytes, done: asyncio.Task[Judgement]) -> None:
        self._under_way.pop(key, None)
        if not done.cancelled():
            done.exception()  # told to who asked, if anybody still does
