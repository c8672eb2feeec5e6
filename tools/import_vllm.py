"""Ask one vLLM release's own code what it supports, and write the answers into `facts/data/vllm/RELEASE.json`.

    PYTHON tools/import_vllm.py RELEASE --judge FOLDER [--src FOLDER] [--out src/legroom/facts/data/vllm]

PYTHON is an interpreter that has vLLM's dependencies, FOLDER of --judge holds `fakecuda.py` (a CUDA platform that
only answers questions), FOLDER of --src the `vllm` package of the release. The parts of the file:

- attention_backends: what each attention backend takes, by compute capability, and the order of preference;
- model_interfaces: what each model class implements (pipeline parallelism, LoRA, EAGLE-3, ...);
- config_fields: bounds and choices of the fields of vLLM's config classes, with their source lines;
- quantization_overrides: the values of --quantization that each kind of quantized checkpoint accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, get_args

CAPABILITIES = ("7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
HEAD_SIZES = (32, 64, 72, 80, 96, 112, 120, 128, 160, 192, 256, 320, 512, 576)
LATENT_MODELS = {
    "deepseek": {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512},
    "glm": {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512},
    "small": {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "kv_lora_rank": 256},
    "no_rope": {"qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "kv_lora_rank": 512},
}
"""The shapes of latent attention that backends tell apart: DeepSeek's, GLM-5's, MiniCPM3's, and one without rope."""
DEFAULT_CLASSES = (
    "CacheConfig",
    "CompilationConfig",
    "EPLBConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "ModelConfig",
    "MultiModalConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "OffloadConfig",
    "AttentionConfig",
)


def main() -> int:
    options = _options()
    if options.capability:
        _pretend(options, options.capability)
        json.dump(_backends(options.capability), sys.stdout)
        return 0
    if not options.only or "attention_backends" in options.only:
        by_capability = {name: _ask_in_process(options, name) for name in CAPABILITIES}
        _update(options.out, options.release, "attention_backends", _by_backend(by_capability))
    _pretend(options, "9.0")
    for name, ask in _PARTS.items():
        if not options.only or name in options.only:
            _update(options.out, options.release, name, ask())
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release")
    parser.add_argument("--judge", type=Path, required=True)
    parser.add_argument("--src", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("src/legroom/facts/data/vllm"))
    parser.add_argument("--only", action="append", help="one of the parts")
    parser.add_argument("--capability", help=argparse.SUPPRESS)
    return parser.parse_args()


def _ask_in_process(options: argparse.Namespace, capability: str) -> dict[str, Any]:
    """The backends of one capability, asked in a process of its own, because vLLM fixes its platform at import."""
    words = [sys.executable, __file__, options.release, "--judge", options.judge, "--src", options.src]
    done = subprocess.run([*map(str, words), "--capability", capability], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"capability {capability}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{capability}: {len(answer['backends'])} backends", file=sys.stderr)
    return answer


def _pretend(options: argparse.Namespace, capability: str) -> None:
    """Import vLLM under a platform that answers as a card of this capability does."""
    sys.path.insert(0, str(options.judge))
    import fakecuda

    stubs = Path(sys.prefix).parent / "stubs"
    with contextlib.redirect_stdout(sys.stderr):
        fakecuda.install(f"capability {capability}", capability, 80, str(options.src.absolute()), str(stubs))
        from vllm.utils import flashinfer

    for name in ("has_flashinfer_sm90_nope_mla", "has_flashinfer_sparse_mla_sm120"):
        setattr(flashinfer, name, lambda: True)


# ---- attention backends


def _backends(capability: str) -> dict[str, Any]:
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
        "source": _source(backend),
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
        "decode_context_parallel": _answer(backend, "supports_dcp", default=None),
        "attention_types": [
            kind
            for kind in ("decoder", "encoder", "encoder_only", "encoder_decoder")
            if backend.supports_attn_type(kind)
        ],
        "refused_combinations": _combinations(backend, card, kv_dtypes, torch) if runs else [],
    }


def _source(cls: Any) -> str:
    """file:line of a class; the module's name where the class is made at run time."""
    try:
        return f"{(inspect.getsourcefile(cls) or '').partition('/vllm/')[2]}:{inspect.getsourcelines(cls)[1]}"
    except OSError:
        return str(cls.__module__)


def _answer(backend: Any, name: str, default: bool | None = False) -> bool | None:
    return bool(getattr(backend, name)()) if hasattr(backend, name) else default


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


