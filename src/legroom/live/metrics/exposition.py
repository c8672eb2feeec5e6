"""Prometheus text into a Sample, for any release: all names that a metric ever had are read.

Parsing 53 kB of vLLM 0.32.0 takes 1.2 ms here and 17 ms with prometheus_client, which would be 7 cores for 2,000
servers. Only known series are read; label texts are parsed by prometheus_client once and cached. Where two names of a
metric are shown (0.9.2 to 0.11.2), the newer one counts.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts import metrics
from legroom.live.metrics.sample import HISTOGRAMS, EngineSample, GuardSample, Histogram, Sample

_ROLES_NAMED_LIKE_FIELDS = (
    *("kv_use", "running", "waiting", "swapped", "preemptions", "prefix_queries", "prefix_hits", "prefix_hit_rate"),
    *("prompt_tokens", "generation_tokens"),
)
VALUE_ROLES = {
    **{role: role for role in _ROLES_NAMED_LIKE_FIELDS},
    "prompt_tokens_cached": "cached_tokens",
    "prompt_tokens_recomputed": "recomputed_tokens",
}
"""Role of a metric in the facts -> field of EngineSample."""
LABELLED_ROLES = {
    "request_success": "success",
    "cache_config": "config",
    "sleep_state": "sleep",
    "admission_rejections": "rejections",
    "waiting_by_reason": "reason",
}
"""Roles whose labels carry the meaning -> part of a Slot."""
SERVER_SERIES = {
    "legroom_worker_allocated_bytes": "allocated_bytes",
    "legroom_worker_reserved_bytes": "reserved_bytes",
    "legroom_worker_used_bytes": "memory_used_bytes",
    "legroom_worker_host_rss_bytes": "host_rss_bytes",
    "legroom_worker_others_bytes": "others_bytes",
    "legroom_worker_alloc_retries": "alloc_retries",
    "process_resident_memory_bytes": "api_server_rss_bytes",
    "legroom_guard_stopped_engines": "stopped_engines",
    "process_start_time_seconds": "process_start_s",
    "legroom_guard_start_requested": "start_requested",
}
"""Series of the worker plugin (summed over GPUs), prometheus_client, the guard and recordings -> field of Sample."""
GUARD_SERIES = {
    "legroom_guard_waiting": "waiting",
    "legroom_guard_admitted_total": "admitted",
    "legroom_guard_rejected_total": "",
}
"""Series of the guard -> field of GuardSample; GUARD_REASONS has the fields of rejections."""
GUARD_REASONS = {"queue_full": "refused", "queue_timeout": "timed_out"}
"""Reasons of the guard to refuse a request for lack of room -> field of GuardSample."""
_PREFIXES = ("vllm:", "vllm_", "ray_vllm_", "ray_vllm:")  # Ray and some collectors rewrite the colon.
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # Control characters, which would move a terminal's cursor.

_LABEL_SET = re.compile(rb'(\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?')


class NotMetrics(LegroomError):
    """The response is not a vLLM's metrics."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "give the address of vLLM's API server; its metrics are at /metrics", UNREACHABLE)


class Slot(NamedTuple):
    """The field that a series is stored in."""

    field: str
    rank: int
    """0 for the newest name of a metric."""
    part: str
    """`value`, `server`, `worker` (summed), `guard`, a histogram's `bucket`, `sum` or `count`, or a LABELLED_ROLES."""


@cache
def slots_by_name() -> dict[bytes, Slot]:
    """Series name on a metrics page -> the field it fills (`Slot`), for every name and spelling of every release."""
    slots = {
        name: Slot(field, 0, "worker" if name.startswith("legroom_worker") else "server")
        for name, field in SERVER_SERIES.items()
    }
    slots |= {name: Slot(field, 0, "guard") for name, field in GUARD_SERIES.items()}
    for role in (*VALUE_ROLES, *LABELLED_ROLES, *HISTOGRAMS):
        field, part = VALUE_ROLES.get(role, role), LABELLED_ROLES.get(role, "value")
        for rank, series in enumerate(metrics.names_of(role)):
            for name in _series_spellings(series):
                if role in HISTOGRAMS:
                    slots |= {f"{name}_{part}": Slot(field, rank, part) for part in ("bucket", "sum", "count")}
                else:
                    slots.setdefault(name, Slot(field, rank, part))
    return {name.encode(): slot for name, slot in slots.items()}


