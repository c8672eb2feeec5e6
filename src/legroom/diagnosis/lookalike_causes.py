"""Failures that look like a lack of memory and are not: their kind, and fixes filled with values from the log."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

from legroom.diagnosis.case import FAILING, FULL_POOL_PERCENT, Case
from legroom.diagnosis.finding import Assessment, Fix, FixKind, Strength, proof
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.diagnosis.lookalike_words import MatchedLine
from legroom.diagnosis.pasted_command import prose
from legroom.facts import read_data
from legroom.facts.diagnosis_texts import Lookalike, LookalikeFix, lookalikes, other_engine_name, other_engines
from legroom.facts.log_messages import message_group
from legroom.vllm_logs.evidence import Evidence

SHORTAGE = message_group("shortage")
"""Messages of a real shortage of memory."""
_OF_VLLM = message_group("of_vllm")  # Messages that no other program prints, but its forks.
_INFORMATIONAL = re.compile(r"\b(?:INFO|DEBUG|WARNING)\b")
_VLLM_FRAME = re.compile(r'File "(?:[^"]*/)?vllm/')
_ONLY_VLLM = re.compile(r"(?i)vllm|--(?!force)[a-z]+-[a-z]")  # vLLM by name, or a flag of it.
_PORTS = ("engine_vllm_cpp", "engine_nano_vllm", "engine_vllm_rs")
"""Programs of their own with vLLM in the name, which take some of its flags."""
_NAMES_VLLM = re.compile(r"(?i)(?<!not )vllm(?![^\n]{0,20}\bok\b)")  # not where a table says that it works
_LEVEL_CHARS = 160  # The logger's level stands within this many characters of a line.


def other_engine(case: Case) -> Evidence | None:
    """The line that shows another engine (SGLang, llama.cpp ...), where nothing in the text is vLLM's; else None."""
    is_named = case.has("vllm_named", *_OF_VLLM) or any("vllm" in item.text.lower() for item in case.evidence)
    is_named = is_named or bool(case.engine.generation) or (case.has("engine_pytorch") and case.tells(_NAMES_VLLM))
    with_rollouts = any(prose("rollouts").search(item.text) for item in case.all("trainer"))
    beside = ["engine_trainer", "engine_llm_compressor"] if is_named or with_rollouts or case.has("story_told") else []
    if case.first_failure is not None and case.first_failure.role == "failure":
        beside.append("engine_litellm")  # a gateway passes on what a server printed
    found = [item for item in case.all(*other_engines()) if item.id not in beside]
    found = [item for item in found if not is_named or not any("mention" in name for name in item.facts)]
    # Frames by name may be of any engine, unless their path names its package.
    other = next((item for item in found if "package" in item.facts), found[0] if found else None)
    is_package = other is not None and "package" in other.facts
    by_vllm = case.startup.vllm or case.startup.args_known or (case.engine.generation and not is_package)
    by_vllm = by_vllm and not (is_package and other is not None and other.id in _PORTS)
    if other is None or by_vllm or any(_VLLM_FRAME.search(item.text) for item in case.evidence):
        return None
    named = case.first("vllm_named")
    is_compared = named is not None and named.line < other.line and not other.facts and not case.traceback_frames
    beside_vllm = other.id not in _PORTS and _NAMES_VLLM.search(other.text)
    has_frames = any(frame.line != other.line for frame in case.traceback_frames)
    is_framed = has_frames and not is_package and "image" not in other.facts
    return None if is_compared or beside_vllm or is_framed else other


def first_lookalike(case: Case, cause: str) -> tuple[Lookalike, Evidence] | None:
    """(non-memory failure, its line) that comes first, errors before warnings; None without, or of another cause."""
    first: tuple[tuple[bool, int, int], Lookalike, Evidence] | None = None
    has_failed = any(item.role in (*FAILING, "exception", "symptom") for item in case.evidence)
    for number, kind in enumerate(lookalikes()):
        if has_failed and kind.id.startswith("asks_"):
            continue  # what fails outweighs what is asked
        items = [item for item in case.all(*kind.evidence) if item.role != "stop" or _explains_errors(case, item)]
        if not items:
            continue
        evidence = min(items, key=lambda item: (is_informational(item), item.line, kind.evidence.index(item.id)))
        is_nvls = evidence.id == "nccl_unhandled_cuda" and case.has("nccl_nvls")
        is_asked = kind.id.startswith("asks_") or evidence.id in ("hang_told", "stale_rank", "connection_refused")
        line = 0 if evidence.id in ("cache_unwritable", "garbage_length") else evidence.line  # what others follow from
        key = (is_informational(evidence) or is_nvls or is_asked, line, number)
        if first is None or key < first[0]:
            first = (key, kind, evidence)
    return (first[1], first[2]) if first and first[1].cause == cause else None


def _explains_errors(case: Case, stop: Evidence) -> bool:
    """Whether a signal from outside, the line `stop`, explains the later errors: nothing failed before it."""
    failed = [item for item in case.evidence if item.role in ("failure", "host", "exception") and not item.is_warning]
    if stop.is_told:
        return not failed  # a sentence may stand before or after the lines that it is about
    dead = case.first("engine_dead")
    is_first = not any(item.line < stop.line for item in (*failed, *((dead,) if dead else ())))
    if stop.id == "run_finished" and not all("illed by signal" in item.text for item in failed):
        return False  # what is not the end of a process may be a failure of its own
    return is_first and bool(failed or dead or not case.was_ready)


