"""One run of a server: the evidence of its log in order, the first failure, the phase, engine and machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, cast

from legroom.black_box import BlackBox
from legroom.diagnosis.cause_words import WordEvidence
from legroom.diagnosis.ledger import Ledger, ledger_of
from legroom.diagnosis.pasted_command import prose
from legroom.facts import read_data
from legroom.facts.log_messages import Launcher, engine_files, message_group
from legroom.facts.releases import logged_release
from legroom.records import dataclass
from legroom.units import GIB
from legroom.vllm_logs.evidence import WINDOW_LINES, Evidence, TorchOom, is_truncated_error, parse_torch_oom
from legroom.vllm_logs.startup_log import Startup

Phase = Literal["startup_load", "startup_profile", "startup_kv", "startup_graph", "serving", "shutdown"]

FAILING = ("failure", "host")


def is_own_failure(item: Evidence) -> bool:
    """Whether the log line reports its process's own failure, not a wait that ended because another process failed."""
    return item.role in (*FAILING, "exception") and not item.is_warning and item.id != "rpc_timeout"


FAILED_ALLOCATIONS = message_group("failed_allocation")
_OF_NPU = re.compile(r"\bNPU\b|vllm[_-]ascend|\b(?:worker|model_runner)_v1\.py")
SENTENCE_LINES = 12
"""A step that a sentence names belongs to the failure that the same passage shows, before or after it."""
FULL_POOL_PERCENT = 95.0
BOILERPLATE = ("ray_worker_died",)
"""Messages that a supervisor prints whenever a worker ends."""


