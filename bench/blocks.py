#!/usr/bin/env python3
"""legroom's KV plans against answers recorded from vLLM's own planner: the share that is identical.

    bench/blocks.py [FIXTURE.jsonl...] [--json] [--show N]

`bench/record_blocks.py` records the fixture. Identical means: the number of blocks, the tokens and the concurrency as
printed, the bytes of one full-length request, the fitted length, and, where vLLM refuses, its very words.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench"))

from blocks_facts import model_of

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.memory.kv.kv_plan import KvPlan, kv_plan
from legroom.vllm.args import EngineSettings, ServeArgs

FIXTURE = ROOT / "tests" / "fixtures" / "vllm_blocks.jsonl.gz"
H100 = Gpu("NVIDIA H100 80GB HBM3", int(79.1 * 2**30), compute_capability=(9, 0))


def rows(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """The recorded cases; facts that many cases share are written once, by name."""
    for path in paths:
        written = path.read_bytes()
        facts: dict[str, Any] = {}
        for line in (gzip.decompress(written) if path.suffix == ".gz" else written).decode().splitlines():
            row = json.loads(line)
            if "facts_of" in row:
                facts[row["facts_of"]] = row["facts"]
                continue
            yield row if "facts" in row else {**row, "facts": facts[row["model"]]}


def settings_of(row: dict[str, Any], model: Model) -> EngineSettings:
    """The engine settings of a recorded case: what vLLM resolved is in the row, the rest are its flags."""
    flags = row["flags"]
    value = {flag: flags[index + 1] for index, flag in enumerate(flags[:-1])}
    length = int(value.get("--max-model-len", model.max_position_embeddings))
    speculative = json.loads(value["--speculative-config"]) if "--speculative-config" in value else None
    override = value.get("--num-gpu-blocks-override")
    block_size = value.get("--block-size")
    return EngineSettings(
        release=row["vllm"],
        engine="V1",
        runner="V2",
        usage="serve",
        dtype=row["dtype"],
        quantization=None,
        kv_cache_dtype=row["kv_cache_dtype"],
        max_model_len=length if length > 0 else model.max_position_embeddings,
        auto_fit_len=length < 0,
        max_num_seqs=1024,
        max_num_batched_tokens=row["max_num_batched_tokens"],
        gpu_memory_utilization=0.92,
        kv_cache_memory_bytes=None,
        num_gpu_blocks_override=int(override) if override else None,
        block_size=int(block_size) if block_size else None,
        tensor_parallel_size=row["tp"],
        pipeline_parallel_size=row["pp"],
        data_parallel_size=1,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        enable_expert_parallel=False,
        enforce_eager=True,
        cudagraph_mode="NONE",
        cudagraph_capture_sizes=(),
        graph_estimate_applied=True,
        enable_chunked_prefill=True,
        enable_prefix_caching=row["prefix_caching"],
        async_scheduling=True,
        max_concurrent_batches=row["batches"],
        disable_hybrid_kv_cache_manager="--disable-hybrid-kv-cache-manager" in flags,
        num_speculative_tokens=(speculative or {}).get("num_speculative_tokens", 0),
        given=ServeArgs(speculative_config=speculative),
    )


def differences(row: dict[str, Any]) -> list[str]:
    """What legroom says otherwise than vLLM in one recorded case."""
    model = model_of(row["facts"])
    settings = settings_of(row, model)
    found = []
    for answer in row["answers"]:
        plan = kv_plan(model, settings, H100, [answer["available_bytes"]] * row["pp"])
        expected = expected_of(answer, row["pp"])
        said = said_of(plan, expected)
        if said != expected:
            found.append(f"vLLM {expected}, legroom {said}")
    return found


def expected_of(answer: dict[str, Any], stages: int) -> dict[str, Any]:
    """What vLLM answered. With several stages its request bytes are of the first one, legroom's of the tightest."""
    skipped = {"available_bytes", "groups"} | ({"needed_bytes"} if stages > 1 else set())
    return {name: value for name, value in answer.items() if name not in skipped}


def said_of(plan: KvPlan, expected: dict[str, Any]) -> dict[str, Any]:
    """legroom's plan in the same words."""
    if plan.failure is not None:
        return {"error": plan.failure.message}
    said = {
        "num_blocks": plan.num_blocks,
        "tokens": plan.tokens,
        "concurrency": round(plan.max_concurrency, 4),
        "max_model_len": plan.max_model_len,
        "needed_bytes": plan.needed_bytes,
    }
    return {name: value for name, value in said.items() if name in expected or "error" in expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", nargs="*", type=Path, default=[FIXTURE])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", type=int, default=5, help="differences to print")
    options = parser.parse_args()
    table: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    shown = 0
    for row in rows(options.fixtures):
        wrong = differences(row)
        table[row["facts"]["architecture"]][row["tp"]].append(not wrong)
        if wrong and shown < options.show and not options.json:
            shown += 1
            print(f"differs: {row['model']} tp{row['tp']} pp{row['pp']} {' '.join(row['flags'])}\n  {wrong[0]}")
    answers = [same for ranks in table.values() for cases in ranks.values() for same in cases]
    summary = {
        "architectures": len(table),
        "architectures_identical": sum(all(all(cases) for cases in ranks.values()) for ranks in table.values()),
        "cases": len(answers),
        "identical": round(sum(answers) / max(1, len(answers)), 5),
    }
    if not options.json:
        ranks = sorted({tp for cases in table.values() for tp in cases})
        print(f"{'architecture':44s}" + "".join(f"{f'TP {tp}':>12s}" for tp in ranks))
        for architecture, by_rank in sorted(table.items()):
            cells = (f"{sum(by_rank[tp])}/{len(by_rank[tp])}" if tp in by_rank else "-" for tp in ranks)
            print(f"{architecture:44s}" + "".join(f"{cell:>12s}" for cell in cells))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
