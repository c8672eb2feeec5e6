"""Searches for flags that fix an object: one after another, each object once, and never too many that wait."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from legroom.gate.judgement import Judgement

Part = Mapping[str, Any]


class SearchQueue:
    """Where too many wait, the oldest is dropped: whoever asked for it has most likely gone, or asks again."""

    def __init__(
        self, search: Callable[[bytes, Part], Awaitable[Judgement]], dropped: Callable[[bytes], None], most: int
    ) -> None:
        self._search, self._dropped, self._most = search, dropped, most
        self._parts: OrderedDict[bytes, Part] = OrderedDict()
        """Those that wait, the oldest first."""
        self._results: dict[bytes, asyncio.Future[Judgement | None]] = {}
        """Of those that wait and of the one that is under way."""
        self._worker: asyncio.Task[None] | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self._results

    def ask(self, key: bytes, part: Part) -> asyncio.Future[Judgement | None]:
        """What the search for this object ends with, already asked for or not; None where it is dropped."""
        if key not in self._results:
            self._results[key] = asyncio.get_running_loop().create_future()
            self._parts[key] = part
            if len(self._parts) > self._most:
                oldest, _ = self._parts.popitem(last=False)
                self._dropped(oldest)
                self._end(oldest, None)
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._work())
        return self._results[key]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()

    async def _work(self) -> None:
        while self._parts:
            key, part = self._parts.popitem(last=False)
            result: Judgement | None = None
            try:
                result = await self._search(key, part)
            finally:
                self._end(key, result)

    def _end(self, key: bytes, result: Judgement | None) -> None:
        future = self._results.pop(key)
        if not future.done():
            future.set_result(result)
