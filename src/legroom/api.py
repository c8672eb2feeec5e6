"""The Python API: plain values in, a typed object out that shows itself as text, JSON or a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.facts.releases import latest
from legroom.facts.releases import release as known_release
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.records import dataclass
from legroom.units import parse_length
from legroom.vllm.args import ServeArgs

if TYPE_CHECKING:
    from pathlib import Path

    from legroom.diagnosis.diagnose import LogReading
    from legroom.diagnosis.finding import Finding
    from legroom.drawing.terminal import Style
    from legroom.facts.diagnosis_texts import Language
    from legroom.facts.releases import Release
    from legroom.live.view import ServerView
    from legroom.memory.layout import Layout
    from legroom.planning.plan import Policy, Verdict
    from legroom.planning.sizing import ModelFit
    from legroom.planning.wish import Wish
    from legroom.simulation.scheduler_settings import SchedulerSettings
    from legroom.simulation.timeline import Timeline
    from legroom.simulation.trace import Trace

_FLAGS = frozenset(field.name for field in fields(ServeArgs)) - {"model", "usage", "env", "others"}


@dataclass(frozen=True)
class PlanReport:
    """A plan that shows itself."""

    plan: Plan

    @property
    def verdict(self) -> Verdict:
        """`fits`, `tight` or `does_not_fit`."""
        return self.plan.verdict

    @property
    def layout(self) -> Layout:
        """Where every byte of the tightest GPU goes."""
        return self.plan.layout

    @property
    def command(self) -> list[str]:
        """The command line that was planned, ready to run."""
        from legroom.planning.plan import ready_command

        return ready_command(self.plan)

    def text(self, style: Style | None = None, explain_math: bool = False) -> str:
        """The picture, as the terminal shows it."""
        from legroom.drawing.terminal import PLAIN
        from legroom.render.plan_text import plan_text

        return plan_text(self.plan, style or PLAIN, explain_math)

    def svg(self) -> str:
        """The picture, as an SVG document."""
        from legroom.render.plan_svg import plan_svg

        return plan_svg(self.plan)

    def json(self, explain_math: bool = False) -> dict[str, Any]:
        """The document that `legroom plan --json` prints."""
        from legroom.planning.plan_json import plan_json

        return plan_json(self.plan, explain_math)

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class DiagnosisReport:
    """A diagnosis that shows itself."""

    reading: LogReading

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The causes of the run that matters, the likeliest first; empty where nothing is wrong."""
        return self.reading.runs[0].findings if self.reading.runs else ()

    def text(self, style: Style | None = None, language: Language = "en") -> str:
        """The answer, as the terminal shows it."""
        from legroom.drawing.terminal import PLAIN
        from legroom.render.diagnosis_text import readings_text

        return readings_text([self.reading], style or PLAIN, language)

    def json(self) -> dict[str, Any]:
        """The document that `legroom diagnose --json` prints."""
        from legroom.diagnosis.diagnosis_json import readings_json

        return readings_json([self.reading])

    def __str__(self) -> str:
        return self.text()


def diagnose(
    log: str | Path,
    *,
    command: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    vllm: str | None = None,
) -> DiagnosisReport:
    """Say why a server failed: `log` is the path of a file with what it printed, or that text itself.

    A string is a path where a file of that name exists, and a text where it holds a newline or a line that is known.
    The other arguments tell what the log does not show.
    """
    from legroom.diagnosis.diagnose import read_log
    from legroom.diagnosis.starting_plan import Hints
    from legroom.vllm_logs.log_sources import names_a_file, pieces_of_file

    hints = Hints(command, model, gpu, gpus, vllm)
    if not isinstance(log, str) or names_a_file(log):
        return DiagnosisReport(read_log(pieces_of_file(str(log)), str(log), hints))
    reading = read_log([log.encode("utf-8", "replace")], "the log", hints)
    is_log = "\n" in log or (" " in log.strip() and reading.runs and reading.runs[0].verdict != "not understood")
    if not is_log:
        raise LegroomError(
            f"there is no file {log[:200]!r}, and it is not a line of a vLLM log"
            if log.strip()
            else "the log is empty",
            "give the path of a vLLM log, or the text that the server printed",
        )
    return DiagnosisReport(reading)


def plan(
    model: str,
    gpu: str,
    *,
    gpus: int | None = None,
    vllm: str | None = None,
    gpu_memory: str | None = None,
    gpu_used: str | None = None,
    env: Mapping[str, str] | None = None,
    usage: str = "serve",
    advice: bool = True,
    **flags: Any,
) -> PlanReport:
    """Predict what vLLM does with `model` on `gpu`.

    `flags` are vLLM's engine arguments by their Python names (`max_model_len=32768`); what is not given is the
    release's default. `gpu_memory` overrides the card's total and `gpu_used` is what other processes hold of it.
    """
    release = known_release(vllm) if vllm else latest()
    args = _serve_args(model, release, flags, env, usage)
    return PlanReport(make_plan(args, release, Machine(gpu, gpus, gpu_memory, gpu_used), advice=advice))


def _serve_args(
    model: str, release: Release, flags: Mapping[str, Any], env: Mapping[str, str] | None, usage: str = "serve"
) -> ServeArgs:
    unknown = sorted(set(flags) - _FLAGS)
    if unknown:
        raise LegroomError(f"{unknown[0]!r} is not an engine argument that memory depends on", _near(unknown[0]))
    _refuse_unknown(flags, release)
    return ServeArgs(model=model, usage=usage, env=dict(env or {}), **flags)  # type: ignore[arg-type]


