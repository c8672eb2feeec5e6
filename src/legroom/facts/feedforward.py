"""How a layer transforms each token: a dense block or a mixture of experts."""

from __future__ import annotations

from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Dense:
    """One feed-forward block. `gated`: SwiGLU-like, with gate and up projections."""

    hidden_size: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, with shared experts where the architecture has them."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    gated: bool = True
    bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    """The router's linear layer has a bias (gpt-oss)."""
    correction_bias: bool = False
    """One float per expert that balances the load (DeepSeek's e_score_correction_bias)."""
    router_fp32: bool = False
    """The router's weight is kept in float32 whatever the model's dtype."""
    latent_size: int = 0
    """> 0: experts work in this width instead of the hidden size (Nemotron-3, Kimi-K3)."""
    hash_vocabulary: int = 0
    """> 0: experts are looked up by token in a table of this many rows, not chosen (first layers of DeepSeek-V4)."""
    parallel_dense: Dense | None = None
    """A dense block beside the experts in the same layer (Gemma-4, Arctic)."""


FeedForward = Dense | Experts
