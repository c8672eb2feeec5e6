"""Incidents as text, JSON and SVG."""

import math
import shlex
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from legroom.drawing.svg import Curve, Svg, axis_line, curve_lines, curve_width, draw_curves, scaled_curve
from legroom.drawing.terminal import Style
from legroom.drawing.text import columns, wrap
from legroom.facts.releases import latest
from legroom.live.journal.journal import JournalPoint
from legroom.live.journal.journal_records import Incident
from legroom.vllm.command_line import setting_words

_MAX_LINES = 8
_MAX_SLOTS = 560  # The width of the drawing in pixels.


def local_time_text(time_s: float) -> str:
    """A Unix time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))


def duration_text(seconds: float) -> str:
    """Seconds as text: `45 s`, `12 min`, `3.5 h`, `2.0 days`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"


def incidents_text(incidents: Sequence[Incident], now_s: float, style: Style) -> str:
    """A table, one line per incident; `now_s` is the Unix time to which open incidents last."""
    if not incidents:
        return "No incidents.\n"
    rows = [("", "began", "lasted", "server", "what")]
    for incident in incidents:
        lasted = duration_text((now_s if incident.closed_s is None else incident.closed_s) - incident.opened_s)
        shown = style.paint(f"{lasted}, lasts", "red") if incident.closed_s is None else lasted
        began, server = local_time_text(incident.opened_s), incident.server.removeprefix("http://")
        rows.append((str(incident.id), began, shown, server, incident.title))
    return "\n".join(columns(rows, "><<<<")) + "\n"


def incident_text(incident: Incident, points: Sequence[JournalPoint], now_s: float, style: Style) -> str:
    """The report of one incident: observations in `points`, diagnosis, actions, recommendations, as of `now_s`."""
    lines = [style.paint(incident_headline(incident), "bold"), *_server_and_times(incident, now_s), ""]
    lines += list(_observation_lines(incident, points, style))
    for title, paragraphs in (
        ("What was diagnosed", _diagnosis_texts(incident)),
        ("What was done", _action_texts(incident)),
        ("What is recommended", _recommendation_texts(incident)),
    ):
        lines += ["", style.paint(title, "bold")]
        for text in paragraphs:
            is_command = text.startswith("$ ")
            lines += [f"  {style.paint(text, 'bold')}"] if is_command else wrap(text, style.width, "  ")
    return "\n".join(lines) + "\n"


def incident_headline(incident: Incident) -> str:
    """`Incident 17: TITLE`."""
    return f"Incident {incident.id}: {incident.title}"


def _server_and_times(incident: Incident, now_s: float) -> list[str]:
    """The server's name, when the incident began, and how long it lasted, or lasts so far at `now_s` (Unix time)."""
    if incident.closed_s is None:
        end = f"and lasts, for {duration_text(now_s - incident.opened_s)} by now"
    else:
        end = f"lasted {duration_text(incident.closed_s - incident.opened_s)}: {incident.outcome or 'over'}"
    return [incident.server, f"began {local_time_text(incident.opened_s)}, {end}"]


def _observation_lines(incident: Incident, points: Sequence[JournalPoint], style: Style) -> Iterator[str]:
    """Why the incident was opened, exit code, log lines, curves of the samples (`points`), the finding's numbers."""
    yield style.paint("What was seen", "bold")
    reason = _finding_detail(incident).get("reason")
    if reason:
        yield from wrap(str(reason), style.width, "  ")
    detail = incident.detail
    if "exit_code" in detail:
        yield f"  exit code {detail['exit_code']} after {duration_text(float(detail.get('lived_s') or 0.0))}"
    shown = detail.get("evidence") or detail.get("lines") or ()
    for line in (shown if isinstance(shown, (list, tuple)) else [shown])[-_MAX_LINES:]:
        text = line.get("text", "") if isinstance(line, Mapping) else line
        yield style.paint(f"  | {str(text)[: style.width - 4]}", "grey")
    if len(points) < 2:
        if not detail.get("lines"):
            yield "  No samples are kept of that time."
    else:
        yield ""
        for curve in incident_curves(points):
            yield from curve_lines(curve, style)
        width, first, last = curve_width(style), points[0].time_s, points[-1].time_s
        at = round((incident.opened_s - first) / max(1e-9, last - first) * (width - 1))
        mark = "^".rjust(max(1, min(width, at + 1)))
        yield axis_line(f"{mark:<{width}} began", "", style).rstrip()
    if numbers := _finding_detail(incident).get("numbers") or {}:
        rows = [(name.replace("_", " "), f"{value:,.4g}") for name, value in numbers.items()]
        yield from ("", *(f"  {line}" for line in columns(rows, "<<")))


