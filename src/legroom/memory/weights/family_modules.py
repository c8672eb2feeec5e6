"""Modules of single families: per-layer inputs (Gemma-3n, Gemma-4 E), AltUp and Laurel (Gemma-3n), hyper-connections
(DeepSeek-V4); and kernel workspaces that are allocated during loading and count as weights."""

from collections.abc import Iterator, Mapping
from typing import Any

from legroom.facts.model import Model, Quantization, latent
from legroom.memory.weights.module import Module, config_number, share
from legroom.memory.weights.storage import StorageContext
from legroom.units import MIB, cdiv, round_up
from legroom.vllm.args import EngineSettings


def _layer_input_width(config: Mapping[str, Any]) -> int:
    """hidden_size_per_layer_input: 256 by default in Gemma-3n, 0 in other families."""
    return config_number(config, "hidden_size_per_layer_input", 256 if config_number(config, "altup_num_inputs") else 0)


def model_extras(config: Mapping[str, Any], hidden: int, layers: int, tp: int) -> Iterator[Module]:
    """Modules outside the layers that only some families have, such as per-layer embeddings, on one of `tp` ranks."""
    width = _layer_input_width(config)
    if width:
        rows = round_up(config_number(config, "vocab_size_per_layer_input", 262144), 64) // tp
        yield Module("embeddings", "embed_tokens_per_layer", rows, layers * width)
        yield Module("embeddings", "per_layer_model_projection", share(layers * width, tp, "the layer inputs"), hidden)
        yield Module("norms", "per_layer_projection_norm", width)
    copies = config_number(config, "hc_mult")
    if copies:
        yield Module("hyper-connections", "hc_head_fn", copies, copies * hidden, dtype="float32")
        yield Module("hyper-connections", "hc_head_base", copies, dtype="float32")
        yield Module("hyper-connections", "hc_head_scale", 1, dtype="float32")
    if config.get("model_type") == "zamba2":
        wide, inner = (
            share(config_number(config, name), tp, name) for name in ("attention_hidden_size", "intermediate_size")
        )
        shapes = ((3 * wide, 2 * hidden), (hidden, wide), (2 * inner, hidden), (hidden, inner), (3 * hidden, 1))
        for _ in range(config_number(config, "num_mem_blocks", 1)):
            yield from (Module("shared blocks", "shared_transformer", *shape) for shape in shapes)
    streams = config_number(config, "altup_num_inputs")
    for number in range(2 * (streams - 1) if streams else 0):
        yield Module("embeddings", f"altup_projection{number}", share(hidden, tp, "the hidden size"), hidden)


def _hyper_connections(config: Mapping[str, Any], hidden: int) -> list[Module]:
    """DeepSeek-V4's hyper-connections of a layer (`hidden`: its width), one per sublayer; empty without `hc_mult`."""
    copies = config_number(config, "hc_mult")
    if not copies:
        return []
    rows = (2 + copies) * copies
    connection = [
        Module("hyper-connections", "hc_fn", rows, copies * hidden, dtype="float32"),
        Module("hyper-connections", "hc_base", rows, dtype="float32"),
        Module("hyper-connections", "hc_scale", 3, dtype="float32"),
    ]
    return 2 * connection


def layer_extras(config: Mapping[str, Any], hidden: int, tp: int, *, is_hybrid: bool) -> list[Module]:
    """A layer's modules that only some families have, such as AltUp; `is_hybrid`: Zamba2's shared block runs too."""
    out: list[Module] = _hyper_connections(config, hidden)
    if is_hybrid and config.get("model_type") == "zamba2":  # a projection, and adapters of the shared MLP and attention
        wide, inner = (config_number(config, name) for name in ("attention_hidden_size", "intermediate_size"))
        adapted = [(hidden, 2 * inner)] + 3 * [(wide, wide)] * bool(config.get("use_shared_attention_adapter"))
        rank = config_number(config, "adapter_rank", 128)
        out.append(Module("shared blocks", "linear", hidden, hidden))
        for inputs, outputs in adapted:
            adapter = {"A": (cdiv(rank, tp), inputs), "B": (outputs // tp, rank)}
            out += [Module("shared blocks", name, *shape) for name, shape in adapter.items()]
    width = _layer_input_width(config)
    if width:
        out += [
            Module("feed-forward", "per_layer_input_gate", width, hidden),
            Module("feed-forward", "per_layer_projection", hidden, width),
            Module("norms", "post_per_layer_input_norm", hidden),
        ]
    streams = config_number(config, "altup_num_inputs")
    if streams:
        rank = share(config_number(config, "laurel_rank", 64), tp, "laurel_rank")
        out += [
            Module("feed-forward", "altup.correct_output_scale", hidden, dtype="float32"),
            Module("feed-forward", "altup.correction_coefs", streams, streams),
            Module("feed-forward", "altup.prediction_coefs", streams * streams, streams),
            Module("feed-forward", "altup.modality_router", streams, hidden),
            Module("norms", "altup.router_norm", hidden),
            Module("feed-forward", "laurel.linear_left", rank, hidden),
            Module("feed-forward", "laurel.linear_right", hidden, rank),
            Module("norms", "laurel.post_laurel_norm", hidden),
        ]
    return out


_DEEP_GEMM_BYTES = 32 * MIB
_FLASHINFER_MLA_BYTES = 128 * MIB


def workspace(name: str, size_bytes: int) -> Module:
    """A workspace of this many bytes as a module, which makes it part of the weights' allocations."""
    return Module("workspace", name, size_bytes // 4, dtype="float32")


def before_layers(scheme: Quantization | None, context: StorageContext) -> list[Module]:
    """DeepGEMM's workspace, allocated before the layers of FP8 checkpoints (0.20+, not method `fp8`); else empty."""
    eight_bit_inputs = scheme is not None and scheme.number == "float" and scheme.weight_bits == 8
    # The `fp8` method imports DeepGEMM before vLLM measures loading.
    if eight_bit_inputs and scheme is not None and scheme.method != "fp8" and _has_deep_gemm(context):
        return [workspace("DeepGEMM", _DEEP_GEMM_BYTES)]
    return []


def attention_workspaces(model: Model, settings: EngineSettings, context: StorageContext) -> list[Module]:
    """Workspaces of attention: FlashInfer's (MLA, 0.11.1 to 0.24), DeepGEMM's (MLA or FP8 KV), the indexer's."""
    latents = latent(layer.mixer for layer in model.distinct_layers)
    out: list[Module] = []
    release = settings.release
    # A module-level buffer of the backend: 0.11.1 imports every candidate, 0.25 allocates it lazily.
    if latents and context.vendor == "nvidia" and release.at_least("0.11.1") and release.before("0.25.0"):
        out.append(workspace("FlashInfer MLA", _FLASHINFER_MLA_BYTES))
    if _has_deep_gemm(context) and (latents or settings.kv_cache_dtype.startswith("fp8")):
        out.append(workspace("DeepGEMM", _DEEP_GEMM_BYTES))
    chosen = model.config.get("index_topk")
    if isinstance(chosen, int) and any(mixer.index_head_dim for mixer in latents):
        # All sparse layers share one topk_indices buffer.
        out.append(workspace("picked tokens", 4 * settings.max_num_batched_tokens * chosen))
    return out


def _has_deep_gemm(context: StorageContext) -> bool:
    """Whether importing DeepGEMM allocates its workspace: 0.20 to 0.26; the version of 0.32 does not (measured)."""
    shipped = context.release.at_least("0.20.0") and context.release.before("0.27.0")
    return context.vendor == "nvidia" and context.capability[0] in (9, 10) and shipped
