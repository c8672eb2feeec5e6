"""The expected memory of a server: from a plan on a GPU, from the KV cache arithmetic alone on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu as known_gpu
from legroom.records import dataclass
from legroom.run.server_command import ServerCommand
from legroom.units import GIB, gib
from legroom.vllm.engine_selection import on_cpu
from legroom.vllm.setting_checks import RefusedByVllm
from legroom.vllm_logs.startup_log import read_startups

if TYPE_CHECKING:
    from legroom.live.gpu_memory import GpuMemory
    from legroom.planning.machine import Machine
    from legroom.planning.plan import Plan


@dataclass(frozen=True)
class Expectation:
    """The expected pool as a sentence and as numbers to compare with the log."""

    text: str
    verdict: str = "unknown"
    """`fits`, `tight`, `does_not_fit` or `unknown`."""
    tokens: int | None = None
    max_concurrency: float | None = None
    max_model_len: int | None = None


def expected_pool(command: ServerCommand, env: Mapping[str, str], gpus: Gpus) -> Expectation:
    """The KV pool that a plan of the command expects on these GPUs or a CPU; without one, why not, as a sentence."""
    if command.problems:
        return Expectation(f"vLLM {command.release} will refuse it: {'; '.join(command.problems)}", "does_not_fit")
    if not gpus.name:
        return _expected_on_cpu(command, env)
    try:
        return _expected_on_gpu(command, env, gpus)
    except RefusedByVllm as error:
        return Expectation(f"vLLM {command.release} will refuse it: {error.message}", "does_not_fit")
    except LegroomError as error:
        return Expectation(f"no plan: {error.message}")
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return Expectation("no plan: planning failed")


@dataclass(frozen=True)
class Gpus:
    """The GPUs that the server will see; no name where there are none."""

    name: str = ""
    count: int = 0
    used_bytes: int = 0
    """Memory that other processes hold on the fullest GPU."""
    seen: bool = False
    """Whether NVML listed them."""


def visible_gpus(env: Mapping[str, str], given_name: str | None = None, gpus_needed: int = 1) -> Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, named `given_name`, else as the driver does, else by their size.
    Memory in use is that of the fullest of the first `gpus_needed`, which the server will use."""
    from legroom.live.gpu_memory import nvml_devices, visible  # loads the driver's library

    if given_name:
        known_gpu(given_name)  # raises for an unknown name
    seen = visible(nvml_devices(), env.get("CUDA_VISIBLE_DEVICES"))
    if not seen:
        return Gpus(given_name or "", 1 if given_name else 0)
    name = given_name or seen[0].name
    try:
        known_gpu(name)
    except LegroomError:
        name = f"{seen[0].total_bytes / GIB:.2f}GiB"
    return Gpus(name, len(seen), max(_other_process_bytes(card) for card in seen[:gpus_needed]), seen=True)


def _other_process_bytes(card: GpuMemory) -> int:
    """GPU bytes of the processes on the card; if the driver hides them, all used bytes if above 1 GiB, else 0."""
    if card.processes and all(used for _, used in card.processes):
        return sum(used for _, used in card.processes)
    return card.used_bytes if card.used_bytes > GIB else 0


def plan_on_machine(command: ServerCommand, env: Mapping[str, str], machine: Machine) -> Plan:
    """The plan of the command on this machine, without advice; variables in the command override `env`."""
    from legroom.planning.machine import make_plan

    args = replace(command.args, env={**env, **command.env, **command.args.env})
    return make_plan(args, command.release, machine, advice=False)


def _expected_on_gpu(command: ServerCommand, env: Mapping[str, str], gpus: Gpus) -> Expectation:
    """What `legroom plan` expects on these GPUs: the KV pool, or why vLLM does not start; or LegroomError."""
    from legroom.planning.machine import Machine

    if not command.args.model:
        raise LegroomError("which model?")
    used = str(gpus.used_bytes) if gpus.seen or gpus.used_bytes else None
    plan = plan_on_machine(command, env, Machine(gpus.name, max(gpus.count, 1), used=used))
    failure, layout, kv = plan.memory.failure, plan.layout, plan.memory.kv
    if plan.verdict == "does_not_fit":
        return Expectation(f"it will not start: {failure.message if failure else plan.reason}", "does_not_fit")
    length, tokens = plan.settings.max_model_len, max(kv.tokens, 0)
    text = f"{gib(layout.weights.bytes)} weights, {gib(layout.kv_cache.bytes)} KV cache = {tokens:,} tokens, "
    text += f"{kv.max_concurrency:.1f} requests of {length:,}; the card will show {gib(layout.peak_used_bytes)} used"
    if plan.verdict == "tight":
        text += f" (tight: {plan.reason})"
    return Expectation(text, plan.verdict, tokens, kv.max_concurrency, length)


