"""The verdict on a Kubernetes object: whether the vLLM servers it starts fit their GPUs, and which flags fix them."""

import asyncio
import gc
import hashlib
import json
import math
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from legroom.deployments.deployment import deployment_of
from legroom.deployments.subjects import StartedServer
from legroom.errors import LegroomError
from legroom.facts.huggingface import fetch
from legroom.facts.model_sources import is_hub_id, load
from legroom.isolation import GivenModel, isolated
from legroom.lint.linter import LintOptions, lint_subjects
from legroom.memo import Memo
from legroom.planning.advice import with_advice, with_quick_advice
from legroom.planning.file_plans import FileServer, planned_servers, started_servers
from legroom.planning.machine import Machine
from legroom.planning.plan import Plan
from legroom.planning.plan_json import plan_document
from legroom.records import dataclass
from legroom.render.file_plan_text import MAX_FIXES, verdict_sentences

Outcome = Literal["fits", "tight", "does_not_fit", "not_understood", "no_server"]
FixSearch = Literal["single_change", "full"]
"""Which fixes are tried: changes of a single flag, or any combination, which can take seconds."""
_BY_SEVERITY: tuple[Outcome, ...] = ("no_server", "fits", "tight", "not_understood", "does_not_fit")
_MAX_SERVERS = 16
"""Servers planned per object, which bounds the work: as many as a node has GPUs. An object with more is refused."""
_RESTART_LOOP_RULES = frozenset(
    {"shm-missing", "start-too-short", "container-command", "probe-port", "probe-path", "gpus-too-few"}
    | {"path-missing", "model-gated", "flag-value", "allocator-breaks", "module-unknown"}
)
"""Lint rules for settings that make a pod restart although its memory suffices."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one Kubernetes object (fits, does not fit ...), with the sentences that explain it."""

    outcome: Outcome
    sentences: tuple[str, ...] = ()
    is_searched: bool = True
    """Whether the full search for fixes has ended, with or without a result."""
    has_fixes: bool = False
    """Whether the sentences name a fix for every server that needs one."""

    def to_json(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "sentences": list(self.sentences)}


_FIRST_LETTER = re.compile(r"^[a-z](?=[a-z]*[ ,'])")  # of a sentence that begins with no name


def plan_verdict(
    manifest: Mapping[str, Any],
    default_gpu: str = "",
    *,
    search: FixSearch = "full",
    hub: bool = False,
    search_until_s: float = math.inf,
) -> Verdict:
    """The worst outcome of a manifest's servers, with sentences that explain it. `default_gpu`: for pods that name
    none; `hub`: fetch configs that are not bundled; `search_until_s`: time.monotonic() limit."""
    # A single-change search stops at `search_until_s` of the monotonic clock.
    with isolated():
        servers, commands, unread = started_servers("manifest.yaml", json.dumps(manifest, ensure_ascii=False))
    if unread is not None:
        return Verdict("not_understood", (f"Not understood: the manifest {unread.reason}.",))
    servers = [server for server in servers if server.runs_on_gpus or server.refused_device]
    if len(servers) > _MAX_SERVERS:
        many = f"It starts {len(servers)} vLLM servers, and at most {_MAX_SERVERS} of an object are checked: split it."
        return Verdict("does_not_fit", (many,))
    worst, sentences, plans, is_searched, has_fixes = _BY_SEVERITY[0], list[str](), list[Plan](), True, True
    idle_gpus = 0
    with isolated(_hub_models(servers) if hub else None):
        machine = Machine(default_gpu) if default_gpu else None
        for planned in planned_servers(servers, machine, advice=False):
            server = _with_fixes(planned, search, search_until_s)
            shown = server.shown
            if shown is not None and shown.verdict != "fits":
                is_searched, has_fixes = is_searched and shown.advised, has_fixes and bool(shown.advice)
            outcome: Outcome = "not_understood" if server.verdict == "unknown" else server.verdict
            worst = max(worst, outcome, key=_BY_SEVERITY.index)
            sentences += verdict_sentences(server)
            plans += [shown] if shown is not None and outcome in ("fits", "tight") else []
            idle_gpus = server.gpus_idle
        if worst != "does_not_fit":
            warnings = [remark for server in servers for remark in server.remarks]
            if idle_gpus and len(servers) == 1 and plans:
                used, raised = plans[0].args.gpus_needed, "raise --tensor-parallel-size or --data-parallel-size"
                given = f"It is given {used + idle_gpus} GPUs and uses {used}"
                warnings.append(f"{given}: lower the limit, or {raised}.")
            options = LintOptions(plan=plan_document(plans[0]) if len(plans) == 1 else None, only=_RESTART_LOOP_RULES)
            checked = lint_subjects((*servers, *commands), options)
            findings = [found for found in checked if found.severity != "note"]
            told = (f"{found.message}: {found.suggestion}." for found in findings)
            sentences += [*warnings, *(_FIRST_LETTER.sub(lambda first: first[0].upper(), text) for text in told)]
            if any(found.severity == "error" for found in findings):
                worst = "does_not_fit"
            elif worst in ("no_server", "fits") and (warnings or findings):
                worst = "tight"
    return Verdict(worst, tuple(dict.fromkeys(sentences)), is_searched, has_fixes)


