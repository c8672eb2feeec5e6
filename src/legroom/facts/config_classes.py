"""vLLM's config classes, model interfaces, names and attention backends, by release. Data: `tools/import_vllm.py`."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from legroom.facts import DATA_FOLDER, read_data, read_texts
from legroom.facts.gpus import dotted
from legroom.facts.releases import Release
from legroom.records import dataclass


@cache
def _recorded_releases() -> tuple[str, ...]:
    """The releases whose facts were recorded from vLLM's code, the oldest first."""
    return tuple(sorted(read_texts(DATA_FOLDER / "vllm"), key=lambda name: [int(number) for number in name.split(".")]))


@cache
def release_facts(part: str, release: Release) -> Mapping[str, Any]:
    """The facts recorded under `part` for the newest recorded release up to this one; empty before the first one."""
    name = next((name for name in reversed(_recorded_releases()) if not release.before(name)), None)
    return _recorded_facts(name).get(part, {}) if name else {}


@cache
def _recorded_facts(name: str) -> Mapping[str, Any]:
    """All facts of a recorded release; but for the newest, its file holds only what differs from the next release."""
    newer = _recorded_releases()[_recorded_releases().index(name) + 1 :]
    own: Mapping[str, Any] = read_data(f"vllm/{name}.json")
    return with_difference(_recorded_facts(newer[0]), own) if newer else own


def with_difference(base: Mapping[str, Any], difference: Mapping[str, Any]) -> Mapping[str, Any]:
    """`base` with the values of `difference`, merged map by map, and without the keys listed in its `without`."""
    facts = {key: value for key, value in base.items() if key not in difference.get("without", ())}
    for key, value in difference.items():
        inside = isinstance(value, Mapping) and isinstance(facts.get(key), Mapping)
        facts[key] = with_difference(facts[key], value) if inside else value
    facts.pop("without", None)
    return facts


def is_recorded(release: Release) -> bool:
    """Whether facts were recorded from the code of this release or an earlier one."""
    return bool(release_facts("config_fields", release))


@cache
def field_of_flag(dest: str, release: Release) -> Mapping[str, Any]:
    """The bounds and choices of a flag's field in vLLM's config classes; empty where no class has such a field."""
    classes = release_facts("config_fields", release)
    found = (fields[dest] for name, fields in classes.items() if name != "names" and dest in fields)
    return next(found, {})


@cache
def known_names(kind: str, release: Release) -> tuple[str, ...]:
    """What a release registers under `kind` (connectors, attention_backends ...), by name; empty if not recorded."""
    return tuple(release_facts("config_fields", release).get("names", {}).get(kind, ()))


@cache
def interfaces(architecture: str, release: Release) -> frozenset[str] | None:
    """What an architecture's class supports (pipeline_parallel, lora, mtp ...); None where that was not recorded."""
    words = release_facts("model_interfaces", release).get(architecture)
    return None if words is None else frozenset(words.split())


def accepted_quantizations(kind: str, release: Release) -> tuple[str, ...] | None:
    """The --quantization values for checkpoints of a method (`kind`), () if all are accepted; None if not recorded."""
    row = release_facts("quantization_overrides", release).get(kind)
    return None if row is None else () if row["every_flag"] else tuple(row["flags"])


@dataclass(frozen=True, slots=True)
class LayerNeeds:
    """What one attention layer asks of a backend: vLLM's AttentionSelectorConfig."""

    head_size: int
    dtype: str
    kv_cache_dtype: str
    block_size: int | None = None
    """As given by --block-size."""
    mla: bool = False
    sparse: bool = False
    sinks: bool = False
    mm_prefix: bool = False
    attention_type: str = "decoder"
    sliding_window: bool = False
    kv_connector: bool = False
    prefill_context_parallel: bool = False
    decode_context_parallel: bool = False
    shape: str = ""
    """The shape of latent attention: deepseek, glm, small, no_rope."""


