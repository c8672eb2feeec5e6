"""How a pod is given the files that flags name: a ConfigMap, a Secret for keys, a folder of the node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.exports.server_files import Named, named
from legroom.exports.yaml_text import Said

if TYPE_CHECKING:
    from legroom.exports.server import Server

_MOST_BYTES = 900_000
"""A ConfigMap holds a megabyte in all; what is larger stays a file of the node."""


def _small(server: Server, *, private: bool) -> dict[str, Named]:
    """The files that an object of the cluster holds, by their keys there."""
    found: dict[str, Named] = {}
    for one in named(server):
        if one.folder or one.private != private or Path(one.path).stat().st_size > _MOST_BYTES:
            continue
        key = re.sub(r"[^A-Za-z0-9._-]", "-", Path(one.path).name).lstrip(".") or "file"
        while key in found:
            key = f"other-{key}"
        found[key] = one
    return found


def _on_the_node(server: Server) -> list[Named]:
    small = {one.path for private in (False, True) for one in _small(server, private=private).values()}
    return [one for one in named(server) if one.path not in small]


def creating(server: Server, namespace: str | None) -> Iterator[str]:
    """The commands that make the objects which the pod reads its files from."""
    where = f" --namespace {namespace}" if namespace else ""
    for what, name, private in _OBJECTS:
        if files := _small(server, private=private):
            words = " ".join(f"--from-file={shlex.quote(f'{key}={one.path}')}" for key, one in files.items())
            yield f"Its {name}: kubectl create {what} {server.name}-{name}{where} {words}"


_OBJECTS = (("configmap", "files", False), ("secret generic", "certificates", True))


def file_mounts(server: Server) -> list[dict[str, Any]]:
    """Where the container sees them: by the path that the flag names."""
    found: list[dict[str, Any]] = []
    for _, name, private in _OBJECTS:
        for key, one in _small(server, private=private).items():
            found.append({"name": name, "mountPath": one.path, "subPath": key, "readOnly": True})
    for number, one in enumerate(_on_the_node(server)):
        found.append({"name": f"node-{number}", "mountPath": one.path, "readOnly": not one.writable})
    return found


def file_volumes(server: Server) -> list[Any]:
    """What they are mounted from."""
    found: list[Any] = []
    if _small(server, private=False):
        found.append({"name": "files", "configMap": {"name": f"{server.name}-files"}})
    if _small(server, private=True):
        found.append({"name": "certificates", "secret": {"secretName": f"{server.name}-certificates"}})
    for number, one in enumerate(_on_the_node(server)):
        kind = "File" if not one.folder else "DirectoryOrCreate" if one.writable else "Directory"
        volume = {"name": f"node-{number}", "hostPath": {"path": one.path, "type": kind}}
        found.append(Said(f"{one.flag} names what must lie on the node.", volume))
    return found


def model_mounts(server: Server) -> list[dict[str, Any]]:
    """Where the container sees a model that is a folder."""
    return [{"name": "model", "mountPath": server.model, "readOnly": True}]


def model_volumes(server: Server) -> list[Any]:
    """What it is mounted from."""
    return [Said("The model lies on the node.", {"name": "model", "hostPath": {"path": server.model}})]
