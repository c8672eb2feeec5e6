"""The plan document: what `legroom plan --json` prints and every other command reads. docs/json.md describes each key.

Written and read here alone. A field is a key of the document, in its order; reading one needs neither a model nor the
memory arithmetic, so what reads a plan (`guard`, `verify`, `run`) stays light.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from legroom.errors import LegroomError
from legroom.records import dataclass, field

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.figures import Figure, Term
    from legroom.memory.layout import Layout
    from legroom.planning.plan import Advice, Plan

HOW_TO_WRITE_ONE = "write one with: legroom plan MODEL --gpu NAME --json > plan.json"
WHOLE = (
    "model", "vllm", "gpu.count", "gpu.total_bytes", "layout.total_bytes", "layout.budget_bytes",
    "layout.weights_bytes", "layout.kv_cache_bytes", "layout.peak_used_bytes", "kv.block_size", "kv.num_blocks",
    "kv.tokens", "kv.max_concurrency", "args.max_model_len", "args.max_num_seqs", "command",
)  # fmt: skip
"""What every version of legroom has written into a plan."""
_MOST_BYTES = 32 * 2**20
_NOT_ARGS = frozenset({"release", "given", "notes", "usage"})
_FIGURES = ("weights", "activation", "cuda_graph", "non_torch", "kv_cache", "outside")
"""The parts of a layout that carry a certainty."""


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
    """One pipeline stage, written flat: its number beside the bytes of its layout."""

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
    """What ends the start-up."""

    id: str = ""
    message: str = ""
    needed_bytes: int | None = None
    available_bytes: int | None = None
    estimated_max_len: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedHost:
    """What one node gives beside its GPUs."""

    held_bytes: int = 0
    """Processes, pinned and shared memory."""
    least_bytes: int = 0
    """Below this it cannot run."""
    loading_bytes: int = 0
    """Page cache that loading works through."""
    request_bytes: int = 0
    """What a scheduler should set aside."""
    shm_bytes: int = 0
    given_bytes: int | None = None
    """What it may use, where a limit is known."""
    shares: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedBand:
    """How sure a figure is."""

    kind: str = ""
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class PlannedBasis:
    """What the bands rest on."""

    kind: str = ""
    """`measured`, or `read from source`: no start on this family of cards with this release was measured."""
    band_class: str = ""
    coverage: float = 0.0
    """How often the truth lies inside a band."""
    records: int = 0
    """Real starts behind the band of the KV cache."""


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """A planned server. What a file does not say is empty or 0: `plan_from_json` is told what has to be there."""

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
    """The working behind each figure, where it was asked for."""
    source: str = "the plan"
    """Where it was read, for messages; no part of the document."""

    def to_json(self) -> dict[str, Any]:
        """The whole document. Bytes are integers, ratios 0..1."""
        left_out = {"source"} if self.terms is not None else {"source", "terms"}
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__ if name not in left_out}

    @property
    def release(self) -> Release:
        """The vLLM release it was planned for."""
        from legroom.facts.releases import release  # noqa: PLC0415 - the guard and `run` never ask

        return release(self.vllm)

    @property
    def engines(self) -> int:
        """Data-parallel copies behind one server's address, each with the pool of `kv`. With a balancer of the user's
        own every copy is a server."""
        own_balancer = ("--data-parallel-rank", "--data-parallel-external-lb")
        if any(word.partition("=")[0] in own_balancer for word in self.command):
            return 1
        return max(1, int(self.args.get("data_parallel_size") or 1))

    @property
    def fits(self) -> bool:
        """Whether the server that was planned starts."""
        return self.verdict != "does_not_fit"


def read_plan(path: str, needs: tuple[str, ...] = WHOLE) -> PlanDocument:
    """The plan in a file (`-`: stdin), or what is wrong with it."""
    try:
        if path == "-":
            import sys  # noqa: PLC0415

            text = sys.stdin.read(_MOST_BYTES)
        elif (size := Path(path).stat().st_size) > _MOST_BYTES:
            raise LegroomError(f"{path} is no plan: it has {size:,} bytes", HOW_TO_WRITE_ONE)
        else:
            text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LegroomError(f"could not read the plan {path}: {error.strerror}", HOW_TO_WRITE_ONE) from error
    except UnicodeDecodeError as error:
        raise LegroomError(f"{path} is no plan: it is not text", HOW_TO_WRITE_ONE) from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LegroomError(f"{path} is no plan: it is not JSON ({error})", HOW_TO_WRITE_ONE) from error
    return plan_from_json(document, path, needs)


def plan_from_json(document: Any, source: str = "the plan", needs: tuple[str, ...] = WHOLE) -> PlanDocument:
    """A plan's JSON document, checked. `needs` names the keys that must be there: `kv.num_blocks`, `command`."""
    try:
        _check(document, needs)
        plan = _read(PlanDocument, "", document | {"source": source})
    except _NotAPlan as wrong:
        raise LegroomError(f"{source} is no plan of legroom: {wrong}", HOW_TO_WRITE_ONE) from None
    if "vllm" in needs:
        plan.release  # noqa: B018  # a release that is none ends here, not half-way through an export
    return plan


