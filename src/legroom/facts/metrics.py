"""vLLM's metrics by release: existence, exposed series, role and replacement. Data: `data/metrics.json` (declarations
by release) and `data/metric_roles.json` (what they measure). The Prometheus client adds suffixes: `_total` to a
counter, `_bucket`, `_sum` and `_count` to a histogram, `_info` to an info."""

import re
from functools import cache, lru_cache
from typing import Any, Literal

from legroom.facts import read_data
from legroom.facts.releases import Release, known_releases
from legroom.records import dataclass

Engine = Literal["v0", "v1"]
MetricType = Literal["gauge", "counter", "histogram", "summary", "info"]

_REAL_NAME = re.compile(r"vllm:[a-z][a-z0-9_]*")
"""Declared names; names that another package builds at run time are left out."""
_ENDINGS = re.compile(r"_(?:total|bucket|sum|count|created|info)$")
_CACHE_CONFIG_FIELDS = "<every CacheConfig field"
_SHARED_LABELS = "labelnames"  # The data's placeholder for the labels that every metric of an engine has.
_HIDDEN = "show_hidden_metrics"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as one release declares it."""

    name: str
    """The declared name."""
    exposed: tuple[str, ...]
    """The series of a scrape."""
    type: MetricType
    labels: tuple[str, ...]
    engine: Engine
    deprecated: bool = False
    hidden: bool = False
    """Shown only under --show-hidden-metrics-for-version."""
    condition: str = ""
    """The setting with which it appears; empty: always."""

    @property
    def series(self) -> str:
        """The series name to use in PromQL: a counter's with `_total`, a histogram's without `_bucket`."""
        return _series_name(self.name, self.type)


def _series_name(name: str, type_: str) -> str:
    """The series to query for a metric of Prometheus type `type_`: counters with `_total`, infos with `_info`."""
    if type_ == "counter":
        return name if name.endswith("_total") else name + "_total"
    return name + "_info" if type_ == "info" else name


def _exposed_series(name: str, type_: str) -> tuple[str, ...]:
    """Every series in a scrape for a metric declared as `name` of type `type_`, such as `_bucket` and `_sum`."""
    series = _series_name(name, type_)
    if type_ == "counter":
        return (series, series.removesuffix("_total") + "_created")
    if type_ in {"histogram", "summary"}:
        first = (name + "_bucket",) if type_ == "histogram" else (name,)
        return (*first, name + "_sum", name + "_count", name + "_created")
    return (series,)


@cache
def _declarations() -> dict[str, list[dict[str, Any]]]:
    """All the declarations that releases made of a metric, by its declared name."""
    return {name: entry for name, entry in read_data("metrics.json")["metrics"].items() if _REAL_NAME.fullmatch(name)}


def cache_config_labels(release: Release) -> tuple[str, ...]:
    """The labels of `vllm:cache_config_info`: every field of that release's cache settings."""
    rows = read_data("metrics.json")["cache_config_info_labels"]
    return next((tuple(labels) for first, last, labels in rows if first <= release.index <= last), ())


def _labels_of_entry(entry: dict[str, Any], release: Release) -> tuple[str, ...]:
    """The label names that a metric's declaration (`entry`) gives in this release; a histogram's with `le`."""
    labels: list[str] = []
    for label in entry["labels"]:
        if label.startswith(_CACHE_CONFIG_FIELDS):
            labels += cache_config_labels(release)
        elif label == _SHARED_LABELS:
            labels += ["model_name", "engine"] if entry["engine"] == "v1" else ["model_name"]
        else:
            labels.append(label)
    if entry["type"] == "histogram":
        labels.append("le")
    elif entry["type"] == "info":
        labels += cache_config_labels(release)
    return tuple(labels)


def _metric_of_entry(name: str, entry: dict[str, Any], release: Release) -> Metric:
    """The metric `name` by its declaration (`entry`), with the labels of this release."""
    conditions = entry.get("condition", [])
    kind, labels, deprecated = entry["type"], _labels_of_entry(entry, release), entry.get("deprecated", False)
    hidden = any(_HIDDEN in condition for condition in conditions)
    shown = "; ".join(condition for condition in conditions if _HIDDEN not in condition)
    return Metric(name, _exposed_series(name, kind), kind, labels, entry["engine"], deprecated, hidden, shown)


@lru_cache(maxsize=64)
def metrics_of(release: Release, engine: str | None = None) -> tuple[Metric, ...]:
    """Every metric of a release; `engine`: "v0" or "v1" alone, None: those that it runs, not V0 from 0.11.0 on."""
    engines = (engine,) if engine else ("v0", "v1") if release.before("0.11.0") else ("v1",)
    return tuple(
        _metric_of_entry(name, entry, release)
        for name, entries in _declarations().items()
        for entry in entries
        if entry["engine"] in engines and any(first <= release.index <= last for first, last in entry["in"])
    )


@lru_cache(maxsize=64)
def exposed_names(release: Release, engine: str | None = None) -> frozenset[str]:
    """Every series name that /metrics of a release can show, with suffixes; `engine` as in `metrics_of`."""
    return frozenset(name for metric in metrics_of(release, engine) for name in metric.exposed)


