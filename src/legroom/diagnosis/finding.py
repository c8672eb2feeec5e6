"""What a diagnosis is made of: findings, each with its proof, its fixes and its dead ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, cast

from legroom.facts import read_data
from legroom.records import dataclass, field

if TYPE_CHECKING:
    from legroom.memory.layout import Layout
    from legroom.planning.plan import Plan
    from legroom.vllm_logs.evidence import Evidence

FixKind = (
    Literal["max_model_len", "lower_util", "raise_util", "max_num_seqs", "max_num_batched_tokens"]
    | Literal["kv_cache_memory_bytes", "kv_cache_dtype", "eager_or_fewer_graphs", "checkpoint_format"]
    | Literal["more_or_fewer_gpus_tp_pp", "cpu_offload", "limit_multimodal", "free_gpu_or_kill_orphans"]
    | Literal["sequence_starts_or_wait", "engine_version_or_V0", "allocator_conf"]
    | Literal["disable_custom_allreduce_or_nccl_env", "other_engine_feature_off", "more_host_ram_or_shm"]
    | Literal["drop_page_cache", "swap_space", "request", "flag", "driver", "report", "access", "files"]
    | Literal["package", "disk", "port"]
)


@dataclass(frozen=True)
class Fix:
    """One change that fixes a cause: flags, environment variables or steps on the host."""

    kind: FixKind
    why: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    """By vLLM's Python names; None as a value: take the flag away."""
    env: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    confidence: float = 0.5
    """The share of first fixes on the same ground that worked (`confidence.py`), given that the cause is right."""
    trades: str = ""
    command: tuple[str, ...] = ()
    comment: str = ""
    """What of the command is not known, and has to be put in by its reader."""
    proven: bool = False
    """The log itself says that this starts: its number counts more than a model that disagrees."""
    is_unplanned: bool = False
    """The plan would rest on flags that the text does not show, so it decides nothing."""
    plan: Plan | None = None
    """The plan that the new flags lead to, where the model, the GPU and the release are known."""
    before: Layout | None = None
    """Where every byte went in the run that failed, on the same card."""

    @property
    def layout(self) -> Layout | None:
        """The memory layout of the fix's plan; None where no plan was made."""
        return self.plan.layout if self.plan else None


@cache
def known_fix(name: str) -> Fix:
    """The fix `name` of `diagnosis_texts.json`, which is the same for every run; KeyError for an unknown name."""
    row = read_data("diagnosis_texts.json")["fixes"][name]
    return Fix(**{**row, "steps": tuple(row.get("steps", ()))})


def kinds_of_changes() -> Mapping[str, FixKind]:
    """Name of a lever of `legroom plan`, or of a memory setting -> the kind of fix that a change of it is."""
    return cast(Mapping[str, FixKind], read_data("diagnosis_texts.json")["fix_kinds"])


def reason(name: str, facts: Mapping[str, object] | None = None) -> str:
    """The sentence `name` of `diagnosis_texts.json` with `facts` filled in; the general one for an unknown name."""
    texts = read_data("diagnosis_texts.json")["reasons"]
    return str(texts.get(name, texts[""])).format_map(defaultdict(str, facts or {}))


@dataclass(frozen=True, slots=True)
class DeadEnd:
    """A change that does not help, and why."""

    action: str
    why_fails: str
    when: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What the text has to show for it to be said (`fix_checks._meets_conditions`)."""


class Strength(IntEnum):
    """How strongly a text shows a cause, which orders the causes of one case; no probability (see `confidence.py`)."""

    NONE = 0
    FAINT = 1
    """Nothing but the failure itself allows it."""
    USUAL = 2
    """It is the usual cause at such a place."""
    POSSIBLE = 3
    """A line allows it, and another line explains the failure better."""
    SUGGESTED = 4
    """A setting or a word of the text points to it."""
    LIKELY = 5
    """Sizes or several lines point to it."""
    SHOWN = 6
    """A stack frame or the arithmetic of the sizes shows it."""
    NAMED = 7
    """The message that ended the run names it."""
    COMPARED = 8
    """The text compares: the server starts without it, or only one rank has it."""


@dataclass(frozen=True)
class Assessment:
    """How well one cause explains a case, the lines that show it, and the explanation."""

    strength: Strength
    evidence: tuple[Evidence, ...]
    why: str


Remedies = tuple[tuple[Fix, ...], tuple[DeadEnd, ...]]
"""The fixes of a cause, and its dead ends."""


@dataclass(frozen=True)
class Finding:
    """One cause with its probability and evidence. Its fixes are planned when somebody asks for them."""

    cause: str
    entry: str
    confidence: float
    evidence: tuple[Evidence, ...]
    why: str
    plan_remedies: Callable[[], Remedies] = field(compare=False, repr=False)

    @property
    def fixes(self) -> tuple[Fix, ...]:
        """The changes that help, the best first."""
        return self.plan_remedies()[0]

    @property
    def dead_ends(self) -> tuple[DeadEnd, ...]:
        """The changes that do not help."""
        return self.plan_remedies()[1]


def proof(*items: Evidence | Sequence[Evidence] | None) -> tuple[Evidence, ...]:
    """The first six distinct evidence lines, in log order, to show under a finding; None among `items` is skipped."""
    lines: dict[tuple[int, str], Evidence] = {}
    for item in items:
        for evidence in (item,) if item is not None and not isinstance(item, Sequence) else item or ():
            lines.setdefault((evidence.line, evidence.id), evidence)
    return tuple(sorted(lines.values(), key=lambda evidence: evidence.line))[:6]
