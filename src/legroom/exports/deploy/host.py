"""The host memory of an exported server, from its command line and its plan; the arithmetic is `memory.host`'s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from legroom.memory import host
from legroom.memory.host import HostNeeds, HostSettings
from legroom.vllm.parse import parse_flags

if TYPE_CHECKING:
    from legroom.exports.deploy.words import ServerWords
    from legroom.planning.plan_document import PlanDocument


def host_needs(
    words: ServerWords, gpus: int, engines: int, checkpoint_bytes: int, plan: PlanDocument, given: Mapping[str, str]
) -> HostNeeds:
    """What the host of this many ranks and engines must give."""
    args = parse_flags(words.words(), plan.release).args
    return host.host_needs(
        HostSettings(
            args=replace(args, env={**args.env, **given}),
            release=plan.release,
            gpus=gpus,
            engines=engines,
            has_media=bool(plan.modalities),
            swaps=plan.args.get("engine") == "V0",
            checkpoint_bytes=checkpoint_bytes,
            weights_bytes=plan.layout.weights_bytes,
        )
    )
