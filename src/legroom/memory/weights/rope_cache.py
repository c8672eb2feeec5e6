"""The cos_sin_cache of rotary embeddings: buffers that vLLM counts with the weights. One table serves every layer with
the same parameters. It is computed in float32 and then cast, so building it leaves free blocks in the allocator that
later weights use."""

from collections.abc import Iterator, Mapping
from typing import Any

from legroom.facts.anatomy import Anatomy
from legroom.facts.fit import runs_on_transformers
from legroom.facts.model import Model
from legroom.memory.weights.storage import Step
from legroom.records import dataclass
from legroom.vllm.args import EngineSettings

_SCALED_FROM_ORIGINAL = {"yarn", "deepseek_yarn", "deepseek_llama_scaling"}


@dataclass(frozen=True, slots=True)
class RopeCache:
    """One table of `positions` x `dim`, built in layer `layer`. `scaled`: cos and sin are multiplied by a factor."""

    layer: int
    positions: int
    dim: int
    element_bytes: int
    scaled: bool = False
    tables: tuple[int, ...] = ()
    """LongRoPE: the lengths of the concatenated tables."""

    @property
    def bytes(self) -> int:
        """Bytes of the cos/sin table."""
        return self.positions * self.dim * self.element_bytes


def rope_caches(model: Model, anatomy: Anatomy, settings: EngineSettings, dtype_bytes: int) -> list[RopeCache]:
    """Every rotary table of the model, at the first layer that uses it; none where Transformers runs the layers."""
    if anatomy.rope == "none" or runs_on_transformers(model.model_type, settings.release):
        return []
    first: dict[tuple[str, int], int] = {}
    for index, layer in enumerate(model.layers):
        for mixer in (layer.mixer, *layer.also):
            if mixer is not None and mixer.rope_width:
                first.setdefault((mixer.rope_kind, mixer.rope_width), index)
    caches: dict[tuple[Any, ...], RopeCache] = {}
    for (kind, width), index in first.items():
        key, cache = _rope_table(model, anatomy, settings, dtype_bytes, (index, kind, width))
        caches.setdefault(key, cache)
    return [cache for cache in caches.values() for _ in range(anatomy.rope_tables)]


def _rope_parameters(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The config's rope parameters for this kind of layer; empty where it has none."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, Mapping) and rope:
            inner = rope.get(kind)
            if isinstance(inner, Mapping):
                return inner
            return {} if any(isinstance(value, Mapping) for value in rope.values()) else rope
    return {}


def _rope_table(
    model: Model, anatomy: Anatomy, settings: EngineSettings, dtype_bytes: int, where: tuple[int, str, int]
) -> tuple[tuple[Any, ...], RopeCache]:
    """(cache key, cos/sin table) of the layer `where`: (index, kind, head size); layers with equal keys share it."""
    layer, kind, head_dim = where
    config, release = model.config, settings.release
    rope = _rope_parameters(config, kind)
    local = anatomy.rope_layers == "by_type" and kind == "sliding_attention"
    # Gemma-3 and ModernBERT scale their global layers alone.
    if local and "sliding_attention" not in (config.get("rope_parameters") or {}):
        rope = {}
    rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
    dim = head_dim if kind == "latent" or rope_type == "proportional" else _rotary_dim(config, rope, head_dim, anatomy)
    length = int(config.get("max_position_embeddings") or model.max_position_embeddings)
    factor = rope.get("factor")
    scale = float(factor) if isinstance(factor, (int, float)) and not isinstance(factor, bool) and factor > 0 else 1.0
    stated = [where.get("original_max_position_embeddings") for where in (rope, config)]
    original = next((number for number in stated if isinstance(number, (int, float)) and number >= 1), None)
    tables: tuple[int, ...] = ()
    if rope_type in _SCALED_FROM_ORIGINAL:
        length = int(int(original or length) * scale)
    elif rope_type in ("linear", "dynamic"):
        length = int(length * scale)
    elif rope_type in ("longrope", "su"):
        tables = (int(original or length), length)
        length = sum(tables)
    if "mrope_section" in rope or anatomy.rope == "mrope":
        # The tables of M-RoPE are four times as long from 0.7.3 on, except those of Qwen3-VL and Qwen3.5 in 0.32.
        is_plain = release.at_least("0.32.0") and model.model_type.startswith("qwen3")
        length *= 1 if is_plain or release.before("0.7.3") else 4
    size = _element_bytes(anatomy, settings, (kind, rope_type, dim), dtype_bytes)
    scaled = rope_type in _SCALED_FROM_ORIGINAL or bool(tables)
    key = (kind if anatomy.rope_layers == "by_type" else "", length, dim, size)
    return key, RopeCache(layer, length, dim, size, scaled, tables)


def _rotary_dim(config: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int, anatomy: Anatomy) -> int:
    """How many of a head's dimensions are rotated, by the layer's rope parameters, the config or the family."""
    for name in ("rotary_dim", "rope_dim"):
        stated = rope.get(name) or config.get(name)
        if isinstance(stated, int) and not isinstance(stated, bool) and 0 < stated <= head_dim:
            return stated
    for name in ("partial_rotary_factor", "rotary_pct", "rope_pct"):
        stated = rope.get(name, config.get(name))
        if isinstance(stated, (int, float)) and not isinstance(stated, bool) and 0 < stated <= 1:
            return int(head_dim * stated)
    return int(head_dim * anatomy.rotary)


def _element_bytes(anatomy: Anatomy, settings: EngineSettings, table: tuple[str, str, int], dtype_bytes: int) -> int:
    """Bytes of an element of the table (kind, scaling, dim): 4 where it stays in float32, else `dtype_bytes`."""
    kind, rope_type, dim = table
    if anatomy.rope_dtype == "float32":
        return 4
    # DeepSeek's scaled tables stay in float32 for FlashInfer's kernel, which runs in eager mode only.
    flashinfer = kind == "latent" and rope_type in _SCALED_FROM_ORIGINAL and dim in (64, 128, 256, 512)
    return 4 if flashinfer and settings.enforce_eager and settings.release.at_least("0.10.2") else dtype_bytes


def construction(cache: RopeCache) -> Iterator[Step]:
    """The steps that build a cos/sin table, in order: a size in bytes is allocated, ~i frees the i-th allocation."""
    tables = cache.tables or (cache.positions,)
    count = 0
    built: list[int] = []
    for positions in tables:
        half = positions * cache.dim // 2 * 4
        yield from (4 * positions, half)  # positions, frequencies
        start, parts = count, [count, count + 1]
        count += 2
        for _ in range(2):  # cos, sin
            yield half
            count += 1
            if cache.scaled:
                yield from (half, ~(count - 1))
                count += 1
            parts.append(count - 1)
        yield 2 * half
        yield from (~part for part in (parts[1], parts[2], parts[3], start))
        if cache.tables:
            yield from (positions * cache.dim * cache.element_bytes, ~count)
            count += 1
        built.append(count)
        count += 1
    if cache.tables or cache.element_bytes != 4:
        yield cache.bytes
        yield from (~part for part in built)
