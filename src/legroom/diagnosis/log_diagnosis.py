"""Reads a log in pieces and diagnoses each of its runs."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from legroom.black_box import BlackBox
from legroom.diagnosis.case import FAILING, Case, detect_engine, detect_platform, is_own_failure
from legroom.diagnosis.cause_words import WordEvidence, word_evidence
from legroom.diagnosis.causes import cause_of
from legroom.diagnosis.contrasts import attempts_in_vain, contrasts, failed_utilizations, is_attempt, share_bounds
from legroom.diagnosis.fixes.failed_run import NOT_PLANNABLE, Hints, given_deployment, merge_args, other_card_notes
from legroom.diagnosis.pasted_command import command_lines, named_card, pasted_command, prose, sentence_lines
from legroom.diagnosis.recorded_memory import (
    detect_record,
    named_records,
    read_whole_record,
    record_as_log,
    record_evidence,
    records_beside,
    with_record,
)
from legroom.diagnosis.told_failure import FEW_WORDS, WORD, description_evidence
from legroom.diagnosis.told_settings import settings_of_rerun, stated_settings
from legroom.diagnosis.verdict import ASSERTED_CHANCE, Diagnosis, diagnose_run
from legroom.errors import LegroomError
from legroom.facts.flags import flag_name
from legroom.facts.log_messages import launcher_in
from legroom.facts.releases import Release, latest, logged_release
from legroom.records import dataclass, field
from legroom.vllm.args import ServeArgs
from legroom.vllm_logs.evidence import Evidence, LogPassage, evidence_in, parse_torch_oom
from legroom.vllm_logs.lines import rejoin_lines, service_name, with_ascii_figures
from legroom.vllm_logs.log_scanner import Scanner
from legroom.vllm_logs.printed_flags import load_logged_model
from legroom.vllm_logs.startup_log import Startup, StartupEvent, events_in_line, split_starts, startup_of

MAX_RUNS = 20
MAX_EVIDENCE = 20_000
_HEAD_BYTES = 256 * 1024  # Start of a log in which a pasted command is looked for.
_INSTRUCTION = re.compile(r"(?:FROM|ARG|ENV|RUN|CMD|ENTRYPOINT|COPY|ADD|WORKDIR|EXPOSE|USER|LABEL|HEALTHCHECK|SHELL)\s")
_KILLS = ("killed_word", "sigkill")
_MAY_HANG = re.compile(r"\b(?:may|might|could|would) (?:\w+ )?hang\b")
_OF_CARD = re.compile(r"(?i)(?<!ray.exceptions.)\b(?:CUDA|GPU|VRAM|HIP|NPU|HBM|torch)\b|显存")


@dataclass
class LogContents:
    """Evidence and start-up events of a log, before it is split into runs."""

    evidence: list[Evidence] = field(default_factory=list)
    events: list[StartupEvent] = field(default_factory=list)
    services: dict[int, str] = field(default_factory=dict)
    """The service that wrote a line, where a collector of several services names it."""
    words: WordEvidence | None = None
    """What people wrote beside what programs printed."""


def collect_contents(passages: Iterable[LogPassage]) -> LogContents:
    """Evidence and start-up events of all passages; of more than 20,000 pieces of evidence the middle is dropped."""
    contents = LogContents()
    for passage in passages:
        contents.evidence += evidence_in(passage)
        line = passage.line
        contents.events += events_in_line(line.raw, line.number, line.process)
        if service := service_name(line.raw):
            contents.services[line.number] = service
        if len(contents.evidence) > MAX_EVIDENCE:
            del contents.evidence[MAX_EVIDENCE // 4 : MAX_EVIDENCE // 2]
    return contents


def _attempts(text: str, evidence: Sequence[Evidence]) -> list[int]:
    """Numbers of the lines, commands or headings, that begin an attempt which failed after an earlier one did."""
    failures = [item.line for item in evidence if is_own_failure(item) or (item.number("available_bytes") or 1) <= 0]
    lines = text.split("\n") if len(failures) > 1 else []
    told = [number for number, line in enumerate(lines, 1) if prose("attempt").match(line)]
    # What a heading calls another attempt follows a first one, also where no command is shown.
    commands = sorted({*(number for number, _, _ in command_lines(lines)), *told, *([0] if told else [])})
    between = (any(first < line < then for line in failures) for first, then in pairwise(commands))
    return [then for then, failed in zip(commands[1:], between, strict=True) if failed and then <= max(failures)]


def split_services(contents: LogContents) -> list[LogContents]:
    """The contents by service, the one that failed last at the end; lines that name no service go to every one."""
    services = contents.services
    names = {services[event.line_number] for event in contents.events if event.line_number in services}
    if len(names) < 2:
        return [contents]
    parts = [
        LogContents(
            [item for item in contents.evidence if services.get(item.line, name) == name],
            [event for event in contents.events if services.get(event.line_number, name) == name],
            words=contents.words,
        )
        for name in sorted(names)
    ]
    return sorted(parts, key=lambda part: max((item.line for item in part.evidence if item.role in FAILING), default=0))


def _service_cases(contents: LogContents, source: str, line_count: int, attempts: Sequence[int]) -> tuple[Case, ...]:
    """The cases (runs) of every service; the last of each has the last start-ups of the others as `neighbours`."""
    runs = [cases for part in split_services(contents) if (cases := split_runs(part, source, line_count, attempts))]
    last = [cases[-1].startup for cases in runs]
    return tuple(
        replace(case, neighbours=tuple(other for other in last if other is not case.startup)) if len(runs) > 1 else case
        for cases in runs
        for case in cases
    )


def split_runs(contents: LogContents, source: str, line_count: int, attempts: Sequence[int] = ()) -> tuple[Case, ...]:
    """One case a run, in log order, at most the last 20. `attempts`: numbers of lines that begin another run."""
    starts = list(split_starts(contents.events))[-MAX_RUNS:] or ([[]] if attempts else [])
    if not starts:
        # A command or a failure alone is no report of a server.
        no_report = {"failure_told"} if contents.words else {"failure_told", "vllm_named"}
        is_report = bool({item.id for item in contents.evidence} - no_report) or _tells_of_memory(contents.words)
        return (_make_case(contents.evidence, Startup(), source, line_count),) if is_report else ()
    bounds = [events[0].line_number if events else 0 for events in starts]
    bounds[0] = 0 if len(starts) < MAX_RUNS else bounds[0]
    if attempts and len(starts) == 1:
        bounds = [0, *attempts]
        spans = pairwise((*bounds, line_count + 2))
        starts = [[event for event in contents.events if first <= event.line_number < last] for first, last in spans]
    cases = []
    for number, events in enumerate(starts):
        last = bounds[number + 1] if number + 1 < len(bounds) else line_count + 2
        own = [i for i in contents.evidence if bounds[number] <= i.line < last or (attempts and i.id == "gpus_listed")]
        startup = _with_utilization(startup_of(events), events) if events else Startup()
        cases.append(_make_case(own, startup, source, line_count))
    return tuple(cases)


def _tells_of_memory(told: WordEvidence | None) -> bool:
    """Whether a description that names no program most likely is of a shortage of memory."""
    if told is None:
        return False
    label = max(told.likelihoods, key=lambda each: told.likelihoods[each])
    return cause_of(label).is_memory and told.likelihoods[label] >= ASSERTED_CHANCE * sum(told.likelihoods.values())


def _with_utilization(startup: Startup, events: Sequence[StartupEvent]) -> Startup:
    """The start-up with gpu_memory_utilization from vLLM's memory accounting lines where no flag is printed."""
    ratio = next((event.fields["utilization_ratio"] for event in events if "utilization_ratio" in event.fields), None)
    if startup.args.gpu_memory_utilization is not None or not isinstance(ratio, float):
        return startup
    return replace(startup, args=replace(startup.args, gpu_memory_utilization=ratio))


