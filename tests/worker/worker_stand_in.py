"""A worker of vLLM with one GPU, as the black box sees it: stand-ins for torch and vLLM, and a step that fails."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from legroom.black_box import read_record
from legroom.live import gpu_memory
from legroom.worker import recorder, worker_memory

GIB, MIB = 1 << 30, 1 << 20
UUID = "5c3d8f4e-0000-0000-0000-000000000001"


def segment(size, *blocks, pool=(0, 0), device=0):
    """As `torch.cuda.memory_snapshot` has it: blocks are (size, state)."""
    allocated = sum(size for size, state in blocks if state == "active_allocated")
    return {
        "device": device,
        "total_size": size,
        "allocated_size": allocated,
        "segment_pool_id": pool,
        "segment_type": "large",
        "is_expandable": False,
        "blocks": [{"size": size, "state": state} for size, state in blocks],
    }


SEGMENTS = (
    segment(4 * GIB, (3 * GIB, "active_allocated"), (GIB, "inactive")),
    segment(2 * GIB, (GIB, "active_allocated"), (GIB // 2, "active_pending_free"), (GIB // 2, "inactive")),
    segment(GIB, (GIB // 4, "active_allocated"), (3 * GIB // 4, "inactive"), pool=(0, 1)),
    segment(8 * GIB, (8 * GIB, "inactive"), device=1),
)
COUNTS = {
    "allocated_bytes.all.current": 4 * GIB,
    "reserved_bytes.all.current": 7 * GIB,
    "active_bytes.all.current": 5 * GIB,
    "inactive_split_bytes.all.current": 2 * GIB,
    "allocated_bytes.all.peak": 6 * GIB,
    "num_alloc_retries": 3,
    "num_ooms": 1,
}


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """A process that is a worker with one GPU; what was reset is in `resets`."""
    resets: list[int] = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        memory_stats=lambda device: dict(COUNTS),
        memory_snapshot=lambda: list(SEGMENTS),
        reset_peak_memory_stats=resets.append,
        host_memory_stats=lambda: {"allocated_bytes.current": 5 * MIB},
        get_device_properties=lambda device: SimpleNamespace(uuid=UUID, total_memory=80 * GIB),
    )
    torch = SimpleNamespace(cuda=cuda, __version__="2.9.0", version=SimpleNamespace(cuda="12.8", hip=None))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(_WORLD=SimpleNamespace(rank=0)))
    platform = SimpleNamespace(_global_graph_pool=(0, 1))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(_current_platform=platform))
    card = gpu_memory.GpuMemory(3, "NVIDIA H200", f"GPU-{UUID}", 80 * GIB, 70 * GIB, ((os.getpid(), 8 * GIB), (1, GIB)))
    monkeypatch.setattr(gpu_memory, "nvml_devices", lambda: (card,))
    monkeypatch.setattr(worker_memory, "_PACED", worker_memory.PacedSums())
    monkeypatch.setenv(recorder.FOLDER, str(tmp_path / "records"))
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    return SimpleNamespace(cuda=cuda, resets=resets, records=tmp_path / "records")


def written(worker):
    return [read_record(path) for path in sorted(worker.records.glob("*.json"))]


class ModelRunner:
    """As vLLM's: knows its requests and the engine's settings."""

    def __init__(self):
        parameters = SimpleNamespace(logprobs=None, prompt_logprobs=5)
        old = SimpleNamespace(prompt_token_ids=list(range(50)), sampling_params=SimpleNamespace(logprobs=2))
        self.requests = {"old": old}
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(model="org/model", max_model_len=4096, dtype="torch.bfloat16"),
            cache_config=SimpleNamespace(gpu_memory_utilization=0.9, block_size=16, num_gpu_blocks=1000),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=2048),
            parallel_config=SimpleNamespace(tensor_parallel_size=2),
        )
        self.new = SimpleNamespace(
            req_id="new", prompt_token_ids=[7] * 2000, num_computed_tokens=0, sampling_params=parameters
        )

    def execute_model(self, scheduler_output, fail):
        fail()


CACHED = SimpleNamespace(req_ids=["old"], num_computed_tokens=[55])
CACHED_BEFORE_0_10 = [SimpleNamespace(req_id="old", num_computed_tokens=55)]


def step(runner, cached=CACHED):
    return SimpleNamespace(
        num_scheduled_tokens={"old": 1, "new": 2000},
        total_num_scheduled_tokens=2001,
        scheduled_new_reqs=[runner.new],
        scheduled_cached_reqs=cached,
    )


def fail_in_a_step(box, cached=CACHED):
    runner = ModelRunner()
    code = compile(
        "def run(runner, output, fail):\n runner.execute_model(output, fail)", "/x/site-packages/vllm/a.py", "exec"
    )
    names: dict[str, object] = {}
    exec(code, names)
    names["run"](runner, step(runner, cached), lambda: box.out_of_memory(0, 2 * GIB, 80 * GIB, GIB // 2))