@dataclass(frozen=True)
class Case:
    """One run of a server as its log shows it: the recognised lines, its start-up, engine and machine."""

    evidence: tuple[Evidence, ...]
    startup: Startup
    engine: Engine
    platform: HostTraits
    source: str = ""
    lines: int = 0
    black_box: BlackBox | None = None
    """The black box of a worker of this run."""
    black_box_line: int = 1
    """The line that names the black box."""
    recorded_frames: frozenset[str] = frozenset()
    """Known functions in the stack of the black box, which is complete where the log's traceback may not be."""
    reported: tuple[tuple[Mapping[str, Any], bool], ...] = ()
    """Settings and whether the server started with them, as the writer of the text says."""
    attempts: tuple[Mapping[str, Any], ...] = ()
    """Those settings of `reported` that were tried after the failure, in vain."""
    too_small_share: float | None = None
    """The gpu_memory_utilization of an earlier attempt whose KV pool was too small."""
    neighbours: tuple[Startup, ...] = ()
    """The start-ups of other services in the same log, which may share the card."""
    launcher: Launcher | None = None
    """The program that started the engine, where the text shows another than vLLM's own."""
    words: WordEvidence | None = None
    """What the lines say that a person wrote; None where a program printed all of them."""
    is_unnamed: bool = False
    """Whether a person tells of the failure and names neither vLLM nor a part or setting of it."""
    computed_site: str = ""
    """The site that the sizes of the failed allocation imply; empty where they fit several."""

    def all(self, *ids: str) -> tuple[Evidence, ...]:
        """Every recognised line, in log order, that matched one of these message ids of `evidence.json`."""
        return tuple(evidence for evidence in self.evidence if evidence.id in ids) if self.has(*ids) else ()

    def first(self, *ids: str) -> Evidence | None:
        """The first line of the log that matched one of these message ids; None without one."""
        return next((evidence for evidence in self.evidence if evidence.id in ids), None) if self.has(*ids) else None

    def last(self, *ids: str) -> Evidence | None:
        """The last line of the log that matched one of these message ids; None without one."""
        return next((evidence for evidence in reversed(self.evidence) if evidence.id in ids), None)

    def number(self, id_: str, name: str) -> int | None:
        """The integer fact `name` of the first line that matched this message id; None where it is not printed."""
        evidence = self.first(id_)
        return evidence.number(name) if evidence else None

    def has(self, *ids: str) -> bool:
        """Whether a line of the log matched one of these message ids."""
        return not self._ids.isdisjoint(ids)

    @cached_property
    def _ids(self) -> frozenset[str]:
        """The ids of all messages that a line matched."""
        return frozenset(evidence.id for evidence in self.evidence)

    @property
    def highest_kv_usage_percent(self) -> float:
        """The highest KV cache usage that the log prints; 0 where it prints none."""
        usages = (item.facts.get("kv_usage_ratio") for item in self.all("engine_stats", "kv_usage_line"))
        return max((float(usage) for usage in usages if isinstance(usage, int | float)), default=0.0)

    @cached_property
    def is_npu(self) -> bool:
        """Whether the card is an Ascend NPU: a line names an NPU or vllm-ascend, or a file of that plugin."""
        return any(_OF_NPU.search(f"{item.at} {item.text}") for item in self.evidence)

    @property
    def written_lines(self) -> tuple[str, ...]:
        """The lines that a person wrote, where they describe the failure in words; else empty."""
        return tuple(line for _, line in self.words.lines) if self.words is not None else ()

    def tells(self, pattern: re.Pattern[str]) -> bool:
        """Whether this pattern matches in a recognised line, or in one that a person wrote about the failure."""
        return any(map(pattern.search, (*(item.text for item in self.evidence), *self.written_lines)))

    @property
    def generates(self) -> bool:
        """Whether the engine's periodic statistics (`Avg generation throughput`) show tokens being generated."""
        return any(float(str(item.facts.get("generated_ratio", 0))) > 0 for item in self.all("engine_stats"))

    @property
    def failed_share(self) -> float:
        """The lowest gpu_memory_utilization that, by the text, failed with nothing else changed; 1 where none did."""
        alone = (settings for settings, worked in self.reported if not worked and len(settings) == 1)
        return min((share for settings in alone if (share := settings.get("gpu_memory_utilization"))), default=1.0)

    @property
    def host_limit_bytes(self) -> int | None:
        """The container's memory limit that the text states, in bytes, the largest of several; None without one."""
        return max((item.number("limit_bytes") or 0 for item in self.all("memory_limit")), default=0) or None

    @cached_property
    def first_failure(self) -> Evidence | None:
        """The earliest failure over all ranks, errors before warnings; else the first exception; None if neither."""
        failures = [evidence for evidence in self.evidence if evidence.role in FAILING]
        if not failures:
            return self.first("exception")
        # The server continues after a warning, so errors are preferred.
        failures = [evidence for evidence in failures if not evidence.is_warning] or failures
        timed = [evidence for evidence in failures if evidence.time]
        if len(timed) == len(failures):
            return min(timed, key=lambda evidence: (evidence.time, evidence.line))
        return failures[0]

    @cached_property
    def last_error(self) -> Evidence | None:
        """The last logged error that gives a reason: no supervisor's notice, no cut-off line. None without one."""
        errors = (item for item in reversed(self.evidence) if item.role in (*FAILING, "exception"))
        reasons = (item for item in errors if not item.is_warning and item is not self.truncated_error)
        return next((item for item in reasons if item.id not in BOILERPLATE), None)

    @cached_property
    def truncated_error(self) -> Evidence | None:
        """The error that the end of the text cuts off in the middle; None without one."""
        last = self.last("exception")
        if last is None or last.line + WINDOW_LINES <= self.lines:
            return None
        return last if is_truncated_error(str(last.facts.get("message", ""))) else None

    @cached_property
    def unread_shortage(self) -> Evidence | None:
        """An exception whose text mentions too little memory but matches no known message; None without one."""
        return next((item for item in self.all("exception") if prose("shortage_words").search(item.window[:400])), None)

    @cached_property
    def secondary_failure(self) -> Evidence | None:
        """The last line that reports only that another process failed before it, not why; None without one."""
        return self.last("echo", "engine_start_failed", "engine_dead", "died_silently", "self_kill", *BOILERPLATE)

    @cached_property
    def truncated_traceback(self) -> Evidence | None:
        """The traceback at the end of the text whose error line is missing; None without one."""
        tracebacks = [item for item in (*self.traceback_frames[:1], *self.all("traceback")) if not item.is_warning]
        last, error = tracebacks[-1] if tracebacks else None, self.last_error
        later = (item for item in (error, self.secondary_failure) if item is not None)
        return None if last is None or any(item.line > last.line for item in later) else last

    @cached_property
    def was_ready(self) -> bool:
        """Whether the server had finished starting, by its own lines or by what only a running server logs."""
        if self.has("server_ready", "engine_ready", "request_served", "engine_stats", "kv_usage_line", "engine_dead"):
            return True
        # Old releases used as a library log nothing after the graphs, or in eager mode after the size of the pool.
        eager = self.startup.args.enforce_eager and self.engine.generation != "V1"
        return self.startup.outcome == "started" and (bool(eager) or self.has("captured"))

    @cached_property
    def is_only_described(self) -> bool:
        """Whether a person tells of the failure and no line that a program printed shows one."""
        printed = (item for item in self.evidence if item.role in (*FAILING, "exception", "echo", "traceback"))
        has_printed = any(not item.is_told and not item.is_warning for item in printed)
        endings = (self.secondary_failure, self.truncated_traceback, self.unfinished_milestone)
        return not has_printed and not any(endings)

    @cached_property
    def unfinished_milestone(self) -> Evidence | None:
        """The last start-up step logged, where the text ends with neither readiness nor an error; else None."""
        has_ended = self.was_ready or self.last_error or self.secondary_failure or self.truncated_traceback
        return None if has_ended or not self.milestones else self.milestones[-1]

    @cached_property
    def oom(self) -> TorchOom | None:
        """The first out-of-memory error with sizes, from its most complete copy or a black box; None without one."""
        if self.black_box is not None and (recorded := recorded_oom(self.black_box, self.black_box_line)):
            return recorded
        parsed = [oom for evidence in self.all("torch_oom") if (oom := parse_torch_oom(evidence))]
        if not parsed:
            return None
        same = [oom for oom in parsed if oom.wanted_bytes == parsed[0].wanted_bytes]
        return max(same, key=lambda oom: (oom.total_bytes is not None, oom.torch_bytes is not None))

    @cached_property
    def ledger(self) -> Ledger:
        """What the first failed allocation shows of the card: bytes in all, of torch, of others, free, requested."""
        return ledger_of(self.oom)

    @property
    def budget_bytes(self) -> float:
        """gpu_memory_utilization (0.9 where not printed) x the card's total in the OOM message; 0 without one."""
        return (self.startup.args.gpu_memory_utilization or 0.9) * (self.ledger.total_bytes or 0)

    @cached_property
    def block_pool_bytes(self) -> int | None:
        """V0's KV pool: GPU blocks x swap_space / CPU blocks, as both kinds are equally large; None without counts."""
        blocks, on_cpu = (self.number("kv_sized", name) for name in ("blocks_count", "cpu_blocks_count"))
        swap = self.startup.args.swap_space
        return round(blocks * (4 if swap is None else swap) * GIB / on_cpu) if blocks and on_cpu else None

    @cached_property
    def is_oom(self) -> bool:
        """Whether a GPU allocation failed, with or without sizes."""
        return self.has(*FAILED_ALLOCATIONS)

    @cached_property
    def frames(self) -> frozenset[str]:
        """Ids (`frame_logits` ...) of known vLLM functions in the first failure's traceback or a black box's stack."""
        if self.recorded_frames:
            return self.recorded_frames
        frames = [evidence for evidence in self._evidence_near_failure() if evidence.role == "frame"]
        # A title may name another step than the traceback below it.
        first = next((evidence.line for evidence in frames if 'File "' in evidence.text), 0)
        if self.has("engine_start_failed") and not self.was_ready:  # no request was taken yet
            frames = [item for item in frames if item.id != "frame_serving"]
        if self._start_broke_off:  # "while serving" in a sentence is then said of the whole program
            frames = [item for item in frames if item.phase != "serving" or is_traceback_line(item.text)]
        return frozenset(evidence.id for evidence in frames if evidence.line >= first)

    @cached_property
    def _start_broke_off(self) -> bool:
        """Whether a traceback follows the last start-up step that was printed, and the server was never ready."""
        printed = [item.line for item in self.milestones if not item.is_told]
        return bool(printed) and not self.was_ready and any(item.line > printed[-1] for item in self.all("traceback"))

    def _evidence_near_failure(self) -> Iterator[Evidence]:
        """Evidence from 200 lines before to 60 after the first failure, times the failing ranks; all if none failed."""
        failure = self.first_failure
        if failure is None:
            yield from self.evidence
            return
        # Ranks that fail together interleave the lines of their tracebacks.
        ranks = len({(evidence.rank, evidence.pid) for evidence in self.all(failure.id)})
        for evidence in self.evidence:
            if failure.line - 200 * ranks <= evidence.line <= failure.line + 60 * ranks:
                yield evidence

    @cached_property
    def milestones(self) -> tuple[Evidence, ...]:
        """Logged start-up steps and signs of serving before the first failure, in order; all where nothing failed."""
        failure = self.first_failure
        before = [evidence for evidence in self.evidence if evidence.role in ("milestone", "once", "stats")]
        # A progress bar may be written after the error that stopped it.
        late = {"shards": 30, "moment_told": self.lines}  # which stands by one of the failures
        passed = [
            evidence
            for evidence in before
            if failure is None
            or failure.is_told
            or evidence.line <= failure.line + late.get(evidence.id, SENTENCE_LINES if evidence.is_told else 0)
            or "" < evidence.time < failure.time  # a collector may show the newest line first
        ]
        if not passed and failure is not None and not failure.time:  # an error that is pasted above its log
            passed = [evidence for evidence in before if evidence.line <= failure.line + SENTENCE_LINES]
        return tuple(sorted(passed, key=lambda item: item.time) if all(item.time for item in passed) else passed)

    @cached_property
    def phase_reached(self) -> Phase | None:
        """The latest phase of start-up or serving logged before the first failure; None where none is logged."""
        order = ("startup_load", "startup_profile", "startup_kv", "startup_graph", "serving")
        passed = [evidence.phase for evidence in self.milestones if evidence.phase in order]
        if not passed:
            return None
        return max(passed, key=order.index)  # type: ignore[arg-type]

    @cached_property
    def site(self) -> str:
        """Code site of the failed allocation (`build`, `profile`, `kv`, `graph` ...), by traceback, else by start-up
        steps or sizes; empty where unknown."""
        for site, _, frames in _SITES:
            if self.frames & frames:
                return self._site_after_last_milestone(site) if self.frames & frames <= _FRAMES_OF_ANY_STEP else site
        if self.has("sampler_warmup_oom"):
            return "sampler"
        if self.has("model_executed") and self.oom is not None:
            # The V0 engine names its model step, of the profile run too, which alone the share does not bound.
            total, unused = self.ledger.total_bytes or 0, self.ledger.unused_bytes or 0
            is_above = (self.ledger.allocated_bytes or 0) > self.budget_bytes > 0
            # A tenth of the card in one piece, and no piece of an earlier step is kept: the first pass.
            is_first = self.oom.wanted_bytes > total // 10 > 0 and unused < total // 100 and not self.oom.pools_bytes
            # Other ranks still print what they profiled.
            is_among_ranks = any(item.line > self.oom.line for item in self.all("profile_took", "profile_v0"))
            return "profile" if (is_above or is_first or is_among_ranks) and not self.was_ready else "serving"
        if site := self.computed_site or self._site_after_last_milestone(""):
            is_told = self.has("engine_dead") and all(item.is_told for item in self.milestones)
            return "serving" if is_told and not self.computed_site else site
        # The first model step of a start is the profile run; only later ones find graphs with a pool.
        is_first = self.has("forward_frame") and self.has("start_told", "engine_start_failed") and not self.was_ready
        return "profile" if is_first and not (self.oom and self.oom.pools_bytes) else ""

    def _site_after_last_milestone(self, otherwise: str) -> str:
        """The code site (`load`, `kv` ...) that follows the last logged start-up step; `otherwise` if none does."""
        # The V1 model runner warms the sampler up after capture; Model Runner V2 (model_runner.py) does not.
        last = self.milestones[-1] if self.milestones else None
        is_captured = last is not None and last.id == "captured" and last.at.lstrip("[") == "gpu_model_runner.py"
        if last is not None and last.id == "kv_sized" and self._start_broke_off and self.block_pool_bytes:
            return "kv"  # V0 prints the blocks, allocates them, and says so before it captures
        if last is not None and last.id == "kv_sized" and self._captures_no_graphs:
            return "serving"
        after_pool = "sampler" if is_captured or (otherwise and self.engine.generation != "V0") else ""
        return {
            "startup_load": otherwise or "load",
            "startup_profile": "profile",
            "startup_kv": after_pool or otherwise or "kv",
            "startup_graph": after_pool or otherwise or "graph",
            "serving": "serving",
        }.get(self.phase_reached or "", otherwise)

    @property
    def _captures_no_graphs(self) -> bool:
        """Whether the release is older than CUDA graphs (0.2.7): its configuration line does not name enforce_eager."""
        banner = self.first("server_banner")
        return banner is not None and "tokenizer_mode=" in banner.text and "enforce_eager=" not in banner.text

    @cached_property
    def traceback_frames(self) -> tuple[Evidence, ...]:
        """The frames that stand in a traceback, without functions that a sentence names."""
        return tuple(item for item in self.evidence if item.role == "frame" and is_traceback_line(item.text))

    @cached_property
    def has_site_frame(self) -> bool:
        """Whether a traceback frame, not only the last start-up step, shows in which code the allocation failed."""
        return any(self.frames & frames for _, _, frames in _SITES)

    @cached_property
    def phase(self) -> Phase | None:
        """The phase in which the first failure happened, else the last one logged before it; None if none is."""
        failure = self.first_failure
        site = next((phase for name, phase, _ in _SITES if name == self.site), None)
        if failure is not None and failure.phase and failure.id not in ("free_below_desired", "cumem_oom"):
            return failure.phase  # type: ignore[return-value]
        if site:
            return site
        if failure is not None and failure.phase:
            return failure.phase  # type: ignore[return-value]
        if self.startup.blocks == 0 or (self.startup.available_kv_bytes or 1) <= 0:
            return "startup_kv"
        if failure is not None and failure.at in ("engine.py", "[engine.py", "async_llm_engine.py"):
            return "serving"
        if self.has("engine_dead", "failed_execution_dump", "preempted"):
            return "serving"
        return self.phase_reached

    @property
    def other_processes_bytes(self) -> int | None:
        """Bytes other processes held on the card at start-up; None unless the log prints total and free."""
        total, free = self.startup.gpu_total_bytes, self.startup.free_at_start_bytes
        return None if total is None or free is None else total - free


