"""Results that are asked for over and over: a search puts the same few questions thousands of times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakSet

_Result = TypeVar("_Result")


class Memo(Generic[_Result]):
    """Results by what they were computed from.

    Large objects are `owners`: they count by identity, which is quicker than comparing them. They are kept with the
    result, so that no other object can get their `id` while it is remembered.
    """

    _all: ClassVar[WeakSet[Memo[Any]]] = WeakSet()

    def __init__(self, most: int = 4096) -> None:
        self._all.add(self)
        self._most = most
        self._known: dict[tuple[object, ...], tuple[tuple[object, ...], _Result]] = {}

    def get(self, owners: tuple[object, ...], key: tuple[object, ...], compute: Callable[[], _Result]) -> _Result:
        """The result for these owners and this key, computed the first time. Full, it forgets everything."""
        whole = (*map(id, owners), *key)
        found = self._known.get(whole)
        if found is None:
            if len(self._known) >= self._most:
                self._known.clear()
            found = self._known[whole] = (owners, compute())
        return found[1]

    @classmethod
    def forget_everything(cls) -> None:
        """Empty every memo: for a process that stays, whose callers ask for ever other things."""
        for memo in cls._all:
            memo._known.clear()
