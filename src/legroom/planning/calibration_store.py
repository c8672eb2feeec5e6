"""What this user's start-up logs teach, and where it is kept: each start-up beside its plan, and its measurements in
one small JSON file, written whole or not at all."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from legroom.errors import BAD_INPUT, LegroomError
from legroom.facts.gpus import Gpu, gpu, with_total
from legroom.facts.releases import release
from legroom.home import store_path
from legroom.planning.calibration import (
    Observation,
    from_json,
    model_fingerprint,
    observe,
    settings_key,
    to_json,
    with_observation,
)
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan, Target, plan
from legroom.records import dataclass
from legroom.vllm_logs.printed_flags import load_logged_model
from legroom.vllm_logs.startup_log import Startup, read_startups

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.vllm.args import ServeArgs


__all__ = ["StoredCalibration", "locked", "open_for_change", "read_store", "store_path", "write_store"]

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    """What the store holds, and what the reader should be told about it."""

    observations: tuple[Observation, ...] = ()
    problem: str = ""
    """Why the file could not be read, if it could not."""


def read_store(path: Path | None = None) -> StoredCalibration:
    """What is stored. Never changes anything: a file that cannot be read is told as a problem."""
    path = path or store_path()
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return StoredCalibration()
    except (OSError, UnicodeDecodeError) as error:
        return StoredCalibration(problem=f"the calibration store {path} cannot be read: {error}")
    try:
        content = json.loads(text)
        schema = content["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            return StoredCalibration(
                problem=f"the calibration store {path} was written by a newer legroom (schema {schema})"
            )
        return StoredCalibration(tuple(from_json(entry) for entry in content["observations"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return StoredCalibration(problem=f"the calibration store {path} is damaged: {error}")


def write_store(observations: tuple[Observation, ...], path: Path | None = None) -> None:
    """Replace the store in one step; a reader sees the old file or the new one, never half of one."""
    path = path or store_path()
    content = {"schema": SCHEMA, "observations": [to_json(observation) for observation in observations]}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise LegroomError(
            f"the calibration store {path} cannot be written: {error}", "set LEGROOM_HOME to a folder you can write to"
        ) from error


def open_for_change(path: Path) -> tuple[tuple[Observation, ...], str]:
    """What is stored, ready to be replaced. A damaged file is first moved aside, and the note says where to."""
    stored = read_store(path)
    if not stored.problem:
        return stored.observations, ""
    if "newer legroom" in stored.problem:
        raise LegroomError(stored.problem, "update legroom, or set LEGROOM_HOME to another folder", BAD_INPUT)
    aside = _unused_name(path)
    try:
        path.rename(aside)
    except OSError as error:
        raise LegroomError(stored.problem, f"it cannot be moved aside either: {error}") from error
    return (), f"{stored.problem}; it was moved to {aside}, and a new store begins"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the store for one change, so that two calibrations at once lose nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise LegroomError(
            f"the calibration store {path} cannot be written: {error}", "set LEGROOM_HOME to a folder you can write to"
        ) from error
    with lock:
        try:
            import fcntl  # (absent on Windows, where a second writer is simply not held off)
        except ImportError:
            yield
            return
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unused_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return aside


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
    return [_calibrated_start(log, startup, gpu_name, model_name) for startup in startups]


def store_measurements(starts: Sequence[CalibratedStart]) -> tuple[int, str]:
    """Into the store: how many of the start-ups had something to keep, and a note on the store where there is one."""
    learnt = measured(starts)
    if not learnt:
        return 0, ""
    path = store_path()
    with locked(path):
        observations, note = open_for_change(path)
        for observation in learnt:
            observations = with_observation(observations, observation)
        write_store(observations, path)
    return len(learnt), note


def measured(starts: Sequence[CalibratedStart]) -> list[Observation]:
    """The observations that hold a figure."""
    return [start.observation for start in starts if start.observation is not None and start.observation.terms]


def _calibrated_start(log: str, startup: Startup, gpu_name: str | None, model_name: str | None) -> CalibratedStart:
    model = model_name or startup.args.model
    try:
        card = _card(startup, gpu_name)
        planned, note = _plan_of(startup, card, model)
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


def _plan_of(startup: Startup, card: Gpu | None, model: str) -> tuple[Plan | None, str]:
    """What legroom would have said without this log. A model it cannot find limits what can be learnt."""
    if card is None or startup.vllm is None:
        return None, ""
    if not model:
        return None, "the log does not name its model (give --model); only what holds for any model is kept"
    args = startup.args
    try:
        return plan(Target(load_logged_model(model), card, args.gpus_needed, release(startup.vllm)), args), ""
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
        model_fingerprint(planned.target.model),
    )


def profiled_terms(profile: Mapping[str, int]) -> dict[str, int]:
    """The terms that leave exactly the KV bytes that the engine had left."""
    weights, activation = profile["weights_bytes"], profile["torch_peak_bytes"]
    graphs = profile.get("graph_estimate_bytes", 0)
    terms = {"weights_bytes": weights, "activation_bytes": activation, "graph_estimate_bytes": graphs}
    if requested := profile.get("requested_bytes"):
        terms["profiled_non_torch_bytes"] = requested - profile["available_kv_bytes"] - weights - activation - graphs
    return {name: size for name, size in terms.items() if size >= 0}


def store_observation(observation: Observation) -> str:
    """Into the calibration store; a note on the store where there is one."""
    path = store_path()
    with locked(path):
        observations, note = open_for_change(path)
        write_store(with_observation(observations, observation), path)
    return note
