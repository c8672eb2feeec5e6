"""One matrix of a model on one rank, and the parallel sizes that divide it."""

from collections.abc import Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix (or a stack of `copies` of them) on one rank; `inputs` 0 makes a vector."""

    part: str
    """The term of the weights that it counts to: attention, feed-forward, experts, norms ..."""
    name: str
    outputs: int
    inputs: int = 0
    bias: bool = False
    copies: int = 1
    shards: tuple[str, ...] = ()
    """The checkpoint's names of the matrices that vLLM fuses here; empty: the module's own name."""
    quantizable: bool = False
    dtype: str = ""
    """Empty: the model's dtype."""
    whole_inputs: int = 0
    """Inputs before a row-parallel split, where group scales or g_idx depend on it."""
    slices: tuple[int, ...] = ()
    """Outputs of each fused part, which gets a LoRA adapter of its own; empty: one part."""

    @property
    def elements(self) -> int:
        """Elements of the weight without its bias."""
        return self.copies * self.outputs * max(self.inputs, 1)


def projection(name: str, outputs: int, inputs: int, bias: bool = False, **fields: Any) -> Module:
    """A quantizable matrix of an attention or recurrent layer; `fields`: further fields of `Module`."""
    return Module("attention", name, outputs, inputs, bias, quantizable=True, **fields)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The parallel sizes of the weights."""

    tensor: int = 1
    expert: int = 1
    """Ranks that whole experts are distributed over; 1: they are not."""
    expert_slices: int = 1
    """Slices of every expert where whole experts are not distributed."""
    redundant_experts: int = 0
    """Copies of busy experts that load balancing adds to each layer."""


def share(total: int, ranks: int, thing: str, flags: str = "--tensor-parallel-size") -> int:
    """`total` divided by `ranks`; if it does not divide, a LegroomError that names the thing and its flags."""
    if total % ranks:
        hint = f"use a {flags} that divides {total}"
        raise LegroomError(f"{thing} {total} does not divide over {ranks} GPUs ({flags})", hint)
    return total // ranks


def config_number(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    """The config's field `name` as an integer; `default` where it is missing or not a number."""
    value = config.get(name)
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default