def _demote_own_kills(evidence: Sequence[Evidence]) -> list[Evidence]:
    """The evidence, SIGKILLs by a server that shuts down or by hand turned into symptoms, unless an OOM is named."""
    ending = next((item.line for item in evidence if item.id == "self_kill"), float("inf"))
    by_hand = {item.line for item in evidence if item.id == "killed_by_hand"}
    return [
        replace(item, role="symptom")
        if item.id in _KILLS and (item.line in by_hand or (item.line > ending and "oom" not in item.text.lower()))
        else item
        for item in evidence
    ]


def _promote_described_failures(evidence: Sequence[Evidence]) -> list[Evidence]:
    """The evidence; what a person tells becomes the failure where no program printed one, and is left out elsewhere."""
    if any(is_own_failure(item) and not (item.is_told and item.role == "host") for item in evidence):
        return [item for item in evidence if item.role != "told"]
    return [replace(item, role="failure") if item.role == "told" else item for item in evidence]


def _without_other_attempts(items: Sequence[Evidence]) -> list[Evidence]:
    """The evidence without errors that a sentence calls overcome, that a guide lists, or of an earlier attempt."""
    kinds: dict[str, list[Evidence]] = {"": [], "other_attempt": [], "listed": []}
    for item in items:
        is_said = item.role in (*FAILING, "told", "exception") and bool(item.window) and not (item.at or item.process)
        before = item.text.partition(item.window[:8] or "\n")[0]  # the window goes on in the next line
        if is_said and item.role != "exception" and prose("overcome").search(item.window.partition(" ")[2]):
            continue
        kinds[next((kind for kind in kinds if kind and is_said and prose(kind).search(before)), "")].append(item)
    kept, earlier, listed = kinds.values()
    has_other = any(is_own_failure(item) or item.role == "told" for item in (*kept, *listed))
    kept += listed if len({item.id for item in listed}) < 3 else []  # more kinds at the head of items: a guide to them
    return sorted(kept if has_other else (*kept, *earlier), key=lambda item: item.line)


