"""Looks like memory, is not. The known kinds are data (`lookalikes.json`); here is what is left: exceptions."""

import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.fixes.flag_repair import fewer_ranks_fix, named_value_fix
from legroom.diagnosis.lookalike_causes import (
    assess_lookalike,
    is_informational,
    lookalike_fixes,
    named_remedy,
    other_engine,
)
from legroom.diagnosis.pasted_command import prose
from legroom.facts import read_data
from legroom.facts.diagnosis_texts import other_engine_name
from legroom.vllm_logs.evidence import Evidence

_LABEL = "not_memory"
_QUERY_CHARS = 90
_NONE_TYPE_ERROR = "'NoneType' object"


def examine(case: Case) -> Assessment | None:
    """Assesses look-alikes, crashed steps, NCCL hangs, and exceptions without any memory message; None without one."""
    error = case.first("profiling_error")
    initial = error.number("initial_bytes") if error else None
    if error and initial is not None and initial == error.number("current_bytes"):
        return Assessment(Strength.NAMED, proof(error), reason("same_free_memory"))
    if lookalike := assess_lookalike(case, _LABEL):
        return lookalike
    if case.has("failed_execution_dump") and not case.is_oom:
        why = "A model step crashed and its input was saved; no allocation failed."
        return Assessment(Strength.LIKELY, proof(case.first("failed_execution_dump"), case.last("exception")), why)
    last = case.unfinished_milestone
    if last is not None and last.id == "nccl_setup":
        why = "The log ends while NCCL connects the ranks, without an error: a hang there, if it stays so for minutes."
        return Assessment(Strength.USUAL, proof(last), why)
    return _assess_exception(case)


def _first_exception(case: Case) -> Evidence | None:
    """The first exception in an error line; for a server that was never ready, else the first in any line; or None."""
    exceptions = [item for item in case.all("exception") if "Engine core initialization" not in item.text]
    error = next((item for item in exceptions if not is_informational(item)), None)
    return error if error is not None or case.was_ready else case.first("exception")


def _assess_exception(case: Case) -> Assessment | None:
    """Assesses an exception that is not about memory; None where an OOM, a failure or a shortage is in the text."""
    error = _first_exception(case)
    if error is None or error is case.truncated_error or case.is_oom or case.unread_shortage is not None:
        return None
    # That an engine died is no reason of its own where an exception says why.
    says_why = "Engine core initialization" not in error.text
    reasons = (item for item in case.evidence if item.role in ("failure", "host") and not is_informational(item))
    if any(not says_why or item.id != "died_silently" for item in reasons):
        return None
    why = f"The log ends in {_exception_name(error)}, and nothing in it speaks of memory running out."
    return Assessment(Strength.SUGGESTED, proof(error), why)


def _exception_name(error: Evidence) -> str:
    """The exception's class name without its module, such as `RuntimeError`."""
    return str(error.facts.get("type", "an exception")).rpartition(".")[2]


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable) of the look-alike, or steps to find and report the exception."""
    case = planner.case
    known = list(lookalike_fixes(planner, _LABEL))
    if known:
        yield fewer_ranks_fix(planner)
        yield from known
        return
    if case.has("profiling_error"):
        yield known_fix("strict_profiling_check")
        return
    error = _first_exception(case)
    if error is None:
        is_crash = case.first_failure is not None and not case.first_failure.is_told
        yield _crashed_step_fix(planner) if is_crash else known_fix("no_error_shown")
        return
    yield named_value_fix(planner, _exception_message(error))
    yield _exception_fix(error, planner)
    if case.has("failed_execution_dump"):
        yield _crashed_step_fix(planner)


def _exception_message(error: Evidence) -> str:
    """The message on the exception's own line, and on the next ones where that ends with a comma or a colon."""
    own = error.text.partition(str(error.facts.get("type") or "\n"))[2].lstrip(":(| ").rstrip()
    message = " ".join(
        (str(error.facts.get("message", "")) if own in ("", "'") or own.endswith((",", ":")) else own).split()
    )
    return prose("wrapper").sub("", message).strip(' ,"()') if "Worker failed with error" in message else message


def _exception_fix(error: Evidence, planner: FixPlanner) -> Fix:
    """Fix: what the exception's type suggests, then search and report it at vLLM."""
    kind, message = _exception_name(error), _exception_message(error)
    meanings = read_data("diagnosis_texts.json")["exceptions"]
    meaning = named_remedy(message) or str(meanings.get(kind, meanings[""]))
    if planner.case.was_ready and message.startswith(_NONE_TYPE_ERROR):
        meaning = str(meanings["NoneType"])
    frames = re.findall(r"(?:\bat |site-packages/)([A-Za-z]\w+)[./]", error.window)
    if package := next((name for name in frames if name not in ("vllm", "torch", "csrc", "aten")), None):
        meaning = f"the code of {package} refuses it: pip install -U {package}, or the version that this vLLM asks for"
    release = f" {planner.known.release.version}" if planner.known.release_known else ""
    if (other := other_engine(planner.case)) is not None and "vllm" in meaning.lower():
        meaning = str(meanings[""])
    where = f"the issues of {other_engine_name(other.id) if other else 'vllm-project/vllm'} on GitHub"
    steps: tuple[str, ...] = (meaning, f"search {where} for: {kind} {message[:_QUERY_CHARS]}".strip())
    if other is None:
        steps += (f"if it is not there: report it with `vllm collect-env`, the release{release} and the whole log",)
    return Fix("report", f"{kind}: {message[:200]}" if message else f"{kind} is what ended it.", steps=steps)


def _crashed_step_fix(planner: FixPlanner) -> Fix:
    """Fix: one run with CUDA_LAUNCH_BLOCKING=1 and --enforce-eager to find the failing operation."""
    fix = known_fix("crashed_step")
    return replace(fix, command=planner.command({"enforce_eager": True}, fix.env))


CAUSE = Cause(entry="LR901", domain="other", priority=1)