def _refuse_unknown(flags: Mapping[str, Any], release: Release) -> None:
    """End with the first argument that the release does not have, as its command line would."""
    from legroom.facts.flags import flags_of

    had = {flag.dest for flag in flags_of(release).values()}
    if "speculative_model" in had:
        had.add("speculative_config")  # flags of their own until 0.8.2
    for name in (name for name, value in flags.items() if value is not None and name not in had):
        from legroom.vllm.flag_problems import explain_unknown

        problem = explain_unknown(f"--{name.replace('_', '-')}", release)
        raise LegroomError(problem.message, f"instead: {problem.instead}" if problem.instead else "leave it out")


@dataclass(frozen=True)
class SizeReport:
    """A sizing table that shows itself."""

    rows: tuple[ModelFit, ...]
    wish: Wish
    release: Release

    @property
    def fits(self) -> bool:
        """Whether any of the GPUs holds any of the models."""
        return any(row.fit.count for row in self.rows)

    def text(self, style: Style | None = None, matrix: bool = False) -> str:
        """The table, as the terminal shows it; with `matrix` models by GPUs."""
        from legroom.drawing.terminal import PLAIN
        from legroom.render.size_text import matrix_text, size_text

        requests = f"{self.wish.concurrency:g} request{'' if self.wish.concurrency == 1 else 's'}"
        title = (
            f"{requests} of {self.wish.context:,} tokens at once, vLLM {self.release.version}, "
            f"policy {self.wish.policy}"
        )
        draw = matrix_text if matrix else size_text
        return draw([(row.model, row.fit) for row in self.rows], title, style or PLAIN)

    def json(self) -> dict[str, Any]:
        """The document that `legroom size --json` prints."""
        from legroom.planning.sizing import size_json

        return size_json(self.rows, self.wish, self.release)

    def __str__(self) -> str:
        return self.text()


def size(
    model: str | Sequence[str],
    *,
    context: int | str = 4096,
    concurrency: float = 1,
    gpus: Sequence[str] | str | None = None,
    max_gpus: int = 32,
    vllm: str | None = None,
    policy: Policy = "balanced",
    env: Mapping[str, str] | None = None,
    **flags: Any,
) -> SizeReport:
    """Say which GPUs, and how many, hold `model` so that `concurrency` requests of `context` tokens run at once.

    `model` may be several; `gpus` are names (`["h100", "l4"]` or `"all"`), the usual ones unless given; `flags` are
    vLLM's engine arguments as in `plan`.
    """
    from legroom.planning.sizing import named_gpus, size_models
    from legroom.planning.wish import Wish, counts_up_to

    tokens = parse_length(context, "context") if isinstance(context, str) else context
    if tokens < 1 or concurrency < 1 or max_gpus < 1:
        raise LegroomError("context, concurrency and max_gpus are at least 1", "as in context=4096, concurrency=16")
    release = known_release(vllm) if vllm else latest()
    args = _serve_args("", release, flags, env)
    models = [model] if isinstance(model, str) else list(model)
    wish = Wish(tokens, float(concurrency), counts_up_to(max_gpus), policy)
    return SizeReport(tuple(size_models(models, release, args, wish, named_gpus(gpus))), wish, release)


def layout(model: str, gpu: str, **options: Any) -> Layout:
    """Where every byte of the tightest GPU goes; the arguments are those of `plan`."""
    return plan(model, gpu, advice=False, **options).layout


def simulate(trace: Trace | str, settings: SchedulerSettings, **options: Any) -> Timeline:
    """Replay a trace (or a file of one) through vLLM's scheduling decisions; options as in `simulation.replay`."""
    from legroom.simulation.trace_replay import simulate as replay_trace
    from legroom.simulation.traces.trace_files import read_trace

    return replay_trace(read_trace(trace) if isinstance(trace, str) else trace, settings, **options)


@dataclass(frozen=True)
class WatchReport:
    """One look at a serving vLLM that shows itself."""

    view: ServerView

    @property
    def state(self) -> str:
        """`healthy`, `idle`, `warning`, `critical` or `unreachable`."""
        return self.view.state

    def text(self, style: Style | None = None) -> str:
        """The look, as the terminal shows it."""
        from legroom.drawing.terminal import PLAIN
        from legroom.render.watch_text import look_text

        return look_text([self.view], style or PLAIN)

    def json(self) -> dict[str, Any]:
        """The object that `legroom watch --json` prints for it."""
        return self.view.to_json()

    def __str__(self) -> str:
        return self.text()


def watch(*servers: str, interval_s: float = 5.0, once: bool = False) -> Iterator[WatchReport]:
    """Look at serving vLLMs: a report after every look, for ever, or with `once` one of each server.

    Nothing is written and nothing is acted on. Close the iterator to stop looking.
    """
    from legroom.sidecar.config import simple_config, with_interval
    from legroom.sidecar.watch import WatchSession, look_once, watching

    if not servers:
        raise LegroomError("which server?", 'legroom.watch("http://host:8000")')
    config, session = with_interval(simple_config(servers), interval_s), WatchSession()
    if once:
        look_once(config, session, min(1.0, interval_s))
        return iter([WatchReport(view) for view in session.views.values()])
    return (WatchReport(view) for view in watching(config, session))


def _near(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, _FLAGS, n=3)
    return f"did you mean {', '.join(close)}?" if close else "use vLLM's Python names, like max_model_len"
