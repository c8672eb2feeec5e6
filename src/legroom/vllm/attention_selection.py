"""The attention backend that a release selects for each kind of layer, and why none is left."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from legroom.facts.config_classes import BackendTable, LayerNeeds, backend_table
from legroom.facts.gpus import Gpu, dotted
from legroom.facts.model import LatentAttention, Model, attending, with_kv_heads
from legroom.facts.releases import Release
from legroom.vllm.args import EngineSettings, is_given, named_backend
from legroom.vllm.precision import requested_cache_dtype
from legroom.vllm.traits import masks_images, traits

_OTHER_VENDORS = ("ROCM", "XPU", "CPU", "AMX")
"""Backends that vLLM takes on any card when they are named; what they then do is not known here."""


def backend_refusals(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[tuple[str, str]]:
    """(vLLM's message, hint) if no attention backend of the release runs a kind of layer, or the chosen one lacks what
    a layer needs. Nothing for cards that are not NVIDIA's or not in the release's table."""
    table = backend_table(release, gpu.compute_capability) if gpu.vendor == "nvidia" else None
    if table is None:
        return
    if settings.prefill_context_parallel_size > 1 and traits(model).has_state and release.at_least("0.28.0"):
        yield (
            "PCP requires attention backend support, but the backend of the recurrent layers does not support PCP.",
            "leave --prefill-context-parallel-size out",
        )
    named = named_backend(settings.given, release) or _forced_backend(model, table)
    if named.startswith(_OTHER_VENDORS):
        if ("MLA" in named) != traits(model).mla:
            reason = "non-MLA not supported" if "MLA" in named else "MLA not supported"
            yield _not_valid_text(named, [reason]), "leave --attention-backend out"
        return
    if named and named not in table.names:
        use = f"Use register_backend(Backend.{named}, 'your.module.Class')"
        yield f"Backend {named} must be registered before use. {use}", "leave --attention-backend out"
        return
    for needs in dict.fromkeys(_layer_needs(settings, model, gpu, release)):
        yield from _refusal(needs, named, table, gpu, release)
        # Up to 0.28 the selected backend is asked for DCP, not the backends before the selection.
        if settings.decode_context_parallel_size > 1 and not needs.decode_context_parallel:
            chosen = named or _first_backend(table, needs)
            if chosen and table.supports(chosen, "decode_context_parallel") is False:
                yield (
                    "Decode Context Parallelism (DCP) requires attention implementations to return the softmax LSE "
                    f"during decode, but {chosen} does not.",
                    "leave --decode-context-parallel-size out, or use another --attention-backend",
                )
        if traits(model).block_sparse and release.at_least("0.25.0"):
            # Up to 0.28 the first layer's backend alone sets the block size.
            size = settings.block_size or (128 if release.at_least("0.29.0") else 16)
            small = (named or _first_backend(table, needs)) == "FLASHINFER" and gpu.compute_capability[0] != 10
            if size % 128 or small:
                hint = "leave --kv-cache-dtype and --attention-backend out" if small else "use --block-size 128"
                yield f"No common block size for {size} (MINIMAX_M3_SPARSE: [128]).", hint
    mixers = with_kv_heads(layer.mixer for layer in model.distinct_layers)
    unequal = next((mixer for mixer in mixers if mixer.v_head_dim != mixer.head_dim), None)
    has_sinks = any(mixer.sinks for mixer in mixers) or bool(model.config.get("add_swa_attention_sink_bias"))
    if unequal and has_sinks and "TRITON_ATTN_DIFFKV" not in table.names and gpu.compute_capability[0] != 9:
        yield "Sinks are only supported in FlashAttention 3", "use a Hopper card, or a later release"
    # FlashAttention 3 and 4 take keys and values of unequal widths, other cards run Triton's kernel.
    if unequal and gpu.compute_capability[0] not in (9, 10) and release.at_least("0.24.0"):
        needs = LayerNeeds(unequal.head_dim, settings.dtype, requested_cache_dtype(settings.given, model, gpu, release))
        yield from _triton_on_old_card("TRITON_ATTN", needs, gpu)


def _refusal(
    needs: LayerNeeds, named: str, table: BackendTable, gpu: Gpu, release: Release
) -> Iterator[tuple[str, str]]:
    """vLLM's message and a hint where the named backend (empty: each one) rejects the layer, or Triton runs it on a
    card too old for the KV cache dtype; otherwise nothing."""
    against = {name: table.reasons_against(name, needs) for name in ([named] if named else table.in_order(needs))}
    if named and against[named]:
        hint = f"leave --attention-backend out, or use {_first_backend(table, needs) or 'another card'}"
        yield _not_valid_text(named, against[named]), hint
        return
    chosen = next((name for name, reasons in against.items() if not reasons), None)
    if chosen is None:
        shown = ", ".join(f"{name}: [{', '.join(reasons)}]" for name, reasons in against.items())
        yield (
            f"No valid attention backend found for cuda with AttentionSelectorConfig(head_size={needs.head_size}, "
            f"dtype=torch.{needs.dtype}, kv_cache_dtype={needs.kv_cache_dtype}, block_size={needs.block_size}, "
            f"use_mla={needs.mla}, has_sink={needs.sinks}, use_sparse={needs.sparse}, "
            f"use_pcp={needs.prefill_context_parallel}, use_dcp={needs.decode_context_parallel}). "
            f"Reasons: {{{shown}}}.",
            _setting_hint(needs, table),
        )
    elif chosen in ("TRITON_ATTN", "TRITON_MLA") and release.at_least("0.24.0"):
        yield from _triton_on_old_card(chosen, needs, gpu)


def _not_valid_text(named: str, reasons: list[str]) -> str:
    """vLLM's error that the named attention backend is not valid, with its reasons."""
    return f"Selected backend AttentionBackendEnum.{named} is not valid for this configuration. Reason: {reasons}"


def _triton_on_old_card(chosen: str, needs: LayerNeeds, gpu: Gpu) -> Iterator[tuple[str, str]]:
    """(message, hint) where Triton would read FP8 KV below compute capability 8.9, or bfloat16 KV below 8.0."""
    capability = gpu.compute_capability
    for prefix, name, needed in (("fp8", "FP8", (8, 9)), ("bfloat16", "bfloat16", (8, 0))):
        if needs.kv_cache_dtype.startswith(prefix) and capability < needed:
            backend = "Triton attention backend" if chosen == "TRITON_ATTN" else "Triton MLA backend"
            other = "float16" if capability < (8, 0) else "bfloat16"
            yield (
                f"{name} KV cache is not supported by the {backend} on {gpu.name} (compute capability "
                f"{dotted(capability)}). Re-run with --kv-cache-dtype {other}.",
                f"use --kv-cache-dtype {other}",
            )


def _forced_backend(model: Model, table: BackendTable) -> str:
    """TRITON_ATTN where Gemma-4's two head sizes force it (no FlashAttention 4); else empty."""
    heads = {mixer.head_dim for mixer in with_kv_heads(layer.mixer for layer in model.distinct_layers)}
    if not model.architecture.startswith("Gemma4") or len(heads) < 2:
        return ""
    return "" if table.supports("FLASH_ATTN", "mm_prefix") else "TRITON_ATTN"


def _first_backend(table: BackendTable, needs: LayerNeeds) -> str:
    """The first backend in vLLM's order that runs the layer; empty where none does."""
    return next((name for name in table.in_order(needs) if not table.reasons_against(name, needs)), "")


def _setting_hint(needs: LayerNeeds, table: BackendTable) -> str:
    """The first single change of a setting with which some backend runs the layer, as a hint; else that none does."""
    without: tuple[tuple[str, Any, str], ...] = (
        ("prefill_context_parallel", False, "leave --prefill-context-parallel-size out"),
        ("decode_context_parallel", False, "leave --decode-context-parallel-size out"),
        ("kv_cache_dtype", "auto", "leave --kv-cache-dtype out"),
        ("block_size", None, "leave --block-size out"),
        ("dtype", "bfloat16", "use --dtype bfloat16"),
        ("dtype", "float16", "use --dtype float16"),
    )
    for name, value, hint in without:
        changed = replace(needs, **{name: value})
        if changed != needs and _first_backend(table, changed):
            return hint
    return "no backend of this release runs the model on this card"


def _layer_needs(settings: EngineSettings, model: Model, gpu: Gpu, release: Release) -> Iterator[LayerNeeds]:
    """What each distinct attention layer, also of a draft, needs of a backend; none for layers that bring their own."""
    common: dict[str, Any] = {
        "dtype": settings.dtype,
        "kv_cache_dtype": requested_cache_dtype(settings.given, model, gpu, release),
        "block_size": settings.block_size,
        "kv_connector": is_given(settings.given, "--kv-transfer-config"),
        "prefill_context_parallel": settings.prefill_context_parallel_size > 1,
        "decode_context_parallel": settings.decode_context_parallel_size > 1 and release.at_least("0.29.0"),
    }
    prefix = masks_images(settings.given, model, release)
    if model.draft is not None:
        # A draft model keeps its keys in the target's format.
        drafted = common | {"kv_cache_dtype": _draft_dtype(settings, model)}
        for draft in with_kv_heads(layer.mixer for layer in model.draft.layers):
            yield LayerNeeds(draft.head_dim, sliding_window=draft.window is not None, **drafted)
    mixers = dict.fromkeys(mixer for layer in model.distinct_layers for mixer in (layer.mixer, *layer.also))
    for mixer in attending(mixers):
        if isinstance(mixer, LatentAttention):
            if not (mixer.compress_ratio or mixer.window):
                sparse = bool(mixer.index_heads or mixer.index_head_dim)
                shape = {128: "deepseek", 192: "glm"}.get(mixer.qk_nope_head_dim, "small")
                shape = shape if mixer.qk_rope_head_dim else "no_rope"
                yield LayerNeeds(mixer.latent_width, mla=True, sparse=sparse, shape=shape, **common)
        elif not mixer.index_head_dim and mixer.v_head_dim == mixer.head_dim:
            yield LayerNeeds(
                mixer.head_dim,
                sinks=mixer.sinks,
                mm_prefix=prefix,
                attention_type="encoder_decoder" if mixer.cross else "decoder" if mixer.causal else "encoder_only",
                sliding_window=mixer.window is not None,
                **common,
            )


def _draft_dtype(settings: EngineSettings, model: Model) -> str:
    """The draft's KV cache dtype: its own, else the main model's; `auto` in place of GLM-5's default fp8_e4m3."""
    if own := (settings.given.speculative_config or {}).get("kv_cache_dtype"):
        return str(own)
    by_default = settings.given.kv_cache_dtype is None and model.architecture == "GlmMoeDsaForCausalLM"
    return "auto" if by_default and settings.kv_cache_dtype == "fp8_e4m3" else settings.kv_cache_dtype
