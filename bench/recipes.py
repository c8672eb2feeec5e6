"""Does legroom agree with vLLM's public recipes? Every command and variant with stated hardware, planned.

    python bench/recipes.py FOLDER [--table]       (a checkout of vllm-project/recipes)

A recipe says that a command starts on some GPUs; legroom should say so too. Prints a table of the disagreements,
counts and one JSON line; with --table every server instead, for the recipes' maintainers: starts, tight, does not
start or refused, with the reason and the flags that would start. Models that legroom does not bundle are skipped (no
network) and counted, and so is hardware that has no facts or other accounting (TPUs, CPUs, Gaudi, Ascend).
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from legroom.errors import LegroomError
from legroom.facts.bundled import find
from legroom.facts.releases import Release, latest, release
from legroom.planning.advice import with_advice
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.units import human_bytes
from legroom.vllm.command_line import any_release_words
from legroom.vllm.parse import parse_flags

CARDS = {
    "h100": "h100",
    "h200": "h200",
    "b200": "b200",
    "b300": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "mi300x": "mi300x",
    "mi325x": "mi325x",
    "mi355x": "mi355x",
    "a100": "a100-80gb",
    "l40s": "l40s",
    "rtx_pro_6000": "rtx pro 6000",
    "rtx_pro_6000_2x": "rtx pro 6000",
    "rtx_pro_6000_8x": "rtx pro 6000",
    "rtx_5090_2x": "rtx 5090",
    "dgx_spark_gb10": "gb10",
    "dgx_station_gb300": "gb300",
}
_COMMAND = re.compile(r"^[ \t]*(?:\w+=\S+[ \t]+)*vllm serve .*(?:\\\n.*)*", re.MULTILINE)
_HARDWARE = re.compile(
    r"\b(\d+)\s*[x×]\s*(?:NVIDIA\s+|AMD\s+)?(H100|H200|B200|B300|GB200|A100|L40S|MI300X|MI325X|MI355X)", re.I
)


@dataclass(frozen=True)
class Entry:
    """One server that a recipe says starts."""

    recipe: str
    variant: str
    words: tuple[str, ...]
    card: str
    gpus: int
    vllm: str = ""
    """The release from which on the recipe holds."""


@dataclass(frozen=True)
class Outcome:
    """What legroom says to it."""

    entry: Entry
    answer: str
    why: str = ""
    flags: str = ""
    """The cheapest change with which it would start."""


WORDS = {"fits": "starts", "tight": "tight", "does_not_fit": "does not start", "refused": "refused"}


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Markdown that a collection of recipes can take in: one row a server, the worst of a recipe first."""
    order = list(WORDS)[::-1]
    yield "| recipe | variant | hardware | vLLM says | why | would start |\n|---|---|---|---|---|---|"
    judged = [outcome for outcome in outcomes if outcome.answer in WORDS]
    for outcome in sorted(judged, key=lambda each: (each.entry.recipe, order.index(each.answer))):
        entry, flags = outcome.entry, f"`{outcome.flags}`" if outcome.flags else ""
        why = outcome.why.replace("|", "\\|") if outcome.answer != "fits" else ""
        hardware = f"{entry.gpus} x {entry.card}"
        yield f"| {entry.recipe} | {entry.variant} | {hardware} | {WORDS[outcome.answer]} | {why} | {flags} |"


def entries(folder: Path) -> Iterator[Entry]:
    profiles = yaml.safe_load((folder / "taxonomy.yaml").read_text(encoding="utf-8"))["hardware_profiles"]
    for path in sorted((folder / "models").rglob("*.yaml")):
        yield from _of_yaml(path, folder, profiles)
    for path in sorted(folder.rglob("*.md")):
        if path.parent != folder:
            yield from _of_markdown(path, folder)


