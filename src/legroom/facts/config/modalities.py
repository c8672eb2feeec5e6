"""The encoders of a multimodal config.json: transformer blocks and a projector, by family.

A family is a row of `data/towers.json`: the field names of its vision config, the structure of its blocks, its
projector, and the default encoder for a config without a vision_config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from legroom.facts import read_data
from legroom.facts.config.fields import config_defaults, nested_text_config
from legroom.facts.config.media_items import live_tensors, media_items
from legroom.facts.model import Linear, MediaItem, Modality, Split

Config = Mapping[str, Any]


def modalities(config: Config) -> tuple[Modality, ...]:
    """The encoders that vLLM loads beside the language model of this config."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):  # Qwen-Omni: vLLM serves the thinker
        config = {**config, **thinker}
    family = _family(config)
    row = families().get(family)
    text = nested_text_config(config) or config
    usual = config_defaults().get(str(text.get("model_type")), {})
    width = int(text.get("hidden_size") or text.get("n_embd") or usual.get("hidden_size") or 0)
    known: list[Modality] = []
    vision = config.get("vision_config")
    if isinstance(vision, Mapping) and vision:
        known.append(
            _tower(row or families()["_plain"], {**_defaults(row, width), **vision}, config, width, row is not None)
        )
    elif row and (config.get("has_vision") or row.get("always")):
        known.append(_tower(row, _defaults(row, width), config, width, False))
    audio = config.get("audio_config")
    if isinstance(audio, Mapping) and audio.get("d_model") and audio.get("encoder_layers"):
        known.append(_audio_tower(audio, width))
    return tuple(known)


@cache
def families() -> dict[str, dict[str, Any]]:
    """The rows of data/towers.json, aliases resolved."""
    document = read_data("towers.json")
    rows: dict[str, dict[str, Any]] = document["families"]
    return {**rows, **{alias: rows[name] for alias, name in document["aliases"].items()}}


@cache
def _live(name: str) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = read_data("towers.json")["live"][name]
    return table


def _family(config: Config) -> str:
    stated = str(config.get("model_type") or "").split(" ")[0]
    vision = config.get("vision_config")
    inner = str(vision.get("model_type") or "") if isinstance(vision, Mapping) else ""
    described = re.fullmatch(r"\S+ \((\S+) text\)", str(config.get("model_type") or ""))
    text = nested_text_config(config) or {}
    language = described.group(1) if described else str(text.get("model_type") or "")
    known = families()
    for name in (f"{stated}+{inner}", f"{stated}+{language}", stated, stated.removesuffix("_text"), inner):
        if name in known:
            return name
    return ""


def _defaults(row: Mapping[str, Any] | None, width: int) -> dict[str, Any]:
    """The family's default encoder; some families choose it by the width of their language model."""
    if row is None:
        return {}
    chosen: dict[str, Any] = dict(row.get("default", {}))
    for limit, other in row.get("default_from_width", {}).items():
        if width >= int(limit):
            chosen.update(other)
    return chosen


def _field(row: Mapping[str, Any], vision: Config, name: str, fallback: int = 0) -> int:
    for key in (row.get("names", {}).get(name), name):
        value = vision.get(key) if key else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return int(value)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
            return int(value[0])
    return fallback


