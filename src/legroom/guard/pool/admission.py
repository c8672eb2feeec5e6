"""Admission: reads a request, bounds it, weighs it, and admits it when the pool has room. Middleware and proxy share
it. It runs on one event loop and never blocks it; only `count` and `wait` await."""

import asyncio
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.guard.log import LOG
from legroom.guard.policy import Policy, PolicyFile, changed_keys
from legroom.guard.pool.admission_pool import RECHECK_INTERVAL_S, Pool, PoolLimits
from legroom.guard.pool.guard_metrics import GuardMetrics
from legroom.guard.pool.projection import BlockNeed, ReservationState
from legroom.guard.request import refusals
from legroom.guard.request.body import Demand, demand_of, parse_body
from legroom.guard.request.endpoints import START_REQUESTED, Kind, weights_by_client
from legroom.guard.request.prompts import Prompt
from legroom.guard.request.refusals import Refusal, apply_changes, changes_of, refusal_of
from legroom.guard.weight.engine_limits import DEFAULT_BLOCK, NULL_BLOCK, EngineLimits, native_flags
from legroom.guard.weight.guarded_request import GuardedRequest, need_of, weight_of
from legroom.guard.weight.learnt_tokens import LikelyLengths, prior_quantiles
from legroom.guard.weight.usage_learner import Tokenize, UsageLearner

_UPLOAD = Demand(Kind.UPLOAD, "", (Prompt(open_ended=True),), None, None, 1, 0, 0, (), False, False, True)
MOST_WAITING_BYTES = 512 << 20
"""Bodies of waiting requests together: eight of the largest body that the policy allows by default."""
BACKGROUND_S = 60.0
"""How long a background response holds its blocks, because the guard does not see its end."""
STEPS_INTERVAL_S = 0.1
"""How often the engine's step counter is read while requests wait."""

_SERVER_SERIES = {
    "upstream_up": "1 if the server behind the guard answered this scrape.",
    "upstream_under_way": "1 while `legroom run` starts or stops the server behind the guard.",
    "stopped_engines": "Engine processes that a signal has stopped (SIGSTOP).",
    "start_requested": "0 if this start follows a crash, else 1.",
}
"""Of the server: the middleware tells the engines, the proxy its upstream, and either the start where it is known."""