def _series_spellings(series: str) -> Iterator[str]:
    """The names that a page may use for a series: with each known prefix, with and without `_total`."""
    bare = series.removeprefix("vllm:")
    for prefix in _PREFIXES:
        yield prefix + bare
        if bare.endswith("_total"):
            yield prefix + bare.removesuffix("_total")


class _Labels(NamedTuple):
    key: tuple[str, str]
    le: float
    named: dict[str, str]


_NONE: dict[str, str] = {}


@lru_cache(100_000)  # the label texts of a thousand servers with one model each
def _parse_labels(text: bytes) -> _Labels | None:
    """A label set as prometheus_client parses it; None where it is malformed."""
    from prometheus_client.parser import text_string_to_metric_families  # slow to import

    if not _LABEL_SET.fullmatch(text):  # such as labels, a value and an exemplar's labels
        return None
    try:
        (sample,) = next(iter(text_string_to_metric_families(f"x{text.decode()} 1\n"))).samples
        return _to_labels(dict(sample.labels))
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, StopIteration):
        return None


def _to_labels(named: dict[str, str]) -> _Labels:
    """A series' labels, its (model, engine) key and the bucket bound `le` as a number (NaN if it is no bucket)."""
    model, engine = named.get("model_name", named.get("model", "")), _engine_name(named)
    if not (model.isprintable() and engine.isprintable()):
        model, engine = _CONTROLS.sub("", model), _CONTROLS.sub("", engine)
    if "le" not in named:
        return _Labels((model, engine), math.nan, named)
    le = float(named["le"])
    return _Labels((model, engine), le, named if math.isnan(le) else _NONE)  # most cached texts are buckets'


def _engine_name(named: Mapping[str, str]) -> str:
    """The engine's number, with its replica: replicas of Ray Serve on one page each count from 0."""
    engine, replica = named.get("engine", named.get("engine_index", "")), named.get("ReplicaId")
    return f"{engine} of {replica}" if replica else engine


_RankedValues = dict[frozenset[tuple[str, str]], tuple[int, float]]
"""Label set -> (`Slot.rank` of the metric's name, value), so that a value under two names is summed once."""


def _values_of_newest_name(values: _RankedValues) -> list[tuple[dict[str, str], float]]:
    """(Labels, value) of each series of a metric, of the newest of its names that the page has."""
    newest = min((rank for rank, _ in values.values()), default=0)
    return [(dict(labels), value) for labels, (rank, value) in values.items() if rank == newest]


class _Buckets:
    __slots__ = ("bounds", "count", "counts", "rank", "sum")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bounds: list[float] = []
        self.counts: list[float] = []
        self.sum = self.count = math.nan


