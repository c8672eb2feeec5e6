"""The plan of parsed flags on a machine that the user describes, with figures from the user's own start-ups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.errors import LegroomError
from legroom.facts.bundled import chat_checkpoint
from legroom.facts.gpus import Gpu, other_platform, with_total
from legroom.facts.gpus import gpu as known_gpu
from legroom.facts.model import Model
from legroom.facts.releases import Release, first_release, latest
from legroom.files import cards_path, store_path
from legroom.memory.activation.encoder_profile import encoder_profile
from legroom.memory.deployment_memory import Measurements
from legroom.planning.plan import Plan, Target, bugs_of, log_beyond_range, plan_on_named_card
from legroom.records import dataclass
from legroom.units import gib, parse_bytes
from legroom.vllm.args import ServeArgs, draft_method, draft_name, predicts_itself
from legroom.vllm.resolve import resolve, served_model

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a plan, as the user describes it."""

    gpu: str
    gpus: int | None = None
    """None: as many as the parallel sizes need."""
    memory: str | None = None
    """Total memory of one GPU; None: that of the facts."""
    used: str | None = None
    """Memory of other processes on one GPU."""
    host_memory: str | None = None
    """The limit of host memory; None: none is known."""
    measured: Measurements | None = None
    """Sizes that a log of this server printed."""


def make_plan(args: ServeArgs, release: Release, machine: Machine, *, advice: bool = True) -> Plan:
    """The plan of parsed flags with measured figures and notes, and with advice where it does not fit."""
    made = plan_on_named_card(with_measurements(make_target(args, release, machine), args), args)
    made = with_notes(made)
    if advice and made.verdict != "fits":
        from legroom.planning.advice import with_advice, with_longer_context_first

        made = with_longer_context_first(with_advice(made))
    return made


def plan_deployment(deployment: Deployment, machine: Machine, *, advice: bool) -> Plan:
    """The plan of a deployment; its GPU count and memory limit complete the machine."""
    return make_plan(deployment.args, deployment.release, completed_machine(machine, deployment), advice=advice)


def completed_machine(machine: Machine, deployment: Deployment) -> Machine:
    """The machine; a GPU count or host memory limit that it lacks is the deployment's."""
    deployment.require_gpus()
    limit = str(deployment.memory_limit_bytes) if deployment.memory_limit_bytes else None
    gpus = deployment.gpu_count if machine.gpus is None else machine.gpus
    return replace(machine, gpus=gpus, host_memory=machine.host_memory or limit)


def make_target(args: ServeArgs, release: Release, machine: Machine) -> Target:
    """The target of a plan: model, card with measured figures, and number of GPUs; LegroomError below one GPU."""
    card, used = card_and_used_bytes(machine, release, args)
    number = machine.gpus if machine.gpus is not None else max(args.gpus_needed, 1)
    if number < 1:
        raise LegroomError(f"{number} GPUs cannot serve a model", "say --gpus 1 or more")
    limit, given = machine.host_memory, machine.gpus is not None
    host_limit_bytes = parse_bytes(limit, "--host-memory") if limit else None
    return Target(served_model(args), card, number, release, machine.measured, used, host_limit_bytes, given)


def card_and_used_bytes(machine: Machine, release: Release, args: ServeArgs) -> tuple[Gpu, int]:
    """(the card with its measured figures, bytes of it in use by others); LegroomError if more is used than it has."""
    card = _card(machine)
    if cards_path().exists():
        from legroom.planning.card_store import measured_card, read_cards

        with suppress(LegroomError):  # `legroom probe` reports a damaged file
            card = measured_card(card, read_cards(), release, max(args.gpus_needed, 1))
    if machine.memory is None:
        card = with_measured_total(card)
    else:
        card = with_total(card, parse_bytes(machine.memory, "--gpu-memory"))
    if machine.used is None:
        return card, 0
    used = parse_bytes(machine.used, "--gpu-used")
    if used > card.total_bytes:
        raise LegroomError("--gpu-used is more than the card has", "give what other processes hold of one GPU")
    return replace(card, screen=False), used  # that figure includes a desktop


def _card(machine: Machine) -> Gpu:
    """The card of the machine; an unknown name, with the memory given, becomes an unnamed card of that size."""
    try:
        return known_gpu(machine.gpu)
    except LegroomError:
        if machine.memory is None or other_platform(machine.gpu):
            raise
    return replace(known_gpu(machine.memory), name=f"{machine.gpu} (not known: any card of its size)")


