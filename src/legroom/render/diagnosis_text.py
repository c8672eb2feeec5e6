"""Text of a diagnosis: the cause, its evidence, the reason, the fix, alternatives and dead ends."""

import shlex
from collections.abc import Iterator, Sequence

from legroom.diagnosis.case import Case
from legroom.diagnosis.causes import cause_of
from legroom.diagnosis.causes.host_ram_oom import is_bare_kill
from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.log_diagnosis import LogReading, by_failure_time
from legroom.diagnosis.verdict import LEAST_CHANCE, Diagnosis
from legroom.drawing.chart import Segment, bar, swatch
from legroom.drawing.terminal import PLAIN, Colour, Style
from legroom.drawing.text import command_phrases, display_width, paragraphs, wrap, wrap_command
from legroom.facts import diagnosis_texts
from legroom.facts.diagnosis_texts import Language, heading
from legroom.facts.gpus import gpu_names
from legroom.facts.releases import latest, logged_release
from legroom.memory.layout import Layout
from legroom.render.plan_parts import layout_parts, note_lines, scale_bytes
from legroom.render.translation import in_language
from legroom.units import GIB, gib
from legroom.vllm.command_line import any_release_words
from legroom.vllm_logs.evidence import Evidence
from legroom.vllm_logs.log_masking import masked_log_text

_MARGIN = "  "
_LONGEST_SHOWN = 440
_RELEASES = {
    "given": "vLLM {}, as given",
    "command": "vLLM {}, from the command",
    "assumed": "vLLM {} assumed, as no release is named",
}


def readings_text(
    readings: Sequence[LogReading],
    style: Style = PLAIN,
    language: Language = "en",
    all_runs: bool = False,
    explain_math: bool = False,
) -> str:
    """The diagnoses of all logs, of each the last run or `all_runs`; `explain_math` adds logged and planned memory."""
    blocks: list[str] = []
    for reading in by_failure_time(readings):
        lead = [style.paint(reading.source, "bold")] if len(readings) > 1 else []
        if not reading.runs:
            blocks.append("\n".join([*lead, verdict_headline(None, language)]))
            continue
        shown = reading.runs if all_runs else reading.runs[:1]
        texts = [diagnosis_text(run, style, language) for run in shown]
        if explain_math:
            ledgers = (["", *_ledger_lines(run, style)] if run.case.oom else [] for run in shown)
            texts = ["\n".join([text, *ledger]) for text, ledger in zip(texts, ledgers, strict=True)]
        blocks.append("\n\n".join([*lead, *texts]))
        if len(reading.runs) > len(shown):
            blocks.append("\n".join(_earlier_run_lines(reading.runs[len(shown) :], style, language)))
    return "\n\n".join(blocks) + "\n"


_LEDGER_ENTRIES = {
    "total_bytes": "the card",
    "other_processes_bytes": "other processes",
    "own_non_torch_bytes": "own, outside torch",
    "allocated_bytes": "allocated by torch",
    "unused_bytes": "reserved, unused",
    "free_bytes": "free",
    "wanted_bytes": "asked for",
}


def _ledger_lines(diagnosis: Diagnosis, style: Style) -> Iterator[str]:
    """A table in GiB of the GPU's memory, logged and planned by phase; then tensors of the failed request's size."""
    columns = {"seen": diagnosis.case.ledger, **diagnosis.expected}
    yield style.paint(f"{_MARGIN}{'GiB':20}" + "".join(f"{name:>10}" for name in columns), "bold")
    for entry, title in _LEDGER_ENTRIES.items():
        sizes = [getattr(ledger, entry) for ledger in columns.values()]
        if any(size is not None for size in sizes):
            cells = "".join(f"{'-' if size is None else f'{size / GIB:.2f}':>10}" for size in sizes)
            yield f"{_MARGIN}{title:20}{cells}"
    for tensor in diagnosis.wanted:
        yield from wrap(f"asked for: {tensor.name} = {tensor.how}", style.width, _MARGIN, _MARGIN * 3)


