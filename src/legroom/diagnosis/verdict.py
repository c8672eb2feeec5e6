"""The diagnosis of one run: likely causes, checked fixes, known bugs of the release, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

from legroom.diagnosis.case import BOILERPLATE, FAILED_ALLOCATIONS, FAILING, SENTENCE_LINES, Case, is_traceback_line
from legroom.diagnosis.causes import Cause, cause_of, causes
from legroom.diagnosis.causes.leak_over_time import grows_on_card
from legroom.diagnosis.causes.weights_too_big import loads_with_ease
from legroom.diagnosis.confidence import (
    EvidenceKind,
    confidences,
    diagnosis_accuracy,
    evidence_kind,
    first_fix_success_rate,
)
from legroom.diagnosis.finding import Assessment, Finding, Fix, Remedies, Strength, proof, reason
from legroom.diagnosis.fixes.failed_run import Hints, KnownDeployment, weights_and_pool_beyond_card
from legroom.diagnosis.fixes.fix_checks import checked_dead_ends, checked_fixes, fix_ground, unexplained_bytes
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.diagnosis.fixes.hardware_fixes import other_hardware
from legroom.diagnosis.fixes.log_accounting import FULL_OF_WEIGHTS
from legroom.diagnosis.ledger import Ledger, expected_ledgers
from legroom.diagnosis.lookalike_causes import SHORTAGE, other_engine
from legroom.diagnosis.pasted_command import prose
from legroom.diagnosis.wanted_tensor import lever_of, site_by_size, tensor_sentence, wanted_tensors
from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.facts.diagnosis_texts import other_engine_meaning, other_engine_name, other_engine_text
from legroom.facts.gpus import all_gpus
from legroom.facts.known_bugs import KnownBug, bugs_with
from legroom.facts.log_messages import message_group
from legroom.memory.layout import Layout
from legroom.memory.tensors import Tensor
from legroom.records import dataclass, field
from legroom.regex import compiled
from legroom.units import GIB, gib
from legroom.vllm_logs.evidence import Evidence

Verdict = Literal["cause found", "not a memory problem", "no problem found", "cause above", "not understood"]

_FAILED = (*FAILING, "exception")
MAX_FINDINGS = 4
MAX_FIXES = 5
_LARGEST_NPU_BYTES = 64 * GIB  # Ascend 910B, and each die of a 910C.
ASSERTED_CHANCE = 0.4
"""A cause that only words point to is asked for below it: of those stated with 0.4 two in three are right."""
LEAST_CHANCE = 0.05
"""A cause that is less likely than one in twenty is not mentioned."""
_TOLD_SHORTAGE_ODDS = 4
"""Of 596 retold memory failures 180 say that GPU memory ran out, of 256 others 19: four times as often."""
_SETTINGS_OF_CAUSE = {
    "cudagraph_capture_oom": frozenset({"enforce_eager"}),
    "lora_or_spec_decode_extra": frozenset({"enable_lora", "speculative_config", "max_loras", "max_lora_rank"}),
    "multimodal_inputs": frozenset({"limit_mm_per_prompt"}),
    "profiling_activation_peak": frozenset({"max_num_batched_tokens", "max_num_seqs"}),
    "sleep_mode_or_rlhf_colocation": frozenset({"enable_sleep_mode"}),
    "tp_kv_head_replication_or_pp_imbalance": frozenset({"pipeline_parallel_size"}),
}
"""Settings that switch off what a cause is about."""


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on one run, with its findings."""

    case: Case
    verdict: Verdict
    findings: tuple[Finding, ...]
    """With the verdict "cause above" these are possibilities, not answers."""
    notes: tuple[str, ...] = ()
    """Assumptions about the GPU, or which other engine wrote the log."""
    wanted: tuple[Tensor, ...] = ()
    """The tensors of the failed run that have the size that failed."""
    expected: Mapping[str, Ledger] = field(default_factory=dict)
    """The ledger of the plan at each moment; empty where the deployment is not known."""
    rests_on: EvidenceKind | None = None
    """What the first cause rests on, which its confidence follows."""
    other_engine: str = ""
    """The id of the message that only an engine other than vLLM prints; empty where the text is vLLM's."""
    known: KnownDeployment | None = None
    """What the plans rest on; None where the text is another engine's."""

    @property
    def proven_findings(self) -> tuple[Finding, ...]:
        """The findings that are certain enough to act on."""
        return () if self.verdict == "cause above" else self.findings

    @property
    def needed(self) -> tuple[str, ...]:
        """Sentences that ask for the log lines still needed to decide; empty where the cause is found."""
        return tuple(_missing_lines(self.case)) if self.verdict == "cause above" else ()

    @property
    def phase(self) -> str | None:
        """The phase of the first failure; None where nothing failed."""
        if not self.findings:
            return None
        failure = self.case.first_failure
        if self.case.has_site_frame or (failure is not None and failure.phase):
            return self.case.phase
        return (cause_of(self.findings[0].cause).phase if self.proven_findings else None) or self.case.phase


