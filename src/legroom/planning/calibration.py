"""What a user's own start-ups taught: from a `Startup` to observations, and back into a plan.

A measured term is used again only where nothing it depends on has changed. The activation peak belongs to one model,
release and set of batching flags; non-torch memory belongs to a GPU, a release and the parallel sizes, so it carries
over to other models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.facts.releases import release as known_release
from legroom.memory.deployment_memory import Measurements
from legroom.records import dataclass
from legroom.units import GIB

if TYPE_CHECKING:
    from legroom.facts.gpus import Gpu
    from legroom.facts.model import Model
    from legroom.planning.plan import Plan, Target
    from legroom.vllm.args import EngineSettings
    from legroom.vllm_logs.startup_log import Startup

PRINTED_STEP_BYTES = GIB // 100
"""vLLM prints memory in hundredths of a GiB, so a measured term is known to half of this either way."""

TOTAL_TOLERANCE = 0.01
"""Two cards of one name with totals this close are taken as the same card; drivers differ in what they reserve."""

_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
_WEIGHTS = (
    *_PARALLEL,
    "dtype",
    "quantization",
    "enable_expert_parallel",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "cpu_offload_gb",
    "speculative_config",
    "language_model_only",
    "kv_cache_dtype",
)
_PROFILE = (
    *_WEIGHTS,
    "engine",
    "runner",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "limit_mm_per_prompt",
    "mm_processor_kwargs",
    "skip_mm_profiling",
    "attention_backend",
)
TERM_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "weights_bytes": _WEIGHTS,
    "activation_bytes": (*_PROFILE, "max_model_len"),
    "non_torch_bytes": _PARALLEL,
    "profiled_non_torch_bytes": (*_PROFILE, "max_model_len"),
    "graph_estimate_bytes": (*_PROFILE, "cudagraph_mode", "cudagraph_capture_sizes"),
    "graph_bytes": (*_PROFILE, "cudagraph_mode", "cudagraph_capture_sizes"),
}
"""Which settings each measured term depends on. `max_model_len` sets the V0 profile run's prompt lengths."""
_ANY_MODEL = frozenset({"non_torch_bytes"})


def model_fingerprint(model: Model) -> str:
    """A short name for everything memory depends on in a model; fine-tunes of one checkpoint share it."""
    import hashlib  # a plan with nothing stored needs none of it

    parts = (
        model.architecture,
        model.hidden_size,
        model.vocab_size,
        model.layers,
        model.tie_word_embeddings,
        model.quantization,
        model.modalities,
        model.encoder_layers,
        model.is_pooling,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Observation:
    """What one start-up measured, and under what."""

    gpu: str
    gpu_total_bytes: int | None
    model: str
    release: str
    settings: Mapping[str, Any]
    terms: Mapping[str, int]
    source: str = ""
    seen: str = ""
    """The day it was learnt, as YYYY-MM-DD."""
    shape: str = ""
    """What the model is made of (`model_fingerprint`), where the model was found."""

    @property
    def key(self) -> str:
        """A short name for what was run, the same for every start of it."""
        import hashlib  # a plan with nothing stored needs none of it

        what = json.dumps([self.gpu, self.model, self.release, self.settings], sort_keys=True, default=str)
        return hashlib.sha256(what.encode()).hexdigest()[:10]


def observe(
    startup: Startup, gpu: Gpu | None, planned: Plan | None, model: str, *, source: str = "", seen: str = ""
) -> Observation:
    """The observation that a start-up is worth. Without a plan of it, only what holds for any model is kept."""
    if gpu is None:
        raise LegroomError(
            "the log does not name its GPU", "say which one it was: legroom calibrate LOG --gpu 'NVIDIA H100 80GB HBM3'"
        )
    if startup.vllm is None:
        raise LegroomError("the log does not say which vLLM release wrote it", "give the whole start-up log")
    terms = _terms(startup, planned)
    settings = planned.settings if planned is not None else None
    shape = model_fingerprint(planned.target.model) if planned is not None else ""
    described = settings_key(settings) if settings is not None else _from_args(startup)
    return Observation(
        gpu.name,
        startup.gpu_total_bytes,
        model,
        known_release(startup.vllm).version,
        described,
        terms,
        source,
        seen,
        shape,
    )


def _terms(startup: Startup, planned: Plan | None) -> dict[str, int]:
    printed = {
        "weights_bytes": startup.weights_bytes,
        "activation_bytes": startup.activation_bytes,
        "non_torch_bytes": startup.non_torch_bytes,
        "graph_estimate_bytes": startup.graph_estimate_bytes,
        "graph_bytes": startup.graph_bytes,
    }
    terms = {name: value for name, value in printed.items() if value is not None and value >= 0}
    if planned is None or planned.settings.pipeline_parallel_size > 1:
        # Of a model nobody knows, or of stages that differ and are not told apart, only the shared part is certain.
        return {name: value for name, value in terms.items() if name in _ANY_MODEL}
    weights, activation = planned.layout.weights, planned.layout.activation
    if weights.kind == "exact" and abs(terms.get("weights_bytes", 0) - weights.bytes) <= PRINTED_STEP_BYTES:
        del terms["weights_bytes"]  # the exact figure says the same without the rounding of the print
    if startup.compiled and terms.get("activation_bytes", 0) > activation.bytes + PRINTED_STEP_BYTES:
        del terms["activation_bytes"]  # compiling took more than later starts will
    return terms


def settings_key(settings: EngineSettings) -> dict[str, Any]:
    """The settings that any measured term depends on, in a form that survives JSON."""
    names = {name for names in TERM_SETTINGS.values() for name in names}
    return {name: _json_value(_setting(settings, name)) for name in sorted(names)}


def _setting(settings: EngineSettings, name: str) -> Any:
    return getattr(settings, name) if hasattr(settings, name) else getattr(settings.given, name)


def _from_args(startup: Startup) -> dict[str, Any]:
    args = startup.args
    sizes = {name: getattr(args, name, None) or 1 for name in _PARALLEL}
    return {name: _json_value(value) for name, value in sizes.items()}


def _json_value(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str, sort_keys=True))


