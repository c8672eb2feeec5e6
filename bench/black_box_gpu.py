#!/usr/bin/env python3
"""Drives a real `vllm serve` on a GPU out of memory in several ways, and starts it again with the fix that is computed.

    black_box_gpu.py VLLM MODELS OUT [--cases CASE ...] [--gpu H200] [--seconds 300]

VLLM is the command, MODELS a folder with a config (and a tokenizer) a model; weights are made up. For each case: start,
send the load until memory runs out; `legroom diagnose LOG` reads the server's log and the black box that it names; the
flags and variables of its first fix are put into the command; the server is started again and gets the same load. A
fix that names no flag is done as it says: for a leak that is a restart within the time it gives. OUT/results.jsonl has
a line for each start and each diagnosis, OUT/CASE has the logs and the records.

    prompt_logprobs      utilization 0.985, log-probabilities of a prompt of 8,192 tokens (model runner V1)
    prompt_logprobs_v2   0.995, the same in model runner V2, which takes 1,024 tokens at a time
    sampling             0.994, 1,024 sequences with top-p over a vocabulary of 262,144
    neighbour            0.6, the same sequences, and another process takes all but 300 MiB of the rest
    leak                 0.9, and every step keeps 100 to 300 MiB
    pool                 --kv-cache-memory-bytes of more than the card has left
    graphs               the same, and it fits with fewer sequences, but leaves no room for CUDA graphs
    fragmentation        0.75, and what is left is cut into pieces with something in use beside each
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_harness import arguments, write_line
from gpu_neighbour import Neighbour
from gpu_server import GpuServer, legroom_json, planned_blocks

GIB, MIB = 1 << 30, 1 << 20
SHORT = {"prompt": list(range(5, 37)), "max_tokens": 4, "ignore_eos": True}
LONG_PROMPT = [5 + number * 7 % 400 for number in range(8192)]


def is_served(server: GpuServer, bodies: Sequence[dict[str, Any]]) -> bool:
    return all(status == 200 for status in server.ask_all(bodies))


def long_prompt(server: GpuServer) -> bool:
    served = [is_served(server, [SHORT]) for _ in range(3)]
    time.sleep(1.2)
    body = {"prompt": LONG_PROMPT, "prompt_logprobs": 1, "max_tokens": 2, "ignore_eos": True}
    return all(served) and is_served(server, [body])


def many_sequences(server: GpuServer) -> bool:
    served = [is_served(server, [SHORT]) for _ in range(3)]
    time.sleep(1.2)
    body = {"prompt": list(range(5, 21)), "n": 128, "max_tokens": 48, "top_p": 0.9, "ignore_eos": True}
    return all(served) and is_served(server, [body] * 8)


def many_short(server: GpuServer) -> bool:
    return all(is_served(server, [SHORT]) for _ in range(100))


def some_short(server: GpuServer) -> bool:
    return all(is_served(server, [SHORT] * 4) for _ in range(4))


@dataclass(frozen=True)
class Case:
    name: str
    cause: str
    model: str
    flags: dict[str, Any]
    load: Callable[[GpuServer], bool]
    env: dict[str, str] = field(default_factory=dict)
    fault: dict[str, Any] | None = None
    has_neighbour: bool = False
    neighbour_bytes: int | None = None
    """What the neighbour takes; None: all but 300 MiB."""
    is_restarted: bool = False
    """In the middle of the load: what a leak's fix asks for."""

    def words(self) -> list[str]:
        words: list[str] = []
        for name, value in self.flags.items():
            flag = "--" + name.replace("_", "-")
            if value is False:
                words.append(flag.replace("--", "--no-", 1))
            elif value is not None:
                words += [flag] if value is True else [flag, str(value)]
        return words


EAGER = {"enforce_eager": True, "enable_prefix_caching": False}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
SEQUENCES = {"max_model_len": 1024, "max_num_seqs": 1024, "max_num_batched_tokens": 8192} | EAGER
PROMPTS = {"max_model_len": 8256, "max_num_seqs": 64, "max_num_batched_tokens": 8192} | EAGER
GRAPHS = {"compilation_config": json.dumps({"mode": 0, "cudagraph_mode": "FULL"})}
POOL = int(136.2 * GIB)
"""Of an H200: what 1,024 sequences leave of it is less, what 256 leave is too little for their graphs."""
FRAGMENTING = {"kind": "fragmentation", "seed": 1}
LEAKING = {"kind": "leak", "seed": 1, "least_bytes": 100 * MIB, "most_bytes": 300 * MIB, "every_steps": 4}
BURST, QWEN, GEMMA, LLAMA = "runtime_activation_burst", "qwen3-0.6b", "gemma-3-1b", "llama-3.2-1b"
POOLED = {"kv_cache_memory_bytes": POOL, "max_model_len": 4096} | GRAPHS
LONG_V2 = {"max_model_len": 8256, "max_num_seqs": 16, "max_num_batched_tokens": 2048} | EAGER


def share(of_card: float, flags: dict[str, Any]) -> dict[str, Any]:
    return {"gpu_memory_utilization": of_card} | flags