def _is_plausible(item: Evidence) -> bool:
    """Whether the line can be true: free bytes within total and desired ones; a hang that happened, not a warning."""
    if item.id == "hang_told":
        return not _MAY_HANG.search(item.text)
    free, total, desired = (item.number(f"{name}_bytes") for name in ("free", "total", "desired"))
    return item.id != "free_below_desired" or free is None or free <= min(total or free, desired or free)


def _with_false_oom(item: Evidence, is_of_objects: bool) -> Evidence:
    """The evidence, its id `false_oom` where a nearly free XPU or AMD GPU refused a small request, `garbage_length`
    where more than the card was requested and the text has a collective of Python objects (`is_of_objects`)."""
    oom = parse_torch_oom(item) if item.id == "torch_oom" else None
    if is_of_objects and oom is not None and oom.wanted_bytes > (oom.total_bytes or math.inf):
        return replace(item, id="garbage_length")
    if oom is None or oom.platform not in ("XPU", "HIP"):
        return item
    free, total = oom.free_bytes or 0, oom.total_bytes or 0
    is_false = 0 < total <= 4 * (free - oom.wanted_bytes) and free + (oom.torch_bytes or 0) <= total
    is_tiny = oom.platform == "XPU" or (16 * oom.wanted_bytes < free and 4 * free > 3 * total)
    return replace(item, id="false_oom") if is_false and is_tiny else item


def _make_case(items: Sequence[Evidence], startup: Startup, source: str, line_count: int) -> Case:
    """The case, engine and platform detected from the evidence, implausible lines out and vLLM's own kills demoted."""
    # What runs out beside the host's RAM is RAM unless its line names the card; a start's summary has free memory, too.
    is_of_host = any(item.id in ("ray_node_memory", "host_ram_told") for item in items)
    own = [i for i in items if i.id != "torch_oom_unsized" or not is_of_host or _OF_CARD.search(i.text)]
    is_of_objects = any(item.id == "object_collective" for item in items)
    own = [_with_false_oom(item, is_of_objects) for item in own if "summary" not in item.facts and _is_plausible(item)]
    if any(item.id == "exception" for item in own):  # an error that is printed outweighs a guess at the reason
        own = [item for item in own if item.id != "torch_oom_unsized" or "might be due to insuff" not in item.text]
        own = [item for item in own if item.id != "wrong_output"]  # what crashes explains the answers, too
    evidence = _promote_described_failures(_demote_own_kills(_without_other_attempts(own)))
    engine, platform = detect_engine(evidence, startup), detect_platform(evidence, startup)
    return Case(tuple(evidence), startup, engine, platform, source, line_count)