def _with_fixes(server: FileServer, search: FixSearch, search_until_s: float) -> FileServer:
    """The server, its plan with flags that fix it where it does not fit; `search_until_s`: time.monotonic() limit."""
    shown = server.shown
    if shown is None or shown.verdict == "fits":
        return server
    if search == "full":
        advised = with_advice(shown, enough=MAX_FIXES)
    else:
        advised = with_quick_advice(shown, MAX_FIXES, lambda: time.monotonic() >= search_until_s)
    return replace(server, plans=tuple(advised if plan is shown else plan for plan in server.plans))


def _hub_models(servers: list[StartedServer]) -> dict[str, GivenModel]:
    """Model id -> config from the Hub of models that are not bundled; those that cannot be fetched are left out."""
    fetched: dict[str, GivenModel] = {}
    for server in servers:
        with suppress(LegroomError), isolated():
            model = deployment_of(server).args.model
            try:
                load(model)
            except LegroomError:
                if is_hub_id(model):
                    answer = fetch(model)
                    fetched[model] = GivenModel(answer.config, answer.checkpoint_bytes)
    return fetched


Manifest = Mapping[str, Any]
_SINGLE_CHANGE_SEARCH_S = 0.03
"""Leaves 20 of the promised 50 ms for the plan and the transport; one single change takes 10 ms to try."""
_PLANS_PER_MEMO_RESET = 200  # Bounds what planning memoizes: 205 MiB after 400 different objects (bench/gate.py).
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
        """(Cache key of a manifest, its cached verdict or None)."""
        key = hashlib.sha256(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
        return key, verdict

    async def decide(self, key: bytes, manifest: Manifest) -> Verdict:
        """The verdict; NoVerdict if late, full or failed. A search for fixes may go on, for the next request."""
        started_s = time.monotonic()
        verdict = self._verdicts.get(key) or await self._plan_once(key, manifest, started_s)
        if verdict.is_searched or (search := self._started_search(key, manifest)) is None:
            return verdict
        wait_s = min(self._options.wait_for_fixes_s, self._options.deadline_s) - (time.monotonic() - started_s)
        done, _ = await asyncio.wait([search], timeout=max(wait_s, 0.0))
        return search.result() if done else verdict

    async def warm_up(self) -> None:
        """Plans examples, so that no request waits for imports or data."""
        await asyncio.get_running_loop().run_in_executor(self._planner, _plan_examples)

    def close(self) -> None:
        """Stops both executors without waiting; queued plans and searches are cancelled."""
        for executor in (self._planner, self._searcher):
            executor.shutdown(wait=False, cancel_futures=True)

    async def _plan_once(self, key: bytes, manifest: Manifest, started_s: float) -> Verdict:
        """The verdict of the plan that runs for this manifest, else of a new one; NoVerdict if late, full or failed."""
        task = self._pending.get(key)
        if task is None:
            if len(self._pending) >= self._options.max_pending:
                raise NoVerdict("overload")
            task = self._pending[key] = asyncio.create_task(self._plan_in_pool(key, manifest, started_s))
            task.add_done_callback(lambda done: self._pending.pop(key, None))
        done, _ = await asyncio.wait([task], timeout=self._options.deadline_s)
        if not done:
            raise NoVerdict("timeout")
        try:
            return task.result()
        except (Exception, asyncio.CancelledError) as error:  # cancelled: the gate is ending
            print(f"legroom gate: {type(error).__name__}: {error}", file=sys.stderr)
            raise NoVerdict("error") from None

    async def _plan_in_pool(self, key: bytes, manifest: Manifest, started_s: float) -> Verdict:
        """The verdict, planned in the executor with fixes that change one flag; it is stored."""

        def plan() -> Verdict:
            """In the executor: the verdict with fixes that change one flag, within the time for these."""
            self._plans += 1
            if self._plans % _PLANS_PER_MEMO_RESET == 0:
                Memo.forget_everything()
            gpu, hub, until_s = self._options.default_gpu, self._options.hub, started_s + _SINGLE_CHANGE_SEARCH_S
            return plan_verdict(manifest, gpu, search="single_change", hub=hub, search_until_s=until_s)

        verdict = await asyncio.get_running_loop().run_in_executor(self._planner, plan)
        self._store(key, verdict)
        return verdict

    def _started_search(self, key: bytes, manifest: Manifest) -> asyncio.Task[Verdict] | None:
        """The task that searches fixes for a manifest, started unless it runs; None where the queue is full."""
        if key not in self._searches:
            if len(self._searches) > self._options.max_searches:
                self._on_search_dropped()
                return None
            task = self._searches[key] = asyncio.create_task(self._search_fixes(key, manifest))
            task.add_done_callback(lambda done: self._searches.pop(key, None))
        return self._searches[key]

    async def _search_fixes(self, key: bytes, manifest: Manifest) -> Verdict:
        """The verdict after a full search for fixes, which is stored; the earlier verdict where the search fails."""

        def search() -> Verdict:
            """In the executor: the verdict with the full search for fixes."""
            return plan_verdict(manifest, self._options.default_gpu, hub=self._options.hub)

        try:
            verdict = await asyncio.get_running_loop().run_in_executor(self._searcher, search)
        except Exception as error:  # the verdict without fixes remains valid
            print(f"legroom gate: {type(error).__name__}: {error}", file=sys.stderr)
            verdict = replace(self._verdicts.get(key) or Verdict("not_understood"), is_searched=True)
        self._store(key, verdict)
        return verdict

    def _store(self, key: bytes, verdict: Verdict) -> None:
        """Keeps the verdict, dropping the oldest beyond the limit; with Hub access, `not_understood` is not kept."""
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
