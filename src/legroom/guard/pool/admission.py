"""Admission: reads a request, bounds it, weighs it, and lets it in when the pool has room.

Middleware and proxy share it. Everything here runs on one event loop and never blocks it; only `wait` awaits.
"""

from __future__ import annotations

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
from legroom.guard.policy import Policy, PolicyFile
from legroom.guard.pool.block_pool import USUAL_RECOMPUTE, Pool, PoolLimits
from legroom.guard.pool.engine_usage import EngineUsage
from legroom.guard.pool.meters import Meters
from legroom.guard.pool.reservation import Need, Ticket, TicketState
from legroom.guard.request import refusals
from legroom.guard.request.body import Demand, demand_of, read_body
from legroom.guard.request.bounds import Change, apply, changes_of, refusal_of
from legroom.guard.request.clients import weights_by_client
from legroom.guard.request.endpoints import Kind
from legroom.guard.request.prompts import Prompt
from legroom.guard.request.refusals import Refusal
from legroom.guard.weight.engine_limits import DEFAULT_BLOCK, EngineLimits, limits_of_tokens, native_flags
from legroom.guard.weight.guarded_request import GuardedRequest, Weight, need_of, weight_of
from legroom.guard.weight.output_lengths import LikelyLengths, prior_lives
from legroom.guard.weight.usage_learner import Tokenize, UsageLearner

_UPLOAD = Demand(Kind.UPLOAD, "", (Prompt(open_ended=True),), None, None, 1, 0, 0, (), False, False, True)
MOST_WAITING_BYTES = 512 << 20
"""Bodies of waiting requests, together: images make some of them large."""
BACKGROUND_S = 60.0
"""How long a response in the background keeps its place: its end is not seen here."""
LOOK_AHEAD = 1.0
"""Of its own life, for which a newcomer finds room where the policy is goodput, unless it pays to begin before."""
LOOK_AGAIN_S = 0.05
"""Those that run come nearer to their end, which alone can make room: how often to look while somebody waits."""
USE_AGAIN_S = 0.1
"""How often the engine is asked meanwhile."""