@dataclass(frozen=True)
class LogReading:
    """The diagnoses of all runs in one log."""

    source: str
    lines: int
    bytes: int
    runs: tuple[Diagnosis, ...]
    """The last informative run, then the others from last to first."""


def read_log(pieces: Iterable[bytes], source: str = "the log", hints: Hints | None = None) -> LogReading:
    """Diagnoses a log with the black boxes that it names or that are in its folder, or a black box alone."""
    is_record, pieces = detect_record(pieces)
    if is_record:
        return _read_record(read_whole_record(pieces, source), source, hints)
    scanner, head = Scanner(), bytearray()
    contents = collect_contents(scanner.passages(_copy_head(rejoin_lines(pieces), head)))
    text = with_ascii_figures(head.decode("utf-8", "replace"))
    if kind := _file_kind(text):
        why = f"this is a {kind}, not a log"
        hint = "legroom lint FILE checks it, legroom plan --file FILE (on the page: Plan, Command) plans it"
        raise LegroomError(why, hint)
    told = description_evidence(text, contents.evidence)
    contents.evidence = sorted((*contents.evidence, *told), key=lambda item: item.line)
    contents.words = word_evidence(text, contents.evidence)
    attempts = _attempts(text, contents.evidence)
    cases = _service_cases(contents, source, scanner.lines, attempts)
    cases = tuple(replace(case, words=contents.words) for case in cases)
    cases, hints = _with_pasted_command(cases, text, hints, attempts)
    if hints is None or not (hints.command or hints.model):
        cases = tuple(replace(case, is_unnamed=_names_no_vllm(case, text)) for case in cases)
    if hints is None or hints.local_models:
        cases = tuple(_attach_black_box(case, source) for case in cases)
    made = [diagnose_run(case, hints) for case in reversed(cases)]
    runs = tuple(replace(run, notes=(*run.notes, *other_card_notes(run.case, hints))) for run in made)
    return LogReading(source, scanner.lines, scanner.bytes, _put_informative_run_first(runs))


def _file_kind(text: str) -> str:
    """`Dockerfile`, `Kubernetes manifest` or `compose file` if the text is only that; empty for logs or live
    objects."""
    lines = [line for line in text.replace("\\\n", " ").split("\n") if line[:1].strip()]
    lines = [line for line in lines if not line.startswith(("#", "---", "- "))]
    if lines and all(_INSTRUCTION.match(line) for line in lines):
        return "Dockerfile"
    if not all(re.match(r"[a-z]\w*:", line) and not line.startswith("status:") for line in lines):
        return ""
    if lines and lines[0].startswith(("apiVersion:", "kind:")):
        return "Kubernetes manifest"
    return "compose file" if any(line.startswith("services:") for line in lines) else ""


def _names_no_vllm(case: Case, text: str) -> bool:
    """Whether sentences stand beside the failure, and neither they nor the log's lines name vLLM or its settings."""
    is_known = case.startup.vllm or case.startup.args_known or case.engine.generation or case.launcher
    if is_known or case.traceback_frames or case.has("trainer") or prose("names_vllm").search(text):
        return False
    shown = {item.line for item in case.evidence if not item.is_told and not item.id.startswith("asks_")}
    others = [line for number, line in enumerate(text.split("\n"), 1) if number not in shown]
    return len(WORD.findall(" ".join(others))) >= FEW_WORDS or bool(case.startup.args.model)


def _copy_head(pieces: Iterable[bytes], head: bytearray) -> Iterator[bytes]:
    """The pieces unchanged; the first 256 KiB of them are also appended to `head`."""
    for piece in pieces:
        head += piece[: _HEAD_BYTES - len(head)]
        yield piece