def diagnose_run(case: Case, hints: Hints | None = None) -> Diagnosis:
    """Examines one run with every cause and computes the fixes of the likely ones."""
    planner = FixPlanner(case, hints)
    if (other := other_engine(case)) is not None:
        return _diagnose_other_engine(planner, other)
    wanted = wanted_tensors(planner)
    if site := site_by_size(planner, wanted):
        planner.case = case = replace(case, computed_site=site)
        wanted = tuple(tensor for tensor in wanted if tensor.moment == "load" or site != "build")
    likely = _likely_causes(case, planner) or ([] if case.was_ready else _cause_by_site(case))
    strengths = {cause.label: assessment.strength for cause, assessment in likely}
    verdict = _verdict(case, likely)
    is_memory, is_incomplete = bool(likely) and likely[0][0].is_memory, verdict == "cause above"
    kind = evidence_kind(case, [*strengths.values()], is_memory=is_memory, is_incomplete=is_incomplete)
    told = case.words.likelihoods if case.words is not None and _rests_on_words(case, likely) else {}
    told = {
        label: each / (_TOLD_SHORTAGE_ODDS if case.is_oom and cause_of(label).domain == "other" else 1)
        for label, each in told.items()
        if not cause_of(label).is_ruled_out(planner)
    }
    chances = confidences(strengths, diagnosis_accuracy(kind), told)
    if told and verdict != "no problem found":
        likely = _with_described_causes(likely, chances, case)
        verdict, kind = _description_verdict(case, likely, chances), kind if strengths else "words"
    findings = tuple(
        _make_finding(cause, assessment, chances[cause.label], planner, lever_of(wanted))
        for cause, assessment in likely
    )
    if _oom_without_site(case):
        usual = {label for label, strength in strengths.items() if strength <= Strength.POSSIBLE}
        findings = tuple(_with_assumed_place(item) if item.cause in usual else item for item in findings)
    if findings:
        why = [findings[0].why, tensor_sentence(wanted, case.oom.wanted_bytes) if case.oom else ""]
        if case.site == "graph" and findings[0].fixes and (gap := unexplained_bytes(case, findings[0].fixes[0])):
            why.append(f"The plan does not explain {gib(gap)} of what was in use.")
        if case.has("no_cache_blocks") and planner.failed_plan and not case.startup.weights_bytes:
            why.append(_planned_parts(planner.failed_plan.layout))
            if planner.failed_plan.verdict == "fits":
                pool = gib(planner.failed_plan.layout.kv_cache.bytes)
                why.append(f"That leaves {pool} on a free card: others hold memory, or card, model or flags differ.")
        if (card := planner.known.gpu) and (printed := weights_and_pool_beyond_card(case, planner.known)):
            has = f"{card.name} has {gib(card.total_bytes)}"
            why.append(f"This log is of another GPU: its weights and KV cache take {gib(printed)}, and the {has}.")
        made = planner.failed_plan.layout if planner.failed_plan else None
        if made and findings[0].cause == "host_ram_oom" and made.weights.low > made.total_bytes:
            why.append(reason("then_the_card", {"weights": gib(made.weights.bytes), "total": gib(made.total_bytes)}))
        findings = (replace(findings[0], why=" ".join(filter(None, why))), *findings[1:])
    expected = expected_ledgers(planner.failed_plan.layout) if case.oom and planner.failed_plan is not None else {}
    notes = (
        *((*_assumed_card_notes(planner), *_host_notes(planner)) if findings else ()),
        *_imported_record_notes(case),
    )
    return Diagnosis(case, verdict, findings, notes, wanted, expected, kind, known=planner.known)


