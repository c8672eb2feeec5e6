"""Memory of the machine, not of the GPU: RAM, a cgroup, /dev/shm, pinned memory, address space."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from legroom.diagnosis.causes import Assessment, Case, Cause, Fix, FixPlanner, known_fix, proof, reason
from legroom.diagnosis.causes.no_cache_blocks import cpu_check_failure
from legroom.diagnosis.finding import Strength
from legroom.facts import read_data
from legroom.facts.log_messages import message_group
from legroom.units import GIB, KIB, cdiv, gib
from legroom.vllm.args import other_values
from legroom.vllm_logs.evidence import Evidence

_CERTAIN = message_group("host_memory")
_LIKELY = ("oom_killer", "bus_error", "core_bus_error", "host_ram_told", "cpu_share_told")
_POSSIBLE = ("core_killed", "sigkill", "killed_word", "lmcache_no_memory")
_WEAK = ("ray_worker_died", "died_silently")
_REFUSED_PIN = "CUDA error: invalid argument"  # What cudaHostAlloc returns for a size that the host cannot lock.

_MEMORY = re.compile(r"oom|memory", re.IGNORECASE)
_BY_SIGN = (
    ("too_large_swap", "no_swap"),
    ("tmpfs_checkpoint", "checkpoint_on_disk"),
    ("streamer_loader", "bounded_streamer"),
    ("unbounded_loader", "bounded_loader"),
    ("tenants_told", "host_of_others"),
)
"""What in the text names the part of host memory that can be given back, and how."""
_LARGE_SHM_GIB = 10  # What the steps of `larger_shm` name; NCCL's segments of a node take a few GiB.
_LITTLE_LEFT = 20  # Ray's monitor and earlyoom act at a twentieth of the RAM.
_NODE_LIMITS = {"CONSTRAINT_CPUSET": "wider_cpuset", "CONSTRAINT_MEMORY_POLICY": "wider_memory_policy"}
_CGROUP_MARKS = re.compile(
    "cgroup out of memory|CONSTRAINT_MEMCG|(?<!not a )(?<!not )(?<!no )cgroup (?:cap|limit)|failcnt"
)
_LIMITED = re.compile(r"(?i)kube|\bpods?\b|OOMKilled|137|limit|oom_kill event|\bjob\b|signal 9|status=9|-9\b")
"""What names the memory limit of a container or job, or the exit code that its platform reports."""


def is_of_container(case: Case) -> bool:
    """Whether the kernel names the limit of a container, not the machine's memory."""
    return any(_CGROUP_MARKS.search(item.text) for item in case.evidence)


def is_bare_kill(evidence: tuple[Evidence, ...]) -> bool:
    """Whether the evidence is a SIGKILL alone, without a word about memory."""
    return all(item.id in ("sigkill", "killed_word") and not _MEMORY.search(item.text) for item in evidence)


def examine(case: Case) -> Assessment | None:
    """Assesses a lack of host RAM by pinned sizes, messages of kernel, platform or Ray, or a cut-off load; or None."""
    shares = case.first("cpu_below_desired") or (None if cpu_check_failure(case) else case.first("cpu_kv_short"))
    if shares:
        free, total = (gib(int(shares.facts.get(name, 0))) for name in ("free_bytes", "total_bytes"))
        why = f"On the CPU backend the KV cache is host RAM: {free} of {total} were available, and more was asked for."
        return Assessment(Strength.NAMED, proof(shares), why)
    if pinned := _pinned_beyond_ram(case):
        each, ranks, host = pinned
        why = f"{ranks} ranks pin {gib(each)} of host RAM each, {gib(ranks * each)} together; the host has {gib(host)}."
        return Assessment(Strength.NAMED, proof(case.last("lmcache_size"), case.first("host_ram")), why)
    for ids, certainty in (
        (_CERTAIN, Strength.NAMED),
        (_LIKELY, Strength.LIKELY),
        (_POSSIBLE, Strength.SUGGESTED),
        (_WEAK, Strength.USUAL),
    ):
        error = case.first(*ids)
        if error is not None and error.id in _POSSIBLE and error.role != "host":
            continue  # the server ended its own workers
        if (
            error is not None
            and error.id in _WEAK
            and (case.last_error or case.traceback_frames or not (error.id == "ray_worker_died" or case.milestones))
        ):
            continue  # a process that ended is no evidence beside an error or traceback, an engine none before a step
        if error is not None:
            proven = proof(case.first("shm_small", "nccl_system_error"), error)
            return Assessment(_strength(case, error, certainty), proven, _explanation(case))
    refused = case.first("cuda_oom") or next(
        (item for item in case.all("exception") if _REFUSED_PIN in item.text), None
    )
    if refused is not None and "frame_pin" in case.frames:
        why = "Pinned host memory could not be had: it must be real RAM within the locked-memory limit."
        return Assessment(Strength.NAMED, proof(case.first("frame_pin"), refused), why)
    oom = case.oom
    if oom and case.ledger.free_exceeds_request:
        free, wanted = gib(oom.free_bytes or 0), gib(oom.wanted_bytes)
        why = f"{free} of the card were free and only {wanted} asked for: the host could not back it."
        return Assessment(Strength.POSSIBLE, proof(case.first("torch_oom"), case.first("prefetch_ram_short")), why)
    short = case.last("prefetch_ram_short")
    if short is not None and case.phase_reached == "startup_load" and case.secondary_failure and not case.last_error:
        size, ram = (gib(short.number(name) or 0) for name in ("checkpoint_bytes", "ram_bytes"))
        why = f"The engine ended while it read a checkpoint of {size} with {ram} of RAM available, without an error."
        return Assessment(Strength.SUGGESTED, proof(short, case.last("shards"), case.secondary_failure), why)
    if case.unfinished_milestone is not None and case.phase_reached == "startup_load":
        why = reason("ends_while_loading")
        return Assessment(Strength.USUAL, proof(case.unfinished_milestone), why)
    if case.has("nccl_system_error"):
        why = "NCCL's system call failed; the usual reason in a container is a /dev/shm of 64 MiB."
        return Assessment(Strength.POSSIBLE, proof(case.first("nccl_system_error")), why)
    return None


