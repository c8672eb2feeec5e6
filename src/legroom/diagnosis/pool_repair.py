"""A KV pool whose size was given outright, made as large as one request of max_model_len needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from legroom.diagnosis.finding import Fix
from legroom.diagnosis.repair import NOT_PLANNABLE
from legroom.diagnosis.workbench import Workbench
from legroom.facts.gpus import gpu as known_gpu
from legroom.memory.kv_plan import KvPlan, kv_plan
from legroom.units import GIB, MIB, cdiv, human_bytes
from legroom.vllm.args import ServeArgs
from legroom.vllm.cpu_platform import on_cpu

_SPACE = "VLLM_CPU_KVCACHE_SPACE"


def larger_pool(bench: Workbench, confidence: float = 0.7) -> Fix | None:
    """The same kind of limit with room for one request of the full length; None where the pool was not given."""
    args = bench.given_args
    if args.num_gpu_blocks_override is not None:
        return _more_blocks(bench, args, confidence)
    if args.kv_cache_memory_bytes is not None:
        return _more_bytes(bench, args, confidence)
    if _SPACE in args.env and not args.env[_SPACE].strip("0."):
        return _some_space(bench, args, confidence)
    return None


def _more_bytes(bench: Workbench, args: ServeArgs, confidence: float) -> Fix | None:
    plan = _pool(bench, args, args.kv_cache_memory_bytes or 0)
    if plan is None:
        return None
    wanted = cdiv(plan.needed_bytes + 2 * plan.bytes_per_block, MIB) * MIB
    while (larger := _pool(bench, args, wanted)) is not None and larger.failure is not None and wanted < 1 << 44:
        wanted = cdiv(wanted * 5 // 4, MIB) * MIB
    if larger is None or larger.failure is not None:
        return None
    flags = {"kv_cache_memory_bytes": wanted}
    why = f"One request of {larger.max_model_len:,} tokens needs {human_bytes(plan.needed_bytes)} of KV cache."
    return _fix(bench, flags, why, confidence)


def _more_blocks(bench: Workbench, args: ServeArgs, confidence: float) -> Fix | None:
    plan = _pool(bench, replace(args, num_gpu_blocks_override=None), 1 << 44)
    if plan is None or plan.failure is not None or not plan.bytes_per_block:
        return None
    blocks = cdiv(plan.needed_bytes, plan.bytes_per_block) + 1  # 0.28 and later keep one back
    why = f"One request of {plan.max_model_len:,} tokens needs {blocks:,} blocks."
    return _fix(bench, {"num_gpu_blocks_override": blocks}, why, confidence)


def _some_space(bench: Workbench, args: ServeArgs, confidence: float) -> Fix | None:
    plan = _pool(bench, args, 0)
    if plan is None:
        return None
    space = max(cdiv(plan.needed_bytes + 2 * plan.bytes_per_block, GIB), 1)
    why = f"{_SPACE} is in GiB; one request needs {human_bytes(plan.needed_bytes)}."
    env = {_SPACE: str(space)}
    return Fix("kv_cache_memory_bytes", why, env=env, confidence=confidence, command=bench.command({}, env))


def _fix(bench: Workbench, flags: Mapping[str, Any], why: str, confidence: float) -> Fix | None:
    trades = "that much more memory" if "kv_cache_memory_bytes" in flags else "more of the pool is used"
    return bench.change("kv_cache_memory_bytes", flags, why, trades=trades, confidence=confidence)


def _pool(bench: Workbench, args: ServeArgs, pool_bytes: int) -> KvPlan | None:
    """The blocks of a pool of this size; exact without a GPU too, because the arithmetic needs none."""
    from legroom.planning.log_model import model_of_log  # noqa: PLC0415 - costs a tenth of a second
    from legroom.vllm.resolve import resolve  # noqa: PLC0415

    if not args.model:
        return None
    card = bench.known.gpu or known_gpu("24GiB")
    args = replace(args if bench.known.gpu else on_cpu(args), kv_cache_memory_bytes=None)
    try:
        model = model_of_log(args.model)
        settings = resolve(args, model, card, bench.known.release)
        return kv_plan(model, settings, card, [pool_bytes] * settings.pipeline_parallel_size)
    except NOT_PLANNABLE:
        return None
