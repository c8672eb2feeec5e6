"""Replays a trace over a fleet that an autoscaling policy scales: flapping, preemptions, cost.

Every replica admits and preempts by its pool as vLLM does, in estimated seconds. A router sends each request to the
replica that has the fewest. The policy decides every fifteen seconds as the HorizontalPodAutoscaler controller does:
the larger of the two metrics' proposals, a tolerance around the target, limits on the rate of change, and stabilization
windows. A new replica serves after its start-up time; a removed one takes no more requests and leaves when its last has
finished.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from legroom.errors import LegroomError
from legroom.planning.autoscaling_policy import SYNC_S, TOLERANCE, ScalingPolicy
from legroom.simulation.fast.accounting import decode_steps_seconds, step_seconds
from legroom.simulation.fast.fast_replay import Progress
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.timeline import admissible_requests, percentile
from legroom.simulation.trace import Trace

_FLAP_STARTS = 2.0
"""Growth within this many start-up times of shrinking is a flap: keeping the replica would have cost less."""


@dataclass(frozen=True)
class FleetSample:
    """The fleet at one decision."""

    time_s: float
    replicas: int
    """Requested by the policy."""
    ready: int
    kv_use: float
    """Mean over the requested replicas."""
    waiting: int


@dataclass(frozen=True)
class ScaledReplay:
    """The result of a policy on a trace."""

    policy: ScalingPolicy
    samples: list[FleetSample]
    changes: list[tuple[float, int, int]]
    """Time in seconds, replicas before, replicas after."""
    finished: int
    rejected: int
    preemptions: int
    first_token_s: list[float]
    replica_seconds: float
    """Paid time of all replicas, from the decision on."""

    @property
    def flaps(self) -> int:
        """How many times the fleet grew within two start-up times of having shrunk."""
        flap_s = _FLAP_STARTS * self.policy.start_s
        shrank_s, count = -math.inf, 0
        for time_s, before, after in self.changes:
            if after < before:
                shrank_s = time_s
            elif time_s - shrank_s < flap_s:
                count += 1
        return count

    @property
    def is_thrashing(self) -> bool:
        """Whether there was a preemption for every five finished requests or fewer, a level of `preemption_thrash`."""
        return self.preemptions >= 0.2 * max(self.finished, 1)

    @property
    def is_steady(self) -> bool:
        """Whether the fleet never flapped and did not thrash."""
        return not self.flaps and not self.is_thrashing

    def as_json(self) -> dict[str, Any]:
        """The replay as JSON: policy, p50 to p99 of time to first token in seconds, replicas, flaps and changes."""
        ordered = sorted(self.first_token_s)
        return {
            "policy": self.policy.to_json(),
            "finished": self.finished,
            "rejected": self.rejected,
            "preemptions": self.preemptions,
            "first_token": {f"p{p}_s": round(percentile(ordered, p / 100), 3) for p in (50, 90, 99) if ordered},
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
    """Tokens to prefill at its admission."""
    remaining: int
    """Output tokens left at its admission."""
    admitted_step: int = 0
    """The step of its admission."""


class _Replica:
    """One server with its own clock. Between an arrival, a finish and a full pool nothing is decided, so the steps up
    to there are taken in bulk; prompts are computed in chunks of the step's budget, and no prefix is shared."""

    def __init__(self, settings: SchedulerSettings, cost: StepCost, ready_s: float) -> None:
        self.settings, self.cost = settings, cost
        self.running: list[_Served] = []
        self.ends: list[tuple[int, int, _Served]] = []
        """Heap of the steps in which the running requests finish."""
        self.waiting: deque[_Served] = deque()
        self.step = self.stored = 0
        self.now_s = self.ready_s = ready_s
        self.draining = False
        self.preemptions = self.finished = 0

    @property
    def num_requests(self) -> int:
        """Running and waiting requests of this replica."""
        return len(self.running) + len(self.waiting)

    @property
    def kv_use(self) -> float:
        """The share of the usable KV blocks in use, 0 to 1."""
        return min(1.0, self._blocks_in_use() / self.settings.usable_blocks)

    def _blocks_in_use(self) -> int:
        """KV blocks in use, as if every running request held the mean number of tokens."""
        if not self.running:
            return 0
        return len(self.running) * (self.settings.max_blocks_of(int(self.stored / len(self.running)) + 1, 1))

    def add_request(self, request: _Served, time_s: float) -> None:
        """Queue a request that arrives at `time_s`; an idle replica's clock moves up to that moment."""
        if not self.num_requests:
            self.now_s = max(self.now_s, time_s)
        self.waiting.append(request)

    def serve_until(self, time_s: float, first_token_s: dict[int, float]) -> None:
        """Runs engine steps until `time_s`; notes each request's first-token time, by number, in `first_token_s`."""
        while self.now_s < time_s and (self.running or self.waiting):
            admitted = self._admit() if self.waiting else None
            if admitted:
                self._prefill(admitted, first_token_s)
            else:
                self._decode(time_s)
            while self.ends and self.ends[0][0] <= self.step:
                self._remove(heapq.heappop(self.ends)[2])
                self.finished += 1
            self._preempt_until_fits()

    def _admit(self) -> list[_Served]:
        """Dequeues waiting requests while KV blocks, max_num_seqs and token budget allow; if idle, at least one."""
        admitted: list[_Served] = []
        free = self.settings.usable_blocks - self._blocks_in_use()
        budget = self.settings.max_num_batched_tokens
        while self.waiting and budget > 0 and len(self.running) + len(admitted) < self.settings.max_num_seqs:
            needed = self.settings.max_blocks_of(self.waiting[0].tokens, 2)
            if needed > free and (self.running or admitted):
                break
            request = self.waiting.popleft()
            free, budget = free - needed, budget - request.tokens
            admitted.append(request)
        return admitted

    def _prefill(self, admitted: list[_Served], first_token_s: dict[int, float]) -> None:
        """Runs the steps that prefill the admitted requests beside decodes; notes their first-token times."""
        decoding = len(self.running)
        prompt = sum(request.tokens for request in admitted)
        steps = math.ceil(prompt / max(1, self.settings.max_num_batched_tokens - decoding))
        tokens = decoding + math.ceil(prompt / steps)
        held = self.stored + prompt
        self.now_s += steps * step_seconds(self.cost, tokens, held, decoding + len(admitted))
        self._decode_steps(steps)
        for request in admitted:
            first_token_s.setdefault(request.index, self.now_s)
            request.admitted_step = self.step - 1  # the last of these steps sampled its first token
            self.running.append(request)
            self.stored += request.tokens + 1
            heapq.heappush(self.ends, (request.admitted_step + request.remaining, request.index, request))

    def _decode(self, time_s: float) -> None:
        """Runs decode steps, at least one, until `time_s`, a request's end or a full pool, whichever is first."""
        running = len(self.running)
        step_s = step_seconds(self.cost, running, self.stored, running)
        free = (self.settings.usable_blocks - self._blocks_in_use()) * self.settings.block_size
        until_s = math.ceil((time_s - self.now_s) / step_s)
        steps = max(1, min(self.ends[0][0] - self.step, until_s, int(free) // running))
        self.now_s += decode_steps_seconds(self.cost, running, self.stored, steps)
        self._decode_steps(steps)

    def _decode_steps(self, steps: int) -> None:
        """Counts `steps` steps, in each of which every running request gains a token; the caller advances the clock."""
        self.step += steps
        self.stored += steps * len(self.running)

    def _remove(self, request: _Served) -> None:
        """Takes a request off the running list, and its tokens out of the replica's total of stored tokens."""
        self.running.remove(request)
        self.stored -= request.tokens + self.step - request.admitted_step

    def _preempt_until_fits(self) -> None:
        """Preempts the last running requests until the pool holds the rest; they are queued in front and recomputed."""
        while len(self.running) > 1 and self._blocks_in_use() > self.settings.usable_blocks:
            victim = self.running[-1]
            self._remove(victim)
            self.ends = [end for end in self.ends if end[2] is not victim]
            heapq.heapify(self.ends)
            done = self.step - victim.admitted_step
            self.waiting.appendleft(_Served(victim.index, victim.tokens + done, victim.remaining - done))
            self.preemptions += 1


@dataclass
class _Controller:
    """The decisions of a HorizontalPodAutoscaler with the policy's behaviour."""

    policy: ScalingPolicy
    replicas: int
    proposals: deque[tuple[float, int]] = field(default_factory=deque)
    """Proposals within the stabilization windows."""
    changes: list[tuple[float, int, int]] = field(default_factory=list)

    def decide(self, time_s: float, kv_use_sum: float, waiting_sum: int) -> int:
        """Sets and returns the replicas at `time_s`; KV use (0 to 1 each) and waiting requests are summed over them."""
        policy = self.policy
        desired = max(
            self._proposed_replicas(kv_use_sum, policy.kv_target_ratio),
            self._proposed_replicas(waiting_sum, float(policy.waiting_target)),
        )
        desired = min(max(desired, policy.least), policy.most)
        self.proposals.append((time_s, desired))
        while self.proposals[0][0] < time_s - max(policy.down_window_s, policy.up_window_s):
            self.proposals.popleft()
        if desired < self.replicas:
            desired = min(self.replicas, max(self._proposals_within(time_s, policy.down_window_s)))
        elif desired > self.replicas:
            desired = max(self.replicas, min(self._proposals_within(time_s, policy.up_window_s)))
        if desired > self.replicas:
            desired = min(desired, 2 * self._replicas_before(time_s, policy.scaling_period_s, growing=True))
        elif desired < self.replicas:
            desired = max(desired, self._replicas_before(time_s, policy.scaling_period_s, growing=False) - 1)
        if desired != self.replicas:
            self.changes.append((time_s, self.replicas, desired))
            self.replicas = desired
        return self.replicas

    def _proposals_within(self, time_s: float, window_s: float) -> Iterator[int]:
        """The replica counts proposed in the `window_s` seconds up to `time_s`."""
        return (proposal for proposed_s, proposal in self.proposals if proposed_s >= time_s - window_s)

    def _proposed_replicas(self, total: float, target: float) -> int:
        """The HPA's replica count for a metric's `total` and its `target` per replica; unchanged within TOLERANCE."""
        ratio = total / (self.replicas * target)
        return self.replicas if abs(ratio - 1) <= TOLERANCE else math.ceil(total / target)

    def _replicas_before(self, time_s: float, period_s: float, *, growing: bool) -> int:
        """Replicas before the first growth (shrinking unless `growing`) of the last `period_s`; if none, those now."""
        count = self.replicas
        for changed_s, before, after in reversed(self.changes):
            if changed_s < time_s - period_s:
                break
            if (after > before) == growing:
                count = before
        return count


def replay_autoscaled(
    trace: Trace, settings: SchedulerSettings, cost: StepCost | None, policy: ScalingPolicy, progress: Progress | None
) -> ScaledReplay:
    """Replays a trace over a fleet that `policy` scales; LegroomError if arrivals are in steps or the engine is V0."""
    trace = trace.checked()
    if cost is None or not trace.in_seconds:
        hint = "give a trace with arrivals in seconds, and a GPU and a model or --step-ms"
        raise LegroomError("a policy decides every fifteen seconds, and this trace tells arrivals in steps", hint)
    if settings.engine == "V0":
        raise LegroomError("fleets of the V0 engine are not simulated", "plan a release from 0.8.0 on")
    return _Fleet(trace, replace(settings, async_scheduling=False), cost, policy).run(progress)


class _Fleet:
    """The replay: replicas, the router in front of them, and the autoscaler."""

    def __init__(self, trace: Trace, settings: SchedulerSettings, cost: StepCost, policy: ScalingPolicy) -> None:
        self.trace, self.settings, self.cost, self.policy = trace, settings, cost, policy
        self.controller = _Controller(policy, policy.least)
        self.replicas = [_Replica(settings, cost, 0.0) for _ in range(policy.least)]
        self.gone: list[_Replica] = []
        self.first_token_s: dict[int, float] = {}
        self.samples: list[FleetSample] = []
        self.replica_seconds = 0.0

    def run(self, progress: Progress | None) -> ScaledReplay:
        """Replay the whole trace until every request is served; `progress` gets the replayed share, 0 to 1."""
        accepted, rejections = admissible_requests(self.trace, self.settings)
        rows = ((i, row) for i, row in enumerate(self.trace.rows()) if accepted[i])
        upcoming = next(rows, None)
        time_s, last_s = 0.0, self.trace.arrivals[-1]
        while upcoming or any(replica.num_requests for replica in self.replicas):
            time_s += SYNC_S
            while upcoming and upcoming[1].arrival <= time_s:
                index, row = upcoming
                self._serve_until(row.arrival)
                # The router sends it to the ready replica with the fewest requests.
                serving = [each for each in self.replicas if not each.draining and each.ready_s <= row.arrival]
                fewest = min(serving, key=lambda replica: replica.num_requests)
                fewest.add_request(_Served(index, row.prompt_len, row.output_len), row.arrival)
                upcoming = next(rows, None)
            self._serve_until(time_s)
            self._decide(time_s)
            if progress and last_s > 0:
                progress(min(1.0, time_s / last_s))
        every = [*self.gone, *self.replicas]
        finished, preempted = sum(each.finished for each in every), sum(each.preemptions for each in every)
        waits_s = [token_s - self.trace.arrivals[index] for index, token_s in self.first_token_s.items()]
        fleet = (self.policy, self.samples, self.controller.changes)
        return ScaledReplay(*fleet, finished, len(rejections), preempted, waits_s, self.replica_seconds)

    def _serve_until(self, time_s: float) -> None:
        """Run every replica's engine steps up to `time_s`."""
        for replica in self.replicas:
            replica.serve_until(time_s, self.first_token_s)

    def _decide(self, time_s: float) -> None:
        """One sync of the autoscaler: starts replicas or drains the youngest, drops drained ones, records a sample."""
        for replica in [each for each in self.replicas if each.draining and not each.num_requests]:
            self.replicas.remove(replica)
            self.gone.append(replica)
        remaining_replicas = [replica for replica in self.replicas if not replica.draining]
        use = sum(replica.kv_use for replica in self.replicas)
        waiting = sum(len(replica.waiting) for replica in self.replicas)
        self.replica_seconds += SYNC_S * len(self.replicas)
        before = self.controller.replicas
        desired = self.controller.decide(time_s, use, waiting)
        for _ in range(desired - before):
            self.replicas.append(_Replica(self.settings, self.cost, time_s + self.policy.start_s))
        if desired < before:
            # Kubernetes removes pods that are not ready first, then the youngest.
            for replica in sorted(remaining_replicas, key=lambda each: -each.ready_s)[: before - desired]:
                replica.draining = True
        ready = sum(replica.ready_s <= time_s and not replica.draining for replica in self.replicas)
        self.samples.append(FleetSample(time_s, desired, ready, use / max(desired, 1), waiting))