def _pinned_beyond_ram(case: Case) -> tuple[int, int, int] | None:
    """(bytes each rank pins, ranks, bytes of RAM) where they pin more than the RAM and no GPU OOM is shown; or None."""
    args = case.startup.args
    buffer = max((item.number("buffer_bytes") or 0 for item in case.all("lmcache_size")), default=0)
    size = buffer + round(((args.swap_space or 0) + (args.cpu_offload_gb or 0)) * GIB)
    ram = max((item.number("ram_bytes") or 0 for item in case.all("host_ram")), default=0)
    return (size, args.engine_ranks, ram) if 0 < ram <= size * args.engine_ranks and not case.is_oom else None


_OF_ONE_MEMORY = ("oom_killer", "killed_process", "host_ram_told", "killed_word")
"""Kills that shared memory explains as well as the host's."""


def _strength(case: Case, error: Evidence, certainty: Strength) -> Strength:
    """`certainty`, lowered where a failure precedes the line `error`, the driver had no pages, or memory is unified."""
    reasons = (item for item in case.evidence if item.role in ("failure", "exception") and not item.is_warning)
    if error.id not in _CERTAIN and any(item.line < error.line for item in reasons):
        return min(certainty, Strength.POSSIBLE)  # the GPU side failed first; a server that shuts down kills its own
    on_shared_memory = case.platform.unified and error.id in _OF_ONE_MEMORY
    return min(certainty, Strength.SUGGESTED) if case.has("driver_no_memory") or on_shared_memory else certainty


def _explanation(case: Case) -> str:
    """What ran out on the host (RAM, container limit, /dev/shm, pinned memory), or which signal ended it."""
    if killed := case.all("killed_process"):
        largest = max(killed, key=_resident_bytes)
        size = f" It held {gib(held)} of RAM." if (held := _resident_bytes(largest)) else ""
        size += reason("shared_part", {"shared": gib(shared)}) if (shared := _shared_bytes(case)) else ""
        facts = [largest.facts, *(item.facts for item in killed)]
        victims = (item[name] for item in facts for name in ("victim", "bare_victim", "prose_victim") if item.get(name))
        scope = "the container's limit" if is_of_container(case) else "the machine's RAM"
        scope = reason(nodes) if (nodes := _limit_of_nodes(case)) else scope
        return f"The kernel killed {next(victims, 'a process')} because {scope} was used up.{size}"
    on_node = next((item for item in case.all("ray_node_memory") if "used_bytes" in item.facts), None)
    if on_node:
        used, total = (gib(int(on_node.facts.get(name, 0))) for name in ("used_bytes", "total_bytes"))
        return f"{used} of the node's {total} of RAM were in use, so Ray's memory monitor killed a worker on it."
    shm, left = case.first("shm_small", "shm_no_space", "shm_insufficient", "bus_error"), case.first("shm_leftovers")
    if shm and left:
        piece = f" for a segment of {shm.number('segment_count') or 0:,} bytes" if "segment_count" in shm.facts else ""
        return f"/dev/shm has no room left{piece}: what earlier processes left behind in it has filled it."
    if shm and not case.has("cpu_share_told", "host_ram_told"):
        available = shm.facts.get("bytes_count")
        have = f" It has {gib(available)}." if isinstance(available, int) else ""
        return reason("shm_small", {"have": have})
    if (mapped := case.first("mmap_failed")) and not case.has("cpu_share_told", "host_ram_told"):
        size = gib(int(mapped.facts.get("bytes_count", 0)))
        return f"The system could not map a file of {size}: RAM, address space or an overcommit limit is exhausted."
    signal = case.first("sigkill", "killed_word")
    if signal and _MEMORY.search(signal.text) and not case.has("cpu_share_told", "host_ram_told", "pinned_failed"):
        by_limit = "The platform reports that the container or job went over its memory limit and was killed."
        return by_limit if _names_limit(case) else "The text says that the system ended the process for want of RAM."
    if used_up := _ram_used_up(case):
        return f"Of {gib(used_up[0])} of RAM {gib(used_up[1])} were available: the machine's memory was used up."
    rows = read_data("diagnosis_texts.json")["host_explanations"]
    return next(str(text) for ids, others, text in rows if (not ids or case.has(*ids)) and not case.has(*others))


