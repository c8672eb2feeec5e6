"""File and network access of a call: commands open what their user names, remote requests open nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from legroom.records import dataclass, field


@dataclass(frozen=True, slots=True)
class GivenModel:
    config: Mapping[str, Any]
    """Its config.json."""
    checkpoint_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Isolation:
    """No file or address that a request names is opened."""

    models: Mapping[str, GivenModel] = field(default_factory=dict)


_ISOLATION: ContextVar[Isolation | None] = ContextVar("isolation", default=None)


@contextmanager
def isolated(models: Mapping[str, GivenModel] | None = None) -> Iterator[None]:
    """Within the context, a model name means one of `models` or a bundled one, and no named file is read."""
    token = _ISOLATION.set(Isolation(models or {}))
    try:
        yield
    finally:
        _ISOLATION.reset(token)


def isolation() -> Isolation | None:
    """The isolation of the current call; None where files and the Hub may be read."""
    return _ISOLATION.get()


def is_local_model(model: str) -> bool:
    """Whether a model's name means a folder or file of this machine rather than an id on the Hub."""
    if model.startswith(("/", ".", "~")) or "\\" in model or ".." in model:
        return True
    return isolation() is None and Path(model).exists()
