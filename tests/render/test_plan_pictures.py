"""What a plan looks like, kept as text. After a change that is meant: UPDATE_SNAPSHOTS=1 pytest tests/render."""

import os
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

import legroom
from legroom.drawing.terminal import Style
from legroom.drawing.text import visible_len
from legroom.facts.gpus import Gpu
from legroom.facts.releases import release
from legroom.figures import Term, estimated, exact, measured
from legroom.memory.deployment_memory import DeploymentMemory
from legroom.memory.layout import Failure, Layout
from legroom.planning.plan import Advice, Plan, Target
from legroom.planning.plan import plan as predict
from legroom.render import plan_text as text_module
from legroom.render.plan_parts import plan_headline
from legroom.render.plan_svg import plan_svg
from legroom.render.plan_text import plan_text
from legroom.units import GIB, MIB
from legroom.vllm.args import ServeArgs

SNAPSHOTS = Path(__file__).with_name("snapshots")
ACTIVATION = 1200 * MIB


@pytest.fixture(autouse=True)
def _no_cold_start(monkeypatch):
    """The figures here are made up, so the cold start has nothing to work from."""
    monkeypatch.setattr(text_module, "cold_start", lambda plan: plan)


@pytest.fixture(scope="module")
def real() -> Plan:
    """A real plan to hang made-up figures on: the pictures must not change when a fit does."""
    from legroom.facts.model_sources import load

    card = Gpu("Example GPU 80GB", 80 * GIB, compute_capability=(9, 0))
    args = ServeArgs(model="llama-3.1-8b", max_model_len=32768)
    return predict(Target(load("llama-3.1-8b"), card, 1, release("0.32.0")), args)


def layout(weights=15.0, kv=55.0, outside=1.5, rank=0) -> Layout:
    return Layout(
        total_bytes=80 * GIB,
        budget_bytes=int(73.6 * GIB),
        weights=exact(int(weights * GIB), "layers", "32 layers"),
        activation=estimated(
            int(1.2 * GIB), int(1.1 * GIB), int(1.3 * GIB), (Term("forward", int(1.2 * GIB), "peak"),)
        ),
        cuda_graph=estimated(600 * MIB, 500 * MIB, 700 * MIB),
        non_torch=measured(250 * MIB, "non-torch"),
        kv_cache=estimated(int(kv * GIB), int((kv - 0.2) * GIB), int((kv + 0.2) * GIB)),
        outside=estimated(int(outside * GIB), int(1.0 * GIB), int(2.5 * GIB)),
        rank=rank,
    )


def with_layout(plan: Plan, *layouts: Layout, verdict="fits", reason="", failure=None, blocks=28160) -> Plan:
    held = blocks * plan.memory.kv.bytes_per_block
    kv = replace(
        plan.memory.kv,
        num_blocks=blocks,
        tokens=blocks * 16,
        max_concurrency=blocks * 16 / 32768,
        checked_bytes=(held,),
    )
    memory = DeploymentMemory(layouts, kv, plan.memory.graphs, failure)
    return replace(plan, memory=memory, verdict=verdict, reason=reason, notes=())


@pytest.fixture
def fits(real):
    return with_layout(real, layout())


@pytest.fixture
def fails(real):
    message = "To serve at least one request with the model's max seq len (32768), 4.0 GiB KV cache is needed."
    failure = Failure("kv_too_small_for_max_len", message, 4 * GIB, 2 * GIB, 16384)
    stuck = with_layout(
        real, layout(weights=68.0, kv=2.0), verdict="does_not_fit", reason=failure.id, failure=failure, blocks=1024
    )
    mended = with_layout(real, layout(weights=68.0, kv=4.1), blocks=2112)
    eager = with_layout(real, layout(weights=68.0, kv=4.0), verdict="tight", reason="narrow", blocks=2050)
    advice = (
        Advice({"gpu_memory_utilization": 0.95}, "why", mended, "less room for bursts"),
        Advice({"enforce_eager": True}, "why", eager, "slower decoding"),
    )
    return replace(stuck, advice=advice)