def diagnosis_text(diagnosis: Diagnosis, style: Style = PLAIN, language: Language = "en") -> str:
    """The terminal report of one run: its likeliest cause, the log's evidence, fixes and how to verify them."""
    if diagnosis.verdict == "cause above":
        return "\n".join(_missing_log_lines(diagnosis, style, language))
    if not diagnosis.findings:
        return "\n".join(_no_cause_lines(diagnosis, style, language))
    first = diagnosis.findings[0]
    first_why = in_language(first.why, language)
    return paragraphs(
        _headline(diagnosis, first, style, language),
        _evidence_lines(diagnosis, first, style),
        [style.paint(f"{heading('why', language)}:", "bold"), *wrap(first_why, style.width, _MARGIN)],
        _fix_lines(first, style, language),
        _alternative_lines(first, style, language),
        _dead_end_lines(first, style, language),
        _verify_lines(diagnosis, first, style, language),
        _less_likely_lines(diagnosis.findings[1:], style, language),
        note_lines(in_language(diagnosis.notes, language), style),
    )


def finding_title(finding: Finding, language: Language, other_engine: str = "") -> str:
    """The cause's title; a heading of its own for an `other_engine`, a kill without a reason and a failed probe."""
    if other_engine:
        return heading("of_other_engine", language).format(name=diagnosis_texts.other_engine_name(other_engine))
    if finding.cause == "host_ram_oom" and is_bare_kill(finding.evidence):
        return heading("bare_kill", language)
    if any(evidence.id == "probe_failed" for evidence in finding.evidence) and finding.cause == "not_memory":
        return heading("failed_probe", language)
    return cause_of(finding.cause).title.in_language(language)


def verdict_headline(diagnosis: Diagnosis | None, language: Language) -> str:
    """The answer where no cause is named: the lines are missing, nothing went wrong, or the text is no vLLM log."""
    if diagnosis is not None and diagnosis.other_engine and diagnosis.verdict == "not understood":
        return diagnosis_texts.other_engine_text(diagnosis.other_engine, language)
    verdict = "not understood" if diagnosis is None else diagnosis.verdict
    names = {"cause above": "cause_above", "not understood": "not_understood"}
    return heading(names.get(verdict, "healthy"), language)


def _headline(diagnosis: Diagnosis, finding: Finding, style: Style, language: Language) -> Iterator[str]:
    """`error[ENTRY]: title`, or `maybe[...]` below 0.4 confidence; then the phase, model, release and GPU."""
    colour: Colour
    word, colour = ("error", "red") if finding.confidence >= 0.4 else ("maybe", "orange")
    title = style.paint(finding_title(finding, language, diagnosis.other_engine), "bold")
    yield f"{style.paint(f'{word}[{finding.entry}]', colour, 'bold')}: {title}"
    is_check = finding.evidence[0].id.startswith("free_below_desired") if finding.evidence else False
    phase = diagnosis_texts.phase_title("startup_check" if is_check else diagnosis.phase, language)
    if phase:
        named = style.paint(heading("phase", language), "dim")
        yield f"{_MARGIN}{named}: {phase} ({_confidence_text(finding.confidence, language)})"
    about = wrap(deployment_text(diagnosis, language), style.width, _MARGIN)
    yield from (style.paint(line, "dim") for line in about)


def _confidence_text(probability: float, language: Language) -> str:
    """`sure`, `likely` or `possible`, in the reader's language."""
    name = "sure" if probability >= 0.9 else "likely" if probability >= 0.6 else "possible"
    return heading(name, language)


def deployment_text(diagnosis: Diagnosis, language: Language) -> str:
    """Model, vLLM release and GPU as far as the log names them, or where the release is from; secrets are masked."""
    startup = diagnosis.case.startup
    gpu = startup.gpu_name or (f"a card of {gib(startup.gpu_total_bytes)}" if startup.gpu_total_bytes else "")
    release = logged_release(startup.vllm) if startup.vllm else None
    facts_of = f" (with the facts of {release.version})" if release is not None and release.note else ""
    used = f"vLLM {startup.vllm}{facts_of}" if startup.vllm else ""
    known = diagnosis.known
    if known is not None and diagnosis.findings and known.release_source != "log":
        used = _RELEASES[known.release_source].format(known.release.requested)
    shown = (startup.args.model, in_language(used, language), in_language(gpu, language))
    return masked_log_text(" · ".join(part for part in shown if part))


