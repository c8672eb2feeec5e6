"""Reads vLLM's start-up lines: lines -> events -> one `Startup` per start.

Lines may have terminal colours, prefixes of docker, kubectl or journald, process labels of any release, or be JSON
objects. `facts.log_messages.startup_lines` has the patterns."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

from legroom.errors import LegroomError
from legroom.facts.log_messages import LineKind, Value, startup_lines, typed_groups
from legroom.facts.releases import logged_release
from legroom.facts.releases import release as known_release
from legroom.records import dataclass, field
from legroom.regex import PatternSet, compiled
from legroom.vllm.args import ServeArgs, Usage
from legroom.vllm_logs.lines import plain_line
from legroom.vllm_logs.printed_flags import GivenFlags, engine_facts, engine_words, given_args, merged_args

Outcome = Literal["started", "failed", "incomplete"]
Printed = defaultdict[str, list[Any]]
"""The values of each field, in the order of the events."""

_PROCESS = re.compile(r"\((?P<label>\w*(?:Core|Worker|Wrapper|Process|Vllm|Server)[\w-]*)(?P<rest>[ ,][^)]*)?\)")
_PID = re.compile(r"\b(?:pid|ip)=[^\s,)]+,?\s*")
_LOOKBEHIND = re.compile(r"\(\?<!(?P<text>[^)]*)\)")


@dataclass(frozen=True, slots=True)
class StartupEvent:
    line_number: int
    id: str
    kind: LineKind
    process: str
    """The process without its pid: `EngineCore_DP0`, `Worker_TP1`, or empty."""
    fields: Mapping[str, Value]
    text: str


@dataclass(frozen=True, slots=True)
class StartupFailure:
    """The error that ended a start-up, with its figures."""

    id: str
    line_number: int
    text: str
    needed_bytes: int | None = None
    available_bytes: int | None = None
    estimated_max_len: int | None = None


@dataclass(frozen=True, slots=True)
class Startup:
    """What one start-up printed about its settings and memory. None: not printed."""

    vllm: str | None = None
    args: ServeArgs = field(default_factory=ServeArgs)
    args_known: bool = False
    """The flags were printed, so one that is missing means the release's default."""
    given: GivenFlags = field(default_factory=GivenFlags)
    """The flags that were typed, without what the engine resolved by itself."""
    architecture: str | None = None
    runner: str | None = None
    world_size: int | None = None
    """The ranks of one engine, as printed."""
    gpu_name: str | None = None
    gpu_total_bytes: int | None = None
    free_at_start_bytes: int | None = None
    weights_bytes: int | None = None
    """Of the largest rank."""
    activation_bytes: int | None = None
    """Peak of the profile run above the weights, without any CUDA-graph estimate."""
    non_torch_bytes: int | None = None
    graph_estimate_bytes: int | None = None
    graph_bytes: int | None = None
    available_kv_bytes: int | None = None
    """Of the rank with the least."""
    explicit_kv: bool = False
    blocks: int | None = None
    tokens: int | None = None
    max_concurrency: float | None = None
    concurrency_len: int | None = None
    compiled: bool = False
    """torch.compile compiled: a first start, whose profile run may peak higher than later ones."""
    outcome: Outcome = "incomplete"
    failure: StartupFailure | None = None
    first_line: int = 0
    last_line: int = 0


def read_startups(text: str | Iterable[str]) -> tuple[Startup, ...]:
    """Every start-up in a log, in order."""
    return tuple(startup_of(events) for events in split_starts(read_events(text)))


def read_events(text: str | Iterable[str]) -> Iterator[StartupEvent]:
    """The start-up events of a log, given as its text or as its lines, in order."""
    lines = text.splitlines() if isinstance(text, str) else text
    for number, raw in enumerate(lines, 1):
        line, process = plain_line(raw), ""
        if match := _PROCESS.search(line[:400]):
            rest = _PID.sub("", match["rest"] or "").strip(" ,")
            process = f"{match['label']} {rest}".strip()
        yield from events_in_line(line, number, process)


