"""The encoders of a multimodal config.json: transformer blocks and a projector, by family. A family is a row of
`data/towers.json`: the field names of its vision config, the structure of its blocks, its projector, and the default
encoder for a config without a vision_config."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from legroom.facts import family_rows, read_data
from legroom.facts.config.fields import config_defaults, int_field, nested_text_config
from legroom.facts.config.media_items import media_items
from legroom.facts.model import Linear, LiveTensors, MediaItem, Modality, Split
from legroom.records import dataclass

Config = Mapping[str, Any]


def modalities(config: Config) -> tuple[Modality, ...]:
    """The encoders that vLLM loads with the language model of this config; empty for a text model."""
    thinker = config.get("thinker_config")
    if isinstance(thinker, Mapping):  # Qwen-Omni: vLLM serves the thinker
        config = {**config, **thinker}
    families = family_rows("towers.json")
    row = families.get(_tower_family(config))
    text = nested_text_config(config) or config
    usual = config_defaults().get(str(text.get("model_type")), {})
    width = int(text.get("hidden_size") or text.get("n_embd") or usual.get("hidden_size") or 0)
    known: list[Modality] = []
    vision, text_alone = config.get("vision_config"), "Llama4ForCausalLM" in str(config.get("architectures"))
    if isinstance(vision, Mapping) and vision:
        encoder = _Encoder(row or families["_plain"], {**_default_encoder(row, width), **vision}, config, width)
        known.append(_vision_tower(encoder, exact=row is not None))
    elif row and (config.get("has_vision") or (row.get("always") and not text_alone)):
        known.append(_vision_tower(_Encoder(row, _default_encoder(row, width), config, width), exact=False))
    audio = config.get("audio_config")
    if isinstance(audio, Mapping) and audio.get("d_model") and audio.get("encoder_layers"):
        known.append(_audio_tower(audio, width))
    return tuple(known)


@cache
def _live_tensors(name: str) -> tuple[LiveTensors, ...]:
    """The candidates for the peak of an encoder's forward pass: the rows of towers.json under `live` and this name."""
    return tuple(LiveTensors(**row) for row in read_data("towers.json")["live"][name])


def _tower_family(config: Config) -> str:
    """The vision-tower family of towers.json that the model config belongs to; "" if none does."""
    stated = str(config.get("model_type") or "").split(" ")[0]
    vision = config.get("vision_config")
    inner = str(vision.get("model_type") or "") if isinstance(vision, Mapping) else ""
    described = re.fullmatch(r"\S+ \((\S+) text\)", str(config.get("model_type") or ""))
    text = nested_text_config(config) or {}
    language = described.group(1) if described else str(text.get("model_type") or "")
    names = (f"{stated}+{inner}", f"{stated}+{language}", stated, stated.removesuffix("_text"), inner)
    return next((name for name in names if name in family_rows("towers.json")), "")


def _default_encoder(row: Mapping[str, Any] | None, width: int) -> dict[str, Any]:
    """The default encoder config of a family's row of towers.json, by the language model's width; {} without a row."""
    if row is None:
        return {}
    chosen: dict[str, Any] = dict(row.get("default", {}))
    for limit, other in row.get("default_from_width", {}).items():
        if width >= int(limit):
            chosen.update(other)
    return chosen


@dataclass(frozen=True, slots=True)
class _Encoder:
    """A vision encoder: its family's row, its vision config, the whole config and the language model's width."""

    row: Mapping[str, Any]
    vision: Config
    config: Config
    text_width: int

    def field(self, name: str, fallback: int = 0) -> int:
        """The vision config's number under the family's field for `name`, else under `name` (a list's first), else
        `fallback`; LegroomError for an implausible one."""
        for key in (self.row.get("names", {}).get(name), name):
            value = self.vision.get(key) if key else None
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return int_field({name: int(value)}, name, low=0)
        return fallback

    @property
    def styles(self) -> set[str]:
        """The structural traits of the encoder family, such as `class_token` or `layer_norm`."""
        return set(self.row.get("style", ()))

    @property
    def hidden(self) -> int:
        """The encoder's hidden size."""
        return self.field("hidden_size", 1024)

    @property
    def mlp_width(self) -> int:
        """The intermediate size of the encoder's MLP."""
        ratio = self.vision.get("mlp_ratio")
        return self.field("intermediate_size", int(self.hidden * float(ratio)) if ratio else 4 * self.hidden)

    @property
    def heads(self) -> int:
        """The encoder's attention heads."""
        return self.field("num_attention_heads", 16)

    @property
    def patch(self) -> int:
        """The side of a square patch in pixels."""
        return self.field("patch_size", 14)

    @property
    def patch_pixels(self) -> int:
        """Input values of one patch: channels x frames x height x width."""
        return self.field("in_channels", 3) * self.field("temporal_patch_size", 1) * self.patch**2

    @property
    def tapped_blocks(self) -> int:
        """The number of blocks whose features DeepStack adds to the last block's."""
        tapped = self.vision.get("deepstack_visual_indexes")
        return len(tapped) if isinstance(tapped, (list, tuple)) else 0

    def norm(self, name: str, size: int, count: int = 1) -> Linear:
        """`count` norms of `size` values, named `name`; with a bias where the encoder uses LayerNorm, not RMSNorm."""
        return Linear(name, size, bias="layer_norm" in self.styles, count=count)


