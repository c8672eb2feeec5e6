"""Replays a trace through the scheduler."""

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Literal

from legroom.errors import LegroomError
from legroom.simulation.fast.accounting import step_seconds
from legroom.simulation.fast.fast_replay import FastReplay, NeedsStepByStepReplay, Progress, can_replay
from legroom.simulation.fast.jit import is_compiled_before, numba_is_installed
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.request import Request
from legroom.simulation.scheduler import Scheduler, SchedulerOutput, SchedulerV0
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.timeline import Clocks, Rejection, Sampler, ScheduledStep, Tally, Timeline, admissible_requests
from legroom.simulation.trace import Trace, prompt_tokens

ReplayEngine = Literal["auto", "reference", "fast", "compiled"]
StepSink = Callable[[ScheduledStep], None]

_MIN_REQUESTS_TO_COMPILE, _MIN_REQUESTS_TO_LOAD = 400_000, 20_000
"""Requests from which Numba is faster: compiling takes tens of seconds once, loading half a second."""


def simulate(
    trace: Trace,
    settings: SchedulerSettings,
    on_step: StepSink | None = None,
    *,
    cost: StepCost | None = None,
    engine: ReplayEngine = "auto",
    progress: Progress | None = None,
) -> Timeline:
    """Replays a trace through vLLM's scheduler; `cost`: estimates a step's seconds; `on_step`: called for each step."""
    # All engines decide alike.
    trace = trace.checked()
    check_cost(trace, cost)
    chosen = _choose_engine(trace, settings, on_step is not None) if engine == "auto" else engine
    if chosen != "reference":
        try:
            return FastReplay(trace, settings, cost, use_numba=chosen == "compiled").run(progress)
        except NeedsStepByStepReplay:
            pass
    return StepByStepReplay(trace, settings, on_step, cost, progress).run()


def check_cost(trace: Trace, cost: StepCost | None) -> None:
    """Raises LegroomError where the trace's arrivals are in seconds but no step times are known (`cost` None)."""
    if trace.in_seconds and cost is None:
        hint = "give a GPU and a model, or --step-ms"
        raise LegroomError(f"{trace.name} tells arrivals in seconds, so steps need a duration", hint)


def _choose_engine(trace: Trace, settings: SchedulerSettings, reports_steps: bool) -> ReplayEngine:
    """The fastest replay engine for these settings; "reference" if each step is to be reported."""
    if reports_steps or not can_replay(settings):
        return "reference"
    if len(trace) < _MIN_REQUESTS_TO_LOAD or not numba_is_installed():
        return "fast"
    return "compiled" if len(trace) >= _MIN_REQUESTS_TO_COMPILE or is_compiled_before() else "fast"