def _evidence_lines(diagnosis: Diagnosis, finding: Finding, style: Style) -> Iterator[str]:
    """The numbered log lines that prove the finding, with the decisive one marked."""
    if not finding.evidence:
        return
    width = len(str(max(evidence.line for evidence in finding.evidence)))
    edge = style.paint(style.pick("│", "|"), "blue")
    yield f"{' ' * width}{style.paint(style.pick('──▶', '-->'), 'blue')} {diagnosis.case.source}"
    failing = [evidence for evidence in finding.evidence if evidence.role in ("failure", "host")]
    decisive = failing[0] if failing else finding.evidence[-1]
    last = None
    for evidence in finding.evidence:
        if last is not None and evidence.line > last + 1:
            yield f"{' ' * width} {style.paint('...', 'dim')}"
        if evidence.line == last:
            continue
        last = evidence.line
        text = _shown_evidence(evidence)
        room = max(style.width - width - 4, 30)
        for number, piece in enumerate(wrap(text, room) or [""]):
            label = style.paint(str(evidence.line).rjust(width), "blue") if number == 0 else " " * width
            yield f"{label} {edge} {piece}"
        if evidence is decisive:
            mark = style.pick("╰─", "^^")
            yield f"{' ' * width} {edge} {style.paint(f'{mark} {evidence.id}', 'red')}"


def _shown_evidence(evidence: Evidence) -> str:
    """The text of a log line with its secrets masked, cut after 440 characters."""
    text = masked_log_text(" ".join(evidence.text.split()))
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + " ..."


def _fix_lines(finding: Finding, style: Style, language: Language) -> Iterator[str]:
    """The first fix: what to change, the whole command, the steps, its cost and the memory before and after."""
    if not finding.fixes:
        return
    fix = finding.fixes[0]
    head, sure = f"{heading('fix', language)}:", _confidence_text(fix.confidence * finding.confidence, language)
    first, *rest = wrap(" ".join(f"{head} {_changes_text(fix)} ({sure})".split()), style.width, hanging=_MARGIN * 2)
    yield from (style.paint(head, "green", "bold") + first.removeprefix(head), *rest)
    yield from wrap(masked_log_text(in_language(fix.why, language)), style.width, _MARGIN)
    if (fix.flags or fix.env) and fix.command:
        yield ""
        width = style.width - 4 * len(_MARGIN)
        for line in wrap(masked_log_text(in_language(fix.comment, language)), width, "# ", "# ") if fix.comment else ():
            yield _MARGIN * 2 + style.paint(line, "dim")
        words = [_shell_quoted(word, number, fix.command) for number, word in enumerate(fix.command)]
        phrases = [phrase if "YOUR_" in phrase else masked_log_text(phrase) for phrase in command_phrases(words)]
        for number, line in enumerate(wrap_command(phrases, width)):
            yield _MARGIN * (2 if number == 0 else 4) + style.paint(line, "bold")
    for step in fix.steps:
        yield from wrap(in_language(step, language), style.width, f"{_MARGIN}- ", _MARGIN * 2)
    if fix.trades:
        costs = f"{heading('costs', language)}: {in_language(fix.trades, language)}"
        yield from wrap(costs, style.width, _MARGIN)
    if fix.plan is not None and fix.plan.layout != fix.before:
        yield ""
        yield from _before_and_after_bars(fix, style, language)


def _shell_quoted(word: str, index: int, command: Sequence[str]) -> str:
    """The word at `index` quoted for the shell; of a variable assignment before the command, only its value."""
    name, is_set, value = word.partition("=")
    if is_set and name.isidentifier() and all("=" in before for before in command[:index]):
        return f"{name}={shlex.quote(value)}"
    return shlex.quote(word)


def _before_and_after_bars(fix: Fix, style: Style, language: Language) -> Iterator[str]:
    """Memory bars of the failed run and of the fix, on one scale."""
    assert fix.plan is not None
    layouts: list[tuple[str, Layout]] = [(heading("after", language), fix.plan.layout)]
    if fix.before is not None:
        layouts.insert(0, (heading("before", language), fix.before))
    widest = max(scale_bytes(layout) for _, layout in layouts)
    room = style.width - 2 * len(_MARGIN) - 10
    for name, layout in layouts:
        segments: list[Segment] = [part.segment for part in layout_parts(layout)]
        width = max(round(room * sum(segment.amount for segment in segments) / widest), 8)
        yield f"{_MARGIN}{name}{' ' * (9 - display_width(name))}{bar(segments, width, style)}"
        kv, spare = (gib(size) if size > 0 else "none" for size in (layout.kv_cache.bytes, layout.headroom_bytes))
        sizes = in_language(f"KV cache {kv}, headroom {spare} of {gib(layout.total_bytes)}", language)
        yield f"{_MARGIN}{' ' * 9}{sizes}"
    named = [part.segment for part in layout_parts(fix.plan.layout) if part.segment.amount > 0]
    words = (f"{swatch(segment, style)} {in_language(segment.label, language)}" for segment in named)
    yield f"{_MARGIN}{' ' * 9}{'  '.join(words)}"