def _assumed_card_notes(planner: FixPlanner) -> tuple[str, ...]:
    """Which card the plans assume, where the log names none or an ambiguous one; empty otherwise."""
    card, total = planner.known.gpu, planner.known.total_bytes
    if planner.known.total_deduced and total:
        return (f"The log does not name the GPU; its own numbers add up to a card of {gib(total)}.",)
    if card is None or not card.larger:
        return ()
    # Where a name has two sizes, planning takes the larger one if the weights need it.
    card = planner.failed_plan.target.gpu if planner.failed_plan is not None else card
    return (card.note,)


def _host_notes(planner: FixPlanner) -> tuple[str, ...]:
    """A note that the container's memory limit is below what the server holds, whatever fits the card; else empty."""
    limit, made = planner.known.host_limit_bytes, planner.failed_plan
    if limit is None or made is None or limit >= made.host.held_bytes:
        return ()
    holds, enough = gib(made.host.held_bytes), f"{gib(made.host.request_bytes, 0)} is enough"
    return (f"The container's memory limit, {gib(limit)}, is too small: the server holds about {holds}; {enough}.",)


def _imported_record_notes(case: Case) -> list[str]:
    """A note for each record that the user imported and whose pattern matches an error of this run."""
    from legroom.explain.deadends import imported_entries

    texts = [item.window or item.text for item in case.evidence if item.role in (*FAILING, "exception")]
    return [
        f"Your imported record {record.id} is about this error: legroom explain {record.id}"
        for record in imported_entries()
        if any(compiled(signature.pattern).search(text) for signature in record.signatures for text in texts)
    ]


def _diagnose_other_engine(planner: FixPlanner, other: Evidence) -> Diagnosis:
    """The diagnosis of another engine's failure: its meaning if not of memory, else what sets that engine's memory."""
    case, others = planner.case, planner.case.ledger.other_processes_bytes or 0
    held = (f"{gib(others)} of the card belong to another process: that has to end first.",) if others > GIB else ()
    is_short = case.is_oom or case.has(*SHORTAGE) or case.has(*message_group("host_memory"), "block_pool_guard")
    is_short = is_short or any(
        prose("shortage_words").search(item.window) for item in case.evidence if item.role in _FAILED
    )
    is_short = is_short and not case.has("false_oom")
    assessed = [(cause, found) for cause in causes() if cause.domain == "other" and (found := cause.examine(case))]
    if is_short or not assessed:
        meaning = other_engine_meaning(other.id, "\n".join(item.window or item.text for item in case.evidence))
        notes = (*held, other_engine_text(other.id, "en"), *meaning)
        return Diagnosis(case, "not understood", (), notes, other_engine=other.id)
    cause, assessment = max(assessed, key=lambda pair: pair[1].strength)
    finding = _make_finding(cause, assessment, diagnosis_accuracy("lookalike"), planner, "")
    note = f"This is of {other_engine_name(other.id)}, not of vLLM."
    findings = (replace(finding, plan_remedies=lambda: (finding.fixes, ())),)
    return Diagnosis(case, "not a memory problem", findings, (note,), rests_on="lookalike", other_engine=other.id)


def _likely_causes(case: Case, planner: FixPlanner) -> list[tuple[Cause, Assessment]]:
    """The MAX_FINDINGS strongest (cause, assessment), strongest first; the plan rules some out and may add its own."""
    assessed = [
        (cause, _discount_later_failure(assessment, case))
        for cause in causes()
        if (assessment := cause.examine(case)) and not cause.is_ruled_out(planner)
    ]
    if planned := _planned_failure(case, planner) or _neighbour_by_plan(case, planner):
        others = [pair for pair in assessed if pair[0] is not planned[0]]
        # A place told in prose gives way to the plan.
        strength = max((pair[1].strength for pair in others), default=Strength.NONE)
        assessed = [(planned[0], replace(planned[1], strength=max(strength, planned[1].strength))), *others]
    if case.is_oom and not case.has_site_frame:
        assessed = [(cause, _strengthened_by_report(cause, assessment, case)) for cause, assessment in assessed]
    assessed.sort(key=lambda pair: -pair[1].strength)
    return [pair for pair in assessed if pair[1].strength][:MAX_FINDINGS]


