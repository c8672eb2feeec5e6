"""Memory figures of the user's own start-ups: the JSON file that holds them, and which of them apply to a plan.

A measured term applies only where nothing it depends on has changed. The activation peak depends on the model, the
release and the batching flags. Non-torch memory depends on the GPU, the release and the parallel sizes, so it applies
to other models too."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from legroom.errors import BAD_INPUT, LegroomError
from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.files import replace_file, store_path
from legroom.json_records import record_from_json
from legroom.masking import masked
from legroom.memory.deployment_memory import Measurements
from legroom.planning.plan import Target
from legroom.records import dataclass
from legroom.units import GIB
from legroom.vllm.args import EngineSettings

SCHEMA = 1
"""Version of the file format; a file of a later version is not read."""
PRINTED_STEP_BYTES = GIB // 100
"""vLLM prints memory in hundredths of a GiB, so a measured term is known to half of this either way."""

_PRIVATE = re.compile(r"(?:^|[\s\"'=])[~./]|\\\\|:(?!\s)|\.(?:local|internal|lan)\b")
"""The begin of a path, a backslash, a port or drive, a private host."""
TOTAL_TOLERANCE = 0.01
"""Cards of one name whose totals differ by less are the same card; drivers reserve different amounts."""

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size")
_WEIGHTS = (
    *PARALLEL,
    *("dtype", "quantization", "enable_expert_parallel", "enable_lora", "max_loras", "max_lora_rank"),
    *("cpu_offload_gb", "speculative_config", "language_model_only", "kv_cache_dtype"),
)
_PROFILE = (
    *_WEIGHTS,
    *("engine", "runner", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "limit_mm_per_prompt"),
    *("mm_processor_kwargs", "skip_mm_profiling", "attention_backend"),
)
TERM_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "weights_bytes": _WEIGHTS,
    "activation_bytes": (*_PROFILE, "max_model_len"),
    "non_torch_bytes": PARALLEL,
    "profiled_non_torch_bytes": (*_PROFILE, "max_model_len"),
    "graph_estimate_bytes": (*_PROFILE, "cudagraph_mode", "cudagraph_capture_sizes"),
    "graph_bytes": (*_PROFILE, "cudagraph_mode", "cudagraph_capture_sizes"),
}
"""Which settings each measured term depends on. `max_model_len` sets the V0 profile run's prompt lengths."""
MODEL_INDEPENDENT_TERMS = frozenset({"non_torch_bytes"})


def model_fingerprint(model: Model) -> str:
    """A hash of all that a model's memory depends on, so that fine-tunes of one checkpoint have the same."""
    parts: tuple[Any, ...] = (model.architecture, model.hidden_size, model.vocab_size, model.layers)
    parts += (model.tie_word_embeddings, model.quantization, model.modalities, model.encoder_layers, model.is_pooling)
    return _digest(repr(parts), 12)


@dataclass(frozen=True, slots=True)
class Observation:
    """The memory figures of one start-up, with its GPU, model, release and settings."""

    gpu: str
    gpu_total_bytes: int | None
    model: str
    release: str
    settings: Mapping[str, Any]
    terms: Mapping[str, int]
    source: str = ""
    seen: str = ""
    """The day it was stored, as YYYY-MM-DD."""
    shape: str = ""
    """`model_fingerprint`; empty where the model's config was not found."""

    @property
    def key(self) -> str:
        """A hash of GPU, model, release and settings, which all start-ups of one deployment share."""
        return _digest(json.dumps([self.gpu, self.model, self.release, self.settings], sort_keys=True, default=str), 10)


def _digest(text: str, length: int) -> str:
    """The first `length` hex digits of the text's SHA-256."""
    import hashlib  # a plan with nothing stored needs none of it

    return hashlib.sha256(text.encode()).hexdigest()[:length]


def settings_key(settings: EngineSettings) -> dict[str, Any]:
    """The engine settings that measured memory terms depend on, as JSON values."""
    names = {name for names in TERM_SETTINGS.values() for name in names}
    values = {name: getattr(settings if hasattr(settings, name) else settings.given, name) for name in sorted(names)}
    key: dict[str, Any] = json.loads(json.dumps(values, default=str, sort_keys=True))
    return key


def measurements_for(
    observations: Iterable[Observation], target: Target, settings: EngineSettings
) -> Measurements | None:
    """The newest measurement of each memory term, from observations of the same card, release, model and settings."""
    wanted = settings_key(settings)
    newest_first = list(observations)[::-1]
    measured: dict[str, Any] = {}
    sources: list[str] = []
    for term, names in TERM_SETTINGS.items():
        for observation in newest_first:
            if (
                term in observation.terms
                and observation.release == target.release.version
                and same_card(observation, target.gpu)
                and (term in MODEL_INDEPENDENT_TERMS or same_model(observation, target.model))
                and all(observation.settings.get(name) == wanted.get(name) for name in names)
            ):
                measured[term] = observation.terms[term]
                sources.append(observation.source or observation.key)
                break
    return Measurements(**measured, source=", ".join(dict.fromkeys(sources))) if measured else None


def same_card(observation: Observation, gpu: Gpu) -> bool:
    """Whether an observation is of this card: the same name and, if recorded, a total within TOTAL_TOLERANCE."""
    if observation.gpu != gpu.name:
        return False
    total = observation.gpu_total_bytes
    return total is None or abs(total / gpu.total_bytes - 1) <= TOTAL_TOLERANCE


def same_model(observation: Observation, model: Model) -> bool:
    """Whether an observation is of this model: same fingerprint, or same Hub id."""
    if observation.shape and observation.shape == model_fingerprint(model):
        return True
    return observation.model.count("/") == 1 and observation.model.lower() == model.name.lower()