def _changes_text(fix: Fix) -> str:
    """The environment variables and flags that a fix sets, as one line of a command."""
    words = any_release_words(fix.flags)
    return masked_log_text(" ".join([*[f"{name}={value}" for name, value in fix.env.items()], *words]))


def _alternative_lines(finding: Finding, style: Style, language: Language) -> Iterator[str]:
    """The fixes after the first, numbered from 2."""
    if finding.fixes[1:]:
        yield style.paint(f"{heading('alternatives', language)}:", "bold")
    for number, fix in enumerate(finding.fixes[1:], 2):
        text = ": ".join(filter(None, (_changes_text(fix), in_language(fix.why, language))))
        yield from wrap(masked_log_text(text), style.width, f"{_MARGIN}{number}. ", _MARGIN + "   ")
        for step in fix.steps:
            yield from wrap(in_language(step, language), style.width, f"{_MARGIN}   - ", _MARGIN + "     ")
        if fix.trades:
            costs = f"{heading('costs', language)}: {in_language(fix.trades, language)}"
            yield from wrap(costs, style.width, f"{_MARGIN}   ")


def _dead_end_lines(finding: Finding, style: Style, language: Language) -> Iterator[str]:
    """What people try against this cause in vain, each with why it fails."""
    if not finding.dead_ends:
        return
    yield style.paint(f"{heading('dead_ends', language)}:", "red", "bold")
    for end in finding.dead_ends:
        text = f"{in_language(end.action, language)}: {in_language(end.why_fails, language)}"
        yield from wrap(text, style.width, f"{_MARGIN}{style.pick('✗', 'x')} ", _MARGIN * 2)


def verify_text(diagnosis: Diagnosis, finding: Finding, language: Language) -> str:
    """How to check that the fix worked, by the cause's domain or the failed phase; empty for a log not of vLLM."""
    if diagnosis.other_engine:
        return ""
    case = diagnosis.case
    if cause_of(finding.cause).domain == "host":
        of_ray = case.has("ray_node_memory") and not case.has("oom_killer")
        kind = "ray" if of_ray else "lmcache" if case.has("lmcache_no_memory") else "host"
    else:
        is_step = diagnosis.phase == "serving" and cause_of(finding.cause).is_memory
        kind = "serving" if is_step else "startup" if diagnosis.phase not in (None, "serving") else "other"
    return diagnosis_texts.how_to_verify(kind, language, finding.cause, case.oom.platform if case.oom else "")


def _verify_lines(diagnosis: Diagnosis, finding: Finding, style: Style, language: Language) -> Iterator[str]:
    """How to check that the fix worked, and where the long story is; nothing for the log of an engine not vLLM."""
    if not (how := verify_text(diagnosis, finding, language)):
        return
    yield style.paint(f"{heading('verify', language)}:", "bold")
    yield from wrap(how, style.width, _MARGIN)
    if plan_command := _plan_command(finding):
        yield from wrap(f"{heading('plan', language)}: {plan_command}", style.width, _MARGIN, _MARGIN * 2)
    if has_story(finding):
        yield _MARGIN + style.paint(f"{heading('explain', language)}: legroom explain {finding.entry}", "dim")


def _plan_command(finding: Finding) -> str:
    """`legroom plan` of the first fix's server, where `plan` alone would take a newer release; else empty."""
    fix = finding.fixes[0] if finding.fixes else None
    if fix is None or fix.plan is None or fix.command[:1] != ("vllm",) or fix.plan.target.release == latest():
        return ""
    card, release, total = fix.plan.target.gpu, fix.plan.target.release, f"{fix.plan.layout.total_bytes / GIB:.2f}GiB"
    names = gpu_names().get(card.name)
    machine = ["--gpu", names[0], *(["--gpu-memory", total] if card.total_source == "given" else [])] if names else []
    words = ["legroom", "plan", "--vllm", release.version, *(machine or ["--gpu", total]), "--", *fix.command]
    return masked_log_text(shlex.join(words))


def has_story(finding: Finding) -> bool:
    """Whether the catalog entry explains this failure; an entry of `not_memory` explains only messages it lists."""
    from legroom.explain.catalog_entries import entry  # reads the catalog

    if finding.cause != "not_memory":
        return True
    told = {message for signature in entry(finding.entry).signatures for message in signature.messages}
    return any(evidence.id in told for evidence in finding.evidence)