_SWITCHES = {
    "mm_prefix": "partial multimodal token full attention not supported",
    "sinks": "attention sinks not supported",
    "sliding_window": "sliding window not supported",
    "kv_connector": "KV connector not supported",
    "prefill_context_parallel": "PCP not supported",
    "decode_context_parallel": "DCP not supported",
}


@dataclass(frozen=True)
class BackendTable:
    """The attention backends of one release on cards of one compute capability."""

    facts: Mapping[str, Any]
    capability: str

    @property
    def names(self) -> tuple[str, ...]:
        """Every attention backend in the table, whether or not it runs on the card."""
        return tuple(self.facts["backends"])

    def in_order(self, needs: LayerNeeds) -> tuple[str, ...]:
        """The attention backends that vLLM tries for the layer, the preferred first."""
        kind = "mla" if needs.mla else "mm_prefix" if needs.mm_prefix else "plain"
        return tuple(self._group_of_card(self.facts["order"].get(kind, self.facts["order"]["plain"])))

    def reasons_against(self, name: str, needs: LayerNeeds) -> list[str]:
        """Why a backend does not take the layer, in vLLM's words; empty where it does."""
        backend = {key: self._value_for_card(entry) for key, entry in self.facts["backends"][name].items()}
        return list(self._reasons_of_backend(backend, needs))

    def supports(self, name: str, feature: str) -> bool | None:
        """Whether the backend `name` has this feature on the card (`runs`: kernels for it); None if not recorded."""
        value = self._value_for_card(self.facts["backends"][name][feature])
        return None if value is None else bool(value)

    def _reasons_of_backend(self, backend: Mapping[str, Any], needs: LayerNeeds) -> Iterator[str]:
        """Why a backend cannot serve the layer, in vLLM's own phrases; nothing where it can."""
        if not any(
            first <= needs.head_size <= last and not (needs.head_size - first) % step
            for first, last, step in backend["head_sizes"]
        ):
            yield "head_size not supported"
        if needs.dtype not in backend["dtypes"]:
            yield "dtype not supported"
        if needs.kv_cache_dtype not in backend["kv_cache_dtypes"]:
            yield "kv_cache_dtype not supported"
        if needs.block_size is not None and needs.block_size % backend["block_sizes"][0]:
            yield "block_size not supported"
        for key, name in (("mla", "MLA"), ("sparse", "sparse")):
            wanted = getattr(needs, key)
            if wanted != backend[key]:
                yield f"{name} not supported" if wanted else f"non-{name} not supported"
        if not backend["runs"]:
            yield "compute capability not supported"
        if needs.attention_type not in backend["attention_types"]:
            yield f"attention type {needs.attention_type} not supported"
        for key, reason in _SWITCHES.items():
            # Releases without the question have no backend with prefill context parallelism.
            unable = backend[key] is False or (key == "prefill_context_parallel" and not backend[key])
            if getattr(needs, key) and unable:
                yield reason
        for row in backend["refused_combinations"]:
            heads, dtypes = row["head_sizes"] or [needs.head_size], row["kv_cache_dtypes"] or [needs.kv_cache_dtype]
            same = all(row[name] == getattr(needs, name) for name in ("shape", "sinks", "mm_prefix"))
            if same and needs.head_size in heads and needs.kv_cache_dtype in dtypes:
                yield row["reason"]

    def _value_for_card(self, entry: Any) -> Any:
        """The entry, or if it differs by compute capability its value for this card's."""
        return self._group_of_card(entry["of"]) if isinstance(entry, dict) else entry

    def _group_of_card(self, rows: list[list[Any]]) -> Any:
        """The value of the row (compute capabilities, value) that has this card's; StopIteration where none has."""
        return next(value for capabilities, value in rows if self.capability in capabilities)


@cache
def backend_table(release: Release, capability: tuple[int, int]) -> BackendTable | None:
    """The attention backends of the newest recorded release up to this one; None for an unrecorded release or card."""
    facts = release_facts("attention_backends", release)
    card = dotted(capability)
    known = {name for cards, _ in next(iter(facts["order"].values())) for name in cards} if facts else set()
    return BackendTable(facts, card) if card in known else None