def _strengthened_by_report(cause: Cause, assessment: Assessment, case: Case) -> Assessment:
    """The assessment, as COMPARED where the text says that the server starts with a setting of this cause changed."""
    settings = {name for changed, worked in case.reported if worked for name in changed}
    is_told = bool(settings & _SETTINGS_OF_CAUSE.get(cause.label, frozenset()))
    return replace(assessment, strength=Strength.COMPARED) if is_told else assessment


def _with_described_causes(
    likely: list[tuple[Cause, Assessment]], chances: Mapping[str, float], case: Case
) -> list[tuple[Cause, Assessment]]:
    """The likeliest causes by `chances` (label -> probability), each with its assessment or one by the words alone."""
    assert case.words is not None
    shown = {cause.label: assessment for cause, assessment in likely}
    first = next(iter(chances))
    labels = [each for each, chance in chances.items() if each in (first, *shown) or chance >= LEAST_CHANCE]
    for label in labels[:MAX_FINDINGS]:
        if label not in shown:
            line = case.words.proof(label)
            told = Assessment(
                Strength.SUGGESTED, (line,), reason("words_told" if line.facts else "words_alone", line.facts)
            )
            shown[label] = cause_of(label).examine(case) or told
    return [(cause_of(label), shown[label]) for label in labels[:MAX_FINDINGS]]


def _rests_on_words(case: Case, likely: list[tuple[Cause, Assessment]]) -> bool:
    """Whether only the description's words show the first cause, with no printed failure or figure and no plan."""
    shown = (item for _, assessment in likely[:1] for item in assessment.evidence)
    is_planned = bool(likely) and case.is_oom and likely[0][1].strength == Strength.SHOWN
    printed = ("milestone", "once", "stats", "need_told", "leak_named", "stage_told")
    return case.is_only_described and not is_planned and not any({item.role, item.id} & {*printed} for item in shown)


def _description_verdict(case: Case, likely: list[tuple[Cause, Assessment]], chances: Mapping[str, float]) -> Verdict:
    """The verdict on a description; `cause above` where the first of `chances` is below 0.4 or vLLM is not named."""
    first = likely[0][0]
    is_unread = first.is_memory if case.is_unnamed else first.domain == "other" and case.has("memory_told")
    if chances[first.label] < ASSERTED_CHANCE or is_unread:
        return "cause above"
    return "not a memory problem" if first.domain == "other" else "cause found"


def _with_assumed_place(finding: Finding) -> Finding:
    """The finding, its explanation prefixed with the phase it assumes, as the text shows none."""
    said = read_data("diagnosis_texts.json")["unplaced"].get(cause_of(finding.cause).phase, "")
    return replace(finding, why=f"{said} {finding.why}".lstrip())


def _planned_parts(layout: Layout) -> str:
    """A sentence: what the weights and the profile run take of the budget in this plan."""
    parts = f"the weights take {gib(layout.weights.bytes)} and the profile run about {gib(layout.activation.bytes)}."
    return f"Of {gib(layout.budget_bytes)}, the budget on a card of {gib(layout.total_bytes)}, {parts}"


