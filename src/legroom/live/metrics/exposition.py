"""Prometheus text into a Sample, without knowing the release: every name a role ever had is looked for.

Only the series that legroom uses are read. A line's name picks its slot; its labels go through prometheus_client's
parser the first time that label text is seen and are remembered, because a server repeats the same ones in every
scrape. Where two names of a role are shown (0.9.2 to 0.11.2 show the old beside the new), the newer one counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.metrics.names import HISTOGRAMS, WORKER, Slot, slots_by_name
from legroom.live.metrics.sample import EngineSample, Histogram, Sample

MAX_NOTES = 8
_MAX_LABEL_TEXTS = 100_000
"""Of label texts remembered: a thousand servers with a model each. More are parsed anew every time."""

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""What would move a terminal's cursor. A name is shown to people; it never needs these."""
_LABEL_SET = re.compile(rb'\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}')


class NotMetrics(LegroomError):
    """An answer that is no metrics of a vLLM."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(
            message, hint or "give the address of vLLM's API server; its metrics are at /metrics", UNREACHABLE
        )


class _Labels(NamedTuple):
    key: tuple[str, str]
    le: float
    named: dict[str, str]


_NONE: dict[str, str] = {}
_label_texts: dict[bytes, _Labels | None] = {}


def _labels(text: bytes) -> _Labels | None:
    """A label set, parsed by prometheus_client; None where it is malformed."""
    try:
        return _label_texts[text]
    except KeyError:
        pass
    if len(_label_texts) >= _MAX_LABEL_TEXTS:
        _label_texts.pop(next(iter(_label_texts)))
    parsed = _label_texts[text] = _parsed_labels(text)
    return parsed


def _parsed_labels(text: bytes) -> _Labels | None:
    from prometheus_client.parser import text_string_to_metric_families  # slow to import

    try:
        families = list(text_string_to_metric_families(f"x{text.decode()} 1\n"))
        (sample,) = families[0].samples
        return _of_labels(dict(sample.labels))
    except (ValueError, IndexError, KeyError, UnicodeDecodeError):
        return None


def _of_labels(named: dict[str, str]) -> _Labels:
    model, engine = named.get("model_name", named.get("model", "")), _engine(named)
    if not (model.isprintable() and engine.isprintable()):
        model, engine = _CONTROLS.sub("", model), _CONTROLS.sub("", engine)
    if "le" not in named:
        return _Labels((model, engine), math.nan, named)
    le = float(named["le"])
    # Of a bucket's labels the bound is all that is asked for; most label texts are buckets', and they are kept.
    return _Labels((model, engine), le, named if math.isnan(le) else _NONE)


def _engine(named: Mapping[str, str]) -> str:
    """Replicas of Ray Serve number their engines each from 0, and those of one machine answer together."""
    engine, replica = named.get("engine", named.get("engine_index", "")), named.get("ReplicaId")
    return f"{engine} of {replica}" if replica else engine


_Parts = dict[frozenset[tuple[str, str]], tuple[int, float]]
"""What is summed over its labels: label set -> (rank, value), so that nothing shown twice is counted twice."""


def _take_part(parts: _Parts, slot: Slot, labels: _Labels, value: float) -> None:
    key = frozenset(labels.named.items())
    known = parts.get(key)
    if known is None or slot.rank <= known[0]:
        parts[key] = slot.rank, value


def _newest(parts: _Parts) -> Iterable[tuple[dict[str, str], float]]:
    """The label sets under the newest name that is shown, each with its value."""
    newest = min((rank for rank, _ in parts.values()), default=0)
    return [(dict(labels), value) for labels, (rank, value) in parts.items() if rank == newest]


class _Buckets:
    """A histogram's lines, as they come."""

    __slots__ = ("bounds", "count", "counts", "rank", "sum")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bounds: list[float] = []
        self.counts: list[float] = []
        self.sum = self.count = math.nan


