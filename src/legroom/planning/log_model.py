"""The model that a log means: servers print where they loaded from, which is often a folder of another machine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from legroom.errors import LegroomError
from legroom.facts.bundled import find
from legroom.facts.models import from_bundled, load

if TYPE_CHECKING:
    from legroom.facts.model import Model

_HUB_CACHE = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")


def model_of_log(name: str) -> Model:
    """The model by the name a log gives it: a Hub id, a folder here, a Hub cache folder, or a known name's folder."""
    cached = _HUB_CACHE.search(name)
    asked = f"{cached['owner']}/{cached['name']}" if cached else name
    try:
        return load(asked)
    except LegroomError:
        known = find(asked.rstrip("/").rpartition("/")[2]) if asked.startswith(("/", "~", ".")) else None
        if known is None:
            raise
        return from_bundled(known)


def shape_of(model: Model) -> str:
    """A short name for everything memory depends on in a model; fine-tunes of one checkpoint share it."""
    import hashlib  # noqa: PLC0415 - a plan with nothing stored needs none of it

    parts = (
        model.architecture, model.hidden_size, model.vocab_size, model.layers, model.tie_word_embeddings,
        model.quantization, model.modalities, model.encoder_layers, model.is_pooling,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
