"""The policy file (TOML): bounds on requests, and how the pool is shared. Each key is a field below, with its
documentation and its range. An error names its line and key."""

import json
from collections.abc import Mapping
from dataclasses import Field, asdict, field, fields
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.files import read_text
from legroom.records import dataclass
from legroom.toml_tables import KeyLines, TomlTable, parse_toml
from legroom.units import MIB, parse_bytes


def _key(default: Any, toml_comment: str, **constraints: Any) -> Any:
    """A dataclass field whose metadata has the key's TOML comment and its `constraints` (low, high, unit, choices)."""
    return field(default=default, metadata={"about": toml_comment, **constraints})


def _choice(toml_comment: str, *choices: str) -> Any:
    """A dataclass field for a key that takes one of `choices`; the first is the default."""
    return _key(choices[0], toml_comment, choices=choices)


@dataclass(frozen=True)
class RequestBounds:
    body_bytes: int = _key(64 * MIB, "largest request body, images included", unit="bytes", least=1024)
    max_prompt_tokens: int = _key(0, "longest prompt; 0: what the model takes")
    max_output_tokens: int = _key(0, "longest answer (max_tokens, max_completion_tokens, max_output_tokens); 0: any")
    output_over: str = _choice("an answer over that is capped or rejected", "cap", "reject")
    default_output_tokens: int = _key(0, "set this max_tokens where a request names none; 0: leave it open")
    max_sequences: int = _key(0, "largest n, best_of or beam width; 0: any, vLLM queues sequences")
    max_prompts: int = _key(0, "most prompts in one request; 0: 65,536")
    max_logprobs: int | None = _key(
        None, "most logprobs and top_logprobs a token; unset: the server's --max-logprobs, or 20", optional=True
    )
    max_prompt_logprobs: int | None = _key(
        None, "most prompt_logprobs a token, each a row of the vocabulary; unset: likewise", optional=True
    )
    logprobs_over: str = _key("reject", "more than that is capped or rejected", choices=("cap", "reject"))
    max_images: int | None = _key(None, "images a request; unset: the server's own limit", optional=True)
    max_audios: int | None = _key(None, "audio clips a request; unset: likewise", optional=True)
    max_videos: int | None = _key(None, "videos a request; unset: likewise", optional=True)
    media_bytes: int = _key(20 * MIB, "largest single image, clip or video sent in the request", unit="bytes", least=1)
    image_pixels: int = _key(50_000_000, "largest image sent in the request: a small file can unpack to a huge one")
    remote_media: str = _choice("media named by an http address", "allow", "reject")


@dataclass(frozen=True)
class PoolPolicy:
    tokens: int = _key(0, "size of the pool; 0: as the engine or the plan says")
    admit: str = _choice(
        "goodput: fill the pool, at the price of a few preemptions; strict: none, at that of unused room",
        "goodput",
        "strict",
    )
    overcommit: float = _key(1.0, "1: the pool as it is; 1.5: count on answers ending early", low=0.1, high=10.0)
    max_running: int = _key(0, "sequences admitted at once; 0: max_num_seqs")
    open_ended: int | str = _choice("reserve for answers without max_tokens: learnt, worst, tokens", "learnt", "worst")
    count: str = _choice(
        "prompt tokens: bytes (bound), tokenize (exact, a call each), auto (only where it decides)",
        "auto",
        "bytes",
        "tokenize",
    )
    when_unknown: str = _choice("size of the pool not known: open lets all in, closed none", "open", "closed")
    abort_grace_s: float = _key(1.0, "what an aborted request held is kept back this long", low=0.0, high=60.0)


@dataclass(frozen=True)
class QueuePolicy:
    requests: int = _key(512, "requests that may wait; more get 429 with Retry-After")
    wait_s: float = _key(30.0, "longest wait, then 429 with Retry-After", low=0.0, high=3600.0)
    body_timeout_s: float = _key(30.0, "a body must arrive within this", low=0.1, high=3600.0)
    drain_retry_s: int = _key(10, "Retry-After while draining", least=1)


@dataclass(frozen=True)
class ClientPolicy:
    by: str = _choice(
        "clients told apart by key, address, auto (key, else address) or none: one queue",
        "auto",
        "key",
        "address",
        "none",
    )
    header: str = _key("", "a header that names the client and goes before these, as a gateway may set", free=True)
    small_share: float = _key(
        0.05, "of the pool, kept for requests that fit there while several clients send; 0: nothing", low=0.0, high=0.5
    )


@dataclass(frozen=True)
class ProxyPolicy:
    metrics_when_down: str = _choice(
        "of a server that does not answer, /metrics has the guard's own part (page) or is 503", "page", "503"
    )


