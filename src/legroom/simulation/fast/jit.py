"""The kernel functions twice: plain Python, and compiled by Numba if it is installed and the trace long enough."""

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
    """Decorator that registers a kernel function for Numba (see `compiled`); the function itself stays plain Python."""
    assert isinstance(function, types.FunctionType)
    _compilable.append(function)
    return function


def numba_is_installed() -> bool:
    """Whether Numba can be imported, without importing it."""
    return importlib.util.find_spec("numba") is not None


def is_compiled_before() -> bool:
    """Whether compiled code of this source is cached on disk, so that it loads in a fraction of a second."""
    return any(cache_folder().glob("**/*.nbc"))


def cache_folder() -> Path:
    """The folder for compiled code, a different one for every version and location of this source."""
    # Numba finds compiled code by the path of its source, so the same source in another place (on a Ray node) is
    # compiled again.
    here = Path(__file__).resolve().parent
    source = b"".join((str(here).encode(), *(path.read_bytes() for path in sorted(here.glob("*.py")))))
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "legroom" / f"kernel-{hashlib.sha256(source).hexdigest()[:16]}"


def compiled(name: str) -> Callable[..., Any]:
    """The function registered under this name, compiled with all registered functions that it calls."""
    if not _compiled:
        import numba

        can_cache = True
        try:
            cache_folder().mkdir(parents=True, exist_ok=True)
            numba.config.CACHE_DIR = str(cache_folder())
        except OSError:
            can_cache = False
        # Numba looks names up in a function's globals: the copies share globals in which all of them are compiled.
        names: dict[str, Any] = {}
        for function in _compilable:
            names.update(function.__globals__)
        for function in _compilable:
            copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
            copy.__module__ = function.__module__
            copy.__qualname__ = function.__qualname__
            _compiled[function.__name__] = numba.njit(cache=can_cache)(copy)
        names.update(_compiled)
    return _compiled[name]  # type: ignore[no-any-return]