@cache
def _exposed_entries() -> tuple[tuple[str, dict[str, Any]], ...]:
    """(series name, its declaration) for every series of any known release."""
    declared = ((name, entry) for name, entries in _declarations().items() for entry in entries)
    return tuple((exposed, entry) for name, entry in declared for exposed in _exposed_series(name, entry["type"]))


@cache
def all_exposed_names() -> frozenset[str]:
    """Every series name of any known release."""
    return frozenset(dict(_exposed_entries()))


@cache
def type_of(series: str) -> MetricType | None:
    """The metric type of a series in the last release with it; None for an unknown series."""
    entry = dict(_exposed_entries()).get(series)
    return entry["type"] if entry else None


@cache
def releases_of(series: str) -> tuple[tuple[str, str], ...]:
    """(first, last) release of each range of releases that expose the series; empty for an unknown name."""
    spans = sorted(span for name, entry in _exposed_entries() if name == series for span in entry["in"])
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    releases = known_releases()
    return tuple((releases[first], releases[last]) for first, last in joined)


@cache
def roles() -> dict[str, tuple[str, ...]]:
    """Role (`kv_use`, `running` ...) -> the declared metric names over all releases, the newest first."""
    return {role: tuple(names) for role, names in read_data("metric_roles.json")["roles"].items()}


def name_of(role: str, release: Release, engine: str = "v1") -> str | None:
    """The series for a role of metric_roles.json (such as `kv_use`); None where the release lacks or hides it."""
    by_name = {metric.name: metric for metric in metrics_of(release, engine) if not metric.hidden}
    return next((by_name[name].series for name in roles()[role] if name in by_name), None)


@cache
def names_of(role: str) -> tuple[str, ...]:
    """The series names of a role over all releases, the newest first."""
    names = (_series_name(name, entry["type"]) for name in roles()[role] for entry in _declarations()[name])
    return tuple(dict.fromkeys(names))


def role_of(series: str) -> str | None:
    """What a series measures (`kv_use`, `running` ...), by any of its names and suffixes; None without a role."""
    return _role_by_series().get(series)


@cache
def _role_by_series() -> dict[str, str]:
    """What each series measures (`kv_use`, `running`, ...), under its declared and its exposed names."""
    by_series: dict[str, str] = {}
    for role, names in roles().items():
        for name in names:
            for entry in _declarations()[name]:
                for exposed in (name, *_exposed_series(name, entry["type"])):
                    by_series.setdefault(exposed, role)
    return by_series


def is_shown_by_companion(series: str) -> bool:
    """Whether a program other than vLLM, such as a router, exposes this series under the prefix `vllm:`."""
    facts = read_data("companion_series.json")
    return not {series, _ENDINGS.sub("", series)}.isdisjoint(facts["families"]) or series.startswith(
        tuple(facts["prefixes"])
    )


def ratio_instead(name: str, release: Release) -> str:
    """The PromQL quotient of two counters that takes the place of a gauge; "" where the release lacks the counters."""
    parts = read_data("metric_roles.json")["ratios"].get(re.sub(r"^vllm[_.:]+", "vllm:", name), ())
    if not parts or not exposed_names(release).issuperset(parts):
        return ""
    return " / ".join(f"rate({part}[5m])" for part in parts)


def nearest(name: str, release: Release, engine: str | None = None) -> str | None:
    """The series to use for a name that the release lacks: its new name, else the most similar; None without one, and
    where the release has the name itself. `engine`: as in `metrics_of`."""
    known = exposed_names(release, engine)
    if name in known:
        return None
    colon = re.sub(r"^vllm[_.:]+", "vllm:", name.strip())
    if not colon.startswith("vllm:"):
        colon = "vllm:" + colon
    ending = _ENDINGS.search(colon)
    for candidate in (colon, colon + "_total", colon + "_info", colon + "_bucket"):
        if candidate in known:
            return candidate
    by_role = _name_in_release(colon, ending.group() if ending else "", release, engine, known)
    if by_role is not None:
        return by_role
    for instead in read_data("metric_roles.json")["instead"].get(colon, ()):
        if instead in known:
            return str(instead)
    if any(colon + ending in all_exposed_names() for ending in ("", "_total", "_info", "_bucket")):
        return None  # a name of another release: a similarly spelled one measures something else
    # The known series of most similar spelling; None where none is similar.
    import difflib

    candidates = sorted(series for series in known if not series.endswith("_created"))
    matches = difflib.get_close_matches(colon, candidates, n=1, cutoff=0.8)
    return matches[0] if matches else None


def _name_in_release(name: str, ending: str, release: Release, engine: str | None, known: frozenset[str]) -> str | None:
    """The release's series for what `name` measures, with its suffix `ending` if `known` has that; None without one."""
    role = role_of(name) or role_of(name.removesuffix(ending))
    if role is None:
        return None
    series = name_of(role, release, engine or "v1") or (None if engine else name_of(role, release, "v0"))
    with_ending = series.removesuffix("_total") + ending if series else ""
    return with_ending if with_ending in known else series
