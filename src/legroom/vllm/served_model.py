"""The model that the flags serve: the one they name, changed as they say, with the draft they load beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.model import Model
from legroom.facts.models import load
from legroom.vllm.args import ServeArgs, other_value
from legroom.vllm.speculation import draft_method, draft_name


def served_model(args: ServeArgs) -> Model:
    """The model with --hf-overrides laid over its config, and the draft model of --speculative-config."""
    return with_draft(load(args.model, overrides=config_overrides(args)), args)


def with_draft(model: Model, args: ServeArgs) -> Model:
    """The model with the draft that the flags name. A head that cannot be read is left out: memory estimates it."""
    name = draft_name(args.speculative_config)
    if not name:
        return model
    try:
        return replace(model, draft=load(name))
    except LegroomError as error:
        if draft_method(args.speculative_config) != "draft_model":
            return model
        message = f"the draft model of --speculative-config cannot be read: {error.message}"
        raise LegroomError(message, error.hint, error.exit_code) from error


def config_overrides(args: ServeArgs) -> Mapping[str, Any]:
    """What the flags put over the model's config: --hf-overrides, until 0.11.0 also --rope-scaling."""
    given: dict[str, Any] = {}
    for flag, key in (("--rope-scaling", "rope_scaling"), ("--rope-theta", "rope_theta")):
        text = other_value(args, flag)
        if text is not None:
            try:
                given[key] = json.loads(text)
            except (ValueError, RecursionError):
                continue
    return given | dict(args.hf_overrides or {})