def _with_pasted_command(
    cases: tuple[Case, ...], text: str, hints: Hints | None, attempts: Sequence[int]
) -> tuple[tuple[Case, ...], Hints | None]:
    """The cases and hints with the text's pasted command, where the log prints no flags; `attempts`: line numbers."""
    tried = tuple(attempts_in_vain(text))
    in_vain = [(settings, False) for settings in tried]
    if not cases or all(case.startup.args_known for case in cases):
        cases = tuple(_with_args(case, case.startup.args, named_card(text)) for case in cases)
        return tuple(replace(case, reported=tuple(in_vain), attempts=tried) for case in cases), hints
    named = set(prose("image").findall(text)) or set(prose("release").findall(text))
    if len(named := named - {item.facts["what"] for item in cases[-1].all("release_told")}) == 1:
        (tag,) = named
        tags = [(case, case.startup.vllm or tag) for case in cases]
        cases = tuple(
            replace(c, startup=replace(c.startup, vllm=v), engine=replace(c.engine, version=v)) for c, v in tags
        )
    last = cases[-1]
    release = logged_release(last.startup.vllm) if last.startup.vllm else None
    failure, failure_line = last.first_failure, last.first_failure.line if last.first_failure else None
    told, full_text = tuple(contrasts(text, release or latest())), text
    for _, worked, clause in told:
        # What worked, or was tried afterwards, was not set in the run that failed.
        is_own = failure is not None and bool(failure.facts) and failure.window[:20] in clause
        text = text.replace(clause, "") if worked or (is_attempt(clause) and not is_own) else text
    command, args = pasted_command(text, failure_line, release, lambda args: _mismatch(args, last))
    if hints is not None and hints.command:
        args = given_deployment(hints, release).args
    elif command and not any(case.startup.args_known for case in cases):
        if rerun := {**_settings_of_failure(text, failure_line), **settings_of_rerun(text)}:  # the last value counts
            later = (f" {flag_name(name)} {value}" for name, value in rerun.items())
            args, command = replace(args, **rerun), re.split(r"\s(?:\d?>|[&|])", command)[0] + "".join(later)
        hints = replace(hints or Hints(), command=command)
    elif attempts:  # what the last attempt names counts before what all of them name
        own = pasted_command("\n".join(text.split("\n")[attempts[-1] - 1 :]), None, release)[1]
        args = merge_args(args, own)
        cases = (*cases[:-1], replace(cases[-1], too_small_share=_too_small_share(cases[:-1], text, attempts, release)))
    card, reported = named_card(full_text), [*((settings, worked) for settings, worked, _ in told), *in_vain]
    # What a sentence calls the cure was not set in the run that failed.
    cures = [item for settings, worked, _ in told if worked and not command for item in settings.items()]
    unset: dict[str, Any] = {name: None for name, value in cures if value and getattr(args, name, None) == value}
    args = replace(args, **unset)
    for settings, _, _ in (item for item in told if not item[1] and "default" in item[2]):
        for name, value in settings.items():  # the text gives another value than the default that failed
            if (given := getattr(args, name, None)) not in (None, value):
                args, reported = replace(args, **{name: value}), [({name: given}, True), *reported]
    failed, starved = failed_utilizations(told)
    failed = failed or {share for settings, _ in in_vain if (share := settings.get("gpu_memory_utilization"))}
    if len(failed) == 1 and args.gpu_memory_utilization is None:
        args = replace(args, gpu_memory_utilization=failed.pop())
    bounds = share_bounds(full_text)
    reported += [({"gpu_memory_utilization": bounds[1]}, False)] if bounds else []
    least = max(starved | {cases[-1].too_small_share or 0, bounds[0] if bounds else 0}) or None
    launcher = launcher_in(full_text)
    cases = tuple(replace(case, reported=tuple(reported), attempts=tried) for case in cases)
    cases = tuple(replace(case, too_small_share=least, launcher=launcher) for case in cases)
    return tuple(case if case.startup.args_known else _with_args(case, args, card) for case in cases), hints


def _settings_of_failure(text: str, failure_line: int | None) -> dict[str, Any]:
    """Setting -> value in the line that tells of the failure; empty unless commands stand in the text, all above it."""
    lines = text.split("\n")
    is_below = max((end for _, end, _ in command_lines(lines)), default=math.inf) < (failure_line or 0)
    return stated_settings([*sentence_lines(lines)][(failure_line or 0) - 1]) if is_below else {}


