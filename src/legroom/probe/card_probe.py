"""Measures this machine's GPU by running the scripts of `on_card/` with the Python of the user's vLLM."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from legroom.actions.programs import interpreter_of_script
from legroom.errors import UNREACHABLE, LegroomError
from legroom.masking import masked
from legroom.planning.card_store import CardRecord
from legroom.records import dataclass

_SCRIPTS = Path(__file__).parent / "on_card"
_TORCH_LIMIT_S, _VLLM_LIMIT_S = 90.0, 240.0
"""A probe takes a minute; a cold disk and several ranks take longer."""


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    record: CardRecord
    problems: tuple[str, ...]
    """Measurements that failed, with the reason."""
    profile: Mapping[str, int] | None = None
    """vLLM's memory profile of the given deployment; None where none was given or it did not start."""
    vllm: str = ""


def python_of_vllm(given: str | None = None) -> str:
    """The given Python (LegroomError if it is no program), else that of the `vllm` command, else legroom's own."""
    if given:
        path = shutil.which(given)
        if path is None:
            raise LegroomError(f"--python {given} is no program", "give the path of the Python that has vLLM")
        return path
    command = shutil.which("vllm")
    named = shutil.which(interpreter_of_script(Path(command)) or "") if command else None
    return named if named and "python" in Path(named).name else sys.executable


def probe_card(python: str, *, ranks: int = 1, with_vllm: bool = True, serve_args: Sequence[str] = ()) -> ProbeOutcome:
    """Measures the GPU with torch alone, by a start of vLLM if `with_vllm`, and by starts of a deployment
    (`serve_args`: model and flags); `ranks`: GPUs to use. LegroomError without torch or enough GPUs."""
    with tempfile.TemporaryDirectory(prefix="legroom-probe-") as folder:
        results = Path(folder) / "results.jsonl"
        words = [str(results), "--ranks", str(ranks)]
        output = _run_script([python, str(_SCRIPTS / "torch_stage.py"), *words], _TORCH_LIMIT_S)
        results_by_name = _read_results(results)
        _check_card(results_by_name, python, output)
        cards = results_by_name["card"].get("count", ranks)
        if ranks > cards:
            why = f"--ranks {ranks} needs {ranks} GPUs on this machine, and torch sees {cards}"
            hint = "run it where they are, or leave --ranks out: what one card takes is measured without"
            raise LegroomError(why, hint, UNREACHABLE)
        if with_vllm:
            output = _run_script([python, str(_SCRIPTS / "vllm_stage.py"), *words], _VLLM_LIMIT_S)
            results_by_name = _read_results(results)
        outcome = _probe_outcome(results_by_name, ranks, with_vllm, output)
        return _with_deployment(outcome, python, serve_args, Path(folder)) if serve_args else outcome


def _with_deployment(outcome: ProbeOutcome, python: str, serve_args: Sequence[str], folder: Path) -> ProbeOutcome:
    """The outcome with vLLM's memory profile of the deployment, started with dummy weights (twice without
    --enforce-eager; the second counts), or with the problem that kept it from starting."""
    results_by_name: dict[str, Mapping[str, Any]] = {}
    output = ""
    for attempt in range(1 if "--enforce-eager" in serve_args else 2):
        results = folder / f"deployment-{attempt}.jsonl"
        output = _run_script([python, str(_SCRIPTS / "vllm_stage.py"), str(results), "--", *serve_args], _VLLM_LIMIT_S)
        results_by_name = _read_results(results)
    profile, started = results_by_name.get("vllm", {}), results_by_name.get("vllm_started")
    if started is None or "available_kv_bytes" not in profile:
        why = profile.get("error") or output
        return replace(outcome, problems=(*outcome.problems, f"the deployment did not start: {why}"))
    sizes = {name: value for name, value in profile.items() if isinstance(value, int)}
    return replace(outcome, profile=sizes, vllm=str(started.get("vllm", "")))


