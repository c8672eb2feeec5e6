"""Which causes the words of a description point to, by a classifier that `tools/fit_cause_words.py` fits."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from textwrap import wrap
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
_PRINTED = ("failure", "host", "exception", "frame", "echo", "milestone", "once", "stats", "banner", "symptom")
_FEWEST_WORDS = 6  # Of 2,852 descriptions 99 in 100 have more words.
_MOST_CHARS = 20_000  # Twenty times the longest of them: more is a log of some other program.
_QUOTED_CHARS = 100
_CLAUSE_END = re.compile(r"(?<=[.!?;] )|(?<=[。！？；])")
_FEW_CONCEPTS = 4  # One concept alone has the length 1 / sqrt(5), ten have 0.85 together.
_TITLE_COUNTS = 3  # As often a word of the first line counts: of 21 pasted reports 18 were read right instead of 15.


@dataclass(frozen=True)
class WordEvidence:
    """Likelihood of a person's words under each cause, up to a common factor, and the (number, text) of their lines."""

    likelihoods: Mapping[str, float]
    lines: tuple[tuple[int, str], ...]

    def proof(self, cause: str) -> Evidence:
        """The line that speaks most for this cause; its fact `clause` quotes the part that makes half of the case."""
        fitted = _classifier()
        at = fitted.causes.index(cause)
        mean = {token: sum(fitted.weights[token]) / len(fitted.causes) for token in self.vector}
        gains = {token: share * (fitted.weights[token][at] - mean[token]) for token, share in self.vector.items()}
        number, line = max(self.lines, key=lambda each: _summed_gain(each[1], gains))
        line = line.strip()
        quotes = [quote for part in _CLAUSE_END.split(line) for quote in wrap(part, _QUOTED_CHARS)]
        clause = max(quotes, key=lambda quote: _summed_gain(quote, gains), default="")
        total = sum(gain for gain in gains.values() if gain > 0)
        facts = {"clause": clause} if 2 * _summed_gain(clause, gains) >= total else {}
        return Evidence("words_told", "platform", number, line[:400], facts, is_told=True)

    @cached_property
    def counts(self) -> Counter[str]:
        """How often each stemmed word stands in the lines; each in the first line, the title, counts three times."""
        title = self.lines[:1] * (_TITLE_COUNTS - 1) if len(self.lines) > 1 else ()
        return Counter(word for _, line in (*title, *self.lines) for word in words(line))

    @cached_property
    def vector(self) -> Mapping[str, float]:
        """TF-IDF weights of the known words, and weights of the concepts (`%kv_full`); empty where none is known."""
        rarity = _classifier().rarity
        spoken_of = concepts("\n".join(line for _, line in self.lines))
        return description_vector(self.counts, spoken_of, rarity) if rarity.keys() & self.counts.keys() else {}


def word_evidence(text: str, printed: Iterable[Evidence]) -> WordEvidence | None:
    """Likelihoods of the causes by the prose of `text`, without `printed` log lines; None with too few known words."""
    shown = {item.line for item in printed if item.role in _PRINTED and not item.id.endswith("_told")}
    # A sentence that quotes the error too is no description alone, and counts beside one.
    quoting = {item.line for item in printed if item.id.endswith("_told") and item.id != "story_told"} & shown
    numbered = [(at, line) for at, line in enumerate(sentence_lines(text.split("\n")), 1) if line]
    told = WordEvidence({}, tuple((at, line) for at, line in numbered if at not in shown))
    if len(told.counts) < _FEWEST_WORDS:
        return None
    told = replace(told, lines=tuple((at, line) for at, line in numbered if at not in shown - quoting))
    if sum(len(line) for _, line in told.lines) > _MOST_CHARS:
        return None
    return replace(told, likelihoods=_likelihoods(told.vector)) if told.vector else None


def words(text: str) -> Iterator[str]:
    """The stemmed words of a text, also the parts of hyphenated ones; a size or number as its kind, as `#gib`."""
    return (stem for stem, _ in _spellings(text))


def _spellings(text: str) -> Iterator[tuple[str, str]]:
    """(stem, spelling in the text) of each word; for a number or size `#` and its kind (`#gib`) stand as the stem."""
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
    """The word without its English inflection."""
    endings = (each for each in _ENDINGS if word.endswith(each) and len(word) - len(each) >= _SHORTEST_STEM)
    return word.removesuffix(next(endings, ""))


@cache
def _concepts() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """(tag, pattern) of each concept in `evidence.json`."""
    table: Mapping[str, str] = read_data("evidence.json")["concepts"]
    return tuple((f"%{name}", re.compile(pattern)) for name, pattern in table.items())


def concepts(text: str) -> tuple[str, ...]:
    """Concept tags of a text, such as `%kv_full`, whatever its wording or language, by patterns of `evidence.json`."""
    lowered = text.lower()
    return tuple(name for name, pattern in _concepts() if pattern.search(lowered))


def description_vector(
    counts: Mapping[str, int], concept_tags: Sequence[str], rarity: Mapping[str, float]
) -> dict[str, float]:
    """TF-IDF weights of the words in `counts` that `rarity` (word -> IDF) knows, and one equal weight for each of
    `concept_tags`; each of the two parts has a length near 1, less where it has few entries."""
    weighed = {word: (1 + math.log(count)) * rarity[word] for word, count in counts.items() if word in rarity}
    length = math.hypot(*weighed.values(), _FEW_WORDS_LENGTH)
    share = 1 / math.sqrt(len(concept_tags) + _FEW_CONCEPTS)
    return {word: weight / length for word, weight in weighed.items()} | dict.fromkeys(concept_tags, share)


@dataclass(frozen=True)
class _Classifier:
    """A multinomial logistic regression on words and concepts."""

    causes: tuple[str, ...]
    intercepts: tuple[float, ...]
    rarity: Mapping[str, float]
    weights: Mapping[str, tuple[float, ...]]
    """Of each word and concept, a weight for each cause."""


@cache
def _classifier() -> _Classifier:
    """The fitted classifier of `cause_words.json`."""
    fitted: dict[str, Any] = read_data("cause_words.json")
    step = fitted["step"]
    weights = {word: tuple(step * value for value in row[1:]) for word, row in fitted["words"].items()}
    rarity = {word: row[0] * step for word, row in fitted["words"].items() if row[0]}
    return _Classifier(tuple(fitted["causes"]), tuple(fitted["intercepts"]), rarity, weights)


def _likelihoods(vector: Mapping[str, float]) -> dict[str, float]:
    """Cause label -> likelihood of this word vector (word -> weight) under it, up to a common factor."""
    fitted = _classifier()
    columns = zip(
        *(tuple(share * weight for weight in fitted.weights[token]) for token, share in vector.items()), strict=True
    )
    scores = [start + sum(column) for start, column in zip(fitted.intercepts, columns, strict=True)]
    return {cause: math.exp(score - max(scores)) for cause, score in zip(fitted.causes, scores, strict=True)}


def _summed_gain(line: str, gains: Mapping[str, float]) -> float:
    """The sum of `gains` (word or concept -> how far it speaks for a cause) over the words and concepts of one line."""
    return sum(gains.get(token, 0.0) for token in {*words(line), *concepts(line)})
