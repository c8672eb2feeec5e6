"""Small models for the tests of this room."""

from __future__ import annotations

from dataclasses import replace

from legroom.facts.gpus import Gpu
from legroom.facts.model import Attention, Dense, Experts, LatentAttention, Layer, Modality, Model, StateSpace
from legroom.units import GIB

ATTENTION = Attention(heads=32, kv_heads=8, head_dim=128, v_head_dim=128)
DENSE = Dense(4096, 14336)
LLAMA = Model(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    dtype="bfloat16",
    hidden_size=4096,
    vocab_size=128256,
    max_position_embeddings=131072,
    layers=(Layer(ATTENTION, DENSE),) * 32,
)
SHORT = replace(LLAMA, max_position_embeddings=8192)
MOE = replace(LLAMA, architecture="MixtralForCausalLM", layers=(Layer(ATTENTION, Experts(4096, 14336, 8, 2)),) * 4)
HYBRID = replace(
    LLAMA,
    architecture="BambaForCausalLM",
    layers=(Layer(ATTENTION, DENSE), Layer(StateSpace("mamba2", (("state_size", 128),)), DENSE)) * 4,
)
MAMBA = replace(
    LLAMA, architecture="MambaForCausalLM", layers=(Layer(StateSpace("mamba1", (("state_size", 16),)), None),) * 4
)
SPARSE = replace(
    LLAMA,
    architecture="DeepseekV32ForCausalLM",
    layers=(Layer(LatentAttention(128, 512, 1536, 128, 64, 128, index_heads=64, index_head_dim=128), DENSE),) * 4,
)
CHUNKED = replace(
    LLAMA, architecture="Llama4ForConditionalGeneration", layers=(Layer(replace(ATTENTION, chunk=8192), DENSE),) * 4
)
BERT = replace(
    LLAMA,
    architecture="BertModel",
    dtype="float32",
    is_pooling=True,
    max_position_embeddings=512,
    layers=(Layer(replace(ATTENTION, causal=False), DENSE),) * 4,
)
WHISPER = replace(LLAMA, architecture="WhisperForConditionalGeneration", encoder_layers=(Layer(ATTENTION, DENSE),) * 2)
VISION = replace(SHORT, modalities=(Modality("image", 1024, 4096, 24, 16, 10**8, 2048),))

H100 = Gpu("NVIDIA H100 80GB HBM3", int(79.1 * GIB), compute_capability=(9, 0))
A100 = Gpu("NVIDIA A100-SXM4-80GB", int(79.2 * GIB), compute_capability=(8, 0))
A10 = Gpu("NVIDIA A10", int(22.1 * GIB), compute_capability=(8, 6))
B200 = Gpu("NVIDIA B200", int(178.3 * GIB), compute_capability=(10, 0))
T4 = Gpu("Tesla T4", int(14.6 * GIB), compute_capability=(7, 5))
MI300 = Gpu("AMD Instinct MI300X", int(191.7 * GIB), compute_capability=(9, 4), vendor="amd")
