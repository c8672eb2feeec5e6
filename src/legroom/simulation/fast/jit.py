"""The same functions twice: as plain Python, and compiled by Numba where it is there and the work is long enough."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])
_compilable: list[types.FunctionType] = []
_compiled: dict[str, Any] = {}


def compilable(function: _Function) -> _Function:
    """Mark a function for `compiled`; the function itself stays plain Python."""
    assert isinstance(function, types.FunctionType)
    _compilable.append(function)
    return function


def numba_is_installed() -> bool:
    """Whether `compiled` can work, without paying for the import."""
    return importlib.util.find_spec("numba") is not None


def is_compiled_before() -> bool:
    """Whether compiled code of this very source lies on disk: then it loads in a fraction of a second."""
    return any(cache_folder().glob("**/*.nbc"))


def cache_folder() -> Path:
    """Where compiled code is kept: a folder for each state of the source, so that no old code is ever loaded.

    And for each place of it, because Numba finds by its path what it compiled: elsewhere (on a node of a Ray cluster)
    the same source would be compiled again.
    """
    here = Path(__file__).resolve().parent
    source = b"".join((str(here).encode(), *(path.read_bytes() for path in sorted(here.glob("*.py")))))
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "legroom" / f"kernel-{hashlib.sha256(source).hexdigest()[:16]}"


def compiled(name: str) -> Callable[..., Any]:
    """The compiled twin of a marked function. Its calls to other marked functions go to their twins."""
    if not _compiled:
        _make_twins()
    return _compiled[name]  # type: ignore[no-any-return]


def _make_twins() -> None:
    import numba

    keeps = _use_cache_folder(numba)
    # Numba looks names up in the globals of a function: the twins share globals in which all of them are compiled.
    names: dict[str, Any] = {}
    for function in _compilable:
        names.update(function.__globals__)
    for function in _compilable:
        twin = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
        twin.__module__ = function.__module__
        twin.__qualname__ = function.__qualname__
        _compiled[function.__name__] = numba.njit(cache=keeps)(twin)
    names.update(_compiled)


def _use_cache_folder(numba: Any) -> bool:
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    numba.config.CACHE_DIR = str(cache_folder())
    return True
