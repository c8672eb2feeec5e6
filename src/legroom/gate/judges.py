"""Judgements by what decides them: made once by a worker process, then remembered."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.gate.judgement import Judgement, Search
from legroom.records import dataclass
from legroom.web.pool import WorkerLimits, WorkerPool

_REMEMBERED = 4_096
"""Objects; a judgement is some hundred characters."""
_WORKER = "legroom.gate.judge_worker"


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """What judgements depend on beside the object."""

    default_gpu: str = ""
    hub: bool = False
    deadline_s: float = 4.0
    """When Kubernetes has its answer, one way or the other."""
    workers: int = 2
    waiting: int = 256


class Undecided(Exception):
    """No judgement in time, or none at all; `reason` is a metric's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Judges:
    """Asks a worker where the answer is not known yet. Who asks for the same at the same time waits for one answer."""

    def __init__(self, options: JudgeOptions) -> None:
        self._options = options
        # A judgement that comes too late for its asker is still worth having for the next one.
        limits = WorkerLimits(options.workers, options.waiting, wait_s=30.0, call_s=30.0)
        self._pool = WorkerPool(limits, _WORKER)
        # No verdict waits for another object's search.
        self._search_pool = WorkerPool(replace(limits, workers=1), _WORKER)
        self._known: OrderedDict[bytes, Judgement] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Judgement]] = {}

    def known(self, part: Mapping[str, Any]) -> tuple[bytes, Judgement | None]:
        """The key of an object's deciding part, and its judgement where it is remembered."""
        key = hashlib.sha256(json.dumps(part, sort_keys=True, separators=(",", ":")).encode()).digest()
        judgement = self._known.get(key)
        if judgement is not None:
            self._known.move_to_end(key)
        return key, judgement

    async def decide(self, key: bytes, part: Mapping[str, Any]) -> Judgement:
        """The judgement within the deadline, or `Undecided`."""
        task = self._under_way.get(key)
        if task is None:
            if len(self._under_way) >= self._options.waiting:
                raise Undecided("overload")
            task = self._under_way[key] = asyncio.create_task(self._judge(key, part))
            task.add_done_callback(lambda done: self._ended(key, done))
        try:
            return await asyncio.wait_for(asyncio.shield(task), self._options.deadline_s)
        except TimeoutError:
            if key in self._known:
                return self._known[key]  # the verdict is there, and only the search for a fix takes longer
            raise Undecided("timeout") from None
        except LegroomError:
            raise Undecided("error") from None

    async def warm_up(self) -> None:
        """Have every worker started, which loads what a plan needs, before the first object comes."""
        await asyncio.gather(*(self._ask(self._pool, {}, "quick") for _ in range(self._options.workers)))

    async def warm_up_search(self) -> None:
        await self._ask(self._search_pool, {}, "whole")

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await asyncio.gather(self._pool.close(), self._search_pool.close())

    async def _judge(self, key: bytes, part: Mapping[str, Any]) -> Judgement:
        """The verdict at once, with a single change that fixes it; where it takes several, that may be seconds."""
        judgement = await self._ask(self._pool, part, "quick")
        self._remember(key, judgement)
        if not judgement.is_searched:
            with suppress(LegroomError):  # the verdict stands, whatever becomes of the search
                judgement = await self._ask(self._search_pool, part, "whole")
                self._remember(key, judgement)
        return judgement

    async def _ask(self, pool: WorkerPool, part: Mapping[str, Any], search: Search) -> Judgement:
        options = self._options
        request = {"object": part, "default_gpu": options.default_gpu, "search": search, "hub": options.hub}
        answer = await pool.call("judge", json.dumps(request).encode())
        if answer.status != 200:
            raise LegroomError("the object could not be judged", "the gate's log shows where")
        return Judgement.from_json(json.loads(answer.body))

    def _remember(self, key: bytes, judgement: Judgement) -> None:
        if self._options.hub and judgement.outcome == "not_understood":
            return  # the Hub may answer the next time
        self._known[key] = judgement
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _ended(self, key: bytes, done: asyncio.Task[Judgement]) -> None:
        self._under_way.pop(key, None)
        if not done.cancelled():
            done.exception()  # told to who asked, if anybody still does
