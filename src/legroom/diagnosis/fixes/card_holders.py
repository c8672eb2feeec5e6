"""Who holds the memory of the card, by the text, and what to do about it: end it, move to a free card, share."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from legroom.diagnosis.case import Case
from legroom.diagnosis.finding import Fix, known_fix, reason
from legroom.diagnosis.fixes.failed_server import FailedServer
from legroom.facts import read_data
from legroom.facts.gpus import all_gpus
from legroom.memory.overhead import desktop_bytes
from legroom.units import GIB, gib
from legroom.vllm_logs.evidence import Evidence, sizes_bytes

_HOLDERS = {"NPU": "npu-smi info", "HIP": "rocm-smi --showpids", "XPU": "xpu-smi ps"}
"""The command that lists the processes on a card that is not NVIDIA's."""
_VIEWS = ("wsl", "container_told")  # Where the process list inside does not show who holds the card: what shows it.
SPARE_SHARE = 0.1
"""What two servers use beside their shares: contexts and graphs (H200 starts: 2 to 4 GiB each)."""
_SIZE = re.compile(r"(?i)(\d+(?:\.\d+)?) ?([GM])(?:i?B)?\b")
_SIBLINGS = 2  # So many CUDA contexts of the same size to the byte that is printed are of one program's processes.
_USABLE_PART = 5  # A budget below a fifth of the wanted one hardly holds the model that the wanted one was for.
UNEQUAL_BYTES = 2 * GIB
"""Ranks of one engine differ by less: only rank 0 has connections of its own (H200 starts: at most 0.5 GiB)."""


def free_and_total_bytes(case: Case) -> tuple[int | None, int | None]:
    """(free, total) bytes in vLLM's start-up check; an unprinted total is budget / utilization; None if unknown."""
    free, total, desired = (case.number("free_below_desired", f"{name}_bytes") for name in ("free", "total", "desired"))
    share = case.startup.args.gpu_memory_utilization
    return free, total or (round(desired / share) if desired and share else None)


def described_holder(case: Case) -> tuple[Evidence, int] | None:
    """(line, bytes) of a sentence or nvidia-smi row that shows over a GiB of the card held by others; else None."""
    told = case.first("neighbour_holds")
    if (loaded := case.first("programs_loaded")) is not None:
        size = sum(sizes_bytes(f"{number} {unit}iB" for number, unit in _SIZE.findall(str(loaded.facts["what"]))))
        return (loaded, size) if size > GIB else None
    if (used := case.first("memory_held_told")) is not None:
        size = used.number("idle_bytes") or used.number("held_bytes") or 0
        return (used, size) if size > GIB else None
    if told is not None:
        return told, round(float(told.facts["what"]) * GIB)
    return next(_other_programs(case), None) or max(_used_rows(case), key=lambda row: row[1], default=None)


def named_holders(case: Case) -> list[str]:
    """Who holds over a GiB of the card beside this process (`process 7 with 2.0 GiB`): torch's list or a sibling."""
    oom = case.oom
    if oom is not None and oom.total_bytes and oom.own_bytes:
        listed = zip(oom.other_pids, oom.others_bytes, strict=False)
        return [f"process {pid} with {gib(size)}" for pid, size in listed if size >= GIB and size != oom.own_bytes]
    check = case.first("free_below_desired")
    if check is None or not is_held_by_sibling(case):
        return []
    loaded = max(case.all("weights_loaded"), key=lambda item: item.number("weights_bytes") or 0)
    stage, size = re.search(r"\[(Stage-\d+)\]", loaded.text), gib(loaded.number("weights_bytes") or 0)
    is_other = stage is not None and stage[1] not in check.text
    return [f"{stage[1]} of the same launch, whose model took {size}"] if stage and is_other else []


def _other_programs(case: Case) -> Iterator[tuple[Evidence, int]]:
    """(line, bytes) of each program, neither vLLM nor Python, with over a GiB in nvidia-smi's list of processes."""
    for item in case.all("smi_process"):
        size = item.number("held_bytes") or 0
        if size > GIB and not re.search(r"(?i)vllm|python", str(item.facts["what"])):
            yield item, size


def _used_rows(case: Case) -> Iterator[tuple[Evidence, int]]:
    """(line, bytes in use) of each card of nvidia-smi with over 2 GiB, and under half of a server's budget, in use."""
    if case.has("smi_process", "server_ready", "engine_stats") or case.ledger.other_processes_bytes:
        return
    for item in case.all("card_usage"):
        used, share = item.number("used_bytes") or 0, case.startup.args.gpu_memory_utilization or 0.9
        if 2 * GIB < used < share * (item.number("total_bytes") or 0) / 2:
            yield item, used


def listed_programs(case: Case) -> list[str]:
    """`NAME with SIZE` of each program, neither vLLM nor Python, with over a GiB in nvidia-smi's list of processes."""
    return [f"{str(item.facts['what']).rpartition('/')[2]} with {gib(size)}" for item, size in _other_programs(case)]


