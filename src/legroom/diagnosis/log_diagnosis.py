"""From pieces of a log to its diagnoses, the last run first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from legroom.black_box import BlackBox
from legroom.diagnosis.case import Case, engine_of, platform_of
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.recorded_memory import (
    as_log,
    first_pieces,
    named_records,
    record_evidence,
    records_beside,
    whole_record,
    with_record,
)
from legroom.diagnosis.verdict import Diagnosis, diagnose_run
from legroom.records import dataclass, field
from legroom.vllm_logs.evidence import Evidence, Passage, evidence_of
from legroom.vllm_logs.lines import unwrapped
from legroom.vllm_logs.log_scanner import Scanner
from legroom.vllm_logs.startup_log import Startup, StartupEvent, events_in_line, split_starts, startup_of

MOST_RUNS = 20
MOST_EVIDENCE = 20_000
_KILLS = ("killed_word", "sigkill")


@dataclass
class Gathered:
    """What a log said, before it is cut into runs."""

    evidence: list[Evidence] = field(default_factory=list)
    events: list[StartupEvent] = field(default_factory=list)


def gather(passages: Iterable[Passage]) -> Gathered:
    gathered = Gathered()
    for passage in passages:
        gathered.evidence += evidence_of(passage)
        line = passage.line
        gathered.events += events_in_line(line.raw, line.number, line.process)
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


def _with_utilization(startup: Startup, events: Sequence[StartupEvent]) -> Startup:
    """The share of the card as the accounting lines print it, where the flags are not shown."""
    ratio = next((event.fields["utilization_ratio"] for event in events if "utilization_ratio" in event.fields), None)
    if startup.args.gpu_memory_utilization is not None or not isinstance(ratio, float):
        return startup
    return replace(startup, args=replace(startup.args, gpu_memory_utilization=ratio))


def _without_self_inflicted(evidence: Sequence[Evidence]) -> list[Evidence]:
    """A server that goes down after an error ends its workers and at last itself with SIGKILL: that is no failure of
    its own. A kill that names the memory limit stays one."""
    ending = next((item.line for item in evidence if item.id == "self_kill"), None)
    if ending is None:
        return list(evidence)
    return [
        replace(item, role="symptom")
        if item.id in _KILLS and item.line > ending and "oom" not in item.text.lower()
        else item
        for item in evidence
    ]


def _case(items: Sequence[Evidence], startup: Startup, source: str, lines: int) -> Case:
    evidence = _without_self_inflicted(items)
    return Case(tuple(evidence), startup, engine_of(evidence, startup), platform_of(evidence, startup), source, lines)


@dataclass(frozen=True)
class LogReading:
    """Everything one log gave."""

    source: str
    lines: int
    bytes: int
    runs: tuple[Diagnosis, ...]
    """The last run that says something first, then the others backwards in time."""


def read_log(pieces: Iterable[bytes], source: str = "the log", hints: Hints | None = None) -> LogReading:
    """A log, with the black boxes that it names or that lie beside it; or one black box by itself."""
    is_record, pieces = first_pieces(pieces)
    if is_record:
        return _read_record(whole_record(pieces, source), source, hints)
    scanner = Scanner()
    gathered = gather(scanner.passages(unwrapped(pieces)))
    cases = runs_of(gathered, source, scanner.lines)
    if hints is None or hints.local_models:
        cases = tuple(_with_record_of(case, source) for case in cases)
    runs = tuple(diagnose_run(case, hints) for case in reversed(cases))
    return LogReading(source, scanner.lines, scanner.bytes, _informative_first(runs))


def _read_record(record: BlackBox, source: str, hints: Hints | None) -> LogReading:
    # A record is one line of JSON: that is where a reader looks for what it says.
    evidence = [replace(item, line=1, text=item.text.strip()) for item in _told_by(record).evidence]
    evidence.append(record_evidence(record, 1))
    case = with_record(_case(evidence, Startup(), source, 1), record)
    return LogReading(source, 1, len(as_log(record)), (diagnose_run(case, hints),))


def _told_by(record: BlackBox) -> Gathered:
    text = as_log(record)
    return gather(Scanner().passages(unwrapped([text]))) if text else Gathered()


def _with_record_of(case: Case, source: str) -> Case:
    """The case with the first record of its run: later ones are of what the first failure left behind."""
    if not case.is_oom:
        return case
    records = [(record, item.line) for item, record in named_records(case.evidence)]
    if not records:
        pids = frozenset(item.pid for item in case.evidence if item.pid)
        failure = case.first_failure
        records = [(record, failure.line if failure else 1) for record in records_beside(Path(source), pids)]
    failed = [pair for pair in records if pair[0].trigger == "out_of_memory"]
    if not failed:
        return case
    record, line = min(failed, key=lambda pair: pair[0].time_s)
    frames = frozenset(item.id for item in _told_by(record).evidence if item.role == "frame")
    return replace(with_record(case, record, line), recorded_frames=frames)


def in_order(readings: Sequence[LogReading]) -> tuple[LogReading, ...]:
    """Of several logs the one that failed first in time first, then those without a failure, as they were given."""

    def key(reading: LogReading) -> tuple[bool, str]:
        findings = reading.runs[0].findings if reading.runs else ()
        failure = reading.runs[0].case.first_failure if findings else None
        return not findings, failure.time if failure else ""

    return tuple(sorted(readings, key=key))


def _informative_first(runs: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """The last run first, unless the log ends before it says anything: then the one before it that does."""
    for unsaid in (("not understood", "cause above"), ("not understood",)):
        for number, run in enumerate(runs):
            if run.verdict not in unsaid:
                return (run, *runs[:number], *runs[number + 1 :])
    return runs