def events_in_line(line: str, number: int, process: str) -> Iterator[StartupEvent]:
    """The start-up events in one line of text without colours and JSON; `process`: who logged it, empty if unknown."""
    for index in _startup_patterns().matching(line):
        form = startup_lines()[index]
        pattern, excluded_prefixes = _without_lookbehind(form.pattern.pattern)
        match = compiled(pattern).search(line)
        if match is None or line[: match.start()].endswith(excluded_prefixes):
            continue
        fields = typed_groups({name: value for name, value in match.groupdict().items() if value is not None})
        yield StartupEvent(number, form.id, form.kind, process, fields, line[:2000].strip())


@cache
def _startup_patterns() -> PatternSet:
    """The patterns of all start-up lines, with the literal text that must occur in each."""
    return PatternSet((_without_lookbehind(form.pattern.pattern)[0], (form.mark,)) for form in startup_lines())


def _without_lookbehind(pattern: str) -> tuple[str, tuple[str, ...]]:
    """(the pattern without negative look-behinds, which RE2 lacks; the texts that must not stand before a match)."""
    return _LOOKBEHIND.sub("", pattern), tuple(match["text"] for match in _LOOKBEHIND.finditer(pattern))


def split_starts(events: Iterable[StartupEvent]) -> Iterator[list[StartupEvent]]:
    """The events of a log, one list per start-up. A new one begins with a banner, flags or an engine's config line that
    the same process has printed before, and with a banner or flags after any engine's config line."""
    current: list[StartupEvent] = []
    announced: set[tuple[str, str]] = set()
    for event in events:
        if event.id in ("api_server", "non_default_args", "namespace", "engine_config"):
            marker = (event.id, event.process)
            earlier = event.id != "engine_config" and any(id_ == "engine_config" for id_, _ in announced)
            if marker in announced or earlier:
                yield current
                current, announced = [], set()
            announced.add(marker)
        current.append(event)
    if current:
        yield current


def startup_of(events: list[StartupEvent]) -> Startup:
    """What these events of one start-up say: its settings, memory figures and outcome."""
    printed: Printed = defaultdict(list)
    for event in events:
        for name, value in event.fields.items():
            printed[name].append(value)
    startup = Startup(first_line=events[0].line_number, last_line=events[-1].line_number)
    startup = _with_settings(startup, events, printed)
    startup = _with_memory(startup, printed)
    length = _first(printed["concurrency_len_count"])
    blocks = _first(printed["override_blocks_count"] or sorted(printed["blocks_count"]))
    startup = replace(
        startup,
        blocks=int(blocks) if blocks is not None else None,
        tokens=_smallest(printed["tokens_count"]),
        max_concurrency=_smallest(printed["concurrency_ratio"]),
        concurrency_len=int(length) if length is not None else None,
    )
    # A failure after it was ready does not count.
    ready = next((index for index, event in enumerate(events) if event.kind == "ready"), None)
    failed = next((index for index, event in enumerate(events) if event.kind == "failure"), None)
    if failed is not None and (ready is None or failed < ready):
        return replace(startup, outcome="failed", failure=_startup_failure(events, failed))
    # Old releases used as a library print no "ready" line; the cache size comes after the last memory check.
    sized = startup.blocks is not None or startup.tokens is not None
    return replace(startup, outcome="started" if ready is not None or sized else "incomplete")


