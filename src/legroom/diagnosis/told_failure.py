"""Failures that people tell in their own words: what ran short, when, and beside whom. Words are in `evidence.json`."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import cast

from legroom.diagnosis.case import FAILED_ALLOCATIONS, is_own_failure
from legroom.diagnosis.pasted_command import command_lines, prose, sentence_lines
from legroom.facts import read_data
from legroom.facts.log_messages import Role, typed_groups
from legroom.vllm_logs.evidence import Evidence

_NEAR_CHARS = 250  # A moment stands in the sentence of the shortage, or in the one before or after it.
WORD = re.compile(r"[\u3040-\u9fff]{2}|[^\W\d_]{2,}")
FEW_WORDS = 15
"""Fewer words beside an error are a heading or a label, not a story."""
_MODEL_OF_COMMAND = re.compile(r"(?:--model[ =]|\bvllm serve )[\"']?([\w./-]+)")
_WRAPPED = re.compile(r"\n(?=[a-z(`'\"\d])")

Told = tuple[str, Role, str | None, re.Pattern[str]]
"""Id, role and phase of something that people tell, and the words for it."""


@cache
def _told(kind: str) -> tuple[Told, ...]:
    """(message id, role, phase, pattern) for what people write, by kind: `shortages`, `moments`, `denials` ..."""
    rows = read_data("evidence.json")["told"][kind]
    return tuple((id_, cast(Role, role), phase, re.compile(words, re.ASCII)) for id_, role, phase, words in rows)


def description_evidence(text: str, printed: Sequence[Evidence]) -> Iterator[Evidence]:
    """Evidence in the user's sentences `text`: an OOM if the log lines `printed` have none, when, other processes."""
    plain = "\n".join(sentence_lines(text.split("\n")))
    sentences = _WRAPPED.sub(" ", plain)
    failures = [item for item in printed if is_own_failure(item)]
    shortages = list(_shortages(sentences)) if not failures else []
    anchors = [match.span() for (id_, *_), match in shortages if id_ in FAILED_ALLOCATIONS]
    anchors += [
        _span_of_failure(item, sentences, plain) for item in failures if item.id in (*FAILED_ALLOCATIONS, "nccl_oom")
    ]
    roles = {item.role for item in printed}
    moments = [] if "frame" in roles else _nearest_moments(sentences, anchors)
    if "milestone" in roles:  # of the steps after the last printed one a sentence may still tell
        moments = [(told, match) for told, match in moments if told[1] == "frame" or told[2] == "serving"]
    around = [(told, match) for told in _told("circumstances") if (match := told[3].search(sentences))]
    holders = [match.span() for told, match in around if told[0] == "neighbour_holds"]
    # A training job that holds the card is a neighbour, no trainer with the engine inside.
    beside = [m for t, m in around if t[0] == "trainer" and any(start <= m.start() < end for start, end in holders)]
    around = [(told, match) for told, match in around if match not in beside]
    if failures and not any(item.id == "torch_oom" for item in failures):
        kept = (told for told in _told("shortages") if told[0] == "not_released_told")
        around += [
            ((id_, "platform", None, words), match) for id_, _, _, words in kept if (match := words.search(sentences))
        ]
    is_failed = any(item.role == "symptom" and not item.id.endswith("_told") for item in printed)
    # That a second server fails, a traceback without its error does not contradict.
    asked = () if failures or shortages or "told" in roles else (t for t in _told("questions") if t[2] or not is_failed)
    around += [(told, match) for told in asked if (match := told[3].search(sentences))]
    if shares := _utilizations_of_commands(text):
        yield Evidence("several_servers", "platform", 1, "", is_told=True)
    if shares or (any(t[0] in ("neighbour_told", "several_servers") for t, _ in around) and (shares := _shares(text))):
        yield Evidence("shares_told", "setting", 1, "", {"shares": " ".join(shares)}, is_told=True)
    ((_, _, _, size),), ((_, _, _, uncertain),) = _told("parameters"), _told("uncertain_weights")
    # Experts share a fifth of the parameters: Mixtral 8x7B has 46.7e9, 8x22B 141e9.
    named = "\n".join(_MODEL_OF_COMMAND.findall(text)) if failures or shortages else ""
    told = size.findall(sentences) or size.findall(named)
    sizes = {float(each) * (int(experts) * 0.8 if experts else 1) for experts, each in told}
    if len(sizes) == 1 and not uncertain.search(text):
        yield Evidence("parameters_told", "setting", 1, "", {"billions": sizes.pop()}, is_told=True)
    if prose("names_vllm").search(sentences) and len(WORD.findall(sentences)) >= FEW_WORDS:
        yield Evidence("story_told", "platform", 1, "", is_told=True)
    for (id_, role, phase, _), match in (*shortages, *moments, *around):
        start, end = plain.rfind("\n", 0, match.start()) + 1, plain.find("\n", match.end())
        line = plain[start : end if end >= 0 else None].strip()[:400]
        facts = typed_groups({name: value for name, value in match.groupdict().items() if value and "_" in name})
        facts["what"] = next((value for value in match.groups() if value), "")
        yield Evidence(id_, role, plain.count("\n", 0, start) + 1, line, facts, phase, is_told=True)


