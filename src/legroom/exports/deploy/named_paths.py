"""The files and folders that a server's flags name, and how containers and pods mount them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.exports.deploy.yaml_text import Commented
from legroom.facts.model_sources import path_exists
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.exports.deploy.exported_server import ExportedServer
    from legroom.exports.deploy.serve_command import Phrase

_NO_PATHS = frozenset({"--root-path", "--served-model-name", "--uds"})
"""Flags whose value may begin with a slash without being a file."""
_FROM_HERE = frozenset(
    {
        *("--chat-template", "--tool-parser-plugin", "--reasoning-parser-plugin", "--ssl-keyfile"),
        *("--ssl-certfile", "--ssl-ca-certs", "--log-config-file", "--tokenizer", "--hf-config-path"),
        *("--lora-modules", "--default-mm-loras", "--prompt-adapters", "--speculative-config"),
        *("--speculative-model", "--quantization-param-path", "--allowed-local-media-path", "--download-dir"),
    }
)
"""Flags whose relative paths depend on the working directory."""
_DOWNLOADS = "--download-dir"
_WRITTEN = frozenset(
    {_DOWNLOADS, "--kv-transfer-config", "--ec-transfer-config", "--compilation-config", "--profiler-config"}
)
"""Flags that name folders which vLLM writes to."""
_TOP_FOLDERS = ("bin", "dev", "etc", "home", "lib", "lib64", "opt", "proc", "root", "run", "sbin", "sys", "tmp", "usr")
_OF_THE_IMAGE = frozenset(
    ["", *(f"/{name}" for name in (*_TOP_FOLDERS, "var", "dev/shm", "root/.cache", "usr/local", "usr/lib", "usr/bin"))]
)
"""Folders of the image, over which nothing is mounted."""


@dataclass(frozen=True, slots=True)
class NamedPath:
    """A path of this machine in the value of a flag."""

    flag: str
    path: str
    folder: bool
    writable: bool

    @property
    def private(self) -> bool:
        """Whether the file is a key or certificate, which belongs in a Secret."""
        return self.flag.startswith("--ssl-")


def check_paths(server: ExportedServer, *, mounted: bool = True) -> None:
    """Raise LegroomError for relative paths in flags and, if paths are `mounted`, for those with a colon."""
    models = [server.model] if server.local_model else []
    relative = [("the model", path) for path in models if not path.startswith("/")]
    for phrase in _flags_that_may_hold_paths(server):
        relative += [(phrase.flag, path) for path in _possible_paths(phrase) if _is_relative_path(phrase, path)]
    for what, path in relative:
        where = "is a path from where the command runs, and the exported server starts elsewhere"
        hint = f"name the absolute path, like {Path(path).expanduser().absolute()}"
        raise LegroomError(f"{what} {path} {where}", hint)
    for path in (*models, *(named.path for named in named_paths(server))):
        if mounted and ":" in path:
            raise LegroomError(f"the path {path} has a colon, and volumes are written with one", "rename it")


def named_paths(server: ExportedServer) -> tuple[NamedPath, ...]:
    """Paths in flags that a container must mount: existing ones and --download-dir, without the model's folder."""
    by_path: dict[str, NamedPath] = {}
    for phrase in _flags_that_may_hold_paths(server):
        for path in _absolute_paths(phrase, server):
            there = Path(path)
            if path in _OF_THE_IMAGE or not (path_exists(there) or phrase.flag == _DOWNLOADS):
                continue
            folder = not there.is_file()
            by_path.setdefault(path, NamedPath(phrase.flag, path, folder, folder and phrase.flag in _WRITTEN))
    kept = []
    for named in by_path.values():
        parents = (each for each in by_path.values() if each.path != named.path and _is_under(named.path, each.path))
        if not any(parent.writable >= named.writable for parent in parents):
            kept.append(named)
    return tuple(kept)


def unmounted_paths_remark(server: ExportedServer) -> Iterator[str]:
    """A sentence about paths in flags that no volume provides."""
    mounted = named_paths(server)
    paths = [path for phrase in _flags_that_may_hold_paths(server) for path in _absolute_paths(phrase, server)]
    left = [path for path in dict.fromkeys(paths) if not any(_is_under(path, mount.path) for mount in mounted)]
    if left:
        yield (
            f"Flags name {', '.join(left)}, and no volume here brings that into the container: it is not on the "
            "machine this was written on, or it is a folder of the image. What the image lacks needs a volume."
        )


def _flags_that_may_hold_paths(server: ExportedServer) -> list[Phrase]:
    """The command's flags with their values, without those that never name a file."""
    return [phrase for phrase in server.phrases if phrase.flag.partition(".")[0] not in _NO_PATHS]


