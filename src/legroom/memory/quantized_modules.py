"""Which scheme a module is stored in: what a checkpoint ignores, and what it stores otherwise than the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from legroom.facts.quantization import Quantization
from legroom.memory.weight_modules import Module

_ALIASES = {
    "self_attn": ("self_attn", "attn", "mixer", "attention"),
    "linear_attn": ("linear_attn",),
    "mlp": ("mlp", "block_sparse_moe", "feed_forward", "mixer", "ffn", "moe"),
    "mixer": ("mixer", "mamba"),
}
"""The paths that families use for what legroom calls self_attn and mlp."""
_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers", "backbone.layers", "layers")


@dataclass(frozen=True, slots=True)
class Patterns:
    """Module name patterns, sorted by how they match."""

    exact: frozenset[str]
    """Names from `layers.` on, or whole names."""
    words: tuple[tuple[str, ...], ...]
    """Dotted parts that appear anywhere in a name."""
    globs: tuple[str, ...]
    regexes: tuple[re.Pattern[str], ...]

    def match(self, name: str) -> bool:
        """`name` starts at `layers.N.`."""
        if name in self.exact:
            return True
        parts = tuple(name.split("."))
        for depth in range(2, len(parts)):
            if ".".join(parts[:depth]) in self.exact:
                return True
        if any(_contains(parts, words) for words in self.words):
            return True
        return (
            any(
                any(fnmatchcase(full, glob) for glob in self.globs) or any(rx.match(full) for rx in self.regexes)
                for full in (f"{prefix}{name.removeprefix('layers')}" for prefix in _PREFIXES)
            )
            if self.globs or self.regexes
            else False
        )


def _contains(parts: tuple[str, ...], words: tuple[str, ...]) -> bool:
    size = len(words)
    return any(parts[i : i + size] == words for i in range(len(parts) - size + 1))


@lru_cache(maxsize=256)
def patterns(names: tuple[str, ...]) -> Patterns:
    """Sort patterns once; a checkpoint may list tens of thousands."""
    exact, words, globs, regexes = set(), [], [], []
    for name in names:
        if name.startswith("re:"):
            regexes.append(re.compile(name[3:]))
        elif "*" in name or "?" in name:
            globs += [name, f"{name}.*"]
        elif "layers." in name:
            exact.add(name[name.index("layers.") :])
        else:
            words.append(tuple(name.split(".")))
    return Patterns(frozenset(exact), tuple(words), tuple(globs), tuple(regexes))


def scheme_of(module: Module, layer: int, quantization: Quantization | None) -> Quantization | None:
    """The scheme of a module in layer `layer`; None: it is not quantized."""
    if quantization is None or not module.quantizable:
        return None
    return _scheme_of(module.name, module.shards, layer, quantization)


@lru_cache(maxsize=65536)
def _scheme_of(name: str, shards: tuple[str, ...], layer: int, quantization: Quantization) -> Quantization | None:
    names = _checkpoint_names(name, shards, layer)
    ignored = patterns(quantization.ignored)
    if any(ignored.match(one) for one in names):
        return None
    for pattern, scheme in quantization.rules:
        if pattern == "Linear" or any(patterns((pattern,)).match(one) for one in names):
            return scheme
    if quantization.rules and not quantization.targets:
        return None
    targets = quantization.targets
    if targets == ("Linear",):
        return quantization
    if targets == ("experts",):
        return quantization if ".experts." in name else None
    return quantization if any(patterns(targets).match(one) for one in names) else None


def _checkpoint_names(name: str, shards: tuple[str, ...], layer: int) -> list[str]:
    head, _, rest = name.partition(".")
    leaf = rest.rpartition(".")[2]
    out: list[str] = []
    for alias in _ALIASES.get(head, (head,)):
        base = f"layers.{layer}.{alias}.{rest}"
        out.append(base)
        stem = base.removesuffix(leaf)
        if ".experts." in name:
            out += [f"{stem}0.{shard}" for shard in shards]
        else:
            out += [stem + shard for shard in shards]
    return out
