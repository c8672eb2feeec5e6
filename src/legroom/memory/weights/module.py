"""One matrix of a layer on one rank, and how the work is divided."""

from __future__ import annotations

from legroom.errors import LegroomError
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Module:
    """A matrix (or a stack of `copies` of them) on one rank; `inputs` 0 makes a vector."""

    part: str
    """The line of the working it belongs to: attention, feed-forward, experts, norms ..."""
    name: str
    outputs: int
    inputs: int = 0
    bias: bool = False
    copies: int = 1
    shards: tuple[str, ...] = ()
    """The checkpoint's names of what vLLM fuses here; empty: the module's own name."""
    quantizable: bool = False
    dtype: str = ""
    """Empty: the model's dtype."""
    whole_inputs: int = 0
    """Inputs before a row-parallel split, where group scales or g_idx depend on it."""
    slices: tuple[int, ...] = ()
    """Outputs of each part that adapters treat on its own; empty: one part."""

    @property
    def elements(self) -> int:
        """Of the weight alone."""
        return self.copies * self.outputs * max(self.inputs, 1)


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the work is divided."""

    tensor: int = 1
    expert: int = 1
    """Over how many ranks whole experts are spread; 1: they are not."""
    expert_slices: int = 1
    """Into how many slices every expert is cut where they are not spread."""


def share(total: int, ranks: int, what: str, sizes: str = "--tensor-parallel-size") -> int:
    """An equal share, or a clear refusal: vLLM asserts that it divides."""
    if total % ranks:
        raise LegroomError(
            f"{what} {total} does not divide over {ranks} GPUs ({sizes})", f"use a {sizes} that divides {total}"
        )
    return total // ranks