def _of_yaml(path: Path, folder: Path, profiles: dict[str, Any]) -> Iterator[Entry]:
    """Every variant on every card that the recipe is verified on and one node of which holds its stated minimum."""
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    model, name = recipe.get("model") or {}, str(path.relative_to(folder))
    for hardware, state in ((recipe.get("meta") or {}).get("hardware") or {}).items():
        profile = profiles.get(hardware) or {}
        if state != "verified":
            continue
        for title, variant in (recipe.get("variants") or {}).items():
            precision, generation = str(variant.get("precision", "")), str(profile.get("generation", ""))
            if "fp4" in precision and generation not in ("blackwell", "cdna4"):
                continue  # the recipes offer it for Blackwell
            if float(variant.get("vram_minimum_gb") or 0) > float(profile.get("vram_gb") or 0):
                continue  # several nodes, or another variant: nothing is claimed for one
            gpus = _gpus(variant, profile, recipe, hardware)
            words = _words(recipe, title, hardware, profile, gpus)
            since = str(model.get("min_vllm_version") or "")
            yield Entry(name, f"{title} on {hardware}", words, CARDS.get(hardware, hardware), gpus, since)


def _gpus(variant: dict[str, Any], profile: dict[str, Any], recipe: dict[str, Any], hardware: str) -> int:
    given = ((recipe.get("strategy_overrides") or {}).get("single_node_tp") or {}).get("tp")
    given = given.get(hardware) if isinstance(given, dict) else given
    for size in (variant.get("tp"), given):
        if isinstance(size, int):
            return size
    # As the recipes' own command builder: one GPU where its memory is the stated minimum, else the whole node.
    node, total = int(profile.get("gpu_count") or 1), float(profile.get("vram_gb") or 0)
    return 1 if float(variant.get("vram_minimum_gb") or 0) <= total / node else node


def _words(recipe: dict[str, Any], title: str, hardware: str, profile: dict[str, Any], gpus: int) -> tuple[str, ...]:
    """The command of a variant on a card, put together as the recipes' own command builder does."""
    model, variant = recipe.get("model") or {}, recipe["variants"][title]
    keys = [str(profile.get("generation", "")), *(["nvidia"] if profile.get("brand") == "NVIDIA" else [])]
    layers = [
        {"extra_args": model.get("base_args"), "extra_env": model.get("base_env")},
        variant if title != "default" else {"extra_env": variant.get("extra_env")},
        _first(recipe.get("hardware_overrides"), keys),
        _first(variant.get("hardware_overrides"), keys),
        _first(variant.get("hardware_overrides"), [hardware]),
    ]
    args = [str(word) for layer in layers for word in layer.get("extra_args") or ()]
    env = {name: value for layer in layers for name, value in (layer.get("extra_env") or {}).items()}
    split = ["--tensor-parallel-size", str(gpus)] if gpus > 1 and "--tensor-parallel-size" not in args else []
    assigned = (f"{name}={value}" for name, value in env.items())
    return (*assigned, "vllm", "serve", str(variant.get("model_id") or model.get("model_id")), *args, *split)


def _first(overrides: dict[str, Any] | None, keys: list[str]) -> dict[str, Any]:
    chosen: dict[str, Any] = next((overrides[key] for key in keys if key in overrides), {}) if overrides else {}
    return chosen or {}


def _of_markdown(path: Path, folder: Path) -> Iterator[Entry]:
    """Each `vllm serve` line under a text that names its hardware: the nearest mention above it."""
    import shlex

    text = path.read_text(encoding="utf-8")
    named = list(_HARDWARE.finditer(text))
    for number, match in enumerate(_COMMAND.finditer(text), 1):
        above = [hardware for hardware in named if hardware.start() < match.start()]
        if not above:
            continue
        try:
            words = tuple(shlex.split(match.group().replace("\\\n", " "), comments=True))
        except ValueError:
            continue
        yield Entry(
            str(path.relative_to(folder)),
            f"command {number} on {above[-1].group()}",
            words,
            CARDS.get(above[-1].group(2).lower(), above[-1].group(2)),
            int(above[-1].group(1)),
        )


