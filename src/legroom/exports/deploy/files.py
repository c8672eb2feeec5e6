"""The files and folders that a server's flags name: which of them a container is given, and which it still needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.exports.deploy.server import Server
    from legroom.exports.deploy.words import Phrase

_NO_PATHS = frozenset({"--root-path", "--served-model-name", "--uds"})
"""Flags whose value begins with a slash and is no file that a container needs."""
_FROM_HERE = frozenset({
    "--chat-template", "--tool-parser-plugin", "--reasoning-parser-plugin", "--ssl-keyfile", "--ssl-certfile",
    "--ssl-ca-certs", "--log-config-file", "--tokenizer", "--hf-config-path", "--lora-modules", "--default-mm-loras",
    "--prompt-adapters", "--speculative-config", "--speculative-model", "--quantization-param-path",
    "--allowed-local-media-path", "--download-dir",
})  # fmt: skip
"""Flags that vLLM looks up from where it was started."""
_DOWNLOADS = "--download-dir"
_WRITTEN = frozenset({_DOWNLOADS, "--kv-transfer-config", "--ec-transfer-config", "--compilation-config",
                      "--profiler-config"})  # fmt: skip
"""Flags whose folders vLLM writes to."""
_OF_THE_IMAGE = frozenset(
    f"/{name}".rstrip("/")
    for name in ("", "bin", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "tmp",
                 "usr", "var", "dev/shm", "root/.cache", "usr/local", "usr/lib", "usr/bin")
)  # fmt: skip
"""Folders that an image has itself: what is mounted over them hides the server's own."""


@dataclass(frozen=True, slots=True)
class Named:
    """A path of this machine that a flag names."""

    flag: str
    path: str
    folder: bool
    writable: bool

    @property
    def private(self) -> bool:
        """Whether others must not read it: a key or a certificate."""
        return self.flag.startswith("--ssl-")


def is_local(model: str) -> bool:
    """Whether the model is a folder rather than a Hub id. vLLM looks for a folder of that name first; so does this."""
    return model.startswith(("/", ".", "~")) or (bool(model) and _exists(Path(model)) and Path(model).is_dir())


def check_paths(server: Server, *, mounted: bool = True) -> None:
    """Refuse a path that would be another one, or none, where the server starts."""
    models = [server.model] if server.local_model else []
    found = [("the model", path) for path in models if not path.startswith("/")]
    for phrase in _phrases(server):
        found += [(phrase.flag, path) for path in _said(phrase) if _from_here(phrase, path)]
    for what, path in found:
        raise LegroomError(
            f"{what} {path} is a path from where the command runs, and the exported server starts elsewhere",
            f"name the whole path, like {Path(path).expanduser().absolute()}",
        )
    for path in (*models, *(one.path for one in named(server))):
        if mounted and ":" in path:
            raise LegroomError(f"the path {path} has a colon, and volumes are written with one", "rename it")


def named(server: Server) -> tuple[Named, ...]:
    """What is on this machine and must be mounted, by its own path; the model itself is not among it."""
    found: dict[str, Named] = {}
    for phrase in _phrases(server):
        for path in _absolute(phrase, server):
            there = Path(path)
            if path in _OF_THE_IMAGE or not (_exists(there) or phrase.flag == _DOWNLOADS):
                continue
            folder = not there.is_file()
            found.setdefault(path, Named(phrase.flag, path, folder, folder and phrase.flag in _WRITTEN))
    return tuple(one for one in found.values() if not any(_inside(one, other) for other in found.values()))


def not_mounted(server: Server) -> Iterator[str]:
    """A sentence about what flags name and no volume brings into the container."""
    mounted = named(server)
    paths = [path for phrase in _phrases(server) for path in _absolute(phrase, server)]
    left = [path for path in dict.fromkeys(paths) if not any(_under(path, one.path) for one in mounted)]
    if left:
        yield (
            f"Flags name {', '.join(left)}: no volume here brings that into the container, because it is not on the "
            "machine this was written on or is a folder of the image. What the image does not have needs a volume."
        )


def _phrases(server: Server) -> list[Phrase]:
    return [line.phrase for line in server.lines if line.phrase.flag.partition(".")[0] not in _NO_PATHS]


def _absolute(phrase: Phrase, server: Server) -> Iterator[str]:
    """The whole paths that a flag names outside the model's own folder."""
    for path in _said(phrase):
        if path.startswith("/") and not (server.local_model and _under(path, server.model)):
            yield path.rstrip("/")


def _said(phrase: Phrase) -> Iterator[str]:
    """What may be a path: a value (/a), what stands after a name (x=/a), a text in JSON ("path": "/a")."""
    for value in phrase.values:
        if value.startswith(("{{", "{%")) or "\n" in value:
            continue  # a template, written out
        if value.startswith(("{", "[")):
            yield from _texts(value)
        elif value.startswith("/"):
            yield value
        else:
            name, joined, path = value.partition("=")
            yield path if joined else name


def _texts(value: str) -> Iterator[str]:
    try:
        held: list[Any] = [json.loads(value)]
    except (ValueError, RecursionError):
        return
    while held:
        one = held.pop()
        if isinstance(one, str) and "/" in one:
            yield one
        elif isinstance(one, dict):
            held += reversed(one.values())
        elif isinstance(one, list):
            held += reversed(one)


def _from_here(phrase: Phrase, path: str) -> bool:
    if phrase.flag.partition(".")[0] not in _FROM_HERE or not path or path.startswith("/"):
        return False
    return path.startswith(("./", "../", "~/")) or _exists(Path(path))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a text too long for a name, or with a zero byte
        return False


def _under(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _inside(one: Named, other: Named) -> bool:
    return one.path != other.path and _under(one.path, other.path) and other.writable >= one.writable
