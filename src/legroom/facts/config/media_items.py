"""The dummy items of encoder profiling: tokens of the largest image, video or recording. A family's rule is a row of
`data/towers.json`; sizes come from the checkpoint's processor files, or are the family's usual ones."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from legroom.facts.model import MediaItem

Config = Mapping[str, Any]

PROCESSOR_KEY = "_processor"
"""The key under which a config holds the content of its processor files: {"image": ..., "video": ...}."""


def media_items(row: Config, config: Config, *, patch: int, merge: int, image_size: int) -> tuple[MediaItem, ...]:
    """The largest image, video and recording of a family (its towers.json `row`), with tokens and patches; `patch`,
    `image_size`: pixels of a side, `merge`: patches of a side that become one token."""
    specs = row.get("items") or {"image": {}}
    class_token = 1 if "class_token" in row.get("style", ()) else 0
    grid = _Grid(config, patch, merge, max(image_size // max(patch, 1), 1), class_token)
    return tuple(
        grid.largest_item(kind, spec)
        for kind, given in specs.items()
        for spec in (given if isinstance(given, list) else [given])
    )


def processor_files(files: Mapping[str, Config]) -> dict[str, Config]:
    """The image and video settings of a checkpoint's processor files."""
    joint = files.get("processor_config.json", {})
    parts: dict[str, Config] = {}
    for kind, name, key in (
        ("image", "preprocessor_config.json", "image_processor"),
        ("video", "video_preprocessor_config.json", "video_processor"),
    ):
        nested = joint.get(key)
        said = files.get(name) or (nested if isinstance(nested, Mapping) else None)
        if said:
            parts[kind] = said
    return parts


class _Grid:
    """The encoder's grid (`patch` in pixels; `side`, `merge` in patches; `class_token` 0 or 1) and the size limits."""

    def __init__(self, config: Config, patch: int, merge: int, side: int, class_token: int) -> None:
        self.config, self.patch, self.merge, self.side, self.class_token = config, patch, merge, side, class_token

    def largest_item(self, kind: str, spec: Config) -> MediaItem:
        """The largest item of this kind, with its tokens and patches as its `spec` in towers.json counts them."""
        dates: dict[str, Any] = {name: str(spec[name]) for name in ("since", "until") if name in spec}
        counted = {"frames_up_to": self._sampled_video, "max_pixels": self._pixel_limited_item}
        counted |= {"steps": self._growing_video, "tiles": self._tiled_image}
        for way, build in counted.items():
            if way in spec:
                return replace(build(kind, spec), **dates)
        tokens = int(spec.get("tokens") or 0) or self._stated_tokens(spec) or max(self.side // self.merge, 1) ** 2
        patches = int(spec.get("patches") or 0) or (
            self.side**2 + self.class_token if spec.get("square", "tokens" not in spec) else tokens * self.merge**2
        )
        return MediaItem(kind, tokens, patches, int(spec.get("outputs") or 0), **dates)

    def _pixel_limited_item(self, kind: str, spec: Config) -> MediaItem:
        """Qwen-VL's largest image (max_pixels) or video (whose pairs of frames share them), by `kind`."""
        unit = (self.patch * self.merge) ** 2 * int(spec.get("frames") or 1)
        tokens = max((self._max_pixels(kind) or int(spec["max_pixels"])) // unit, 1)
        inflated = int(tokens * float(spec.get("inflated", 1)))
        outputs = tokens if inflated != tokens else 0
        within = bool(spec.get("within_length"))
        return MediaItem(kind, inflated, tokens * self.merge**2, outputs, pixels_per_token=unit, within_length=within)

    def _sampled_video(self, kind: str, spec: Config) -> MediaItem:
        """GLM-V's video of the most tokens; its `lengths` are the tokens for each number of frames up to the limit."""
        video, image = (self._max_pixels(k) or int(spec[f"{k}_pixels"]) for k in ("video", "image"))
        # Tokens of a video by its number of frames, as GLM-V's processor resizes it: frames are encoded in pairs.
        unit = self.patch * self.merge
        side = math.floor(math.sqrt(image / 2) / unit) * unit
        by_frames = []
        for frames in range(1, int(spec["frames_up_to"]) + 1):
            sized_for = max(frames, 2)
            height = side
            if round(sized_for / 2) * 2 * side**2 > video:
                height = max(unit, math.floor(math.sqrt(video / sized_for) / unit) * unit)
            by_frames.append(-(-frames // 2) * (height // unit) ** 2)
        return MediaItem(kind, max(by_frames), max(by_frames) * self.merge**2, lengths=tuple(by_frames))

    def _growing_video(self, kind: str, spec: Config) -> MediaItem:
        """A video of up to max_frames frames; `steps` in `spec` (of towers.json) says what each step of frames adds."""
        step = self._one_tile_image() if spec["steps"] == "tile" else self.largest_item("image", spec["steps"])
        return MediaItem(
            kind,
            step.tokens,
            step.patches,
            step.outputs,
            max_frames=int(spec.get("max_frames") or 1_000_000),
            frames_per_step=int(spec.get("frames_per_step") or 1),
            beside_image_until=str(spec.get("beside_image_until") or ""),
            pixels_per_token=step.pixels_per_token,
        )

    def _one_tile_image(self) -> MediaItem:
        """An image of one tile: `image_seq_length` tokens, else the (patches per side x `downsample_ratio`) squared."""
        tokens = int(self.config.get("image_seq_length") or 0)
        if not tokens:
            tokens = int((self.side * float(self.config.get("downsample_ratio") or 0.5)) ** 2)
        return MediaItem("image", tokens, self.side**2 + self.class_token)

    def _tiled_image(self, kind: str, spec: Config) -> MediaItem:
        """InternVL's image of the most tiles, and a thumbnail where it has several; `spec`: its row of towers.json."""
        processor = self._processor_config("image")
        tiles = int(self.config.get("max_dynamic_patch") or spec["tiles"])
        if "crop_to_patches" in processor:
            tiles = int(processor.get("max_patches") or tiles) if processor["crop_to_patches"] else 1
        if tiles > 1 and self.config.get("use_thumbnail", True):
            tiles += 1
        tile = self._one_tile_image()
        return MediaItem(kind, tiles * tile.tokens, tiles * tile.patches)

    def _stated_tokens(self, spec: Config) -> int:
        """Tokens of one media item as the config's own fields state them; 0 where none does."""
        for key in spec.get("fields", ()):
            value: Any = self.config
            for part in str(key).split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if isinstance(value, int) and value > 0:
                return value
        return 0

    def _processor_config(self, kind: str) -> Config:
        """The processor's settings for images or videos (`kind`); empty where the checkpoint has none."""
        said = self.config.get(PROCESSOR_KEY)
        found = said.get(kind) if isinstance(said, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def _max_pixels(self, kind: str) -> int:
        """The most pixels that the processor lets an image or video (`kind`) have; 0 where it states no limit."""
        processor = self._processor_config(kind)
        size = processor.get("size")
        edge = size.get("longest_edge") if isinstance(size, Mapping) else None
        limits = (edge, processor.get("max_pixels"))
        return next((limit for limit in limits if isinstance(limit, int) and limit >= self.patch**2), 0)