def _absolute_paths(phrase: Phrase, server: ExportedServer) -> Iterator[str]:
    """The absolute paths in a flag's value that lie outside the model's folder."""
    for path in _possible_paths(phrase):
        if path.startswith("/") and not (server.local_model and _is_under(path, server.model)):
            yield path.rstrip("/")


def _possible_paths(phrase: Phrase) -> Iterator[str]:
    """Texts in a flag's value that may be paths: `/a`, the `/b` of `x=/b`, or strings inside JSON."""
    for value in phrase.values:
        if value.startswith(("{{", "{%")) or "\n" in value:
            continue  # a template, written out
        if value.startswith(("{", "[")):
            yield from _json_texts(value)
        elif value.startswith("/"):
            yield value
        else:
            name, joined, path = value.partition("=")
            yield path if joined else name


def _json_texts(value: str) -> Iterator[str]:
    """The strings with a slash anywhere in a JSON value; none where the value is not JSON."""
    try:
        waiting: list[Any] = [json.loads(value)]
    except (ValueError, RecursionError):
        return
    while waiting:
        part = waiting.pop()
        if isinstance(part, str) and "/" in part:
            yield part
        elif isinstance(part, dict):
            waiting += reversed(part.values())
        elif isinstance(part, list):
            waiting += reversed(part)


def _is_relative_path(phrase: Phrase, path: str) -> bool:
    """Whether the flag takes paths and `path` is relative to the working folder or `~`."""
    if phrase.flag.partition(".")[0] not in _FROM_HERE or not path or path.startswith("/"):
        return False
    return path.startswith(("./", "../", "~/")) or path_exists(Path(path))


def _is_under(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


_MOST_BYTES = 900_000  # A ConfigMap holds at most 1 MiB; larger files are mounted from the node.
_OBJECTS = (("configmap", "files", False), ("secret generic", "certificates", True))
"""The kubectl type, the name suffix and the privacy of the objects that hold files."""


@dataclass(frozen=True, slots=True)
class PodFiles:
    """How a pod gets the files and folders that flags name."""

    mounts: list[dict[str, Any]]
    volumes: list[Any]
    commands: list[str]
    """Head comments with the kubectl commands that create the ConfigMap and the Secret of small files."""
    on_node: list[str]
    """Folders and large files, which no ConfigMap or Secret can hold."""


def pod_files(server: ExportedServer, namespace: str | None = None) -> PodFiles:
    """A pod's mounts and volumes for paths in flags: small files by ConfigMap and Secret, others from the node."""
    where = f" --namespace {namespace}" if namespace else ""
    paths, files = named_paths(server), PodFiles([], [], [], [])
    small = [path for path in paths if not path.folder and Path(path.path).stat().st_size <= _MOST_BYTES]
    for what, name, private in _OBJECTS:
        by_key: dict[str, str] = {}
        for path in (named.path for named in small if named.private == private):
            key = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).name).lstrip(".") or "file"
            while key in by_key:
                key = f"other-{key}"
            by_key[key] = path
            files.mounts.append({"name": name, "mountPath": path, "subPath": key, "readOnly": True})
        if by_key:
            made = f"{server.name}-{name}"
            source = {"secret": {"secretName": made}} if private else {"configMap": {"name": made}}
            files.volumes.append({"name": name, **source})
            words = " ".join(f"--from-file={shlex.quote(f'{key}={path}')}" for key, path in by_key.items())
            files.commands.append(f"Its {name}: kubectl create {what} {made}{where} {words}")
    for number, named in enumerate(path for path in paths if path not in small):
        files.on_node.append(named.path)
        files.mounts.append({"name": f"node-{number}", "mountPath": named.path, "readOnly": not named.writable})
        kind = "File" if not named.folder else "DirectoryOrCreate" if named.writable else "Directory"
        volume = {"name": f"node-{number}", "hostPath": {"path": named.path, "type": kind}}
        files.volumes.append(Commented(f"{named.flag} names it, so it must exist on the node.", volume))
    return files


def model_mounts(server: ExportedServer) -> list[dict[str, Any]]:
    """The container's read-only mount of the model's folder at the same path; empty for a model of the Hub."""
    return [{"name": "model", "mountPath": server.model, "readOnly": True}] if server.local_model else []


def model_volumes(server: ExportedServer) -> list[Any]:
    """The pod's volume of the model's folder on the node; empty for a model of the Hub."""
    volume = {"name": "model", "hostPath": {"path": server.model}}
    return [Commented("The model is a folder of the node.", volume)] if server.local_model else []
