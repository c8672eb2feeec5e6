"""The worker processes behind the endpoints: how many, how long each may take, and how many may wait."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from legroom.errors import UNREACHABLE, LegroomError
from legroom.records import dataclass
from legroom.web.worker import CALL, END, HEADER, PIECE, STATUS, STREAM

_LARGEST_ANSWER_BYTES = 256 << 20
_CALLS_A_WORKER = 5_000
"""Then a fresh one takes over, so that no cache grows for ever."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What the machine gives to requests."""

    workers: int = max(4, min(8, os.cpu_count() or 4))
    """More than there are cores: a long search must not keep a slider waiting."""
    waiting: int = 1_000
    """Requests that may wait for a worker; more are refused at once."""
    wait_s: float = 60.0
    call_s: float = 60.0
    """From when a worker has it to when it has answered."""
    stream_s: float = 1_800.0


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    status: int
    body: bytes


class Refused(LegroomError):
    """A request that was not carried out because of a limit; `status` is HTTP's."""

    def __init__(self, status: int, message: str, hint: str) -> None:
        super().__init__(message, hint, UNREACHABLE)
        self.status = status


class _Worker:
    """One process and how much it has done."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.process, self._to, self._from = process, process.stdin, process.stdout
        self.calls = 0

    async def send(self, kind: bytes, body: bytes) -> None:
        self._to.write(HEADER.pack(kind, len(body)))
        self._to.write(body)
        await self._to.drain()

    async def answer(self) -> WorkerAnswer:
        status, length = STATUS.unpack(await self._from.readexactly(STATUS.size))
        if length > _LARGEST_ANSWER_BYTES:
            raise Refused(413, "the answer is too large to send", "ask for less")
        return WorkerAnswer(status, await self._from.readexactly(length))

    async def end(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


class WorkerPool:
    """Calls in, answers out. A worker that fails or runs out of time is replaced."""

    def __init__(self, limits: WorkerLimits | None = None, module: str = "legroom.web.worker") -> None:
        self.limits = limits or WorkerLimits()
        self._module = module
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._free = asyncio.Semaphore(self.limits.workers)
        self._waiting = 0
        self.is_warm = asyncio.Event()
        """Something has been answered, or the warm-up is over."""

    async def call(self, name: str, body: bytes, query: Mapping[str, str] | None = None) -> WorkerAnswer:
        """The answer to one whole request; `query` is what its address says beside it."""
        async with self._worker(self.limits.call_s) as worker:
            await worker.send(CALL, _head(name, query) + body)
            return await worker.answer()

    async def diagnose(self, query: Mapping[str, str], pieces: AsyncIterator[bytes]) -> WorkerAnswer:
        """The diagnosis of a log that comes in pieces, none of which is kept."""
        async with self._worker(self.limits.stream_s) as worker:
            await worker.send(STREAM, _head("diagnose", query))
            async for piece in pieces:
                await worker.send(PIECE, piece)
            await worker.send(END, b"")
            return await worker.answer()

    async def warm_up(self) -> None:
        """Have a worker load what a plan needs before the first visitor asks for one."""
        request = {"model": "llama-3.1-8b", "gpu": "h100"}
        with suppress(LegroomError):
            await self.call("plan", json.dumps(request).encode())
        self.is_warm.set()

    async def close(self) -> None:
        await asyncio.gather(*(worker.end() for worker in [*self._idle, *self._busy]))
        self._idle.clear()

    @asynccontextmanager
    async def _worker(self, limit_s: float) -> AsyncIterator[_Worker]:
        await self._wait_for_turn()
        try:
            worker = self._idle.pop() if self._idle else await _start(self._module)
            self._busy.add(worker)
            try:
                async with asyncio.timeout(limit_s):
                    yield worker
            except BaseException as error:
                await asyncio.shield(worker.end())
                raise _told(error, limit_s) from error
            finally:
                self._busy.discard(worker)
            self.is_warm.set()
            worker.calls += 1
            if worker.calls < _CALLS_A_WORKER:
                self._idle.append(worker)
            else:
                await worker.end()
        finally:
            self._free.release()

    async def _wait_for_turn(self) -> None:
        if self._waiting >= self.limits.waiting:
            raise Refused(429, "too many requests wait already", "try again in a moment")
        self._waiting += 1
        try:
            async with asyncio.timeout(self.limits.wait_s):
                await self._free.acquire()
        except TimeoutError:
            raise Refused(429, "the server was busy for too long", "try again in a moment") from None
        finally:
            self._waiting -= 1


def _told(error: BaseException, limit_s: float) -> BaseException:
    if isinstance(error, TimeoutError):
        return Refused(422, f"this takes longer than {limit_s:.0f} s", "ask for less, or use the command line")
    if isinstance(error, (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError)):
        return Refused(422, "the work ended unexpectedly, perhaps for lack of memory", "ask for less")
    return error


def _head(name: str, query: Mapping[str, str] | None) -> bytes:
    return f"{name} {json.dumps(dict(query))}\n".encode() if query else f"{name}\n".encode()


async def _start(module: str) -> _Worker:
    words = (sys.executable, "-m", module)
    return _Worker(await asyncio.create_subprocess_exec(*words, stdin=PIPE, stdout=PIPE, start_new_session=True))
