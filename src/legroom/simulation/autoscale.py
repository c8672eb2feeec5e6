"""A fleet that grows and shrinks by a policy while it replays a trace: does it flap, does it thrash, what does it cost?

Every replica admits and preempts by its pool as vLLM does, in estimated seconds (`replay` is the exact one). A router
sends each request to the replica that has the fewest. The policy decides every fifteen seconds as the controller of a
HorizontalPodAutoscaler does: the larger of what the two metrics ask for, a tolerance around the target, limits on how
fast, and within a window the highest number asked for when shrinking, the lowest when growing. A replica
that was asked for serves after its start; one that is given up takes no more requests and leaves when its last has
finished.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from legroom.errors import LegroomError
from legroom.planning.scaling import SYNC_S, TOLERANCE, ScalingPolicy
from legroom.simulation.fast.accounting import span_seconds, step_seconds
from legroom.simulation.fast.fast_replay import Progress
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.timeline import admissible, percentile
from legroom.simulation.trace import Trace

_FLAP_OF_STARTS = 2.0
"""A replica that is asked for again within this many starts of giving one up should not have been given up."""
_THRASH_RATIO = 0.2


@dataclass(frozen=True)
class FleetSample:
    """The fleet at one decision."""

    time_s: float
    replicas: int
    """Asked for."""
    ready: int
    kv_use: float
    """Of the average replica that is asked for."""
    waiting: int


@dataclass(frozen=True)
class ScaledReplay:
    """What a policy made of a trace."""

    policy: ScalingPolicy
    samples: list[FleetSample]
    changes: list[tuple[float, int, int]]
    """Seconds, from so many replicas, to so many."""
    finished: int
    rejected: int
    preemptions: int
    first_token_s: list[float]
    replica_seconds: float
    """Replicas that were paid for, from the decision on."""

    @property
    def flaps(self) -> int:
        """Times that a replica was asked for soon after one was given up."""
        soon_s = _FLAP_OF_STARTS * self.policy.start_s
        given_up_s, count = -math.inf, 0
        for time_s, before, after in self.changes:
            if after < before:
                given_up_s = time_s
            elif time_s - given_up_s < soon_s:
                count += 1
        return count

    @property
    def is_thrashing(self) -> bool:
        """One preemption to five finished requests: the level of the alerts."""
        return self.preemptions >= _THRASH_RATIO * max(self.finished, 1)

    @property
    def is_steady(self) -> bool:
        return not self.flaps and not self.is_thrashing

    def as_json(self) -> dict[str, Any]:
        ordered = sorted(self.first_token_s)
        return {
            "policy": self.policy.to_json(),
            "finished": self.finished,
            "rejected": self.rejected,
            "preemptions": self.preemptions,
            "first_token": {f"p{share}_s": round(percentile(ordered, share / 100), 3) for share in (50, 90, 99)}
            if ordered
            else {},
            "replicas": {
                "peak": max((sample.replicas for sample in self.samples), default=self.policy.least),
                "mean": round(self.replica_seconds / max(self.samples[-1].time_s, 1.0), 3) if self.samples else 0.0,
            },
            "replica_hours": round(self.replica_seconds / 3600, 4),
            "flaps": self.flaps,
            "steady": self.is_steady,
            "changes": [{"time_s": round(time_s, 1), "from": a, "to": b} for time_s, a, b in self.changes],
        }


@dataclass(slots=True)
class _Served:
    """A request at a replica."""

    index: int
    tokens: int
    """Held when it was admitted, or to be computed then."""
    remaining: int
    """Tokens that it would still generate then."""
    since: int = 0
    """The step of its admission."""


class _Replica:
    """One server with a clock of its own. Between an arrival, a finish and a full pool nothing is decided, so the steps
    up to there are taken at once; prompts are computed in chunks of the step's budget, and nothing is shared."""

    def __init__(self, settings: SchedulerSettings, cost: StepCost, ready_s: float) -> None:
        self.settings, self.cost = settings, cost
        self.running: list[_Served] = []
        self.ends: list[tuple[int, int, _Served]] = []
        """The step in which each of them finishes, as a heap."""
        self.waiting: deque[_Served] = deque()
        self.step = self.stored = 0
        self.now_s = self.ready_s = ready_s
        self.leaving = False
        self.preemptions = self.finished = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def kv_use(self) -> float:
        return min(1.0, self._blocks() / self.settings.usable_blocks)

    def _blocks(self) -> int:
        """In use, every request taken as one of the mean length."""
        if not self.running:
            return 0
        mean = self.stored / len(self.running)
        return len(self.running) * (self.settings.most_blocks_of(int(mean) + 1, 1))

    def take(self, request: _Served, time_s: float) -> None:
        if not self.load:
            self.now_s = max(self.now_s, time_s)
        self.waiting.append(request)

    def serve_until(self, time_s: float, first_token_s: dict[int, float]) -> None:
        while self.now_s < time_s and (self.running or self.waiting):
            admitted = self._admit() if self.waiting else None
            if admitted:
                self._prefill(admitted, first_token_s)
            else:
                self._decode(time_s)
            self._finish()
            self._make_room()

    def _admit(self) -> list[_Served]:
        """Those at the head of the queue whose prompts the pool has room for, up to one step's budget and one more."""
        admitted: list[_Served] = []
        free = self.settings.usable_blocks - self._blocks()
        budget = self.settings.max_num_batched_tokens
        while self.waiting and budget > 0 and len(self.running) + len(admitted) < self.settings.max_num_seqs:
            needed = self.settings.most_blocks_of(self.waiting[0].tokens, 2)
            if needed > free and (self.running or admitted):
                break
            request = self.waiting.popleft()
            free, budget = free - needed, budget - request.tokens
            admitted.append(request)
        return admitted

    def _prefill(self, admitted: list[_Served], first_token_s: dict[int, float]) -> None:
        decoding = len(self.running)
        prompt = sum(request.tokens for request in admitted)
        steps = math.ceil(prompt / max(1, self.settings.max_num_batched_tokens - decoding))
        tokens = decoding + math.ceil(prompt / steps)
        held = self.stored + prompt
        self.now_s += steps * step_seconds(self.cost, tokens, held, decoding + len(admitted))  # type: ignore[no-untyped-call]
        self._advance(steps)
        for request in admitted:
            first_token_s.setdefault(request.index, self.now_s)
            request.since = self.step - 1  # the last of these steps gave it a token already
            self.running.append(request)
            self.stored += request.tokens + 1
            heapq.heappush(self.ends, (request.since + request.remaining, request.index, request))

    def _decode(self, time_s: float) -> None:
        running = len(self.running)
        step_s = step_seconds(self.cost, running, self.stored, running)  # type: ignore[no-untyped-call]
        free = (self.settings.usable_blocks - self._blocks()) * self.settings.block_size
        until_s = math.ceil((time_s - self.now_s) / step_s)
        steps = max(1, min(self.ends[0][0] - self.step, until_s, int(free) // running))
        self.now_s += span_seconds(self.cost, running, self.stored, steps)  # type: ignore[no-untyped-call]
        self._advance(steps)

    def _advance(self, steps: int) -> None:
        self.step += steps
        self.stored += steps * len(self.running)

    def _finish(self) -> None:
        while self.ends and self.ends[0][0] <= self.step:
            _, _, request = heapq.heappop(self.ends)
            self._remove(request)
            self.finished += 1

    def _remove(self, request: _Served) -> None:
        self.running.remove(request)
        self.stored -= request.tokens + self.step - request.since

    def _make_room(self) -> None:
        """The last to come is thrown out, and computed again from its first token."""
        while len(self.running) > 1 and self._blocks() > self.settings.usable_blocks:
            victim = self.running[-1]
            self._remove(victim)
            self.ends = [end for end in self.ends if end[2] is not victim]
            heapq.heapify(self.ends)
            done = self.step - victim.since
            self.waiting.appendleft(_Served(victim.index, victim.tokens + done, victim.remaining - done))
            self.preemptions += 1


@dataclass
class _Controller:
    """The decisions of a HorizontalPodAutoscaler with the policy's behaviour."""

    policy: ScalingPolicy
    replicas: int
    asked: deque[tuple[float, int]] = field(default_factory=deque)
    """What was asked for, over the window of shrinking."""
    changes: list[tuple[float, int, int]] = field(default_factory=list)

    def decide(self, time_s: float, kv_use_sum: float, waiting_sum: int) -> int:
        policy = self.policy
        wanted = max(
            self._wanted(kv_use_sum, policy.kv_target_ratio), self._wanted(waiting_sum, float(policy.waiting_target))
        )
        wanted = min(max(wanted, policy.least), policy.most)
        self.asked.append((time_s, wanted))
        while self.asked[0][0] < time_s - max(policy.down_window_s, policy.up_window_s):
            self.asked.popleft()
        if wanted < self.replicas:
            wanted = min(self.replicas, max(self._asked_within(time_s, policy.down_window_s)))
        elif wanted > self.replicas:
            wanted = max(self.replicas, min(self._asked_within(time_s, policy.up_window_s)))
        if wanted > self.replicas:
            wanted = min(wanted, 2 * self._within(time_s, policy.up_period_s, growing=True))
        elif wanted < self.replicas:
            wanted = max(wanted, self._within(time_s, policy.down_period_s, growing=False) - 1)
        if wanted != self.replicas:
            self.changes.append((time_s, self.replicas, wanted))
            self.replicas = wanted
        return self.replicas

    def _asked_within(self, time_s: float, window_s: float) -> Iterator[int]:
        return (asked for asked_s, asked in self.asked if asked_s >= time_s - window_s)

    def _wanted(self, total: float, target: float) -> int:
        """What one metric asks for; within the tolerance, what there is."""
        ratio = total / (self.replicas * target)
        return self.replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(total / target)

    def _within(self, time_s: float, period_s: float, *, growing: bool) -> int:
        """How many there were when the period of the limit began."""
        count = self.replicas
        for changed_s, before, after in reversed(self.changes):
            if changed_s < time_s - period_s:
                break
            if (after > before) == growing:
                count = before
        return count


def autoscaled(
    trace: Trace,
    settings: SchedulerSettings,
    cost: StepCost | None,
    policy: ScalingPolicy,
    progress: Progress | None = None,
) -> ScaledReplay:
    """Replay a trace of seconds over a fleet that the policy scales."""
    trace = trace.checked()
    if cost is None or not trace.in_seconds:
        raise LegroomError(
            "a policy decides every fifteen seconds, and this trace tells arrivals in steps",
            "give a trace with arrivals in seconds, and a GPU and a model or --step-ms",
        )
    if settings.engine == "V0":
        raise LegroomError("fleets of the V0 engine are not simulated", "plan a release from 0.8.0 on")
    return _Fleet(trace, replace(settings, async_scheduling=False), cost, policy).run(progress)


class _Fleet:
    def __init__(self, trace: Trace, settings: SchedulerSettings, cost: StepCost, policy: ScalingPolicy) -> None:
        self.trace, self.settings, self.cost, self.policy = trace, settings, cost, policy
        self.controller = _Controller(policy, policy.least)
        self.replicas = [_Replica(settings, cost, 0.0) for _ in range(policy.least)]
        self.gone: list[_Replica] = []
        self.first_token_s: dict[int, float] = {}
        self.samples: list[FleetSample] = []
        self.replica_seconds = 0.0

    def run(self, progress: Progress | None) -> ScaledReplay:
        accepted, rejections = admissible(self.trace, self.settings)
        rows = ((i, row) for i, row in enumerate(self.trace.rows()) if accepted[i])
        upcoming = next(rows, None)
        time_s, last_s = 0.0, self.trace.arrivals[-1]
        while upcoming or any(replica.load for replica in self.replicas):
            time_s += SYNC_S
            while upcoming and upcoming[1].arrival <= time_s:
                index, row = upcoming
                self._serve_until(row.arrival)
                self._route(_Served(index, row.prompt_len, row.output_len), row.arrival)
                upcoming = next(rows, None)
            self._serve_until(time_s)
            self._decide(time_s)
            if progress and last_s > 0:
                progress(min(1.0, time_s / last_s))
        everyone = [*self.gone, *self.replicas]
        arrivals = self.trace.arrivals
        return ScaledReplay(
            self.policy,
            self.samples,
            self.controller.changes,
            sum(replica.finished for replica in everyone),
            len(rejections),
            sum(replica.preemptions for replica in everyone),
            [token_s - arrivals[index] for index, token_s in self.first_token_s.items()],
            self.replica_seconds,
        )

    def _serve_until(self, time_s: float) -> None:
        for replica in self.replicas:
            replica.serve_until(time_s, self.first_token_s)

    def _route(self, request: _Served, time_s: float) -> None:
        """To the replica with the fewest requests: what a router that looks at its servers does."""
        serving = [replica for replica in self.replicas if not replica.leaving and replica.ready_s <= time_s]
        min(serving, key=lambda replica: replica.load).take(request, time_s)

    def _decide(self, time_s: float) -> None:
        for replica in [each for each in self.replicas if each.leaving and not each.load]:
            self.replicas.remove(replica)
            self.gone.append(replica)
        staying = [replica for replica in self.replicas if not replica.leaving]
        use = sum(replica.kv_use for replica in self.replicas)
        waiting = sum(len(replica.waiting) for replica in self.replicas)
        self.replica_seconds += SYNC_S * len(self.replicas)
        before = self.controller.replicas
        wanted = self.controller.decide(time_s, use, waiting)
        for _ in range(wanted - before):
            self.replicas.append(_Replica(self.settings, self.cost, time_s + self.policy.start_s))
        if wanted < before:
            # Kubernetes gives up pods that are not ready first, then the youngest.
            for replica in sorted(staying, key=lambda each: -each.ready_s)[: before - wanted]:
                replica.leaving = True
        ready = sum(replica.ready_s <= time_s and not replica.leaving for replica in self.replicas)
        self.samples.append(FleetSample(time_s, wanted, ready, use / max(wanted, 1), waiting))
