"""Frozen dataclasses that are quick to define.

`dataclasses` compiles six functions for every frozen class when its module is imported, about a millisecond: two thirds
of the start of `legroom plan` (Python 3.11). This decorator compiles only `__init__`, when the first object is made.
`fields`, `replace`, `asdict`, `match` and type checkers treat the classes as dataclasses.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, FrozenInstanceError
from inspect import get_annotations
from operator import attrgetter
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass", "field"]

if TYPE_CHECKING:
    from dataclasses import dataclass, field
else:
    field = dataclasses.field

    def dataclass(cls=None, *, frozen=False, slots=False, **others):
        """As `dataclasses.dataclass`, but frozen classes are defined more quickly."""
        if cls is not None or not frozen or others:
            return dataclasses.dataclass(cls, frozen=frozen, slots=slots, **others)
        return lambda cls: _define_record(cls, slots)


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Has the attributes that `dataclasses` sets on a frozen class and on a plain field."""

    name: str


_PLAIN_FIELD = dataclasses.fields(_Sample)[0]._field_type  # type: ignore[attr-defined]


def _define_record(cls: type, slots: bool) -> type:
    """The class made a frozen record, with fields, lazily compiled `__init__`, comparison, hash and pickling."""
    fields = _all_fields(cls)
    methods: dict[str, Any] = {
        "__init__": _Init(cls, fields),
        "__dataclass_fields__": fields,
        "__match_args__": tuple(fields),
        "__setattr__": _refuse_assignment,
        "__delattr__": _refuse_assignment,
        "__dataclass_params__": _Sample.__dataclass_params__,  # type: ignore[attr-defined]
        **_comparison_methods(fields),
    }
    own = {name for name in ("__repr__", "__eq__", "__hash__") if cls.__dict__.get(name) is not None}
    methods = {name: value for name, value in methods.items() if name not in own}
    if slots:
        return _with_slots(cls, fields, methods)
    for name, value in methods.items():
        setattr(cls, name, value)
    for name, field_ in fields.items():
        if isinstance(cls.__dict__.get(name), Field):
            # Put a field's default back on the class; without one, delete the attribute.
            if field_.default is MISSING:
                delattr(cls, name)
            else:
                setattr(cls, name, field_.default)
    return cls


def _all_fields(cls: type) -> dict[str, Field[Any]]:
    """The fields of the base classes, then the class's own, by name."""
    fields: dict[str, Field[Any]] = {}
    for base in cls.__mro__[-1:0:-1]:
        fields |= base.__dict__.get("__dataclass_fields__", {})
    for name, annotation in get_annotations(cls).items():
        if str(annotation).startswith(("ClassVar", "typing.ClassVar")):
            continue
        given = cls.__dict__.get(name, MISSING)
        field_: Any = given if isinstance(given, Field) else dataclasses.field(default=given)
        field_.name, field_.type, field_._field_type = name, annotation, _PLAIN_FIELD
        fields[name] = field_
    return fields


class _Init:
    """A descriptor that compiles `__init__` on first access: half of the imported classes create no object."""

    def __init__(self, cls: type, fields: dict[str, Field[Any]]) -> None:
        self._cls, self._fields = cls, fields

    def __set_name__(self, owner: type, name: str) -> None:
        self._cls = owner  # the class with slots

    def __get__(self, made: Any, owner: type) -> Any:
        known: dict[str, Any] = {"_set": object.__setattr__, "_absent": MISSING}
        in_slots = {name for name in self._fields if isinstance(getattr(self._cls, name, None), MemberDescriptorType)}
        # To set an item of `__dict__` takes a third to a sixth of the time of `object.__setattr__`.
        parameters, lines = ["self"], ["    _dict = self.__dict__"] if self._fields.keys() - in_slots else []
        for name, field_ in self._fields.items():
            if field_.default is not MISSING:
                known[f"_default_{name}"] = field_.default
                parameters.append(f"{name}=_default_{name}")
            elif field_.default_factory is not MISSING:
                known[f"_make_{name}"] = field_.default_factory
                parameters.append(f"{name}=_absent")
                lines.append(f"    if {name} is _absent: {name} = _make_{name}()")
            else:
                parameters.append(name)
            lines.append(f"    _set(self, {name!r}, {name})" if name in in_slots else f"    _dict[{name!r}] = {name}")
        if hasattr(self._cls, "__post_init__"):
            lines.append("    self.__post_init__()")
        exec(f"def __init__({', '.join(parameters)}):\n" + "\n".join(lines or ["    pass"]), known)
        init: Callable[..., None] = known["__init__"]
        init.__qualname__ = f"{self._cls.__qualname__}.__init__"
        type.__setattr__(self._cls, "__init__", init)
        return init if made is None else init.__get__(made, owner)


def _comparison_methods(fields: dict[str, Field[Any]]) -> dict[str, Any]:
    """The `__eq__`, `__hash__` and `__repr__` of a record with these fields."""
    compared = _attribute_getter(name for name, field_ in fields.items() if field_.compare)
    hashed = _attribute_getter(name for name, f in fields.items() if (f.compare if f.hash is None else f.hash))
    shown = tuple(name for name, field_ in fields.items() if field_.repr)

    def equal(self: Any, other: Any) -> Any:
        """`__eq__`: equal are only records of the same class with equal compared fields."""
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def hashed_fields(self: Any) -> int:
        """`__hash__` of the fields with `hash=True`, and of compared ones that leave it open."""
        return hash(hashed(self))

    def shown_fields(self: Any) -> str:
        """`__repr__`, as dataclasses write it."""
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    return {"__eq__": equal, "__hash__": hashed_fields, "__repr__": shown_fields}


def _attribute_getter(names: Iterable[str]) -> Callable[[Any], Any]:
    """A function from a record to a tuple of these attributes, or, for a single one, to its bare value."""
    wanted = tuple(names)
    return attrgetter(*wanted) if wanted else lambda _: ()


def _with_slots(cls: type, fields: dict[str, Field[Any]], methods: dict[str, Any]) -> type:
    """A copy of the class with slots, which cannot be added to an existing class."""
    inherited = {name for base in cls.__mro__[1:] for name in getattr(base, "__slots__", ())}
    kept = {name: value for name, value in cls.__dict__.items() if name not in fields}
    kept.pop("__dict__", None)
    kept.pop("__weakref__", None)
    slots = tuple(name for name in fields if name not in inherited)
    pickled = {"__getstate__": _pickle_state, "__setstate__": _restore_state}
    made = type(cls)(cls.__name__, cls.__bases__, {**kept, **pickled, **methods, "__slots__": slots})
    made.__qualname__ = cls.__qualname__
    return made


def _refuse_assignment(self: Any, name: str, *value: Any) -> None:
    """`__setattr__` and `__delattr__` of a frozen record: always an error."""
    raise FrozenInstanceError(f"cannot {'assign to' if value else 'delete'} field {name!r}")


def _pickle_state(self: Any) -> list[Any]:
    """`__getstate__` of a record with slots: its values in the order of the fields."""
    return [getattr(self, name) for name in self.__dataclass_fields__]


def _restore_state(self: Any, state: list[Any]) -> None:
    """`__setstate__` of a record with slots."""
    for name, value in zip(self.__dataclass_fields__, state, strict=True):
        object.__setattr__(self, name, value)
