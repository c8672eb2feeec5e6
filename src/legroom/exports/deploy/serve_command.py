"""The command line of a server: its model, flags and secrets, and the address it listens on."""

import shlex
from collections.abc import Iterable, Mapping, Sequence

from legroom.deployments.server_words import API_SERVERS, basename
from legroom.errors import LegroomError
from legroom.facts.flags import Flag, flags_of
from legroom.facts.releases import Release
from legroom.masking import SECRET_FLAGS
from legroom.records import dataclass
from legroom.vllm.command_line import joined, plain_name
from legroom.vllm.flag_values import looks_like_flag

API_KEY_NAME = "VLLM_API_KEY"
WITHOUT_API_KEY = "without it the server answers everybody"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A flag with its values."""

    flag: str
    values: tuple[str, ...] = ()
    why: str = ""
    """A sentence about its effect."""

    @property
    def words(self) -> tuple[str, ...]:
        """The flag's words on the command line; a value that starts with a dash is joined by `=`."""
        return tuple(joined(self.flag, self.values))

    @property
    def value(self) -> str:
        """The flag's values as one text; empty for a switch."""
        return " ".join(self.values)


@dataclass(frozen=True, slots=True)
class ServeCommand:
    head: tuple[str, ...]
    """`vllm serve` or `python -m vllm.entrypoints.openai.api_server`, with the path of the program."""
    model: str
    phrases: tuple[Phrase, ...]
    secrets: tuple[str, ...] = ()
    """Variables that replace flags with secrets."""

    def get(self, flag: str) -> Phrase | None:
        """The last occurrence of a flag, with its values; None where it is not given."""
        return next((phrase for phrase in reversed(self.phrases) if phrase.flag == flag), None)

    def count(self, flag: str) -> int | None:
        """The value of a flag as a whole number; None where the flag is missing or no number."""
        phrase = self.get(flag)
        return int(phrase.value) if phrase and phrase.value.isascii() and phrase.value.isdigit() else None

    def with_phrase(self, phrase: Phrase) -> "ServeCommand":
        """The command with this flag appended; vLLM uses the last of equal flags."""
        return ServeCommand(self.head, self.model, (*self.phrases, phrase), self.secrets)

    @property
    def model_words(self) -> tuple[str, ...]:
        """The model as the positional argument of `vllm serve`, or as --model of the Python module."""
        return (self.model,) if self.head[-1] == "serve" else ("--model", self.model)

    def words(self) -> tuple[str, ...]:
        """The whole command line but the secrets."""
        return (*self.head, *self.model_words, *(word for phrase in self.phrases for word in phrase.words))


def parse_command(words: Sequence[str], release: Release) -> ServeCommand:
    """Parse `vllm serve MODEL --flag value ...`; secrets become variables. LegroomError for any other command."""
    head, rest = _split_program(tuple(words))
    model = ""
    if head[-1] == "serve" and rest and not looks_like_flag(rest[0]):
        model, rest = rest[0], rest[1:]
    phrases: list[Phrase] = []
    secrets: list[str] = []
    for phrase in _parse_flags(rest, release):
        if phrase.flag in SECRET_FLAGS:
            secrets.append(SECRET_FLAGS[phrase.flag])
        elif phrase.flag == "--model":
            model = phrase.value
        else:
            phrases.append(phrase)
    if not model:
        raise LegroomError("the command names no model", "write it as vllm serve MODEL [flags]")
    return ServeCommand(head, model, tuple(phrases), tuple(dict.fromkeys(secrets)))


