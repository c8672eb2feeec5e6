"""One weight of a network as vLLM holds it: a matrix or a vector, and how tensor parallelism splits it."""

from __future__ import annotations

from typing import Literal

from legroom.records import dataclass

Split = Literal["", "out", "in"]
"""Replicated on every rank, split by outputs (column parallel) or by inputs (row parallel)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`count` equal weights of `outputs` x `inputs`; `inputs` 0 makes a vector (a norm's weight, a bias table)."""

    name: str
    outputs: int
    inputs: int = 0
    bias: bool = False
    split: Split = ""
    count: int = 1
    dtype: str = ""
    """Empty: the model's dtype."""

    @property
    def parameters(self) -> int:
        """Of the whole model, before any split."""
        return self.count * (self.outputs * max(self.inputs, 1) + (self.outputs if self.bias else 0))
