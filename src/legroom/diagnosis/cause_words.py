"""Which causes the words of a description point to, by a classifier that `tools/fit_cause_words.py` fits."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from legroom.diagnosis.pasted_command import sentence_lines
from legroom.facts import read_data
from legroom.records import dataclass
from legroom.vllm_logs.evidence import Evidence

_TOKEN = re.compile(
    r"(?P<gib>\d[\d.,]* ?gi?b?\b)|(?P<mib>\d[\d.,]* ?mi?b\b)|(?P<params>\d[\d.]*b\b)|(?P<k>\d+k\b)"
    r"|(?P<share>\b0?\.\d+)|(?P<many>\d[\d,._]{3,})|(?P<number>\d[\d.]*)"
    r"|(?P<word>[a-zà-öø-ÿ][a-zà-öø-ÿ\d]*(?:[-_][a-zà-öø-ÿ\d]+)*|[а-яё]+)|(?P<unspaced>[\u3040-\u9fff\uac00-\ud7af]+)"
)
"""Quantities count by their kind; Chinese, Japanese and Korean by pairs of characters."""
_ENDINGS = ("ings", "ing", "ies", "ed", "es", "ly", "s")
_SHORTEST_STEM = 3
_FEW_WORDS_LENGTH = 10.0
"""Two words that are in one text of fifty have this length: so little tells half of what it would."""
_PRINTED = ("failure", "host", "exception", "frame", "echo", "milestone", "once", "stats", "banner")
_FEWEST_WORDS = 6
"""Of 2,852 descriptions 99 in 100 have more words."""
_MOST_CHARS = 20_000
"""Twenty times the longest of them: more is a log of some other program."""
_SHOWN_WORDS = 3
_SHORTEST_SHOWN = 4
"""Shorter words are grammar."""
_TITLE_COUNTS = 3
"""As often a word of the first line counts: of 21 pasted reports 18 were read right instead of 15."""


@dataclass(frozen=True)
class WordEvidence:
    """How likely each cause makes the words that a person wrote, up to one factor, and the lines they stand on."""

    likelihoods: Mapping[str, float]
    lines: tuple[tuple[int, str], ...]

    def proof(self, cause: str) -> Evidence:
        """The line whose words point most to this cause; its fact `words` names the most telling ones of the text."""
        gains = _gains(self.counts, cause)
        shown = max(self.lines, key=lambda line: sum(gains.get(word, 0.0) for word in set(words(line[1]))))
        spelled = dict(pair for _, line in self.lines for pair in _spellings(line))
        said = {stem: word for stem, word in spelled.items() if not word.isascii() or len(word) >= _SHORTEST_SHOWN}
        telling = sorted((stem for stem in said if gains.get(stem, 0) > 0), key=lambda stem: -gains[stem])
        facts = {"words": ", ".join(said[stem] for stem in telling[:_SHOWN_WORDS])}
        return Evidence("words_told", "platform", shown[0], shown[1].strip()[:400], facts, is_told=True)

    @property
    def counts(self) -> Counter[str]:
        """Each word of the lines and how often it stands there; a title counts several times."""
        title = self.lines[:1] * (_TITLE_COUNTS - 1) if len(self.lines) > 1 else ()
        return Counter(word for _, line in (*title, *self.lines) for word in words(line))


def word_evidence(text: str, printed: Iterable[Evidence]) -> WordEvidence | None:
    """What lines say that are neither commands nor printed by a program; None where words are few, unknown or a log."""
    shown = {item.line for item in printed if item.role in _PRINTED and not item.id.endswith("_told")}
    numbered = enumerate(sentence_lines(text.split("\n")), 1)
    told = WordEvidence({}, tuple((at, line) for at, line in numbered if line and at not in shown))
    if sum(len(line) for _, line in told.lines) > _MOST_CHARS or len(counts := told.counts) < _FEWEST_WORDS:
        return None
    likelihoods = _likelihoods(counts)
    return replace(told, likelihoods=likelihoods) if likelihoods else None


def words(text: str) -> Iterator[str]:
    """The words of a text without their endings, with the parts of compound ones; quantities by their kind."""
    return (stem for stem, _ in _spellings(text))


def _spellings(text: str) -> Iterator[tuple[str, str]]:
    """Each word as it is counted and as it is written."""
    for match in _TOKEN.finditer(text.lower()):
        kind, token = str(match.lastgroup), match[0]
        if kind == "unspaced":
            yield from ((pair, pair) for pair in (token[at : at + 2] for at in range(max(len(token) - 1, 1))))
        elif kind == "word":
            parts = re.split("[-_]", token)
            yield from ((_stem(part), part) for part in (parts if len(parts) == 1 else ("-".join(parts), *parts)))
        else:
            yield f"#{kind}", token


def _stem(word: str) -> str:
    """The word without an ending of English grammar."""
    endings = (each for each in _ENDINGS if word.endswith(each) and len(word) - len(each) >= _SHORTEST_STEM)
    return word.removesuffix(next(endings, ""))


def word_vector(counts: Mapping[str, int], rarity: Mapping[str, float]) -> dict[str, float]:
    """The known words of a text with weights by count and rarity: a vector of length 1, less for few words."""
    weighed = {word: (1 + math.log(count)) * rarity[word] for word, count in counts.items() if word in rarity}
    length = math.hypot(*weighed.values(), _FEW_WORDS_LENGTH)
    return {word: weight / length for word, weight in weighed.items()}


@dataclass(frozen=True)
class _Classifier:
    """A multinomial logistic regression on words."""

    causes: tuple[str, ...]
    intercepts: tuple[float, ...]
    rarity: Mapping[str, float]
    weights: Mapping[str, tuple[float, ...]]
    """Of each word, a weight for each cause."""


@cache
def _classifier() -> _Classifier:
    """The fitted classifier of `cause_words.json`."""
    fitted: dict[str, Any] = read_data("cause_words.json")
    step = fitted["step"]
    weights = {word: tuple(step * value for value in row[1:]) for word, row in fitted["words"].items()}
    rarity = {word: row[0] * step for word, row in fitted["words"].items()}
    return _Classifier(tuple(fitted["causes"]), tuple(fitted["intercepts"]), rarity, weights)


def _likelihoods(counts: Mapping[str, int]) -> dict[str, float]:
    """How likely each cause makes these words, up to one factor; empty where none is known."""
    fitted = _classifier()
    vector = word_vector(counts, fitted.rarity)
    if not vector:
        return {}
    columns = zip(
        *(tuple(share * weight for weight in fitted.weights[word]) for word, share in vector.items()), strict=True
    )
    scores = [start + sum(column) for start, column in zip(fitted.intercepts, columns, strict=True)]
    return {cause: math.exp(score - max(scores)) for cause, score in zip(fitted.causes, scores, strict=True)}


def _gains(counts: Mapping[str, int], cause: str) -> dict[str, float]:
    """How much each word speaks for this cause rather than for the average cause."""
    fitted = _classifier()
    at = fitted.causes.index(cause)
    vector = word_vector(counts, fitted.rarity)
    mean = {word: sum(fitted.weights[word]) / len(fitted.causes) for word in vector}
    return {word: share * (fitted.weights[word][at] - mean[word]) for word, share in vector.items()}
