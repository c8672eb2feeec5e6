"""The runs of a server in one log: a file that outlives restarts holds several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from legroom.diagnosis.case import Case
from legroom.diagnosis.evidence import Evidence, Passage, evidence_of
from legroom.diagnosis.platforms import engine_of, platform_of
from legroom.diagnosis.startup_events import events_of
from legroom.planning.startup_log import Event, Startup, split_starts, startup_of
from legroom.records import dataclass, field

MOST_RUNS = 20
MOST_EVIDENCE = 20_000


@dataclass
class Gathered:
    """What a log said, before it is cut into runs."""

    evidence: list[Evidence] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def gather(passages: Iterable[Passage]) -> Gathered:
    """Read every passage once."""
    gathered = Gathered()
    for passage in passages:
        gathered.evidence += evidence_of(passage)
        gathered.events += events_of(passage)
        if len(gathered.evidence) > MOST_EVIDENCE:
            # The beginning says what runs, the end how it ended; the middle of a flood repeats itself.
            del gathered.evidence[MOST_EVIDENCE // 4 : MOST_EVIDENCE // 2]
    return gathered


def runs_of(gathered: Gathered, source: str, lines: int) -> tuple[Case, ...]:
    """One case a run, in the order of the log; of very many, the last ones."""
    starts = list(split_starts(gathered.events))[-MOST_RUNS:]
    if not starts:
        return (_case(gathered.evidence, Startup(), source, lines),) if gathered.evidence else ()
    bounds = [events[0].line_number for events in starts]
    bounds[0] = 0 if len(starts) < MOST_RUNS else bounds[0]
    cases = []
    for number, events in enumerate(starts):
        last = bounds[number + 1] if number + 1 < len(bounds) else lines + 2
        own = [evidence for evidence in gathered.evidence if bounds[number] <= evidence.line < last]
        cases.append(_case(own, _with_utilization(startup_of(events), events), source, lines))
    return tuple(cases)


def _with_utilization(startup: Startup, events: Sequence[Event]) -> Startup:
    """The share of the card as the accounting lines print it, where the flags are not shown."""
    said = next((event.fields["utilization_ratio"] for event in events if "utilization_ratio" in event.fields), None)
    if startup.args.gpu_memory_utilization is not None or not isinstance(said, float):
        return startup
    return replace(startup, args=replace(startup.args, gpu_memory_utilization=said))


def _case(evidence: Sequence[Evidence], startup: Startup, source: str, lines: int) -> Case:
    return Case(tuple(evidence), startup, engine_of(evidence, startup), platform_of(evidence, startup), source, lines)
