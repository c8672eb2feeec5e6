#!/usr/bin/env python3
"""Drives a real vLLM on a GPU out of memory in four ways, with the black box on, and then tries the computed fix.

    black_box_gpu.py MODEL OUT.jsonl        run with the Python of a vLLM that has legroom beside it

MODEL is a folder with a config (weights are made up). One process a case, one after the other, each with the card to
itself; all send the same load: short requests, then one prompt of 8,192 tokens with its log-probabilities.

    burst          utilization 0.985: the log-probabilities find no room beside the pool
    fragmentation  0.9, and eleven segments of 1 GiB with 400 MiB in use and 600 MiB free
    leak           0.9, and every model step keeps 256 MiB
    neighbour      0.6, and another process takes all but 300 MiB of the rest
    *_fixed        the case again with the first flags or variables that `legroom diagnose` answers to its record

Every line of OUT is a case: what came of it, the diagnosis, and the record itself.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

UTILIZATION = {"burst": 0.985, "fragmentation": 0.9, "leak": 0.9, "neighbour": 0.6}
PROMPT_TOKENS = 8192
GIB, MIB = 1 << 30, 1 << 20
KEPT: list[Any] = []


def started(model: str, utilization: float) -> Any:
    from vllm import LLM

    from legroom.worker import plugin, telemetry

    telemetry.report.__defaults__ = (0.4,)
    plugin.register()
    return LLM(
        model=model, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, enable_prefix_caching=False,
        max_model_len=PROMPT_TOKENS + 64, max_num_seqs=64, max_num_batched_tokens=PROMPT_TOKENS,
        gpu_memory_utilization=utilization, disable_log_stats=True,
    )  # fmt: skip


def ask(llm: Any, tokens: int, **sampling: Any) -> None:
    from vllm import SamplingParams

    chance = random.Random(tokens)
    prompt = {"prompt_token_ids": [chance.randrange(5, 400) for _ in range(tokens)]}
    llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False, **sampling), use_tqdm=False)


def load(llm: Any) -> None:
    for _ in range(3):
        ask(llm, 32)
        time.sleep(0.3)
    time.sleep(1.0)
    ask(llm, PROMPT_TOKENS, prompt_logprobs=1)


def cut_into_pieces() -> None:
    import torch

    whole = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(11)]
    del whole
    large = []
    for _ in range(11):
        large.append(torch.empty(600 * MIB, dtype=torch.uint8, device="cuda"))
        KEPT.append(torch.empty(400 * MIB, dtype=torch.uint8, device="cuda"))


def leak_in_every_step() -> None:
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    real = GPUModelRunner.execute_model

    def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **others: Any) -> Any:
        KEPT.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
        return real(self, scheduler_output, *arguments, **others)

    GPUModelRunner.execute_model = execute_model


def take_the_rest() -> None:
    """The neighbour: all but 300 MiB, until it is ended."""
    import torch

    for size in (GIB, 100 * MIB):
        while torch.cuda.mem_get_info()[0] > size + 300 * MIB:
            KEPT.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    print("full", flush=True)
    time.sleep(60)


def run_case(case: str, model: str, utilization: float) -> None:
    llm = started(model, utilization)
    time.sleep(0.5)
    ask(llm, 32)
    if case == "fragmentation":
        cut_into_pieces()
    if case == "leak":
        leak_in_every_step()
        for _ in range(80):
            ask(llm, 32)
            time.sleep(0.15)
    if case == "neighbour":
        neighbour = subprocess.Popen([sys.executable, __file__, "--neighbour"], stdout=subprocess.PIPE)
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        time.sleep(0.6)
        try:
            load(llm)
        finally:
            neighbour.kill()
    load(llm)


def measured(name: str, model: str, utilization: float, env: dict[str, str]) -> dict[str, Any]:
    """One case in a process of its own, its first record and what `diagnose` says of it."""
    with tempfile.TemporaryDirectory() as folder:
        case = name.removesuffix("_fixed")
        variables = os.environ | env | {
            "LEGROOM_WORKER_MEMORY": "1", "LEGROOM_BLACKBOX_DIR": folder, "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
        }  # fmt: skip
        words = [sys.executable, __file__, "--case", case, model, str(utilization)]
        run = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
        row: dict[str, Any] = {"case": name, "gpu_memory_utilization": utilization, "env": env}
        row["outcome"] = "survived" if run.returncode == 0 else run.stderr.strip().splitlines()[-1][:300]
        records = sorted(Path(folder).glob("*.json"))
        if records:
            row["record"] = json.loads(records[0].read_text())
            answer = subprocess.run([sys.executable, "-m", "legroom", "diagnose", str(records[0]), "--json"],
                                    capture_output=True, text=True, check=False)  # fmt: skip
            row["findings"] = json.loads(answer.stdout)["findings"]
    return row


def main() -> None:
    if sys.argv[1:2] == ["--neighbour"]:
        take_the_rest()
    elif sys.argv[1:2] == ["--case"]:
        run_case(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        model, out = sys.argv[1:3]
        rows = {name: measured(name, model, share, {}) for name, share in UTILIZATION.items()}
        for name in ("burst", "fragmentation"):
            fixes = rows[name]["findings"][0]["fixes"]
            fix = next(fix for fix in fixes if fix["flags"] or fix["env"])
            share = fix["flags"].get("gpu_memory_utilization", UTILIZATION[name])
            rows[f"{name}_fixed"] = measured(f"{name}_fixed", model, share, fix["env"])
        Path(out).write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
        for row in rows.values():
            print(row["case"], row["outcome"], [finding["cause"] for finding in row.get("findings", [])][:1])


if __name__ == "__main__":
    main()
