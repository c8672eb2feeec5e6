"""A flag is ignored, removed, misspelt or never arrives."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.finding import Strength
from legroom.diagnosis.lookalike_causes import assess_lookalike, lookalike_fixes, named_remedy
from legroom.facts.flags import flags_ever
from legroom.facts.log_messages import message_group
from legroom.vllm_logs.evidence import Evidence

_REFUSED = message_group("refusal")
# pydantic prints the field, its message and a link below "N validation errors for".
_MESSAGE_LINES = 3
_MESSAGE_CHARS = 430  # Of 912 errors that vLLM 0.4 to 0.32 raises, 99 in 100 are shorter than 430 characters.


def examine(case: Case) -> Assessment | None:
    """Assesses a refusal by the argument parser or engine, a look-alike of one, or a flag without effect; else None."""
    error = next((item for item in case.all(*_REFUSED) if _ends_start(case, item)), None)
    if error is None:
        return assess_lookalike(case, "wrong_flag") or _assess_ignored_flag(case)
    strength = (
        Strength.POSSIBLE
        if case.is_oom or case.has("no_cache_blocks", "kv_bytes_short", "kv_tokens_short")
        else Strength.NAMED
    )
    return Assessment(strength, proof(error), _explanation(error.id, error.facts))


def _ends_start(case: Case, refusal: Evidence) -> bool:
    """Whether the refusal itself ended the start: no mere warning, and no heading above another known message."""
    if refusal.id == "unknown_env":  # vLLM only warns of a variable
        return not (case.first_failure or case.has("exception"))
    named = (item for item in case.evidence if item.role == "exception" and item.id != "exception")
    return refusal.id != "pydantic_extra" or not any(0 < item.line - refusal.line <= _MESSAGE_LINES for item in named)


def _assess_ignored_flag(case: Case) -> Assessment | None:
    """Assesses a flag without effect: CPU offload that no line confirms, or a warning of an ignored flag; else None."""
    offload = case.first("offload_on")
    is_covered = case.has("weights_loaded", "weights_read", "shards")  # the log has the lines about loading
    if offload and is_covered and case.is_oom and case.site in ("build", "load") and not case.has("offloaded"):
        why = "CPU offload was asked for, but no line says that anything was offloaded: this setting did not arrive."
        return Assessment(Strength.LIKELY, proof(offload, case.first("torch_oom", "cuda_oom")), why)
    ignored = case.first("flag_ignored")
    if ignored is None or case.was_ready:  # a warning that the server survived is no failure
        return None
    what = ignored.facts.get("flag") or "Something that was set"
    return Assessment(Strength.USUAL, proof(ignored), f"{what} is ignored in this release.")


def _explanation(id_: str, facts: Mapping[str, object]) -> str:
    """What is wrong with the flag or value: the sentence for the matched message `id_`, with its `facts` filled in."""
    if id_ == "unexpected_keyword":
        dests = {flag.dest for flag in flags_ever().values()} - {facts.get("name")}
        if near := get_close_matches(str(facts.get("name")), dests, 1, 0.9):
            return f"{facts.get('name')!r} is misspelt: the setting is {near[0]}."
        if "EngineArgs" in str(facts.get("callee")):
            return reason("keyword_unknown", facts)
    return reason(id_, {"limit_count": "length", **facts})


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable): the right flag of the release, or its removal."""
    from legroom.diagnosis.fixes.flag_repair import refusal_fixes  # only for a refused flag

    yield from lookalike_fixes(planner, "wrong_flag")
    yield from refusal_fixes(planner)
    refusal, fix = planner.case.first(*_REFUSED), known_fix("correct_the_flag")
    named = named_remedy(refusal.window[:_MESSAGE_CHARS]) if refusal else None
    yield replace(fix, steps=(named, *fix.steps)) if named else fix


CAUSE = Cause(entry="LR903", domain="settings")
