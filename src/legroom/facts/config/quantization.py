"""The `Quantization` of a config.json's `quantization_config`: one reader per method."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.model import Quantization

Config = Mapping[str, Any]
LINEAR_ATTENTION = "re:.*linear_attn.*"
"""The module pattern of gated delta nets."""


def quantization(config: Config) -> Quantization | None:
    """The quantization of a checkpoint's config.json; None where unquantized, LegroomError for an unknown method."""
    keys = ("quantization_config", "compression_config")
    sections = (text.get(key) for text in _text_configs(config) for key in keys)
    section = next((section for section in sections if isinstance(section, Mapping) and section), None)
    if section is None:
        return None
    method = _method_name(section)
    reader = _READERS.get(method)
    if reader is None:
        hint = f"methods known: {', '.join(sorted(_READERS))}"
        raise LegroomError(f"quantization method {method!r} is not known", hint)
    scheme = _with_expert_dtype(reader(section), config, section)
    is_listed = scheme.rules or scheme.mean_bits or set(scheme.ignored) - {"lm_head"}
    has_delta_nets = any(text.get("linear_num_value_heads") for text in _text_configs(config))
    if scheme.weight_bits != 4 or scheme.method in ("bitsandbytes", "gguf") or is_listed or not has_delta_nets:
        return scheme
    # A 4-bit config that lists no unquantized modules: by the weights of published starts, gated delta nets with
    # experts leave `linear_attn` at 16 bits (three of four checkpoints), dense ones quantize it (four of six).
    kept = (LINEAR_ATTENTION,) if any(text.get("num_experts") for text in _text_configs(config)) else ()
    return replace(scheme, ignored=(*scheme.ignored, *kept), list_assumed=True)


def _with_expert_dtype(scheme: Quantization, config: Config, section: Config) -> Quantization:
    """The scheme with 4-bit routed experts if `expert_dtype` in the config or its quantization section is fp4."""
    default = "fp4" if config.get("model_type") == "deepseek_v4" else None
    if scheme.method != "fp8" or "fp4" not in (config.get("expert_dtype", default), section.get("expert_dtype")):
        return scheme
    nvfp4 = str(section.get("moe_quant_algo")).upper() == "NVFP4"
    experts = _MODELOPT["NVFP4"] if nvfp4 else Quantization("mxfp4", 4, 32, scale_bits=8, number="float")
    return replace(scheme, experts_bits=4, rules=(*scheme.rules, ("experts", experts)))


def online_quantization(method: str) -> Quantization | None:
    """The scheme of `--quantization METHOD` on an unquantized checkpoint; None where the method cannot do that."""
    return _ONLINE.get(method)


def _text_configs(config: Config) -> list[Config]:
    """The config itself and its nested `text_config` or `llm_config`."""
    return [config, *(config[k] for k in ("text_config", "llm_config") if isinstance(config.get(k), Mapping))]


def _method_name(section: Config) -> str:
    """The quantization method in lower case, deduced where `quant_method` is missing; empty where unknown."""
    method = str(section.get("quant_method") or "").lower()
    if not method:
        if "quant_algo" in section:
            return "modelopt"
        if "config_groups" in section:
            return "compressed-tensors"
        if section.get("load_in_4bit") or section.get("load_in_8bit"):
            return "bitsandbytes"
        if "quantization" in section:
            return "modelopt"
    return {"marlin": "gptq", "gptq_marlin": "gptq", "awq_marlin": "awq"}.get(method, method)


def _int_or_default(section: Config, *names: str, default: int) -> int:
    """The first of the section's fields `names` that is a number, else `default`."""
    values = (section.get(name) for name in names)
    return next((int(v) for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)), default)


def _unquantized_modules(section: Config, *names: str) -> tuple[str, ...]:
    """The modules kept unquantized: the first of the section's fields `names` that is a list; empty without one."""
    values = (section.get(name) for name in names)
    return next((tuple(map(str, value)) for value in values if isinstance(value, (list, tuple)) and value), ())


def _group_size(size: int) -> int | None:
    """The group size; None for -1 or 0, which mean no groups."""
    return size if size > 0 else None