def _less_likely_lines(rest: Sequence[Finding], style: Style, language: Language) -> Iterator[str]:
    """At most three further causes that are probable enough to be shown, by catalog entry and title."""
    likely = [finding for finding in rest if finding.confidence >= LEAST_CHANCE][:3]
    if not likely:
        return
    yield style.paint(f"{heading('maybe', language)}:", "bold")
    yield from (f"{_MARGIN}{finding.entry} {finding_title(finding, language)}" for finding in likely)


def _missing_log_lines(diagnosis: Diagnosis, style: Style, language: Language) -> Iterator[str]:
    """The report of a log that does not show the cause: its decisive line, the lines to provide, possible causes."""
    yield f"{style.paint('?', 'orange', 'bold')} {style.paint(verdict_headline(diagnosis, language), 'bold')}"
    yield from (style.paint(line, "dim") for line in wrap(deployment_text(diagnosis, language), style.width, _MARGIN))
    case = diagnosis.case
    truncated = case.truncated_error or case.truncated_traceback
    if decisive := case.secondary_failure or truncated or case.unfinished_milestone or case.first_failure:
        yield from wrap(f"line {decisive.line}: {_shown_evidence(decisive)}", style.width, _MARGIN)
    yield ""
    yield style.paint(f"{heading('needed', language)}:", "bold")
    for needed in diagnosis.needed:
        yield from wrap(f"- {in_language(needed, language)}", style.width, _MARGIN)
    if not diagnosis.findings:
        return
    yield ""
    yield style.paint(f"{heading('candidates', language)}:", "bold")
    for finding in diagnosis.findings:
        title = f"{finding.entry} {finding_title(finding, language)}"
        yield from wrap(f"- {title}: {in_language(finding.why, language)}", style.width, _MARGIN)
        for fix in finding.fixes[:1]:  # the page shows it, too
            change = _changes_text(fix) or in_language((*fix.steps, fix.why)[0], language)
            yield from wrap(f"{heading('fix', language)}: {change}", style.width, _MARGIN * 2)


def _no_cause_lines(diagnosis: Diagnosis, style: Style, language: Language) -> Iterator[str]:
    """The report of a run without findings: a healthy start with its memory, or a log that was not understood."""
    if diagnosis.verdict == "not understood":
        yield from wrap(verdict_headline(diagnosis, language), style.width)
        yield from (line for note in diagnosis.notes[1:] for line in wrap(in_language(note, language), style.width))
        return
    mark = style.paint(style.pick("✓", "ok"), "green", "bold")
    yield f"{mark} {style.paint(verdict_headline(diagnosis, language), 'bold')}"
    yield from wrap(deployment_text(diagnosis, language), style.width, _MARGIN)
    rows = list(_memory_rows(diagnosis.case))
    if rows:
        yield f"{_MARGIN}{heading('memory', language)}:"
        yield from (f"{_MARGIN * 2}{name.ljust(16)} {value}" for name, value in rows)


def _memory_rows(case: Case) -> Iterator[tuple[str, str]]:
    """(name, amount) of each memory figure that the log states, such as weights, KV cache and tokens."""
    startup = case.startup
    for name, value in (
        ("card", startup.gpu_total_bytes),
        ("weights", startup.weights_bytes),
        ("activation peak", startup.activation_bytes),
        ("non-torch", startup.non_torch_bytes),
        ("CUDA graphs", startup.graph_bytes),
        ("KV cache", startup.available_kv_bytes),
    ):
        if value is not None:
            yield name, gib(value)
    if startup.tokens is not None:
        yield "tokens", f"{startup.tokens:,}"
    if startup.max_concurrency is not None and startup.concurrency_len is not None:
        yield "concurrency", f"{startup.max_concurrency:g} requests of {startup.concurrency_len:,} tokens"


def _earlier_run_lines(runs: Sequence[Diagnosis], style: Style, language: Language) -> Iterator[str]:
    """One line for each earlier run in the same log: its first line number and its cause."""
    yield style.paint(f"{heading('runs', language)}:", "bold")
    for run in runs:
        findings = run.proven_findings
        what = finding_title(findings[0], language) if findings else verdict_headline(run, language)
        first = run.case.evidence[0].line if run.case.evidence else run.case.startup.first_line
        entry = f" [{findings[0].entry}]" if findings else ""
        yield f"{_MARGIN}line {first}: {what}{entry}"