def _too_small_share(
    earlier: Sequence[Case], text: str, attempts: Sequence[int], release: Release | None
) -> float | None:
    """The largest gpu_memory_utilization of `earlier` attempts whose KV pool was too small; None without one."""
    lines, spans = text.split("\n"), pairwise((1, *attempts))
    shares = [
        pasted_command("\n".join(lines[first - 1 : then - 1]), None, release)[1].gpu_memory_utilization
        for case, (first, then) in zip(earlier, spans, strict=False)
        if case.phase == "startup_kv" and not case.is_oom
    ]
    return max((share for share in shares if share), default=None)


def _mismatch(args: ServeArgs, case: Case) -> int:
    """How badly flags fit the logged max_model_len, utilization and ranks: 0 they fit, 1 unknown, 2 they cannot."""
    check = case.first("kv_bytes_short", "kv_tokens_short")
    length, share = check.number("max_model_len_count") if check else None, args.gpu_memory_utilization
    printed = (item.facts.get("utilization_ratio") for item in case.all("free_below_desired"))
    if (share is not None and next(printed, share) not in (share, None)) or (
        case.startup.world_size not in (None, args.engine_ranks)
    ):
        return 2
    if length is None or args.max_model_len is not None:
        return 0 if args.max_model_len in (None, -1, length) or length is None else 2
    try:
        return 0 if load_logged_model(args.model).max_position_embeddings == length else 2
    except NOT_PLANNABLE:
        return 1


def _with_args(case: Case, args: ServeArgs, card: str | None) -> Case:
    """The case with these settings, and this name of a card, where its own lines show none."""
    startup = replace(case.startup, args=merge_args(args, case.startup.args))
    check = case.first("kv_bytes_short", "kv_tokens_short")
    length = startup.concurrency_len if (startup.max_concurrency or 1) < 1 else None
    if check is not None and not startup.args_known:
        length = check.number("max_model_len_count") or length  # what vLLM checks is in force
    if startup.args.max_model_len is None and length:
        startup = replace(startup, args=replace(startup.args, max_model_len=length))
    is_sized = startup.gpu_name or startup.gpu_total_bytes or case.ledger.total_bytes or case.has("free_below_desired")
    return replace(case, startup=startup if is_sized else replace(startup, gpu_name=card))


def _read_record(record: BlackBox, source: str, hints: Hints | None) -> LogReading:
    """The diagnosis of a recorded black box; all its evidence is on line 1, as a record is one line of JSON."""
    evidence = [replace(item, line=1, text=item.text.strip()) for item in _contents_of_record(record).evidence]
    evidence.append(record_evidence(record, 1))
    case = with_record(_make_case(evidence, Startup(), source, 1), record)
    return LogReading(source, 1, len(record_as_log(record)), (diagnose_run(case, hints),))


def _contents_of_record(record: BlackBox) -> LogContents:
    """The evidence in a black box's failure, read as the log text that vLLM would have written."""
    text = record_as_log(record)
    return collect_contents(Scanner().passages(rejoin_lines([text]))) if text else LogContents()


def _attach_black_box(case: Case, source: str) -> Case:
    """The case with the first black box of its run; later ones record what followed the first failure."""
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
    frames = frozenset(item.id for item in _contents_of_record(record).evidence if item.role == "frame")
    return replace(with_record(case, record, line), recorded_frames=frames)


def by_failure_time(readings: Sequence[LogReading]) -> tuple[LogReading, ...]:
    """Logs ordered by when they failed; those without a failure come last, in the order given."""

    def key(reading: LogReading) -> tuple[bool, str]:
        """(whether nothing was found, time of the failure as its line prints it)."""
        findings = reading.runs[0].findings if reading.runs else ()
        failure = reading.runs[0].case.first_failure if findings else None
        return not findings, failure.time if failure else ""

    return tuple(sorted(readings, key=key))


def _put_informative_run_first(runs: tuple[Diagnosis, ...]) -> tuple[Diagnosis, ...]:
    """The runs, of which the first with an understood log is moved to the front; the others keep their order."""
    uninformative = (("not understood", "cause above"), ("not understood",), ())
    first = next((run for verdicts in uninformative for run in runs if run.verdict not in verdicts), None)
    return tuple(sorted(runs, key=lambda run: run is not first))