def _resident_bytes(killed: Evidence) -> int:
    """RAM and shared memory of a killed process by the kernel's line; 0 where not printed."""
    return sum(killed.number(name) or 0 for name in ("anon_count", "shmem_count")) * KIB


def _shared_bytes(case: Case) -> int:
    """Shared memory of the largest killed process in bytes, where it is over 3/4 of what that held; else 0."""
    largest = max(case.all("killed_process"), key=_resident_bytes, default=None)
    shared = (largest.number("shmem_count") or 0) * KIB if largest is not None else 0
    return shared if largest is not None and 4 * shared > 3 * _resident_bytes(largest) else 0


def remedies(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable) by what ran out: a smaller CPU KV cache, more /dev/shm, less pinned memory ..."""
    case = planner.case
    shares = case.first("cpu_below_desired", "cpu_kv_short")
    if shares and not cpu_check_failure(case):
        yield _smaller_cpu_pool_fix(planner, shares)
    if pinned := _pinned_beyond_ram(case):
        size, ranks, ram = pinned
        each, given = ram * 3 // 4 // ranks // GIB, planner.known.args.cpu_offload_gb
        names = "max_local_cpu_size (LMCACHE_MAX_LOCAL_CPU_SIZE)" if case.has("lmcache_size") else "--swap-space"
        steps = (f"{'--cpu-offload-gb' if given else names} of {each} GB or less, which is {each * ranks} GB in all",)
        why = f"Every rank pins its own buffer: {ranks} x {gib(size)} are more than {gib(ram)}."
        yield Fix("more_host_ram_or_shm", why, steps=steps)
    if case.has("cpu_share_told"):
        yield known_fix("cpu_pool_in_bytes")
    if case.has("shm_small", "shm_no_space", "shm_insufficient", "bus_error", "nccl_system_error"):
        yield from _shm_fixes(planner)
        return
    elif case.has("mmap_failed"):
        mapped = case.number("mmap_failed", "bytes_count") or 0
        yield replace(known_fix("map_whole_file"), why=reason("whole_file_reserved", {"size": gib(mapped)}))
    elif case.has("lmcache_no_memory"):
        yield known_fix("larger_lmcache_buffer")
        return
    else:
        yield known_fix("shared_mapping") if _shared_bytes(case) and not case.platform.unified else None
        yield from (known_fix(fix) for sign, fix in _BY_SIGN if case.has(sign))
        is_pinned = case.has("pinned_failed") or "frame_pin" in case.frames
        if is_pinned and _pins_swap_space(planner):
            yield known_fix("less_swap")
        elif is_pinned and not planner.known.args.cpu_offload_gb:
            yield known_fix("less_pinned_memory")
        if case.has("sleep_enabled"):
            yield known_fix("sleep_without_backup")
        offload = None if _is_bare_sigkill(case) else _less_offload_fix(planner)
        if offload is not None and not offload.steps:
            yield offload
        if case.platform.unified and case.has("ray_node_memory"):
            yield known_fix("share_of_one_memory")
        pool, smaller = planner.known.args.kv_cache_memory_bytes, None
        if (pool is not None or case.platform.unified) and case.has("killed_process", "sigkill", "oom_killer"):
            why = reason("pool_is_ram", {"pool": gib(pool)}) if pool else reason("one_memory")
            smaller = planner.lower_utilization(pool // 8 if pool else 8 * GIB, why)  # what the system needs itself
        grows = case.has("later_step", "growth_words", "leak_named") and not case.platform.unified
        yield known_fix("host_memory_grows") if grows else None
        fixes = (_more_ram_fix(planner), smaller)
        # A pool in bytes is what users of machines with one memory give, where the share moves with the page cache.
        yield from reversed(fixes) if case.platform.unified or _is_of_machine(case) else fixes
        yield offload if offload is not None and offload.steps else None
    if planner.known.ranks > 1:
        flags = {"max_parallel_loading_workers": 1} if case.engine.generation == "V0" else {}
        yield replace(known_fix("load_in_turn"), flags=flags)
    if case.phase_reached == "serving" or case.has("ray_node_memory"):
        return
    yield known_fix("small_shards")


def _shm_fixes(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes (None: not applicable) for a /dev/shm that is too small, by the platform and the size that is named."""
    case, shm = planner.case, known_fix("larger_shm")
    yield _smaller_offload_region(planner)
    compose = "docker compose" if case.has("compose_told") else "docker run"
    here = "Kubernetes" if case.has("kubernetes_told") else compose
    needed = max(case.number("shm_insufficient", "required_bytes") or 0, case.number("shm_worked", "worked_bytes") or 0)
    size_gib = max(cdiv(needed, GIB), _LARGE_SHM_GIB)
    sized = (step.replace(f"{_LARGE_SHM_GIB}g", f"{size_gib}g") for step in shm.steps)
    yield replace(shm, steps=tuple(sorted(sized, key=lambda step: not step.startswith(here))))


