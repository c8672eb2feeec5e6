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
        "--chat-template",
        "--tool-parser-plugin",
        "--reasoning-parser-plugin",
        "--ssl-keyfile",
        "--ssl-certfile",
        "--ssl-ca-certs",
        "--log-config-file",
        "--tokenizer",
        "--hf-config-path",
        "--lora-modules",
        "--default-mm-loras",
        "--prompt-adapters",
        "--speculative-config",
        "--speculative-model",
        "--quantization-param-path",
        "--allowed-local-media-path",
        "--download-dir",
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

    def is_provided_by(self, other: NamedPath) -> bool:
        """Whether mounting `other`, a parent folder, already contains this path."""
        return self.path != other.path and _is_under(self.path, other.path) and other.writable >= self.writable


def check_paths(server: ExportedServer, *, mounted: bool = True) -> None:
    """Raise LegroomError for relative paths in flags, and for paths with a colon where they are `mounted`."""
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
    """Paths of flags that a container must mount: existing ones and --download-dir, without the model's."""
    by_path: dict[str, NamedPath] = {}
    for phrase in _flags_that_may_hold_paths(server):
        for path in _absolute_paths(phrase, server):
            there = Path(path)
            if path in _OF_THE_IMAGE or not (path_exists(there) or phrase.flag == _DOWNLOADS):
                continue
            folder = not there.is_file()
            by_path.setdefault(path, NamedPath(phrase.flag, path, folder, folder and phrase.flag in _WRITTEN))
    all_paths = by_path.values()
    return tuple(named for named in all_paths if not any(named.is_provided_by(other) for other in all_paths))


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
    return [line.phrase for line in server.lines if line.phrase.flag.partition(".")[0] not in _NO_PATHS]


def _absolute_paths(phrase: Phrase, server: ExportedServer) -> Iterator[str]:
    """The absolute paths in a flag's value that lie outside the model's folder."""
    for path in _possible_paths(phrase):
        if path.startswith("/") and not (server.local_model and _is_under(path, server.model)):
            yield path.rstrip("/")


def _possible_paths(phrase: Phrase) -> Iterator[str]:
    """Texts in a flag's value that may be paths: `/a`, `x=/a`, or strings inside JSON."""
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
    """Whether a flag that takes paths names one relative to the working or home folder."""
    if phrase.flag.partition(".")[0] not in _FROM_HERE or not path or path.startswith("/"):
        return False
    return path.startswith(("./", "../", "~/")) or path_exists(Path(path))


def _is_under(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


_MOST_BYTES = 900_000  # A ConfigMap holds at most 1 MiB; larger files are mounted from the node.
_OBJECTS = (("configmap", "files", False), ("secret generic", "certificates", True))
"""The kubectl type, the name suffix and the privacy of the objects that hold files."""


def _files_for_config_map(server: ExportedServer, *, private: bool) -> dict[str, NamedPath]:
    """Small enough files that flags name, by key: for a Secret where `private`, else for a ConfigMap."""
    by_key: dict[str, NamedPath] = {}
    for named in named_paths(server):
        if named.folder or named.private != private or Path(named.path).stat().st_size > _MOST_BYTES:
            continue
        key = re.sub(r"[^A-Za-z0-9._-]", "-", Path(named.path).name).lstrip(".") or "file"
        while key in by_key:
            key = f"other-{key}"
        by_key[key] = named
    return by_key


def _paths_mounted_from_node(server: ExportedServer) -> list[NamedPath]:
    """Folders and large files that the command names, which no ConfigMap or Secret can hold."""
    files = (_files_for_config_map(server, private=private).values() for private in (False, True))
    small = {named.path for by_key in files for named in by_key}
    return [named for named in named_paths(server) if named.path not in small]


def create_commands(server: ExportedServer, namespace: str | None) -> Iterator[str]:
    """Head comments with the kubectl commands that create the ConfigMap and the Secret of the files."""
    where = f" --namespace {namespace}" if namespace else ""
    for what, name, private in _OBJECTS:
        if files := _files_for_config_map(server, private=private):
            words = " ".join(f"--from-file={shlex.quote(f'{key}={named.path}')}" for key, named in files.items())
            yield f"Its {name}: kubectl create {what} {server.name}-{name}{where} {words}"


def file_mounts(server: ExportedServer) -> list[dict[str, Any]]:
    """The container's volume mounts for files and folders that flags name."""
    mounts: list[dict[str, Any]] = []
    for _, name, private in _OBJECTS:
        for key, named in _files_for_config_map(server, private=private).items():
            mounts.append({"name": name, "mountPath": named.path, "subPath": key, "readOnly": True})
    for number, named in enumerate(_paths_mounted_from_node(server)):
        mounts.append({"name": f"node-{number}", "mountPath": named.path, "readOnly": not named.writable})
    return mounts


def file_volumes(server: ExportedServer) -> list[Any]:
    """The pod's volumes for files and folders that flags name."""
    volumes: list[Any] = []
    if _files_for_config_map(server, private=False):
        volumes.append({"name": "files", "configMap": {"name": f"{server.name}-files"}})
    if _files_for_config_map(server, private=True):
        volumes.append({"name": "certificates", "secret": {"secretName": f"{server.name}-certificates"}})
    for number, named in enumerate(_paths_mounted_from_node(server)):
        kind = "File" if not named.folder else "DirectoryOrCreate" if named.writable else "Directory"
        volume = {"name": f"node-{number}", "hostPath": {"path": named.path, "type": kind}}
        volumes.append(Commented(f"{named.flag} names it, so it must exist on the node.", volume))
    return volumes


def model_mounts(server: ExportedServer) -> list[dict[str, Any]]:
    """The container's read-only mount of the model's folder at the same path; empty for a model of the Hub."""
    return [{"name": "model", "mountPath": server.model, "readOnly": True}] if server.local_model else []


def model_volumes(server: ExportedServer) -> list[Any]:
    """The pod's volume of the model's folder on the node; empty for a model of the Hub."""
    volume = {"name": "model", "hostPath": {"path": server.model}}
    return [Commented("The model is a folder of the node.", volume)] if server.local_model else []


def paths_on_node(server: ExportedServer) -> tuple[str, ...]:
    """The paths that a pod mounts from the node it runs on."""
    model = (server.model,) if server.local_model else ()
    return (*model, *(named.path for named in _paths_mounted_from_node(server)))
