"""Settings that people name in words: `util 0.95`, `32k context`, `TP=4`, `max-model-len from 32k to 8k`."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.flags import flag_name, flags_ever, flags_of
from legroom.facts.log_messages import size_bytes
from legroom.facts.releases import Release, known_releases
from legroom.facts.releases import release as known_release
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs
from legroom.vllm.parse import parse_flags

SETTINGS = {item.name for item in fields(ServeArgs)} - {"usage", "env", "others", "model"}
OFF = "--no-"
"""The value of a switch that is named with `--no-`."""
_SIZED = re.compile(r"\d[\d.]* ?[KMGT]i?B")
_GROUPED_DIGITS = re.compile(r"(?<=\d)_(?=\d)")
_VALUES: dict[str, str] = read_data("evidence.json")["values"]  # How a value of each kind is written.
_SHORTEST_LENGTH = 64  # Shorter lengths and batches are no settings of a server.
_BARE = (("gpu_memory_utilization", "share", "bare_share"), ("max_model_len", "tokens", "bare_length"))
"""Settings whose value is told without a name, the kind of value, and the form."""


@cache
def setting_words(name: str) -> re.Pattern[str]:
    """The pattern `name` of `evidence.json` for how people connect a setting with a value and what came of it."""
    return re.compile(read_data("evidence.json")["setting_words"][name])


@dataclass(frozen=True)
class Mention:
    """A setting that a text names with a value: its values in their order, and its start and end offset."""

    name: str
    values: tuple[Any, ...]
    is_change: bool
    """Whether the text leads from the first value to the last one: `from 0.9 to 0.95`."""
    start: int
    end: int

    @property
    def newest(self) -> Any:
        """The value after a change, else the first one."""
        return self.values[-1 if self.is_change else 0]


@cache
def _names() -> dict[str, tuple[str, str]]:
    """Each way people write a setting, with spaces for `-` and `_` -> (vLLM's Python name, kind: share, ranks ...)."""
    told: dict[str, dict[str, Any]] = read_data("evidence.json")["settings"]
    return {name: (setting, row["kind"]) for setting, row in told.items() for name in row["names"]}


@cache
def _mention_pattern() -> re.Pattern[str]:
    """Matches a setting by name and then its values, or a value and then the setting."""
    words = read_data("evidence.json")["setting_words"]
    spelled = {name: re.escape(name).replace(r"\ ", "[ _-]?") for name in sorted(_names(), key=len, reverse=True)}
    names = "|".join(spelled.values())
    behind_values = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
    after = "|".join(each for name, each in spelled.items() if _names()[name][0] in behind_values)
    value = "|".join(f"(?:{_VALUES[kind]})" for kind in ("share", "tokens", "count", "per_cent", "word"))
    values = rf"(?:{value})(?:(?:{words['between']})(?:{value}))*"
    before, joint = words["before"], words["joint"]
    first = "|".join(_VALUES[kind] for kind in ("share", "tokens", "count", "per_cent"))
    return re.compile(
        rf"(?i:(?:(?<![\w./-])|(?<=[a-z]\.)(?=gpu_mem))(?<!sliding )(?<!cache )(?:--?)?(?:vllm[_-])?"
        rf"(?P<name>{names})(?:s|es)?(?![a-z_-]))(?:{before}){{0,10}}(?P<values>{values})"
        rf"|(?i:(?<![\w.,/$-])(?P<first>{first})(?: ?%)?(?:{joint})(?P<after>{after})(?![a-z_]))"
        r"|(?i:\b(?P<ways>[248])[ -]way (?:TP|tensor))"
    )


def mentions(text: str) -> Iterator[Mention]:
    """Every setting that the text names with a value, in the text's order."""
    for match in _mention_pattern().finditer(text):
        if match["ways"]:
            yield Mention("tensor_parallel_size", (int(match["ways"]),), False, *match.span())
            continue
        if match["first"] and setting_words("used_of_total").search(text, max(match.start() - 60, 0), match.start()):
            continue  # what nvidia-smi shows, no setting
        spelled = re.sub("[_-]", " ", (match["name"] or match["after"]).lower())
        setting, kind = next(row for name, row in _names().items() if name.replace(" ", "") == spelled.replace(" ", ""))
        written = [match["first"]] if match["first"] else setting_words("between").split(match["values"])
        is_in_memory = bool(match["first"] or re.search(r"mem|vram|显存", spelled))
        values = [value for each in written if (value := _value(each, kind, match, is_in_memory)) is not None]
        if values:
            is_change = len(values) > 1 and bool(setting_words("to").search(match["values"] or ""))
            yield Mention(setting, tuple(values), is_change, *match.span())


def stated_settings(text: str) -> dict[str, Any]:
    """Setting -> value in the failed run by the text: none that cured it; a trial's where no other is stated."""
    stated: dict[str, Any] = {}
    tried: dict[str, Any] = {}
    for sentence in setting_words("sentence").split(text):
        for mention in mentions(sentence):
            ends = [mark.end() for mark in setting_words("clause").finditer(sentence, 0, mention.start)]
            start, following = max(ends, default=0), sentence[mention.end :]
            clause = sentence[start : mention.end] + setting_words("clause").split(following, maxsplit=1)[0]
            is_cure = setting_words("cure").search(sentence[start : mention.start])
            is_cured = is_cure or setting_words("works").search(clause)
            if is_cured and not mention.is_change:
                continue
            kept = tried if setting_words("trial").search(clause) else stated
            is_newest = "later" in clause or setting_words("then_failed").search(following)
            kept.setdefault(mention.name, mention.values[-1 if is_newest else 0])
    for name, kind, form in _BARE:
        if name not in stated and name not in tried:
            found = (match for match in setting_words(form).finditer(text) if not _is_cure(text, match))
            values = (_value(next(filter(None, match.groups())), kind, match, False) for match in found)
            if (value := next(filter(None, values), None)) is not None:
                stated[name] = value
    return {**tried, **stated}


def settings_of_rerun(text: str) -> dict[str, Any]:
    """Setting -> value that sentences set before the server was run again: those of the last run."""
    again = filter(setting_words("run_again").search, setting_words("sentence").split(text))
    return {mention.name: mention.newest for sentence in again for mention in mentions(sentence)}


def _is_cure(text: str, match: re.Match[str]) -> bool:
    """Whether the words around a value (`match` in `text`, in its line) say that the server runs with it."""
    before, after = text[: match.start()], text[match.end() :]
    start = max(before.rfind(mark) for mark in "\n.,;(") + 1
    around = before[start:] + match[0] + re.split(r"[\n;,]|\. ", after, maxsplit=1)[0]
    return bool(setting_words("works").search(around) or setting_words("cure").search(before[start:]))


@cache
def named_settings() -> frozenset[str]:
    """Python names of the settings for which people have names in words, by `evidence.json`."""
    return frozenset(setting for setting, _ in _names().values())


def _value(written: str, kind: str, match: re.Match[str], is_in_memory: bool) -> Any:
    """The value `written` by a person as a number or word of `kind` (share, ranks, tokens ...), or None. `match`: where
    it stands in the text; `is_in_memory`: whether N % there is a share of the card's memory."""
    text = written.strip()
    if kind == "word":
        return text.lower() if re.fullmatch(_VALUES["word"], text) else None
    if kind == "share":
        if re.fullmatch(_VALUES["share"], text):
            return float(text.replace(",", "."))
        behind = match.string[match.end("first" if match["first"] else "values") :]
        return float(text) / 100 if is_in_memory and behind[:2].lstrip().startswith("%") else None
    number = re.fullmatch(r"(\d[\d ,]*(?:\.\d+)?) ?([kKM]?)", text)
    if number is None or ("." in number[1] and not number[2]):
        return None
    scale = {"": 1, "k": 1 << 10, "m": 1 << 20}[number[2].lower()]
    value = round(float(re.sub("[ ,]", "", number[1])) * scale)
    if kind == "ranks":
        return value if value in range(1, 65) and not number[2] else None
    if kind == "tokens":
        return value if number[2] or value >= _SHORTEST_LENGTH else None
    return value if value > 0 else None


def with_setting(args: ServeArgs, name: str, value: str, release: Release) -> ServeArgs:
    """The arguments with setting `name` parsed from `value`; unchanged where no release has it, or for `False`."""
    flag = flags_ever().get(flag_name(name))
    if value == OFF:
        words = [flag_name(f"no_{name}")]
        return replace(args, **{name: getattr(parse_flags(words, release).args, name)})
    if flag is None or value in ("False", "false"):
        return args
    if flag.name not in flags_of(release):  # the newest release that has it
        having = (known_release(version) for version in reversed(known_releases()))
        release = next((older for older in having if flag.name in flags_of(older)), release)
    if _SIZED.fullmatch(value):
        value = str(size_bytes(value))
    is_switch = value in ("True", "true", "") or flag.kind in ("switch", "bool", "optbool")
    # "262K" in prose is 262,144 cut short: 262,000 is not above what was meant.
    value = re.sub(r"(?<=\d)K$", "k", _GROUPED_DIGITS.sub("", value.rstrip(".")))
    words = [flag.name] if is_switch else [flag.name, value]
    return replace(args, **{name: getattr(parse_flags(words, release).args, name)})