class _Page:
    """The values read so far of one response."""

    def __init__(self) -> None:
        self.engines: dict[tuple[str, str], dict[str, Any]] = {}
        self.ranks: dict[tuple[tuple[str, str], str], int] = {}
        self.configs: list[dict[str, str]] = []
        self.server: dict[str, float] = {}
        self.rejections: _RankedValues = {}
        self.guards: dict[str, dict[str, float]] = {}
        self.notes: list[str] = []
        self.series = 0

    def note(self, text: str) -> None:
        """Adds a text to the notes on what could not be read, once; at most eight are kept."""
        if len(self.notes) < 8 and text not in self.notes:
            self.notes.append(text)

    def engine(self, key: tuple[str, str]) -> dict[str, Any]:
        """The fields collected for a (model, engine), created empty on first use."""
        return self.engines.setdefault(key, {})

    def add(self, slot: Slot, labels: _Labels, value: float) -> None:
        """Stores a value in the field of `slot`, for the engine, guard or server in `labels`, or notes why not."""
        part, field, rank = slot.part, slot.field, slot.rank
        self.series += 1
        if part in {"bucket", "sum", "count"}:
            self._add_to_histogram(self.engine(labels.key), slot, labels.le, value)
        elif not 0 <= value < (1.01 if field == "kv_use" else 2**53):  # no count, no bytes, no share
            self.note(f"{field} was {value}: left out")
        elif part == "value":
            key = labels.key, field
            if rank <= self.ranks.get(key, rank):
                self.ranks[key] = rank
                self.engine(labels.key)[field] = value
        elif part in {"success", "rejections"}:
            values = self.rejections if part == "rejections" else self.engine(labels.key).setdefault("success", {})
            label_set = frozenset(labels.named.items())
            if label_set not in values or rank <= values[label_set][0]:
                values[label_set] = rank, value
        elif part == "config":
            self.configs.append(labels.named)
        elif part == "reason":
            if labels.named.get("reason") == "capacity":
                self.engine(labels.key)["waiting_for_capacity"] = value
        elif part == "sleep":
            if labels.named.get("sleep_state") != "awake" and value > 0:
                self.engine(labels.key)["asleep"] = True
        elif part == "server":
            self.server[field] = value
        elif part == "guard":
            # Prometheus shows the API servers of a pod together, each with its own labels.
            api_server = labels.named.get("api_server") or labels.named.get("instance", "")
            if field := field or GUARD_REASONS.get(labels.named.get("reason", ""), ""):
                self.guards.setdefault(api_server, {})[field] = value
        elif labels.named.get("gpu") != "cpu" or field == "host_rss_bytes":  # a CPU worker's memory is host memory
            self.server[field] = self.server.get(field, 0.0) + value

    def _add_to_histogram(self, engine: dict[str, Any], slot: Slot, le: float, value: float) -> None:
        """Adds a bucket, sum or count to the engine's histogram, unless a newer name of the metric has filled it."""
        buckets = engine.get(slot.field)
        if buckets is None or slot.rank < buckets.rank:
            buckets = engine[slot.field] = _Buckets(slot.rank)
        elif slot.rank > buckets.rank:
            return
        if slot.part == "bucket":
            buckets.bounds.append(le)
            buckets.counts.append(value)
        elif slot.part == "sum":
            buckets.sum = value
        else:
            buckets.count = value


@lru_cache(256)
def _shared_bounds(bounds: tuple[float, ...]) -> tuple[float, ...]:
    """One tuple object for all equal histogram bounds, as thousands of windows keep them."""
    return bounds


def _histogram(buckets: _Buckets) -> Histogram | None:
    """The histogram of these buckets or of a count alone; None without the last bucket, if counts fall or are NaN."""
    bounds, counts = tuple(buckets.bounds), tuple(buckets.counts)
    if any(a > b for a, b in pairwise(bounds)):  # Prometheus answers in no order
        bounds, counts = map(tuple, zip(*sorted(zip(bounds, counts, strict=True)), strict=True))
    if not bounds:
        bounds, counts = (math.inf,), (buckets.count,)  # only its count and sum were queried
    whole = bounds[-1] == math.inf and math.isfinite(sum(counts)) and math.isfinite(buckets.sum)
    if not whole or any(a >= b for a, b in pairwise(bounds)) or any(a > b for a, b in pairwise(counts)):
        return None
    return Histogram(_shared_bounds(bounds), counts, buckets.sum)


def parse_sample(text: str | bytes, time_s: float, server: str) -> Sample:
    """The Sample of a /metrics response; unreadable lines become notes. NotMetrics where no series is vLLM's."""
    body = text.encode("utf-8", "replace") if isinstance(text, str) else text
    start = body[:200].lstrip().lower()
    if not start:
        raise NotMetrics("the answer is empty")
    for what, heads in _OTHER_FORMATS.items():
        if start.startswith(heads):
            raise NotMetrics(f"the answer is {what}, not metrics")
    if b"\0" in body[:200]:
        raise NotMetrics("the answer is binary, not metrics")
    page = _Page()
    lines = body.split(b"\n")
    if lines.pop().strip():
        page.note("the answer was cut short: its last line is left out")
    _read_lines(page, lines)
    # A V0 that has just started shows its pool before its first figures.
    if not page.engines and (page.notes or not page.configs):
        if page.notes:
            raise NotMetrics(f"the answer has no figure of a vLLM that can be read ({page.notes[0]})")
        is_metrics = page.series or b"# TYPE " in body
        raise NotMetrics("the answer is metrics, but none of a vLLM" if is_metrics else "the answer is no metrics")
    return _build_sample(page, time_s, server)


