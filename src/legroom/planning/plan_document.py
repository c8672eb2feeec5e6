"""The plan document: what `legroom plan --json` prints and every other command reads. docs/json.md describes each key.
A field is a key of the document, in its order. Reading one needs neither a model nor the memory arithmetic, so what
reads a plan (`guard`, `verify`, `run`) stays light; `plan_json` makes one of a plan."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.files import read_text
from legroom.json_records import is_number, record_from_json
from legroom.records import dataclass, field

if TYPE_CHECKING:
    from legroom.facts.releases import Release

HOW_TO_WRITE_A_PLAN = "write one with: legroom plan MODEL --gpu NAME --json > plan.json"
_REQUIRED = {
    "gpu": ("count", "total_bytes"),
    "layout": ("total_bytes", "budget_bytes", "weights_bytes", "kv_cache_bytes", "peak_used_bytes"),
    "kv": ("block_size", "num_blocks", "tokens", "max_concurrency"),
    "args": ("max_model_len", "max_num_seqs"),
}
REQUIRED_KEYS = ("model", "vllm", *(f"{part}.{name}" for part in _REQUIRED for name in _REQUIRED[part]), "command")
"""Keys that every version of legroom writes into a plan."""
_MOST_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """The card, and how many of it."""

    name: str = ""
    count: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """Where every byte of one GPU goes."""

    total_bytes: int = 0
    budget_bytes: int = 0
    weights_bytes: int = 0
    activation_bytes: int = 0
    cuda_graph_bytes: int = 0
    non_torch_bytes: int = 0
    kv_cache_bytes: int = 0
    outside_bytes: int = 0
    held_by_others_bytes: int = 0
    peak_used_bytes: int = 0
    headroom_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """One pipeline stage; in JSON its number stands beside the bytes of its layout."""

    stage: int = 0
    layout: PlannedLayout = PlannedLayout()


@dataclass(frozen=True, slots=True)
class PlannedKv:
    """The pool of one engine."""

    block_size: int = 0
    num_blocks: int = 0
    """The null block included."""
    tokens: int = 0
    bytes_per_token: float | None = None
    """None where an older plan does not say; 0 for a model that keeps no KV cache."""
    max_concurrency: float = 0.0
    longest_len: int = 0
    needed_bytes: int = 0
    context_by_users: Mapping[str, Any] = field(default_factory=dict)
    """Tokens that each of so many requests can have at once, for numbers that the full length is too long for."""


@dataclass(frozen=True, slots=True)
class PlannedFailure:
    """The start-up check that fails."""

    id: str = ""
    message: str = ""
    needed_bytes: int | None = None
    available_bytes: int | None = None
    estimated_max_len: int | None = None
    missing_bytes: int | None = None
    """What a card lacks for the whole start: more than the check lacks where it fails before the KV cache."""


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """Host memory of one node."""

    held_bytes: int = 0
    """Processes, pinned and shared memory."""
    least_bytes: int = 0
    """Below this it cannot run."""
    loading_bytes: int = 0
    """Page cache that loading works through."""
    checkpoint_bytes: int = 0
    """What is read from disk: the files where their size is known, else the weights of the whole model."""
    request_bytes: int = 0
    """What a scheduler should set aside."""
    shm_bytes: int = 0
    given_bytes: int | None = None
    """What it may use, where a limit is known."""
    shares: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedBand:
    """The certainty and the 90 % band of a figure."""

    kind: str = ""
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedBasis:
    """The measurements behind the bands."""

    kind: str = ""
    """`measured`, or `read from source`: no ten starts of the release on this card family were measured."""
    band_class: str = ""
    """The properties of which fewer than ten starts are known; empty: none."""
    coverage: float = 0.0
    """How often the truth lies inside a band."""
    records: int = 0
    """Real starts as well known as this one."""


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """A planned server. Keys that a file lacks are empty or 0; `plan_from_json` checks the required ones."""

    model: str = ""
    vllm: str = ""
    gpu: PlannedGpu = PlannedGpu()
    modalities: tuple[str, ...] = ()
    moe: bool = False
    checkpoint_bytes: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    """Every setting as the release resolves it; `block_size` is the one the KV cache really uses."""
    layout: PlannedLayout = PlannedLayout()
    """Of the tightest GPU."""
    kv: PlannedKv = PlannedKv()
    host: PlannedHost | None = None
    """The host's memory; None in a document of an older legroom."""
    verdict: str = ""
    reason: str = ""
    failure: PlannedFailure | None = None
    advice: tuple[Mapping[str, Any], ...] = ()
    """Changes of flags, each with the memory it gives."""
    command: tuple[str, ...] = ()
    """Ready to run, without secrets."""
    env: Mapping[str, str] = field(default_factory=dict)
    """The environment the server was planned with; what may be a secret is left out."""
    confidence: Mapping[str, PlannedBand] = field(default_factory=dict)
    basis: PlannedBasis = PlannedBasis()
    first_start: Mapping[str, Any] | None = None
    """The same deployment with a cold compile cache; None in a plan of an older legroom."""
    loading: Mapping[str, Any] | None = None
    """The most that torch holds while the weights load, and why that is more than the weights."""
    ranks: tuple[PlannedStage, ...] = ()
    notes: tuple[str, ...] = ()
    terms: Mapping[str, Any] | None = None
    """The terms of each figure, with --explain-math."""
    source: str = "the plan"
    """Where it was read, for messages; no part of the document."""

    def to_json(self) -> dict[str, Any]:
        """The whole document. Bytes are integers, ratios 0..1."""
        left_out = {"source"} if self.terms is not None else {"source", "terms"}
        return {name: as_json(getattr(self, name)) for name in self.__dataclass_fields__ if name not in left_out}

    @property
    def release(self) -> "Release":
        """The vLLM release it was planned for."""
        from legroom.facts.releases import release  # the guard and `run` never ask

        return release(self.vllm)

    @property
    def engines(self) -> int:
        """Data-parallel engines behind the address, each with the pool of `kv`; 1 with an external load balancer."""
        own_balancer = ("--data-parallel-rank", "--data-parallel-external-lb")
        if any(word.partition("=")[0] in own_balancer for word in self.command):
            return 1
        return max(1, int(self.args.get("data_parallel_size") or 1))

    @property
    def fits(self) -> bool:
        """Whether the planned server starts; its verdict may be `tight`."""
        return self.verdict != "does_not_fit"