def _block(value: Any) -> tuple[int, int] | None:
    """(rows, columns) that share a scale; None where the field is no pair of positive whole numbers."""
    sizes = value if isinstance(value, (list, tuple)) else ()
    rows, columns = sizes if len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes) else (0, 0)
    return (rows, columns) if rows else None


def _awq_scheme(section: Config) -> Quantization:
    """The scheme of an AWQ quantization_config."""
    return Quantization(
        "awq",
        _int_or_default(section, "bits", "w_bit", default=4),
        _group_size(_int_or_default(section, "group_size", "q_group_size", default=128)),
        zero_point=bool(section.get("zero_point", True)),
        ignored=_unquantized_modules(section, "modules_to_not_convert"),
        quantizes_lm_head=bool(section.get("lm_head", False)),
    )


def _gptq_scheme(section: Config) -> Quantization:
    """The scheme of a GPTQ quantization_config, with its per-module rules (`dynamic`)."""
    base = Quantization(
        "gptq",
        _int_or_default(section, "bits", default=4),
        _group_size(_int_or_default(section, "group_size", default=128)),
        # GPTQ checkpoints always have zero points; vLLM loads them even where the kernel drops them.
        zero_point=not section.get("sym", True),
        act_order=bool(section.get("desc_act", False)),
        ignored=_unquantized_modules(section, "modules_to_not_convert"),
        quantizes_lm_head=bool(section.get("lm_head", False)),
    )
    dynamic = section.get("dynamic")
    if isinstance(dynamic, Mapping) and dynamic:
        skipped = tuple("re:" + str(k)[2:] for k in dynamic if str(k).startswith("-:"))
        rules = tuple(
            (
                "re:" + str(k).removeprefix("+:"),
                replace(
                    base,
                    weight_bits=_int_or_default(v, "bits", default=base.weight_bits),
                    group_size=_group_size(_int_or_default(v, "group_size", default=base.group_size or -1)),
                ),
            )
            for k, v in dynamic.items()
            if not str(k).startswith("-:") and isinstance(v, Mapping) and v
        )
        return replace(base, ignored=base.ignored + skipped, rules=rules)
    return base


def _fp8_scheme(section: Config) -> Quantization:
    """The scheme of an FP8 quantization_config, per tensor or in blocks."""
    static = str(section.get("activation_scheme", "dynamic")) == "static"
    return Quantization(
        "fp8",
        8,
        block=_block(section.get("weight_block_size")),
        scale_bits=8 if str(section.get("scale_fmt", "")) == "ue8m0_packed" else 32,
        dynamic_activations=not static,
        static_activations=static,
        ignored=_unquantized_modules(section, "ignored_layers", "modules_to_not_convert"),
        number="float",
        strategy="block" if section.get("weight_block_size") else "tensor",
    )


def _weights_scheme(group: Config, method: str) -> Quantization:
    """The scheme of one group of a compressed-tensors config, by its `weights` and `input_activations`."""
    weights = group.get("weights") or {}
    acts = group.get("input_activations") or None
    size = weights.get("group_size")
    strategy = str(weights.get("strategy") or ("group" if size and int(size) > 0 else "tensor"))
    number = str(weights.get("type") or "int")
    bits = _int_or_default(weights, "num_bits", default=8)
    return Quantization(
        method,
        bits,
        group_size=int(size) if size and int(size) > 0 else None,
        block=_block(weights.get("block_structure")) if strategy == "block" else None,
        zero_point=not weights.get("symmetric", True),
        scale_bits=8 if bits == 4 and number == "float" else (32 if acts and bits == 8 else 16),
        dynamic_activations=bool(acts and acts.get("dynamic")),
        static_activations=bool(acts and not acts.get("dynamic")),
        number=number,
        strategy=strategy,
        act_order=str(weights.get("actorder") or "") in ("group", "dynamic"),
    )


