"""The difference of the KV cache between two releases as a list of changes whose bytes add up to it.

The changes are applied one after another from the older release to the newer one: first the newer release's accounting
(budget, weights, profile run, CUDA graphs, each term of non-torch memory) with the older settings, then the settings in
the order of `_SETTINGS`, then flags that the newer release no longer has. In another order, bytes that two changes move
together would be listed at the other one."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legroom.facts.releases import Release
from legroom.figures import Term
from legroom.memory.layout import Layout
from legroom.planning.plan import Plan, Target
from legroom.records import dataclass
from legroom.units import human_bytes
from legroom.vllm.args import PARALLEL_SIZES, EngineSettings
from legroom.vllm.resolve import resolve

_WITH_RELEASE = ("release", "engine", "notes")  # Settings that change together with the accounting.
_GIVEN = ("given", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size", "usage")


@dataclass(frozen=True, slots=True)
class SettingStep:
    """Settings that are changed together, and the sentence about them."""

    what: str
    fields: tuple[str, ...]
    why: str
    """A sentence with {old} and {new}: the values of the first field that differs."""
    why_off: str = ""
    """The sentence where a switch is turned off, if it differs."""


_SETTINGS = (
    SettingStep(
        "share of the card",
        ("gpu_memory_utilization",),
        "the default of --gpu-memory-utilization goes from {old} to {new}",
    ),
    SettingStep("precision", ("dtype", "quantization"), "activations and weights go from {old} to {new}"),
    SettingStep("KV cache precision", ("kv_cache_dtype",), "the KV cache goes from {old} to {new}"),
    SettingStep(
        "longest request",
        ("max_model_len", "auto_fit_len"),
        "the default of --max-model-len goes from {old} to {new} tokens",
    ),
    SettingStep(
        "sequences at once",
        ("max_num_seqs",),
        "the default of --max-num-seqs goes from {old} to {new}, and the profile run samples that many",
    ),
    SettingStep(
        "tokens a step",
        ("max_num_batched_tokens",),
        "the default of --max-num-batched-tokens goes from {old} to {new}, and the profile run computes that many",
    ),
    SettingStep(
        "scheduling",
        ("enable_chunked_prefill", "enable_prefix_caching", "async_scheduling", "max_concurrent_batches"),
        "steps are scheduled otherwise by default",
    ),
    SettingStep(
        "model runner",
        ("runner",),
        "the model runner goes from {old} to {new}: other buffers, and a sampler that is profiled otherwise",
    ),
    SettingStep(
        "captured graphs",
        ("cudagraph_mode", "cudagraph_capture_sizes"),
        "the default of what is captured as CUDA graphs goes from {old} to {new}",
    ),
    SettingStep(
        "CUDA-graph estimate",
        ("graph_estimate_applied",),
        "an estimate of what CUDA graphs will take now comes out of the budget, where they were captured beside it",
        "no estimate of CUDA graphs comes out of the budget: they are captured beside it",
    ),
    SettingStep(
        "other defaults",
        (
            "disable_hybrid_kv_cache_manager",
            "enable_expert_parallel",
            "enforce_eager",
            "num_speculative_tokens",
            *PARALLEL_SIZES,
        ),
        "other defaults change",
    ),
    SettingStep("flags no longer taken", _GIVEN, "a flag of today's command has no effect there"),
)
_TITLES = {
    "budget": "budget",
    "weights": "weights",
    "activation": "profile run",
    "cuda_graph": "CUDA-graph estimate",
    "non_torch": "non-torch",
    "neighbours": "other processes on the card",
}


@dataclass(frozen=True, slots=True)
class ByteChange:
    """A change of memory with its reason; `kv_changes` counts bytes that the smallest KV cache of all GPUs gains."""

    what: str
    why: str
    bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of the accounting; `bytes` is its contribution to the KV cache, negative for all but the budget."""

    bytes: int
    how: str = ""
    terms: tuple[Term, ...] = ()


_Key = tuple[str, str]  # The name of a part, and of its term where terms are listed one by one.


@dataclass(frozen=True)
class _Accounting:
    """Settings between those of two releases, and the parts of every pipeline stage's budget."""

    settings: EngineSettings
    stages: tuple[Mapping[_Key, _Part], ...]

    @property
    def kv_bytes(self) -> int:
        """KV cache bytes of the pipeline stage with the least, or --kv-cache-memory-bytes where given."""
        if self.settings.kv_cache_memory_bytes is not None:
            return self.settings.kv_cache_memory_bytes
        return min(sum(part.bytes for part in stage.values()) for stage in self.stages)

    def with_part(self, other: "_Accounting", key: _Key) -> "_Accounting":
        """This accounting with the part `key` of every stage as in `other`."""
        mixed = []
        for here, there in zip(self.stages, other.stages, strict=True):
            stage = {name: part for name, part in here.items() if name != key}
            mixed.append({**stage, key: there[key]} if key in there else stage)
        return replace(self, stages=tuple(mixed))

    def part(self, key: _Key) -> _Part | None:
        """The part `key` on the pipeline stage where it is largest; None where no stage has it."""
        parts = (stage[key] for stage in self.stages if key in stage)
        return max(parts, key=lambda part: abs(part.bytes), default=None)


