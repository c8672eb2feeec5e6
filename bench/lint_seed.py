"""Lint on one widely copied guide, against a list of everything that is wrong in it, made by hand.

    python bench/lint_seed.py GUIDE.txt

The guide is not part of legroom: give the path of your copy. Lines are told by their text. Says what was missed and
what was found that is not on the list; leaves with 1 if there is either.
"""

from __future__ import annotations

import sys
from pathlib import Path

from legroom.facts.releases import release
from legroom.lint.lint import Options, lint_texts

NAMES = "metric-unknown"
FOREIGN = {NAMES: "metric-foreign"}
"""A name that nothing comes near to is told as one of somebody else."""
EVERY_RELEASE = [
    # (a part of the line, rule, a part of the message)
    ("python -m vllM.entrypoints", "module-unknown", "vllM.entrypoints"),
    ("vllm_prefix_cache_blocks_used 12345", NAMES, "vllm_prefix_cache_blocks_used"),
    ("vllm_prefix_cache_blocks_total 20000", NAMES, "vllm_prefix_cache_blocks_total"),
    ("vllm_prefix_cache_hit_rate 0.23", NAMES, "vllm_prefix_cache_hit_rate"),
    ('metrics_dict.get("vllm_num_gpu_blocks",0)', NAMES, "vllm_num_gpu_blocks "),
    ('metrics_dict.get("vllm_num_gpu_blocks_used",0)', NAMES, "vllm_num_gpu_blocks_used"),
    ('metrics_dict.get("vllm_num_requests_running",0)', NAMES, "vllm_num_requests_running"),
    ("--block-size 8 ", "block-size", "--block-size 8"),
    ("expandable_segments:True,garbage", "allocator-clash", "4 ranks"),
    ("expandable_segments:True,garbage", "allocator-useless", "garbage_collection_threshold"),
    ("--max-num-on-the-fly-batches 4 \\", "flag-unknown", "--max-num-on-the-fly-batches"),
    ('m.get("vllm_gpu_cache_usage_perc",0) > 0.95', NAMES, "vllm_gpu_cache_usage_perc"),
    ('m.get("vllm_num_requests_waiting",0) >', NAMES, "vllm_num_requests_waiting"),
    ('m.get("vllm_num_requests_waiting",0) >', NAMES, "vllm_num_requests_running"),
    ('m.get("vllm_num_requests_running",0) == 0', NAMES, "vllm_num_requests_running"),
    ("Running:{m.get('vllm_num_requests_running',0)}", NAMES, "vllm_num_requests_running"),
    ("Waiting:{m.get('vllm_num_requests_waiting',0)}", NAMES, "vllm_num_requests_waiting"),
    ("GPU Cache:{m.get('vllm_gpu_cache_usage_perc',0)", NAMES, "vllm_gpu_cache_usage_perc"),
    ('grep -E "(vllm_num|vllm_gpu)"', "metric-grep", "vllm_num"),
    ('grep -E "(vllm_num|vllm_gpu)"', "metric-grep", "vllm_gpu"),
    ("pkill -9 -f", "kill-by-pattern", "pkill"),
    ("nvidia-smi --gpu-reset", "gpu-reset", "reset"),
    ("torch.cuda.empty_cache()", "empty-cache", "empty_cache"),
    ("expr: vllm_gpu_cache_usage_perc > 0.90", NAMES, "vllm_gpu_cache_usage_perc"),
    ("expr: vllm_gpu_cache_usage_perc > 0.90", "alert-full-pool", "VLLMHighMemoryUsage"),
    ("expr: vllm_gpu_cache_usage_perc > 0.95", NAMES, "vllm_gpu_cache_usage_perc"),
    ("expr: vllm_gpu_cache_usage_perc > 0.95", "alert-full-pool", "VLLMCriticalMemoryUsage"),
    ("expr: vllm_num_requests_waiting >", NAMES, "vllm_num_requests_waiting"),
    ("expr: vllm_num_requests_waiting >", NAMES, "vllm_num_requests_running"),
    ("expr: rate(vllm_request_success_total", NAMES, "vllm_request_success_total"),
    ("expr: rate(vllm_request_success_total", "alert-no-traffic", "VLLMNoRequests"),
    ('"GPU Memory Usage"', NAMES, "vllm_gpu_cache_usage_perc"),
    ('"Request Queue"', NAMES, "vllm_num_requests_running"),
    ('"Request Queue"', NAMES, "vllm_num_requests_waiting"),
    ('"Token Throughput"', NAMES, "vllm_generation_tokens_total"),
    ('"Request Latency P99"', NAMES, "vllm_e2e_request_latency_seconds_bucket"),
]
"""Wrong whatever the release."""
TODAY = [
    ("VLLM_ATTENTION_BACKEND=FLASH_ATTN", "env-unknown", "VLLM_ATTENTION_BACKEND"),
    ("--swap-space 8 \\", "flag-removed", "--swap-space"),
    ("--disable-log-requests \\", "flag-removed", "--disable-log-requests"),
]
"""Right when the guide was written (0.5.4, 0.6), and gone since."""


def compare(text: str, vllm: str, expected: list[tuple[str, str, str]]) -> bool:
    """Print what differs for one release."""
    report = lint_texts([("guide", text)], Options(release(vllm)))
    lines = text.splitlines()
    left = list(report.findings)
    missed = []
    for part, rule, message in expected:
        hits = [
            one
            for one in left
            if one.rule in (rule, FOREIGN.get(rule)) and part in lines[one.place.line - 1] and message in one.message
        ]
        if hits:
            left.remove(hits[0])
        else:
            missed.append((part, rule))
    print(f"vLLM {vllm}: {len(expected) - len(missed)} of {len(expected)} found, {len(left)} that are not on the list")
    for part, rule in missed:
        print(f"  missed: {rule} in {part!r}")
    for one in left:
        print(f"  not on the list: {one.place.line}:{one.place.column} [{one.rule}] {one.message}")
    return not missed and not left


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    text = Path(sys.argv[1]).read_text("utf-8")
    results = [
        compare(text, "0.32.0", EVERY_RELEASE + TODAY),
        compare(text, "0.6.3", EVERY_RELEASE),
        compare(text, "0.5.4", EVERY_RELEASE),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