@pytest.fixture
def too_big(real):
    failure = Failure("weights_too_big", "torch.OutOfMemoryError: CUDA out of memory.", 140 * GIB, 79 * GIB)
    big = layout(weights=140.0, kv=-69.0)
    return with_layout(real, big, verdict="does_not_fit", reason=failure.id, failure=failure, blocks=0)


@pytest.fixture
def stages(real):
    settings = replace(real.settings, pipeline_parallel_size=2)
    two = replace(real, settings=settings, target=replace(real.target, gpus=2))
    return with_layout(
        two,
        layout(weights=9.0, kv=60.0),
        layout(weights=8.0, kv=59.0, rank=1),
        verdict="tight",
        reason="at the high end of the error band the card runs over at its peak",
    )


def check(name: str, drawn: str) -> None:
    kept = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        kept.write_text(drawn, encoding="utf-8")
    assert drawn == kept.read_text(encoding="utf-8")


@pytest.mark.parametrize("case", ["fits", "fails", "too_big", "stages"])
def test_the_picture_is_as_kept(case, request):
    check(case, plan_text(request.getfixturevalue(case), Style(width=80)))


def test_the_ascii_picture_is_as_kept(fails):
    drawn = plan_text(fails, Style(width=80, unicode=False))
    assert drawn.isascii()
    check("ascii", drawn)


def test_the_working_is_as_kept(fits):
    check("math", plan_text(fits, Style(width=80), explain_math=True))


@pytest.mark.parametrize("width", [66, 80, 100])
@pytest.mark.parametrize("case", ["fits", "fails", "too_big", "stages"])
def test_no_bar_or_paragraph_is_wider_than_the_terminal(case, width, request):
    for colour in (False, True):
        for line in plan_text(request.getfixturevalue(case), Style(width=width, colour=colour)).splitlines():
            if re.search(r"[█▓░─]{4}|[a-z]+ [a-z]+ [a-z]+ [a-z]+", line):
                assert visible_len(line) <= width, line


def test_colour_changes_nothing_but_colour(fits):
    painted = re.sub(r"\x1b\[[0-9;]*m", "", plan_text(fits, Style(width=80, colour=True)))
    plain = plan_text(fits, Style(width=80))
    swatches = str.maketrans("▓▒░▄╳", "█████")
    assert painted.translate(swatches) == plain.translate(swatches)


@pytest.mark.parametrize("case", ["fits", "fails", "too_big", "stages"])
def test_the_svg_says_what_the_text_says(case, request):
    plan = request.getfixturevalue(case)
    root = ET.fromstring(plan_svg(plan))
    said = " ".join("".join(root.itertext()).split())
    assert "weights" in said
    assert f"{plan.layout.weights.bytes / GIB:.2f} GiB" in said
    for advice in plan.advice:
        assert next(iter(advice.flags)).replace("_", "-") in said


@pytest.mark.parametrize("case", ["fits", "fails", "too_big"])
def test_the_svg_draws_nothing_outside_its_page(case, request):
    root = ET.fromstring(plan_svg(request.getfixturevalue(case)))
    width, height = float(root.get("width")), float(root.get("height"))
    for box in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert x + float(box.get("width")) <= width + 0.1
        assert y + float(box.get("height")) <= height + 0.1


@pytest.mark.parametrize(
    ("outside", "verdict", "says"),
    [
        (1.5, "fits", "starts; "),
        (1.5, "tight", "starts, but it is tight: why"),
        (9.5, "tight", "is tight and may run out of memory: why"),
    ],
)
def test_the_headline_of_a_card_that_runs_over_does_not_say_that_it_starts(real, outside, verdict, says):
    sentence = plan_headline(with_layout(real, layout(outside=outside), verdict=verdict, reason="why"))
    assert says in sentence
    assert (" starts" in sentence) == (outside < 9)


def test_blocks_and_tokens_are_equated_only_where_they_are_equal():
    plain, hybrid = (legroom.plan(name, gpu="h100").text() for name in ("llama-3.1-8b", "gemma-3-12b"))
    assert re.search(r"blocks of 16 = [\d,]+ tokens", plain)
    assert re.search(r"blocks of 16, shared by \d groups of layers, hold [\d,]+ tokens", " ".join(hybrid.split()))