@dataclass(frozen=True)
class Policy:
    requests: RequestBounds = RequestBounds()
    pool: PoolPolicy = PoolPolicy()
    queue: QueuePolicy = QueuePolicy()
    clients: ClientPolicy = ClientPolicy()
    proxy: ProxyPolicy = ProxyPolicy()
    weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of clients by API key, header value or address; 1 for all others."""


WEIGHTS = "weights"
SECTIONS: Mapping[str, type] = {each.name: type(each.default) for each in fields(Policy) if each.name != WEIGHTS}


def policy_toml(policy: Policy | None = None) -> str:
    """A policy as a commented TOML file; by default the default policy."""
    shown = policy or Policy()
    lines = ["# legroom guard policy. Every key is optional; these are its values now.", ""]
    for name, kind in SECTIONS.items():
        lines.append(f"[{name}]")
        section = getattr(shown, name)
        for key in fields(kind):
            value = getattr(section, key.name)
            written = f"{key.name} = {_toml_value(value)}" if value is not None else f"# {key.name} = 4"
            lines.append(f"{written:<32}# {key.metadata['about']}")
        lines.append("")
    lines.append(f"[{WEIGHTS}]")
    lines += [f"{json.dumps(name)} = {weight}" for name, weight in shown.weights.items()]
    if not shown.weights:
        lines.append('# "10.0.0.7" = 2.0              # a client (key, header or address) and its share')
    return "\n".join([*lines, ""])


def _toml_value(value: Any) -> str:
    """A value as TOML text: a string in quotes; an integer from 100,000 on with underscores."""
    if isinstance(value, str):
        return json.dumps(value)
    return f"{value:_}" if isinstance(value, int) and value >= 100_000 else str(value)


_HINT = "see legroom guard --print-policy"


def read_policy(path: Path) -> Policy:
    """The policy in a TOML file; LegroomError where it cannot be read, has a wrong value or sets nothing."""
    return parse_policy(read_text(path, _HINT, MIB), str(path), may_be_empty=False)


def parse_policy(text: str, name: str = "policy", may_be_empty: bool = True) -> Policy:
    """The policy in a TOML text; LegroomError for a wrong value, or, unless `may_be_empty`, where nothing is set."""
    values, read = parse_toml(text, name, _HINT), dict[str, Any]()
    with TomlTable(values, (), Path(name), KeyLines(text)) as table:
        for section, kind in SECTIONS.items():
            if (keys := table.table(section)) is not None:
                with keys:
                    given = {key.name: _key_value(keys, key) for key in fields(kind)}
                read[section] = kind(**{key: value for key, value in given.items() if value is not None})
        if (shares := table.table(WEIGHTS)) is not None:
            read[WEIGHTS] = {client: shares.number(client, 1.0, 0.01, 100.0) for client in shares.keys}
    if not (may_be_empty or any(values.values())):  # what a full disk leaves of a file that is being written
        raise LegroomError(f"{name} is empty or sets nothing, so it is not a policy", _HINT)
    return Policy(**read)


def changed_keys(before: Policy, after: Policy) -> list[str]:
    """The changed keys, as `requests.max_sequences 1 -> 0`; changed client weights as one name, without API keys."""
    old, new = asdict(before), asdict(after)
    both = ((f"{name}.{key}", old[name][key], new[name][key]) for name in SECTIONS for key in old[name])
    changes = [f"{key} {was} -> {now}".replace("None", "unset") for key, was, now in both if was != now]
    return changes + [WEIGHTS] * (before.weights != after.weights)


def _key_value(table: TomlTable, key: Field[Any]) -> Any:
    """The key's value in the table, "1 MiB" as bytes; None where absent, LegroomError for a wrong type or range."""
    kinds, meta, value = str(key.type), key.metadata, table.raw(key.name)
    if value is None:
        return None
    low, high = meta.get("low", meta.get("least", 0)), meta.get("high", 2**53)
    if isinstance(value, str) and meta.get("unit") == "bytes":
        try:
            size = parse_bytes(value)
        except LegroomError as error:
            raise table.error(key.name, error.message) from error
        if not low <= size <= high:
            raise table.error(key.name, f"must be from {low:,} to {high:,} bytes")
        return size
    if "str" in kinds and (isinstance(value, str) or key.type is str):
        text = table.get(key.name, str, "")
        return text if meta.get("free") else table.choice(key.name, meta["choices"], text)
    return table.number(key.name, 0.0, low, high) if "float" in kinds else table.integer(key.name, 0, low, high)


class PolicyFile:
    """A policy file that is read again when it changed, checked at most once a second."""

    def __init__(self, path: Path | None, now_s: float) -> None:
        self.path = path
        self.policy = Policy()
        self.errors = self.reloads = 0
        self.last_error = ""
        self._next_s = now_s + 1.0
        self._version: tuple[int, int, int] | None = None
        if path is not None:
            self._version = self._file_version()
            self.policy = read_policy(path)

    def is_due(self, now_s: float) -> bool:
        """Whether there is a policy file and the time to check it for changes has come."""
        return now_s >= self._next_s and self.path is not None

    def reload(self, now_s: float, force: bool = False) -> str | None:
        """Read the file if it changed, or with `force`. Returns the error of a broken file, which changes nothing."""
        self._next_s = now_s + 1.0
        assert self.path is not None
        version = self._file_version()
        if version == self._version and not force:
            return None
        self._version = version
        try:
            self.policy = read_policy(self.path)
        except LegroomError as error:
            self.errors += 1
            self.last_error = f"{error.message}{f' ({error.hint})' if error.hint else ''}"
            return self.last_error
        self.reloads += 1
        self.last_error = ""
        return None

    def _file_version(self) -> tuple[int, int, int] | None:
        """Modification time, size and inode, to detect a change; None where stat fails."""
        assert self.path is not None
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