def _smaller_offload_region(planner: FixPlanner) -> Fix | None:
    """Fix: a --kv-offloading-size that /dev/shm has room for; None where the text does not print what is free there."""
    required, free = (planner.case.number("shm_insufficient", f"{part}_bytes") for part in ("required", "free"))
    left_gib = int((free or 0) * 0.9) // GIB
    if not required or not left_gib or other_values(planner.given_args, "--kv-offloading-size") is None:
        return None
    why = f"The region for offloaded KV blocks takes {gib(required)} of /dev/shm, and {gib(free or 0)} are free there."
    return Fix("cpu_offload", why, {"kv_offloading_size": left_gib}, trades="fewer offloaded blocks", proven=True)


def _ram_used_up(case: Case) -> tuple[int, int] | None:
    """(RAM, available RAM) in bytes by `free -h`, where less than a twentieth is available; None otherwise."""
    listed = case.last("ram_listed")
    ram, left = (listed.number(name) or 0 if listed else 0 for name in ("ram_bytes", "available_bytes"))
    return (ram, left) if left * _LITTLE_LEFT < ram else None


def _is_of_machine(case: Case) -> bool:
    """Whether the kernel's lines, or `free -h`, say that the machine's own RAM was used up, not a container's limit."""
    marks = ("Out of memory: Killed", "CONSTRAINT_NONE", "global_oom")
    return _ram_used_up(case) is not None or any(
        mark in item.text for item in case.all("killed_process", "oom_killer") for mark in marks
    )


def _limit_of_nodes(case: Case) -> str:
    """Id of the known fix for a cpuset or memory policy that binds to NUMA nodes; empty without such a kernel line."""
    kernel = [item.text for item in case.evidence]
    return next((fix for mark, fix in _NODE_LIMITS.items() if any(mark in text for text in kernel)), "")


def _names_limit(case: Case) -> bool:
    """Whether the text names the limit of a container or job, or a kill as its platform reports it."""
    own = case.all("sigkill", "killed_process", "oom_killer", "host_ram_told")
    return bool(case.host_limit_bytes) or is_of_container(case) or any(_LIMITED.search(item.text) for item in own)


def _pins_swap_space(planner: FixPlanner) -> bool:
    """Whether --swap-space pins host memory here, as it does in the V0 engine alone."""
    return planner.case.engine.generation == "V0" or planner.known.release.before("0.8.0")


def _is_bare_sigkill(case: Case) -> bool:
    """Whether a SIGKILL without a word about memory is all that the text has."""
    error = None if _is_of_machine(case) else case.first("sigkill", "killed_word")
    return error is not None and is_bare_kill((case.first(*_CERTAIN, *_LIKELY) or error,))