class Admission:
    """What one process admits."""

    def __init__(
        self,
        policy: Path | None = None,
        plan: EngineLimits | None = None,
        tokenize: Tokenize | None = None,
        clock: Callable[[], float] = time.monotonic,
        engine_usage: Callable[[], EngineUsage | None] | None = None,
    ) -> None:
        self.clock = clock
        self._engine_usage = engine_usage
        """Asked while requests wait; it must answer at once."""
        self.file = PolicyFile(policy, clock())
        self.meters = Meters()
        self.draining = False
        self._waiting_bytes = 0
        self._plan = plan or EngineLimits(source="not asked yet")
        self._engine = EngineLimits(source="not asked yet")
        self.learner = UsageLearner(tokenize)
        self.limits = self._engine
        self.pool = Pool(PoolLimits(), clock())
        self._look: asyncio.TimerHandle | None = None
        self._asked_s = -math.inf
        self._refit()

    @property
    def policy(self) -> Policy:
        return self.file.policy

    def learn_engine(self, limits: EngineLimits) -> None:
        """The engine told what it can hold; from now on that counts, and the plan only where the engine is silent."""
        self._engine = limits
        self._refit()

    def reload(self, force: bool = False) -> None:
        """Look at the policy file if it is time; a broken one is logged once and the old policy stays."""
        now_s = self.clock()
        if self.file.path is None or not (force or self.file.due(now_s)):
            return
        before = self.file.policy
        problem = self.file.reload(now_s, force)
        if problem is not None:
            LOG.error("the policy was not reloaded, the old one stays: %s", problem)
        elif self.file.policy is not before:
            LOG.info("policy reloaded from %s", self.file.path)
            self._refit()

    def _refit(self) -> None:
        limits, pool = self._engine.over(self._plan), self.policy.pool
        if pool.tokens:
            size = limits.block_size or DEFAULT_BLOCK
            named = limits_of_tokens(pool.tokens, size)
            limits = replace(limits, num_blocks=named.num_blocks, block_size=size, source=named.source, ranks=1)
        self.limits = limits
        blocks = limits.share_blocks(pool.overcommit)
        seats = pool.max_running or limits.share_seats()
        small_share = self.policy.clients.small_share
        self.pool.weights = weights_by_client(self.policy.weights)
        look = LOOK_AHEAD if pool.admit == "goodput" else None
        self.pool.resize(
            PoolLimits(blocks, seats, self.policy.queue.requests, look, USUAL_RECOMPUTE, small_share), self.clock()
        )

    def read(self, kind: Kind, body: bytes, client: str = "") -> GuardedRequest | Refusal:
        """Read a body and hold it against the policy."""
        if self.draining:
            return self.refuse(refusals.draining(self.policy.queue.drain_retry_s))
        if len(body) > self.policy.requests.body_bytes:
            return self.refuse(refusals.too_large(self.policy.requests.body_bytes))
        if kind is Kind.UPLOAD:
            return GuardedRequest(body, _UPLOAD, client=client)
        try:
            document = read_body(body)
            if not isinstance(document, dict):
                return self.refuse(refusals.malformed(f"it is a {type(document).__name__}"))
        except ValueError as error:
            return self.refuse(refusals.malformed(str(error)))
        try:
            return self._within_policy(kind, body, document, client)
        except RecursionError:  # what could just be read may be too deep to be written
            return self.refuse(refusals.malformed("it is nested too deeply"))

    def _within_policy(
        self, kind: Kind, body: bytes, document: dict[str, Any], client: str
    ) -> GuardedRequest | Refusal:
        """A request held against the policy's bounds."""
        unit = self.limits.prefix_unit
        demand = demand_of(kind, document, unit)
        changes: tuple[Change, ...] = ()
        if kind is not Kind.TEXT:
            refusal = refusal_of(demand, self.policy, self.limits)
            if refusal is not None:
                return self.refuse(refusal)
            changes = changes_of(demand, self.policy, self.limits)
            if changes:
                apply(changes, demand.kind, document)
                body = json.dumps(document, ensure_ascii=False).encode("utf-8", "surrogatepass")
                demand = demand_of(kind, document, unit)
                for change in changes:
                    self.meters.capped[change.counted] += 1
        return GuardedRequest(body, demand, bool(changes), client)

    def weigh(self, request: GuardedRequest) -> bool:
        """Weigh a request; whether it must also be `count`ed. Most are weighed at once."""
        demand, policy = request.demand, self.policy
        if demand.kind is Kind.TEXT:
            return False
        request.weight = weight = weight_of(demand, self.limits, policy.pool, self.learner.of(demand.model))
        most = policy.requests.max_prompt_tokens
        if most and weight.prompt_tokens > most:
            return True
        return policy.pool.count == "tokenize" or (policy.pool.count == "auto" and self._is_too_big(weight))

    async def count(self, request: GuardedRequest) -> Refusal | None:
        """Ask the server how long the prompt is, where it can say, and hold that against the policy."""
        demand, weight = request.demand, request.weight
        assert weight is not None
        exact = None
        if self.policy.pool.count != "bytes":
            exact = await self.learner.count(request)
        if exact is not None:
            weight = weight_of(demand, self.limits, self.policy.pool, self.learner.of(demand.model), exact)
            request.weight = weight
        most = self.policy.requests.max_prompt_tokens
        if not most or weight.prompt_tokens <= most:
            return None
        sure = exact is not None or all(prompt.exact for prompt in demand.prompts)
        text = f"The prompt has {'' if sure else 'up to '}{weight.prompt_tokens:,} tokens; at most {most:,} are served."
        param = "messages" if demand.prompts and demand.prompts[0].messages else "prompt"
        return self.refuse(refusals.bad_value("prompt_too_long", text, param))

    def _is_too_big(self, weight: Weight) -> bool:
        blocks = self.pool.limits.blocks
        return blocks is not None and weight.blocks > blocks

    def admit(self, request: GuardedRequest) -> Refusal | None:
        """Ask for room. None: the request is admitted, or waits (`is_waiting`)."""
        if request.demand.kind is Kind.TEXT:
            self.meters.admitted += 1
            return None
        weight, limits, now_s = request.weight, self.pool.limits, self.clock()
        assert weight is not None
        if limits.blocks is None and self.policy.pool.when_unknown == "closed" and not self.limits.known:
            return self.refuse(refusals.pool_unknown(self.limits.source))
        if limits.blocks is not None and request.demand.generates and weight.certain_blocks > self.limits.rank_blocks:
            return self.refuse(self._never(request, self.limits.rank_blocks))
        size = self.limits.block_size or DEFAULT_BLOCK
        need = need_of(weight, self._answer(request), limits.blocks, limits.seats, size)
        ticket = self.pool.acquire(need, now_s, request.client)
        if ticket.state is TicketState.FULL:
            return self.refuse(self._busy("queue_full", request, need))
        if ticket.state is TicketState.WAITING and self._waiting_bytes + len(request.body) > MOST_WAITING_BYTES:
            self.pool.release(ticket, now_s)
            return self.refuse(self._busy("queue_full", request, need))
        request.ticket = ticket
        if ticket.state is TicketState.ADMITTED:
            self._admitted(request, 0.0)
        return None

    def _answer(self, request: GuardedRequest) -> LikelyLengths | None:
        """How long its answers likely get; None where they are counted at their worst."""
        demand, policy, weight = request.demand, self.policy.pool, request.weight
        assert weight is not None
        if policy.admit == "strict":
            return None
        if demand.output_tokens is None and policy.open_ended != "learnt":
            return LikelyLengths(weight.most_steps, ())
        likely = self.learner.lengths.likely(demand.model, request.client, demand.output_tokens, weight.most_steps)
        if demand.output_tokens is None and not likely.lives:
            likely = likely._replace(lives=prior_lives(weight.most_steps))
        # Where a preemption is dear, what most answers stay within is the safer guess than their average.
        return likely._replace(lives=()) if self.pool.recompute_is_dear else likely

    @staticmethod
    def is_waiting(request: GuardedRequest) -> bool:
        return request.ticket is not None and request.ticket.state is TicketState.WAITING

    async def wait(self, request: GuardedRequest, gone: asyncio.Future[Any] | None = None) -> Refusal | None:
        """Wait for room until it is there, the time is up, or the client is `gone` (then the ticket is, too)."""
        ticket = request.ticket
        assert ticket is not None
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()

        def call(*_: object) -> None:
            if not turn.done():
                turn.set_result(None)

        ticket.on_admitted = call
        if ticket.state is not TicketState.WAITING:  # room came between asking and waiting
            call()
        if gone is not None:
            gone.add_done_callback(call)
        timer = loop.call_later(self.policy.queue.wait_s, call)
        self._waiting_bytes += len(request.body)
        self._look_again()
        try:
            await turn
        except asyncio.CancelledError:
            self.abandon(request)
            raise
        finally:
            self._waiting_bytes -= len(request.body)
            timer.cancel()
            if gone is not None:
                gone.remove_done_callback(call)
        ticket.on_admitted = None
        if gone is not None and gone.done():
            self.abandon(request)
            return None
        if ticket.state is TicketState.ADMITTED:
            self._admitted(request, self.clock() - ticket.asked_s)
            return None
        self.pool.release(ticket, self.clock())
        return self.refuse(self._busy("queue_timeout", request, ticket.need))

    def _look_again(self) -> None:
        """Look for room now and then as long as somebody waits."""
        if self._look is None and self.pool.limits.look_ahead is not None:
            delay_s = self.pool.look_in_s(self.clock(), LOOK_AGAIN_S)
            self._look = asyncio.get_running_loop().call_later(delay_s, self._looked)

    def _looked(self) -> None:
        self._look = None
        if self._engine_usage is not None and self.clock() - self._asked_s >= USE_AGAIN_S:
            self._asked_s = self.clock()
            if (use := self._engine_usage()) is not None:
                self.pool.learn_usage(use, self._asked_s)
        self.pool.admit_waiting(self.clock())
        if self.pool.waiting:
            self._look_again()

    def abandon(self, request: GuardedRequest) -> None:
        """The client left before it was served; a second call does nothing."""
        ticket = request.ticket
        if ticket is not None and ticket.state is not TicketState.GONE:
            self.pool.release(ticket, self.clock())
            self.meters.left_queue += 1

    def release(self, request: GuardedRequest, finished: bool, sent: bool = True) -> None:
        """The answer ended. vLLM frees an aborted request a step later, so what it held is kept back for a moment.

        Not so where the request was never `sent`: nothing is to be freed.
        """
        ticket = request.ticket
        if ticket is None or ticket.state is not TicketState.ADMITTED:
            return
        if finished:
            self.pool.learn_pace(self.learner.on_finished(request), self.clock() - ticket.admitted_s)
        hold_s = 0.0 if finished or not sent else self.policy.pool.abort_grace_s
        if request.demand.background and request.answered:
            hold_s = BACKGROUND_S
        if hold_s <= 0:
            self.pool.release(ticket, self.clock())
        else:
            asyncio.get_running_loop().call_later(hold_s, self._release_late, ticket)

    def _release_late(self, ticket: Ticket) -> None:
        self.pool.release(ticket, self.clock())

    def on_chunk(self, request: GuardedRequest, piece: bytes) -> None:
        """A piece of a good answer goes by."""
        request.answered = True
        if request.informative:
            self.learner.on_chunk(request, piece)

    def refuse(self, refusal: Refusal) -> Refusal:
        """Count a refusal, whoever found the reason (an upstream that is down and a slow client are seen elsewhere)."""
        self.meters.rejected[refusal.reason] += 1
        return refusal

    def _admitted(self, request: GuardedRequest, waited_s: float) -> None:
        self.meters.admitted += 1
        self.meters.waited(waited_s)
        if self.policy.pool.count == "auto":
            self.learner.on_admitted(request)

    def _busy(self, reason: str, request: GuardedRequest, need: Need) -> Refusal:
        size, blocks = self.limits.block_size or DEFAULT_BLOCK, self.pool.limits.blocks
        free = None if blocks is None else max(0, blocks - self.pool.held_blocks) * size
        retry_s = self.pool.retry_after_s(need, self.clock(), gave_up=reason == "queue_timeout")
        return refusals.busy(reason, request.weight.tokens if request.weight else 0, free, self.pool.waiting, retry_s)

    def _never(self, request: GuardedRequest, blocks: int) -> Refusal:
        size, demand = self.limits.block_size or DEFAULT_BLOCK, request.demand
        weight = request.weight
        assert weight is not None
        why = f"one sequence of it: the prompt has up to {weight.prompt_tokens:,}, "
        why += f"max_tokens {demand.output_tokens:,}" if demand.output_tokens is not None else "no max_tokens"
        return refusals.never_fits(weight.certain_blocks * size, blocks * size, why)

    def page(
        self, open_metrics: bool = False, upstream_up: bool | None = None, stopped_engines: int | None = None
    ) -> str:
        """The guard's part of the metrics page. `upstream_up` is the proxy's, `stopped_engines` the middleware's."""
        size, pool = self.limits.block_size or 0, self.pool
        gauges = {
            "waiting": ("Requests in the queue.", pool.waiting),
            "running": ("Requests admitted and not finished.", pool.running),
            "running_sequences": ("Sequences of these.", pool.held_seats),
            "reserved_tokens": ("KV tokens that they may grow to.", pool.held_blocks * size),
            "queued_tokens": ("KV tokens that waiting requests may grow to.", pool.queued_blocks * size),
            "pool_tokens": ("KV tokens that may be reserved at once; 0: not known.", (pool.limits.blocks or 0) * size),
            "waiting_clients": ("Clients that these are of.", pool.waiting_clients),
            "small_lane_total": ("Requests admitted to the part kept for small ones.", pool.lane_admitted),
            "draining": ("1 while new requests are refused.", int(self.draining)),
            "fail_open": (
                "1 while the pool's size is not known and all are admitted.",
                int(not self.limits.known and self.policy.pool.when_unknown == "open"),
            ),
            "tokenize_calls_total": ("Prompts counted with the server's tokenizer.", self.learner.calls),
            "policy_reloads_total": ("Times a changed policy was taken over.", self.file.reloads),
            "policy_reload_errors_total": ("Times a changed policy was broken; the old one stayed.", self.file.errors),
        }
        if upstream_up is not None:
            gauges["upstream_up"] = ("1 if the server behind the guard answered this scrape.", int(upstream_up))
        if stopped_engines is not None:
            gauges["stopped_engines"] = ("Engine processes that a signal has stopped (SIGSTOP).", stopped_engines)
        label = f'api_server="{os.getpid()}"' if self.limits.api_servers > 1 else ""
        return self.meters.page(gauges, label, open_metrics)

    def summary(self) -> str:
        """What decides who is admitted, for the log."""
        limits = self.limits
        if not limits.known:
            how = "admitted unweighed" if self.policy.pool.when_unknown == "open" else "refused"
            return f"the size of the KV cache is not known ({limits.source}): requests are {how} until it is"
        tokens = (self.pool.limits.blocks or 0) * (limits.block_size or 0)
        room = "" if limits.cacheless else f"{tokens:,} KV tokens and "
        words = f"admits up to {room}{self.pool.limits.seats or 'any number of'} sequences at once ({limits.source})"
        words += "; the model keeps no KV cache" if limits.cacheless else ""
        if limits.api_servers > 1:
            words += f"; one of {limits.api_servers} API servers, each with its own share of the cache"
        if limits.max_num_queued_reqs or limits.max_num_queued_tokens:
            words += "; vLLM's own queue bounds stay behind it"
        return words

    def native_flags_hint(self, version: str) -> str | None:
        """What to set vLLM's own queue bounds to, for a release that has them and where they are not set."""
        try:
            queue, pool = self.policy.queue, self.policy.pool
            flags = native_flags(release(version), self.limits, queue.requests, pool.overcommit)
        except LegroomError:
            return None
        if self.limits.max_num_queued_reqs:
            flags.pop("--max-num-queued-reqs", None)
        if self.limits.max_num_queued_tokens:
            flags.pop("--max-num-queued-tokens", None)
        words = " ".join(f"{name} {value}" for name, value in flags.items())
        return f"vLLM {version} can bound its own queue too; behind this guard set {words}" if words else None

    def drain(self, on: bool | None) -> dict[str, Any]:
        """Refuse new requests, or (False) admit them again; None changes nothing. The state then."""
        if on is not None:
            self.draining = on
        return self.status()

    def status(self) -> dict[str, Any]:
        """What `/-/legroom/status` answers."""
        size = self.limits.block_size or 0
        return {
            "draining": self.draining,
            "running": self.pool.running,
            "waiting": self.pool.waiting,
            "reserved_tokens": self.pool.held_blocks * size,
            "pool_tokens": (self.pool.limits.blocks or 0) * size,
            "pool_source": self.limits.source,
            "block_size": size,
            "max_running_sequences": self.pool.limits.seats,
            "max_model_len": self.limits.max_model_len,
            "api_servers": self.limits.api_servers,
            "admitted": self.meters.admitted,
            "rejected": {reason: count for reason, count in self.meters.rejected.items() if count},
            "policy": str(self.file.path) if self.file.path else None,
            "policy_error": self.file.last_error or None,
        }
