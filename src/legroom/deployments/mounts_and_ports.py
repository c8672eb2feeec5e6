"""What a container has from its host: mounted paths and published ports."""

import re
from typing import Literal

from legroom.deployments.source_text import Place
from legroom.records import dataclass


@dataclass(frozen=True)
class Mount:
    """A path in a container that is not part of its image."""

    path: str
    holds: Literal["volume", "host", "empty"] = "volume"
    """`empty`: an emptyDir, which goes with its pod."""
    is_read_only: bool = False


@dataclass(frozen=True)
class PublishedPort:
    """A port of a container that its host forwards."""

    port: str
    place: Place
    is_open: bool = True
    """Whether it listens on other addresses than the host's own."""


def mount_of(text: str) -> Mount:
    """The mount of `source:target[:ro]`, of `type=bind,target=...`, or at a bare path."""
    if "=" in text.partition(",")[0]:
        fields = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
        target = fields.get("target") or fields.get("dst") or fields.get("destination") or ""
        return Mount(target, "host" if fields.get("type") == "bind" else "volume")
    source, _, rest = re.sub(r"\$\{[^}]*\}|^[A-Za-z]:(?=[/\\])", "$", text).partition(":")  # also `C:\\models`
    path, _, mode = rest.partition(":")
    holds: Literal["host", "volume"] = "host" if source.startswith(("/", ".", "~", "$")) else "volume"
    return Mount(path or source, holds, "ro" in mode.split(","))


def published_port(text: str, place: Place) -> PublishedPort:
    """The container's port in `[address:][port:]port[/tcp]`, open unless the address is a loopback one."""
    *host, port = text.partition("/")[0].rsplit(":", 2)
    return PublishedPort(port, place, len(host) < 2 or not host[0].startswith(("127.", "localhost", "[::1]")))
