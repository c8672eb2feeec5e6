"""What a file sets beside a container's command: time limits, probes, volumes and ports."""

from typing import Literal

from legroom.deployments.source_text import Place
from legroom.records import dataclass


@dataclass(frozen=True)
class TimeLimit:
    seconds: float
    place: Place


@dataclass(frozen=True)
class Probe:
    """A check of a container's health."""

    kind: Literal["startup", "readiness", "liveness", "health", "none"]
    """`none`: a container that has ports and no probe."""
    place: Place
    port: str = ""
    """The port of the server that it asks; empty where it may ask another container."""
    program: str = ""
    """The program that it runs inside the container."""
    path: str = ""
    """What it asks for by HTTP, where an answer of 404 fails it."""
    sends_key: bool = False
    """Whether it sends a header, which may be the server's key."""


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