def recorded_oom(record: BlackBox, line: int) -> TorchOom | None:
    """A black box's failed allocation with the fields of torch's message, at log line `line`; None without sizes."""
    request, card, allocator = record.request, record.card, record.allocator
    if request is None or request.wanted_bytes is None or allocator is None:
        return None
    others = (card.others_bytes,) if card and card.others_bytes else ()
    return TorchOom(
        line,
        request.wanted_bytes,
        "HIP" if record.worker.platform == "rocm" else "CUDA",
        None,
        card.total_bytes if card else None,
        card.free_bytes if card else None,
        card.own_bytes if card else None,
        others,
        allocator.allocated_bytes,
        allocator.private_pool_bytes or 0,
        allocator.unallocated_bytes,
        card.limit_bytes if card else None,
    )


def is_traceback_line(text: str) -> bool:
    """Whether the line belongs to a traceback, rather than only naming a function."""
    return 'File "' in text or "ERROR" in text or "[rank" in text


_SITES = tuple(
    (str(site), cast(Phase, phase), frozenset(frames)) for site, phase, frames in read_data("evidence.json")["sites"]
)
"""Sites with their phase and the functions in a traceback that identify them, the most specific first."""
_FRAMES_OF_ANY_STEP = frozenset({"frame_sampler", "frame_logits", "frame_compile"})
"""Functions that run in the profile run, in the warm-up and while serving."""