def _compressed_tensors_scheme(section: Config) -> Quantization:
    """The scheme of a compressed-tensors config, with a rule for each target where its groups differ."""
    groups = section.get("config_groups") or {}
    values = list(groups.values()) if isinstance(groups, Mapping) else list(groups)
    schemes = [(group, _weights_scheme(group, "compressed-tensors")) for group in values if group.get("weights")]
    ignored = _unquantized_modules(section, "ignore")
    kv = section.get("kv_cache_scheme")
    kv_dtype = "fp8" if isinstance(kv, Mapping) and kv.get("type") == "float" else None
    if not schemes:
        return Quantization("compressed-tensors", 16, ignored=("re:.*",), kv_cache_dtype=kv_dtype)
    first_group, first = schemes[0]
    rules = tuple((str(target), scheme) for group, scheme in schemes for target in group.get("targets") or ("Linear",))
    if len(schemes) > 1 and any(target != "Linear" for target, _ in rules):
        return replace(first, ignored=ignored, kv_cache_dtype=kv_dtype, rules=rules, targets=())
    targets = tuple(str(t) for t in first_group.get("targets") or ("Linear",))
    mean_bits = float(section.get("mean_bits") or 0)
    return replace(first, ignored=ignored, kv_cache_dtype=kv_dtype, targets=targets, mean_bits=mean_bits)


_float8 = partial(Quantization, weight_bits=8, number="float", scale_bits=32)
_MODELOPT: dict[str, Quantization] = {
    "FP8": _float8("modelopt", strategy="tensor", static_activations=True),
    "FP8_PER_CHANNEL_PER_TOKEN": _float8("modelopt", strategy="channel", dynamic_activations=True),
    "FP8_PB_WO": _float8("modelopt", block=(128, 128), strategy="block", dynamic_activations=True),
    "NVFP4": Quantization(
        "modelopt_fp4", 4, 16, number="float", strategy="group", static_activations=True, scale_bits=8
    ),
    "MXFP8": Quantization(
        "modelopt_mxfp8", 8, 32, number="float", strategy="group", dynamic_activations=True, scale_bits=8
    ),
    "W4A16_NVFP4": Quantization("modelopt_fp4", 4, 16, number="float", strategy="group", scale_bits=8),
    "W4A16_AWQ": Quantization("modelopt", 4, 128, number="int", strategy="group"),
}


def _modelopt_scheme(section: Config) -> Quantization:
    """The scheme of a ModelOpt config: FP8, NVFP4 or mixed; LegroomError for an unknown algorithm."""
    inner = section.get("quantization") if isinstance(section.get("quantization"), Mapping) else section
    assert inner is not None
    algo = str(inner.get("quant_algo") or "NVFP4").upper()
    ignored = _unquantized_modules(inner, "exclude_modules", "ignore")
    kv = inner.get("kv_cache_quant_algo")
    kv_scheme = inner.get("kv_cache_scheme")
    kv_dtype = "fp8" if kv == "FP8" or (isinstance(kv_scheme, Mapping) and kv_scheme.get("num_bits") == 8) else None
    if algo == "MIXED_PRECISION":
        return _mixed_precision_scheme(inner, ignored, kv_dtype)
    if algo not in _MODELOPT:
        raise LegroomError(f"modelopt algorithm {algo!r} is not known", f"known: {', '.join(_MODELOPT)}")
    unlisted = algo == "NVFP4" and not ignored
    if unlisted:
        # Every published checkpoint lists its unquantized modules, attention among them.
        ignored = ("lm_head", "re:.*(self_attn|linear_attn).*")
    scheme = replace(_MODELOPT[algo], ignored=ignored, kv_cache_dtype=kv_dtype, list_assumed=unlisted)
    size = inner.get("group_size")
    return replace(scheme, group_size=int(size)) if scheme.group_size and isinstance(size, int) and size > 0 else scheme


