"""How often answers on this kind of evidence were right at first sight: the confidence of a diagnosis."""

from collections.abc import Mapping
from functools import cache
from typing import Literal

from legroom.diagnosis.case import Case
from legroom.diagnosis.finding import Strength
from legroom.facts import read_data

EvidenceKind = (
    Literal["black_box", "message", "disputed_message", "lookalike", "placed_oom", "unplaced_oom", "told_oom"]
    | Literal["broken_off", "words"]
)
"""What the first cause of an answer rests on."""

_KILLS = ("sigkill", "killed_word", "core_killed")  # SIGKILL, of which the text does not say who sent it.
_DISPUTED_STEPS = 2  # A second cause within so many steps of strength disputes the first.


def evidence_kind(case: Case, strengths: list[Strength], *, is_memory: bool, is_incomplete: bool) -> EvidenceKind:
    """The kind of evidence behind the likeliest cause. `strengths`: of all causes, highest first; `is_memory`: whether
    that cause is a shortage of memory; `is_incomplete`: whether decisive lines are missing."""
    if case.black_box is not None:
        return "black_box"
    if case.is_oom:
        is_told = case.first_failure is not None and case.first_failure.is_told and not case.has_site_frame
        is_weak = bool(strengths) and strengths[0] < Strength.USUAL  # no cause is usual at this place
        if case.is_only_described and is_told:
            return "told_oom"
        return "placed_oom" if case.site and not is_told and not is_weak else "unplaced_oom"
    if is_incomplete or (case.first_failure is None and case.secondary_failure is not None and is_memory):
        return "broken_off"
    if case.first_failure is not None and case.first_failure.id.endswith("_told"):
        return "disputed_message"
    if case.has(*_KILLS) and not is_memory:
        return "disputed_message"
    if not is_memory or (case.first_failure is not None and case.first_failure.id == "exception"):
        return "lookalike"
    if case.first_failure is not None and case.first_failure.id in _KILLS:
        return "disputed_message"
    is_disputed = len(strengths) > 1 and strengths[0] - strengths[1] <= _DISPUTED_STEPS
    return "disputed_message" if is_disputed else "message"


FixGround = Literal["plan", "figures", "printed", "experience", "lookalike"]
"""What a fix rests on: a plan of it, figures of the log, a message that prints its limit, or what helped others."""


@cache
def first_fix_success_rate(ground: FixGround) -> float:
    """The fraction of recorded first fixes on this ground that worked, smoothed: (worked + 1) / (given + 2)."""
    counts = read_data("diagnosis_confidence.json")["fixes"][ground]
    return float((counts["worked"] + 1) / (counts["given"] + 2))


@cache
def diagnosis_accuracy(kind: EvidenceKind) -> float:
    """The fraction of recorded diagnoses on this kind of evidence that were right: (right + 1) / (given + 2)."""
    counts = read_data("diagnosis_confidence.json")["answers"][kind]
    return float((counts["right"] + 1) / (counts["given"] + 2))


@cache
def unnamed_cause_rate() -> float:
    """Of the recorded diagnoses whose first cause was wrong, the fraction that did not name the right one at all."""
    counts = read_data("diagnosis_confidence.json")["beside_wrong_firsts"]
    return float(counts["unnamed"] / (counts["named"] + counts["unnamed"]))


def confidences(
    strengths: Mapping[str, Strength], first: float, likelihoods: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Each cause's probability, highest first: `first` for the first of `strengths`, the others by their strength.

    `strengths` come highest first; causes without evidence share alike. Where a person described the failure, these
    are the odds before the description, and `likelihoods` says how likely each cause makes its words.
    """
    labels = [*strengths, *(label for label in likelihoods or () if label not in strengths)]
    named = sum(list(strengths.values())[1:])
    unnamed = (1 - first) * (unnamed_cause_rate() if named else 1.0) if strengths else 1.0
    shares = {label: (1 - first - unnamed) * each / max(named, 1) for label, each in strengths.items()}
    shares |= dict.fromkeys(labels[:1] if strengths else (), first)
    each_unnamed = unnamed / max(len(labels) - len(strengths), 1)
    weighed = {label: shares.get(label, each_unnamed) * (likelihoods or {}).get(label, 1.0) for label in labels}
    total = sum(weighed.values()) if likelihoods else 1.0
    return {label: weight / total for label, weight in sorted(weighed.items(), key=lambda item: -item[1])}
