"""The verification itself: step by step, bounded in count and time, and undone cleanly when interrupted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import endpoint, is_loopback
from legroom.live.metrics.sample import Sample
from legroom.live.metrics.scrape import ScrapeFailed, scrape
from legroom.records import dataclass
from legroom.verify.checks import (
    Check,
    LoadRun,
    PassCriteria,
    PlannedPool,
    Verification,
    context_as_planned,
    load_checks,
    pool_as_planned,
)
from legroom.verify.load import KvPool, Load, LoadRequest, read_load, safe_concurrency, token_ids
from legroom.verify.sampling import LoadMonitor, MemoryReader, memory_of
from legroom.verify.server import RequestOutcome, ServedModel, ServerClient
from legroom.verify.smoke_test import POOLING_ENDPOINTS

FULL_CONTEXT_ANSWER = 16
"""Tokens generated at the full context: enough to decode at the very end of the window."""
_UNKNOWN_CONTEXT = 2048
_MOST_CONCURRENCY = 64
"""Without a plan the batch limit of the server is not known: more than this is for the user to ask for."""
_DRAWN_LENGTHS = 400
_TIME_IS_UP = "not answered within the time of this verification (--timeout)"
_LOCAL_LOOK_S, _REMOTE_LOOK_S = 0.25, 1.0
Progress = Callable[[float], None]


@dataclass(frozen=True)
class VerificationRequest:
    """What to verify, and how hard."""

    url: str
    api_key: str | None = None
    planned: PlannedPool | None = None
    load: str = "chat"
    concurrency: int | None = None
    requests: int | None = None
    timeout_s: float = 600.0
    seed: int = 0
    limits: PassCriteria = PassCriteria()
    verify_tls: bool = True
    load_remote: bool = False


def verify(request: VerificationRequest, progress: Progress | None = None) -> Verification:
    """Verify a server. Ctrl-C ends the open requests and gives what was seen so far."""
    endpoint(request.url)  # what is no address at all is said first
    if not is_loopback(request.url) and not request.load_remote:
        raise LegroomError(
            "the server is not on this machine, and a verification loads it as far as it goes",
            "say --yes-load-remote if nobody else depends on it now",
        )
    read_load(
        request.load, _UNKNOWN_CONTEXT, _drawn(request), request.seed
    )  # bad news first: before the server is asked
    return asyncio.run(_verify(request, progress or (lambda share: None)))


def _drawn(request: VerificationRequest) -> int:
    """How many lengths of the load are looked at, at least."""
    return max(request.requests or 0, _DRAWN_LENGTHS)


async def _verify(request: VerificationRequest, progress: Progress) -> Verification:
    async with ServerClient(request.url, request.api_key, request.verify_tls) as server:
        return await _VerificationRun(request, server, progress).result()


class _VerificationRun:
    def __init__(self, request: VerificationRequest, server: ServerClient, progress: Progress) -> None:
        self.request, self.server, self.progress = request, server, progress
        self.until = time.monotonic() + request.timeout_s
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.served: ServedModel | None = None
        self.pool: KvPool | None = None
        self.load: LoadRun | None = None
        self.memory: MemoryReader | None = None
        self.interrupted = False
        """By the user."""

    async def result(self) -> Verification:
        """All steps, as far as they go."""
        try:
            await self._steps()
        except asyncio.CancelledError:
            self.interrupted = True
            self.notes.append("interrupted: open requests were ended, what follows is what was seen until then")
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            if self.load is None:
                self.checks.append(Check("load", False, "interrupted before it began"))
        what = self.memory.what if self.memory else ""
        return Verification(
            self.server.url,
            self.served,
            self.pool,
            tuple(self.checks),
            self.load,
            what,
            tuple(self.notes),
            self.interrupted,
        )

    async def _steps(self) -> None:
        self.served = await self.server.served()
        context = self.served.max_model_len or _UNKNOWN_CONTEXT
        length = f"{context:,} tokens of context" if self.served.max_model_len else "it does not say its context"
        self.checks.append(Check("health", True, f"up, serves {self.served.model}; {length}"))
        sample = await self._first_look()
        self.pool = _pool(sample, context) if sample else None
        self._against_plan(self.served)
        if not await self._one_completion() or not await self._full_context():
            return
        await self._loaded(context)

    def _against_plan(self, served: ServedModel) -> None:
        planned = self.request.planned
        evaluated = (pool_as_planned(self.pool, planned), context_as_planned(served.max_model_len, planned))
        self.checks += (check for check in evaluated if check is not None)
        # Not judged: --served-model-name gives a model any name.
        if planned and planned.model and not _same_name(planned.model, served.model):
            self.notes.append(f"the plan is for {planned.model}, the server calls its model {served.model}")

    async def _first_look(self) -> Sample | None:
        try:
            sample = await scrape(self.server.session, self.server.metrics)
        except ScrapeFailed as error:
            self.notes.append(f"no metrics, so neither KV use nor preemptions are seen: {error.message}")
            return None
        if (sample.running or 0) + (sample.waiting or 0) > 0:
            self.notes.append("the server is busy with other requests: what they take is in the figures")
        return sample

    async def _one_completion(self) -> bool:
        assert self.served is not None
        await self.server.learn_vocabulary(self.served.model)
        outcome = await self._send(LoadRequest(8, 4), 1)
        if outcome.refusal is not None and outcome.refusal.is_unserved:
            await self._pooling()
            return False
        if outcome.refusal is not None and outcome.refusal.status in (400, 422):
            by_ids = outcome.error
            outcome = await self.server.learn_text(self.served.model)
            if outcome.ok:
                self.notes.append(
                    f"the server takes no token ids ({by_ids}): lengths are those of text, about 2 % short"
                )
        tokens = "1 token" if outcome.output_tokens == 1 else f"{outcome.output_tokens} tokens"
        text = f"{tokens} in {outcome.total_s:.2f} s" if outcome.ok else outcome.error
        self.checks.append(Check("completion", outcome.ok, text))
        return outcome.ok

    async def _pooling(self) -> None:
        """A pooling model completes nothing: it is asked for what it serves, and its load is not made."""
        assert self.served is not None
        self.checks.append(Check("completion", None, "not judged: it serves no completions"))
        for name, path in POOLING_ENDPOINTS.items():
            outcome = await self._pooled(path, 8)
            check = Check(name, outcome.ok, _took(outcome, 8))
            if outcome.refusal is None or not outcome.refusal.is_unserved:
                break
        self.checks.append(check)
        length = self.served.max_model_len
        if outcome.ok and length is not None:
            self._judge_full_context(await self._pooled(path, length), length)
        if outcome.ok:
            self.checks.append(Check("load", None, "not judged: a load is made of completions"))

    async def _pooled(self, path: str, length: int) -> RequestOutcome:
        assert self.served is not None
        prompt = token_ids(LoadRequest(length, 0), self.server.vocabulary, 1)
        try:
            async with asyncio.timeout(max(0.0, self.until - time.monotonic())):
                return await self.server.pooled(path, self.served.model, prompt)
        except TimeoutError:
            return RequestOutcome(error=_TIME_IS_UP)

    async def _full_context(self) -> bool:
        assert self.served is not None
        length = self.served.max_model_len
        if length is None:
            self.checks.append(Check("full context", None, "not tried: the server does not say its context"))
            return True
        answer = min(FULL_CONTEXT_ANSWER, max(1, length // 4))
        outcome = await self._send(LoadRequest(length - answer, answer), 2)
        total = outcome.prompt_tokens + outcome.output_tokens
        if outcome.ok and self.server.takes_ids and total != length:
            outcome = RequestOutcome(error=f"{total:,} of {length:,} tokens were taken", total_s=outcome.total_s)
        return self._judge_full_context(outcome, total)

    def _judge_full_context(self, outcome: RequestOutcome, tokens: int) -> bool:
        """Whether to go on."""
        by_guard = outcome.refusal is not None and outcome.refusal.is_by_guard
        text = f"not tried: the guard refuses it ({outcome.error})" if by_guard else _took(outcome, tokens)
        self.checks.append(Check("full context", None if by_guard else outcome.ok, text))
        return outcome.ok or by_guard

    async def _loaded(self, context: int) -> None:
        asked = self.request
        drawn = _drawn(asked)
        load = read_load(asked.load, context, drawn, asked.seed)
        concurrency = asked.concurrency or self._planned_concurrency(load, context)
        requests = asked.requests or min(drawn, max(16, 4 * concurrency))
        load = load.first(requests)
        if cut := sum(request.was_cut for request in load.requests):
            known = self.served is not None and self.served.max_model_len
            limit = (
                f"the context of {context:,} tokens" if known else f"{context:,} tokens, as its context is not known"
            )
            self.notes.append(f"{cut} of {requests} requests were cut to {limit}")
        self.memory = memory_of(self.server.url) if is_loopback(asked.url) else None
        self.load = await _Ramp(self, load, min(concurrency, requests)).run()
        memory = (self.memory.what, self.memory.total_bytes) if self.memory else ("", None)
        self.checks += load_checks(self.load, load, self.pool, context, asked.limits, memory)
        if self.load.preemptions and self.pool:
            holds = safe_concurrency(load, self.pool, context, requests)
            self.notes.append(
                f"{holds} of these requests at a time always fit this pool: --max-num-seqs {holds} never preempts, and "
                "legroom plan finds the flags for a larger one"
            )
        if self.interrupted:
            raise asyncio.CancelledError

    def _planned_concurrency(self, load: Load, context: int) -> int:
        planned = self.request.planned
        most = (planned.max_num_seqs if planned else None) or _MOST_CONCURRENCY
        pool = self.pool or (KvPool(planned.num_blocks, planned.block_size) if planned else None)
        if pool is None:
            self.notes.append("neither plan nor pool is known: 8 requests at a time; --concurrency asks for more")
            return 8
        return safe_concurrency(load, pool, context, most)

    async def _send(self, request: LoadRequest, seed: int) -> RequestOutcome:
        assert self.served is not None
        left_s = self.until - time.monotonic()
        prompt = (
            token_ids(request, self.server.vocabulary, seed)
            if self.server.takes_ids
            else self.server.text_of(request.prompt_len)
        )
        try:
            async with asyncio.timeout(max(0.0, left_s)):
                return await self.server.complete(self.served.model, prompt, request.output_len)
        except TimeoutError:
            return RequestOutcome(error=_TIME_IS_UP)


class _Ramp:
    """Sends the load: one request at a time at first, the planned number after a third of them."""

    def __init__(self, run: _VerificationRun, load: Load, concurrency: int) -> None:
        self.run_, self.load, self.concurrency = run, load, concurrency
        self.outcomes: list[RequestOutcome] = []
        self.open: set[asyncio.Task[RequestOutcome]] = set()

    async def run(self) -> LoadRun:
        """Until all are answered, the time is up or the user has enough."""
        run = self.run_
        interval = _LOCAL_LOOK_S if is_loopback(run.request.url) else _REMOTE_LOOK_S
        monitor = LoadMonitor(run.server, interval, run.memory, lambda: len(self.open))
        first = await monitor.look()
        monitoring = asyncio.create_task(monitor.run())
        began, interrupted = time.monotonic(), ""
        try:
            async with asyncio.timeout(max(0.0, run.until - began)):
                await self._send_all()
        except TimeoutError:
            interrupted = f"the time was up (--timeout {run.request.timeout_s:g} s)"
        except asyncio.CancelledError:
            interrupted, run.interrupted = "interrupted", True
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        seconds = time.monotonic() - began
        await self._end_open()
        monitoring.cancel()
        with suppress(asyncio.CancelledError):
            await monitoring
        # A preemption is counted when its victim runs again: the last reading waits until nothing runs.
        if not await monitor.drained() and not monitor.problem:
            run.notes.append("the server had not finished when the last reading was taken")
        if monitor.problem and first is not None:  # else it was said at the beginning
            run.notes.append(f"a look at the metrics failed: {monitor.problem}")
        grown = _difference(first, monitor.last)
        return LoadRun(
            self.load.name,
            len(self.load.requests),
            self.concurrency,
            tuple(self.outcomes),
            tuple(monitor.points),
            seconds,
            grown,
            interrupted,
        )

    async def _send_all(self) -> None:
        requests = self.load.requests
        ramp = max(1, len(requests) // 3)
        for number, request in enumerate(requests):
            allowed = min(self.concurrency, 1 + (self.concurrency - 1) * number // ramp)
            while len(self.open) >= allowed:
                await self._wait_for_one()
            self.open.add(asyncio.create_task(self.run_._send(request, 1000 + number + self.run_.request.seed)))
        while self.open:
            await self._wait_for_one()

    async def _wait_for_one(self) -> None:
        done, self.open = await asyncio.wait(self.open, return_when=asyncio.FIRST_COMPLETED)
        self.outcomes += (task.result() for task in done)
        self.run_.progress(len(self.outcomes) / len(self.load.requests))

    async def _end_open(self) -> None:
        """Closing the connection is how a server is told: vLLM aborts the request and frees its blocks."""
        for task in self.open:
            task.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)
        self.open = set()


def _took(outcome: RequestOutcome, tokens: int) -> str:
    return f"a request of {tokens:,} tokens in {outcome.total_s:.2f} s" if outcome.ok else outcome.error


def _same_name(name: str, other: str) -> bool:
    """Whether two names of a model end alike: a path and an id on the Hub do."""
    return name.rstrip("/").rpartition("/")[2].lower() == other.rstrip("/").rpartition("/")[2].lower()


def _difference(first: Sample | None, last: Sample | None) -> int | None:
    if first is None or last is None or first.preemptions is None or last.preemptions is None:
        return None
    return round(last.preemptions - first.preemptions)


def _pool(sample: Sample, context: int) -> KvPool | None:
    """The smallest engine's pool: each holds its own requests."""
    known = [engine for engine in sample.engines if engine.num_blocks and engine.block_size]
    if not known:
        return None
    least = min(known, key=lambda engine: engine.num_blocks or 0)
    blocks, size = least.num_blocks or 0, least.block_size or 1
    # 0.24 on say how many requests of the full context fit: that tells models whose layers share the pool in groups.
    full = round(blocks / least.max_concurrency) if least.max_concurrency else None
    return KvPool(blocks, size, full)