_V0_PATHS = ("vllm/worker/", "vllm/executor/", "model_executor/layers/sampler.py", "vllm/spec_decode/")
"""Modules of the V0 engine that the V1 engine does not use."""
_LABELS = ("EngineCore", "APIServer")  # Process names that vLLM itself puts in front of a line.


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine generation, and the releases that write such a log."""

    generation: Literal["V0", "V1", ""] = ""
    version: str | None = None
    """As printed; None where it is not."""
    before_brackets: bool | None = None
    """The logger wrote `file.py:1]` without an opening bracket: releases before 0.8."""
    is_labelled: bool = False
    """Lines begin with the name of their process, `(EngineCore_0 pid=7)`: 0.9.2 and later."""

    @property
    def is_styled_before_0_9_2(self) -> bool:
        """Whether a V1 log has the style of releases before 0.9.2, in which only workers had a label."""
        return self.generation == "V1" and not self.before_brackets and not self.is_labelled

    def within(self, first: str, last: str) -> bool | None:
        """Whether the vLLM release lies in first..last, both included; None where the release is not known."""
        return None if self.version is None else logged_release(self.version).within(first, last)


@dataclass(frozen=True, slots=True)
class HostTraits:
    """Properties of the machine or process that change how memory fails."""

    unified: bool = False
    """CPU and GPU share one memory."""
    wsl: bool = False
    trainer: bool = False
    """A training framework runs the engine on its own GPUs."""
    integrated: bool = False
    """An AMD GPU inside the CPU, by the odd total that it reports."""


def detect_engine(evidence: Sequence[Evidence], startup: Startup) -> Engine:
    """Engine generation and release from the printed version, else from the source files and style of log lines."""
    files = [item.at for item in evidence if item.at]
    names = {name.lstrip("[") for name in files}
    generation: Literal["V0", "V1", ""] = ""
    if any("EngineCore" in item.process for item in evidence) or names & engine_files("V1"):
        generation = "V1"
    elif names & engine_files("V0"):
        generation = "V0"
    frames = " ".join(item.text for item in evidence if item.role == "frame" or "vllm/worker/" in item.text)
    if not generation and ("vllm/v1/" in frames or any(path in frames for path in _V0_PATHS)):
        generation = "V1" if "vllm/v1/" in frames else "V0"
    if not generation and any(item.id == "model_executed" for item in evidence):
        generation = "V0"
    labelled = any(item.process.startswith(_LABELS) for item in evidence)
    return Engine(generation, startup.vllm, not files[0].startswith("[") if files else None, labelled)


def detect_platform(evidence: Iterable[Evidence], startup: Startup) -> HostTraits:
    """Whether memory is unified, and WSL, a trainer or an AMD APU is in use, by messages and total bytes in the log."""
    items = tuple(evidence)
    ids = {item.id for item in items}
    failed = [oom for item in items if item.id == "torch_oom" and (oom := parse_torch_oom(item))]
    # Of the RAM of a node only GB10's 119 to 122 GiB count: an ordinary host of 128 GB shows 125.
    nodes = [item for item in items if item.id == "ray_node_memory" and (item.number("total_bytes") or 0) > 122 * GIB]
    totals = [item.facts.get("total_bytes") for item in items if item not in nodes]
    totals += [oom.total_bytes for oom in failed]
    # 128 GB of shared memory shows as 115 to 129 GiB; no discrete card has a total there.
    unified = bool(ids & {"unified", "nv_sysmem"}) or any(
        isinstance(total, int) and 115 * GIB < total < 129 * GIB for total in (*totals, startup.gpu_total_bytes)
    )
    integrated = any(_is_integrated_amd_gpu(oom) for oom in failed)
    unified = unified or integrated or bool(startup.gpu_name and "GB10" in startup.gpu_name)
    return HostTraits(unified, "wsl" in ids, "trainer" in ids, integrated)


def _is_integrated_amd_gpu(oom: TorchOom) -> bool:
    """Whether an AMD GPU's total is a share of the RAM, as an APU's: no card has one so far from whole 4 GiB."""
    total = oom.total_bytes or 0
    return oom.platform == "HIP" and total > 24 * GIB and -total % (4 * GIB) > GIB // 4
