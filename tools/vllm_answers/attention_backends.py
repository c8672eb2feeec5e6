"""What each attention backend takes on a card, and the order of preference."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from typing import Any, get_args

from vllm_answers.partial_config import Partial

CAPABILITIES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
HEAD_SIZES = (32, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 320, 512, 576)
LATENT_MODELS = {
    "deepseek": {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512},
    "glm": {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512},
    "small": {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "kv_lora_rank": 256},
    "no_rope": {"qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "kv_lora_rank": 512},
}
"""The shapes of latent attention that backends tell apart: DeepSeek's, GLM-5's, MiniCPM3's, and one without rope."""


def backends_of_card(capability: str) -> dict[str, Any]:
    import torch
    from vllm.config.cache import CacheDType
    from vllm.platforms.cuda import _get_backend_priorities
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    card = DeviceCapability(*map(int, capability.split(".")))
    kv_dtypes = get_args(CacheDType)
    found = {}
    for member in AttentionBackendEnum:
        try:
            with contextlib.redirect_stdout(sys.stderr), _on_meta_device():
                found[member.name] = _facts(member.get_class(), card, kv_dtypes, torch)
        except Exception as error:
            # A backend of another vendor, or a tag without a class.
            print(f"{member.name}: {error}", file=sys.stderr)
    accepted = inspect.signature(_get_backend_priorities.__wrapped__).parameters
    order = {}
    for kind, asked in _ORDERS.items():
        if all(name in accepted for name in asked):
            names = _get_backend_priorities(device_capability=card, **asked)
            order[kind] = [member.name for member in names if member.name in found]
    return {"backends": found, "order": order}


