"""The same functions twice: as plain Python, and compiled by Numba where it is installed and the work is long enough."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
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


def compiled(name: str) -> Callable[..., Any]:
    """The compiled twin of a marked function. Its calls to other marked functions go to their twins."""
    if not _compiled:
        import numba

        # Numba looks names up in the globals of a function: the twins share globals in which all of them are compiled.
        names: dict[str, Any] = {}
        for function in _compilable:
            names.update(function.__globals__)
        for function in _compilable:
            twin = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
            twin.__module__ = function.__module__
            twin.__qualname__ = function.__qualname__
            _compiled[function.__name__] = numba.njit(cache=True)(twin)
        names.update(_compiled)
    return _compiled[name]  # type: ignore[no-any-return]
