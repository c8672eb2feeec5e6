"""GPUs: the total that CUDA reports, bandwidth, compute capability, price; and the GPU that a node's labels name.

Data in `data/gpus.json`, `prices.json` and `node_labels.json`.

`gpu("h100")` accepts every usual spelling. A name that several cards share means the smallest of them and carries a
`note`; an unknown name is an error with the nearest names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.records import dataclass
from legroom.units import GIB, MIB, gib, parse_bytes

SMALLEST_BYTES, LARGEST_BYTES = 256 * MIB, 4096 * GIB
HOPPER = (9, 0)
"""The compute capability of H100, H200 and GH200."""
BLACKWELL = (10, 0)
"""The lowest compute capability of its family: B200 has it, GB10 and the desktop cards are 12.x."""

_VENDOR_WORDS = frozenset(
    {"nvidia", "geforce", "tesla", "amd", "intel", "corporation", "instinct", "radeon", "generation"}
)
_SIZE = re.compile(r"\s*[0-9]+(?:\.[0-9]+)?\s*(?:[KMG]i?B?|Ti?B|T)\s*", re.IGNORECASE)  # 5090ti is a card
_SIZE_WORD = re.compile(r"([0-9]+)gb?")
_AND = re.compile(r"[,+&，、和]|\band\b", re.IGNORECASE)
_SEVERAL_OF_ONE = re.compile(r"(?:([0-9]+)\s*[x×]\s*)?(.+)", re.IGNORECASE)
_COUNTED = re.compile(r"\s*([0-9]+)\s*[x×]\s+(.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CardMeasurements:
    """What `legroom probe` measured on the user's card for the plan's release and number of ranks."""

    context_bytes: int | None = None
    """The CUDA context of a process."""
    modules_bytes: int | None = None
    """vLLM's non-torch memory, without the buffers of a model."""
    with_communication: bool = False
    """`modules_bytes` includes the NCCL buffers of as many ranks as the plan has."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model, or an anonymous card of a given size."""

    name: str
    total_bytes: int
    """The total of cudaMemGetInfo, not the advertised size."""
    bandwidth_bytes_s: float = 0.0
    compute_capability: tuple[int, int] = (0, 0)
    """(0, 0): not known, as with an anonymous card. Vendors other than NVIDIA: the number of their architecture."""
    vendor: str = "nvidia"
    unified: bool = False
    """CPU and GPU share one memory (GB10, Jetson, APUs)."""
    host_total_bytes: int = 0
    """Unified memory: the machine's total, where the GPU sees a part of it."""
    screen: bool = False
    """It has display outputs, so a desktop may use some of its memory."""
    bf16_flops: float = 0.0
    fp8_flops: float = 0.0
    clock_hz: float = 0.0
    """The highest boost clock."""
    source: str = ""
    total_source: str = "given"
    """logged | nvidia-smi (less the usual reserve) | derived | given (by the user)."""
    total_low_bytes: int = 0
    total_high_bytes: int = 0
    """The range of totals in logs: drivers reserve different amounts."""
    interconnect: str = ""
    """nvlink | pcie | xgmi | xelink | none"""
    link_bytes_s: float = 0.0
    """Bandwidth to the other cards of its node in one direction; 0: unknown, or not the same for all pairs."""
    pcie_bytes_s: float = 0.0
    """Sixteen lanes of its PCIe generation in one direction; the network port of a GB10."""
    note: str = ""
    """How an ambiguous name was read."""
    larger: str = ""
    """The larger card that an ambiguous name may mean."""
    measured: CardMeasurements | None = None

    def __post_init__(self) -> None:
        for name in ("total_low_bytes", "total_high_bytes"):
            object.__setattr__(self, name, getattr(self, name) or self.total_bytes)

    def as_json(self, spellings: Sequence[str]) -> dict[str, Any]:
        """The entry of `legroom gpus --json`; `spellings`: the card's other names."""
        return {
            "name": self.name,
            "write": list(spellings),
            "vendor": self.vendor,
            "total_bytes": self.total_bytes,
            "bandwidth_bytes_s": self.bandwidth_bytes_s,
            "compute_capability": dotted(self.compute_capability) if any(self.compute_capability) else None,
            "unified_memory": self.unified,
            "source": self.source,
        }


def dotted(capability: tuple[int, int]) -> str:
    """Compute capability (8, 0) as `8.0`."""
    return f"{capability[0]}.{capability[1]}"