class _Reading:
    """What has been read of one answer so far."""

    def __init__(self) -> None:
        self.engines: dict[tuple[str, str], dict[str, Any]] = {}
        self.ranks: dict[tuple[tuple[str, str], str], int] = {}
        self.configs: list[dict[str, str]] = []
        self.server: dict[str, float] = {}
        self.rejections: _Parts = {}
        self.notes: list[str] = []
        self.series = 0

    def note(self, text: str) -> None:
        if len(self.notes) < MAX_NOTES and text not in self.notes:
            self.notes.append(text)

    def engine(self, key: tuple[str, str]) -> dict[str, Any]:
        fields = self.engines.get(key)
        if fields is None:
            fields = self.engines[key] = {}
        return fields

    def take(self, slot: Slot, labels: _Labels, value: float) -> None:
        """Put one value where it belongs."""
        part, field, rank = slot.part, slot.field, slot.rank
        if part in {"bucket", "sum", "count"}:
            self._take_histogram(self.engine(labels.key), slot, labels.le, value)
            return
        if not math.isfinite(value):
            self.note(f"{field} was {value}: left out")
            return
        if part == "value":
            key = labels.key, field
            if rank <= self.ranks.get(key, rank):
                self.ranks[key] = rank
                self.engine(labels.key)[field] = value
        elif part == "success":
            _take_part(self.engine(labels.key).setdefault("success", {}), slot, labels, value)
        elif part == "config":
            self.configs.append(labels.named)
        elif part == "rejections":
            _take_part(self.rejections, slot, labels, value)
        elif part == "reason":
            if labels.named.get("reason") == "capacity":
                self.engine(labels.key)["waiting_for_capacity"] = value
        elif part == "sleep":
            if labels.named.get("sleep_state") != "awake" and value > 0:
                self.engine(labels.key)["asleep"] = True
        elif part == "worker":
            # What a worker without a GPU uses is the host's, which has a figure of its own.
            if labels.named.get("gpu") != "cpu" or field == "host_rss_bytes":
                self.server[field] = self.server.get(field, 0.0) + value
        else:
            self.server[field] = value

    def _take_histogram(self, engine: dict[str, Any], slot: Slot, le: float, value: float) -> None:
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


_bounds: dict[tuple[float, ...], tuple[float, ...]] = {}


def _histogram(buckets: _Buckets) -> Histogram | None:
    """The whole histogram; None where a bucket is missing, out of order or no number."""
    bounds, counts = tuple(buckets.bounds), tuple(buckets.counts)
    if any(a > b for a, b in pairwise(bounds)):  # Prometheus answers in no order
        bounds, counts = map(tuple, zip(*sorted(zip(bounds, counts, strict=True)), strict=True))
    if not bounds:
        bounds, counts = (math.inf,), (buckets.count,)  # its count and sum alone were asked for
    whole = bounds[-1] == math.inf and math.isfinite(sum(counts)) and math.isfinite(buckets.sum)
    if not whole or any(a >= b for a, b in pairwise(bounds)):
        return None
    if any(a > b for a, b in pairwise(counts)):
        return None
    if len(_bounds) > 256:
        _bounds.clear()
    return Histogram(_bounds.setdefault(bounds, bounds), counts, buckets.sum)


def parse_sample(text: str | bytes, time_s: float, server: str) -> Sample:
    """A sample of what an endpoint answered. What cannot be read is left out and noted; no metrics at all raises."""
    body = text.encode("utf-8", "replace") if isinstance(text, str) else text
    _refuse_other_formats(body)
    reading = _Reading()
    lines = body.split(b"\n")
    if lines.pop().strip():
        reading.note("the answer was cut short: its last line is left out")
    _read_lines(reading, lines)
    if not reading.engines:
        _refuse_without_engines(reading, body)
    return _sample(reading, time_s, server)


def _refuse_without_engines(reading: _Reading, body: bytes) -> None:
    """A V0 that has just started shows its pool before its first figures; anything else without figures is no vLLM."""
    if reading.configs and not reading.notes:
        return
    if reading.notes:
        raise NotMetrics(f"the answer has no figure of a vLLM that can be read ({reading.notes[0]})")
    raise NotMetrics(
        "the answer is metrics, but none of a vLLM"
        if reading.series or b"# TYPE " in body
        else "the answer is no metrics"
    )


@cache
def _slots_by_text() -> dict[str, Slot]:
    return {name.decode(): slot for name, slot in slots_by_name().items()}


def sample_of_series(series: Iterable[tuple[str, dict[str, str], float]], time_s: float, server: str) -> Sample | None:
    """The same from series that somebody else has parsed; None where none of them is a vLLM's."""
    reading = _Reading()
    slots = _slots_by_text()
    for name, named, value in series:
        slot = slots.get(name)
        if slot is not None:
            reading.series += 1
            reading.take(slot, _of_labels(named), value)
    return _sample(reading, time_s, server) if reading.engines else None


def _read_lines(reading: _Reading, lines: list[bytes]) -> None:
    slots = slots_by_name()
    ignored: set[Slot] = set()
    for line in lines:
        brace = line.find(b"{")
        slot = slots.get(line[:brace] if brace > 0 else line.partition(b" ")[0])
        if slot is None:
            if brace <= 0:
                if line.startswith(b"# TYPE "):
                    _check_type(reading, line, slots, ignored)
                continue
            if line[brace - 1] > 32:
                continue
            line, brace, slot = _spaced(line, brace, slots)  # noqa: PLW2901 - the same line, as it is usually written
            if slot is None:
                continue
        if ignored and slot in ignored:
            continue
        end = line.rfind(b"}")
        try:
            labels = _label_texts[line[brace : end + 1] if brace > 0 else b""]
        except KeyError:
            end = _end_of_labels(line, brace)
            labels = _labels(line[brace : end + 1] if brace > 0 else b"")
        try:
            value = float(line[end + 1 :].split()[0] if brace > 0 else line.split()[1])
        except (ValueError, IndexError):
            value, labels = 0.0, None
        if labels is None:
            reading.note(f"a line of {slot.field} could not be read: left out")
            continue
        reading.series += 1
        reading.take(slot, labels, value)