def idle_cards(case: Case) -> list[int]:
    """Indices of the GPUs that nvidia-smi or a sentence shows as idle, without the one that failed."""
    numbers = {item.line: item.number("index_count") or 0 for item in case.all("gpus_listed")}
    used = {
        item.line: (item.number("used_bytes") or 0) / (item.number("total_bytes") or 1)
        for item in case.all("card_usage")
    }
    idle = {numbers.get(line - 1, 0) for line, part in used.items() if part <= 1 / 20}
    for told in (str(item.facts["what"]) for item in case.all("idle_card_told")):
        first, *_, last = 2 * [int(number) for number in re.findall(r"\d", told)]
        idle |= {*range(first, last + 1)} if re.search("[-~到]|to", told) else set(map(int, re.findall(r"\d", told)))
    check, oom = case.first("free_below_desired"), case.oom
    failed = re.search(r"\b[a-z]+:(\d)\b", check.text) if check else None
    return sorted(idle - {int(failed[1]) if failed else (oom.gpu or 0 if oom else 0)})


def idle_card_fix(planner: FailedServer) -> Fix | None:
    """Fix: CUDA_VISIBLE_DEVICES with the idle cards that the text shows; None where these are fewer than the ranks."""
    cards, ranks = idle_cards(planner.case), planner.known.ranks
    if planner.case.is_npu or len(cards) < ranks:
        return None
    names = ",".join(map(str, cards[:ranks]))
    steps = (f"of a container: docker run --gpus '\"device={names}\"'",)
    return Fix(
        "free_gpu_or_kill_orphans", reason("idle_card", {"names": names}), {}, {"CUDA_VISIBLE_DEVICES": names}, steps
    )


def is_held_by_sibling(case: Case) -> bool:
    """Whether the memory in use at start-up is, within 2 GiB, the weights that another engine of this log loaded."""
    free, total = free_and_total_bytes(case)
    if free is None or total is None:
        return False
    loaded = [item.number("weights_bytes") or 0 for item in case.all("weights_loaded")]
    return any(0 <= total - free - weights < UNEQUAL_BYTES for weights in loaded if weights > GIB)


def free_gpu_fix(planner: FailedServer, less: Fix | None) -> Fix:
    """Fix: how to find and stop the process that holds the memory; `less`: the fix if that process has to stay."""
    check = planner.case.first("free_below_desired")
    device = str(check.facts.get("device", "cuda")).upper() if check else "CUDA"
    platform = "NPU" if planner.case.is_npu else planner.case.oom.platform if planner.case.oom else device
    holders = _HOLDERS.get(platform, "nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv")
    # What an ended server left behind is its own workers, whatever launcher the text names.
    rows = () if planner.case.has("not_released_told") else read_data("diagnosis_texts.json")["card_programs"]
    programs = [step for words, step in rows if planner.case.tells(re.compile(f"(?i){words}"))]
    # Two equal small shares or more are contexts, as one program's stages have.
    small = [size for size in planner.case.oom.others_bytes if size < GIB // 2] if planner.case.oom is not None else []
    own = known_fix("own_stages").steps if any(small.count(size) >= _SIBLINGS for size in small) else ()
    free_it = known_fix("free_desktop" if _is_desktop_usual(planner) else "free_gpu")
    steps = [*own, *programs, holders, *free_it.steps]
    steps[-3:-3] = [known_fix(name).steps[0] for name in _VIEWS if planner.case.has(name)]
    share = less.flags.get("gpu_memory_utilization") if less else None
    if planner.utilization < 0.5 and planner.case.has("free_below_desired"):
        # Who asks for less than half of a card means to share it.
        most = math.floor((1 - planner.utilization - SPARE_SHARE) * 100) / 100
        steps[-3:-2] = [
            f"restart the server that holds it with --gpu-memory-utilization {most:g} or less: beside it "
            f"{planner.utilization:g} are asked for here, and the shares of one card add up to less than 1",
            "an orphan of an earlier run has to end: by its PID, its title is VLLM::EngineCore or VLLM::Worker",
        ]
    elif share is not None and share * _USABLE_PART >= planner.utilization:
        steps.append(f"if that process has to stay: --gpu-memory-utilization {share:g} fits beside it")
    is_listed = platform != "CUDA" or planner.case.has("neighbour_told", *_VIEWS, "memory_held_told", "stages_told")
    if planner.case.platform.unified or platform == "XPU" or (planner.total_bytes is None and not is_listed):
        steps += known_fix("page_cache_is_counted").steps
    return replace(free_it, why=reason("program_beside") if programs else free_it.why, steps=tuple(steps))


def _is_desktop_usual(planner: FailedServer) -> bool:
    """Whether others hold as much as a desktop does (a quarter to twice the usual), on a card that drives a screen."""
    card, total = planner.known.gpu, planner.total_bytes or 0
    cards = [card] if card and card.source != "given by size" else [c for c in all_gpus() if "GeForce" in c.name]
    fitting = (c for c in cards if c is card or c.total_low_bytes <= total <= c.total_high_bytes)
    usual = max(map(desktop_bytes, fitting), default=0)
    held = planner.case.ledger.other_processes_bytes or planner.case.other_processes_bytes or 0
    return usual // 4 <= held <= 2 * usual and held > 0
