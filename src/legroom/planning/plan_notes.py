"""What the reader of a plan should know beside its figures: how model and card were read, the bugs of the release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.facts.known_bugs import bugs_with
from legroom.facts.model import LatentAttention, StateSpace
from legroom.facts.releases import first_release, latest
from legroom.vllm.args import draft_method, draft_name, predicts_itself
from legroom.vllm.traits import is_moe

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.known_bugs import KnownBug
    from legroom.facts.model import Model
    from legroom.facts.releases import Release
    from legroom.memory.deployment_memory import DeploymentMemory
    from legroom.planning.plan import Plan, Target
    from legroom.vllm.args import EngineSettings, ServeArgs


MOST_NOTES = 3


def input_notes(target: Target, args: ServeArgs) -> Iterator[str]:
    """What the reader should know of how the GPU and the model were read."""
    if target.gpu.note:
        yield target.gpu.note
    yield from _unlisted_architecture(target)
    spec = args.speculative_config
    if predicts_itself(draft_method(spec)) and not target.model.draft_layers:
        yield (
            f"speculative method {draft_method(spec)}: {target.model.name} has no prediction layers known here, "
            "so nothing is counted for it and vLLM may refuse it"
        )
    if draft_name(spec) and target.model.draft is None:
        yield (
            f"the {draft_method(spec)} head {draft_name(spec)} could not be read: it is estimated as one layer as wide "
            "as the model's own; name a folder with its config.json to have it counted"
        )
    if target.model.assumed:
        yield (
            f"how {target.model.name} is stored is taken from its name, so its weights are an estimate; name a folder "
            "with its config.json to have them counted"
        )
    if not target.model.known:
        yield (
            f"legroom does not know the architecture {target.model.architecture or 'of this model'}: it is read as a "
            "plain transformer, so weights are an estimate; KV bytes are exact if its attention is what the config says"
        )


def _unlisted_architecture(target: Target) -> Iterator[str]:
    """A release older than the model may refuse it for other reasons than memory."""
    if target.release.version == latest().version:
        return
    since = first_release(target.model.architecture)
    if since is not None and target.release.before(since):
        yield (
            f"vLLM {target.release} does not list {target.model.architecture}, which came with {since}: it will most "
            "likely refuse this model whatever the memory; the figures are what its accounting would give"
        )


def bug_notes(made: Plan) -> Iterator[str]:
    """A sentence for each bug of the release that these flags and this model set off; of many, those that name a
    setting or a kind of model first. Bugs are known of releases that a later one corrected: the newest has none."""
    if made.target.release.version == latest().version:
        return
    target = made.target
    bugs = bugs_of(target.model, target.gpu, target.release, made.settings, made.memory)
    bugs = [bug for bug in bugs if bug.fixed_in is not None]
    bugs.sort(key=lambda bug: not (bug.settings or bug.model or bug.platform))
    yield from (_note(bug, made.target.release.version) for bug in bugs[:MOST_NOTES])


def _note(bug: KnownBug, version: str) -> str:
    return f"known bug of vLLM {version}: {bug.title}; fixed in {bug.fixed_in} ({bug.threads})"


def bugs_of(
    model: Model, gpu: Gpu, release: Release, settings: EngineSettings, memory: DeploymentMemory
) -> list[KnownBug]:
    """The bugs that these flags, this model and this card set off."""
    traits = traits_of(model) | {f"{settings.engine} engine", f"runner {settings.runner}"}
    traits |= {"several kv groups"} if len(memory.kv.groups) > 1 else set()
    return [bug for bug in bugs_with(release, settings.given, gpu.vendor) if set(bug.model) <= traits]


def start_up_bug(
    model: Model, gpu: Gpu, release: Release, settings: EngineSettings, memory: DeploymentMemory
) -> KnownBug | None:
    """A bug of the release that has ended starts like this one although the memory was there."""
    bugs = bugs_of(model, gpu, release, settings, memory)
    return next((bug for bug in bugs if bug.may_end_start(settings.given, gpu.interconnect)), None)


def traits_of(model: Model) -> set[str]:
    """The kinds of model that a bug may be tied to."""
    mixers = [mixer for layer in model.layers for mixer in (layer.mixer, *layer.also)]
    traits = {
        "mla": any(isinstance(mixer, LatentAttention) for mixer in mixers),
        "experts": is_moe(model),
        "no state layers": not any(isinstance(mixer, StateSpace) for mixer in mixers),
        "multimodal": bool(model.modalities),
        "encoder-decoder": bool(model.encoder_layers),
    }
    return {name for name, has in traits.items() if has}
