"""Records (frozen dataclasses) from JSON objects, by the types of their fields."""

import gc
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_Record = TypeVar("_Record")


def record_from_json(record: type[_Record], document: Any, place: str = "") -> _Record:
    """A record (dataclass) from its JSON object; a missing key or null keeps the default, unknown keys are ignored.
    ValueError names a key that is missing or of the wrong type, preceded by `place`, such as `kv.`."""
    _require(isinstance(document, Mapping), place[:-1] or "it", "a JSON object")
    values = {
        name: _value_of_type(kind, document[name], place + name)
        for name, kind in _field_types(record).items()  # type: ignore[arg-type]
        if name in document and (document[name] is not None or type(None) in _origin_and_args(kind)[1])
    }
    try:
        return record(**values)
    except TypeError as error:
        raise ValueError(f"{place[:-1] or 'it'} is not complete: {error}") from error


@cache
def _field_types(record: type) -> dict[str, Any]:
    """Field types by name, cached because resolving type hints is slow."""
    hints = get_type_hints(record)
    return {name: hints[name] for name in record.__dataclass_fields__}  # type: ignore[attr-defined]


def _value_of_type(kind: Any, value: Any, place: str) -> Any:
    """The JSON value converted to the field type `kind`; a ValueError names its `place` in the document."""
    origin, inner = _origin_and_args(kind)
    if origin is None and kind in (str, bool):
        _require(isinstance(value, kind), place, "text" if kind is str else "true or false")
    elif origin in (types.UnionType, Union):
        return None if value is None else _value_of_type(inner[0], value, place)
    if origin is Literal:
        _require(value in inner, place, f"one of {', '.join(inner)}")
    elif origin is tuple:
        _require(isinstance(value, (list, tuple)), place, "a list")
        return tuple(_value_of_type(inner[0], each, f"{place}[{number}]") for number, each in enumerate(value))
    elif origin in (dict, Mapping):
        _require(isinstance(value, Mapping), place, "a JSON object")
        return {key: _value_of_type(inner[1], each, f"{place}.{key}") for key, each in value.items()}
    elif hasattr(kind, "__dataclass_fields__"):
        return record_from_json(kind, value, f"{place}.")
    elif kind in (int, float):
        _require(is_number(value), place, "a number")
        return kind(value)
    return value


@cache
def _origin_and_args(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """typing's origin and arguments, `list[int]` as (list, (int,)); cached, as large documents ask 100,000 times."""
    return get_origin(kind), get_args(kind)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Context manager without garbage collection, which would walk a large document repeatedly while it is parsed."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def is_number(value: Any) -> bool:
    """Whether the value is a number that fits a float: no bool, NaN, infinity, or integer of hundreds of digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _require(is_valid: bool, place: str, wanted: str) -> None:
    """Unless `is_valid`, raise the ValueError "`place` is not `wanted`"."""
    if not is_valid:
        raise ValueError(f"{place} is not {wanted}")