def sample_of_series(series: Iterable[tuple[str, dict[str, str], float]], time_s: float, server: str) -> Sample | None:
    """The Sample of (name, labels, value) series; None where none of them is vLLM's."""
    page, slots = _Page(), slots_by_name()
    for name, named, value in series:
        slot = slots.get(name.encode())
        if slot is not None:
            page.add(slot, _to_labels(named), value)
    return _build_sample(page, time_s, server) if page.engines else None


def _read_lines(page: _Page, lines: list[bytes]) -> None:
    """Adds each line of a known series to the page; a line that cannot be read becomes a note."""
    slots = slots_by_name()
    for line in lines:
        brace = line.find(b"{")
        slot = slots.get(line[:brace] if brace > 0 else line.partition(b" ")[0])
        if slot is None:
            continue
        end = line.rfind(b"}")
        labels = _parse_labels(line[brace : end + 1] if brace > 0 else b"")
        try:
            value = float(line[end + 1 :].split()[0] if brace > 0 else line.split()[1])
        except (ValueError, IndexError):
            labels = None
        if labels is None:
            page.note(f"a line of {slot.field} could not be read: left out")
        else:
            page.add(slot, labels, value)


_OTHER_FORMATS = {"a web page (HTML)": (b"<!doctype", b"<html", b"<head", b"<body", b"<?xml"), "JSON": (b"{", b"[")}
"""The first bytes, in lower case, of answers that are no metrics."""


def _build_sample(page: _Page, time_s: float, server: str) -> Sample:
    """The sample of a page, its engines sorted by model and number; a broken histogram becomes a note."""
    engines = []
    for key in sorted(page.engines):
        fields = page.engines[key]
        for field in (name for name in HISTOGRAMS if name in fields):
            fields[field] = _histogram(fields[field])
            if fields[field] is None:
                page.note(f"the histogram of {field} is not whole: left out")
        fields |= _pool_size(page.configs, key) | _finished_counts(fields.pop("success", {}))
        engines.append(EngineSample(model=key[0], engine=key[1], **fields))
    start_s = page.server.pop("process_start_s", None)
    counts: dict[str, Any] = {field: int(value) for field, value in page.server.items()}
    return Sample(
        time_s=time_s,
        server=server,
        engines=tuple(engines),
        rejections=sum(value for _, value in _values_of_newest_name(page.rejections)) if page.rejections else None,
        process_start_s=start_s,
        guards=tuple(GuardSample(name, **fields) for name, fields in sorted(page.guards.items())),
        notes=tuple(page.notes),
        **counts,
    )


def _finished_counts(success: _RankedValues) -> dict[str, float]:
    """Totals `finished`, and of these `aborted` and `errored`, from vLLM's `request_success`; {} without it."""
    counts: dict[str, float] = {}
    for labels, value in _values_of_newest_name(success):
        bad = {"abort": "aborted", "error": "errored"}.get(labels.get("finished_reason", ""))
        for field in ("finished", bad) if bad else ("finished",):
            counts[field] = counts.get(field, 0.0) + value
    return counts


def _pool_size(configs: list[dict[str, str]], key: tuple[str, str]) -> dict[str, Any]:
    """EngineSample's pool fields from the labels of `vllm:cache_config_info`; {} without a row of this engine."""
    model, engine = key
    of_model = (row for row in configs if row.get("model_name", model) == model)
    config = next((row for row in of_model if "engine" not in row or _engine_name(row) == engine), None)
    if config is None:
        return {}
    # Each row of a server's data-parallel engines names the blocks of all of them together (0.9+).
    engines = sum(_without_engine(row) == _without_engine(config) for row in configs)
    blocks, size = _parse_number(config.get("num_gpu_blocks")), _parse_number(config.get("block_size"))
    tokens = _parse_number(config.get("kv_cache_size_tokens"))  # of one engine, unlike the blocks
    return {
        "num_blocks": int(blocks) // engines if blocks else None,
        "block_size": int(size) if size else None,
        "size_tokens": int(tokens) if tokens else None,
        "max_concurrency": _parse_number(config.get("kv_cache_max_concurrency")),
        "prefix_caching": {"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
    }


def _without_engine(config: dict[str, str]) -> dict[str, str]:
    """The labels without the engine's number, to compare the rows of two engines."""
    return {name: value for name, value in config.items() if name != "engine"}


def _parse_number(text: str | None) -> float | None:
    """The text as a number from 0 to below 2^53; None for anything else."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if 0 <= value < 2**53 else None