@dataclass(frozen=True, slots=True)
class _Move:
    """One change on the way from the older release to the newer one."""

    what: str
    bytes: int
    older: Any
    """The part or the value of the setting in the older release; None: no such part."""
    newer: Any
    step: SettingStep | None = None
    """The changed settings; None: the accounting changes."""

    def as_change(self, is_upgrade: bool, release: Release) -> ByteChange:
        """The change as told for an upgrade, or with the opposite sign for a downgrade, to `release`."""
        first, last = (self.older, self.newer) if is_upgrade else (self.newer, self.older)
        bytes_ = self.bytes if is_upgrade else -self.bytes
        if self.step is None:
            return ByteChange(self.what, _accounting_reason(first, last, release), bytes_)
        words = self.step.why_off if last is False and self.step.why_off else self.step.why
        return ByteChange(self.what, words.format(old=_shown_value(first), new=_shown_value(last)), bytes_)


def kv_changes(old: Plan, new: Plan) -> tuple[ByteChange, ...]:
    """The changes between the KV caches of two plans of one command; their bytes add up to the difference."""
    release = new.target.release
    is_upgrade = not release.before(old.target.release.version)
    moves = _moves(old, new) if is_upgrade else _moves(new, old)
    changes = [move.as_change(is_upgrade, release) for move in moves if move.bytes]
    return tuple(sorted(changes, key=lambda change: -abs(change.bytes)))


def _moves(old: Plan, new: Plan) -> Iterator[_Move]:
    """What each part of the budget, then each setting, adds to the KV cache bytes from the old to the new plan."""
    if old.memory.kv.shape.is_empty or new.memory.kv.shape.is_empty:
        yield _Move("KV cache", new.layout.kv_cache.bytes - old.layout.kv_cache.bytes, None, None)
        return
    current, wanted = _accounting(old.target, _resolved_settings(old)), _resolved_settings(new)
    ruled = replace(current.settings, **{name: getattr(wanted, name) for name in _WITH_RELEASE})
    end = _accounting(new.target, ruled)
    for key in dict.fromkeys(key for each in (current, end) for stage in each.stages for key in stage):
        mixed = current.with_part(end, key)
        part, label = key
        title = f"{label} ({_TITLES[part]})" if label else _TITLES[part]
        yield _Move(title, mixed.kv_bytes - current.kv_bytes, current.part(key), end.part(key))
        current = mixed
    current = end
    for step in _SETTINGS:
        changed = [name for name in step.fields if getattr(current.settings, name) != getattr(wanted, name)]
        if not changed:
            continue
        older, newer = getattr(current.settings, changed[0]), getattr(wanted, changed[0])
        values = {name: getattr(wanted, name) for name in changed}
        after = _accounting(new.target, replace(current.settings, **values))
        yield _Move(step.what, after.kv_bytes - current.kv_bytes, older, newer, step)
        current = after


def _resolved_settings(plan: Plan) -> EngineSettings:
    """The settings that the release resolves for the plan's flags, with max_model_len not yet fitted to memory."""
    return resolve(plan.args, plan.target.model, plan.target.gpu, plan.target.release)


def _accounting(target: Target, settings: EngineSettings) -> _Accounting:
    """The memory budget of every pipeline stage under these settings, by part."""
    return _Accounting(settings, tuple(map(_kv_contributions, target.stage_layouts(settings))))


def _kv_contributions(layout: Layout) -> dict[_Key, _Part]:
    """What adds to a layout's KV cache in bytes: the budget, and with a minus weights and the other parts."""
    parts = {("budget", ""): _Part(layout.budget_bytes)}
    for name in ("weights", "activation", "cuda_graph"):
        figure = getattr(layout, name)
        parts[name, ""] = _Part(-figure.bytes, terms=figure.terms)
    own = layout.non_torch
    # With kv_cache_memory_bytes, which has one term, nothing is subtracted for other processes.
    left = sum(part.bytes for part in parts.values()) - own.bytes
    if len(layout.kv_cache.terms) > 1 and layout.kv_cache.bytes != left:
        parts["neighbours", ""] = _Part(layout.kv_cache.bytes - left)
    if sum(term.bytes for term in own.terms) != own.bytes:
        return {**parts, ("non_torch", ""): _Part(-own.bytes)}
    return {**parts, **{("non_torch", term.label): _Part(-term.bytes, term.how) for term in own.terms}}


def _accounting_reason(first: _Part | None, last: _Part | None, release: Release) -> str:
    """Why the release counts a part of the budget differently, by the terms in which `first` and `last` differ."""
    if first is not None and last is not None:
        return f"{_part_difference_text(first, last)} as vLLM {release} counts"
    if last is not None:
        return f"vLLM {release} counts it: {_size_text(last)}"
    if first is not None:
        return f"vLLM {release} does not count it: {_size_text(first)} before"
    return f"vLLM {release} does not keep the same kind of KV cache for this model"


def _part_difference_text(first: _Part, last: _Part) -> str:
    """What differs between a part before (`first`) and after (`last`), term by term where terms are known."""
    before, after = ({term.label: term.bytes for term in part.terms} for part in (first, last))
    moved = [
        f"{label} {human_bytes(before.get(label, 0))} -> {human_bytes(after.get(label, 0))}"
        for label in dict.fromkeys((*before, *after))
        if before.get(label, 0) != after.get(label, 0)
    ]
    sizes = [human_bytes(abs(part.bytes)) for part in (first, last)]
    if not moved and sizes[0] == sizes[1]:
        return "rounded otherwise"
    return ", ".join(moved) or f"{sizes[0]} -> {sizes[1]}"


def _size_text(part: _Part) -> str:
    """The absolute size of a part of the memory budget, such as `1.5 GiB`, and how it was computed where known."""
    size = human_bytes(abs(part.bytes))
    return f"{size}, {part.how}" if part.how else size


def _shown_value(value: Any) -> str:
    """A setting's value as text for a sentence: yes, no, a number or sizes."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, tuple):
        return f"{len(value)} sizes up to {max(value):,}" if value else "no sizes"
    return str(value)