CASES = (
    Case("prompt_logprobs", BURST, QWEN, share(0.985, PROMPTS), long_prompt, V1),
    Case("fragmentation", "allocator_fragmentation", QWEN, share(0.75, PROMPTS), long_prompt, V1, FRAGMENTING),
    Case("sampling", BURST, GEMMA, share(0.994, SEQUENCES), many_sequences),
    Case("neighbour", "gpu_shared_or_not_free", GEMMA, share(0.6, SEQUENCES), many_sequences, has_neighbour=True),
    Case("pool", "no_cache_blocks", LLAMA, POOLED, some_short),
    Case("graphs", "cudagraph_capture_oom", LLAMA, POOLED | {"max_num_seqs": 256}, some_short),
    Case("leak", "leak_over_time", LLAMA, share(0.9, {"max_model_len": 4096} | EAGER), many_short, fault=LEAKING),
    Case("prompt_logprobs_v2", BURST, GEMMA, share(0.995, LONG_V2), long_prompt),
)


@dataclass
class Bench:
    vllm: str
    models: Path
    out: Path
    gpu: str

    def run(self, case: Case, name: str) -> dict[str, Any]:
        """Start it and send the load; what came of it."""
        model = self.models / case.model
        words = case.words()
        row: dict[str, Any] = {"case": name, "command": ["vllm", "serve", case.model, *words], "env": case.env}
        row["planned_blocks"] = planned_blocks(model, words, self.gpu, case.env)
        server = GpuServer(self.vllm, model, self.out / name, *words, env=case.env)
        neighbour = Neighbour() if case.has_neighbour else None
        if neighbour:
            neighbour.give_back()  # it is up, with the context that it has anyway
        try:
            row["outcome"] = self._outcome(server, case, neighbour, row)
            if row["outcome"] == "ran out of memory":
                server.ended_within(8.0)  # so that its log is whole
        finally:
            server.stop()
            if neighbour:
                neighbour.end()
        row["records"] = [path.name for path in server.black_boxes()]
        row["seconds"] = round(time.monotonic() - server.began_s, 1)
        self.note(row)
        return row

    def _outcome(self, server: GpuServer, case: Case, neighbour: Neighbour | None, row: dict[str, Any]) -> str:
        if not server.start():
            return "did not start"
        row["start_s"], row["blocks"] = round(server.start_s, 1), server.num_blocks()
        if case.fault:
            (server.folder / "fault.json").write_text(json.dumps(case.fault))
            server.ask(**SHORT)
        if neighbour:
            server.ask(**SHORT)
            time.sleep(1.0)
            row["neighbour_bytes"] = neighbour.take(case.neighbour_bytes)
            time.sleep(0.8)
        if case.is_restarted:
            half = sum(server.ask(**SHORT) == 200 for _ in range(50))
            server.stop()
            if half < 50 or not server.start():
                return "died before its restart"
            (server.folder / "fault.json").write_text(json.dumps(case.fault))
            return "survived" if all(server.ask(**SHORT) == 200 for _ in range(50)) else "ran out of memory"
        return "survived" if case.load(server) and server.is_healthy() else "ran out of memory"

    def note(self, row: dict[str, Any]) -> None:
        write_line(self.out / "results.jsonl", row)
        print({name: row[name] for name in row if name not in ("command", "records", "fixes")}, flush=True)

    def diagnosed(self, case: Case) -> dict[str, Any]:
        answer = legroom_json("diagnose", str(self.out / case.name / "server.log"))
        findings = answer.get("findings", [])
        row: dict[str, Any] = {"case": case.name, "verdict": answer.get("verdict"), "phase": answer.get("phase")}
        row |= {"error": answer["error"]} if "error" in answer else {}
        row["causes"] = [[finding["cause"], finding["confidence"]] for finding in findings]
        row["named"] = bool(findings) and findings[0]["cause"] == case.cause
        if findings:
            row["why"] = findings[0]["why"]
            row["fixes"] = [{name: fix[name] for name in ("flags", "env", "steps")} for fix in findings[0]["fixes"]]
        self.note(row)
        print(json.dumps(row.get("fixes", []))[:1500], flush=True)
        return row


def fixed(case: Case, diagnosis: dict[str, Any]) -> Case | None:
    """The case with the first fix that can be put into a command; None where there is none."""
    fixes = diagnosis.get("fixes", [])
    if case.fault and case.fault["kind"] == "leak":
        return replace(case, is_restarted=True)
    fix = next((fix for fix in fixes if fix["flags"] or fix["env"]), None)
    if fix is None:
        return None
    return replace(case, flags=case.flags | fix["flags"], env=case.env | fix["env"])


def main() -> None:
    args = arguments(__doc__, "vllm", "models:path", "out:path", cases=(), gpu="h200", seconds=600.0)
    args.out.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + args.seconds
    bench, survived = Bench(args.vllm, args.models, args.out, args.gpu), dict[str, str]()
    for case in CASES if not args.cases else [case for case in CASES if case.name in args.cases]:
        if time.monotonic() > until_s - 35:
            break
        first = bench.run(case, case.name)
        diagnosis = bench.diagnosed(case)
        same = replace(case, neighbour_bytes=first.get("neighbour_bytes"))
        again = fixed(same, diagnosis) if first["outcome"] != "survived" else None
        outcome = bench.run(again, f"{case.name}_fixed")["outcome"] if again else "no fix to try"
        survived[case.name] = f"{first['outcome']}, named {diagnosis['named']}, with the fix: {outcome}"
    print(json.dumps(survived, indent=1))


if __name__ == "__main__":
    main()
