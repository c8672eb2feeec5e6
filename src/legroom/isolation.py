"""File and network access of a call: commands open what their user names, remote requests open nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class GivenModel:
    config: Mapping[str, Any]
    """Its config.json."""
    checkpoint_bytes: int | None = None


_GIVEN_MODELS: ContextVar[Mapping[str, GivenModel] | None] = ContextVar("given_models", default=None)


@contextmanager
def isolated(models: Mapping[str, GivenModel] | None = None) -> Iterator[None]:
    """Context manager, in which a model name means one of `models` or a bundled one, and no file is read."""
    token = _GIVEN_MODELS.set(models or {})
    try:
        yield
    finally:
        _GIVEN_MODELS.reset(token)


def given_models() -> Mapping[str, GivenModel] | None:
    """Name -> model that the current request brought along; None where files and the Hub may be read instead."""
    return _GIVEN_MODELS.get()


def is_local_model(model: str) -> bool:
    """Whether a model's name is a path here and no id on the Hub; inside `isolated` judged by spelling alone."""
    if model.startswith(("/", ".", "~")) or "\\" in model or ".." in model:
        return True
    return given_models() is None and Path(model).exists()