def _expected_on_cpu(command: ServerCommand, env: Mapping[str, str]) -> Expectation:
    """What to expect on a CPU: the KV pool if its size is given, else a sentence that there is no plan."""
    from legroom.memory.kv.kv_plan import kv_plan
    from legroom.vllm.resolve import resolve, served_model

    nothing = "no GPU here, so no plan of a card"
    pool = cpu_pool_bytes(command, env)
    if pool is None:
        return Expectation(nothing)
    try:
        args = on_cpu(command.args)
        card = known_gpu("24GiB")
        model = served_model(args)
        settings = resolve(args, model, card, command.release)
        kv = kv_plan(model, settings, card, [pool] * settings.pipeline_parallel_size)
    except (LegroomError, ArithmeticError, LookupError, TypeError, ValueError):
        return Expectation(nothing)
    if kv.failure is not None:
        return Expectation(f"{nothing}; the KV cache says no: {kv.failure.message}", "does_not_fit")
    text = f"{nothing}; {kv.tokens:,} tokens of KV cache, {kv.max_concurrency:.1f} requests of {kv.max_model_len:,}"
    return Expectation(text, "fits", kv.tokens, kv.max_concurrency, kv.max_model_len)


def cpu_pool_bytes(command: ServerCommand, env: Mapping[str, str]) -> int | None:
    """The KV cache size in bytes that command or environment set on a CPU; None where vLLM chooses it."""
    if command.args.kv_cache_memory_bytes is not None:
        return command.args.kv_cache_memory_bytes
    space_gib = {**env, **command.env}.get("VLLM_CPU_KVCACHE_SPACE", "")
    return int(space_gib) * GIB if space_gib.isdecimal() and int(space_gib) else None


_READ_BYTES = 16 << 20  # Larger than any log of a start-up.
POOL_TOLERANCE = 0.02
"""Deviation of a pool that counts as planned: vLLM prints memory in hundredths of a GiB."""


def pool_comparison(log: Path, expected: Expectation) -> str:
    """A sentence that compares the KV pool in vLLM's log with the expected one; empty where the log has none."""
    try:
        startups = read_startups(_log_text(log))
    except OSError:
        return ""
    startup = startups[-1] if startups else None
    if startup is None or startup.tokens is None:
        return ""
    times = f", {startup.max_concurrency:.2f} requests at once" if startup.max_concurrency is not None else ""
    printed = f"vLLM says: {startup.tokens:,} tokens of KV cache{times}"
    if not expected.tokens:
        return printed
    if startup.tokens == expected.tokens:
        return f"{printed}; exactly as planned"
    off = startup.tokens / expected.tokens - 1
    comparison = "as planned" if abs(off) <= POOL_TOLERANCE else f"the plan said {expected.tokens:,} ({off:+.1%})"
    return f"{printed}; {comparison}"


def store_calibration(log: Path, gpus: Gpus) -> str:
    """Store the memory that the start-up log measured, as `legroom calibrate` does; returns a sentence."""
    from legroom.planning.calibration import calibrated_starts, usable_observations
    from legroom.planning.calibration_store import store_observations

    if not gpus.name:
        return "nothing to learn from a start without a GPU"
    try:
        observations = usable_observations(calibrated_starts(_log_text(log), str(log), gpus.name, None))
        if observations:
            store_observations(observations)
    except LegroomError as error:
        return f"the measured memory could not be kept: {error.message}"
    except OSError as error:
        return f"the measured memory could not be kept: {log} cannot be read: {error.strerror}"
    terms = {name.removesuffix("_bytes") for observation in observations for name in observation.terms}
    if not terms:
        return "the start-up printed no memory that could be kept"
    return f"the measured memory is kept for later plans ({', '.join(sorted(terms)).replace('_', ' ')})"


def _log_text(log: Path) -> str:
    """The text of the log's first 16 MiB, which hold its start-up."""
    with log.open("rb") as file:
        return file.read(_READ_BYTES).decode("utf-8", "replace")