def _split_program(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(`vllm serve` or `python -m ...`, the words after it); LegroomError for any other program."""
    for i, word in enumerate(words[:8]):
        if word == "serve" and i and basename(words[i - 1]) == "vllm":
            return (words[i - 1], "serve"), words[i + 1 :]
        if word in API_SERVERS:
            python = words[i - 2] if i >= 2 and words[i - 1] == "-m" else "python"
            return (python, "-m", word), words[i + 1 :]
    raise LegroomError("the command starts no vLLM server", "write it as vllm serve MODEL [flags]")


def _parse_flags(words: Iterable[str], release: Release) -> list[Phrase]:
    """Each flag with the words that follow it, under its long name; LegroomError for a word before any flag."""
    table = flags_of(release)
    phrases: list[Phrase] = []
    for word in words:
        if looks_like_flag(word):
            flag, joined, value = word.partition("=")
            phrases.append(Phrase(_canonical_flag(flag, table), (value,) if joined else ()))
        elif phrases:
            phrases[-1] = Phrase(phrases[-1].flag, (*phrases[-1].values, word))
        else:
            raise LegroomError(f"{word!r} belongs to no flag", "write the command as vllm serve MODEL [flags]")
    return phrases


def _canonical_flag(flag: str, table: Mapping[str, Flag]) -> str:
    """The flag's long name with hyphens, also for a short flag but `-O`; the tail of `--config.key` is kept."""
    if not flag.startswith("--") and flag in table and not flag.startswith("-O"):
        return table[flag].name
    _, dot, path = flag.partition(".")
    return plain_name(flag) + dot + path if flag.startswith("--") else flag


DEFAULT_PORT = 8000
ALL_ADDRESSES = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean all addresses, and the loopback address of each."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str = ""
    port: int = DEFAULT_PORT
    tls: bool = False
    socket: str = ""
    """A Unix socket, with which vLLM listens on no port."""

    @property
    def scheme(self) -> str:
        """`https` where the server has a TLS certificate, else `http`."""
        return "https" if self.tls else "http"

    @property
    def url(self) -> str:
        """The URL on the server's own machine, without a path; `localhost` without a port for a Unix socket."""
        if self.socket:
            return f"{self.scheme}://localhost"
        near = ALL_ADDRESSES.get(self.host, self.host)
        return f"{self.scheme}://{f'[{near}]' if ':' in near else near}:{self.port}"

    def curl_words(self, path: str, *options: str) -> tuple[str, ...]:
        """The words of a curl command for a path; certificates are not verified, as `localhost` is not in them."""
        insecure = ("-k",) if self.tls else ()
        through = ("--unix-socket", self.socket) if self.socket else ()
        return ("curl", "-fsS", "-m", "5", *insecure, *through, *options, self.url + path)

    def curl(self, path: str, *options: str) -> str:
        """A shell-quoted curl command for a path of the server."""
        return shlex.join(self.curl_words(path, *options))

    def watch_words(self, url: str = "") -> tuple[str, ...]:
        """The arguments of `legroom watch`; `url` replaces the server's local URL. LegroomError for a Unix socket."""
        if self.socket:
            raise LegroomError("legroom watch reads a port, and --uds has none", "leave out --with-sidecar or --uds")
        return ("watch", "--daemon", *(("--insecure",) if self.tls else ()), url or self.url)


def address_of(words: ServeCommand) -> Address:
    """Host, port, TLS and Unix socket from the command's flags; vLLM's default port where none is given."""
    flags, port = ("--host", "--ssl-certfile", "--ssl-keyfile", "--uds"), words.count("--port")
    host, certificate, key, socket = (phrase.value if (phrase := words.get(name)) else "" for name in flags)
    return Address(host.strip("[]"), DEFAULT_PORT if port is None else port, bool(certificate or key), socket)


def check_health_is_reachable(words: ServeCommand) -> None:
    """Raise LegroomError for a server without HTTP, or one that requires a client certificate."""
    for flag in ("--headless", "--grpc"):
        if words.get(flag) is not None:
            why = f"a server with {flag} answers no HTTP, so no health check could tell that it has started"
            raise LegroomError(why, "export a script and watch the server yourself")
    phrase = words.get("--ssl-cert-reqs")
    if phrase is not None and phrase.value == "2" and address_of(words).tls:
        hint = "leave it out, or export a script and watch the server yourself"
        raise LegroomError("--ssl-cert-reqs 2 asks every client for a certificate, and a health check has none", hint)


def check_reachable(words: ServeCommand) -> None:
    """Raise LegroomError for a server that is not reachable from outside its container."""
    check_health_is_reachable(words)
    address = address_of(words)
    if address.socket:
        why = f"--uds {address.socket} is a socket inside the container, which nobody outside reaches"
        raise LegroomError(why, "leave out --uds and use --port")
    if address.host not in ALL_ADDRESSES:
        hint = "leave out --host, and publish the port on an address of the host instead"
        raise LegroomError(f"--host {address.host} is not reached from outside the container", hint)