def _planned_failure(case: Case, planner: FixPlanner) -> tuple[Cause, Assessment] | None:
    """(cause, assessment) where memory runs out by the run's plan, if it did and the text shows no place; else None."""
    need, total = case.number("need_told", "need_bytes") or 0, planner.total_bytes
    if case.first_failure is None and total and need > total:
        why = reason("more_than_the_card", {"need": gib(need), "total": gib(total)})
        return cause_of("weights_too_big"), Assessment(Strength.NAMED, proof(case.first("need_told")), why)
    is_open = _oom_without_site(case) or (case.first_failure is not None and case.first_failure.is_told and case.is_oom)
    printed = (item for item in case.evidence if item.role in FAILING and not item.is_told)
    is_placed = case.has_site_frame or case.traceback_frames or case.has("forward_frame", "first_card_told")
    is_placed = is_placed or any(item.id not in FAILED_ALLOCATIONS for item in printed)
    if not is_open or is_placed or case.platform.trainer:
        return None
    if case.oom is not None and case.oom.pools_bytes:
        return None  # graphs have a pool: the weights and the KV cache were in place
    plan, weights = planner.failed_plan, planner.accounting.weights_bytes
    told = case.first("model_size_told", "parameters_told")
    if plan is None and told and total and (weights or 0) > FULL_OF_WEIGHTS * total:
        words = "By the text" if told.id == "model_size_told" else f"In {8 * case.startup.args.dtype_bytes} bits"
        why = f"{words} the weights take {gib(weights or 0)} of each card, which has {gib(total)}."
        return cause_of("weights_too_big"), Assessment(Strength.LIKELY, proof(case.first_failure), why)
    largest = _LARGEST_NPU_BYTES if case.is_npu else max(card.total_bytes for card in all_gpus())
    is_split = plan is None and total is None and planner.known.args.tensor_parallel_size is not None
    if is_split and (weights or 0) > FULL_OF_WEIGHTS * largest:
        why = reason("more_than_any_card", {"weights": gib(weights or 0), "largest": gib(largest)})
        return cause_of("weights_too_big"), Assessment(Strength.LIKELY, proof(case.first_failure), why)
    if plan is None or plan.verdict == "fits":
        return None
    is_full = plan.layout.weights.bytes > FULL_OF_WEIGHTS * plan.layout.total_bytes
    is_told = case.oom is None and planner.known.ranks_known  # sizes that failed, or ranks that may be more, tell less
    is_small = (case.ledger.wanted_bytes or 0) < GIB and planner.known.ranks == 1
    is_held = case.oom is None or (case.oom.torch_bytes or plan.layout.weights.bytes) > plan.layout.total_bytes / 2
    if not is_told and not (is_full and is_small and is_held):
        return None
    label = "weights_too_big" if is_full else plan.memory.failure.id if plan.memory.failure is not None else ""
    cause = next((cause for cause in causes() if cause.label == label), None)
    why = "The text does not show where memory ran out; this is where the plan of the same command does."
    strength = Strength.SHOWN if is_full or plan.verdict == "does_not_fit" else Strength.LIKELY
    proven = Assessment(strength, proof(case.first_failure), f"{why} {_planned_parts(plan.layout)}")
    return None if cause is None else (cause, proven)


def _neighbour_by_plan(case: Case, planner: FixPlanner) -> tuple[Cause, Assessment] | None:
    """Another process on the card as cause, where loading failed and planned weights are far below it; else None."""
    if case.site not in ("build", "load") or not loads_with_ease(planner):
        return None
    assert planner.failed_plan is not None
    layout = planner.failed_plan.layout
    why = reason("loads_with_ease", {"weights": gib(layout.weights.bytes), "total": gib(layout.total_bytes)})
    return cause_of("gpu_shared_or_not_free"), Assessment(Strength.LIKELY, proof(case.first_failure), why)


def _discount_later_failure(assessment: Assessment, case: Case) -> Assessment:
    """The assessment, two steps of strength weaker where its evidence comes after the first failure."""
    first = case.first_failure
    failing = [evidence for evidence in assessment.evidence if evidence.role in FAILING]
    if first is None or not failing or first.role not in FAILING:
        return assessment
    later = min(evidence.line for evidence in failing) - first.line
    # A sentence tells of the failure that the lines below it print.
    is_same = first.id == "torch_oom_unsized" and (later <= SENTENCE_LINES or not first.at)
    if first in failing or later <= 0 or is_same:
        return assessment
    return replace(assessment, strength=Strength(max(assessment.strength - 2, Strength.FAINT)))


