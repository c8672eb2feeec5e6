"""Bounds and choices of the fields of config classes, and the names that a release knows."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Any, get_args

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


def config_fields() -> dict[str, Any]:
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
    fields: dict[str, Any] = {}
    for name, info in getattr(cls, "__pydantic_fields__", {}).items():
        rule: dict[str, Any] = {}
        for mark in info.metadata:
            rule |= {key: getattr(mark, key) for key in ("ge", "gt", "le", "lt") if hasattr(mark, key)}
        choices = _choices(info.annotation)
        if choices:
            rule["choices"] = choices
        fields[name] = rule
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
