"""Figures kept for as long as what they are computed from stays the same: a search asks for them thousands of times.

A rule is handed no more than its key holds: a setting that is left out of the key is taken out of the settings too.
So a new setting is part of every key by itself, and a rule that reads what its key lacks fails at once.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from legroom.memo import Memo
from legroom.vllm.args import EngineSettings, ServeArgs

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model

_Result = TypeVar("_Result")
_Record = TypeVar("_Record", EngineSettings, ServeArgs)
_of_models: Memo[Any] = Memo()
_ASKED_IN_A_ROW = 64


class _LeftOut:
    """Stands where a setting was that is no part of the key. Whatever is done with it raises."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError("this setting is no part of what the figure is cached by (memory/figure_cache.py)")

    __bool__ = __eq__ = __len__ = __iter__ = __str__ = __format__ = _refuse
    __hash__ = object.__hash__


_LEFT_OUT = _LeftOut()


class Inputs:
    """What some figures may depend on: every setting, as resolved and as given, but those that are named here."""

    def __init__(self, *left_out: str) -> None:
        settings, given = EngineSettings.__dataclass_fields__, ServeArgs.__dataclass_fields__
        if unknown := set(left_out) - settings.keys() - given.keys():
            raise ValueError(f"there are no such settings: {unknown}")
        self._left_out = dict.fromkeys((name for name in settings if name in left_out), _LEFT_OUT)
        self._given_left_out = dict.fromkeys((name for name in given if name in left_out), _LEFT_OUT)
        kept = {name: str(field.type) for name, field in given.items() if name not in left_out}
        self._settings = attrgetter(*(name for name in settings if name not in left_out and name != "given"))
        self._given = attrgetter(*(name for name, kind in kept.items() if "Mapping" not in kind))
        self._given_mappings = attrgetter(*(name for name, kind in kept.items() if "Mapping" in kind))
        self._asked: dict[int, tuple[EngineSettings, EngineSettings]] = {}
        self._narrowed: Memo[EngineSettings] = Memo()
        self.results: Memo[Any] = Memo()

    def of(self, settings: EngineSettings) -> EngineSettings:
        """The settings with everything else taken out: one object for all settings that agree in the rest."""
        # Several figures of the same settings are asked for in a row, some for the sake of others.
        asked = self._asked.get(id(settings))
        if asked is None:
            if len(self._asked) >= _ASKED_IN_A_ROW:
                self._asked.clear()
            asked = self._asked[id(settings)] = (settings, self._narrow(settings))
        return asked[1]

    def _narrow(self, settings: EngineSettings) -> EngineSettings:
        given = settings.given
        key = (*self._settings(settings), *self._given(given), repr(self._given_mappings(given)))
        return self._narrowed.get(
            (), key, lambda: _copy(settings, given=_copy(given, **self._given_left_out), **self._left_out)
        )


def _copy(record: _Record, **changes: Any) -> _Record:
    """`dataclasses.replace` without its care, which takes longer than most rules."""
    copy = object.__new__(record.__class__)
    copy.__dict__.update(record.__dict__, **changes)
    return copy


BUDGET = ("notes", "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")
"""What divides the card and changes none of the parts."""
GRAPHS = (
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "max_seq_len_to_capture",
    "graph_estimate_applied",
)
"""What is captured and how: no part of the weights, the KV cache or the profile run."""
PROFILE_RUN = Inputs(*BUDGET, *GRAPHS)
"""The profile run captures nothing. Its KV cache is empty, but decides which kernel expands a latent."""
_EVERYTHING_ELSE = Inputs(*BUDGET, "max_cudagraph_capture_size")  # the capture sizes say what became of it


def cached(
    rule: Callable[[Model, EngineSettings, Gpu, int], _Result],
    model: Model,
    settings: EngineSettings,
    gpu: Gpu,
    pp_rank: int = 0,
    inputs: Inputs = _EVERYTHING_ELSE,
) -> _Result:
    """`rule(model, settings, gpu, pp_rank)`, computed once for each of its inputs."""
    narrowed = inputs.of(settings)
    result: _Result = inputs.results.get(
        (model, gpu, narrowed), (rule, pp_rank), lambda: rule(model, narrowed, gpu, pp_rank)
    )
    return result


def cached_by_model(rule: Callable[..., _Result], model: Model, *rest: object) -> _Result:
    """`rule(model, *rest)`, computed once: for what depends on the model's structure and a few small values alone."""
    result: _Result = _of_models.get((model,), (rule, *rest), lambda: rule(model, *rest))
    return result
