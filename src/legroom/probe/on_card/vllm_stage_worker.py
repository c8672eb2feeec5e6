"""A subclass of vLLM's GPU worker that records its memory profile; loaded through `worker_cls`."""

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_module: Any = importlib.import_module("vllm.v1.worker.gpu_worker")
_Worker: Any = _module.Worker


class ProbedWorker(_Worker):  # type: ignore[misc]
    """Records the profile without changing it."""

    def determine_available_memory(self) -> Any:
        """vLLM's own result; the memory profile behind it is appended to the results file."""
        profiles: list[Any] = []
        profile_memory = _module.memory_profiling

        @contextlib.contextmanager
        def recorded(*args: Any, **settings: Any) -> Iterator[Any]:
            """vLLM's memory profiling, whose result is also appended to `profiles`."""
            with profile_memory(*args, **settings) as profile:
                profiles.append(profile)
                yield profile

        _module.memory_profiling = recorded
        try:
            available = super().determine_available_memory()
        finally:
            _module.memory_profiling = profile_memory
        with contextlib.suppress(Exception):  # a failed record must not stop the engine
            result = _profile_result(self, profiles[-1]) | {"available_kv_bytes": int(available)}
            with Path(os.environ["LEGROOM_PROBE_RESULTS"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"rank": getattr(self, "rank", 0), **result}) + "\n")
        return available


def _profile_result(worker: Any, profile: Any) -> dict[str, Any]:
    """The figures of vLLM's memory profiling (`profile`) of one rank's worker, in bytes by name."""
    init = getattr(worker, "init_snapshot", None) or profile.before_create
    return {
        "finding": "vllm",
        "total_bytes": int(init.total_memory),
        "held_at_start_bytes": int(init.total_memory - init.free_memory),
        "non_torch_bytes": int(profile.non_torch_increase),
        "weights_bytes": int(profile.weights_memory),
        "torch_peak_bytes": int(profile.torch_peak_increase),
        "total_consumed_bytes": int(getattr(profile, "total_consumed", 0)),
        "transient_peak_bytes": int(getattr(profile, "transient_peak_headroom", 0)),
        "non_kv_cache_bytes": int(profile.non_kv_cache_memory),
        "graph_estimate_bytes": int(getattr(worker, "cudagraph_memory_estimate", 0) or 0),
        "requested_bytes": int(getattr(worker, "requested_memory", 0) or 0),
    }