def _with_settings(startup: Startup, events: list[StartupEvent], printed: Printed) -> Startup:
    """The start-up with release, arguments and engine settings as the log prints them."""

    def first_text(name: str) -> str | None:
        """The first printed value of this name as text; None where none was printed."""
        return str(printed[name][0]) if printed[name] else None

    config, mapping, namespace = map(first_text, ("config", "mapping", "namespace"))
    args = merged_args(mapping, namespace, engine_facts(config) if config else {})
    if not args.model:
        args = replace(args, model=first_text("model") or "")
    from_server = any(event.id in ("api_server", "namespace") or "APIServer" in event.process for event in events)
    batched = _first(printed["max_num_batched_tokens_count"])
    if args.max_num_batched_tokens is None and isinstance(batched, int):
        args = replace(args, max_num_batched_tokens=batched)
    usage: Usage = "serve" if from_server or "model_tag" in (mapping or "") else "llm"
    version = first_text("version")
    try:
        release = known_release(version) if version else None
    except LegroomError:
        release = None
    given = given_args(mapping, namespace, release, usage == "llm")
    others = given.args.others or (engine_words(config, args.model, release) if config else ())
    gpu = first_text("gpu") or first_text("gpu_underscored")
    return replace(
        startup,
        vllm=version,
        args=replace(args, usage=usage, others=others),
        given=given,
        args_known=mapping is not None or namespace is not None,
        architecture=first_text("architecture"),
        runner=first_text("runner"),
        world_size=_largest(printed["world_size_count"]),
        gpu_name=gpu.replace("_", " ").strip() if gpu else None,
        compiled=bool(printed["compiled"]),
    )


def _with_memory(startup: Startup, printed: Printed) -> Startup:
    """The start-up with the printed memory figures: the largest use and the smallest free memory of all ranks."""
    names = ("graph_estimate_bytes", "weights_bytes", "consumed_bytes", "non_torch_bytes")
    estimate, weights, consumed, non_torch = (_largest(printed[name]) for name in names)
    if non_torch is None and consumed is not None and weights is not None:
        # 0.27+ prints weights and non-torch as one sum, read from the device.
        non_torch = consumed - weights
    # By release where the log does not say whether the estimate is taken off the KV cache.
    release = logged_release(startup.vllm) if startup.vllm else None
    says = _first(printed["graph_profiling"])
    applied = says == "enabled" if says else release is not None and release.at_least("0.20.0")
    activation, peak = _largest(printed["activation_bytes"]), _largest(printed["peak_activation_bytes"])
    if activation is None and peak is not None:
        # The summary of 0.18 and of 0.27+ adds the applied graph estimate to the activation peak.
        adds = release is not None and (release.within("0.18.0", "0.18.99") or release.at_least("0.27.0"))
        activation = peak - (estimate or 0 if applied and adds else 0)
    explicit, available = _smallest(printed["explicit_kv_bytes"]), _smallest(printed["available_kv_bytes"])
    return replace(
        startup,
        gpu_total_bytes=_largest(printed["total_bytes"]),
        free_at_start_bytes=_smallest(printed["free_bytes"]),
        weights_bytes=weights,
        activation_bytes=activation,
        non_torch_bytes=non_torch,
        graph_estimate_bytes=estimate if applied else (0 if estimate is not None else None),
        graph_bytes=_largest(printed["graphs_bytes"]),
        available_kv_bytes=available if explicit is None else explicit,
        explicit_kv=explicit is not None,
    )


def _startup_failure(events: list[StartupEvent], index: int) -> StartupFailure:
    """The failure at events[index]; an out-of-memory error is named for the last phase logged before it."""
    event = events[index]
    id_ = event.id
    if id_ == "out_of_memory":
        before = {earlier.id for earlier in events[:index]}
        if "weights_loaded" not in before:
            id_ = "weights_too_big"
        elif before & {"kv_tokens", "gpu_blocks", "max_concurrency"}:
            id_ = "cudagraph_capture_oom"
        else:
            id_ = "kv_allocation_oom" if "available_kv" in before else "profiling_activation_peak"
    elif id_ == "sampler_warmup_oom":
        id_ = "cudagraph_capture_oom"
    available = "free_bytes" if id_ == "free_memory_lt_requested" else "available_bytes"
    figures = (event.fields.get(name) for name in ("needed_bytes", available, "estimated_len_count"))
    needed, left, longest = (figure if isinstance(figure, int) else None for figure in figures)
    return StartupFailure(id_, event.line_number, event.text, needed, left, longest)


def _first(values: list[Any]) -> Any:
    """The first value; None where there is none."""
    return values[0] if values else None


_largest, _smallest = partial(max, default=None), partial(min, default=None)