def incident_curves(points: Sequence[JournalPoint]) -> list[Curve]:
    """KV use, running, waiting and preempted requests over the incident, as maxima per time slot."""
    slots = _time_slots(points)

    def maxima(name: str) -> list[float]:
        """The highest value of the JournalPoint field `name` in each time slot; 0 where it has no point."""
        return [max((getattr(point, name) or 0.0 for point in slot), default=0.0) for slot in slots]

    return [
        Curve("KV use", "blue", 4, maxima("kv_use_max"), 1.0, "100%"),
        scaled_curve("running", "green", maxima("running_max")),
        scaled_curve("waiting", "orange", maxima("waiting_max")),
        scaled_curve("preempted", "red", maxima("preempted")),
    ]


def _time_slots(points: Sequence[JournalPoint]) -> list[list[JournalPoint]]:
    """The points in equal time slots, one a pixel at most; empty where scrapes failed, unless a single one did."""
    first_s, last_s = points[0].time_s, points[-1].time_s
    usual_s = statistics.median(after.time_s - before.time_s for before, after in pairwise(points))
    width_s = max(usual_s, (last_s - first_s) / _MAX_SLOTS, 1e-3)
    slots: list[list[JournalPoint]] = [[] for _ in range(int((last_s - first_s) / width_s) + 1)]
    begins = [int((point.time_s - first_s) / width_s) for point in points]
    for point, begin, following in zip(points, begins, [*begins[1:], len(slots)], strict=True):
        end = begin + 1 + max(1, math.ceil(point.span_s / width_s))
        for slot in slots[begin : max(begin + 1, min(end, following))]:
            slot.append(point)
    return slots


def _finding_detail(incident: Incident) -> Mapping[str, Any]:
    """The finding that opened the incident, as it was stored; empty where there is none."""
    finding = incident.detail.get("finding")
    return finding if isinstance(finding, Mapping) else {}


def _diagnosis_texts(incident: Incident) -> Iterator[str]:
    """The dated notes of the incident, and the cause and catalog entry where one was found."""
    finding = _finding_detail(incident)
    details = [finding, incident.detail, *(note.detail for note in incident.notes)]
    entry, cause = (next((detail[name] for detail in details if detail.get(name)), None) for name in ("entry", "cause"))
    has_text = False
    for note in incident.notes:
        if note.text and note.text != finding.get("reason") and "answers" not in note.detail:
            has_text = True
            yield f"{local_time_text(note.time_s)}  {note.text}"
    if entry or cause:
        has_text = True
        yield f"cause {cause or 'unknown'}" + (f"; the long story: legroom explain {entry}" if entry else "")
    if not has_text:
        yield "Nothing beyond what was seen."


def _action_texts(incident: Incident) -> Iterator[str]:
    """Each action with its time, stages and result, or that legroom did nothing."""
    for action in incident.actions:
        took = action.finished_s and duration_text(action.finished_s - action.begun_s)
        end = f", {action.state} after {took}" if took else f": {action.state}"
        yield f"{local_time_text(action.begun_s)}  {action.name}{end}"
        for stage in action.stages:
            yield f"{local_time_text(stage.time_s)}    {stage.name}"
    if not incident.actions:
        yield "Nothing: legroom only told."


