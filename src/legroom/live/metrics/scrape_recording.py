"""Recordings of scrapes (`legroom watch --record`), and their replay.

A recording has lines of JSON and is compressed where its name ends in .gz or .zst. The first line is a header; each
other line is a scrape, with the values that changed since the last one of the same server:

    {"legroom": "recording", "version": 1}
    {"t": 1700000000.0, "s": "http://host:8000", "new": ["vllm:num_requests_running{...}"], "v": [[0, 3.0]]}
    {"t": 1700000005.0, "s": "http://host:8000", "fail": ["timeout", "did not answer within 4 s"]}

`new` numbers new series; `v` pairs numbers with values; `gone` lists numbers that are no longer shown; `full` marks a
line that is independent of those before it.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Literal, cast

from legroom.errors import LegroomError
from legroom.facts import metrics
from legroom.live.metrics import exposition
from legroom.live.metrics.sample import HISTOGRAMS, EngineSample, Sample, ScrapeFailure, ScrapeResult


def sample_series(sample: Sample) -> Iterator[tuple[str, float]]:
    """(Series in Prometheus's text format, value) for every value of a sample."""
    pools = Counter((engine.model, *_pool_labels(engine).items()) for engine in sample.engines)
    for engine in sample.engines:
        yield from _engine_series(engine)
        if pool := _pool_labels(engine):
            # As in vLLM, each data-parallel engine names the blocks of all together.
            if engine.num_blocks is not None:
                pool["num_gpu_blocks"] = str(engine.num_blocks * pools[engine.model, *pool.items()])
            yield _series_name("cache_config", _base_labels(engine), **pool), 1.0
    if sample.rejections is not None:
        yield metrics.names_of("admission_rejections")[0] + '{reason="any"}', sample.rejections
    for guard in sample.guards:
        own = f"api_server={_quoted_label(guard.api_server)}"
        for name, field in exposition.GUARD_SERIES.items():
            if field:
                yield f"{name}{{{own}}}", getattr(guard, field)
        for reason, field in exposition.GUARD_REASONS.items():
            yield f'legroom_guard_rejected_total{{{own},reason="{reason}"}}', getattr(guard, field)
    for name, field in exposition.SERVER_SERIES.items():
        value = getattr(sample, field)
        if value is not None and field != "memory_used_bytes":  # written as `m`: NVML may have measured it
            yield name, float(value)


def _quoted_label(text: str) -> str:
    """A label's value in quotes, escaped as in Prometheus's text format."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _series_name(role: str, base_labels: str, **extra_labels: str) -> str:
    """A series of the role's metric in Prometheus's text format; `base_labels`: labels as text."""
    more = "".join(f",{name}={_quoted_label(value)}" for name, value in extra_labels.items())
    return f"{metrics.names_of(role)[0]}{{{base_labels}{more}}}"


def _base_labels(engine: EngineSample) -> str:
    """The engine's `model_name` and `engine` labels in Prometheus's text format."""
    return f"engine={_quoted_label(engine.engine)},model_name={_quoted_label(engine.model)}"


def _engine_series(engine: EngineSample) -> Iterator[tuple[str, float]]:
    """Each value of the engine as a series in Prometheus's text format, with histograms."""
    base = _base_labels(engine)
    for role, field in exposition.VALUE_ROLES.items():
        value = getattr(engine, field)
        if value is not None:
            yield _series_name(role, base), value
    if engine.waiting_for_capacity is not None:
        yield _series_name("waiting_by_reason", base, reason="capacity"), engine.waiting_for_capacity
    if engine.finished is not None:
        reasons = {"abort": engine.aborted, "error": engine.errored}
        known = {reason: value for reason, value in reasons.items() if value is not None}
        yield _series_name("request_success", base, finished_reason="stop"), engine.finished - sum(known.values())
        for reason, value in known.items():
            yield _series_name("request_success", base, finished_reason=reason), value
    if engine.asleep:
        yield _series_name("sleep_state", base, sleep_state="discard_all"), 1.0
    for field in HISTOGRAMS:
        histogram = getattr(engine, field)
        if histogram is not None:
            name = metrics.names_of(field)[0]
            for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
                yield f'{name}_bucket{{{base},le="{bound}"}}', count
            yield f"{name}_sum{{{base}}}", histogram.sum
            yield f"{name}_count{{{base}}}", histogram.count


def _pool_labels(engine: EngineSample) -> dict[str, str]:
    """The labels of vLLM's cache config metric that describe the engine's KV pool; unknown ones left out."""
    values = {
        "num_gpu_blocks": engine.num_blocks,
        "block_size": engine.block_size,
        "kv_cache_size_tokens": engine.size_tokens,
        "kv_cache_max_concurrency": engine.max_concurrency,
        "enable_prefix_caching": engine.prefix_caching,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


_HEADER = {"legroom": "recording", "version": 1}


class Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open_text(path, "w")
        self._numbers: dict[str, int] = {}
        self._last: dict[str, dict[int, float]] = {}
        self._written: dict[str, int] = {}
        self._scrapes = 0
        self._write_line(_HEADER)

    def _write_line(self, line: dict[str, Any]) -> None:
        with self._write_errors():
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Context manager: an OSError becomes a LegroomError."""
        try:
            yield
        except OSError as error:
            raise LegroomError(f"could not write to {self._path}: {error.strerror}", "is the disk full?") from error

    def add(self, result: ScrapeResult) -> None:
        """Appends the result as one line of JSON; flushes every 24 results."""
        line: dict[str, Any] = {"t": round(result.time_s, 3), "s": result.server}
        if isinstance(result, ScrapeFailure):
            line["fail"] = [result.kind, result.message]
        else:
            line |= self._changed_values(result)
        self._write_line(line)
        self._scrapes += 1
        # A kill loses two minutes of one server.
        if self._scrapes % 24 == 0:
            with self._write_errors():
                self._file.flush()

    def _changed_values(self, sample: Sample) -> dict[str, Any]:
        """The recording's line for a sample: new series, values changed since the server's last one, series gone."""
        new: list[str] = []
        values: dict[int, float] = {}
        for series, value in sample_series(sample):
            number = self._numbers.get(series)
            if number is None:
                number = self._numbers[series] = len(self._numbers)
                new.append(series)
            values[number] = value
        count = self._written.get(sample.server, 0)
        self._written[sample.server] = count + 1
        # A full line every 200 scrapes of a server.
        full = count % 200 == 0
        last = {} if full else self._last.get(sample.server, {})
        self._last[sample.server] = values
        line: dict[str, Any] = {"new": new} if new else {}
        changed = {number: value for number, value in values.items() if last.get(number) != value}
        line["v"] = [[number, int(value) if value == int(value) else value] for number, value in changed.items()]
        if gone := [number for number in last if number not in values]:
            line["gone"] = gone
        if full:
            line["full"] = 1
        if sample.memory_used_bytes is not None:
            line["m"] = sample.memory_used_bytes
        return line

    def close(self) -> None:
        """Flushes and closes the file; raises LegroomError where that fails."""
        with self._write_errors():
            self._file.close()


def replay(path: Path) -> Iterator[ScrapeResult]:
    """The scrape results of a recording; a truncated last line is ignored. LegroomError where it is damaged."""
    numbered: list[str] = []
    last: dict[str, dict[int, float]] = {}
    lines = _readable_lines(path)
    header = _parsed_line(next(lines, ""))
    if header is None or header.get("legroom") != "recording":
        hint = "make one with: legroom watch URL --record FILE"
        raise LegroomError(f"{path} is not a recording made by legroom", hint)
    for number, line in enumerate(lines, start=2):
        entry = _parsed_line(line)
        if entry is None and next(lines, None) is None:
            return  # cut off while it was written
        try:
            yield _replayed_scrape(entry or {}, numbered, last)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LegroomError(f"{path}, line {number}: not a recorded sample", "the file is damaged") from error


def _parsed_line(line: str) -> dict[str, Any] | None:
    """The JSON object of a line of the recording; None where it is damaged."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _replayed_scrape(entry: dict[str, Any], numbered: list[str], last: dict[str, dict[int, float]]) -> ScrapeResult:
    """The result of a recording's line; adds new series to `numbered` and sets the server's values in `last`."""
    time_s, server = float(entry["t"]), str(entry["s"])
    # A time after the year 5138 is damage.
    if not abs(time_s) < 1e11:
        raise ValueError(time_s)
    if "fail" in entry:
        kind, message = entry["fail"]
        return ScrapeFailure(time_s, server, kind, message)
    numbered += entry.get("new", [])
    values = {} if entry.get("full") else dict(last.get(server, {}))
    for number in entry.get("gone", []):
        values.pop(number, None)
    values |= dict(entry["v"])
    last[server] = values
    text = "".join(f"{numbered[number]} {value}\n" for number, value in sorted(values.items()))
    try:
        sample = exposition.parse_sample(text, time_s, server)
    except exposition.NotMetrics:
        sample = Sample(time_s, server, ())  # recorded before the first metrics
    return replace(sample, memory_used_bytes=int(entry["m"])) if "m" in entry else sample


def _open_text(path: Path, mode: Literal["r", "w"]) -> IO[str]:
    """The file opened as text, through gzip or zstd by its suffix; raises LegroomError where that fails."""
    try:
        if path.suffix == ".gz":
            return cast("IO[str]", gzip.open(path, f"{mode}t", encoding="utf-8"))
        if path.suffix in {".zst", ".zstd"}:
            import zstandard  # only for its files

            return cast("IO[str]", zstandard.open(path, f"{mode}t", encoding="utf-8"))
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise LegroomError(f"could not open {path}: {error.strerror}", "is the path right?") from error


def _readable_lines(path: Path) -> Iterator[str]:
    """The lines of a file up to where it is truncated; LegroomError where it is damaged or compressed otherwise."""
    with _open_text(path, "r") as file:
        try:
            yield from file
        except EOFError:
            return  # cut off in mid-block
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                raise LegroomError(f"{path} could not be read: it is not text", "the file is damaged") from error
            return  # cut off in mid-letter
        except (OSError, zlib.error) as error:
            raise LegroomError(f"{path} could not be read: {error}", "is it compressed as its name says?") from error
        except Exception as error:
            if type(error).__name__ == "ZstdError":
                raise LegroomError(f"{path} could not be read: {error}", "is it zstd, as its name says?") from error
            raise