def _shortages(sentences: str) -> Iterator[tuple[Told, re.Match[str]]]:
    """((message id, role, phase, pattern), first match) of each kind of shortage not denied, special ones first."""
    ((_, _, _, denial),) = _told("denials")
    taken: list[tuple[int, int]] = []
    in_ram: re.Match[str] | None = None
    for told in _told("shortages"):
        for match in told[3].finditer(sentences):
            is_denied = denial.search(sentences[max(match.start() - 100, 0) : match.start()])
            is_denied = is_denied or prose("overcome").search(sentences[match.end() : match.end() + 100])
            is_of_host = in_ram is not None and told[0] in FAILED_ALLOCATIONS and _is_same_sentence(in_ram, match)
            if not (is_denied or is_of_host) and not any(
                match.start() < end and start < match.end() for start, end in taken
            ):
                taken.append(match.span())
                in_ram = match if told[0] == "host_ram_told" else in_ram
                yield told, match
                break


def _is_same_sentence(in_ram: re.Match[str], match: re.Match[str]) -> bool:
    """Whether `match`, a shortage of unnamed memory, stands in the sentence of `in_ram`, so that it is of RAM too."""
    between = in_ram.string[min(in_ram.end(), match.end()) : max(in_ram.start(), match.start())]
    return not re.search(r"[.!?\n。]", between) and not re.search(r"(?i)GPU|CUDA|VRAM|显存", between + match[0])


def _utilizations_of_commands(text: str) -> list[str]:
    """gpu_memory_utilization of the servers that commands of the text start on the same cards; empty for one alone."""
    lines = dict.fromkeys(line for *_, line in command_lines(text.split("\n")))
    is_beside = any(line.endswith("&") for line in lines) and not any("_VISIBLE_DEVICES" in line for line in lines)
    found = [re.search(r"utilization[= ](\S+)", line) for line in lines if is_beside]
    return [share[1] if share else "0.9" for share in found] if 1 < len(found) < 5 else []


def _shares(text: str) -> list[str]:
    """gpu_memory_utilization values in lines about it, twice where one is for both servers; empty for one or over 4."""
    ((_, _, _, share),), ((_, _, _, both),) = _told("shares"), _told("both")
    shown = {line.strip(" $#>`") for line in text.split("\n")}  # a command that is shown twice is of one server
    lines = [line for line in sorted(shown) if re.search(r"(?i)util|fraction|of the (?:GPU|card)|显存", line)]
    found = [value for line in lines for value in share.findall(line) for _ in range(2 if both.search(line) else 1)]
    return found if 1 < len(found) < 5 else []


def _span_of_failure(failure: Evidence, sentences: str, plain: str) -> tuple[int, int]:
    """(start, end) offset in `sentences` of a printed failure's words, else its line; `plain`: with line breaks."""
    before = plain.split("\n")[: failure.line]
    end = len("\n".join(before))
    start = end - len(before[-1])
    words = _told("shortages")[-1][3].search(sentences, start, end)
    return words.span() if words else (start, end)


def _nearest_moments(sentences: str, anchors: list[tuple[int, int]]) -> list[tuple[Told, re.Match[str]]]:
    """At most one (row, match): the start-up or serving moment nearest to a (start, end) anchor, in 250 characters."""
    near = [
        (max(start - match.end(), match.start() - end, 0), number, told, match)
        for start, end in anchors
        for number, told in enumerate(_told("moments"))
        for match in told[3].finditer(sentences, max(start - _NEAR_CHARS, 0), max(end + _NEAR_CHARS, 0))
    ]
    return [item[2:] for item in sorted(near, key=lambda item: item[:2])[:1]]
