"""A command line taken apart, every flag with its words, so that some can be changed and the others stay as they are.

`parse` reads a command for what it means; this keeps how it was written, removed and misspelt flags included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from legroom.facts.flags import Flag, flags_ever, flags_of
from legroom.facts.releases import Release
from legroom.records import dataclass
from legroom.vllm.reading import looks_like_flag

_TRUTHS = ("true", "false", "0", "1")


@dataclass(frozen=True, slots=True)
class Part:
    """A flag with its values, or a bare word."""

    words: tuple[str, ...]
    name: str = ""
    """As written, but for `_` instead of `-`; empty for a bare word."""
    flag: Flag | None = None
    """What it means; None for a bare word and for what no release ever had."""

    @property
    def value(self) -> str:
        """As written; "" for a switch."""
        return self.words[0].partition("=")[2] or " ".join(self.words[1:])

    @property
    def long_name(self) -> str:
        """Under which all spellings of the flag are one: short, abbreviated, `--no-`."""
        return self.flag.name if self.flag else _positive(self.name)

    @property
    def dest(self) -> str:
        """vLLM's Python name."""
        return self.flag.dest if self.flag else self.name.lstrip("-").replace("-", "_")


def command_parts(words: Sequence[str], release: Release | None = None) -> Iterator[Part]:
    """The parts in order, as the release reads them; as the last release with each flag did where none is known."""
    table = flags_ever() if release is None else flags_of(release)
    at = 0
    while at < len(words):
        word = words[at]
        if not looks_like_flag(word):
            yield Part((word,))
            at += 1
            continue
        name = _plain(word.partition("=")[0])
        flag = _named(name, table) or _named(name, flags_ever())
        end = at + 1 if "=" in word or name.startswith("-O") else _end(words, at + 1, flag)
        yield Part(tuple(words[at:end]), name, flag)
        at = end


def long_name(name: str) -> str:
    """What `Part.long_name` is for a flag that is written like this."""
    plain = _plain(name)
    flag = _named(plain, flags_ever())
    return flag.name if flag else _positive(plain)


def _plain(name: str) -> str:
    """vLLM takes `--max_model_len` for `--max-model-len`, and `--compilation-config.level` for a key of it."""
    return name.partition(".")[0].replace("_", "-") if name.startswith("--") else name


def _positive(name: str) -> str:
    return "--" + name[5:] if name.startswith("--no-") else name


def _named(name: str, table: Mapping[str, Flag]) -> Flag | None:
    """The flag of a name, as argparse would find it."""
    found = table.get(name) or table.get(_positive(name))
    if found is not None or not name.startswith("--") or len(name) < 4:
        return found
    near = {flag.name: flag for long, flag in table.items() if long.startswith(name)}
    return near.popitem()[1] if len(near) == 1 else None


def _end(words: Sequence[str], at: int, flag: Flag | None) -> int:
    """Where the values end that begin at a place."""
    kind = flag.kind if flag else "str"
    if kind in ("switch", "bool"):
        return at
    if kind == "optbool":
        return at + int(at < len(words) and words[at].lower() in _TRUTHS)
    most = len(words) if kind.startswith("list:") else at + 1
    end = at
    while end < min(most, len(words)) and not looks_like_flag(words[end]):
        end += 1
    return end