@lru_cache(maxsize=64)
def gpu(name: str) -> Gpu:
    """The GPU of a name in any usual spelling, or of a size such as `24GiB`; LegroomError for an unknown name."""
    if card := _exactly_named(name) or _exactly_named(name.replace(" ", "")):
        return card  # before sizes: 2080 ti is a card, not 2080 TiB
    if _SIZE.fullmatch(name):
        return _card_of_size(name)
    named = [_SEVERAL_OF_ONE.fullmatch(each.strip()) for each in _AND.split(name)]
    if len(named) > 1 and all(each and _find_gpu(each[2]) for each in named):
        parts = [(each[2], int(each[1] or 1)) for each in named if each]
        smallest = min((card for card, _ in parts), key=lambda each: gpu(each).total_bytes)
        hint = f"write --gpu {smallest} --gpus {sum(count for _, count in parts)}"
        if len({card for card, _ in parts}) > 1:
            hint += ", the smaller card: every rank gets the same share of the model"
            hint += "; for a server on each, ask of one at a time"
        raise LegroomError(f"{name!r} names several cards", hint)
    counted = _COUNTED.fullmatch(name)
    if counted and _normalized_name(counted.group(2)) in _cards_by_name():
        why = f"{name!r} names {counted.group(1)} GPUs"
        raise LegroomError(why, f"give the GPU ({counted.group(2)}) and the count apart")
    card = _find_gpu(name)
    if card is None and (platform := other_platform(name)):
        raise unmodelled_platform(platform)
    if card is None:
        if name.strip().isdecimal():
            raise LegroomError(f"GPU {name!r} has no unit", f"for a card of that size: {name.strip()}GiB")
        hint = ", ".join(nearest_gpus(name))
        raise LegroomError(f"GPU {name!r} is not known to legroom", f"nearest: {hint}; or give its size, like 24GiB")
    return card


def other_platform(text: str) -> str:
    """The accelerator, run by a vLLM hardware plugin, that a card, image or resource name contains; else empty."""
    named = read_data("gpus.json")["other_platforms"].items()
    return next((name for name, words in named if re.search(rf"(?<![a-z])({words})(?![a-z])", text, re.IGNORECASE)), "")


def unmodelled_platform(name: str) -> LegroomError:
    """The LegroomError that legroom plans nothing for `name`, as its plugin accounts for memory in its own way."""
    return LegroomError(
        f"vLLM runs on {name} with other memory accounting; legroom does not model it",
        "legroom plans NVIDIA, AMD and Intel GPUs; `legroom diagnose` reads logs of any platform",
    )


def with_total(card: Gpu, total_bytes: int) -> Gpu:
    """The card with `total_bytes` of memory, as the user's machine reports it."""
    _check_size(total_bytes, gib(total_bytes))
    totals: dict[str, Any] = dict.fromkeys(("total_bytes", "total_low_bytes", "total_high_bytes"), total_bytes)
    return replace(card, **totals, total_source="given", note="", larger="")  # the note explained the assumed size


@cache
def all_gpus() -> tuple[Gpu, ...]:
    """Every GPU in the facts, in the order of the data file."""
    return tuple(_gpu_of_entry(entry) for entry in read_data("gpus.json")["gpus"])


def gpu_names() -> dict[str, tuple[str, ...]]:
    """The short names that `--gpu` accepts for each GPU, by its full name."""
    cards = read_data("gpus.json")["gpus"]
    return {card["name"]: tuple(alias.replace(" ", "-") for alias in card["aliases"]) for card in cards}


def nearest_gpus(name: str) -> tuple[str, ...]:
    """At most four known GPU names with the closest spelling, common cards where none is close, for a hint."""
    import difflib  # only on the way to an error message

    wanted, index = _normalized_name(name), _cards_by_name()
    usual = ["h10080gb", "a10080gb", "rtx4090", "l4"]
    keys = difflib.get_close_matches(wanted, index, n=12, cutoff=0.3) or usual
    return tuple(dict.fromkeys(index[key][0]["name"] for key in keys if key in index))[:4]


def _exactly_named(name: str) -> Gpu | None:
    """The card with exactly this name or alias, in any case, else None; much faster than `_find_gpu`."""
    wanted = name.strip().lower()
    known, note, larger = read_data("gpus.json")["ambiguous"].get(wanted, (wanted, "", ""))
    for entry in read_data("gpus.json")["gpus"]:
        if known in (entry["name"], entry["name"].lower(), *entry["aliases"]):
            return _gpu_of_entry(entry, note, larger)
    return None


