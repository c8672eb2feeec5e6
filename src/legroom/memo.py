"""A cache of results keyed by object identity and values."""

from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakSet

_Result = TypeVar("_Result")


class Memo(Generic[_Result]):
    """Cached results. Large objects are `owners`, which are compared by identity; they are referenced with the result,
    so that their `id` is not reused."""

    _all: ClassVar["WeakSet[Memo[Any]]"] = WeakSet()

    def __init__(self, most: int = 4096) -> None:
        self._all.add(self)
        self._most = most
        self._known: dict[tuple[object, ...], tuple[tuple[object, ...], _Result]] = {}

    def get(self, owners: tuple[object, ...], key: tuple[object, ...], compute: Callable[[], _Result]) -> _Result:
        """The result of `compute()`, once per `key` and `owners` (compared by identity); a full cache is cleared."""
        whole = (*map(id, owners), *key)
        found = self._known.get(whole)
        if found is None:
            if len(self._known) >= self._most:
                self._known.clear()
            found = self._known[whole] = (owners, compute())
        return found[1]

    @classmethod
    def forget_everything(cls) -> None:
        """Clear every cache of the process, called between requests of a long-running server."""
        for memo in cls._all:
            memo._known.clear()
