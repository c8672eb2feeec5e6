"""A bounded cache of verdicts, filled by a planning thread and by a second thread that searches for fixes."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from legroom.gate.verdict import Verdict, plan_verdict
from legroom.memo import Memo
from legroom.records import dataclass

Manifest = Mapping[str, Any]
_SINGLE_CHANGE_SEARCH_S = 0.03
"""Leaves 20 of the promised 50 ms for the plan and the transport; one single change takes 10 ms to try."""
_PLANS_PER_MEMO_RESET = 200
"""Bounds what planning memoizes: 205 MiB in all after 400 different objects (bench/gate.py)."""
_WARM_UP_PODS = (
    ("Qwen/Qwen3-8B", "NVIDIA-H100-80GB-HBM3"),
    ("Qwen/Qwen3-8B", "NVIDIA-L4"),
    ("Qwen/Qwen3-30B-A3B-FP8", "NVIDIA-L40S"),
    ("unknown/model", "NVIDIA-L40S"),
)
"""A fit, a single-change fix, a quantized mixture of experts and an unknown name: together they load every module."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    default_gpu: str = ""
    hub: bool = False
    deadline_s: float = 4.0
    """After this time a request gets `NoVerdict("timeout")`; planning continues for the next request."""
    wait_for_fixes_s: float = 0.0
    """How long a verdict waits for the full search for fixes."""
    max_verdicts: int = 4_096
    max_pending: int = 256
    """Objects that may wait for the planning thread; more get `NoVerdict("overload")`."""
    max_searches: int = 64
    """Searches that may wait; more are dropped and start when the object is submitted again."""


class NoVerdict(Exception):
    """No verdict within the limits; `reason` is a label of `legroom_gate_failed_open_total`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class VerdictCache:
    """Verdicts by the hash of the manifest. Concurrent requests for one manifest share one plan and one search."""

    def __init__(self, options: CacheOptions, on_search_dropped: Callable[[], object] = lambda: None) -> None:
        self._options, self._on_search_dropped = options, on_search_dropped
        self._planner = ThreadPoolExecutor(1, "gate-plan")
        self._searcher = ThreadPoolExecutor(1, "gate-search")
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[Verdict]] = {}
        self._searches: dict[bytes, asyncio.Task[Verdict]] = {}
        self._plans = 0

    def get(self, manifest: Manifest) -> tuple[bytes, Verdict | None]:
        """The cache key of a manifest, and its verdict where one is cached."""
        key = hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
        return key, verdict

    async def decide(self, key: bytes, manifest: Manifest) -> Verdict:
        """The verdict within the deadline, else `NoVerdict`. Without fixes, the full search starts in the background;
        its result is returned if it arrives within `wait_for_fixes_s`, and cached in any case."""
        started_s = time.monotonic()
        verdict = self._verdicts.get(key) or await self._plan_once(key, manifest, started_s)
        if verdict.is_searched or (search := self._search_task(key, manifest)) is None:
            return verdict
        wait_s = min(self._options.wait_for_fixes_s, self._options.deadline_s) - (time.monotonic() - started_s)
        done, _ = await asyncio.wait([search], timeout=max(wait_s, 0.0))
        return search.result() if done else verdict

    async def warm_up(self) -> None:
        """Plan examples so that no request waits for imports or facts."""
        await asyncio.get_running_loop().run_in_executor(self._planner, _plan_examples)

    def close(self) -> None:
        """Stops both executors without waiting; queued plans and searches are cancelled."""
        for executor in (self._planner, self._searcher):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _plan_once(self, key: bytes, manifest: Manifest, started_s: float) -> Verdict:
        """The verdict of the plan that runs for this manifest, or of a new one."""
        task = self._pending.get(key)
        if task is None:
            if len(self._pending) >= self._options.max_pending:
                raise NoVerdict("overload")
            task = self._pending[key] = asyncio.create_task(self._plan_in_pool(key, manifest, started_s))
            task.add_done_callback(lambda done: self._pending.pop(key, None))
        done, _ = await asyncio.wait([task], timeout=self._options.deadline_s)
        if not done:
            raise NoVerdict("timeout")
        if task.cancelled() or (error := task.exception()) is not None:
            print(f"legroom gate: {type(error).__name__}: {error}", file=sys.stderr)
            raise NoVerdict("error")
        return task.result()

    async def _plan_in_pool(self, key: bytes, manifest: Manifest, started_s: float) -> Verdict:
        """The verdict planned in the executor with single-change fixes, after it is stored."""

        def plan() -> Verdict:
            self._plans += 1
            if self._plans % _PLANS_PER_MEMO_RESET == 0:
                Memo.forget_everything()
            return plan_verdict(
                manifest,
                self._options.default_gpu,
                search="single_change",
                hub=self._options.hub,
                search_until_s=started_s + _SINGLE_CHANGE_SEARCH_S,
            )

        verdict = await asyncio.get_running_loop().run_in_executor(self._planner, plan)
        self._store(key, verdict)
        return verdict

    def _search_task(self, key: bytes, manifest: Manifest) -> asyncio.Task[Verdict] | None:
        """The running or queued search for a manifest's fixes; None where the queue is full."""
        if key not in self._searches:
            if len(self._searches) > self._options.max_searches:
                self._on_search_dropped()
                return None
            task = self._searches[key] = asyncio.create_task(self._search_fixes(key, manifest))
            task.add_done_callback(lambda done: self._searches.pop(key, None))
        return self._searches[key]

    async def _search_fixes(self, key: bytes, manifest: Manifest) -> Verdict:
        """The verdict with the full search for fixes, after it is stored; the earlier one where the search fails."""

        def search() -> Verdict:
            return plan_verdict(manifest, self._options.default_gpu, hub=self._options.hub)

        try:
            verdict = await asyncio.get_running_loop().run_in_executor(self._searcher, search)
        except Exception as error:  # the verdict without fixes remains valid
            print(f"legroom gate: {type(error).__name__}: {error}", file=sys.stderr)
            verdict = replace(self._verdicts.get(key) or Verdict("not_understood"), is_searched=True)
        self._store(key, verdict)
        return verdict

    def _store(self, key: bytes, verdict: Verdict) -> None:
        """Keeps the verdict, and drops the oldest beyond the limit; one that the Hub may still change is not kept."""
        if self._options.hub and verdict.outcome == "not_understood":
            return  # the Hub may have the config at the next request
        self._verdicts[key] = verdict
        while len(self._verdicts) > self._options.max_verdicts:
            self._verdicts.popitem(last=False)


def _plan_examples() -> None:
    """Plans sample pods, so that modules and data are loaded before the first review."""
    for model, card in _WARM_UP_PODS:
        container = {"name": "vllm", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", model]}
        pod = {"nodeSelector": {"nvidia.com/gpu.product": card}, "containers": [container]}
        plan_verdict({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod})
    gc.collect()
    gc.freeze()  # modules and facts stay for the life of the process, so collections need not visit them
