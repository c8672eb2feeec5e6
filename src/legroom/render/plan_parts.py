"""The parts of a memory layout with the order, colours and names that text, SVG and the page share."""

from collections.abc import Iterable, Iterator, Mapping

from legroom.drawing.chart import Segment
from legroom.drawing.terminal import Colour, Style
from legroom.drawing.text import count, plural, wrap
from legroom.explain.entry import meaning
from legroom.facts.fit import evidence, known_starts, num_starts_as_known
from legroom.figures import Figure, exact
from legroom.memory.bands import band_class
from legroom.memory.kv.kv_plan import KvPlan
from legroom.memory.layout import Layout
from legroom.planning.plan import Plan, Verdict, cold_start
from legroom.records import dataclass
from legroom.units import GIB, KIB, gib


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """One part of the card's memory; the headroom has no figure."""

    name: str
    key: str
    """Its name in the JSON of a layout."""
    segment: Segment
    figure: Figure | None
    meaning: str


_PARTS: tuple[tuple[str, str, Colour, str, str, str], ...] = (
    ("weights", "weights", "blue", "█", "W", "weights"),
    ("activations", "activation", "orange", "▓", "A", "activation"),
    ("CUDA graphs", "cuda_graph", "purple", "▒", "G", "graphs"),
    ("non-torch", "non_torch", "brown", "░", "N", "nontorch"),
    ("KV cache", "kv_cache", "green", "▄", "K", "kv"),
    ("outside", "outside", "red", "╳", "x", "outside"),
)
"""Name, field of `Layout`, colour, glyph, letter and term of plan_terms.json."""


def layout_parts(layout: Layout) -> list[LayoutPart]:
    """The parts of a layout: those of the budget, memory outside it, other processes, headroom."""
    rows = []
    for name, field, colour, glyph, letter, term in _PARTS:
        figure: Figure = getattr(layout, field)
        segment = Segment(name, max(figure.bytes, 0), colour, glyph, letter)
        rows.append(LayoutPart(name, f"{field}_bytes", segment, figure, meaning(term)))
    if layout.held_by_others_bytes:
        others = exact(layout.held_by_others_bytes, "other processes", "held of the card")
        segment = Segment("others", others.bytes, "grey", "▞", "o")
        rows.append(LayoutPart("others", "held_by_others_bytes", segment, others, meaning("others")))
    free = Segment("headroom", max(layout.headroom_bytes, 0), "grey", "·", ".")
    rows.append(LayoutPart("headroom", "headroom_bytes", free, None, meaning("headroom")))
    return rows


def scale_bytes(layout: Layout) -> int:
    """Bytes of a full-width bar: the card's total, or the sum of the parts where they exceed it."""
    return max(layout.total_bytes, sum(part.segment.amount for part in layout_parts(layout)))


def certainty_text(figure: Figure) -> str:
    """`exact`, `measured`, or `estimated` with its error band in GiB."""
    if figure.kind != "estimated":
        return figure.kind
    low, high = figure.low / GIB, figure.high / GIB
    digits = 2 if high - low >= 0.02 else 3
    return f"estimated, {low:.{digits}f} to {high:.{digits}f}"


_FAMILIES = {
    "hopper": "Hopper",
    "blackwell": "Blackwell",
    "ada": "Ada",
    "ampere": "Ampere",
    "turing-volta": "Turing and Volta",
    "pascal": "Pascal",
    "amd": "AMD",
    "intel": "Intel",
    "unified": "unified-memory",
    "unknown": "unnamed",
}

_RARE: Mapping[str, str] = {
    "release": "vLLM {}",
    "gpus": "{} GPUs",
    "media": "the encoder of {}",
    "weights": "{} weights",
    "fp8_marlin": "FP8 weights that vLLM turns into 16 bits to compute with (its Marlin kernel)",
    "memory": "{} memory",
    "runner": "the {} runner",
}
"""How a rarely measured property is named; others are named by their value."""


def band_basis_text(plan: Plan) -> str:
    """A sentence: on how many measured starts a plan's error bands rest, and which of its properties are rare."""
    properties = band_class(plan.target.model, plan.settings, plan.target.gpu).properties
    kind, rare = evidence(properties)
    starts = f"{num_starts_as_known(properties)} {'measured' if kind == 'measured' else 'published'} starts"
    if not rare:
        return f"Nine of ten true values lie in this range ({starts})."
    names = ", ".join(_property_text(*each) for each in rare)
    if not all(known_starts(*each)[1] for each in rare):
        return f"No start of this kind was ever measured; the range is wide. Rarely measured: {names}."
    return f"Nine of ten true values lie in this range ({starts} that are as rare). Rarely measured: {names}."


def _property_text(kind: str, value: str) -> str:
    """A property of a deployment in words: `kind`, such as `card`, and its value, such as a GPU family."""
    if kind == "card":
        return f"{_FAMILIES[value]} cards"
    return _RARE.get(value, _RARE.get(kind, "{}")).format(value.replace("+", " with "))