def _mixed_precision_scheme(section: Config, ignored: tuple[str, ...], kv_dtype: str | None) -> Quantization:
    """ModelOpt's MIXED_PRECISION by its list of layers, else FP8 for attention and NVFP4; `ignored`: unquantized."""
    layers = section.get("quantized_layers")
    rules: list[tuple[str, Quantization]] = []
    if isinstance(layers, Mapping):
        for name, how in layers.items():
            algo = str(how.get("quant_algo") if isinstance(how, Mapping) else how).upper()
            if algo in _MODELOPT:
                rules.append((str(name), _MODELOPT[algo]))
    groups = section.get("config_groups")
    if not rules and isinstance(groups, Mapping):
        for group in groups.values():
            scheme = _weights_scheme(group, "modelopt")
            scheme = _MODELOPT["FP8"] if scheme.weight_bits == 8 else replace(scheme, method="modelopt_fp4")
            rules.extend((str(target), scheme) for target in group.get("targets") or ())
    unlisted = not rules
    if unlisted:
        # The list is in another file: such checkpoints have attention in FP8 and the rest in NVFP4.
        rules = [("re:.*(self_attn|linear_attn).*", _MODELOPT["FP8"]), ("Linear", _MODELOPT["NVFP4"])]
    base = Quantization("modelopt_mixed", 8, number="float", strategy="tensor", targets=(), rules=tuple(rules))
    return replace(base, ignored=ignored, kv_cache_dtype=kv_dtype, list_assumed=unlisted)


def _mxfp4_scheme(section: Config) -> Quantization:
    """The scheme of an MXFP4 checkpoint, such as gpt-oss."""
    return Quantization(
        "mxfp4",
        4,
        32,
        scale_bits=8,
        ignored=_unquantized_modules(section, "modules_to_not_convert"),
        number="float",
        # vLLM's gpt-oss loader quantizes the experts only.
        targets=("experts",),
    )


def _bitsandbytes_scheme(section: Config) -> Quantization:
    """The scheme of a bitsandbytes config: 4 or 8 bits."""
    eight = bool(section.get("load_in_8bit"))
    ignored = _unquantized_modules(section, "llm_int8_skip_modules")
    if eight:
        return Quantization("bitsandbytes", 8, None, scale_bits=32, ignored=ignored, number="int", strategy="channel")
    return Quantization("bitsandbytes", 4, 64, scale_bits=32, ignored=ignored, number="float", strategy="group")


def _auto_round_scheme(section: Config) -> Quantization:
    """The AWQ or GPTQ scheme by the packing format of an AutoRound checkpoint."""
    packing = str(section.get("packing_format") or section.get("backend") or "")
    base = _awq_scheme(section) if "awq" in packing else _gptq_scheme(section)
    return replace(base, ignored=_unquantized_modules(section, "modules_to_not_convert"))


_EXPERTS_INT8 = Quantization("experts_int8", 8, strategy="channel", targets=("experts",), online=True)
"""The experts alone in 8 bits, quantized while loading."""

_READERS: dict[str, Callable[[Config], Quantization]] = {
    "awq": _awq_scheme,
    "gptq": _gptq_scheme,
    **dict.fromkeys(("fp8", "deepseek_v4_fp8"), _fp8_scheme),
    "compressed-tensors": _compressed_tensors_scheme,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), _modelopt_scheme),
    **dict.fromkeys(("mxfp4", "gpt_oss_mxfp4"), _mxfp4_scheme),
    "bitsandbytes": _bitsandbytes_scheme,
    "gguf": lambda s: Quantization("gguf", _int_or_default(s, "bits", default=4), 32, quantizes_lm_head=True),
    **dict.fromkeys(("auto-round", "inc"), _auto_round_scheme),
    "experts_int8": lambda section: _EXPERTS_INT8,
    "fbgemm_fp8": lambda s: _float8(
        "fbgemm_fp8",
        strategy="channel",
        dynamic_activations=True,
        ignored=_unquantized_modules(s, "modules_to_not_convert"),
    ),
}

_ONLINE: dict[str, Quantization] = {
    "fp8": _float8("fp8", strategy="tensor", dynamic_activations=True, online=True),
    "bitsandbytes": replace(_bitsandbytes_scheme({}), online=True),
    "experts_int8": _EXPERTS_INT8,
    "ptpc_fp8": _float8("ptpc_fp8", strategy="channel", dynamic_activations=True, online=True),
    "mxfp4": replace(_mxfp4_scheme({}), online=True),
}