class Admission:
    """What one process admits."""

    def __init__(
        self,
        policy: Path | None = None,
        plan: EngineLimits | None = None,
        tokenize: Tokenize | None = None,
        read_steps: Callable[[], float | None] | None = None,
    ) -> None:
        self.clock = time.monotonic
        self._read_steps = read_steps
        """Reads the engine's step counter; it must not block."""
        self.file = PolicyFile(policy, self.clock())
        self.metrics = GuardMetrics()
        self.draining = False
        self._waiting_bytes = 0
        self._plan = plan or EngineLimits(source="not asked yet")
        self._engine = EngineLimits(source="not asked yet")
        self.learner = UsageLearner(tokenize)
        self.limits = self._engine
        self.pool = Pool(PoolLimits(), self.clock())
        self._recheck: asyncio.TimerHandle | None = None
        self._steps_read_s = -math.inf
        self._apply_limits()

    @property
    def policy(self) -> Policy:
        """The policy in force, from the policy file where there is one."""
        return self.file.policy

    @property
    def _block_size(self) -> int:
        """Tokens per KV block; the default size while the engine's is unknown."""
        return self.limits.block_size or DEFAULT_BLOCK

    def learn_engine(self, limits: EngineLimits) -> None:
        """Use the engine's own KV pool and flags; what it does not report is taken from the plan."""
        self._engine = limits
        self._apply_limits()

    def reload(self, force: bool = False) -> None:
        """Read the policy file if it changed, or with `force`; a broken one is logged once and the old policy stays."""
        now_s = self.clock()
        if self.file.path is None or not (force or self.file.is_due(now_s)):
            return
        before = self.file.policy
        problem = self.file.reload(now_s, force)
        if problem is not None:
            LOG.error("the policy was not reloaded, the old one stays: %s", problem)
        elif self.file.policy is not before:
            changes = ", ".join(changed_keys(before, self.file.policy))  # a file that was cut may still be valid
            text = f"policy reloaded from {self.file.path}: {changes or 'no value changed'}"
            (LOG.warning if changes else LOG.info)("%s", text)
            self._apply_limits()

    def _apply_limits(self) -> None:
        """Resize the pool: the policy's size where set, else the engine's, else the plan's."""
        limits, pool = self._engine.completed_by(self._plan), self.policy.pool
        if pool.tokens:
            size = limits.block_size or DEFAULT_BLOCK
            blocks = max(1, pool.tokens // size) + NULL_BLOCK
            limits = replace(limits, num_blocks=blocks, block_size=size, source="the policy", ranks=1)
        self.limits = limits
        self.pool.weights = weights_by_client(self.policy.weights)
        pool_limits = PoolLimits(
            blocks=limits.share_blocks(pool.overcommit),
            sequences=pool.max_running or limits.share_sequences(),
            queue_requests=self.policy.queue.requests,
            is_strict=pool.admit == "strict",
            small_share=self.policy.clients.small_share,
        )
        self.pool.resize(pool_limits, self.clock())

    def read(self, kind: Kind, body: bytes, client: str = "") -> GuardedRequest | Refusal:
        """Parse a client's body and apply the policy's bounds; the request, or a refusal (always while draining)."""
        if self.draining:
            return self.refuse(refusals.draining(self.policy.queue.drain_retry_s))
        if len(body) > self.policy.requests.body_bytes:
            return self.refuse(refusals.too_large(self.policy.requests.body_bytes))
        if kind is Kind.UPLOAD:
            return GuardedRequest(body, _UPLOAD, client=client)
        try:
            document = parse_body(body)
            if not isinstance(document, dict):
                return self.refuse(refusals.malformed(f"it is a {type(document).__name__}"))
            return self._apply_bounds(kind, body, document, client)
        except ValueError as error:
            return self.refuse(refusals.malformed(str(error)))
        except RecursionError:  # json.dumps nests less deeply than json.loads
            return self.refuse(refusals.malformed("it is nested too deeply"))

    def _apply_bounds(self, kind: Kind, body: bytes, document: dict[str, Any], client: str) -> GuardedRequest | Refusal:
        """The request with values capped by the policy, or the refusal where the policy or the engine forbids it."""
        unit = self.limits.prefix_unit
        demand = demand_of(kind, document, unit)
        if kind is Kind.TEXT:
            return GuardedRequest(body, demand, client=client)
        refusal = refusal_of(demand, self.policy, self.limits)
        if refusal is not None:
            return self.refuse(refusal)
        changes = changes_of(demand, self.policy, self.limits)
        if changes:
            apply_changes(changes, demand.kind, document)
            body = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
            demand = demand_of(kind, document, unit)
            self.metrics.capped.update(change.counted for change in changes)
        return GuardedRequest(body, demand, bool(changes), client)

    def weigh(self, request: GuardedRequest) -> bool:
        """Set `request.weight` (not for kind TEXT); returns whether `count` must also count the prompt exactly."""
        demand, policy, blocks = request.demand, self.policy, self.pool.limits.blocks
        if demand.kind is Kind.TEXT:
            return False
        request.weight = weight = weight_of(demand, self.limits, policy.pool, self.learner.model_tokens(demand.model))
        most = policy.requests.max_prompt_tokens
        if (most and weight.prompt_tokens > most) or policy.pool.count == "tokenize":
            return True
        return policy.pool.count == "auto" and blocks is not None and weight.blocks > blocks

    async def count(self, request: GuardedRequest) -> Refusal | None:
        """Weigh the request again by the server's token count, unless `pool.count` is "bytes". Returns a refusal where
        the prompt is longer than the policy allows, otherwise None."""
        demand, weight = request.demand, request.weight
        assert weight is not None
        exact = await self.learner.count(demand, request.body) if self.policy.pool.count != "bytes" else None
        if exact is not None:
            weight = weight_of(demand, self.limits, self.policy.pool, self.learner.model_tokens(demand.model), exact)
            request.weight = weight
        most = self.policy.requests.max_prompt_tokens
        if not most or weight.prompt_tokens <= most:
            return None
        is_exact = exact is not None or all(prompt.exact for prompt in demand.prompts)
        bound = "" if is_exact else "up to "
        text = f"The prompt has {bound}{weight.prompt_tokens:,} tokens; at most {most:,} are served."
        param = "messages" if demand.prompts and demand.prompts[0].messages else "prompt"
        return self.refuse(refusals.bad_value("prompt_too_long", text, param))

    def admit(self, request: GuardedRequest) -> Refusal | None:
        """Reserve the request's blocks or queue it (see `is_waiting`), and return None; or return a refusal, if it can
        never fit, the queue is full, or the policy keeps all out while the pool's size is unknown."""
        if request.demand.kind is Kind.TEXT:
            self.metrics.admitted += 1
            return None
        weight, limits, now_s = request.weight, self.pool.limits, self.clock()
        assert weight is not None
        if limits.blocks is None and self.policy.pool.when_unknown == "closed" and not self.limits.known:
            return self.refuse(refusals.pool_unknown(self.limits.source))
        if limits.blocks is not None and request.demand.generates and weight.certain_blocks > self.limits.rank_blocks:
            size = self._block_size
            why = f"one sequence of it: the prompt has up to {weight.prompt_tokens:,}, "
            output = request.demand.output_tokens
            why += f"max_tokens {output:,}" if output is not None else "no max_tokens"
            return self.refuse(refusals.never_fits(weight.certain_blocks * size, self.limits.rank_blocks * size, why))
        need = need_of(weight, self._likely_lengths(request), limits.blocks, limits.sequences, self._block_size)
        reservation = self.pool.acquire(need, now_s, request.client)
        is_waiting = reservation.state is ReservationState.WAITING
        is_full = is_waiting and self._waiting_bytes + len(request.body) > MOST_WAITING_BYTES
        if is_full:
            self.pool.release(reservation, now_s)
        if is_full or reservation.state is ReservationState.QUEUE_FULL:
            return self.refuse(self._busy_refusal("queue_full", request, need))
        request.reservation = reservation
        if not is_waiting:
            self._on_admitted(request, 0.0)
        return None

    def _likely_lengths(self, request: GuardedRequest) -> LikelyLengths | None:
        """Likely lengths of the request's answers; None under the strict policy, which reserves for the longest."""
        demand, policy, weight = request.demand, self.policy.pool, request.weight
        assert weight is not None
        if policy.admit == "strict":
            return None
        if demand.output_tokens is None and policy.open_ended != "learnt":
            return LikelyLengths(weight.most_steps, ())
        likely = self.learner.lengths.likely(demand.model, request.client, demand.output_tokens, weight.most_steps)
        if demand.output_tokens is None and not likely.quantiles:
            likely = likely._replace(quantiles=prior_quantiles(weight.most_steps))
        return likely

    @staticmethod
    def is_waiting(request: GuardedRequest) -> bool:
        """Whether the request is in the queue, neither admitted nor gone."""
        return request.reservation is not None and request.reservation.state is ReservationState.WAITING

    async def wait(self, request: GuardedRequest, disconnected: asyncio.Future[Any] | None = None) -> Refusal | None:
        """Wait in the queue; None once admitted or `disconnected` is done, a refusal after the policy's `wait_s`."""
        reservation = request.reservation
        assert reservation is not None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def wake(*_: object) -> None:
            """End `wait`: the request was admitted, its client disconnected, or the time is up."""
            if not done.done():
                done.set_result(None)

        reservation.on_admitted = wake
        if reservation.state is not ReservationState.WAITING:
            wake()
        if disconnected is not None:
            disconnected.add_done_callback(wake)
        timer = loop.call_later(self.policy.queue.wait_s, wake)
        self._waiting_bytes += len(request.body)
        self._schedule_recheck()
        try:
            await done
        except asyncio.CancelledError:
            self.abandon(request)
            raise
        finally:
            self._waiting_bytes -= len(request.body)
            timer.cancel()
            if disconnected is not None:
                disconnected.remove_done_callback(wake)
        reservation.on_admitted = None
        if disconnected is not None and disconnected.done():
            self.abandon(request)
            return None
        if reservation.state is ReservationState.ADMITTED:
            self._on_admitted(request, self.clock() - reservation.requested_s)
            return None
        self.pool.release(reservation, self.clock())
        return self.refuse(self._busy_refusal("queue_timeout", request, reservation.need))

    def _schedule_recheck(self) -> None:
        """Start a timer for `_recheck_waiting`, unless one runs or admission is strict."""
        if self._recheck is None and not self.pool.limits.is_strict:
            self._recheck = asyncio.get_running_loop().call_later(RECHECK_INTERVAL_S, self._recheck_waiting)

    def _recheck_waiting(self) -> None:
        """Read the engine's step counter, admit what now fits, and start the timer again while requests wait."""
        self._recheck, now_s = None, self.clock()
        if self._read_steps is not None and now_s - self._steps_read_s >= STEPS_INTERVAL_S:
            self._steps_read_s = now_s
            if (steps := self._read_steps()) is not None:
                self.pool.learn_steps(steps, now_s)
        self.pool.admit_waiting(now_s)
        if self.pool.waiting:
            self._schedule_recheck()

    def abandon(self, request: GuardedRequest) -> None:
        """Drop a waiting request whose client disconnected; a second call does nothing."""
        reservation = request.reservation
        if reservation is not None and reservation.state is not ReservationState.RELEASED:
            self.pool.release(reservation, self.clock())
            self.metrics.left_queue += 1

    def release(self, request: GuardedRequest, finished: bool) -> None:
        """Free the blocks of a request that ended, and learn from a `finished` one. An aborted one's blocks are freed
        after `abort_grace_s`, those of a background response after BACKGROUND_S."""
        reservation = request.reservation
        if reservation is None or reservation.state is not ReservationState.ADMITTED:
            return
        if finished:
            self.pool.learn_pace(self.learner.on_finished(request), self.clock() - reservation.admitted_s)
        hold_s = 0.0 if finished else self.policy.pool.abort_grace_s
        if request.demand.background and request.answered:
            hold_s = BACKGROUND_S
        if hold_s <= 0:
            self.pool.release(reservation, self.clock())
        else:
            release = self.pool.release
            asyncio.get_running_loop().call_later(hold_s, lambda: release(reservation, self.clock()))

    def on_chunk(self, request: GuardedRequest, chunk: bytes) -> None:
        """Learn token counts from a part of a 200 response, and mark the request as answered."""
        request.answered = True
        if request.informative:
            self.learner.on_chunk(request, chunk)

    def refuse(self, refusal: Refusal) -> Refusal:
        """Count a refusal in the metrics, by its reason, and return it."""
        self.metrics.rejected[refusal.reason] += 1
        return refusal

    def _on_admitted(self, request: GuardedRequest, waited_s: float) -> None:
        """Count an admitted request and its wait; with pool.count "auto" its prompt may be counted by the server."""
        self.metrics.admitted += 1
        self.metrics.observe_wait(waited_s)
        if self.policy.pool.count == "auto":
            self.learner.on_admitted(request)

    def _busy_refusal(self, reason: str, request: GuardedRequest, need: BlockNeed) -> Refusal:
        """A 429 refusal for `reason`, whose Retry-After is the forecast time until the request's blocks are free."""
        blocks = self.pool.limits.blocks
        free = None if blocks is None else max(0, blocks - self.pool.held_blocks) * self._block_size
        retry_s = self.pool.retry_after_s(need, self.clock(), has_waited=reason == "queue_timeout")
        return refusals.busy(reason, request.weight.tokens if request.weight else 0, free, self.pool.waiting, retry_s)

    def page(self, open_metrics: bool = False, **server_values: int | None) -> bytes:
        """The guard's metrics as Prometheus or OpenMetrics text; `server_values`: gauges about the server by name."""
        size, pool = self.limits.block_size or 0, self.pool
        fails_open = not self.limits.known and self.policy.pool.when_unknown == "open"
        values: dict[str, tuple[str, float]] = {
            "waiting": ("Requests in the queue.", pool.waiting),
            "running": ("Requests admitted and not finished.", pool.running),
            "running_sequences": ("Sequences of these.", pool.held_sequences),
            "reserved_tokens": ("KV tokens that they may grow to.", pool.held_blocks * size),
            "queued_tokens": ("KV tokens that waiting requests may grow to.", pool.queued_blocks * size),
            "pool_tokens": ("KV tokens that may be reserved at once; 0: not known.", (pool.limits.blocks or 0) * size),
            "waiting_clients": ("Clients that these are of.", pool.waiting_clients),
            "small_lane_total": ("Requests admitted to the part kept for small ones.", pool.small_admitted),
            "draining": ("1 while new requests are refused.", int(self.draining)),
            "fail_open": ("1 while the pool's size is not known and all are admitted.", int(fails_open)),
            "tokenize_calls_total": ("Prompts counted with the server's tokenizer.", self.learner.calls),
            "policy_reloads_total": ("Times a changed policy was taken over.", self.file.reloads),
            "policy_reload_errors_total": ("Times a changed policy was broken; the old one stayed.", self.file.errors),
        }
        if requested := os.environ.get(START_REQUESTED):
            server_values["start_requested"] = int(requested == "1")
        values |= {name: (_SERVER_SERIES[name], value) for name, value in server_values.items() if value is not None}
        labels = {"api_server": str(os.getpid())} if self.limits.api_servers > 1 else {}
        return self.metrics.page(values, labels, open_metrics)

    def summary(self) -> str:
        """One sentence for the log: the KV tokens and sequences admitted at once, and where these limits come from."""
        limits = self.limits
        if not limits.known:
            how = "admitted unweighed" if self.policy.pool.when_unknown == "open" else "refused"
            return f"the size of the KV cache is not known ({limits.source}): requests are {how} until it is"
        tokens = (self.pool.limits.blocks or 0) * (limits.block_size or 0)
        room = "" if limits.cacheless else f"{tokens:,} KV tokens and "
        count = self.pool.limits.sequences or "any number of"
        text = f"admits up to {room}{count} sequences at once ({limits.source})"
        text += "; the model keeps no KV cache" if limits.cacheless else ""
        if limits.api_servers > 1:
            text += f"; one of {limits.api_servers} API servers, each with its own share of the cache"
        if limits.max_num_queued_reqs or limits.max_num_queued_tokens:
            text += "; vLLM's own queue bounds stay behind it"
        return text

    def native_flags_hint(self, version: str) -> str | None:
        """A sentence with vLLM's own queue bounds to set; None where `version` has none or all are set already."""
        try:
            queue, pool = self.policy.queue, self.policy.pool
            flags = native_flags(release(version), self.limits, queue.requests, pool.overcommit)
        except LegroomError:
            return None
        if self.limits.max_num_queued_reqs:
            flags.pop("--max-num-queued-reqs", None)
        if self.limits.max_num_queued_tokens:
            flags.pop("--max-num-queued-tokens", None)
        text = " ".join(f"{name} {value}" for name, value in flags.items())
        return f"vLLM {version} can bound its own queue too; behind this guard set {text}" if text else None

    def drain(self, on: bool | None) -> dict[str, Any]:
        """Refuse new requests (`on` True) or admit them again (False); None changes nothing. Returns the status."""
        if on is not None:
            self.draining = on
        return self.status()

    def status(self) -> dict[str, Any]:
        """The JSON document of `/-/legroom/status`: pool, queue, policy and whether the guard drains."""
        size = self.limits.block_size or 0
        return {
            "draining": self.draining,
            "running": self.pool.running,
            "waiting": self.pool.waiting,
            "reserved_tokens": self.pool.held_blocks * size,
            "pool_tokens": (self.pool.limits.blocks or 0) * size,
            "pool_source": self.limits.source,
            "block_size": size,
            "max_running_sequences": self.pool.limits.sequences,
            "max_model_len": self.limits.max_model_len,
            "api_servers": self.limits.api_servers,
            "admitted": self.metrics.admitted,
            "rejected": {reason: count for reason, count in self.metrics.rejected.items() if count},
            "policy": str(self.file.path) if self.file.path else None,
            "policy_error": self.file.last_error or None,
        }