def _run_script(words: Sequence[str], limit_s: float) -> str:
    """Runs a script for `limit_s` at most and kills its session; the last line that it printed, masked, or ""."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            output.write(f"\nit took longer than {limit_s:g} s and was stopped".encode())
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read()[-4000:].decode("utf-8", "replace").strip().splitlines()
    return str(masked(lines[-1].strip())) if lines else ""


def _read_results(path: Path) -> dict[str, Mapping[str, Any]]:
    """The measurements in a results file by name; with several ranks, of the rank with most non-torch memory."""
    results_by_name: dict[str, Mapping[str, Any]] = {}
    with contextlib.suppress(OSError), path.open(encoding="utf-8") as file:
        for line in file.read(1 << 20).splitlines():
            with contextlib.suppress(ValueError):
                result = json.loads(line)
                name = str(result.pop("finding"))
                earlier = results_by_name.get(name, {}).get("non_torch_bytes")
                if not isinstance(earlier, int) or result.get("non_torch_bytes", -1) > earlier:
                    results_by_name[name] = result
    return results_by_name


def _check_card(results_by_name: Mapping[str, Mapping[str, Any]], python: str, last_line: str) -> None:
    """Raises LegroomError where the script, run by `python`, saw no GPU, gave no result or could not use the GPU."""
    if "no_gpu" in results_by_name:
        raise LegroomError("torch sees no GPU here", f"run it where vLLM runs; it was asked with {python}", UNREACHABLE)
    card = results_by_name.get("card")
    if card is None:
        hint = "name the Python that has vLLM: legroom probe --python /path/to/python"
        raise LegroomError(f"{python} could not be asked: {last_line or 'it said nothing'}", hint, UNREACHABLE)
    if "error" in card:
        raise LegroomError(f"the GPU could not be asked: {card['error']}", "is another program using it?", UNREACHABLE)


def _probe_outcome(
    results_by_name: Mapping[str, Mapping[str, Any]], ranks: int, with_vllm: bool, last_line: str
) -> ProbeOutcome:
    """The card's record and the problems met, from the results of both stages; `last_line`: of their output."""
    card = results_by_name["card"]
    allocator, copies, host = (results_by_name.get(name, {}) for name in ("allocator", "copies", "host"))
    vllm, started = results_by_name.get("vllm", {}), results_by_name.get("vllm_started", {})
    problems = [f"{name}: {result['error']}" for name, result in results_by_name.items() if result.get("error")]
    if with_vllm and not vllm:
        problems.append(f"vLLM was not started: {last_line}")
    others = card.get("others_bytes")
    if others:
        problems.append("other processes hold memory of the card; the context was measured beside them")
    directions = ("host_to_device", "device_to_host", "device_to_device", "pageable_to_device")
    rates: dict[str, Any] = {f"{name}_bytes_s": copies.get(f"{name}_bytes_s") for name in directions}
    record = CardRecord(
        name=card["name"],
        total_bytes=card["total_bytes"],
        **{name: card.get(name, "") for name in ("driver", "cuda", "torch")},
        vllm=started.get("vllm", ""),
        seen=time.strftime("%Y-%m-%d", time.gmtime()),
        context_bytes=card.get("context_bytes"),
        held_by_others_bytes=others,
        vllm_non_torch_bytes=vllm.get("non_torch_bytes") if started else None,
        ranks=ranks,
        nccl_bytes=results_by_name.get("communication", {}).get("nccl_bytes"),
        smallest_block_bytes=allocator.get("one_byte", {}).get("allocated_bytes"),
        small_segment_bytes=allocator.get("one_byte", {}).get("reserved_bytes"),
        large_segment_bytes=allocator.get("large", {}).get("reserved_bytes"),
        graph_node_bytes=results_by_name.get("graphs", {}).get("node_bytes"),
        **rates,
        pinned_bytes=host.get("pinned_bytes"),
        pin_refused=host.get("refused"),
    )
    return ProbeOutcome(record, tuple(problems))
