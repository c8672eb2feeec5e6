"""Known bugs of a vLLM release that occur in a deployment."""

from __future__ import annotations

from legroom.facts.gpus import Gpu
from legroom.facts.known_bugs import KnownBug, bugs_with
from legroom.facts.model import LatentAttention, Model, StateSpace
from legroom.memory.deployment_memory import DeploymentMemory
from legroom.vllm.args import EngineSettings
from legroom.vllm.traits import traits


def bugs_of(model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory) -> list[KnownBug]:
    """The known bugs of a release that occur with these settings, this model and this card."""
    traits = traits_of(model) | {f"{settings.engine} engine", f"runner {settings.runner}"}
    traits |= {"several kv groups"} if len(memory.kv.groups) > 1 else set()
    return [bug for bug in bugs_with(settings.release, settings.given, gpu.vendor) if set(bug.model) <= traits]


def start_up_bug(model: Model, gpu: Gpu, settings: EngineSettings, memory: DeploymentMemory) -> KnownBug | None:
    """The first known bug that stops such a start although memory suffices; None where there is none."""
    bugs = bugs_of(model, gpu, settings, memory)
    return next((bug for bug in bugs if bug.may_end_start(settings.given, gpu.interconnect)), None)


def traits_of(model: Model) -> set[str]:
    """The model traits that known bugs are restricted to."""
    mixers = [mixer for layer in model.layers for mixer in (layer.mixer, *layer.also)]
    present = {
        "mla": any(isinstance(mixer, LatentAttention) for mixer in mixers),
        "experts": traits(model).moe,
        "no state layers": not any(isinstance(mixer, StateSpace) for mixer in mixers),
        "multimodal": bool(model.modalities),
        "encoder-decoder": bool(model.encoder_layers),
    }
    return {name for name, has in present.items() if has}
