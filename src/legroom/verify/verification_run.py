"""Runs a verification: requests are bounded in number and time, and ended when the user interrupts it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import endpoint, is_loopback
from legroom.live.metrics.sample import Sample
from legroom.live.metrics.scrape import ScrapeFailed, scrape
from legroom.records import dataclass
from legroom.verify import load_run
from legroom.verify.openai_client import POOLING_ENDPOINTS, RequestOutcome, ServedModel, ServerClient
from legroom.verify.verification_checks import (
    Check,
    PassCriteria,
    PlannedPool,
    Verification,
    context_check,
    load_checks,
    pool_check,
)

_ASSUMED_CONTEXT = 2048  # For a server that does not say its max_model_len.
_MAX_CONCURRENCY = 64  # Without a plan the server's max_num_seqs is unknown; --concurrency exceeds this.
_TIMED_OUT = "not answered within the time of this verification (--timeout)"
Progress = Callable[[float], None]


@dataclass(frozen=True)
class VerificationRequest:
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
    """Verifies a server; Ctrl-C ends it early. LegroomError for a wrong load, or a remote one without `load_remote`."""
    endpoint(request.url)  # fails on a malformed address before anything else
    if not is_loopback(request.url) and not request.load_remote:
        why = "the server is not on this machine, and a verification loads it as far as it goes"
        raise LegroomError(why, "say --yes-load-remote if nobody else depends on it now")
    load_run.read_load(request.load, _ASSUMED_CONTEXT, _num_lengths(request), request.seed)  # fails before any request
    return asyncio.run(_run_verification(request, progress or (lambda share: None)))


def _num_lengths(request: VerificationRequest) -> int:
    """How many request lengths to draw: at least 400, for a stable concurrency, or as many as requests are sent."""
    return max(request.requests or 0, 400)


async def _run_verification(request: VerificationRequest, progress: Progress) -> Verification:
    """The result of a new `VerificationRun`, for which an HTTP session is opened."""
    async with ServerClient(request.url, request.api_key, request.verify_tls) as server:
        return await VerificationRun(request, server, progress).result()


class VerificationRun:
    def __init__(self, request: VerificationRequest, server: ServerClient, progress: Progress) -> None:
        self.request, self.server, self.progress = request, server, progress
        self.deadline_s = time.monotonic() + request.timeout_s
        self.checks: list[Check] = []
        self.notes: list[str] = []
        self.served: ServedModel | None = None
        self.model = ""
        self.pool: load_run.KvPool | None = None
        self.load: load_run.LoadRun | None = None
        self.memory: load_run.MemoryReader | None = None
        self.interrupted = False

    async def result(self) -> Verification:
        """Runs all checks; a failure or an interruption ends them early. Returns the results so far."""
        try:
            await self._run_steps()
        except asyncio.CancelledError:
            self.interrupted = True
            self.notes.append("interrupted: open requests were ended, what follows is what was seen until then")
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            if self.load is None:
                self.checks.append(Check("load", False, "interrupted before it began"))
        source, checks, notes = self.memory.source if self.memory else "", tuple(self.checks), tuple(self.notes)
        url, interrupted = self.server.url, self.interrupted
        return Verification(url, self.served, self.pool, checks, self.load, source, notes, interrupted)

    async def _run_steps(self) -> None:
        """Runs health, plan, completion, full-context and load checks in turn, up to the first failed request."""
        served = self.served = await self.server.served()
        self.model = served.model
        context = served.max_model_len or _ASSUMED_CONTEXT
        length = f"{context:,} tokens of context" if served.max_model_len else "it does not say its context"
        self.checks.append(Check("health", True, f"up, serves {served.model}; {length}"))
        sample = await self._first_sample()
        self.pool = _smallest_pool(sample) if sample else None
        planned = self.request.planned
        checks = (pool_check(self.pool, planned), context_check(served.max_model_len, planned))
        self.checks += (check for check in checks if check is not None)
        # No check: --served-model-name gives a model any name.
        if planned and planned.model and not _is_same_model_name(planned.model, served.model):
            self.notes.append(f"the plan is for {planned.model}, the server calls its model {served.model}")
        if not await self._send_short_completion(served) or not await self._send_full_context(served.max_model_len):
            return
        await self._run_load(context)

    async def _first_sample(self) -> Sample | None:
        """The server's metrics before the load; None (with a note) where they cannot be read."""
        try:
            sample = await scrape(self.server.session, self.server.metrics)
        except ScrapeFailed as error:
            self.notes.append(f"no metrics, so neither KV use nor preemptions are seen: {error.message}")
            return None
        if (sample.running or 0) + (sample.waiting or 0) > 0:
            self.notes.append("the server is busy with other requests: what they take is in the figures")
        return sample

    async def _send_short_completion(self, served: ServedModel) -> bool:
        """Whether a short completion was answered; a model without completions gets the pooling check instead."""
        await self.server.learn_vocabulary(self.model)
        outcome = await self.send(load_run.LoadRequest(8, 4), 1)
        if outcome.refusal is not None and outcome.refusal.is_unserved:
            await self._check_pooling(served)
            return False
        if outcome.refusal is not None and outcome.refusal.status in (400, 422):
            refused_ids = outcome.error
            outcome = await self.server.measure_tokens_per_word(self.model)
            if outcome.ok:
                text = "lengths are those of text, about 2 % short"
                self.notes.append(f"the server takes no token ids ({refused_ids}): {text}")
        tokens = "1 token" if outcome.output_tokens == 1 else f"{outcome.output_tokens} tokens"
        text = f"{tokens} in {outcome.total_s:.2f} s" if outcome.ok else outcome.error
        self.checks.append(Check("completion", outcome.ok, text))
        return outcome.ok

    async def _check_pooling(self, served: ServedModel) -> None:
        """Checks a pooling model, which serves no completions, by its own endpoints; it gets no load."""
        self.checks.append(Check("completion", None, "not judged: it serves no completions"))
        for name, path in POOLING_ENDPOINTS.items():
            outcome = await self._pooling_request(path, 8)
            check = Check(name, outcome.ok, _duration_text(outcome, 8))
            if outcome.refusal is None or not outcome.refusal.is_unserved:
                break
        self.checks.append(check)
        length = served.max_model_len
        if outcome.ok and length is not None:
            self._check_full_context(await self._pooling_request(path, length), length)
        if outcome.ok:
            self.checks.append(Check("load", None, "not judged: a load is made of completions"))

    async def _pooling_request(self, path: str, length: int) -> RequestOutcome:
        """The outcome of a pooling request of `length` tokens; an error past the deadline."""
        prompt = load_run.token_ids(load_run.LoadRequest(length, 0), self.server.vocabulary, 1)
        try:
            async with asyncio.timeout(max(0.0, self.deadline_s - time.monotonic())):
                return await self.server.post(path, {"model": self.model, "input": prompt})
        except TimeoutError:
            return RequestOutcome(error=_TIMED_OUT)

    async def _send_full_context(self, length: int | None) -> bool:
        """Whether to go on with the load: a request of max_model_len tokens was served, or that length is unknown."""
        if length is None:
            self.checks.append(Check("full context", None, "not tried: the server does not say its context"))
            return True
        answer = min(16, max(1, length // 4))
        outcome = await self.send(load_run.LoadRequest(length - answer, answer), 2)
        total = outcome.prompt_tokens + outcome.output_tokens
        if outcome.ok and self.server.accepts_token_ids and total != length:
            outcome = RequestOutcome(error=f"{total:,} of {length:,} tokens were taken", total_s=outcome.total_s)
        return self._check_full_context(outcome, total)

    def _check_full_context(self, outcome: RequestOutcome, tokens: int) -> bool:
        """Records the check of a request of full context; returns whether to continue with the load."""
        by_guard = outcome.refusal is not None and outcome.refusal.is_by_guard
        text = f"not tried: the guard refuses it ({outcome.error})" if by_guard else _duration_text(outcome, tokens)
        self.checks.append(Check("full context", None if by_guard else outcome.ok, text))
        return outcome.ok or by_guard

    async def _run_load(self, context: int) -> None:
        """Sends the load, its requests cut to `context` tokens, and adds its checks."""
        request = self.request
        lengths = _num_lengths(request)
        load = load_run.read_load(request.load, context, lengths, request.seed)
        concurrency = request.concurrency or self._planned_concurrency(load, context)
        requests = request.requests or min(lengths, max(16, 4 * concurrency))
        load = load.first(requests)
        if cut := sum(each.was_cut for each in load.requests):
            known = self.served is not None and self.served.max_model_len
            unknown = f"{context:,} tokens, as its context is not known"
            limit = f"the context of {context:,} tokens" if known else unknown
            self.notes.append(f"{cut} of {requests} requests were cut to {limit}")
        self.memory = load_run.memory_reader(self.server.url) if is_loopback(request.url) else None
        self.load = await LoadSender(self, load, min(concurrency, requests)).run()
        memory = (self.memory.source, self.memory.total_bytes) if self.memory else ("", None)
        self.checks += load_checks(self.load, load, self.pool, context, request.limits, memory)
        if self.load.preemptions and self.pool:
            holds = load_run.safe_concurrency(load, self.pool, context, requests)
            fit = f"{holds} of these requests at a time always fit this pool: --max-num-seqs {holds} never preempts"
            self.notes.append(f"{fit}, and legroom plan finds the flags for a larger one")
        if self.interrupted:
            raise asyncio.CancelledError

    def _planned_concurrency(self, load: load_run.Load, context: int) -> int:
        """Concurrent requests that never preempt, at most the plan's max_num_seqs (else 64); 8 with unknown pool."""
        planned = self.request.planned
        most = (planned.max_num_seqs if planned else None) or _MAX_CONCURRENCY
        pool = self.pool or (load_run.KvPool(planned.num_blocks, planned.block_size) if planned else None)
        if pool is None:
            self.notes.append("neither plan nor pool is known: 8 requests at a time; --concurrency asks for more")
            return 8
        return load_run.safe_concurrency(load, pool, context, most)

    async def send(self, request: load_run.LoadRequest, seed: int) -> RequestOutcome:
        """The outcome of one completion of the load, whose prompt `seed` determines; an error past the deadline."""
        prompt: list[int] | str = self.server.text_of(request.prompt_len)
        if self.server.accepts_token_ids:
            prompt = load_run.token_ids(request, self.server.vocabulary, seed)
        try:
            async with asyncio.timeout(max(0.0, self.deadline_s - time.monotonic())):
                return await self.server.complete(self.model, prompt, request.output_len)
        except TimeoutError:
            return RequestOutcome(error=_TIMED_OUT)


class LoadSender:
    """Sends the load, one request at a time at first, rising to `concurrency` after the first third."""

    def __init__(self, run: VerificationRun, load: load_run.Load, concurrency: int) -> None:
        self.verification, self.load, self.concurrency = run, load, concurrency
        self.outcomes: list[RequestOutcome] = []
        self.open: set[asyncio.Task[RequestOutcome]] = set()

    async def run(self) -> load_run.LoadRun:
        """Sends the load while sampling the metrics; a timeout or interrupt ends it early, and the result says so."""
        run = self.verification
        interval = 0.25 if is_loopback(run.request.url) else 1.0
        monitor = load_run.LoadMonitor(run.server, interval, run.memory, lambda: len(self.open))
        first = await monitor.sample()
        monitoring = asyncio.create_task(monitor.run())
        started_s, interrupted = time.monotonic(), ""
        try:
            async with asyncio.timeout(max(0.0, run.deadline_s - started_s)):
                await self._send_all()
        except TimeoutError:
            interrupted = f"the time was up (--timeout {run.request.timeout_s:g} s)"
        except asyncio.CancelledError:
            interrupted, run.interrupted = "interrupted", True
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
        seconds = time.monotonic() - started_s
        for open_request in self.open:  # vLLM aborts what a closed connection asked for, and frees its blocks
            open_request.cancel()
        await asyncio.gather(*self.open, return_exceptions=True)
        self.open = set()
        monitoring.cancel()
        with suppress(asyncio.CancelledError):
            await monitoring
        # vLLM counts a preemption when its request runs again, so the last sample waits until nothing runs.
        if not await monitor.drained() and not monitor.problem:
            run.notes.append("the server had not finished when the last reading was taken")
        if monitor.problem and first is not None:  # otherwise it was reported at the start
            run.notes.append(f"a look at the metrics failed: {monitor.problem}")
        preemptions = _preemptions_between(first, monitor.last)
        load = self.load
        seen = (load.name, len(load.requests), self.concurrency, tuple(self.outcomes), tuple(monitor.samples))
        return load_run.LoadRun(*seen, seconds, preemptions, interrupted)

    async def _send_all(self) -> None:
        """Sends all requests, raising the concurrency over the first third, and waits for all of them."""
        requests = self.load.requests
        ramp = max(1, len(requests) // 3)
        first_seed = 1000 + self.verification.request.seed
        for number, request in enumerate(requests):
            allowed = min(self.concurrency, 1 + (self.concurrency - 1) * number // ramp)
            while len(self.open) >= allowed:
                await self._wait_for_one()
            self.open.add(asyncio.create_task(self.verification.send(request, first_seed + number)))
        while self.open:
            await self._wait_for_one()

    async def _wait_for_one(self) -> None:
        """Waits until at least one request in flight ends; collects outcomes and reports progress."""
        done, self.open = await asyncio.wait(self.open, return_when=asyncio.FIRST_COMPLETED)
        self.outcomes += (task.result() for task in done)
        self.verification.progress(len(self.outcomes) / len(self.load.requests))


def _preemptions_between(first: Sample | None, last: Sample | None) -> int | None:
    """Preemptions between two samples, negative if the server restarted; None where either is unknown."""
    before, after = (sample.total("preemptions") if sample is not None else None for sample in (first, last))
    return None if before is None or after is None else round(after - before)


def _duration_text(outcome: RequestOutcome, tokens: int) -> str:
    """The request's tokens and seconds in words, or its error."""
    return f"a request of {tokens:,} tokens in {outcome.total_s:.2f} s" if outcome.ok else outcome.error


def _is_same_model_name(name: str, other: str) -> bool:
    """Whether two model names have the same last part: `/models/Qwen3-8B` and `Qwen/Qwen3-8B`."""
    return name.rstrip("/").rpartition("/")[2].lower() == other.rstrip("/").rpartition("/")[2].lower()


def _smallest_pool(sample: Sample) -> load_run.KvPool | None:
    """The KV pool of the engine with the fewest blocks, as engines do not share requests; None where unknown."""
    known = [engine for engine in sample.engines if engine.num_blocks and engine.block_size]
    if not known:
        return None
    least = min(known, key=lambda engine: engine.num_blocks or 0)
    blocks, size = least.num_blocks or 0, least.block_size or 1
    # vLLM 0.24+ reports max_concurrency, which reveals pools that layer groups share.
    full = round(blocks / least.max_concurrency) if least.max_concurrency else None
    return load_run.KvPool(blocks, size, full)