def _vision_tower(encoder: _Encoder, exact: bool) -> Modality:
    """The vision encoder with its projector, weights and largest items; `exact`: its config and family are known."""
    row, hidden, patch = encoder.row, encoder.hidden, encoder.patch
    layers = encoder.field("num_hidden_layers", 24)
    if "vision_feature_layer" in encoder.config or row.get("always_offset"):
        layers += int(row.get("layers_offset", 0))
    projector = _PROJECTORS[str(row.get("projector", "none"))]
    weights = (*_patch_embedding(encoder), *_encoder_blocks(encoder, layers), *projector(encoder))
    image_size = encoder.field("image_size", 24 * patch)
    items = media_items(row, encoder.config, patch=patch, merge=int(row.get("merge", 1)), image_size=image_size)
    largest = max(items, key=lambda item: item.tokens)
    tile_patches = (image_size // patch) ** 2 + ("class_token" in encoder.styles)
    return Modality(
        str(row.get("kind", "image")),
        hidden,
        encoder.mlp_width,
        layers,
        encoder.heads,
        sum(weight.parameters for weight in weights if weight.name != "rotary_table"),
        largest.tokens,
        largest.patches,
        weights,
        feature_levels=1 + encoder.tapped_blocks,
        exact=exact,
        items=items,
        moments=_live_tensors(str(row.get("live", "plain"))),
        pixels_per_patch=encoder.patch_pixels,
        raw_pixels_since=str(row.get("raw_pixels_since", "")),
        chunk_bytes_per_patch=int(row.get("chunk_bytes_per_patch", 0)),
        chunked_since=str(row.get("chunked_since", "")),
        buffer_levels=encoder.tapped_blocks,
        attending_patches=tile_patches if row.get("tiled") else 0,
        table_bytes=int(row.get("table_bytes", 0)),
        spread=float(row.get("spread", 0.3)),
    )


def _audio_tower(audio: Config, width: int) -> Modality:
    """Whisper's encoder, as Qwen-Audio, Ultravox and Voxtral use it; `width`: the language model's hidden size."""
    hidden, layers = int_field(audio, "d_model"), int_field(audio, "encoder_layers")
    inner = int(audio.get("encoder_ffn_dim") or 4 * hidden)
    heads = int(audio.get("encoder_attention_heads") or 20)
    frames, bins = int(audio.get("max_source_positions") or 1500), int(audio.get("num_mel_bins") or 128)
    weights = (
        Linear("conv1", hidden, 3 * bins, True),
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
    size, items = sum(weight.parameters for weight in weights), (MediaItem("audio", tokens, frames),)
    of_item: dict[str, Any] = {"moments": _live_tensors("whisper"), "pixels_per_patch": 2 * bins, "spread": 0.1}
    return Modality("audio", hidden, inner, layers, heads, size, tokens, frames, weights, items=items, **of_item)


def _patch_embedding(encoder: _Encoder) -> list[Linear]:
    """The weights before the encoder's blocks: patch, class and position embeddings, and the outer norms."""
    style, hidden, patch, field = encoder.styles, encoder.hidden, encoder.patch, encoder.field
    split: Split = "out" if "split_patch" in style else ""
    out = [Linear("patch_embed", hidden, encoder.patch_pixels, "patch_bias" in style, split)]
    positions = field("num_position_embeddings", 0)
    if "square_positions" in style:
        positions = (field("image_size", 336) // patch) ** 2
    if "grid_positions" in style:
        positions = field("init_pos_emb_height", 64) * field("init_pos_emb_width", 64)
    if "table_positions" in style:
        positions = 2 * field("position_embedding_size", 10240)
    if "class_token" in style:
        positions += 1
        out.append(Linear("class_embedding", hidden))
    if positions:
        out.append(Linear("position_embedding", positions, hidden))
    if "rotary_table" in style:
        out.append(Linear("rotary_table", 8192, hidden // encoder.heads // 2))
    return out + [encoder.norm(name, hidden) for name in ("pre_norm", "post_norm") if name in style]


def _encoder_blocks(encoder: _Encoder, layers: int) -> list[Linear]:
    """The attention and feed-forward weights of `layers` blocks, split over tensor-parallel ranks like a decoder's."""
    style, hidden, inner = encoder.styles, encoder.hidden, encoder.mlp_width
    qkv = encoder.field("qkv_hidden_size", hidden)
    parts, gates = 3 if "split_qkv" in style else 1, 2 if "split_gate" in style else 1
    pairs = {"four_norms": ("norm3", "norm4"), "qk_norm": ("q_norm", "k_norm"), "layer_scale": ("ls1", "ls2")}
    out = [
        encoder.norm("norm1", hidden, layers),
        encoder.norm("norm2", hidden, layers),
        Linear("qkv", 3 * qkv // parts, hidden, "qkv_bias" in style, "out", parts * layers),
        Linear("proj", hidden, qkv, bias="o_bias" in style, split="in", count=layers),
    ]
    out += [encoder.norm(name, hidden, layers) for name in pairs["four_norms"] if "four_norms" in style]
    for option, size in (("qk_norm", qkv // encoder.heads), ("layer_scale", hidden)):
        out += [Linear(name, size, count=layers) for name in pairs[option] if option in style]
    up = (2 * inner if "gated" in style else inner) // gates
    out.append(Linear("fc1", up, hidden, "mlp_bias" in style, "out", gates * layers))
    out.append(Linear("fc2", hidden, inner, bias="mlp_bias" in style, split="in", count=layers))
    return [replace(weight, split="") for weight in out] if "unsplit" in style else out


def _mlp(inputs: int, width: int, bias: bool = True, split: bool = True) -> list[Linear]:
    """A projector's two layers, `inputs` to `width` to `width`; `bias`: with biases; `split`: over TP ranks."""
    pair = [Linear("linear_1", width, inputs, bias, "out"), Linear("linear_2", width, width, bias, "in")]
    return pair if split else [replace(weight, split="") for weight in pair]


def _resampler(encoder: _Encoder) -> list[Linear]:
    """MiniCPM-V: learned queries attend to all patches of a slice, at the language model's width."""
    width = encoder.text_width
    return [
        Linear("resampler.query", int(encoder.config.get("query_num") or 64), width),
        Linear("resampler.kv_proj", width, encoder.hidden),
        Linear("resampler.attn", width, width, True, count=4),
        Linear("resampler.norms", width, bias=True, count=3),
        Linear("resampler.proj", width, width),
    ]


def _phi4mm_projector(encoder: _Encoder) -> list[Linear]:
    """Phi-4-multimodal: tile separators, the projector, and the speech encoder that is loaded too."""
    hidden, speech = encoder.hidden, Linear("speech", int(encoder.row["speech_parameters"]))
    return [Linear("separators", 2 * hidden), *_mlp(hidden, encoder.text_width, split=False), speech]


def _mlp_projector(encoder: _Encoder) -> list[Linear]:
    """LLaVA: two linear layers over the features of one or several encoder layers."""
    tapped = encoder.config.get("vision_feature_layer")
    levels = len(tapped) if isinstance(tapped, (list, tuple)) else int(encoder.row.get("projector_inputs", 1))
    bias = bool(encoder.config.get("multimodal_projector_bias", True))
    return _mlp(encoder.hidden * levels, encoder.text_width, bias)


def _qwen_merger(encoder: _Encoder) -> list[Linear]:
    """Qwen-VL: merge squares of patches, then two linears; DeepStack adds one merger a tapped layer."""
    hidden, width = encoder.hidden, encoder.text_width
    wide = hidden * encoder.field("spatial_merge_size", 2) ** 2
    out_size = encoder.field("out_hidden_size", width) or width
    count = encoder.tapped_blocks
    out: list[Linear] = []
    for name, copies, normed in [("merger", 1, hidden)] + ([("deepstack", count, wide)] if count else []):
        out.append(encoder.norm(f"{name}.norm", normed, copies))
        out.append(Linear(f"{name}.fc1", wide, wide, True, "out", copies))
        out.append(Linear(f"{name}.fc2", out_size, wide, True, "in", copies))
    return out


def _moonshot_merger(encoder: _Encoder) -> list[Linear]:
    """Moonshot: like Qwen-VL's merger, but replicated on every rank."""
    hidden, wide = encoder.hidden, 4 * encoder.hidden
    return [
        Linear("projector.norm", hidden, bias=True),
        Linear("projector.fc1", wide, wide, True),
        Linear("projector.fc2", encoder.text_width, wide, True),
        Linear("final_norm", hidden, bias=True),
    ]


def _mistral3_projector(encoder: _Encoder) -> list[Linear]:
    """Mistral-3: a norm, a merge of patches, then two linear layers."""
    hidden, merge = encoder.hidden, int(encoder.config.get("spatial_merge_size") or 2)
    merging = [Linear("projector.norm", hidden), Linear("projector.merge", hidden, hidden * merge**2)]
    return merging + _mlp(hidden, encoder.text_width, bool(encoder.config.get("multimodal_projector_bias", False)))


def _cohere_projector(encoder: _Encoder) -> list[Linear]:
    """Cohere: pixel shuffle, then a gated pair of linears; the second takes the product of the first's halves."""
    factor = int(encoder.config.get("downsample_factor") or 2)
    inner = int(encoder.config.get("alignment_intermediate_size") or 36864)
    return [
        Linear("linear_1", inner, encoder.hidden * factor**2, True, "out"),
        Linear("linear_2", encoder.text_width, inner // 2, True, "in"),
    ]


def _minimax_projector(encoder: _Encoder) -> list[Linear]:
    """MiniMax-VL: a projector of two linear layers, then a merger of two by two patches."""
    width = encoder.text_width
    merging = [Linear("merge_1", width, 4 * width, True, "out"), Linear("merge_2", width, width, True, "in")]
    return _mlp(encoder.hidden, width) + merging


def _internvl_projector(encoder: _Encoder) -> list[Linear]:
    """InternVL: a norm over pixel-shuffled patches, then two linear layers."""
    width, wide = encoder.text_width, int(encoder.hidden / float(encoder.config.get("downsample_ratio") or 0.5) ** 2)
    return [
        Linear("projector.norm", wide, bias=True),
        Linear("projector.fc1", width, wide, True),
        Linear("projector.fc2", width, width, True),
    ]


def _glm_projector(encoder: _Encoder) -> list[Linear]:
    """GLM-V: a convolution that merges two by two patches, then a gated block of the language model's width."""
    out = encoder.field("out_hidden_size", encoder.text_width)
    inner = int(encoder.vision.get("intermediate_size") or 13696)
    return [
        Linear("downsample", out, 4 * encoder.hidden, True),
        Linear("merger.proj", out, out, split="out"),
        Linear("merger.norm", out, bias=True),
        Linear("merger.gate_up", 2 * inner, out, split="out"),
        Linear("merger.down", out, inner, split="in"),
    ]


def _llama4_projector(encoder: _Encoder) -> list[Linear]:
    """Llama-4: a two-layer MLP over pixel-shuffled patches, then one linear layer."""
    into, out = encoder.field("projector_input_dim", 4096), encoder.field("projector_output_dim", 4096)
    return [
        Linear("adapter.fc1", into, encoder.field("intermediate_size", 5632), split="out"),
        Linear("adapter.fc2", out, into, split="in"),
        Linear("projector", encoder.text_width, encoder.field("vision_output_dim", out), split="out"),
    ]


_PROJECTORS: dict[str, Callable[[_Encoder], list[Linear]]] = {
    "none": lambda encoder: [],
    "mlp": _mlp_projector,
    "merger": _qwen_merger,
    "patch_merger": _moonshot_merger,
    "mistral3": _mistral3_projector,
    "gemma": lambda encoder: [
        Linear("projector", encoder.hidden, encoder.text_width),
        Linear("projector.norm", encoder.hidden),
    ],
    "gemma4": lambda encoder: [
        Linear("projector", encoder.text_width, encoder.hidden),
        Linear("speech", int(encoder.row["speech_parameters"]) * bool(encoder.config.get("audio_config"))),
    ],
    "minimax": _minimax_projector,
    "internvl": _internvl_projector,
    "llama4": _llama4_projector,
    "glm": _glm_projector,
    "cohere": _cohere_projector,
    "pixel_shuffle": lambda encoder: [
        Linear("connector", encoder.text_width, encoder.hidden * int(encoder.config.get("scale_factor") or 2) ** 2)
    ],
    "linear": lambda encoder: [Linear("projector", encoder.text_width, encoder.hidden, True)],
    "resampler": _resampler,
    "phi4mm": _phi4mm_projector,
    # Two by two patches joined, then two linears; a row for line ends and one between the views.
    "deepseek_vl2": lambda encoder: [
        *_mlp(4 * encoder.hidden, encoder.text_width, split=False),
        Linear("separators", 2 * encoder.text_width),
    ],
}