def with_measured_total(card: Gpu) -> Gpu:
    """The card with the total that `legroom calibrate` stored, where it stored one."""
    if not store_path().exists():
        return card
    from legroom.planning.calibration_store import observed_total_bytes, read_store

    total = observed_total_bytes(read_store().observations, card)
    if total is None:
        return card
    note = f"a total of {gib(total)} as your own start-ups reported it (the facts say {gib(card.total_bytes)})"
    return replace(with_total(card, total), note="; ".join(filter(None, (card.note, note))))


def with_measurements(target: Target, args: ServeArgs) -> Target:
    """The target with the figures that `legroom calibrate` stored for it, unless it already has measured figures."""
    if target.seen or not store_path().exists():
        return target
    from legroom.planning.calibration_store import measurements_for, read_store

    settings = resolve(args, target.model, target.gpu, target.release)
    return replace(target, seen=measurements_for(read_store().observations, target, settings))


def with_notes(made: Plan) -> Plan:
    """The plan with notes on assumptions about its model and card, and on known bugs of its release."""
    notes = (*_input_notes(made.target, made.args), *_cost_notes(made), *_bug_notes(made))
    notes += (note,) if (note := log_beyond_range(made)) else ()
    return replace(made, notes=(*made.notes, *notes))


def _cost_notes(made: Plan) -> Iterator[str]:
    """The cost of weights in the host's memory, and of a Radeon card without the encoder's usual kernel."""
    if (offloaded := made.args.cpu_offload_gb) and made.starts:
        yield (
            f"--cpu-offload-gb {offloaded:g}: that much of the weights crosses the bus at every step, which makes "
            "every token many times slower; it helps only where nothing else fits"
        )
    encoder = encoder_profile(made.target.model, made.settings, made.target.gpu)
    if encoder and encoder.scores_bytes:
        yield (
            f"without the flash_attn package the encoder's attention takes {gib(encoder.scores_bytes)} more in the "
            "profile run: install it, limit the images, or start with --skip-mm-profiling"
        )


def _input_notes(target: Target, args: ServeArgs) -> Iterator[str]:
    """Notes on what was assumed about the card and the model."""
    if target.gpu.note:
        yield target.gpu.note
    since = first_release(target.model.architecture) if target.release.version != latest().version else None
    if since is not None and target.release.before(since):
        yield (
            f"vLLM {target.release} does not list {target.model.architecture}, which came with {since}: it will most "
            "likely refuse this model whatever the memory; the figures are what its accounting would give"
        )
    if chat := chat_checkpoint(args.model, target.model.name):
        yield f"{args.model} is the base model {target.model.name}; the chat model is {chat}"
    spec = args.speculative_config
    if predicts_itself(draft_method(spec)) and not target.model.draft_layers:
        yield (
            f"speculative method {draft_method(spec)}: {target.model.name} has no prediction layers known here, "
            "so nothing is counted for it and vLLM may refuse it"
        )
    if draft_name(spec) and target.model.draft is None:
        method, read = draft_method(spec), "; name a folder with its config.json to have it counted"
        shape = "one layer as wide as the model's own" + read
        if method == "medusa":
            shape = "a layer and an output layer for each speculative token"
        yield f"the {method} head {draft_name(spec)} could not be read: it is estimated as {shape}"
    if target.model.assumed:
        yield (
            f"{target.model.name} is {_assumed_note(target.model)}, so its weights are an estimate; name a folder with "
            "its config.json to have them counted"
        )
        if "/" not in target.model.name:
            name = target.model.name
            yield f"{name} is no id of the Hub, so vLLM takes it for a folder: write the owner too, OWNER/{name}"
        longest = target.model.max_position_embeddings
        if target.model.named_alone and (args.max_model_len or 0) > longest:
            yield f"the model that its name tells has a limit of {longest:,} tokens; the checkpoint may have another"
    if not target.model.known:
        yield (
            f"legroom does not know the architecture {target.model.architecture or 'of this model'}: it is read as a "
            "plain transformer, so weights are an estimate; KV bytes are exact if its attention is what the config says"
        )


def _assumed_note(model: Model) -> str:
    """What was assumed of a model whose config was not read, in words that complete "MODEL is"."""
    said, _, doubt = model.source.removeprefix("bundled: ").partition(";")
    if said.startswith("taken"):
        return said
    return "described without its config.json" if doubt and model.quantization is None else "quantized as its name says"


def _bug_notes(made: Plan) -> Iterator[str]:
    """Up to three bugs that these settings set off and a later release fixed, the most specific first."""
    release = made.target.release
    if release.version == latest().version:
        return
    fixed = [bug for bug in bugs_of(made) if bug.fixed_in is not None]
    fixed.sort(key=lambda bug: not (bug.settings or bug.model or bug.platform))
    for bug in fixed[:3]:
        yield f"known bug of vLLM {release}: {bug.title}; fixed in {bug.fixed_in} ({bug.threads})"
