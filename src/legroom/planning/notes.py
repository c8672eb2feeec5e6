"""What the reader of a plan should know beside its figures: how model and card were read, the bugs of the release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from legroom.facts.releases import first_release, latest
from legroom.vllm.args import draft_method, draft_name, predicts_itself

if TYPE_CHECKING:
    from legroom.facts.known_bugs import KnownBug
    from legroom.planning.plan import Plan, Target
    from legroom.vllm.args import ServeArgs

MOST_NOTES = 3


def remarks(target: Target, args: ServeArgs) -> Iterator[str]:
    """What the reader should know of how the GPU and the model were read."""
    if target.gpu.note:
        yield target.gpu.note
    yield from _too_new(target)
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


def _too_new(target: Target) -> Iterator[str]:
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
    from legroom.planning.release_bugs import bugs_of  # most plans are of the newest release

    target = made.target
    bugs = bugs_of(target.model, target.gpu, target.release, made.settings, made.memory)
    bugs = [bug for bug in bugs if bug.fixed_in is not None]
    bugs.sort(key=lambda bug: not (bug.settings or bug.model or bug.platform))
    yield from (_note(bug, made.target.release.version) for bug in bugs[:MOST_NOTES])


def _note(bug: KnownBug, version: str) -> str:
    return f"known bug of vLLM {version}: {bug.title}; fixed in {bug.fixed_in} ({bug.threads})"