def observed_total_bytes(observations: Iterable[Observation], gpu: Gpu) -> int | None:
    """The card's total in its newest observation; None without one, or if it is the known one up to rounding."""
    for observation in reversed(list(observations)):
        total = observation.gpu_total_bytes
        if total is not None and observation.gpu == gpu.name and same_card(observation, gpu):
            return total if abs(total - gpu.total_bytes) > PRINTED_STEP_BYTES else None
    return None


def with_observation(observations: Iterable[Observation], new: Observation) -> tuple[Observation, ...]:
    """The observations with `new` at the end; an older one with its key goes, and terms that `new` lacks are kept."""
    kept, terms = [], dict(new.terms)
    for observation in observations:
        if observation.key == new.key:
            terms = {**observation.terms, **terms}
        else:
            kept.append(observation)
    return (*kept, replace(new, terms=terms))


def to_json(observation: Observation) -> dict[str, Any]:
    """The entry of the calibration file and of `legroom calibrate --show --json`."""
    return {"key": observation.key, **asdict(observation)}


def receipt(observation: Observation) -> dict[str, Any] | None:
    """An observation as JSON to share, without file names; None if a setting may be private or no model is named."""
    content = asdict(observation)
    del content["source"]
    if observation.model.count("/") != 1 or _PRIVATE.search(observation.model):
        content["model"] = ""
    texts = json.dumps([observation.gpu, observation.settings])
    is_public = not _PRIVATE.search(texts) and masked(texts) == texts
    return {"receipt": SCHEMA, **content} if is_public and (content["model"] or content["shape"]) else None


def import_receipts(receipts: Iterable[tuple[str, str]]) -> int:
    """Store receipts (file name, JSON text) of others, except where an own observation has the same key; returns how
    many different ones were given. LegroomError, and none is stored, if one is no receipt."""
    path, shared = store_path(), dict[str, Observation]()
    for name, text in receipts:
        try:
            content = json.loads(text)
            if content.pop("receipt") != SCHEMA or not all(value > 0 for value in content["terms"].values()):
                raise ValueError(f"it is no receipt of version {SCHEMA}")
            made = replace(from_json(content), source=f"receipt {name}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LegroomError(f"{name} is no receipt: {error}", "see `legroom calibrate export`") from None
        shared[made.key] = made
    with locked(path):
        stored, _ = open_for_change(path)
        own = {each.key for each in stored if not each.source.startswith("receipt ")}
        kept = tuple(each for each in stored if each.key in own or each.key not in shared)
        write_store((*(each for key, each in shared.items() if key not in own), *kept), path)
    return len(shared)


def from_json(entry: Mapping[str, Any]) -> Observation:
    """The observation of a calibration file's entry; ValueError where a field is missing or has the wrong type."""
    observation = record_from_json(Observation, entry)
    terms = {name: value for name, value in observation.terms.items() if name in TERM_SETTINGS}
    return replace(observation, terms=terms)


@dataclass(frozen=True, slots=True)
class StoredCalibration:
    """The content of the calibration file."""

    observations: tuple[Observation, ...] = ()
    problem: str = ""
    """Why the file could not be read; empty where it could."""


def read_store(path: Path | None = None) -> StoredCalibration:
    """Read the calibration file; a missing file is empty, an unreadable one sets `problem`."""
    path = path or store_path()
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return StoredCalibration()
    except (OSError, UnicodeDecodeError) as error:
        return StoredCalibration(problem=f"the calibration store {path} cannot be read: {error}")
    try:
        content = json.loads(text)
        schema = content["schema"]
        if isinstance(schema, int) and schema > SCHEMA:
            return StoredCalibration(
                problem=f"the calibration store {path} was written by a newer legroom (schema {schema})"
            )
        return StoredCalibration(tuple(from_json(entry) for entry in content["observations"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return StoredCalibration(problem=f"the calibration store {path} is damaged: {error}")


def write_store(observations: tuple[Observation, ...], path: Path) -> None:
    """Write these observations as the whole calibration file."""
    write_json_file(path, {"schema": SCHEMA, "observations": [to_json(each) for each in observations]})


def store_observations(observations: Iterable[Observation]) -> str:
    """Add observations to the calibration file; returns a note where a damaged file was moved aside."""
    path = store_path()
    with locked(path):
        stored, note = open_for_change(path)
        for observation in observations:
            stored = with_observation(stored, observation)
        write_store(stored, path)
    return note


def open_for_change(path: Path) -> tuple[tuple[Observation, ...], str]:
    """(the stored observations, a note if a damaged file was moved aside or empty); LegroomError for a newer file."""
    stored = read_store(path)
    if not stored.problem:
        return stored.observations, ""
    if "newer legroom" in stored.problem:
        raise LegroomError(stored.problem, "update legroom, or set LEGROOM_HOME to another folder", BAD_INPUT)
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise LegroomError(stored.problem, f"it cannot be moved aside either: {error}") from error
    return (), f"{stored.problem}; it was moved to {aside}, and a new store begins"


def write_json_file(path: Path, content: Any) -> None:
    """Write a whole file in one step, so that a reader sees the old content or the new; LegroomError on failure."""
    try:
        replace_file(path, json.dumps(content, indent=1))
    except OSError as error:
        raise _not_writable(path, error) from error


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager: hold a lock against other writers of this file (not on Windows); LegroomError on failure."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise _not_writable(path, error) from error
    with lock:
        with contextlib.suppress(ImportError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _not_writable(path: Path, error: OSError) -> LegroomError:
    """The error to raise for a file of LEGROOM_HOME that cannot be written."""
    return LegroomError(f"{path} cannot be written: {error}", "set LEGROOM_HOME to a folder you can write to")