def read_plan(path: str, needs: tuple[str, ...] = REQUIRED_KEYS) -> PlanDocument:
    """The plan in a JSON file (`-`: stdin); LegroomError where it is no plan or lacks a key of `needs`."""
    if path == "-":
        import sys

        text = sys.stdin.read(_MOST_BYTES)
    else:
        text = read_text(path, HOW_TO_WRITE_A_PLAN, _MOST_BYTES)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LegroomError(f"{path} is no plan: it is not JSON ({error})", HOW_TO_WRITE_A_PLAN) from error
    return plan_from_json(document, path, needs)


def plan_from_json(document: Any, source: str = "the plan", needs: tuple[str, ...] = REQUIRED_KEYS) -> PlanDocument:
    """A JSON document's plan; LegroomError, naming `source`, where a key of `needs` (`kv.num_blocks`) is missing."""
    try:
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        for need in needs:
            part, _, name = need.partition(".")
            value = document.get(part)
            if value is None or value == []:
                raise ValueError(f"it has no {part!r}")
            if name and not (isinstance(value, dict) and is_number(value.get(name))):
                raise ValueError(f"{need} is not a number")
        stages = tuple(
            PlannedStage(each.get("stage", 0), record_from_json(PlannedLayout, each, f"ranks[{number}]."))
            for number, each in enumerate(document.get("ranks") or ())
        )
        plan = replace(record_from_json(PlanDocument, document | {"ranks": None}), ranks=stages, source=source)
    except ValueError as wrong:
        raise LegroomError(f"{source} is no plan of legroom: {wrong}", HOW_TO_WRITE_A_PLAN) from None
    if "vllm" in needs:
        plan.release  # noqa: B018  # a release that is none ends here, not half-way through an export
    return plan


def as_json(value: Any) -> Any:
    """The value as JSON types: dataclasses and mappings become dicts, tuples lists."""
    if isinstance(value, PlannedStage):
        return {"stage": value.stage, **as_json(value.layout)}
    if hasattr(value, "__dataclass_fields__"):
        return {name: as_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    return [as_json(inner) for inner in value] if isinstance(value, (tuple, list, frozenset, set)) else value