def _find_gpu(name: str) -> Gpu | None:
    """The card of this name, which may end in its memory in GB if that is right; None where unknown."""
    index = _cards_by_name()
    if hit := index.get(_normalized_name(name)):
        return _gpu_of_entry(*hit)
    # "RTX A6000 48GB": a size that agrees with the only card of that name.
    words = _name_words(name)
    for i, word in enumerate(words):
        size = _SIZE_WORD.fullmatch(word)
        hit = index.get("".join(words[:i] + words[i + 1 :])) if size else None
        if size and hit:
            card = _gpu_of_entry(*hit)
            if abs(card.total_bytes / GIB / float(size.group(1)) - 1) < 0.12:
                return card
    return None


def _name_words(name: str) -> list[str]:
    """The words of a GPU's name in lower case, without the vendor's."""
    words = [word for word in re.split(r"[^a-z0-9.+]+", name.lower().replace("gib", "gb")) if word]
    return [word for word in words if word not in _VENDOR_WORDS]


def _normalized_name(name: str) -> str:
    """A GPU's name in lower case without separators and vendor words, to compare names by."""
    return "".join(_name_words(name))


def _card_of_size(text: str) -> Gpu:
    """The card of a size such as 24GiB: the one model that reports this total, else a card without a name."""
    total_bytes = parse_bytes(text, "GPU memory")
    _check_size(total_bytes, text)
    note = ""
    if not re.search(r"i", text, re.IGNORECASE):
        note = f"{text.strip()} was read as {gib(total_bytes)}; cards report GiB, and less than the figure on the box"
    # The only card with this total in logs.
    known = read_data("gpus.json")["logged_totals"].get(f"{total_bytes / GIB:.2f}")
    if known and (card := _exactly_named(known)):
        note = f"{gib(total_bytes)} is what a {card.name} reports, so it was taken for one"
        return replace(with_total(card, total_bytes), note=note)
    return Gpu(name=f"{gib(total_bytes)} GPU", total_bytes=total_bytes, source="given by size", note=note)


def _check_size(total_bytes: int, text: str) -> None:
    """Raise LegroomError, naming the `text` given, where no GPU has this much or this little memory."""
    if not SMALLEST_BYTES <= total_bytes <= LARGEST_BYTES:
        raise LegroomError(f"a GPU of {text} is not plausible", "give one GPU's memory, like 24GiB")


@lru_cache(maxsize=1)
def _cards_by_name() -> dict[str, tuple[Mapping[str, Any], str, str]]:
    """Normalized name -> (entry of gpus.json, note, larger card's name), the last two empty if one card is so named."""
    index: dict[str, tuple[Mapping[str, Any], str, str]] = {}
    by_name = {entry["name"]: entry for entry in read_data("gpus.json")["gpus"]}
    for entry in by_name.values():
        for alias in (entry["name"], *entry["aliases"]):
            index.setdefault(_normalized_name(alias), (entry, "", ""))
    for alias, (name, note, larger) in read_data("gpus.json")["ambiguous"].items():
        index[_normalized_name(alias)] = (by_name[name], note, larger)
    return index


def _gpu_of_entry(entry: Mapping[str, Any], note: str = "", larger: str = "") -> Gpu:
    """The Gpu of an entry of gpus.json; `note` and `larger` (a card's name) only where two cards share the name."""
    major, minor = entry["compute_capability"]
    return Gpu(
        name=entry["name"],
        total_bytes=entry["total_bytes"],
        bandwidth_bytes_s=entry["bandwidth_gb_s"] * 1e9,
        compute_capability=(major, minor),
        vendor=entry.get("vendor", "nvidia"),
        unified=entry.get("unified", False),
        host_total_bytes=int(entry.get("host_total_gib", 0) * GIB),
        screen=entry.get("screen", False),
        bf16_flops=entry.get("bf16_tflops", 0) * 1e12,
        fp8_flops=entry.get("fp8_tflops", 0) * 1e12,
        clock_hz=entry["clock_ghz"] * 1e9,
        source=entry["source"],
        total_source=entry["total_source"],
        total_low_bytes=int(entry["total_low_gib"] * GIB),
        total_high_bytes=int(entry["total_high_gib"] * GIB),
        interconnect=entry["interconnect"],
        link_bytes_s=entry.get("link_gb_s", 0) * 1e9,
        pcie_bytes_s=(entry.get("pcie_gb_s") or read_data("gpus.json")["pcie_gb_s"].get(str(major), 32)) * 1e9,
        note=note or entry.get("note", ""),
        larger=larger,
    )


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """The list price of one card."""

    gpu: str
    usd_per_hour: float
    date: str
    """The date of the price, as 2026-08-22; empty for a user's price without one."""
    source: str