def _recommendation_texts(incident: Incident) -> Iterator[str]:
    """What was advised: reasons, flags, environment, command, steps and cost, one text each."""
    answers = recommendations(incident)
    for answer in answers:
        yield str(answer.get("why", ""))
        if flags := answer.get("flags"):
            # `name=value` where the newest release has no such flag.
            words = (setting_words(name, value, latest()) or [f"{name}={value}"] for name, value in flags.items())
            yield "flags: " + " ".join(map(shlex.join, words))
        if env := answer.get("env"):
            yield "environment: " + " ".join(f"{name}={value}" for name, value in env.items())
        if answer.get("command"):
            yield "$ " + shlex.join(str(word) for word in answer["command"])
        for step in answer.get("steps") or ():
            yield f"- {step}"
        if answer.get("trades"):
            yield f"it costs: {answer['trades']}"
    if not answers:
        yield "Nothing was computed for it."


def recommendations(incident: Incident) -> list[Mapping[str, Any]]:
    """All remedies that were computed and all changes that were made, as JSON objects, without duplicates."""
    answers: list[Mapping[str, Any]] = []
    details = [incident.detail, *(note.detail for note in incident.notes)]
    details += [action.detail for action in incident.actions]
    for detail in details:
        for answer in detail.get("answers") or ():
            if isinstance(answer, Mapping) and answer not in answers:
                answers.append(answer)
    for detail in details:
        changed = detail.get("changed")
        if changed and not any(answer.get("changed") == changed for answer in answers):
            line = detail.get("command")
            words = shlex.split(line) if isinstance(line, str) else line
            # An incident's own command is the failed one.
            command = words if detail is not incident.detail else None
            answers.append({"why": f"changed: {changed}", "changed": changed, "command": command})
    return answers


def incident_json(incident: Incident, points: Sequence[JournalPoint] = ()) -> dict[str, Any]:
    """The document that `legroom incident --json` prints."""
    return {
        **incident.to_json(),
        "notes": [asdict(note) for note in incident.notes],
        "actions": [
            {name: value for name, value in asdict(action).items() if name != "incident_id"}
            | {"stages": [{"time_s": stage.time_s, "name": stage.name} for stage in action.stages]}
            for action in incident.actions
        ],
        "recommended": [dict(answer) for answer in recommendations(incident)],
        "samples": [
            {name: getattr(each, name) for name in ("time_s", "kv_use", "running", "waiting")}
            | {"preemptions": each.preempted}
            for each in points
        ],
    }


def incident_svg(incident: Incident, points: Sequence[JournalPoint], now_s: float) -> str:
    """What was seen, done and recommended as an SVG picture, with marks where it began, ended and was acted on."""
    svg = Svg(760, incident_headline(incident))
    svg.text(24, 34, incident_headline(incident), "ink sans", size=16, bold=True)
    about = (*_server_and_times(incident, now_s), *wrap(str(_finding_detail(incident).get("reason", "")), 88))
    y = svg.lines(24, 40, about, 18, "soft") + 30
    if len(points) >= 2:
        top = y
        y = draw_curves(svg, y, incident_curves(points))
        bottom = y - 12
        # Dashed vertical lines where the incident began and ended and where actions began.
        first, last = points[0].time_s, points[-1].time_s
        events = [(incident.opened_s, "began"), *((action.begun_s, action.name) for action in incident.actions)]
        events += [(incident.closed_s, "over")] if incident.closed_s is not None else []
        for time_s, name in events:
            if first <= time_s <= last:
                x = 110 + 560 * (time_s - first) / max(1e-9, last - first)
                svg.line(x, top - 12, x, bottom, dashed=True)
                svg.text(x + 3, top - 4, name, "soft", size=11)
        svg.text(110, y + 6, local_time_text(points[0].time_s), "soft", size=11)
        svg.text(670, y + 6, local_time_text(points[-1].time_s), "soft", anchor="end", size=11)
        y += 16
    for title, paragraphs in (
        ("What was done", _action_texts(incident)),
        ("What is recommended", _recommendation_texts(incident)),
    ):
        y += 26
        svg.text(24, y, title, "ink sans", bold=True)
        y = svg.lines(24, y, (line for text in paragraphs for line in wrap(text, 88, "", "  ")), 18)
    return svg.render(y + 24)