def short_model_name(model_name: str) -> str:
    """The last part of a model's path; a Hub id stays `owner/name`."""
    pieces = [piece for piece in model_name.rstrip("/").split("/") if piece]
    if pieces and pieces[-1] == "config.json":
        pieces.pop()
    if model_name.startswith(("/", ".", "~")) or len(pieces) > 2:
        pieces = pieces[-1:]
    return "/".join(pieces) or model_name


VERDICT_COLOURS: Mapping[str | None, Colour] = {"fits": "green", "tight": "orange", "does_not_fit": "red"}
_MARKS: Mapping[Verdict, tuple[str, str]] = {"fits": ("✓", "ok"), "tight": ("!", "!"), "does_not_fit": ("✗", "x")}


def answer_lines(verdict: Verdict, sentence: str, style: Style) -> Iterator[str]:
    """The verdict's mark and a sentence, wrapped and coloured."""
    mark = style.pick(*_MARKS[verdict])
    for number, line in enumerate(wrap(sentence, style.width - len(mark) - 1)):
        lead = " " * len(mark) if number else style.paint(mark, VERDICT_COLOURS[verdict], "bold")
        yield f"{lead} {style.paint(line, 'bold')}"


def note_lines(notes: Iterable[str], style: Style) -> Iterator[str]:
    """The notes, each once, wrapped and dimmed."""
    for note in dict.fromkeys(notes):
        yield from (style.paint(line, "dim") for line in wrap(f"note: {note}", style.width, "  ", " " * 8))


def plan_headline(plan: Plan) -> str:
    """The verdict of a plan in one sentence."""
    target, used = plan.target, plan.settings.gpus_used
    where = f"{used} of {target.gpus} x" if used < target.gpus else f"{target.gpus} x"
    where = f"{where} {target.gpu.name}"
    start = f"{short_model_name(target.model.name)} on {where} with vLLM {target.release.version}"
    if plan.verdict == "does_not_fit":
        failure = plan.memory.failure
        if failure is None or failure.id != "host_ram_oom":
            return f"{start} will not start."
        holds, limit = gib(failure.needed_bytes), gib(failure.available_bytes)
        return f"{start} will not start: it holds {holds} of the host's memory at least, and may use {limit}."
    if plan.verdict == "tight" and plan.memory.refused:
        return f"{start} may not start: {plan.memory.refused.hint}."
    if plan.verdict == "tight" and not plan.starts:
        return f"{start} is tight and may not start: {plan.reason}."
    if plan.verdict == "tight" and any(rank.headroom_bytes < 0 for rank in plan.memory.ranks):
        return f"{start} is tight and may run out of memory: {plan.reason}."
    if plan.verdict == "tight":
        return f"{start} starts, but it is tight: {plan.reason}."
    card = "the card" if target.gpus == 1 else "each card"
    return f"{start} starts; {max(plan.layout.headroom_bytes, 0) / GIB:.1f} GiB of {card} stays free."


def holds_text(plan: Plan) -> str:
    """How many requests of max_model_len the plan's KV pool holds at once, in all and on each data-parallel engine."""
    engines, each = plan.settings.data_parallel_size, plan.memory.kv.max_concurrency
    split = f", {each:.2f} on each of {engines} engines" if engines > 1 else ""
    return f"{plan.holds:.2f} requests of the full {count(plan.settings.max_model_len)} tokens{split}"


def first_start_loss(plan: Plan, requests: float) -> list[str]:
    """[sentence] where a first start, with a cold compile cache, holds fewer than `requests` at once; else []."""
    first, later = cold_start(plan).holds, plan.holds
    held = min(first, requests - 0.01)  # never rounded up to what is wanted
    says = f"the first start holds {held:.2f} of {requests:g}, as its compile cache is cold"
    return [says] if first < requests <= later else []


ROUNDING = 0.01
"""The share by which two counts of the same tokens may differ, as requests hold whole blocks."""


def pool_text(kv: KvPlan, block: str) -> str:
    """The KV pool as `8,192 blocks of 16 = 131,072 tokens, ...`; `block` is the noun for a block."""
    blocks = f"{plural(kv.num_blocks, block)} of {kv.block_size}"
    if (held := round(kv.max_concurrency * kv.max_model_len)) > (1 + ROUNDING) * kv.tokens:
        printed = f"which vLLM prints as {count(kv.tokens)} tokens"
        return f"{blocks}, {printed}; full-length requests hold {count(held)}: some layers keep only a part of one"
    per_token = f", {kv.bytes_per_token / KIB:,.1f} KiB a token" if kv.bytes_per_token else ""
    plain, groups = kv.num_blocks * kv.block_size == kv.tokens, len(kv.shape.stages[0].groups)
    shared = f", shared by {groups} groups of layers," if groups > 1 and not plain else ""
    return f"{blocks}{shared} {'=' if plain else 'hold'} {count(kv.tokens)} tokens{per_token}"
