"""Runs inside vLLM's own environment: starts one engine after the other and reports what each made of its memory.

    python start_engine.py CASES.json [--hold]

A case is {"config": folder, "args": {...}}; one JSON line comes back for each: the blocks and the length of the engine
that started, or the error it raised. Weights are dummies, so a config.json is all a model needs. With --hold an engine
that has answered stays until standard input ends.
"""

import json
import os
import sys
from pathlib import Path

for name, value in {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}.items():
    os.environ.setdefault(name, value)


def start(case: dict, hold: bool = False) -> dict:
    from vllm import LLM

    try:
        llm = LLM(
            model=case["config"], load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, **case["args"]
        )
    except Exception as error:
        return {"error": str(error)}
    config = llm.llm_engine.vllm_config
    found = {"blocks": config.cache_config.num_gpu_blocks, "max_model_len": config.model_config.max_model_len}
    if hold:
        print("ANSWER " + json.dumps(found), flush=True)
        sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()
    return found


if __name__ == "__main__":
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print("ANSWER " + json.dumps(start(case, hold="--hold" in sys.argv)), flush=True)