def _cause_by_site(case: Case) -> list[tuple[Cause, Assessment]]:
    """The usual cause at the code site that a traceback shows, where its error is cut off; empty without one."""
    frames = [item for item in case.evidence if item.role == "frame"]
    frames = [item for item in frames if is_traceback_line(item.text) or ".py" in item.text]
    if not frames and case.truncated_traceback is not None:
        frames = list(case.milestones)
    usual = next((cause for cause in causes() if case.site in cause.usual_at), None)
    if not frames or usual is None:
        return []
    return [(usual, Assessment(Strength.USUAL, proof(frames[-3:]), reason("error_is_cut_off")))]


def _make_finding(cause: Cause, assessment: Assessment, confidence: float, planner: FixPlanner, lever: str) -> Finding:
    """The finding of one cause and its known bugs; `lever`: the setting whose fixes come first, empty for none."""
    bugs, here = _matching_bugs(cause.label, planner), "has a known bug here"
    known = (f"vLLM {planner.known.release.version} {here}: {bug.title} ({bug.source}). {bug.effect}" for bug in bugs)
    why, entry = " ".join((assessment.why, *known)), _entry_id(cause, assessment)
    remedies = cache(lambda: _plan_remedies(cause, assessment, planner, lever, bugs))
    return Finding(cause.label, entry, confidence, assessment.evidence, why, remedies)


def _plan_remedies(
    cause: Cause, assessment: Assessment, planner: FixPlanner, lever: str, bugs: Sequence[KnownBug]
) -> Remedies:
    """The cause's checked fixes with those of the release's bugs, and the dead ends that none of them contradicts."""
    is_printed = cause.domain != "settings" or not any(item.id == "words_told" for item in assessment.evidence)
    dead_ends = (*cause.impossible(planner), *cause.dead_ends) if is_printed else ()
    fixes = checked_fixes(planner, cause.remedies(planner), dead_ends, is_memory=cause.is_memory)[:MAX_FIXES]
    if lever:
        fixes = tuple(sorted(fixes, key=lambda fix: lever not in fix.flags))
    if cause.domain == "gpu" and not fixes:
        fixes = (planner.advised_by_plan() or other_hardware(planner),)
    dead_ends = checked_dead_ends(planner, dead_ends, fixes)
    shares = [first_fix_success_rate(fix_ground(planner, fix, is_memory=cause.is_memory)) for fix in fixes]
    fixes = tuple(replace(fix, confidence=min(share, shares[0])) for fix, share in zip(fixes, shares, strict=True))
    of_bugs = tuple(filter(None, map(_bug_fix, bugs)))
    # Fixes of bugs go first where the log proves the bug or the cause usually is one.
    is_certain = cause.label in _USUALLY_BUGS or any(bug.evidence for bug in bugs)
    return (*of_bugs, *fixes) if is_certain else (*fixes, *of_bugs), dead_ends


def _entry_id(cause: Cause, assessment: Assessment) -> str:
    """Id (`LR101`) of the catalog entry whose messages match the evidence best, else of the cause's own entry."""
    from legroom.explain.catalog_entries import best_entry  # reads the catalog

    message_ids = frozenset(evidence.id for evidence in assessment.evidence)
    try:
        return best_entry(cause.label, message_ids, cause.entry).id
    except LegroomError:
        return cause.entry  # an imported record cannot be read


def _verdict(case: Case, likely: list[tuple[Cause, Assessment]]) -> Verdict:
    """`cause found`, `not a memory problem`, `cause above` (missing lines), `no problem found` or `not understood`."""
    is_cured = any(worked for _, worked in case.reported) or case.has("release_told")
    is_incomplete = (not is_cured and _missing_lines(case)) and (
        case.last_error is None or _oom_without_site(case) or case.unread_shortage is not None
    )
    if case.is_unnamed and likely and likely[0][0].domain == "gpu" and likely[0][1].strength < Strength.NAMED:
        return "cause above"  # sizes that add up hold for any program
    is_told = case.first_failure is not None and case.first_failure.is_told
    is_incomplete = is_incomplete or (is_told and bool(likely) and likely[0][1].strength == Strength.FAINT)
    if likely and not (is_incomplete and likely[0][1].strength <= Strength.POSSIBLE):
        return "not a memory problem" if likely[0][0].domain == "other" else "cause found"
    if is_incomplete:
        return "cause above"
    if case.was_ready and not case.has("failure_told"):
        return "no problem found"
    is_of_vllm = case.was_ready or case.startup.vllm or case.startup.args_known or case.has("story_told")
    return "cause above" if is_of_vllm else "not understood"