def _tower(row: Mapping[str, Any], vision: Config, config: Config, width: int, exact: bool) -> Modality:
    hidden = _field(row, vision, "hidden_size", 1024)
    layers = _field(row, vision, "num_hidden_layers", 24)
    heads = _field(row, vision, "num_attention_heads", 16)
    ratio = vision.get("mlp_ratio")
    inner = _field(row, vision, "intermediate_size", int(hidden * float(ratio)) if ratio else 4 * hidden)
    layers += int(row.get("layers_offset", 0)) if "vision_feature_layer" in config or row.get("always_offset") else 0
    style = set(row.get("style", ()))
    weights = (
        *_embedding(row, vision, style, hidden),
        *_blocks(style, hidden, inner, layers, (_field(row, vision, "qkv_hidden_size", hidden), heads)),
        *_PROJECTORS[str(row.get("projector", "none"))](row, vision, config, hidden, width),
    )
    patch, merge = _field(row, vision, "patch_size", 14), int(row.get("merge", 1))
    items = media_items(row, config, patch=patch, merge=merge, image_size=_field(row, vision, "image_size", 24 * patch))
    largest = max(items, key=lambda item: item.tokens)
    frames = _field(row, vision, "temporal_patch_size", 1)
    class_token = 1 if "class_token" in style else 0
    return Modality(
        str(row.get("kind", "image")),
        hidden,
        inner,
        layers,
        heads,
        sum(weight.parameters for weight in weights if weight.name != "rotary_table"),
        largest.tokens,
        largest.patches,
        weights,
        1 + _tapped_blocks(vision),
        exact,
        items,
        live_tensors(_live(str(row.get("live", "plain")))),
        _field(row, vision, "in_channels", 3) * frames * patch * patch,
        str(row.get("raw_pixels_since", "")),
        int(row.get("chunk_bytes_per_patch", 0)),
        str(row.get("chunked_since", "")),
        _tapped_blocks(vision),
        (_field(row, vision, "image_size", 24 * patch) // patch) ** 2 + class_token if row.get("tiled") else 0,
        int(row.get("table_bytes", 0)),
        float(row.get("spread", 0.3)),
    )


def _audio_tower(audio: Config, width: int) -> Modality:
    """Whisper's encoder, as Qwen-Audio, Ultravox and Voxtral use it: two convolutions over mel bins, then blocks."""
    hidden, layers = int(audio["d_model"]), int(audio["encoder_layers"])
    inner = int(audio.get("encoder_ffn_dim") or 4 * hidden)
    heads = int(audio.get("encoder_attention_heads") or 20)
    frames = int(audio.get("max_source_positions") or 1500)
    weights = (
        Linear("conv1", hidden, 3 * int(audio.get("num_mel_bins") or 128), True),
        Linear("conv2", hidden, 3 * hidden, True),
        Linear("positions", frames, hidden),
        Linear("k_proj", hidden, hidden, count=layers),
        Linear("q_v_out_proj", hidden, hidden, True, count=3 * layers),
        Linear("norms", hidden, bias=True, count=2 * layers + 1),
        Linear("fc1", inner, hidden, True, count=layers),
        Linear("fc2", hidden, inner, True, count=layers),
        Linear("projector", width, hidden, True),
    )
    tokens = frames // 2
    parameters = sum(weight.parameters for weight in weights)
    return Modality(
        "audio",
        hidden,
        inner,
        layers,
        heads,
        parameters,
        tokens,
        frames,
        weights,
        items=(MediaItem("audio", tokens, frames),),
        moments=live_tensors(_live("whisper")),
        pixels_per_patch=2 * int(audio.get("num_mel_bins") or 128),
        spread=0.1,
    )


def _norm(name: str, size: int, style: set[str], count: int = 1) -> Linear:
    return Linear(name, size, bias="layer_norm" in style, count=count)


def _embedding(row: Mapping[str, Any], vision: Config, style: set[str], hidden: int) -> list[Linear]:
    patch = _field(row, vision, "patch_size", 14)
    channels = _field(row, vision, "in_channels", 3) * _field(row, vision, "temporal_patch_size", 1) * patch * patch
    split: Split = "out" if "split_patch" in style else ""
    out = [Linear("patch_embed", hidden, channels, "patch_bias" in style, split)]
    positions = _field(row, vision, "num_position_embeddings", 0)
    if "square_positions" in style:
        positions = (_field(row, vision, "image_size", 336) // patch) ** 2
    if "grid_positions" in style:
        positions = _field(row, vision, "init_pos_emb_height", 64) * _field(row, vision, "init_pos_emb_width", 64)
    if "table_positions" in style:
        positions = 2 * _field(row, vision, "position_embedding_size", 10240)
    if "class_token" in style:
        positions += 1
        out.append(Linear("class_embedding", hidden))
    if positions:
        out.append(Linear("position_embedding", positions, hidden))
    if "rotary_table" in style:
        heads = _field(row, vision, "num_attention_heads", 16)
        out.append(Linear("rotary_table", 8192, hidden // heads // 2))
    if "pre_norm" in style:
        out.append(_norm("pre_norm", hidden, style))
    if "post_norm" in style:
        out.append(_norm("post_norm", hidden, style))
    return out


def _blocks(style: set[str], hidden: int, inner: int, layers: int, attention: tuple[int, int]) -> list[Linear]:
    """Attention and feed-forward blocks. vLLM splits them over the tensor-parallel ranks like a decoder's."""
    qkv, heads = attention
    parts = 3 if "split_qkv" in style else 1
    out = [
        _norm("norm1", hidden, style, layers),
        _norm("norm2", hidden, style, layers),
        Linear("qkv", 3 * qkv // parts, hidden, "qkv_bias" in style, "out", parts * layers),
        Linear("proj", hidden, qkv, bias="o_bias" in style, split="in", count=layers),
    ]
    if "four_norms" in style:
        out += [_norm("norm3", hidden, style, layers), _norm("norm4", hidden, style, layers)]
    if "qk_norm" in style:
        out += [Linear("q_norm", qkv // heads, count=layers), Linear("k_norm", qkv // heads, count=layers)]
    if "layer_scale" in style:
        out += [Linear("ls1", hidden, count=layers), Linear("ls2", hidden, count=layers)]
    gates = 2 if "split_gate" in style else 1
    up = (2 * inner if "gated" in style else inner) // gates
    out.append(Linear("fc1", up, hidden, "mlp_bias" in style, "out", gates * layers))
    out.append(Linear("fc2", hidden, inner, bias="mlp_bias" in style, split="in", count=layers))
    if "unsplit" in style:
        return [Linear(w.name, w.outputs, w.inputs, w.bias, "", w.count) for w in out]
    return out


def _resampler(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    """MiniCPM-V: learned queries attend to all patches of a slice, at the language model's width."""
    return [
        Linear("resampler.query", int(config.get("query_num") or 64), width),
        Linear("resampler.kv_proj", width, hidden),
        Linear("resampler.attn", width, width, True, count=4),
        Linear("resampler.norms", width, bias=True, count=3),
        Linear("resampler.proj", width, width),
    ]


def _phi4mm(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    """The projector, separators of tiles, and the speech encoder, which is loaded beside the tower."""
    return [
        Linear("separators", 2 * hidden),
        Linear("linear_1", width, hidden, True),
        Linear("linear_2", width, width, True),
        Linear("speech", int(row["speech_parameters"])),
    ]


def _deepseek_vl2(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    """Two by two patches joined, then two linears; a row for line ends and one between the views."""
    return [
        Linear("linear_1", width, 4 * hidden, True),
        Linear("linear_2", width, width, True),
        Linear("separators", 2 * width),
    ]


Projector = Callable[[Mapping[str, Any], Config, Config, int, int], list[Linear]]


def _no_projector(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    return []


def _mlp_projector(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    bias = bool(config.get("multimodal_projector_bias", True))
    tapped = config.get("vision_feature_layer")
    inputs = hidden * (len(tapped) if isinstance(tapped, (list, tuple)) else int(row.get("projector_inputs", 1)))
    return [Linear("linear_1", width, inputs, bias, "out"), Linear("linear_2", width, width, bias, "in")]


def _merger(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    """Qwen-VL: merge squares of patches, then two linears; DeepStack adds one merger a tapped layer."""
    style = set(row.get("style", ()))
    wide = hidden * _field(row, vision, "spatial_merge_size", 2) ** 2
    out_size = _field(row, vision, "out_hidden_size", width) or width
    count = _tapped_blocks(vision)
    mergers = [("merger", 1, hidden)] + ([("deepstack", count, wide)] if count else [])
    out: list[Linear] = []
    for name, copies, normed in mergers:
        out.append(_norm(f"{name}.norm", normed, style, copies))
        out.append(Linear(f"{name}.fc1", wide, wide, True, "out", copies))
        out.append(Linear(f"{name}.fc2", out_size, wide, True, "in", copies))
    return out


def _tapped_blocks(vision: Config) -> int:
    tapped = vision.get("deepstack_visual_indexes")
    return len(tapped) if isinstance(tapped, (list, tuple)) else 0


def _patch_merger(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    """Moonshot: like the merger above, but on every rank whole."""
    wide = hidden * 4
    out = [
        Linear("projector.norm", hidden, bias=True),
        Linear("projector.fc1", wide, wide, True),
        Linear("projector.fc2", width, wide, True),
    ]
    return [*out, Linear("final_norm", hidden, bias=True)]


def _mistral3(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    merge = int(config.get("spatial_merge_size") or 2)
    bias = bool(config.get("multimodal_projector_bias", False))
    return [
        Linear("projector.norm", hidden),
        Linear("projector.merge", hidden, hidden * merge * merge),
        Linear("linear_1", width, hidden, bias, "out"),
        Linear("linear_2", width, width, bias, "in"),
    ]


def _gemma(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    return [Linear("projector", hidden, width), Linear("projector.norm", hidden)]


def _cohere(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    """Pixel shuffle, then a gated pair: the first makes two halves, the second takes their product."""
    factor = int(config.get("downsample_factor") or 2)
    inner = int(config.get("alignment_intermediate_size") or 36864)
    return [
        Linear("linear_1", inner, hidden * factor * factor, True, "out"),
        Linear("linear_2", width, inner // 2, True, "in"),
    ]


def _pixel_shuffle(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    factor = int(config.get("scale_factor") or 2)
    return [Linear("connector", width, hidden * factor * factor)]


def _linear(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    return [Linear("projector", width, hidden, True)]


def _gemma4(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    return [Linear("projector", width, hidden)]


def _minimax(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    """A projector, then a merger of two by two patches."""
    return [
        Linear("linear_1", width, hidden, True, "out"),
        Linear("linear_2", width, width, True, "in"),
        Linear("merge_1", width, 4 * width, True, "out"),
        Linear("merge_2", width, width, True, "in"),
    ]


def _internvl(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    wide = int(hidden * (1 / float(config.get("downsample_ratio") or 0.5)) ** 2)
    return [
        Linear("projector.norm", wide, bias=True),
        Linear("projector.fc1", width, wide, True),
        Linear("projector.fc2", width, width, True),
    ]


def _glm(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    """A convolution that merges two by two patches, then a gated block of the language model's width."""
    out, inner = _field(row, vision, "out_hidden_size", width), int(vision.get("intermediate_size") or 13696)
    return [
        Linear("downsample", out, 4 * hidden, True),
        Linear("merger.proj", out, out, split="out"),
        Linear("merger.norm", out, bias=True),
        Linear("merger.gate_up", 2 * inner, out, split="out"),
        Linear("merger.down", out, inner, split="in"),
    ]


def _llama4(row: Mapping[str, Any], vision: Config, config: Config, hidden: int, width: int) -> list[Linear]:
    into, out = _field(row, vision, "projector_input_dim", 4096), _field(row, vision, "projector_output_dim", 4096)
    inner = _field(row, vision, "intermediate_size", 5632)
    wide = _field(row, vision, "vision_output_dim", out)
    return [
        Linear("adapter.fc1", into, inner, split="out"),
        Linear("adapter.fc2", out, into, split="in"),
        Linear("projector", width, wide, split="out"),
    ]


_PROJECTORS: dict[str, Projector] = {
    "none": _no_projector,
    "mlp": _mlp_projector,
    "merger": _merger,
    "patch_merger": _patch_merger,
    "mistral3": _mistral3,
    "gemma": _gemma,
    "gemma4": _gemma4,
    "minimax": _minimax,
    "internvl": _internvl,
    "llama4": _llama4,
    "glm": _glm,
    "cohere": _cohere,
    "pixel_shuffle": _pixel_shuffle,
    "linear": _linear,
    "resampler": _resampler,
    "phi4mm": _phi4mm,
    "deepseek_vl2": _deepseek_vl2,
}
