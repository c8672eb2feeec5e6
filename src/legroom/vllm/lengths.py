"""The context length a release derives from a model's config and from the flags that change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.facts.max_length import derived_max_len
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.vllm.args import ServeArgs
from legroom.vllm.refusals import check_length
from legroom.vllm.served_model import config_overrides

_LONGROPE_KEY = "original_max_position_embeddings"


def max_model_len(args: ServeArgs, model: Model, release: Release) -> int:
    """The given length, or the one the release derives where none is given."""
    derived, limit = _derived_and_limit(args, model, release)
    if args.max_model_len is None or args.max_model_len == -1:
        return derived
    check_length(args, limit, model, release)
    return args.max_model_len


def overrides(args: ServeArgs) -> Mapping[str, Any]:
    """What the flags put over the model's text config: --hf-overrides, until 0.11.0 also --rope-scaling."""
    given: dict[str, Any] = {}
    for key, value in config_overrides(args).items():
        if key == "text_config" and isinstance(value, Mapping):
            given |= value
        else:
            given[key] = value
    return given


def _derived_and_limit(args: ServeArgs, model: Model, release: Release) -> tuple[int, int]:
    """The default length, and the longest one the release accepts."""
    given = overrides(args)
    if not model.config:
        # Without the config there is nothing to lay the overrides over: the user's length is taken at its word.
        asked = args.max_model_len or 0
        return model.max_position_embeddings, max(model.max_position_embeddings, asked if given else 0)
    scaled = any(key in model.config or key in given for key in ("rope_scaling", "rope_parameters"))
    if not scaled and not given:
        return model.max_position_embeddings, model.max_position_embeddings
    config = {**model.config, **given}
    original = config.pop(_LONGROPE_KEY, None)
    # YaRN: until 0.28.0 the length is original x factor, later max_position_embeddings as it stands.
    full = derived_max_len(config, config, yarn_multiplies=release.before("0.29.0"))
    # LongRoPE: since 0.11.1 the server starts at the original length, and may be asked for the full one.
    starts_short = isinstance(original, int) and _is_longrope(config) and release.at_least("0.11.1")
    return (int(original or full) if starts_short else full), full


def _is_longrope(config: Mapping[str, Any]) -> bool:
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            return bool(rope.get("rope_type", rope.get("type")) == "longrope")
    return False