class _Partial(types.SimpleNamespace):
    """A config of which only some fields matter: every other one is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _set_model(widths: dict[str, int]) -> None:
    """Make a model of these widths vLLM's current one: some backends read them."""
    import vllm.config.vllm as holder

    text = types.SimpleNamespace(index_topk=2048, **widths)
    heads = {"get_num_attention_heads": lambda *_: 32, "get_num_kv_heads": lambda *_: 8}
    model = _Partial(hf_text_config=text, hf_config=text, get_head_size=lambda: 128, **heads)
    parallel = _Partial(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    attention = _Partial(flash_attn_version=None, use_non_causal=False, backend=None)
    parts = {"model_config": model, "parallel_config": parallel, "attention_config": attention}
    holder._current_vllm_config = _Partial(**parts, cache_config=_Partial(cache_dtype="auto"))


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


def _by_backend(by_capability: dict[str, dict[str, Any]]) -> dict[str, Any]:
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


# ---- model classes


_INTERFACES = {
    "supports_pp": "pipeline_parallel",
    "supports_lora": "lora",
    "supports_eagle3": "eagle3",
    "supports_mamba_prefix_caching": "mamba_prefix_caching",
    "supports_multimodal_encoder_tp_data": "encoder_data_parallel",
    "is_text_generation_model": "generates",
    "is_pooling_model": "pools",
    "is_mixture_of_experts": "mixture_of_experts",
}


class _Draft(types.SimpleNamespace):
    """A model's config, as `SpeculativeConfig.hf_config_override` turns it into the one of its MTP layers."""

    def update(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)

    def get_text_config(self) -> _Draft:
        return self


def _mtp(architecture: str, model_types: list[str]) -> list[str]:
    """`mtp` where the release runs the architecture's own MTP layers as the draft, `mtp:TYPE` where it does so for one
    of its model types, `counted_mtp` where the config must count the layers."""
    counts = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    always = [name for name in model_types if _drafts_itself(architecture, name)]
    counted = [name for name in model_types if _drafts_itself(architecture, name, **counts)]
    if len(always) == len(model_types):
        return ["mtp"]
    return [f"mtp:{name}" for name in always] or ["counted_mtp"] * bool(counted)


def _drafts_itself(architecture: str, model_type: str, **counts: int) -> bool:
    from vllm.config import speculative

    config = _Draft(architectures=[architecture], model_type=model_type, layer_types=[], **counts)
    config.text_config = config
    try:
        changed = speculative.SpeculativeConfig.hf_config_override(config)
    except Exception as error:
        print(f"{architecture}: MTP: {error}", file=sys.stderr)
        return False
    return changed.model_type in get_args(speculative.MTPModelTypes)


def _model_types() -> dict[str, list[str]]:
    """The model types of each architecture, as `facts` knows them."""
    path = Path(__file__).parent.parent / "src/legroom/facts/data/architectures.json"
    found: dict[str, list[str]] = {}
    for name, architecture in json.loads(path.read_text())["architectures"].items():
        found.setdefault(architecture, []).append(name)
    return found


def _interfaces() -> dict[str, Any]:
    """Architectures by the interfaces of their class; an architecture that cannot be imported is left out."""
    from vllm.model_executor.models import interfaces, interfaces_base, registry

    checks = {
        short: getattr(interfaces, name, None) or getattr(interfaces_base, name) for name, short in _INTERFACES.items()
    }
    model_types = _model_types()
    found: dict[str, str] = {}
    for name, model in registry.ModelRegistry.models.items():
        with contextlib.redirect_stdout(sys.stderr):
            try:
                cls = model.load_model_cls()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}"[:150], file=sys.stderr)
                continue
        words = [short for short, check in checks.items() if check(cls)]
        found[name] = " ".join(words + _mtp(name, model_types.get(name, ["no_such_type"])))
    return dict(sorted(found.items()))


# ---- fields of the config classes


def _fields() -> dict[str, Any]:
    """Bounds and choices of each field, by class: {"ge": 1}, {"choices": [...]}."""
    import vllm.config
    import vllm.config.parallel

    found: dict[str, Any] = {}
    for name in DEFAULT_CLASSES:
        cls = getattr(vllm.config, name, None) or getattr(vllm.config.parallel, name, None)
        if cls is None:
            continue
        found[name] = _fields_of(cls)
    return found | {"names": _names()}


def _names() -> dict[str, list[str]]:
    """Names that the release knows, by what they name."""
    from vllm.config import model
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return {
        "connectors": sorted(KVConnectorFactory._registry),
        "connectors_with_hybrid_manager": sorted(filter(_takes_hybrid_manager, KVConnectorFactory._registry)),
        "attention_backends": [member.name for member in AttentionBackendEnum],
        "without_float16": sorted(getattr(model, "_FLOAT16_NOT_SUPPORTED_MODELS", ())),
        "expert_methods_without_eplb": sorted(cls.__name__ for cls in _expert_methods() if not _balances_experts(cls)),
    }


def _expert_methods() -> set[Any]:
    """The classes that run quantized experts."""
    import importlib
    import pkgutil

    from vllm.model_executor.layers import quantization
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    for module in pkgutil.walk_packages(quantization.__path__, quantization.__name__ + "."):
        with contextlib.suppress(Exception), contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(module.name)
    found: set[Any] = set()
    left = [FusedMoEMethodBase]
    while left:
        found |= {*(below := left.pop().__subclasses__())}
        left += below
    return found


