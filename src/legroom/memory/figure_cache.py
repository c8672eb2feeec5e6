"""A cache for figures: a search computes the same figure for thousands of settings that differ in other flags. A
setting that is not part of the cache key is removed from the settings that the cached function receives. A new setting
is part of every key by default, and a function that reads a removed setting raises."""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, NoReturn, Protocol, TypeVar

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.memo import Memo
from legroom.vllm.args import EngineSettings, ServeArgs

_Result = TypeVar("_Result")
_Result_co = TypeVar("_Result_co", covariant=True)
_Record = TypeVar("_Record", EngineSettings, ServeArgs)
_model_results: Memo[Any] = Memo()


class _Removed:
    """The value of a setting that is not part of the cache key; using it raises."""

    def _refuse(self, *_: object) -> NoReturn:
        """Raises TypeError: a cached figure read a setting that its `Inputs` leave out of the cache key."""
        raise TypeError("this setting is not part of the cache key of the figure (memory/figure_cache.py)")

    __bool__ = __eq__ = __len__ = __iter__ = __str__ = __format__ = _refuse
    __hash__ = object.__hash__


_REMOVED = _Removed()


class Inputs:
    """The settings that a group of figures depends on: all of EngineSettings and ServeArgs except `left_out`."""

    def __init__(self, *left_out: str) -> None:
        settings, given = EngineSettings.__dataclass_fields__, ServeArgs.__dataclass_fields__
        if unknown := set(left_out) - settings.keys() - given.keys():
            raise ValueError(f"there are no such settings: {unknown}")
        self._left_out = dict.fromkeys((name for name in settings if name in left_out), _REMOVED)
        self._given_left_out = dict.fromkeys((name for name in given if name in left_out), _REMOVED)
        kept = {name: str(field.type) for name, field in given.items() if name not in left_out}
        self._settings = attrgetter(*(name for name in settings if name not in left_out and name != "given"))
        self._given = attrgetter(*(name for name, kind in kept.items() if "Mapping" not in kind))
        self._given_mappings = attrgetter(*(name for name, kind in kept.items() if "Mapping" in kind))
        self._recent: dict[int, tuple[EngineSettings, EngineSettings]] = {}
        """The narrowed settings of the last few settings: a plan computes all figures of one before the next."""
        self._narrowed: Memo[EngineSettings] = Memo()
        self.results: Memo[Any] = Memo()

    def of(self, settings: EngineSettings) -> EngineSettings:
        """The settings with `left_out` fields blanked; settings that differ in these alone give the same object."""
        recent = self._recent.get(id(settings))
        if recent is None:
            if len(self._recent) >= 64:
                self._recent.clear()
            given = settings.given
            key = (*self._settings(settings), *self._given(given), repr(self._given_mappings(given)))
            narrowed = self._narrowed.get(
                (), key, lambda: _fast_copy(settings, given=_fast_copy(given, **self._given_left_out), **self._left_out)
            )
            recent = self._recent[id(settings)] = (settings, narrowed)
        return recent[1]


def _fast_copy(record: _Record, **changes: Any) -> _Record:
    """`dataclasses.replace` without its checks, which take longer than computing most figures."""
    copy = object.__new__(record.__class__)
    copy.__dict__.update(record.__dict__, **changes)
    return copy


BUDGET = ("notes", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")
"""Settings that divide the card and change none of the parts."""
GRAPHS = (
    *("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size", "max_seq_len_to_capture"),
    "graph_estimate_applied",
)
"""Settings of CUDA graph capture, which weights, KV cache and profile run do not depend on."""
PROFILE_RUN = Inputs(*BUDGET, *GRAPHS)
"""The profile run captures no graph. Its KV cache dtype decides which kernel expands an MLA latent."""
ALL_PARTS = Inputs(*BUDGET, "max_cudagraph_capture_size")  # cudagraph_capture_sizes holds its effect


class _Figure(Protocol[_Result_co]):
    def __call__(self, model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> _Result_co: ...


def cached(inputs: Inputs) -> Callable[[_Figure[_Result]], _Figure[_Result]]:
    """A decorator that caches a function of (model, settings, gpu, pp_rank) by the settings in `inputs`."""

    def decorate(figure: _Figure[_Result]) -> _Figure[_Result]:
        """The function with its results cached."""

        @wraps(figure)
        def lookup(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> _Result:
            """The cached result for settings that agree in `inputs`, computed where there is none."""
            narrowed = inputs.of(settings)
            result: _Result = inputs.results.get(
                (model, gpu, narrowed), (figure, pp_rank), lambda: figure(model, narrowed, gpu, pp_rank)
            )
            return result

        return lookup

    return decorate


def cached_by_model(function: Callable[..., _Result], model: Model, *rest: object) -> _Result:
    """The result of `function(model, *rest)`, computed once for each model object and values of `rest`."""
    result: _Result = _model_results.get((model,), (function, *rest), lambda: function(model, *rest))
    return result
