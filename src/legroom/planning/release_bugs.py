"""Known bugs of a vLLM release that occur in a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from legroom.facts.known_bugs import KnownBug, bugs_with
from legroom.facts.model import LatentAttention, Model, StateSpace
from legroom.vllm.traits import traits

if TYPE_CHECKING:
    from legroom.planning.plan import Plan


def bugs_of(plan: Plan) -> list[KnownBug]:
    """The known bugs of the plan's release that occur with its settings, model and card."""
    settings, vendor = plan.settings, plan.target.gpu.vendor
    traits = traits_of(plan.target.model) | {f"{settings.engine} engine", f"runner {settings.runner}"}
    traits |= {"several kv groups"} if len(plan.memory.kv.groups) > 1 else set()
    return [bug for bug in bugs_with(settings.release, settings.given, vendor) if set(bug.model) <= traits]


def traits_of(model: Model) -> set[str]:
    """The names of the model's traits that restrict known bugs, such as `mla` and `multimodal`."""
    mixers = [mixer for layer in model.layers for mixer in (layer.mixer, *layer.also)]
    present = {
        "mla": any(isinstance(mixer, LatentAttention) for mixer in mixers),
        "experts": traits(model).moe,
        "no state layers": not any(isinstance(mixer, StateSpace) for mixer in mixers),
        "multimodal": bool(model.modalities),
        "encoder-decoder": bool(model.encoder_layers),
    }
    return {name for name, has in present.items() if has}