def assess_lookalike(case: Case, cause: str) -> Assessment | None:
    """Assesses the first non-memory failure in the log that looks like one of memory, if of this cause; else None."""
    match = first_lookalike(case, cause)
    if match is None:
        return None
    kind, evidence = match
    driver = case.first("driver_version") if cause == "driver_or_cuda_mismatch" else None
    why = _matched_line(kind, evidence, FixPlanner(case)).fill(kind.why)
    return Assessment(_strength(case, kind, evidence), proof(evidence, driver), why)


def lookalike_fixes(planner: FixPlanner, cause: str) -> Iterator[Fix]:
    """The fixes in `lookalikes.json` of the matched non-memory failure, in its order; none where nothing matches."""
    match = first_lookalike(planner.case, cause)
    if match is None:
        return
    kind, evidence = match
    line, other = _matched_line(kind, evidence, planner), other_engine(planner.case)
    given = {name for fix in kind.fixes for name in fix.flags if getattr(planner.given_args, name, None) is not None}
    offered = (fix for fix in kind.fixes if not fix.is_for_given or fix.flags.keys() <= given)
    fixes = (_make_fix(fix, line, planner) for fix in offered)
    yield from fixes if other is None else _fixes_of_any_engine(fixes, other_engine_name(other.id))


def named_remedy(message: str) -> str | None:
    """What an error's `message` calls for: a setting, its own advice, or what it says does not go together; or None."""
    texts = read_data("diagnosis_texts.json")
    for rows in (texts["named_levers"], texts["named_clashes"]):
        for pattern, text in rows:
            if match := re.search(pattern, message):
                return str(text).format(**match.groupdict(""))
        if rows is texts["named_levers"] and (advised := prose("advised").search(message)):
            return f"as the message says: {advised[0].strip(' .;:,')}"
    return None


def _fixes_of_any_engine(fixes: Iterable[Fix], name: str) -> Iterator[Fix]:
    """The fixes without flags or steps that only vLLM has, then a search of the issues of the engine `name`."""
    steps: tuple[str, ...] = (f"search the issues of {name} on GitHub for the marked line",)
    search = Fix("report", "Its project knows its own builds and flags.", steps=steps)
    for fix in fixes:
        steps = tuple(step for step in fix.steps if not _ONLY_VLLM.search(step))
        if steps and not fix.flags:
            yield replace(fix, steps=steps)
    yield search


def _matched_line(kind: Lookalike, evidence: Evidence, planner: FixPlanner) -> MatchedLine:
    """The values in the matched log line, with the look-alike's default words for those that the line lacks."""
    line = MatchedLine(evidence.facts, evidence, planner)
    line.defaults = kind.unnamed
    return line


def is_informational(evidence: Evidence) -> bool:
    """Whether the line is logged as INFO, DEBUG or WARNING, which does not end a run."""
    return _INFORMATIONAL.search(evidence.text[:_LEVEL_CHARS]) is not None


def _strength(case: Case, kind: Lookalike, evidence: Evidence) -> Strength:
    """How strongly the line shows the look-alike, lowered where the log shows a real shortage or the run went on."""
    if case.has("nccl_oom"):
        return Strength.FAINT
    if case.has("shm_small", "shm_no_space", "shm_insufficient"):
        return min(Strength[kind.strength], Strength.POSSIBLE)
    killed = next((item for item in case.all("sigkill") if "oom" in item.text.lower()), None)
    shortage = case.first(*SHORTAGE) or killed
    if shortage is not None and (shortage.line <= evidence.line or evidence.role == "exception"):
        return Strength.USUAL  # a real shortage explains it
    if evidence.id == "hang_told" and (case.highest_kv_usage_percent >= FULL_POOL_PERCENT or case.generates):
        return Strength.POSSIBLE  # requests that wait for blocks look like a hang
    if evidence.role == "exception" and is_informational(evidence) and case.was_ready and not case.has("failure_told"):
        return Strength.NONE  # the server survived it
    if is_informational(evidence) and not kind.id.startswith(("shm_", "nccl_", "rpc_")):
        is_other = case.has("exception") or case.first_failure not in (None, evidence)
        return Strength.POSSIBLE if is_other else Strength.SUGGESTED
    return Strength[kind.strength]


def _make_fix(fix: LookalikeFix, line: MatchedLine, planner: FixPlanner) -> Fix:
    """The fix with the matched line's facts filled in, and the changed command."""
    steps = tuple(step for step in map(line.fill, fix.steps) if step)
    command = planner.command(fix.flags, fix.env) if fix.flags or fix.env else ()
    if fix.flags.get("disable_custom_all_reduce") and "--disable-custom-all-reduce" not in command:
        command = (*command, "--disable-custom-all-reduce")
    return Fix(cast(FixKind, fix.kind), line.fill(fix.why), dict(fix.flags), dict(fix.env), steps, command=command)
