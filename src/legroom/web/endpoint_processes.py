"""API requests run in anyio's worker processes, which are killed when a request takes too long."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
from anyio import BrokenWorkerProcess, CapacityLimiter, to_process

from legroom.errors import UNREACHABLE, LegroomError
from legroom.isolation import isolated
from legroom.memo import Memo
from legroom.records import dataclass
from legroom.web.endpoints import BadRequest, answer, error_document
from legroom.web.schemas import check_request

_MAX_LOG_IN_MEMORY_BYTES = 16 << 20  # A longer log goes to a worker through a temporary file.
_request_numbers = count(1)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    workers: int = max(4, min(8, os.cpu_count() or 4))
    """Requests answered at once; more than the cores, so that short requests run beside long searches."""
    waiting: int = 1_000
    """Requests that may wait for a worker; more are refused."""
    wait_s: float = 60.0
    call_s: float = 60.0
    """Time a worker may take for a request before it is killed."""
    stream_s: float = 1_800.0
    """The same for a log of up to 4 GiB, its upload included."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    status: int
    """HTTP status."""
    body: bytes
    traceback: str = ""


class Refused(LegroomError):
    """A request beyond a limit; `status` is the HTTP status."""

    def __init__(self, status: int, message: str, hint: str) -> None:
        super().__init__(message, hint, UNREACHABLE)
        self.status = status


class EndpointProcesses:
    """Answers requests in at most `limits.workers` processes."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self._free: CapacityLimiter | None = None
        self.is_warm = asyncio.Event()
        """Set after the first answer or the end of the warm-up."""

    async def call(self, name: str, body: bytes, query: Mapping[str, str] | None = None) -> WorkerAnswer:
        """A worker's answer of the endpoint `name` to a JSON body and the URL's query parameters."""
        return await self._run_in_worker(self.limits.call_s, name, body, dict(query or {}))

    async def diagnose(self, query: Mapping[str, str], pieces: AsyncIterator[bytes]) -> WorkerAnswer:
        """The answer of `diagnose` to a log uploaded in pieces, `query` its options; Refused if it cannot be stored."""
        try:
            async with _spooled(pieces) as log:
                return await self._run_in_worker(self.limits.stream_s, "", log, dict(query))
        except OSError as error:
            raise Refused(422, f"the log could not be stored: {error.strerror}", "use legroom diagnose FILE") from None

    async def warm_up(self) -> None:
        """Makes one plan, so that a worker loads its modules before the first request."""
        with suppress(Refused):
            await self.call("plan", b'{"model": "llama-3.1-8b", "gpu": "h100"}')
        self.is_warm.set()

    async def _run_in_worker(
        self, limit_s: float, name: str, content: bytes | str, query: dict[str, str]
    ) -> WorkerAnswer:
        """`answer_request(name, content, query)` in a worker; Refused: 429 if too many wait, 422 beyond `limit_s`."""
        limits = self.limits
        self._free = free = self._free or CapacityLimiter(limits.workers)
        if free.statistics().tasks_waiting >= limits.waiting:
            raise Refused(429, "too many requests wait already", "try again in a moment")
        try:
            with anyio.fail_after(limits.wait_s):
                await free.acquire()
        except TimeoutError:
            raise Refused(429, "the server was busy for too long", "try again in a moment") from None
        try:
            with anyio.fail_after(limit_s):
                words, one = (name, content, query), CapacityLimiter(1)
                done = await to_process.run_sync(answer_request, *words, cancellable=True, limiter=one)
        except TimeoutError:
            hint = "ask for less, or use the command line"
            raise Refused(422, f"this takes longer than {limit_s:.0f} s", hint) from None
        except BrokenWorkerProcess:
            why = "the work ended unexpectedly, perhaps for lack of memory"
            raise Refused(422, why, "ask for less") from None
        finally:
            free.release()
        sys.stderr.write(done.traceback)
        self.is_warm.set()
        return done


@asynccontextmanager
async def _spooled(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes | str]:
    """Yields the bytes of a log given in pieces or, if it is long, the path of a temporary file, removed afterwards."""
    head = bytearray()
    async for piece in pieces:
        head += piece
        if len(head) > _MAX_LOG_IN_MEMORY_BYTES:
            break
    else:
        yield bytes(head)
        return
    with tempfile.NamedTemporaryFile(prefix="legroom-", suffix=".log") as file:
        file.write(head)
        async for piece in pieces:
            file.write(piece)
        file.flush()
        yield file.name


def answer_request(name: str, content: bytes | str, query: dict[str, str]) -> WorkerAnswer:
    """In a worker: the answer of endpoint `name` to JSON, or, for an empty name, the diagnosis of a log (or path)."""
    if next(_request_numbers) % 200 == 0:
        Memo.forget_everything()  # bounds what planning memoizes
    status, traceback_text = 200, ""
    given: dict[str, Any] = dict(query)
    if given.get("gpus", "").isdecimal():
        given["gpus"] = int(given["gpus"])
    try:
        problem = check_request("diagnose", {**given, "log": ""}) if given else ""
        if problem:
            raise BadRequest(f"the query is not of the form that diagnose takes: {problem[:300]}", "see /openapi.json")
        if name:
            assert isinstance(content, bytes)
            request = _parse_json(content)
            document = answer(name, {**given, **request} if isinstance(request, dict) else request)
        else:
            from legroom.web.endpoints.uploads import diagnose_pieces

            with isolated():
                document = diagnose_pieces(_log_pieces(content), given)
    except LegroomError as error:
        document = error_document(error)
        status = 400 if isinstance(error, BadRequest) else 424 if error.exit_code == UNREACHABLE else 422
    except Exception:
        import traceback

        traceback_text, status = traceback.format_exc(), 500
        bug = LegroomError("this is a bug in legroom, not in your input", "the server's terminal shows where", 70)
        document = error_document(bug)
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return WorkerAnswer(status, text.encode("utf-8", "replace"), traceback_text)


def _parse_json(body: bytes) -> Any:
    """The parsed body; BadRequest where it is not JSON (NaN and Infinity are not)."""

    def refuse_constant(name: str) -> None:
        """Raises ValueError for NaN and Infinity, which are not JSON."""
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON", "send one JSON object") from None


def _log_pieces(content: bytes | str) -> Iterator[bytes]:
    """The log itself where it is bytes, else the file at that path in pieces of 1 MiB."""
    if isinstance(content, bytes):
        yield content
        return
    with Path(content).open("rb") as file:
        while piece := file.read(1 << 20):
            yield piece
