"""What start-up logs teach: each start-up beside its plan, and its measurements into the store."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import PurePath

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu, gpu, with_total
from legroom.facts.releases import release
from legroom.planning import calibration_store as store
from legroom.planning.calibration import Observation, observe, remember
from legroom.planning.plan import Plan, Target, plan
from legroom.planning.startup_args import model_of_log
from legroom.planning.startup_log import Startup, read_startups
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class CalibratedStart:
    """What one start-up of one log came to."""

    log: str
    startup: Startup
    observation: Observation | None
    predicted: dict[str, int]
    note: str = ""


def calibrated_starts(text: str, log: str, gpu_name: str | None, model_name: str | None) -> list[CalibratedStart]:
    """Every start-up of a log's text; `log` is what to call it."""
    startups = read_startups(text)
    if not startups:
        raise LegroomError(
            f"{log} holds no vLLM start-up", "give the server's own output, from its first line to `startup complete`"
        )
    return [_calibrated(log, startup, gpu_name, model_name) for startup in startups]


def keep_measurements(starts: Sequence[CalibratedStart]) -> tuple[int, str]:
    """Into the store: how many of the start-ups had something to keep, and a note on the store where there is one."""
    new = measured(starts)
    if not new:
        return 0, ""
    path = store.store_path()
    with store.locked(path):
        observations, note = store.open_for_change(path)
        for observation in new:
            observations = remember(observations, observation)
        store.write_store(observations, path)
    return len(new), note


def measured(starts: Sequence[CalibratedStart]) -> list[Observation]:
    """The observations that hold a figure."""
    return [start.observation for start in starts if start.observation is not None and start.observation.terms]


def _calibrated(log: str, startup: Startup, gpu_name: str | None, model_name: str | None) -> CalibratedStart:
    model = model_name or startup.args.model
    try:
        card = _card(startup, gpu_name)
        planned, note = _predicted(startup, card, model)
        today = datetime.date.today().isoformat()
        observation = observe(startup, card, planned, model, source=PurePath(log).name, seen=today)
    except LegroomError as error:
        if error.hint:
            raise
        return CalibratedStart(log, startup, None, {}, error.message)
    if startup.compiled and "activation_bytes" not in observation.terms and startup.activation_bytes is not None:
        note = (
            note
            or "a first start compiles and profiles more; its activation peak is not kept: calibrate on a later one"
        )
    if not observation.terms:
        note = note or "it prints no memory figures that legroom can reuse"
    return CalibratedStart(log, startup, observation, _predictions(planned), note)


def _card(startup: Startup, gpu_name: str | None) -> Gpu | None:
    name = gpu_name or startup.gpu_name
    if name is None:
        return None
    card = gpu(name)
    return with_total(card, startup.gpu_total_bytes) if startup.gpu_total_bytes else card


def _predicted(startup: Startup, card: Gpu | None, model: str) -> tuple[Plan | None, str]:
    """What legroom would have said without this log. A model it cannot find limits what can be learnt."""
    if card is None or startup.vllm is None:
        return None, ""
    if not model:
        return None, "the log does not name its model (give --model); only what holds for any model is kept"
    args = startup.args
    try:
        return plan(Target(model_of_log(model), card, args.gpus_needed, release(startup.vllm)), args), ""
    except LegroomError as error:
        return None, f"{error.message} (give --model); only what holds for any model is kept"


def _predictions(planned: Plan | None) -> dict[str, int]:
    if planned is None:
        return {}
    layout = planned.layout
    return {
        "weights_bytes": layout.weights.bytes,
        "activation_bytes": layout.activation.bytes,
        "non_torch_bytes": layout.non_torch.bytes,
        "graph_estimate_bytes": layout.cuda_graph.bytes,
        "graph_bytes": planned.memory.graphs.bytes,
        "kv_cache_bytes": layout.kv_cache.bytes,
    }