def _less_offload_fix(planner: FixPlanner) -> Fix | None:
    """Fix: the least --cpu-offload-gb that starts, else half, and the larger container limit that it needs; or None."""
    from legroom.planning.plan import plan

    if not (offload_gb := planner.known.args.cpu_offload_gb):
        return None
    why = f"{offload_gb:g} GiB of weights are to stay in host RAM for every GPU."
    less = [{"cpu_offload_gb": float(int(offload_gb * part / 8))} for part in range(8)]
    fix = planner.first_change_that_fits("cpu_offload", less, why, trades="a smaller KV pool")
    fix = fix or planner.plan_change("cpu_offload", less[4], why, trades="a smaller KV pool")
    if fix is None or (made := planner.failed_plan or planner.plan_by_config) is None:
        return fix
    after = plan(made.target, replace(made.args, **fix.flags)).host
    why = f"{fix.why} It saves {gib(made.host.held_bytes - after.held_bytes)} of host memory."
    if planner.failed_plan is None:
        why += " The text does not name the card: legroom plan tells whether it holds the rest."
    limit = planner.case.host_limit_bytes
    is_enough = limit is None or limit >= after.request_bytes
    return replace(fix, why=why, steps=() if is_enough else (_raise_limit(after.limit_bytes),))


def _raise_limit(limit_bytes: int) -> str:
    """A step in words: raise the container's memory limit to this, rounded down to whole GiB."""
    size = limit_bytes // GIB
    return f"raise the container's memory limit to {size} GiB (resources.limits.memory: {size}Gi), or add RAM"


def _more_ram_fix(planner: FixPlanner) -> Fix:
    """Fix: a higher memory limit or more RAM; on Ray, its memory monitor's threshold."""
    case, made = planner.case, planner.failed_plan or planner.plan_by_config
    limit = case.host_limit_bytes or 0
    steps = [*known_fix("more_ram_of_container").steps]
    if made is not None and limit < made.host.limit_bytes:
        steps[0] = _raise_limit(made.host.limit_bytes)
    if case.has("slurm_told") or case.platform.wsl:  # these bound what the kernel calls the machine
        size = f": {made.host.limit_bytes // GIB} GiB or more" if made is not None else ""
        steps[0] = reason("memory_of_job" if case.has("slurm_told") else "memory_of_wsl", {"size": size})
    elif nodes := _limit_of_nodes(case):
        steps[:1] = known_fix(nodes).steps
    elif _is_of_machine(case):
        steps[0] = "add RAM or swap, or stop what else runs there: the machine's own RAM was used up, not a limit"
    elif not _names_limit(case):
        steps[:1] = known_fix("more_ram_of_machine").steps
    if case.has("ray_node_memory"):
        steps = list(known_fix("ray_node_ram").steps)
    if _pins_swap_space(planner):
        steps.append(known_fix("less_pinned_swap").steps[0])
    why, sender = "The host or the container needs more RAM than it has.", known_fix("find_the_sender")
    why = known_fix(_limit_of_nodes(case) or "wider_cpuset").why or why
    if _is_bare_sigkill(case):
        why, steps = sender.why, [*sender.steps, *steps]
    if made is not None:
        why += f" The checkpoint alone is {gib(made.host.checkpoint_bytes)}."
    why += f" The limit found is {gib(limit)}." if limit else ""
    if made is not None:
        held, wanted = gib(made.host.held_bytes), gib(made.host.limit_bytes)
        why += f" The plan holds {held} for good and recommends a limit of {wanted}."
        if limit >= made.host.limit_bytes:
            why += " The limit found is not below that, so something else in the container used the memory."
    return Fix("more_host_ram_or_shm", why, steps=tuple(steps))


def _smaller_cpu_pool_fix(planner: FixPlanner, check: Evidence) -> Fix | None:
    """Fix: a KV cache within the free RAM that the CPU backend's error `check` prints; None where no change starts."""
    free, total = (int(check.facts.get(name, 0)) for name in ("free_bytes", "total_bytes"))
    if planner.known.args.kv_cache_memory_bytes:
        flags: dict[str, Any] = {"kv_cache_memory_bytes": max(int(free * 0.8), 1)}
        return planner.plan_change("kv_cache_memory_bytes", flags, f"{gib(free)} of RAM are available.")
    if "VLLM_CPU_KVCACHE_SPACE" in planner.given_args.env:
        env = {"VLLM_CPU_KVCACHE_SPACE": str(max(int(free * 0.8) // GIB, 1))}
        why = f"VLLM_CPU_KVCACHE_SPACE is in GiB, and {gib(free)} of RAM are available."
        return Fix("kv_cache_memory_bytes", why, env=env)
    flags = {"gpu_memory_utilization": math.floor(free * 0.9 / max(total, 1) * 100) / 100}
    return planner.plan_change("lower_util", flags, f"{gib(free)} of {gib(total)} are available.")


CAUSE = Cause(entry="LR501", domain="host")
