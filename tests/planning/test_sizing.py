"""Sizing finds the fewest GPUs of each kind."""

from __future__ import annotations

from legroom.facts.gpus import GpuPrice, gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.planning.checkpoints import lost_bits
from legroom.planning.plan import Target
from legroom.planning.search_space import CapacityGoal
from legroom.planning.sizing import SizingTask, cheapest_first, fewest_gpus, fit_cell
from legroom.vllm.args import ServeArgs

COUNTS = (1, 2, 4, 8)


def fits(model: str, cards: list[str], context: int, concurrency: float = 1.0):
    goal = CapacityGoal(context, concurrency, gpus=COUNTS)
    return [fewest(model, card, goal) for card in cards]


def fewest(model: str, card: str, goal: CapacityGoal):
    return fewest_gpus(Target(load(model), gpu(card), 1, release("0.26.0")), ServeArgs(), goal)


def test_a_70b_model_needs_several_cards_and_a_small_one_never_holds_it():
    on_h100, on_3060 = fits("llama-3.1-70b", ["h100", "rtx 3060"], 8192)
    assert on_h100.count in (2, 4)
    assert on_3060.plan is None
    assert on_3060.limiting


def test_a_longer_context_never_needs_fewer_gpus():
    short, long = (fits("llama-3.1-8b", ["rtx 4090"], context, 4)[0] for context in (4096, 65536))
    assert 0 < short.count <= long.count


def test_the_limiting_part_of_a_model_that_fills_the_card_is_its_weights():
    assert fits("llama-3.1-8b", ["rtx 4090"], 4096)[0].limiting == "weights"


def test_the_limiting_part_of_many_requests_is_their_kv_cache():
    fit = fits("qwen3-0.6b", ["h100"], 32768, 16)[0]
    assert fit.limiting == "KV cache"
    assert fit.limiting_bytes > fit.plan.layout.weights.bytes


def test_the_cheapest_row_comes_first_and_misfits_last():
    rows = fits("llama-3.1-70b", ["rtx 3060", "h100", "a100-80gb", "h200"], 8192)
    prices = {name: GpuPrice(name, usd, "", "") for name, usd in (("NVIDIA H200", 9.0), ("NVIDIA A100-SXM4-80GB", 1.0))}
    names = [fit.gpu.name for fit in cheapest_first(rows, prices)]
    assert names[:2] == ["NVIDIA A100-SXM4-80GB", "NVIDIA H200"]
    assert names[-1] == "NVIDIA GeForce RTX 3060"


def test_a_card_that_costs_nothing_comes_before_all_others():
    rows = fits("llama-3.1-8b", ["h100", "l4"], 4096)
    prices = {name: GpuPrice(name, usd, "", "") for name, usd in (("NVIDIA L4", 1.0), ("NVIDIA H100 80GB HBM3", 0.0))}
    assert cheapest_first(rows[::-1], prices)[0].gpu.name == "NVIDIA H100 80GB HBM3"


def test_a_model_that_no_node_holds_is_spread_over_several():
    goal = CapacityGoal(4096, 1.0, gpus=(8, 16))
    on_h100 = fewest("deepseek-v3", "h100", goal)
    assert on_h100.count == 16
    assert on_h100.plan.settings.tensor_parallel_size <= 8


def test_what_is_too_small_says_what_was_tried_and_what_is_missing():
    goal = CapacityGoal(4096, 1.0, gpus=(1, 2, 4, 8))
    on_h100 = fewest("deepseek-v3", "h100", goal)
    assert on_h100.count == 0
    assert on_h100.tried == (1, 2, 4, 8)
    assert on_h100.short_bytes > 0


def test_each_concession_has_a_row_where_it_needs_fewer_cards():
    asked, goal = ServeArgs(model="llama-3.1-70b"), CapacityGoal(8192, 30, gpus=COUNTS)
    task = SizingTask((load("llama-3.1-70b"),), release("0.32.0"), (asked,), goal)
    rows = fit_cell(task, (0, gpu("h100")))
    bits = [lost_bits(row.plan.target.model) for row in rows]
    assert list(zip([row.count for row in rows], bits, [row.is_sure for row in rows], strict=True)) == [
        (4, 0, True),
        (2, 8, True),
        (1, 12, False),
    ]


def test_where_the_fewest_cards_are_tight_the_fewest_that_are_sure_have_a_row_too():
    asked = ServeArgs(model="qwen3-32b", max_num_seqs=256)
    task = SizingTask((load("qwen3-32b"),), release("0.32.0"), (asked,), CapacityGoal(4096, 1.0, gpus=COUNTS))
    rows = [row for row in fit_cell(task, (0, gpu("l4"))) if lost_bits(row.plan.target.model)]
    assert [(row.count, row.is_sure) for row in rows[:2]] == [(2, True), (1, False)]
