"""The files that a server's flags name, and a model that is a folder, as a pod is given them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.exports.deploy.paths import NamedPath, named_paths
from legroom.exports.deploy.yaml_text import Commented

if TYPE_CHECKING:
    from legroom.exports.deploy.server import ExportedServer

_MOST_BYTES = 900_000
"""A ConfigMap holds a megabyte in all; what is larger stays a file of the node."""
_OBJECTS = (("configmap", "files", False), ("secret generic", "certificates", True))
"""What holds the files of a pod: the command that makes it, its name, whether others must not read it."""


def _small(server: ExportedServer, *, private: bool) -> dict[str, NamedPath]:
    """The files that an object of the cluster holds, by their keys there."""
    by_key: dict[str, NamedPath] = {}
    for named in named_paths(server):
        if named.folder or named.private != private or Path(named.path).stat().st_size > _MOST_BYTES:
            continue
        key = re.sub(r"[^A-Za-z0-9._-]", "-", Path(named.path).name).lstrip(".") or "file"
        while key in by_key:
            key = f"other-{key}"
        by_key[key] = named
    return by_key


def _node_paths(server: ExportedServer) -> list[NamedPath]:
    small = {named.path for private in (False, True) for named in _small(server, private=private).values()}
    return [named for named in named_paths(server) if named.path not in small]


def creating(server: ExportedServer, namespace: str | None) -> Iterator[str]:
    """The commands that make the objects which the pod reads its files from."""
    where = f" --namespace {namespace}" if namespace else ""
    for what, name, private in _OBJECTS:
        if files := _small(server, private=private):
            words = " ".join(f"--from-file={shlex.quote(f'{key}={named.path}')}" for key, named in files.items())
            yield f"Its {name}: kubectl create {what} {server.name}-{name}{where} {words}"


def file_mounts(server: ExportedServer) -> list[dict[str, Any]]:
    """Where the container sees them: by the path that the flag names."""
    mounts: list[dict[str, Any]] = []
    for _, name, private in _OBJECTS:
        for key, named in _small(server, private=private).items():
            mounts.append({"name": name, "mountPath": named.path, "subPath": key, "readOnly": True})
    for number, named in enumerate(_node_paths(server)):
        mounts.append({"name": f"node-{number}", "mountPath": named.path, "readOnly": not named.writable})
    return mounts


def file_volumes(server: ExportedServer) -> list[Any]:
    """What they are mounted from."""
    volumes: list[Any] = []
    if _small(server, private=False):
        volumes.append({"name": "files", "configMap": {"name": f"{server.name}-files"}})
    if _small(server, private=True):
        volumes.append({"name": "certificates", "secret": {"secretName": f"{server.name}-certificates"}})
    for number, named in enumerate(_node_paths(server)):
        kind = "File" if not named.folder else "DirectoryOrCreate" if named.writable else "Directory"
        volume = {"name": f"node-{number}", "hostPath": {"path": named.path, "type": kind}}
        volumes.append(Commented(f"{named.flag} names it, so it must exist on the node.", volume))
    return volumes


def model_mounts(server: ExportedServer) -> list[dict[str, Any]]:
    """Where the container sees a model that is a folder."""
    return [{"name": "model", "mountPath": server.model, "readOnly": True}]


def model_volumes(server: ExportedServer) -> list[Any]:
    """What it is mounted from."""
    return [Commented("The model is a folder of the node.", {"name": "model", "hostPath": {"path": server.model}})]


def on_the_node(server: ExportedServer) -> tuple[str, ...]:
    """The paths that a pod mounts from the node it runs on."""
    model = (server.model,) if server.local_model else ()
    return (*model, *(named.path for named in _node_paths(server)))
