"""What a text says of other settings: those with which the same server started, and those that failed too."""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from legroom.diagnosis.pasted_command import plain_lines
from legroom.diagnosis.told_settings import SETTINGS, mentions, setting_words, with_setting
from legroom.facts import read_data
from legroom.facts.releases import Release
from legroom.vllm.args import ServeArgs

Contrast = tuple[Mapping[str, Any], bool, str]
"""Settings by vLLM's Python names (None: taken away) or variables, whether it started, and the clause."""
Features = tuple[tuple[re.Pattern[str], str, Any], ...]
"""The pattern of a feature's names, the setting that switches it, and its value without the feature."""

_NAME = r"`?((?:VLLM|NCCL|PYTORCH)(?:_[A-Z\d]+)+)\b`?"
_UNSET = re.compile(rf"{_NAME} (?:is |was )?(?:not set|unset|removed)|(?:without|unset\w*|not setting) {_NAME}")
_BESIDE_CHARS = 60
"""The outcome of a trial that is a sentence of its own, `Same error.`, begins within so many characters."""


@cache
def _words(name: str) -> re.Pattern[str]:
    """The pattern `name` of `evidence.json` for how people say that a server started or failed, or name a setting."""
    return re.compile(read_data("evidence.json")["contrasts"][name])


def _features(text: str) -> Features:
    """(pattern of its names, setting, value when off) of each known feature, and of words in `text`'s JSON flags."""
    rows = [*read_data("evidence.json")["features"]]
    for flag, value in _words("json_flag").findall(text):
        rows += ([re.escape(word), flag.replace("-", "_"), None] for word in _words("json_word").findall(value))
    return tuple((re.compile(rf"(?i)\b(?:{words})"), name, value) for words, name, value in rows)


