"""Packed servers beside each other on a real vLLM 0.32, on a CPU: each gets the pool that was planned, whoever starts
first and after a restart. Of a pack that is what a CPU can show: it has no card whose free memory is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from legroom.facts.config.model_config import model_from_config
from legroom.facts.gpus import gpu
from legroom.facts.releases import release
from legroom.planning.packing.gpu_packing import PackRequest, pack
from legroom.planning.packing.needs import PackedServer
from legroom.planning.packing.placement import Card
from legroom.planning.plan import Target
from legroom.vllm.args import ServeArgs

COMMON = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
}
LAYERS = {"chat": (4, 2), "batch": (6, 4), "small": (2, 1)}
"""Layers and KV heads of each."""
BASE = {"block_size": 128, "max_num_seqs": 8, "max_num_batched_tokens": 1024}


def packed(folder: Path):
    servers = []
    for name, (layers, heads) in LAYERS.items():
        config = COMMON | {"num_hidden_layers": layers, "num_key_value_heads": heads}
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        target = Target(model_from_config(config, name), gpu("6GiB"), 1, release("0.32.0"))
        servers.append(
            PackedServer(name, target, ServeArgs(model=name, max_model_len=2048, enforce_eager=True, **BASE))
        )
    return pack(PackRequest(tuple(servers), (Card(0, gpu("6GiB")),))).packed


class Engine:
    """One engine in a process of its own, with the flags that packing gave it."""

    def __init__(self, python: Path, folder: Path, server) -> None:
        pool = {"max_model_len": 2048, "kv_cache_memory_bytes": server.pool_bytes}
        cases = folder / f"{server.name}.json"
        cases.write_text(json.dumps([{"config": str(folder / server.name), "args": BASE | pool}]))
        script = Path(__file__).with_name("start_engine.py")
        self.process = subprocess.Popen(
            [python, script, cases, "--hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def blocks(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])["blocks"]
        return 0

    def stop(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(60)


@pytest.mark.skipif(sys.platform != "linux", reason="the CPU build is for Linux")
def test_every_engine_gets_its_pool_at_once_and_after_a_restart(vllm_python, tmp_path):
    servers = packed(tmp_path)
    planned = {server.name: server.plan.memory.kv.num_blocks for server in servers}
    engines = {server.name: Engine(vllm_python, tmp_path, server) for server in servers}
    try:
        assert {name: engine.blocks() for name, engine in engines.items()} == planned
        engines["chat"].stop()
        engines["chat"] = Engine(vllm_python, tmp_path, servers[0])
        assert engines["chat"].blocks() == planned["chat"]
    finally:
        for engine in engines.values():
            engine.stop()