class _NotAPlan(Exception):
    pass


def _check(document: Any, needs: tuple[str, ...]) -> None:
    if not isinstance(document, dict):
        raise _NotAPlan("it is not a JSON object")
    for need in needs:
        part, _, name = need.partition(".")
        value = document.get(part)
        if value is None or value == []:
            raise _NotAPlan(f"it has no {part!r}")
        if name and not (isinstance(value, dict) and _is_number(value.get(name))):
            raise _NotAPlan(f"{need} is not a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_Record = TypeVar("_Record")
_PLAIN_RECORDS = (PlannedGpu, PlannedLayout, PlannedKv, PlannedHost, PlannedFailure, PlannedBand, PlannedBasis)
_RECORDS: dict[str, type[Any]] = {record.__name__: record for record in _PLAIN_RECORDS}


def _read(record: type[_Record], within: str, document: Mapping[str, Any]) -> _Record:
    """A record from its part of a document: keys that are not there keep their defaults, others are passed over."""
    fields: dict[str, Any] = record.__dataclass_fields__  # type: ignore[attr-defined]
    values = {
        name: _value(str(each.type), f"{within}{name}", document[name])
        for name, each in fields.items()
        if document.get(name) is not None
    }
    return record(**values)


def _value(kind: str, where: str, value: Any) -> Any:
    if kind.startswith(("int", "float")):
        if not _is_number(value):
            raise _NotAPlan(f"{where} is not a number")
        return int(value) if kind.startswith("int") else value
    if kind == "str":
        return str(value)
    if kind == "bool":
        return bool(value)
    if kind.startswith("tuple"):
        if not isinstance(value, (list, tuple)):
            raise _NotAPlan(f"{where} is not a list")
        inner = {"tuple[str, ...]": "str", "tuple[PlannedStage, ...]": "PlannedStage"}.get(kind, "Mapping")
        return tuple(_value(inner, f"{where}[{number}]", each) for number, each in enumerate(value))
    if not isinstance(value, Mapping):
        raise _NotAPlan(f"{where} is not a JSON object")
    if kind == "PlannedStage":
        number = _value("int", f"{where}.stage", value.get("stage", 0))
        return PlannedStage(number, _read(PlannedLayout, f"{where}.", value))
    if kind.startswith("Mapping"):
        of = {"Mapping[str, PlannedBand]": "PlannedBand", "Mapping[str, str]": "str"}.get(kind)
        return {key: _value(of, f"{where}.{key}", each) for key, each in value.items()} if of else value
    return _read(_RECORDS[kind.removesuffix(" | None")], f"{where}.", value)


def replan(document: PlanDocument) -> Plan:
    """The plan that a document tells of, made again; LegroomError where its model is not known here."""
    from legroom.facts.gpus import gpu, with_total  # noqa: PLC0415 - reading a document needs no planner
    from legroom.planning.plan import Target, plan  # noqa: PLC0415
    from legroom.vllm.parse import parse_flags  # noqa: PLC0415
    from legroom.vllm.served_model import served_model  # noqa: PLC0415

    if not (document.vllm and document.command and document.gpu.total_bytes):
        raise LegroomError("the plan is no document of `legroom plan --json`", HOW_TO_WRITE_ONE)
    args = parse_flags(document.command, document.release).args
    card = gpu(document.gpu.name)
    if card.total_bytes != document.gpu.total_bytes:
        card = with_total(card, document.gpu.total_bytes)
    return plan(Target(served_model(args), card, document.gpu.count, document.release), args)


def plan_document(plan: Plan, explain_math: bool = False) -> PlanDocument:
    """The document of a plan."""
    from legroom.planning.plan import ready_command, shared_contexts  # noqa: PLC0415 - reading needs no planner
    from legroom.vllm.secret_words import is_secret  # noqa: PLC0415
    from legroom.vllm.traits import is_moe  # noqa: PLC0415

    target, kv, layout = plan.target, plan.memory.kv, plan.layout
    return PlanDocument(
        model=target.model.name,
        vllm=target.release.version,
        gpu=PlannedGpu(target.gpu.name, target.gpus, target.gpu.total_bytes),
        modalities=tuple(modality.kind for modality in target.model.modalities),
        moe=is_moe(target.model),
        checkpoint_bytes=target.model.checkpoint_bytes,
        args=_args(plan),
        layout=planned_layout(layout),
        kv=PlannedKv(
            kv.block_size, max(kv.num_blocks, 0), max(kv.tokens, 0), kv.bytes_per_token, kv.max_concurrency,
            max(kv.longest_len, 0), kv.needed_bytes,
            {str(users): tokens for users, tokens in shared_contexts(plan).items()},
        ),
        host=_host(plan),
        verdict=plan.verdict,
        reason=plan.reason,
        failure=_failure(plan),
        advice=tuple(_advice(advice) for advice in plan.advice),
        command=tuple(ready_command(plan)),
        env={name: value for name, value in plan.args.env.items() if not is_secret(name, value)},
        confidence={f"{name}_bytes": _band(getattr(layout, name)) for name in _FIGURES},
        basis=_basis(plan),
        first_start=_first_start(plan),
        loading={"peak_bytes": layout.loading_peak_bytes, "why": layout.loading_why},
        ranks=tuple(PlannedStage(rank.rank, planned_layout(rank)) for rank in plan.memory.ranks),
        notes=tuple(dict.fromkeys(plan.notes)),
        terms=_every_term(plan) if explain_math else None,
    )  # fmt: skip


def plan_json(plan: Plan, explain_math: bool = False) -> dict[str, Any]:
    """What `legroom plan --json` prints."""
    return plan_document(plan, explain_math).to_json()


def planned_layout(layout: Layout) -> PlannedLayout:
    """A layout's bytes, without their certainty."""
    return PlannedLayout(
        total_bytes=layout.total_bytes,
        budget_bytes=layout.budget_bytes,
        weights_bytes=layout.weights.bytes,
        activation_bytes=layout.activation.bytes,
        cuda_graph_bytes=layout.cuda_graph.bytes,
        non_torch_bytes=layout.non_torch.bytes,
        kv_cache_bytes=layout.kv_cache.bytes,
        outside_bytes=layout.outside.bytes,
        held_by_others_bytes=layout.held_by_others_bytes,
        peak_used_bytes=layout.peak_used_bytes,
        headroom_bytes=layout.headroom_bytes,
    )


def layout_json(layout: Layout) -> dict[str, int]:
    """Where every byte of one GPU goes."""
    document: dict[str, int] = _plain(planned_layout(layout))
    return document


def _args(plan: Plan) -> dict[str, Any]:
    settings = plan.settings
    named = {name: _plain(getattr(settings, name)) for name in settings.__dataclass_fields__ if name not in _NOT_ARGS}
    return {**named, "block_size": plan.memory.kv.block_size}


def _failure(plan: Plan) -> PlannedFailure | None:
    failure = plan.memory.failure
    if failure is None:
        return None
    return PlannedFailure(
        failure.id, failure.message, failure.needed_bytes, failure.available_bytes, failure.estimated_max_len
    )


def _host(plan: Plan) -> PlannedHost:
    needs = plan.host
    return PlannedHost(
        held_bytes=needs.held_bytes,
        least_bytes=needs.least_bytes,
        loading_bytes=min(needs.loading_bytes, needs.checkpoint_bytes),
        request_bytes=needs.request_bytes,
        shm_bytes=needs.shm_bytes,
        given_bytes=plan.target.host_limit_bytes,
        shares=tuple({"what": share.what, "bytes": share.bytes} for share in needs.shares),
    )


def _advice(advice: Advice) -> dict[str, Any]:
    from legroom.planning.plan import ready_command  # noqa: PLC0415

    return {
        "flags": _plain(advice.flags),
        "why": advice.why,
        "trades": advice.trades,
        "verdict": advice.plan.verdict,
        "layout": layout_json(advice.plan.layout),
        "command": ready_command(advice.plan),
    }


def _basis(plan: Plan) -> PlannedBasis:
    from legroom.facts.fit import bands  # noqa: PLC0415 - reading a document needs no planner
    from legroom.memory.bands import band_class, evidence  # noqa: PLC0415

    of = band_class(plan.target.model, plan.settings, plan.target.gpu)
    kind = "measured" if of.measured else "read from source"
    return PlannedBasis(kind, of.name, bands()["coverage"], evidence(of)[0].records)


def _first_start(plan: Plan) -> dict[str, Any]:
    from legroom.planning.plan import cold_start  # noqa: PLC0415

    first = cold_start(plan)
    kv, band = first.memory.kv, first.layout.kv_cache
    return {
        "verdict": first.verdict,
        "num_blocks": max(kv.num_blocks, 0),
        "tokens": max(kv.tokens, 0),
        "max_concurrency": kv.max_concurrency,
        "kv_cache_bytes": band.bytes,
        "confidence": {"kv_cache_bytes": _plain(_band(band))},
        "layout": layout_json(first.layout),
    }


def _band(figure: Figure) -> PlannedBand:
    return PlannedBand(figure.kind, figure.low, figure.high)


def _every_term(plan: Plan) -> dict[str, Any]:
    """The working behind each figure, and behind the KV bytes of a token."""
    figures = {f"{name}_bytes": _terms(getattr(plan.layout, name).terms) for name in _FIGURES}
    return {**figures, "bytes_per_token": _terms(plan.memory.kv.token_terms)}


def _terms(terms: Sequence[Term]) -> list[dict[str, Any]]:
    return [{"label": term.label, "bytes": term.bytes, "how": term.how} for term in terms]


def _plain(value: Any) -> Any:
    """Records, tuples and mappings as JSON has them."""
    if isinstance(value, PlannedStage):
        return {"stage": value.stage, **_plain(value.layout)}
    if isinstance(value, _PLAIN_RECORDS):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        return [_plain(inner) for inner in value]
    return value