def _on_meta_device() -> Any:
    """Tensors that a module makes on "cuda" when it is imported go to the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = torch.device("meta")
            return func(*args, **kwargs)

    return OnMeta()


_OTHER_VENDORS = ("ROCM", "XPU", "CPU", "AMX")
_ORDERS: dict[str, dict[str, Any]] = {
    "plain": {"use_mla": False},
    "mm_prefix": {"use_mla": False, "use_mm_prefix": True},
    "mla": {"use_mla": True},
    "mla_few_heads": {"use_mla": True, "num_heads": 16},
    "mla_quantized_cache": {"use_mla": True, "kv_cache_dtype": "fp8"},
}


def _facts(backend: Any, card: Any, kv_dtypes: tuple[str, ...], torch: Any) -> dict[str, Any]:
    """What a backend takes on this card; one key a reason of `validate_configuration`."""
    _set_model(LATENT_MODELS["deepseek"])
    runs = backend.supports_compute_capability(card)
    return {
        "mla": backend.is_mla(),
        "sparse": backend.is_sparse(),
        "runs": runs,
        "dtypes": [name for name in ("float16", "bfloat16", "float32") if backend.supports_dtype(getattr(torch, name))],
        "head_sizes": _ranges([size for size in range(1, 1025) if backend.supports_head_size(size)]),
        "kv_cache_dtypes": [name for name in kv_dtypes if backend.supports_kv_cache_dtype(name)],
        "block_sizes": [size for size in (1, 8, 16, 32, 64, 128, 256) if backend.supports_block_size(size)][:1],
        "sinks": _answer(backend, "supports_sink"),
        "mm_prefix": _answer(backend, "supports_mm_prefix"),
        "sliding_window": _answer(backend, "supports_sliding_window", default=True),
        "non_causal": _answer(backend, "supports_non_causal"),
        "kv_connector": _answer(backend, "supports_kv_connector", default=True),
        "prefill_context_parallel": _answer(backend, "supports_pcp", default=None),
        "decode_context_parallel": _answer(backend, "supports_dcp", default=_returns_lse(backend)),
        "attention_types": [
            kind
            for kind in ("decoder", "encoder", "encoder_only", "encoder_decoder")
            if backend.supports_attn_type(kind)
        ],
        "refused_combinations": _combinations(backend, card, kv_dtypes, torch) if runs else [],
    }


def _answer(backend: Any, name: str, default: bool | None = False) -> bool | None:
    return bool(getattr(backend, name)()) if hasattr(backend, name) else default


def _returns_lse(backend: Any) -> bool | None:
    """Releases without `supports_dcp` ask the implementation for the softmax sums that DCP merges."""
    try:
        return bool(backend.get_impl_cls().can_return_lse_for_decode)
    except Exception as error:
        print(f"{backend.__name__}: {error}", file=sys.stderr)
        return None


def _combinations(backend: Any, card: Any, kv_dtypes: tuple[str, ...], torch: Any) -> list[dict[str, Any]]:
    """Where `supports_combination` refuses: rows of equal answers, each with the KV dtypes that are refused."""
    taken = [name for name in kv_dtypes if backend.supports_kv_cache_dtype(name)]
    heads = [size for size in HEAD_SIZES if backend.supports_head_size(size)]
    shapes = list(LATENT_MODELS) if backend.is_mla() else [""]
    rows: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for shape in shapes:
        _set_model(LATENT_MODELS.get(shape, {}))
        for head in heads:
            for sink in (False,) if backend.is_mla() else (False, True):
                for prefix in (False,) if backend.is_mla() else (False, True):
                    for dtype in taken:
                        given = {
                            "head_size": head,
                            "dtype": torch.bfloat16,
                            "kv_cache_dtype": dtype,
                            "block_size": None,
                            "use_mla": backend.is_mla(),
                            "has_sink": sink,
                            "use_sparse": backend.is_sparse(),
                            "use_mm_prefix": prefix,
                            "device_capability": card,
                        }
                        accepted = inspect.signature(backend.supports_combination).parameters
                        reason = backend.supports_combination(**{k: v for k, v in given.items() if k in accepted})
                        if reason:
                            row = rows.setdefault((reason.partition(", got")[0], shape, sink, prefix), {})
                            row.setdefault(dtype, []).append(head)
    merged: list[dict[str, Any]] = []
    for (reason, shape, sink, prefix), by_dtype in rows.items():
        groups: dict[tuple[int, ...], list[str]] = {}
        for dtype, sizes in by_dtype.items():
            groups.setdefault(tuple(sizes), []).append(dtype)
        for sizes, names in groups.items():
            row = {"reason": reason, "shape": shape, "sinks": sink, "mm_prefix": prefix}
            row["head_sizes"] = [] if list(sizes) == heads else list(sizes)
            row["kv_cache_dtypes"] = [] if names == taken else names
            merged.append(row)
    return merged


def _set_model(widths: dict[str, int]) -> None:
    """Make a model of these widths vLLM's current one: some backends read them."""
    import vllm.config.vllm as holder

    text = types.SimpleNamespace(index_topk=2048, **widths)
    heads = {"get_num_attention_heads": lambda *_: 32, "get_num_kv_heads": lambda *_: 8}
    model = Partial(hf_text_config=text, hf_config=text, get_head_size=lambda: 128, **heads)
    parallel = Partial(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    attention = Partial(flash_attn_version=None, use_non_causal=False, backend=None)
    parts = {"model_config": model, "parallel_config": parallel, "attention_config": attention}
    holder._current_vllm_config = Partial(**parts, cache_config=Partial(cache_dtype="auto"))


def _ranges(sizes: list[int]) -> list[list[int]]:
    """[first, last, step] of numbers with equal gaps: [[8, 256, 8]]; a lone number is [n, n, 1]."""
    found: list[list[int]] = []
    for size in sizes:
        if found and (found[-1][0] == found[-1][1] or size - found[-1][1] == found[-1][2]):
            first, last, _ = found[-1]
            found[-1] = [first, size, size - last]
        else:
            found.append([size, size, 1])
    return found


def by_backend(by_capability: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One entry a backend that runs on some card; a value that depends on the card is {"of": [[cards, value]]}."""
    backends: dict[str, Any] = {}
    for name in by_capability["9.0"]["backends"]:
        answers = {card: answer["backends"].get(name) for card, answer in by_capability.items()}
        running = {card: facts for card, facts in answers.items() if facts and facts["runs"]}
        if not running or name.startswith(_OTHER_VENDORS):
            continue
        # On a card without the backend only that it does not run matters.
        stand_in = next(iter(running.values())) | {"runs": False}
        full = {card: running.get(card, stand_in) for card in answers}
        keys = next(iter(running.values()))
        groups = {key: _grouped({card: facts[key] for card, facts in full.items()}) for key in keys}
        backends[name] = {key: rows[0][1] if len(rows) == 1 else {"of": rows} for key, rows in groups.items()}
    kinds = by_capability["9.0"]["order"]
    orders = {kind: _grouped({card: a["order"][kind] for card, a in by_capability.items()}) for kind in kinds}
    return {"order": orders, "backends": backends}


def _grouped(values: dict[str, Any]) -> list[list[Any]]:
    """[[capabilities, value]]: the capabilities that share a value."""
    groups: list[list[Any]] = []
    for capability, value in values.items():
        row = next((row for row in groups if row[1] == value), None)
        if row is None:
            groups.append([[capability], value])
        else:
            row[0].append(capability)
    return groups