class StepByStepReplay:
    """The replay that mirrors the scheduler: one step at a time, one object per request and block."""

    def __init__(
        self,
        trace: Trace,
        settings: SchedulerSettings,
        on_step: StepSink | None = None,
        cost: StepCost | None = None,
        progress: Progress | None = None,
        *,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.accepted, self.rejections = admissible_requests(trace, settings)
        self.trace, self.num_asked, self.pauses_s = trace.first_questions(self.accepted)
        self.cost, self.progress, self.on_step = cost, progress, on_step
        self.now_s = 0.0
        self.in_flight: deque[tuple[SchedulerOutput, float]] = deque()
        self.batches_in_flight = 2 if settings.async_scheduling else 1
        self.clocks = Clocks.of(len(trace))
        self.settings = settings
        self.scheduler = scheduler or (SchedulerV0(settings) if settings.engine == "V0" else Scheduler(settings))
        self.requests: list[Request | None] = [None] * len(trace)
        self.tally = Tally()
        self.sampler = Sampler()
        self.step = 0
        self.next_arrival: float | None = None

    def run(self) -> Timeline:
        """Serve every request that can be served; Ctrl-C ends the replay early, and the timeline says so."""
        try:
            self._run_all_steps()
        except KeyboardInterrupt:
            return self._timeline(True)
        return self._timeline(False)

    def _run_all_steps(self) -> None:
        """Adds requests as they arrive and runs scheduler steps until all of them have finished."""
        arrivals = self.trace.arrivals
        requests = ((i, row) for i, row in enumerate(self.trace.rows()) if self.accepted[i])
        upcoming = next(requests, None)
        while upcoming or self.scheduler.has_requests or self.in_flight:
            if upcoming and not self.scheduler.has_requests and not self.in_flight:
                if self.trace.in_seconds:
                    self.now_s = max(self.now_s, arrivals[upcoming[0]])
                else:
                    self.step = max(self.step, int(arrivals[upcoming[0]]))
            while upcoming and arrivals[upcoming[0]] <= (self.now_s if self.trace.in_seconds else self.step):
                index, row = upcoming
                request = self.requests[index] = Request(row, index, self.settings.max_model_len)
                if self.scheduler.hasher:
                    request.token_ids = prompt_tokens(row)
                self.scheduler.add_request(request)
                upcoming = next(requests, None)
            self.next_arrival = arrivals[upcoming[0]] if upcoming else None
            self._step()
            self.step += 1
            if self.progress and self.step % 2000 == 0:
                self.progress(self.tally.finished / len(self.trace))

    def _step(self) -> None:
        """Runs one engine step: schedules, advances the clock, and records the batch that completes, maybe an older."""
        scheduler, tally, clocks = self.scheduler, self.tally, self.clocks
        output = scheduler.schedule()
        self.rejections.extend(Rejection(request.id, why) for request, why in output.ignored)
        for request in output.scheduled:
            if request.first_sched_step < 0:
                request.first_sched_step = self.step
                tally.prompt_tokens += request.num_prompt_tokens
                clocks.sched_s[request.arrival_index] = self.now_s
        self._advance_clock(output)
        sampled, finished, ended_s = self._complete_oldest(output)
        for request in sampled:
            if request.first_token_step < 0:
                request.first_token_step = self.step
                clocks.token_s[request.arrival_index] = ended_s
        for request in finished:
            request.finish_step = self.step
            clocks.finish_s[request.arrival_index] = ended_s
        for _ in (*finished, *output.ignored):
            self._ask_again(ended_s)
        self._record_step(output, finished)
        if not (output.scheduled or output.preempted or output.ignored or self.in_flight or finished):
            self._reject_unschedulable()

    def _ask_again(self, answered_s: float) -> None:
        """Lets a user's next question arrive a pause after `answered_s`; if it is rejected, the one after it too."""
        arrivals = self.trace.arrivals
        while self.num_asked < len(arrivals):
            insort(arrivals, answered_s + self.pauses_s[self.num_asked], hi=self.num_asked)
            arrivals.pop(self.num_asked + 1)
            self.num_asked += 1
            if self.accepted[self.num_asked - 1]:
                return

    def _advance_clock(self, output: SchedulerOutput) -> None:
        """Adds the step's estimated seconds to the clock, where step times are known and it computes tokens."""
        if self.cost and output.scheduled:
            scheduler, scheduled = self.scheduler, output.scheduled
            running = [r for r in scheduler.running if r in scheduled or not scheduler.finishes_in_flight(r)]
            stored = sum(request.num_computed_tokens for request in running)
            self.now_s += step_seconds(self.cost, sum(output.scheduled.values()), stored, len(running))

    def _reject_unschedulable(self) -> None:
        """Rejects the first waiting request if nothing runs and it still does not fit."""
        stuck = self.scheduler.pop_unschedulable()
        if stuck is not None:
            self.rejections.append(Rejection(stuck.id, "can never be scheduled: the pool is too small for it"))
            self._ask_again(self.now_s)

    def _complete_oldest(self, output: SchedulerOutput) -> tuple[list[Request], list[Request], float]:
        """Queues `output`; completes the oldest batch in flight if due: (requests that sampled, finished, end in s)."""
        if output.scheduled:
            self.in_flight.append((output, self.now_s))
        if self.in_flight and (len(self.in_flight) >= self.batches_in_flight or not output.scheduled):
            oldest, ended_s = self.in_flight.popleft()
            return *self.scheduler.update_from_output(oldest), ended_s
        return [], [], self.now_s

    def _record_step(self, output: SchedulerOutput, finished: list[Request]) -> None:
        """Add the step to the totals and the pool samples, and report it to `on_step`."""
        scheduler, tally = self.scheduler, self.tally
        free = scheduler.kv_cache_manager.block_pool.num_free_blocks
        running, waiting = len(scheduler.running), scheduler.num_waiting
        used = self.settings.usable_blocks - free
        tally.steps += 1
        tally.preemptions += len(output.preempted)
        tally.scheduled_tokens += sum(output.scheduled.values())
        tally.recomputed_tokens += output.recomputed_tokens
        tally.cached_tokens += output.cached_tokens
        tally.finished += len(finished)
        tally.peak_blocks = max(tally.peak_blocks, used)
        tally.peak_running = max(tally.peak_running, running)
        tally.peak_waiting = max(tally.peak_waiting, waiting)
        for request in scheduler.running:
            slots, stored = scheduler.kv_cache_manager.slots_and_tokens(request)
            tally.held_slot_steps += slots
            tally.stored_token_steps += stored
        self.sampler.add(self.step, used, running, waiting, tally.preemptions)
        if self.on_step and output.scheduled:
            self.on_step(
                ScheduledStep(
                    self.step,
                    {request.id: tokens for request, tokens in output.scheduled.items()},
                    [request.id for request in output.preempted],
                    [request.id for request in finished],
                    running,
                    waiting,
                    free,
                )
            )

    def _timeline(self, interrupted: bool) -> Timeline:
        """The result of the replay, with -1 for steps that were not reached; `interrupted` marks it as incomplete."""
        known = self.requests
        first_sched = [request.first_sched_step if request else -1 for request in known]
        return Timeline(
            self.settings,
            self.trace,
            self.tally,
            first_sched,
            [request.first_token_step if request else -1 for request in known],
            [request.finish_step if request else -1 for request in known],
            [request.num_preemptions if request else 0 for request in known],
            first_sched if self.trace.in_seconds else [int(arrival) for arrival in self.trace.arrivals],
            self.sampler.samples(),
            self.rejections,
            self.clocks if self.trace.in_seconds else None,
            interrupted,
            self.step,
        )