def _spaced(line: bytes, brace: int, slots: dict[bytes, Slot]) -> tuple[bytes, int, Slot | None]:
    """A line with white space before its first brace: before its labels, or before those of an exemplar."""
    words = line[:brace].split()
    if not words:
        return line, brace, None
    slot = slots.get(words[0])
    return (line, brace, slot) if len(words) == 1 else (line[:brace], -1, slot)


def _end_of_labels(line: bytes, brace: int) -> int:
    """Where the label set that begins at `brace` ends; OpenMetrics may put an exemplar's, and its value, behind it."""
    label_set = _LABEL_SET.match(line, brace) if brace > 0 else None
    return label_set.end() - 1 if label_set else line.rfind(b"}")


def _check_type(reading: _Reading, line: bytes, slots: dict[bytes, Slot], ignored: set[Slot]) -> None:
    """A metric whose type is not what its name says is left out: its lines mean something else."""
    words = line.split()
    if len(words) != 4:
        return
    _, _, name, kind = words
    typed = [slot for part in (b"", b"_bucket", b"_sum", b"_count") if (slot := slots.get(name + part))]
    for slot in typed:
        if kind not in slot.types:
            ignored.add(slot)
            reading.note(f"{name.decode('utf-8', 'replace')} is a {kind.decode('utf-8', 'replace')} here: left out")


def _refuse_other_formats(body: bytes) -> None:
    start = body[:200].lstrip().lower()
    if not start:
        raise NotMetrics("the answer is empty")
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<body", b"<?xml")):
        raise NotMetrics("the answer is a web page (HTML), not metrics")
    if start.startswith((b"{", b"[")):
        raise NotMetrics("the answer is JSON, not metrics")
    if b"\0" in body[:200]:
        raise NotMetrics("the answer is binary, not metrics")


def _sample(reading: _Reading, time_s: float, server: str) -> Sample:
    engines = []
    for key in sorted(reading.engines):
        fields = reading.engines[key]
        for field in HISTOGRAMS.values():
            buckets = fields.get(field)
            if buckets is not None:
                fields[field] = _histogram(buckets)
                if fields[field] is None:
                    reading.note(f"the histogram of {field} is not whole: left out")
        fields |= _pool(reading.configs, key) | _finished(fields.pop("success", {}))
        engines.append(EngineSample(model=key[0], engine=key[1], **fields))
    numbers = reading.server
    whole = (*WORKER.values(), "api_server_rss_bytes", "stopped_engines")
    counts = {field: int(numbers[field]) for field in whole if field in numbers}
    return Sample(
        time_s=time_s,
        server=server,
        engines=tuple(engines),
        rejections=sum(value for _, value in _newest(reading.rejections)) if reading.rejections else None,
        process_start_s=numbers.get("process_start_s"),
        notes=tuple(reading.notes),
        **counts,
    )


def _finished(success: _Parts) -> dict[str, float]:
    """Requests that ended, and of those the ones that ended badly."""
    counts: dict[str, float] = {}
    for labels, value in _newest(success):
        counts["finished"] = counts.get("finished", 0.0) + value
        bad = {"abort": "aborted", "error": "errored"}.get(labels.get("finished_reason", ""))
        if bad is not None:
            counts[bad] = counts.get(bad, 0.0) + value
    return counts


def _pool(configs: list[dict[str, str]], key: tuple[str, str]) -> dict[str, Any]:
    """The pool's size from the labels of `vllm:cache_config_info`; V0 says it once for the server, V1 per engine."""
    model, engine = key
    config = next(
        (
            row
            for row in configs
            if ("engine" not in row or _engine(row) == engine) and row.get("model_name", model) == model
        ),
        None,
    )
    if config is None:
        return {}
    caching = {"True": True, "False": False}.get(config.get("enable_prefix_caching", ""))
    concurrency = _number(config.get("kv_cache_max_concurrency"))
    # Each row of a server's data-parallel engines names the blocks of all of them together (0.9+).
    engines = sum(_but_engine(row) == _but_engine(config) for row in configs)
    blocks, size = _number(config.get("num_gpu_blocks")), _number(config.get("block_size"))
    tokens = _number(config.get("kv_cache_size_tokens"))  # of one engine, unlike the blocks
    return {
        "num_blocks": int(blocks) // engines if blocks else None,
        "block_size": int(size) if size else None,
        "size_tokens": int(tokens) if tokens else None,
        "max_concurrency": concurrency,
        "prefix_caching": caching,
    }


def _but_engine(config: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in config.items() if name != "engine"}


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