@cache
def list_prices() -> dict[str, GpuPrice]:
    """List prices by GPU name."""
    return {entry["gpu"]: GpuPrice(**entry) for entry in read_data("prices.json")["prices"]}


GPU_ANNOTATION = "legroom/gpu"
"""An annotation that names the GPU, where no node label does."""
_MIG_RESOURCE = re.compile(r"nvidia\.com/mig-(\d+g\.\d+gb)(?:\.me)?")
_NAMING_KINDS = ("product", "instance_type", "memory_mib")
"""Kinds of node labels that name a GPU, the most specific first."""


def gpu_of_labels(labels: Mapping[str, str]) -> str:
    """The `--gpu` name of the card that a Kubernetes node's labels state; empty where they state none."""
    data = read_data("node_labels.json")
    profile = next((labels[row["label"]] for row in data["mig_profile"] if labels.get(row["label"])), "")
    values = {kind: [labels.get(row["label"], "") for row in data[kind]] for kind in _NAMING_KINDS}
    products = (_gpu_of_product(value, profile) for value in values["product"])
    sizes = (f"{int(value[:9])}MiB" for value in values["memory_mib"] if value.isdecimal())
    return next(filter(None, (*products, *map(gpu_of_instance_type, values["instance_type"]), *sizes)), "")


def gpu_of_resource(resource: str) -> str:
    """The `--gpu` name of a MIG resource such as `nvidia.com/mig-3g.40gb` (the smaller card, of two); else empty."""
    profile = _MIG_RESOURCE.fullmatch(resource)
    return read_data("node_labels.json")["mig_resource_cards"].get(profile[1], "") if profile else ""


def gpu_of_profile(profile: str) -> str:
    """The card of a resource profile such as KubeAI's `nvidia-gpu-l4`; empty for an unknown profile."""
    prefixes = (row["prefix"] for row in read_data("node_labels.json")["profile_prefixes"])
    product = next((profile.removeprefix(prefix) for prefix in prefixes if profile.startswith(prefix)), "")
    return _gpu_of_product(product, "")


def naming_labels() -> tuple[str, ...]:
    """Every Kubernetes node label that can name a GPU, the most specific first."""
    data = read_data("node_labels.json")
    return tuple(row["label"] for kind in (*_NAMING_KINDS, "mig_profile") for row in data[kind])


def _gpu_of_product(value: str, profile: str) -> str:
    """The `--gpu` name for the value of a product label and of its MIG profile label, if any; empty if unknown."""
    if not value:
        return ""
    known = read_data("node_labels.json")["products"].get(value, "")
    dropped = read_data("node_labels.json")["name_words_dropped"]
    words = [word for word in re.split(r"[-_ ]", value) if word.lower() not in dropped]
    for name in (known, value, "-".join(words)):
        if name and is_known_gpu(whole := f"{name} mig {profile}" if profile else name):
            return whole
    return ""


def gpu_of_instance_type(value: str) -> str:
    """The GPU of a cloud's instance type; empty where unknown."""
    return next((name for name, pattern in _instances() if value and pattern.fullmatch(value.lower())), "")


def gpus_of_instances(text: str) -> set[str]:
    """The GPUs of the cloud instance types that a text names."""
    lowered = text.lower()
    return {name for name, pattern in _instances() if pattern.search(lowered)}


@cache
def _instances() -> tuple[tuple[str, re.Pattern[str]], ...]:
    """(`--gpu` name, pattern of the instance types with that card, as whole words) for every cloud."""
    rows = read_data("node_labels.json")["instances"]
    return tuple((row["gpu"], re.compile(rf"(?<![\w.-])(?:{row['pattern']})(?![\w-])")) for row in rows)


@cache
def is_known_gpu(name: str) -> bool:
    """Whether `--gpu` accepts the name."""
    try:
        gpu(name)
    except LegroomError:
        return False
    return True
