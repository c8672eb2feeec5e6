"""The black box of a worker: the record that it writes when memory runs out. `worker/` writes it inside vLLM;
`diagnosis/` and `fragments/` read it. docs/black-box.md documents the format. Unknown values are None. It never
contains text of a request."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from legroom.errors import LegroomError
from legroom.files import read_text
from legroom.json_records import record_from_json
from legroom.records import dataclass, field

KIND = "black box"
VERSION = 1
PREFIX = "legroom-blackbox-"
"""A record's file is `legroom-blackbox-<UTC time>-<pid>-<number>.json`."""
MAX_BYTES = 1_000_000
"""A writer leaves out blocks and then segments, the smallest first, until the record is below this."""
MAX_READ_BYTES = 4 * MAX_BYTES
_BEYOND = 1 << 63  # Exclusive upper bound of byte counts, token counts and times in a record.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control and bidirectional characters, except newlines."""

Trigger = Literal["out_of_memory", "asked"]
BlockState = Literal["allocated", "pending", "free"]


@dataclass(frozen=True)
class WorkerProcess:
    pid: int
    rank: int | None = None
    vllm: str | None = None
    torch: str | None = None
    platform: str | None = None
    """`cuda`, `rocm` or `cpu`."""


@dataclass(frozen=True)
class StackFrame:
    file: str
    """From the package's own folder on: `vllm/v1/worker/gpu_model_runner.py`."""
    line: int
    function: str


@dataclass(frozen=True)
class FailedRequest:
    wanted_bytes: int | None = None
    error: str | None = None
    """The type of the exception."""
    message: str | None = None
    """Its first 2,000 characters, secrets and prompts masked."""
    frames: tuple[StackFrame, ...] = ()
    """The outermost first; of a deep stack the innermost 60."""


@dataclass(frozen=True)
class CardMemory:
    """The device as the driver sees it."""

    gpu: str
    """NVML's index, else the process's own."""
    name: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    """Held by this process: PyTorch's reserve and all else."""
    others_bytes: int | None = None
    """Held by other processes. Like `own_bytes` None where the driver does not say whose memory is whose."""
    limit_bytes: int | None = None
    """What PyTorch may take, where that is less than the card."""


@dataclass(frozen=True)
class SegmentBlock:
    size_bytes: int
    state: BlockState
    """`pending`: given back, but a stream may still use it."""


@dataclass(frozen=True)
class AllocatorSegment:
    """A segment of PyTorch's allocator and its blocks, in address order."""

    size_bytes: int
    allocated_bytes: int
    largest_free_bytes: int
    pool: str = ""
    """Empty for the common pool, `graph` for that of vLLM's CUDA graphs, else the id of a private pool."""
    is_small: bool = False
    """Of the pool for requests of up to 1 MiB."""
    is_expandable: bool = False
    blocks: tuple[SegmentBlock, ...] = ()
    """Empty where they were left out for the record's size."""


@dataclass(frozen=True)
class AllocatorState:
    """PyTorch's caching allocator on one device."""

    allocated_bytes: int
    reserved_bytes: int
    active_bytes: int | None = None
    """Allocated, or given back and still used by a stream."""
    inactive_split_bytes: int | None = None
    """Free, in segments that are partly in use: it cannot be returned to the card."""
    largest_free_bytes: int | None = None
    """The largest piece of the common pool that could be handed out without taking more from the card."""
    graph_pool_bytes: int | None = None
    """Reserved by the private pools of CUDA graphs."""
    private_pool_bytes: int | None = None
    """Reserved by all private pools."""
    private_free_bytes: int | None = None
    """Of those, free; only the pool itself can use it."""
    peak_allocated_bytes: int | None = None
    alloc_retries: int | None = None
    """How often it had to give its cache back to the card and ask again."""
    ooms: int | None = None
    settings: str | None = None
    """PYTORCH_ALLOC_CONF as the process had it."""
    has_expandable_segments: bool | None = None
    segments: tuple[AllocatorSegment, ...] = ()
    segments_left_out: int = 0

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that PyTorch has reserved but not allocated."""
        return max(self.reserved_bytes - self.allocated_bytes, 0)

    @property
    def usable_free_bytes(self) -> int:
        """Bytes outside private pools that PyTorch has reserved but not allocated."""
        return max(self.unallocated_bytes - (self.private_free_bytes or 0), 0)


@dataclass(frozen=True)
class WorkerHostMemory:
    rss_bytes: int | None = None
    pinned_bytes: int | None = None
    available_bytes: int | None = None
    """Of the machine, or of the container's limit."""