def _balances_experts(method: Any) -> bool:
    """Whether a class supports EPLB, on some of its kernels at least."""
    try:
        return bool(method.supports_eplb.fget(object()))
    except AttributeError:  # it asks which kernels are in use
        return True


def _fields_of(cls: Any) -> dict[str, Any]:
    from pydantic import TypeAdapter

    with contextlib.suppress(Exception):
        TypeAdapter(cls)
    file = (inspect.getsourcefile(cls) or "").partition("/vllm/")[2]
    lines, first = inspect.getsourcelines(cls)
    fields: dict[str, Any] = {}
    for name, info in getattr(cls, "__pydantic_fields__", {}).items():
        rule: dict[str, Any] = {}
        for mark in info.metadata:
            rule |= {key: getattr(mark, key) for key in ("ge", "gt", "le", "lt") if hasattr(mark, key)}
        choices = _choices(info.annotation)
        if choices:
            rule["choices"] = choices
        at = next((i for i, text in enumerate(lines) if text.strip().startswith(f"{name}:")), 0)
        fields[name] = rule | {"source": f"{file}:{first + at}"}
    return fields


def _choices(annotation: Any) -> list[Any]:
    """The values of Literal and Enum types, also inside a union; empty where the type has others too."""
    import enum
    import typing

    if annotation is type(None):
        return [None]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [*annotation.__members__]
    if typing.get_origin(annotation) is typing.Literal:
        return list(get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [_choices(part) for part in get_args(annotation)]
        return [value for part in parts for value in part] if all(parts) else []
    return []


def _takes_hybrid_manager(name: str) -> bool:
    """Whether a connector works with the hybrid KV cache manager; one that cannot be imported is taken to."""
    from vllm.distributed.kv_transfer.kv_connector import factory, v1

    try:
        return bool(v1.supports_hma(factory.KVConnectorFactory._registry[name]()))
    except Exception as error:
        print(f"{name}: {error}", file=sys.stderr)
        return True


# ---- quantization


_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "deepseek_v4": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
    "modelopt_fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "quantization": {"quant_algo": "FP8"}},
    "modelopt_nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "quantization": {"quant_algo": "NVFP4"}},
    "modelopt_mixed": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantization": {"quant_algo": "MIXED_PRECISION"},
    },
    "mxfp4": {"quant_method": "mxfp4"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "quark": {"quant_method": "quark"},
    "torchao": {"quant_method": "torchao"},
}
_MODEL_TYPES = {"deepseek_v4": "deepseek_v4", "mxfp4": "gpt_oss"}


def _overrides() -> dict[str, Any]:
    """By kind of checkpoint: the method without the flag, the flags that pass, and whether every flag does."""
    from vllm.model_executor.layers import quantization

    names = [*quantization.QUANTIZATION_METHODS, "no_such_method"]
    found: dict[str, Any] = {}
    for kind, config in _CHECKPOINTS.items():
        accepted = {name: _method_of(kind, config, name) for name in names}
        passing = [name for name in names if accepted[name]]
        every = len(passing) == len(names)
        method = _method_of(kind, config, None)
        found[kind] = {"method": method, "every_flag": every, "flags": [] if every else sorted(passing)}
    return found


def _method_of(kind: str, config: dict[str, Any], flag: str | None) -> str | None:
    """The method that the release resolves for a checkpoint; None where it refuses the flag."""
    from vllm.config import ModelConfig

    hf_config = _Partial(model_type=_MODEL_TYPES.get(kind, "llama"), quantization_config=config, architectures=[""])
    asked = _Partial(quantization=flag, hf_config=hf_config, allow_deprecated_quantization=True)
    asked.model_arch_config = _Partial(quantization_config=dict(config))
    asked._parse_quant_hf_config = lambda _: dict(config)
    try:
        ModelConfig._verify_quantization(asked)
    except ValueError as error:
        if flag is None:
            print(f"{kind}: {error}", file=sys.stderr)
        return None
    return str(asked.quantization)


_PARTS = {"model_interfaces": _interfaces, "config_fields": _fields, "quantization_overrides": _overrides}


def _update(folder: Path, release: str, part: str, answers: dict[str, Any]) -> None:
    path = folder / f"{release}.json"
    document = json.loads(path.read_text()) if path.exists() else {}
    document["source"] = f"the code of vLLM {release}, asked by tools/import_vllm.py"
    document[part] = answers
    rows = []
    for name, facts in sorted(document.items()):
        lines = (
            ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in facts.items()) if isinstance(facts, dict) else ""
        )
        rows.append(f"{json.dumps(name)}: " + (f"{{\n{lines}\n}}" if lines else json.dumps(facts)))
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