def measurements_for(
    observations: Iterable[Observation], target: Target, settings: EngineSettings
) -> Measurements | None:
    """What was measured for this very deployment, term by term; None if nothing applies."""
    wanted = settings_key(settings)
    newest_first = list(observations)[::-1]
    measured: dict[str, int] = {}
    sources: list[str] = []
    for term, names in TERM_SETTINGS.items():
        for seen in newest_first:
            if term in seen.terms and _applies(seen, term, names, wanted, target):
                measured[term] = seen.terms[term]
                sources.append(seen.source or seen.key)
                break
    if not measured:
        return None
    return Measurements(**measured, source=", ".join(dict.fromkeys(sources)))


def _applies(seen: Observation, term: str, names: tuple[str, ...], wanted: Mapping[str, Any], target: Target) -> bool:
    return (
        seen.release == target.release.version
        and same_card(seen, target.gpu)
        and (term in _ANY_MODEL or same_model(seen, target.model))
        and all(seen.settings.get(name) == wanted.get(name) for name in names)
    )


def same_card(seen: Observation, gpu: Gpu) -> bool:
    """Whether an observation was made on this kind of card."""
    if seen.gpu != gpu.name:
        return False
    return seen.gpu_total_bytes is None or abs(seen.gpu_total_bytes / gpu.total_bytes - 1) <= TOTAL_TOLERANCE


def same_model(seen: Observation, model: Model) -> bool:
    """Whether an observation was of this model: made of the same parts, or called by the same Hub id."""
    if seen.shape and seen.shape == model_fingerprint(model):
        return True
    return seen.model.count("/") == 1 and seen.model.lower() == model.name.lower()


def observed_total_bytes(observations: Iterable[Observation], gpu: Gpu) -> int | None:
    """The total this user's card reported, where it differs from the facts by more than vLLM's rounding."""
    for seen in reversed(list(observations)):
        total = seen.gpu_total_bytes
        if total is not None and seen.gpu == gpu.name and same_card(seen, gpu):
            return total if abs(total - gpu.total_bytes) > PRINTED_STEP_BYTES else None
    return None


def with_observation(observations: Iterable[Observation], new: Observation) -> tuple[Observation, ...]:
    """The observations with a new one added; an earlier one of the same run keeps only terms the new one lacks."""
    kept, terms = [], dict(new.terms)
    for seen in observations:
        if seen.key == new.key:
            terms = {**seen.terms, **terms}
        else:
            kept.append(seen)
    return (*kept, replace(new, terms=terms))


def to_json(observation: Observation) -> dict[str, Any]:
    """As stored and as printed by `--show --json`."""
    return {"key": observation.key, **asdict(observation)}


def from_json(entry: Mapping[str, Any]) -> Observation:
    """Back from the store; a field that is missing or of the wrong kind is a ValueError."""
    if not isinstance(entry, Mapping):
        raise ValueError("an observation is not an object")
    names = {item.name for item in fields(Observation)}
    values = {name: value for name, value in entry.items() if name in names}
    terms = values.get("terms")
    if not isinstance(terms, dict) or not all(isinstance(value, int) for value in terms.values()):
        raise ValueError("an observation has no terms")
    if not all(isinstance(values.get(name), str) for name in ("gpu", "model", "release")):
        raise ValueError("an observation does not say its gpu, model and release")
    values["terms"] = {name: value for name, value in terms.items() if name in TERM_SETTINGS}
    try:
        return Observation(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error
