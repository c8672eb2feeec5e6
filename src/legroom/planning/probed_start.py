"""What a start with dummy weights measured of one deployment, as an observation that later plans of it use."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING

from legroom.planning.calibration import Observation, remember, settings_key, shape_of
from legroom.planning.calibration_store import locked, open_for_change, store_path, write_store
from legroom.planning.machine import Machine, make_plan

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.vllm.args import ServeArgs

SOURCE = "legroom probe"


def probed_observation(args: ServeArgs, release: Release, gpu: str, profile: Mapping[str, int]) -> Observation:
    """`profile`: the engine's own accounting, to the byte, where a log rounds to hundredths of a GiB."""
    planned = make_plan(args, release, Machine(gpu), advice=False)
    return Observation(
        planned.target.gpu.name,
        profile["total_bytes"],
        args.model,
        release.version,
        settings_key(planned.settings),
        profiled_terms(profile),
        SOURCE,
        datetime.date.today().isoformat(),
        shape_of(planned.target.model),
    )


def profiled_terms(profile: Mapping[str, int]) -> dict[str, int]:
    """The terms that leave exactly the KV bytes that the engine had left."""
    weights, activation = profile["weights_bytes"], profile["torch_peak_bytes"]
    graphs = profile.get("graph_estimate_bytes", 0)
    terms = {"weights_bytes": weights, "activation_bytes": activation, "graph_estimate_bytes": graphs}
    if requested := profile.get("requested_bytes"):
        terms["profiled_non_torch_bytes"] = requested - profile["available_kv_bytes"] - weights - activation - graphs
    return {name: size for name, size in terms.items() if size >= 0}


def keep_observation(observation: Observation) -> str:
    """Into the calibration store; a note on the store where there is one."""
    path = store_path()
    with locked(path):
        observations, note = open_for_change(path)
        write_store(remember(observations, observation), path)
    return note