@dataclass(frozen=True)
class ScheduledRequest:
    """One request of the step, without its text."""

    id: str
    scheduled_tokens: int
    computed_tokens: int | None = None
    prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class RecordedStep:
    requests: int
    tokens: int
    new_requests: int = 0
    largest: tuple[ScheduledRequest, ...] = ()
    """Those with the most scheduled tokens, eight at most."""
    prompt_logprobs: int = 0
    """How many of the requests ask for log-probabilities of their prompts."""


@dataclass(frozen=True)
class MemoryReading:
    time_s: float
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    largest_free_bytes: int | None = None
    used_bytes: int | None = None
    non_torch_bytes: int | None = None
    others_bytes: int | None = None
    rss_bytes: int | None = None
    pinned_bytes: int | None = None


@dataclass(frozen=True)
class BlackBox:
    """What a worker recorded when memory ran out or on request."""

    time_s: float
    trigger: Trigger
    worker: WorkerProcess
    request: FailedRequest | None = None
    card: CardMemory | None = None
    allocator: AllocatorState | None = None
    host: WorkerHostMemory | None = None
    step: RecordedStep | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """The engine's settings that decide memory, by the names of vLLM's flags with underscores, and `num_gpu_blocks`."""
    history: tuple[MemoryReading, ...] = ()
    """The last five minutes as they were read, before them one reading a minute; the oldest first."""

    @property
    def non_torch_bytes(self) -> int | None:
        """Bytes that this process holds on the card outside PyTorch; None where the driver does not report them."""
        if self.card is None or self.card.own_bytes is None or self.allocator is None:
            return None
        return max(self.card.own_bytes - self.allocator.reserved_bytes, 0)

    def to_json(self) -> dict[str, Any]:
        """The JSON document of the record, as docs/black-box.md describes it."""
        return {"legroom": KIND, "version": VERSION, **asdict(self)}


def is_record(head: bytes) -> bool:
    """Whether a file with these first bytes is a black box, however its JSON is indented."""
    return b"".join(head[:80].split()).startswith(b'{"legroom":"blackbox"')


def parse_record(text: str | bytes, name: str = "the record") -> BlackBox:
    """The black box in a JSON text; LegroomError, which calls it `name`, for any other text."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LegroomError(f"{name} is not a whole black box: {error}", "was it cut off?") from error
    if not isinstance(document, dict) or document.get("legroom") != KIND:
        raise LegroomError(f"{name} is not a black box of legroom's")
    if not isinstance(document.get("version"), int) or document["version"] > VERSION:
        raise LegroomError(f"{name} was written by a newer legroom", "update legroom to read it")
    settings = document.get("settings")
    if isinstance(settings, dict):
        document["settings"] = {name: value for name, value in settings.items() if _is_plain_setting(value)}
    try:
        return record_from_json(BlackBox, _cleaned(document))
    except (ValueError, RecursionError) as error:
        raise LegroomError(f"{name} is a damaged black box: {error}") from error


def read_record(path: Path) -> BlackBox:
    """The black box in a file; LegroomError where it cannot be read."""
    return parse_record(read_text(path, "is the path right?", MAX_READ_BYTES), str(path))


def _cleaned(value: Any) -> Any:
    """A JSON value without control characters; ValueError for a number below 0 or too large for a size, count or time
    (logprobs may be -1: vLLM's whole vocabulary)."""
    if isinstance(value, str):
        return _CONTROLS.sub("", value)
    if isinstance(value, dict):
        plain = {name: inner for name, inner in value.items() if inner == -1 and name.endswith("logprobs")}
        return {_cleaned(name): _cleaned(inner) for name, inner in value.items() if name not in plain} | plain
    if isinstance(value, list):
        return [_cleaned(inner) for inner in value]
    if isinstance(value, (int, float)) and not 0 <= value < _BEYOND:
        raise ValueError(f"{value!r:.40} is no size, count or time")
    return value


def _is_plain_setting(value: Any) -> bool:
    """Whether a setting in a record is text without control characters or a number from 0 to below 2**63."""
    if isinstance(value, str):
        return _CONTROLS.search(value) is None
    return isinstance(value, (int, float)) and 0 <= value < _BEYOND