def judge(entry: Entry) -> Outcome:
    """With the newest release; where that does not start, with the first one that the recipe is for."""
    outcome = _judged(entry, latest())
    first = _release_of(entry.vllm)
    if outcome.answer not in ("does_not_fit", "refused") or first is None or not first.before(latest().version):
        return outcome
    early = _judged(entry, first)
    agrees = early.answer in ("fits", "tight")
    return Outcome(entry, early.answer, f"with vLLM {first.version}") if agrees else outcome


def _release_of(version: str) -> Release | None:
    try:
        return release(version) if version else None
    except LegroomError:
        return None


def _judged(entry: Entry, used: Release) -> Outcome:
    parsed = parse_flags(entry.words, used)
    name = parsed.args.model
    if not name or "$" in name or "<" in name:
        return Outcome(entry, "skipped", "no model is named")
    if find(name) is None:
        return Outcome(entry, "skipped", f"the model is not bundled: {name}")
    fatal = [problem.message for problem in parsed.problems if problem.stops_vllm]
    if fatal:
        return Outcome(entry, "refused", fatal[0])
    try:
        gpus = max(entry.gpus, parsed.args.gpus_needed)
        made = make_plan(parsed.args, used, Machine(entry.card, gpus), advice=False)
    except LegroomError as error:
        hardware = "known to legroom" in error.message or "does not model it" in error.message
        return Outcome(entry, "skipped" if hardware else "refused", error.message)
    if made.verdict != "does_not_fit":
        return Outcome(entry, made.verdict, made.reason)
    advice = with_advice(made).advice
    return Outcome(
        entry, made.verdict, _explained(made), " ".join(any_release_words(advice[0].flags)) if advice else ""
    )


def _explained(made: Plan) -> str:
    """What is missing, and what would do: a recipe's minimum is often that of the weights alone."""
    failure, kv = made.memory.failure, made.memory.kv
    if failure is None:
        return made.reason
    if failure.id == "kv_too_small_for_max_len":
        needs, has = human_bytes(failure.needed_bytes), human_bytes(failure.available_bytes)
        context = f"the default context of {made.settings.max_model_len:,}"
        return f"{context} needs {needs}, {has} is left; up to {kv.longest_len:,} fits"
    if failure.id == "hybrid_state_cache_limit":
        return f"{kv.num_blocks} state blocks for the default --max-num-seqs {made.settings.max_num_seqs}"
    return f"{failure.id}: needs {human_bytes(failure.needed_bytes)}, has {human_bytes(failure.available_bytes)}"


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--table"]
    if len(words) != 1 or not (Path(words[0]) / "taxonomy.yaml").exists():
        print(__doc__, file=sys.stderr)
        return 2
    outcomes = [judge(entry) for entry in entries(Path(words[0]))]
    if "--table" in sys.argv:
        print("\n".join(table(outcomes)))
        return 0
    counts = Counter(outcome.answer for outcome in outcomes)
    differing = [outcome for outcome in outcomes if outcome.answer in ("does_not_fit", "refused")]
    print("| recipe | variant | GPUs | legroom | why |\n|---|---|---|---|---|")
    for outcome in differing:
        entry = outcome.entry
        card = f"{entry.gpus} x {entry.card}"
        print(f"| {entry.recipe} | {entry.variant} | {card} | {outcome.answer} | {outcome.why[:140]} |")
    reasons = Counter(outcome.why.partition(":")[0] for outcome in outcomes if outcome.answer == "skipped")
    judged = len(outcomes) - counts["skipped"]
    agreed = counts["fits"] + counts["tight"]
    print(f"\n{len(outcomes)} servers in the recipes, {judged} judged, {agreed} agree; skipped: {dict(reasons)}")
    skipped = sorted({outcome.why for outcome in outcomes if "not bundled" in outcome.why})
    print(json.dumps({"servers": len(outcomes), "judged": judged, "agree": agreed, **counts, "not_bundled": skipped}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
