"""Observations from start-up logs and from probes: each start-up is compared with its plan and stored."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu, gpu, with_total
from legroom.facts.releases import Release, release
from legroom.planning import calibration_store as store
from legroom.planning.calibration_store import Observation
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan, Target, plan
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs
from legroom.vllm_logs.printed_flags import load_logged_model
from legroom.vllm_logs.startup_log import Startup, read_startups


@dataclass(frozen=True, slots=True)
class CalibratedStart:
    """One start-up of a log beside its plan."""

    log: str
    startup: Startup
    observation: Observation | None
    """None: the log lacks what an observation needs."""
    predicted: dict[str, int]
    note: str = ""


def calibrated_starts(text: str, log: str, gpu_name: str | None, model_name: str | None) -> list[CalibratedStart]:
    """Each start-up in a log's text, compared with its plan; `log`: its name in messages. `gpu_name` and `model_name`
    replace what the log says (None: keep it). LegroomError for a text without a start-up."""
    startups = read_startups(text)
    if not startups:
        hint = "give the server's own output, from its first line to `startup complete`"
        raise LegroomError(f"{log} holds no vLLM start-up", hint)
    return [_calibrated_start(log, startup, gpu_name, model_name) for startup in startups]


def usable_observations(starts: Sequence[CalibratedStart]) -> list[Observation]:
    """What these starts measured, without those for which no memory term was measured."""
    return [start.observation for start in starts if start.observation is not None and start.observation.terms]


def _calibrated_start(log: str, startup: Startup, gpu_name: str | None, model_name: str | None) -> CalibratedStart:
    """What one start in a log measured, beside its plan; its note says why nothing or not all of it is kept."""
    model = model_name or startup.args.model
    try:
        name = gpu_name or startup.gpu_name
        card = gpu(name) if name is not None else None
        if card is not None and startup.gpu_total_bytes:
            card = with_total(card, startup.gpu_total_bytes)
        planned, note = _plan_of(startup, card, model)
        today = datetime.date.today().isoformat()
        observation = observe(startup, card, planned, model, source=PurePath(log).name, seen=today)
    except LegroomError as error:
        if error.hint:
            raise
        return CalibratedStart(log, startup, None, {}, error.message)
    if startup.compiled and "activation_bytes" not in observation.terms and startup.activation_bytes is not None:
        first = "a first start compiles and profiles more; its activation peak is not kept: calibrate on a later one"
        note = note or first
    if not observation.terms:
        note = note or "it prints no memory figures that legroom can reuse"
    return CalibratedStart(log, startup, observation, {} if planned is None else _predictions(planned), note)


def _plan_of(startup: Startup, card: Gpu | None, model: str) -> tuple[Plan | None, str]:
    """(the plan of a logged start-up, made without its printed figures, ""), or (None, why there is none; empty where
    the log names no card or release)."""
    if card is None or startup.vllm is None:
        return None, ""
    if not model:
        return None, "the log does not name its model (give --model); only what holds for any model is kept"
    args = startup.args
    try:
        return plan(Target(load_logged_model(model), card, args.gpus_needed, release(startup.vllm)), args), ""
    except LegroomError as error:
        return None, f"{error.message} (give --model); only what holds for any model is kept"


def _predictions(planned: Plan) -> dict[str, int]:
    """The planned bytes of each memory term, and of the KV cache, by the names that observations use."""
    layout = planned.layout
    return {
        "weights_bytes": layout.weights.bytes,
        "activation_bytes": layout.activation.bytes,
        "non_torch_bytes": layout.non_torch.bytes,
        "graph_estimate_bytes": layout.cuda_graph.bytes,
        "graph_bytes": planned.memory.graphs.bytes,
        "kv_cache_bytes": layout.kv_cache.bytes,
    }


def observe(
    startup: Startup, gpu: Gpu | None, planned: Plan | None, model: str, *, source: str = "", seen: str = ""
) -> Observation:
    """A start-up's observation to store, with the log's name `source` and the day `seen`; without a plan only terms
    that no model changes. LegroomError where GPU or release is unknown."""
    if gpu is None:
        hint = "say which one it was: legroom calibrate LOG --gpu 'NVIDIA H100 80GB HBM3'"
        raise LegroomError("the log does not name its GPU", hint)
    if startup.vllm is None:
        raise LegroomError("the log does not say which vLLM release wrote it", "give the whole start-up log")
    parallel_sizes = {name: getattr(startup.args, name, None) or 1 for name in store.PARALLEL}
    settings = store.settings_key(planned.settings) if planned is not None else parallel_sizes
    shape = store.model_fingerprint(planned.target.model) if planned is not None else ""
    version, total = release(startup.vllm).version, startup.gpu_total_bytes
    return Observation(gpu.name, total, model, version, settings, _logged_terms(startup, planned), source, seen, shape)


def _logged_terms(startup: Startup, planned: Plan | None) -> dict[str, int]:
    """The bytes that a log printed, by memory term; without those that later plans know better or cannot reuse."""
    printed = {name: getattr(startup, name, None) for name in store.TERM_SETTINGS}
    terms = {name: value for name, value in printed.items() if value is not None and value >= 0}
    if planned is None or planned.settings.pipeline_parallel_size > 1:
        # The log does not say which pipeline stage a line is from, and an unknown model has no plan to compare with.
        return {name: value for name, value in terms.items() if name in store.MODEL_INDEPENDENT_TERMS}
    weights, activation = planned.layout.weights, planned.layout.activation
    if weights.kind == "exact" and abs(terms.get("weights_bytes", 0) - weights.bytes) <= store.PRINTED_STEP_BYTES:
        terms.pop("weights_bytes", None)  # the exact figure says the same without the rounding of the print
    if startup.compiled and terms.get("activation_bytes", 0) > activation.bytes + store.PRINTED_STEP_BYTES:
        del terms["activation_bytes"]  # compiling took more than later starts will
    return terms


def probed_observation(args: ServeArgs, release: Release, gpu: str, profile: Mapping[str, int]) -> Observation:
    """What `legroom probe` measured of the deployment it started; `profile`: vLLM's accounting in bytes by term."""
    planned = make_plan(args, release, Machine(gpu), advice=False)
    where = (planned.target.gpu.name, profile["total_bytes"], args.model, release.version)
    key, today = store.settings_key(planned.settings), datetime.date.today().isoformat()
    # The sum of the terms leaves exactly the engine's KV cache bytes.
    weights, activation = profile["weights_bytes"], profile["torch_peak_bytes"]
    graphs = profile.get("graph_estimate_bytes", 0)
    terms = {"weights_bytes": weights, "activation_bytes": activation, "graph_estimate_bytes": graphs}
    if requested := profile.get("requested_bytes"):
        terms["profiled_non_torch_bytes"] = requested - profile["available_kv_bytes"] - weights - activation - graphs
    terms = {name: size for name, size in terms.items() if size >= 0}
    return Observation(*where, key, terms, "legroom probe", today, store.model_fingerprint(planned.target.model))