def contrasts(text: str, release: Release) -> Iterator[Contrast]:
    """(settings, whether the server started with them, clause) for each clause of prose that tells of such a trial."""
    plain = "\n".join(plain_lines(text.split("\n")))
    last_flag, last_feature, repeated, shares = "", "", "", bool(_words("about_shares").search(plain))
    features = _features(text)
    for sentence in setting_words("sentence").split(plain):
        if lowered := _words("lowered").search(sentence):
            tokens, is_pool = int(lowered["tokens"]) * 1024, not lowered["length"]
            yield {"num_gpu_blocks_override": tokens // 16} if is_pool else {"max_model_len": tokens}, True, ""
        if _words("not_eager").search(sentence) and _words("failed").search(sentence):
            yield {"enforce_eager": True}, True, ""
        fails_later, before = bool(_words("fails_later").search(sentence)), repeated
        repeated = step[1] if (step := _words("step").search(sentence)) else repeated * sentence.strip(" .)").isdigit()
        told, _, cure = sentence.partition(unless[0] if (unless := _words("unless").search(sentence)) else "\n")
        if settings := dict((*_mentions(cure, release, shares), *_remedies(cure, last_flag, features))):
            yield settings, True, cure
        for part in _words("clause").split(told):
            clause = f"{before} {part}" if _words("condition").match(before) else part  # "without it, it starts"
            failed = bool(_words("failed").search(_words("no_failure").sub("", clause)))
            if failed or (_words("worked").search(clause) and not fails_later):
                settings = dict(reversed(list(_mentions(clause, release, shares))))  # the first of two values
                if not settings and last_flag and (bare := _words("bare_value").search(clause)):
                    settings = dict(_mentions(f"{last_flag} {next(filter(None, bare.groups()))}", release, shares))
                settings |= {} if failed else dict(_remedies(clause, last_flag or last_feature, features))
                if settings:
                    yield settings, not failed, sentence if failed else clause
            elif (
                taken_away := dict(  # "only with LoRA": the feature without which it does not fail
                    pair
                    for match in _words("only_with").finditer(clause)
                    for pair in _features_off(clause[match.end() :], features)
                )
            ):
                yield taken_away, True, ""
            before = "" if failed or _words("worked").search(clause) else part
            flags = _words("flag_name").findall(clause)
            named = [one or other for one, other in flags if one or other.replace("-", "_") in SETTINGS]
            last_flag = f"--{named[-1]}" if named else last_flag
            last_feature = next((name for words, name, _ in features if words.search(clause)), last_feature)


def failed_utilizations(told: Iterable[Contrast]) -> tuple[set[float], set[float]]:
    """Of gpu_memory_utilization values told with no other setting: (those that failed, those that left no KV pool)."""
    alone = [(settings, where) for settings, worked, where in told if not worked and len(settings) == 1]
    failed = [(settings.get("gpu_memory_utilization"), where) for settings, where in alone]
    starved = {share for share, where in failed if share and _words("starved").search(where)}
    return {share for share, where in failed if share and not is_attempt(where)} - starved, starved


def share_bounds(text: str) -> tuple[float, float] | None:
    """(Largest gpu_memory_utilization whose KV pool was too small, smallest one that did not fit) by sentences that
    each name one value; None unless some tell of each."""
    short, full = [0.0], [1.0]
    for sentence in setting_words("sentence").split("\n".join(plain_lines(text.split("\n")))):
        if len(shares := set(map(float, _words("any_share").findall(sentence)))) == 1:
            short += shares if (is_short := _words("pool_short").search(sentence)) else ()
            full += shares if not is_short and _words("refused_or_full").search(sentence) else ()
    return (max(short), min(full)) if 0 < max(short) < min(full) < 1 else None


def is_attempt(clause: str) -> bool:
    """Whether a clause tells of a change that was tried after the failure and did not help."""
    return bool(_words("attempt").search(clause))


def _mentions(clause: str, release: Release, bare_shares: bool) -> Iterator[tuple[str, Any]]:
    """The (setting, value) pairs of a clause; with `bare_shares`, a bare fraction is a gpu_memory_utilization."""
    told = [(mention.name, mention.newest) for mention in mentions(clause)]
    yield from told
    for match in _words("mention").finditer(clause):
        name = match["name"].replace("-", "_")
        if name not in SETTINGS or name in dict(told) or not (match["value"] or match["dashes"]):
            continue
        if (value := getattr(with_setting(ServeArgs(), name, match["value"] or "", release), name)) is not None:
            yield name, value
    alone = [float(one or other) for one, other in _words("share_alone").findall(clause)] if bare_shares else []
    if alone:
        yield "gpu_memory_utilization", alone[0]
    variables = _words("variable").findall(clause)
    yield from ((name, value) for name, value in variables if name.startswith(("VLLM_", "PYTORCH_")))


def _remedies(clause: str, last_flag: str, features: Features) -> Iterator[tuple[str, Any]]:
    """(setting, value that leaves it out, else None) for each setting or feature that a clause says to leave out;
    `last_flag` is what `it` means there. Eager mode gives (`enforce_eager`, True)."""
    for pattern, name, value in features:
        if any(_words("switched_off").match(clause, match.end()) for match in pattern.finditer(clause)):
            yield name, value
    for match in _words("without").finditer(clause):
        rest = clause[match.end() :]
        if re.match(r"(?:it|that|this|them)\b", rest) and last_flag:
            name = last_flag.lstrip("-").replace("-", "_")
            yield name, next((value for _, feature, value in features if feature == name), None)
        elif flag := re.match(r"[`'\"]*--([a-z][\w-]+)", rest):
            yield flag[1].replace("-", "_"), None
        else:
            yield from _features_off(rest, features)
    yield from ((name, None) for match in _UNSET.findall(clause) for name in match if name)
    if re.search(r"(?i)(?:\b|_)eager\b", clause):
        yield "enforce_eager", True


def _features_off(text: str, features: Features) -> Iterator[tuple[str, Any]]:
    """(setting, its value without the feature) for each of the `features` with whose name the text begins."""
    return ((name, value) for pattern, name, value in features if pattern.match(text))


def attempts_in_vain(text: str) -> Iterator[Mapping[str, Any]]:
    """Setting -> value (`tried NAME` -> `lower`, `raise` or empty) of each trial that, by the text, did not help."""
    plain = "\n".join(plain_lines(text.split("\n")))
    sentences = [sentence for sentence in setting_words("sentence").split(plain) if sentence.strip()]
    is_list = False
    for sentence, following in zip(sentences, (*sentences[1:], ""), strict=False):
        is_item = bool(_words("trial").match(sentence))
        is_list = (is_list and is_item) or bool(_words("trials").search(sentence))
        outcome = _words("vain").sub("", sentence)
        is_vain = outcome != sentence or bool(_words("vain").search(following[:_BESIDE_CHARS]))
        is_vain = (is_vain and bool(_words("trying").search(sentence))) or (is_list and is_item)
        if is_vain and not _words("cured").search(outcome):
            yield from _tried_settings(sentence.rstrip(" .!"))


def _tried_settings(sentence: str) -> Iterator[Mapping[str, Any]]:
    """One mapping, setting -> value, for each value, switch, variable, release or bare name in a trial's sentence."""
    valued = set()
    for mention in mentions(sentence):
        values = mention.values[-1:] if mention.is_change else mention.values
        more = _words("more").match(sentence, mention.end) if not mention.is_change else None
        others = re.findall(r"\d+(?:\.\d+)?", more[0]) if more else ()
        numbers = (float(other) if "." in other else int(other) for other in others)
        yield from ({mention.name: value} for value in (*values, *numbers))
        valued.add(mention.name)
    for match in _words("switch").finditer(sentence):
        yield from ({name: True} for name, found in match.groupdict().items() if found)
    yield from ({name: value} for name, value in _words("trial_variable").findall(sentence))
    yield from ({"tried release": one or other} for one, other in _words("trial_release").findall(sentence))
    for match in _words("bare").finditer(sentence):
        name = "gpu_memory_utilization" if match["share"] else re.sub("[ -]", "_", match["name"].lower())
        if name not in valued:
            yield {f"tried {name}": ((match["down"] or match["cut"]) and "lower") or (match["up"] and "raise") or ""}
