#!/usr/bin/env python3
"""Which of vLLM's names that legroom's worker plugin reads exist in which release: read from vLLM's own source.

    record_worker_names.py VLLM_GIT_DIR [OUT.json]        writes tests/fixtures/worker_names.json by default

Each name is a pattern looked for in the files that have held it; a release's answer is the file and line of the first
that has it, or null. The table of docs/black-box.md says the same in words, and a test holds the three together.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

RELEASES = ("0.8.0", "0.9.0", "0.11.0", "0.16.0", "0.20.0", "0.26.0")
CONFIG = (
    "vllm/config.py",
    "vllm/config/__init__.py",
    "vllm/config/model.py",
    "vllm/config/cache.py",
    "vllm/config/scheduler.py",
    "vllm/config/parallel.py",
)
OUTPUT = ("vllm/v1/core/sched/output.py", "vllm/v1/core/scheduler_output.py")
RUNNER, RUNNER_V2 = ("vllm/v1/worker/gpu_model_runner.py",), ("vllm/v1/worker/gpu/model_runner.py",)
STATES, PROMPTS = ("vllm/v1/worker/gpu/states.py",), ("vllm/v1/worker/gpu/sample/prompt_logprob.py",)
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "load_general_plugins": (
        r"load_general_plugins\(\)",
        ("vllm/v1/worker/worker_base.py", "vllm/worker/worker_base.py"),
    ),
    "_WORLD": (r"_WORLD\b.*= None", ("vllm/distributed/parallel_state.py",)),
    "determine_available_memory": (r"def determine_available_memory", ("vllm/v1/worker/gpu_worker.py",)),
    "determine_num_available_blocks": (r"def determine_num_available_blocks", ("vllm/worker/worker.py",)),
    "logger.exception of a worker": (r"logger\.exception\(", ("vllm/v1/executor/multiproc_executor.py",)),
    "logger.exception of an engine": (r"logger\.exception\(", ("vllm/v1/engine/core.py",)),
    "_global_graph_pool": (r"_global_graph_pool\b.*= None", ("vllm/platforms/interface.py",)),
    "scheduler_output": (r"\bscheduler_output: ", RUNNER),
    "num_scheduled_tokens": (r"    num_scheduled_tokens: ", OUTPUT),
    "scheduled_new_reqs": (r"    scheduled_new_reqs: ", OUTPUT),
    "scheduled_cached_reqs": (r"    scheduled_cached_reqs: ", OUTPUT),
    "CachedRequestData.req_ids": (r"    req_ids: ", OUTPUT),
    "requests": (r"self\.requests: ", RUNNER),
    "input_batch of runner V2": (r"input_batch\b.*self\.execute_model_state", RUNNER_V2),
    "req_id_to_index": (r"self\.req_id_to_index: ", STATES),
    "prompt_len": (r"self\.prompt_len = ", STATES),
    "prompt_logprobs_worker": (r"self\.prompt_logprobs_worker\b.*=", RUNNER_V2),
    "uses_prompt_logprobs": (r"self\.uses_prompt_logprobs = ", PROMPTS),
    "num_prompt_logprobs": (r"self\.num_prompt_logprobs = ", PROMPTS),
} | {
    name: (rf"^    {name}: |^        self\.{name}\b.* = ", CONFIG)
    for name in (
        "model",
        "max_model_len",
        "dtype",
        "quantization",
        "enforce_eager",
        "gpu_memory_utilization",
        "block_size",
        "cache_dtype",
        "num_gpu_blocks",
        "kv_cache_memory_bytes",
        "enable_prefix_caching",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
    )
}


def source(git_dir: str, release: str, path: str) -> str:
    words = ["git", f"--git-dir={git_dir}", "show", f"refs/tags/v{release}:{path}"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def place(git_dir: str, release: str, pattern: str, paths: tuple[str, ...]) -> str | None:
    for path in paths:
        for number, line in enumerate(source(git_dir, release, path).splitlines(), start=1):
            if re.search(pattern, line):
                return f"{path}:{number}"
    return None


def main() -> None:
    git_dir = sys.argv[1]
    out = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parents[1] / "fixtures/worker_names.json")
    how = "record_worker_names.py on the tags of github.com/vllm-project/vllm: the first place of each name"
    names = {name: {release: place(git_dir, release, *where) for release in RELEASES} for name, where in NAMES.items()}
    out.write_text(json.dumps({"how": how, "releases": RELEASES, "names": names}, indent=1) + "\n")


if __name__ == "__main__":
    main()
