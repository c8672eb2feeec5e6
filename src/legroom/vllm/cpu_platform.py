"""What vLLM's CPU platform decides otherwise than a GPU, where it bears on the KV cache."""

from __future__ import annotations

from dataclasses import replace

from legroom.vllm.args import ServeArgs

BLOCK_SIZE = 128
"""Tokens of a block on the CPU where nobody says otherwise (V1)."""
STATE_DTYPE = "float32"
"""What recurrent states are kept in where nobody says otherwise: 0.32 resets it on a CPU with AVX-512 BF16."""


def on_cpu(args: ServeArgs) -> ServeArgs:
    """The flags as the CPU platform completes them; there are no CUDA graphs, so none limit the sequences."""
    return replace(
        args,
        block_size=args.block_size or BLOCK_SIZE,
        mamba_ssm_cache_dtype=args.mamba_ssm_cache_dtype or STATE_DTYPE,
        enforce_eager=True,
    )