def _oom_without_site(case: Case) -> bool:
    """Whether GPU memory ran out and neither a traceback frame nor a start-up step shows where."""
    return case.is_oom and not case.site


def _missing_lines(case: Case) -> list[str]:
    """Sentences: which further lines of the log would decide, by how the text ends."""
    if case.is_unnamed:
        return ["which program this is: nothing here names vLLM or a setting of it; the command that started it tells"]
    needed, sentences = [], read_data("diagnosis_texts.json")["needed"]
    told = ("failure_told",) if case.was_ready else ("failure_told", "story_told")
    traceback, later, milestone = case.truncated_traceback, case.secondary_failure, case.unfinished_milestone
    if case.truncated_error is not None:
        needed.append(sentences["rest_of_error"].format(line=case.truncated_error.line))
    elif traceback is not None:
        needed.append(sentences["rest_of_traceback"].format(line=traceback.line))
    if _oom_without_site(case):
        return [*needed, sentences["place"]]
    if case.unread_shortage is not None:
        needed.append(sentences["which_memory"].format(line=case.unread_shortage.line))
    if later is not None:
        needed.append(sentences["worker" if later.id in BOILERPLATE else "first_error"].format(line=later.line))
    if not needed and case.first_failure is not None and case.first_failure.is_told:
        needed.append(sentences["after_it"])
    elif not needed and milestone is None and case.has(*told):
        needed.append(sentences["whole_log"])
    elif not needed and (milestone is not None or not case.was_ready):
        needed.append(sentences["what_ended_it"])
    return needed


_USUALLY_BUGS = frozenset({"leak_over_time"})  # Causes that usually are bugs.
_MAX_BUGS = 2


def _matching_bugs(label: str, planner: FixPlanner) -> list[KnownBug]:
    """At most two known bugs of the release with the cause `label` that fit its flags, card and logged messages."""
    known = planner.known
    if not known.release_known:
        return []
    is_cpu = planner.case.has("cpu_below_desired", "cpu_kv_short")
    platform = known.gpu.vendor if known.gpu else "cpu" if is_cpu else None
    bugs = [
        bug
        for bug in bugs_with(known.release, known.args, platform)
        if label in bug.causes
        and (
            planner.case.has(*bug.evidence) if bug.evidence else bug.memory != "host" or not grows_on_card(planner.case)
        )
        and _is_specific(bug, label, planner)
    ]
    return bugs[:_MAX_BUGS]


def _is_specific(bug: KnownBug, label: str, planner: FixPlanner) -> bool:
    """Whether more than the release points to the bug: growth, a message, a setting or the model."""
    if label in _USUALLY_BUGS or bug.evidence or (bug.settings and "not off" not in bug.settings.values()):
        return True
    base = planner.failed_plan
    if bug.model and base is not None:
        from legroom.planning.plan import bug_traits  # only where the deployment is known

        groups = {"several kv groups"} if len(base.memory.kv.shape.groups) > 1 else set()
        return set(bug.model) <= bug_traits(base.target.model) | groups and bug.memory == "gpu"
    return bool(bug.platform)


def _bug_fix(bug: KnownBug) -> Fix | None:
    """The fix for a known bug: upgrade steps and variables that avoid it; None where there are none."""
    steps = tuple(step for step in (bug.upgrade_step, *bug.steps) if step)
    if not steps and not bug.env:
        return None
    until = "Until then" if bug.fixed_in else "Avoid it"
    variables = " ".join(f"{name}={value}" for name, value in bug.env.items())
    if variables:
        steps = (*steps, f"{until}: {variables} before the same command")
    fixed = f"The bug is fixed in {bug.fixed_in}." if bug.fixed_in else "The bug is open; avoid what sets it off."
    return Fix("engine_version_or_V0", fixed, steps=steps)
