"""What a plan says of the release's own memory bugs: only those that these flags and this model set off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.facts.attention import LatentAttention, StateSpace
from legroom.facts.known_bugs import KnownBug, bugs_with

if TYPE_CHECKING:
    from legroom.facts.model import Model
    from legroom.planning.plan import Plan

MOST_NOTES = 3


def bug_notes(made: Plan) -> Iterator[str]:
    """A sentence a bug; of many, those that name a setting or a kind of model first."""
    traits = traits_of(made.target.model) | ({"several kv groups"} if len(made.memory.kv.groups) > 1 else set())
    bugs = [
        bug
        for bug in bugs_with(made.target.release, made.args, made.target.gpu.vendor)
        if set(bug.model) <= traits and bug.fixed_in is not None
    ]
    bugs.sort(key=lambda bug: not (bug.settings or bug.model or bug.platform))
    yield from (_note(bug, made.target.release.version) for bug in bugs[:MOST_NOTES])


def traits_of(model: Model) -> set[str]:
    """The kinds of model that a bug may be tied to."""
    mixers = [mixer for layer in model.layers for mixer in (layer.mixer, *layer.also)]
    traits = {
        "mla": any(isinstance(mixer, LatentAttention) for mixer in mixers),
        "no state layers": not any(isinstance(mixer, StateSpace) for mixer in mixers),
        "multimodal": bool(model.modalities),
        "encoder-decoder": bool(model.encoder_layers),
    }
    return {name for name, has in traits.items() if has}


def _note(bug: KnownBug, version: str) -> str:
    return f"known bug of vLLM {version}: {bug.title}; fixed in {bug.fixed_in} ({bug.threads})"
