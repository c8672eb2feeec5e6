"""A server's command line taken apart: the model, its flags one by one, the secrets that never go into a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from legroom.deployments.server_words import API_SERVERS, basename
from legroom.errors import LegroomError
from legroom.facts.flags import flags_of
from legroom.facts.releases import Release
from legroom.masking import SECRET_FLAGS
from legroom.records import dataclass
from legroom.vllm.command_line import joined, plain_name
from legroom.vllm.flag_values import looks_like_flag

API_KEY_NAME = "VLLM_API_KEY"
WITHOUT_API_KEY = "without it the server answers everybody"


@dataclass(frozen=True, slots=True)
class Phrase:
    """One flag with its values, as the command line has them."""

    flag: str
    values: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """As it is typed; a value that starts with a dash is joined by `=`."""
        return tuple(joined(self.flag, self.values))

    @property
    def value(self) -> str:
        """The values as one text, empty for a switch."""
        return " ".join(self.values)


@dataclass(frozen=True, slots=True)
class ServerWords:
    head: tuple[str, ...]
    """`vllm serve` or `python -m vllm.entrypoints.openai.api_server`, the program by the path it was given with."""
    model: str
    phrases: tuple[Phrase, ...]
    secrets: tuple[str, ...] = ()
    """Variables that take the place of secret flags."""

    def get(self, flag: str) -> Phrase | None:
        """The last phrase of a flag."""
        return next((phrase for phrase in reversed(self.phrases) if phrase.flag == flag), None)

    def with_phrase(self, phrase: Phrase) -> ServerWords:
        return ServerWords(self.head, self.model, (*self.phrases, phrase), self.secrets)

    @property
    def model_words(self) -> tuple[str, ...]:
        """The model as the program takes it: `vllm serve` as an argument, the module as a flag."""
        return (self.model,) if self.head[-1] == "serve" else ("--model", self.model)

    def words(self) -> tuple[str, ...]:
        return (*self.head, *self.model_words, *(word for phrase in self.phrases for word in phrase.words))


def take_apart(words: Sequence[str], release: Release) -> ServerWords:
    """Split `vllm serve MODEL --flag value ...`; secret values are dropped and named."""
    head, rest = _head(tuple(words))
    model = ""
    if head[-1] == "serve" and rest and not looks_like_flag(rest[0]):
        model, rest = rest[0], rest[1:]
    phrases: list[Phrase] = []
    secrets: list[str] = []
    for phrase in _phrases(rest, release):
        if phrase.flag in SECRET_FLAGS:
            secrets.append(SECRET_FLAGS[phrase.flag])
        elif phrase.flag == "--model":
            model = phrase.value
        else:
            phrases.append(phrase)
    if not model:
        raise LegroomError("the command names no model", "write it as vllm serve MODEL [flags]")
    return ServerWords(head, model, tuple(phrases), tuple(dict.fromkeys(secrets)))


def _head(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    for i, word in enumerate(words[:8]):
        if word == "serve" and i and basename(words[i - 1]) == "vllm":
            return (words[i - 1], "serve"), words[i + 1 :]
        if word in API_SERVERS:
            python = words[i - 2] if i >= 2 and words[i - 1] == "-m" else "python"
            return (python, "-m", word), words[i + 1 :]
    raise LegroomError("the command starts no vLLM server", "write it as vllm serve MODEL [flags]")


def _phrases(words: Iterable[str], release: Release) -> list[Phrase]:
    table = flags_of(release)
    phrases: list[Phrase] = []
    for word in words:
        if looks_like_flag(word):
            flag, joined, value = word.partition("=")
            phrases.append(Phrase(_long_name(flag, table), (value,) if joined else ()))
        elif phrases:
            phrases[-1] = Phrase(phrases[-1].flag, (*phrases[-1].values, word))
        else:
            raise LegroomError(f"{word!r} belongs to no flag", "write the command as vllm serve MODEL [flags]")
    return phrases


def _long_name(flag: str, table: object) -> str:
    if not flag.startswith("--") and isinstance(table, dict) and flag in table and not flag.startswith("-O"):
        return str(table[flag].name)
    _, dot, path = flag.partition(".")
    return plain_name(flag) + dot + path if flag.startswith("--") else flag
