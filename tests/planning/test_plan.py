"""A plan predicts what plain `vllm serve` would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import legroom
from legroom.errors import LegroomError
from legroom.facts.gpus import gpu, with_total
from legroom.facts.model_sources import load
from legroom.facts.releases import known_releases, release
from legroom.figures import estimated
from legroom.memory.deployment_memory import first_failure
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Target, cold_start, context_by_user_count, plan
from legroom.units import GIB
from legroom.vllm.args import ServeArgs
from legroom.vllm.setting_checks import RefusedByVllm

LLAMA = load("llama-3.1-8b")
CARD = gpu("h200")
SHARED: dict[str, Any] = {"max_model_len": 4096, "gpu_memory_utilization": 0.7, "enforce_eager": True}


def test_an_8b_model_with_its_full_context_does_not_start_on_a_24_gib_card(target):
    made = plan(target(vllm="0.10.2"), ServeArgs())
    assert made.verdict == "does_not_fit"
    assert made.memory.failure is not None
    assert made.memory.failure.id == "kv_too_small_for_max_len"
    assert "max seq len (131072)" in made.memory.failure.message
    assert "16.00 GiB KV cache is needed" in made.memory.failure.message


def test_the_parts_of_a_layout_add_up_to_the_budget(target):
    layout = plan(target(), ServeArgs(max_model_len=8192)).layout
    inside = (layout.weights, layout.activation, layout.cuda_graph, layout.non_torch, layout.kv_cache)
    assert sum(part.bytes for part in inside) == layout.budget_bytes


def test_the_card_shows_more_than_the_budget_because_vllm_leaves_things_uncounted(target):
    layout = plan(target("gemma-3-4b", "h200"), ServeArgs(max_model_len=8192)).layout
    assert layout.outside.bytes > GIB
    assert layout.peak_used_bytes > layout.budget_bytes
    assert layout.headroom_bytes == layout.total_bytes - layout.peak_used_bytes


def test_explicit_kv_bytes_are_taken_as_they_are(target):
    made = plan(target(), ServeArgs(max_model_len=4096, kv_cache_memory_bytes=2 * GIB))
    assert made.layout.kv_cache.bytes == 2 * GIB
    assert made.layout.kv_cache.kind == "exact"


def test_weights_larger_than_the_card_are_named_as_such(target):
    made = plan(target(card="rtx 3060"), ServeArgs(max_model_len=2048))
    assert made.memory.failure is not None
    assert made.memory.failure.id == "weights_too_big"
    assert made.memory.failure.needed_bytes > made.memory.failure.available_bytes


def test_what_others_hold_is_part_of_what_the_card_shows_and_leaves_less_headroom():
    held = 40 * GIB
    alone, beside = (
        plan(Target(LLAMA, CARD, 1, release("0.26.0"), held_by_others_bytes=bytes_), ServeArgs(**SHARED)).layout
        for bytes_ in (0, held)
    )
    assert beside.peak_used_bytes == alone.peak_used_bytes + held
    assert beside.headroom_bytes == alone.headroom_bytes - held


def test_a_budget_that_fits_beside_others_is_tight_where_what_it_leaves_uncounted_does_not():
    # Seen on an H200: 0.7 of the card started beside 41 GiB and left 0.4 GiB free.
    busy = Target(LLAMA, CARD, 1, release("0.26.0"), held_by_others_bytes=41 * GIB)
    assert plan(busy, ServeArgs(**SHARED)).verdict == "tight"
    assert plan(busy, ServeArgs(**{**SHARED, "gpu_memory_utilization": 0.66})).verdict == "fits"


def test_memory_held_by_others_fails_the_check_at_start():
    busy = Target(LLAMA, CARD, 1, release("0.26.0"), held_by_others_bytes=40 * GIB)
    failure = plan(busy, ServeArgs(max_model_len=8192)).memory.failure
    assert failure is not None
    assert failure.id == "free_memory_lt_requested"
    assert "less than desired GPU memory utilization (0.92" in failure.message


def test_more_gpus_than_there_are_is_a_clear_error(target):
    with pytest.raises(LegroomError, match="ask for 4 GPUs"):
        plan(target(gpus=2), ServeArgs(tensor_parallel_size=4))


def test_auto_fit_takes_the_longest_length_that_fits(target):
    made = plan(target(), ServeArgs(max_model_len=-1))
    assert made.verdict != "does_not_fit"
    assert 1024 < made.settings.max_model_len < 131072
    assert made.memory.kv.max_concurrency >= 1.0


@given(
    version=st.sampled_from(known_releases()),
    total=st.integers(8, 192),
    seqs=st.sampled_from([1, 16, 256, 1024]),
    length=st.sampled_from([512, 8192, 131072]),
)
def test_any_release_card_and_batch_gives_a_consistent_plan(version, total, seqs, length):
    where = Target(LLAMA, with_total(CARD, total * GIB), 1, release(version))
    try:
        made = plan(where, ServeArgs(max_model_len=length, max_num_seqs=seqs))
    except RefusedByVllm:
        assume(False)  # old releases want as many batched tokens as sequences
    layout, kv = made.layout, made.memory.kv
    assert layout.kv_cache.low <= layout.kv_cache.bytes <= layout.kv_cache.high
    if made.memory.failure is None:
        assert made.verdict != "does_not_fit"
    elif made.verdict != "does_not_fit":  # short by less than the estimate may be wrong by
        failure = made.memory.failure
        assert made.verdict == "tight"
        assert failure.needed_bytes - failure.available_bytes <= layout.kv_cache.high - layout.kv_cache.bytes
    if made.memory.failure is None:
        assert kv.num_blocks * kv.block_size >= length
        assert kv.longest_len >= length


def test_a_first_start_that_is_tight_makes_the_plan_tight():
    warm = plan(Target(load("qwen3-8b"), gpu("rtx4090"), 1, release("0.32.0")), ServeArgs(max_model_len=32768))
    assert not warm.memory.failure
    assert cold_start(warm).verdict != "fits"
    assert warm.verdict == "tight"
    assert "first start" in warm.reason or "error band" in warm.reason


def test_the_first_start_stands_beside_the_later_ones():
    report = legroom.plan("qwen3-8b", gpu="rtx4090", vllm="0.32.0", max_model_len=16384, advice=False)
    first = report.json()["first_start"]
    assert first["num_blocks"] < report.json()["kv"]["num_blocks"]
    assert f"{first['tokens']:,} tokens" in str(report)
    assert "Nine of ten true values lie in this range" in str(report)
    assert report.json()["basis"]["kind"] == "read from source"


def test_an_eager_server_has_one_kind_of_start():
    report = legroom.plan("qwen3-8b", gpu="rtx4090", vllm="0.32.0", enforce_eager=True, advice=False)
    assert report.json()["first_start"]["num_blocks"] == report.json()["kv"]["num_blocks"]
    assert "first start" not in str(report)


def test_a_pool_short_by_less_than_the_estimate_may_be_wrong_by_is_tight(target) -> None:
    # The same command started with 0.49 GiB of KV cache and failed with 0.41 four minutes later; 0.44 GiB are needed.
    args = ServeArgs(model="Qwen/Qwen2.5-7B-Instruct", max_model_len=8192, gpu_memory_utilization=0.65)
    made = plan(target(args.model, "rtx3090", "0.17.1"), args)
    assert (made.verdict, made.starts) == ("tight", False)
    assert made.memory.failure is not None


def test_a_pool_short_by_more_than_that_does_not_fit(target) -> None:
    args = ServeArgs(model="Qwen/Qwen2.5-7B-Instruct", max_model_len=8192, gpu_memory_utilization=0.6)
    assert plan(target(args.model, "rtx3090", "0.17.1"), args).verdict == "does_not_fit"


def test_a_card_that_a_desktop_would_fill_is_tight_unless_there_is_none() -> None:
    args, used = ServeArgs(model="meta-llama/Llama-3.1-8B-Instruct", max_model_len=8192), release("0.17.1")
    beside = make_plan(args, used, Machine("rtx3090"), advice=False)
    alone = make_plan(args, used, Machine("rtx3090", used="0"), advice=False)
    assert (beside.verdict, alone.verdict) == ("tight", "fits")
    assert "desktop" in beside.reason


def test_a_server_card_drives_no_screen() -> None:
    args, used = ServeArgs(model="meta-llama/Llama-3.1-8B-Instruct", max_model_len=8192), release("0.17.1")
    assert make_plan(args, used, Machine("a10"), advice=False).verdict == "fits"


def test_a_start_that_a_bug_of_the_release_ended_is_tight_until_it_is_worked_around(target) -> None:
    args = ServeArgs(model="google/gemma-2-9b", tensor_parallel_size=8, gpu_memory_utilization=0.85)
    pcie = plan(target(args.model, "l4", "0.5.4", 8), args)
    assert pcie.bug is not None
    assert (pcie.verdict, pcie.bug.id) == ("tight", "nccl_graph_memory")
    eager = replace(args, enforce_eager=True)
    assert plan(target(args.model, "l4", "0.5.4", 8), eager).bug is None
    assert plan(target(args.model, "h100", "0.5.4", 8), args).bug is None


def test_a_name_that_two_cards_share_is_what_makes_a_start_doubtful(target):
    made = plan(target("mistral-nemo-12b", "a100"), ServeArgs(max_model_len=131072))
    assert made.verdict == "tight"
    assert made.target.gpu.name in made.reason and made.target.gpu.larger in made.reason


def test_a_peak_above_the_card_at_the_good_end_of_the_range_does_not_fit():
    plan = legroom.plan("qwen3-8b", gpu="h100", vllm="0.32.0", advice=False).plan
    layout = plan.layout
    spare = layout.headroom_bytes + layout.outside.bytes
    over = replace(layout, outside=estimated(spare + 3 * GIB, spare + 2 * GIB, spare + 4 * GIB))
    memory, free = plan.memory, layout.total_bytes
    failure = first_failure((over,), memory.kv, memory.graphs, plan.settings, plan.target.gpu, free)
    assert failure is not None
    assert failure.id == "runtime_activation_burst"
    lighter = replace(over, outside=estimated(spare + 3 * GIB, spare - GIB, spare + 4 * GIB))
    assert first_failure((lighter,), memory.kv, memory.graphs, plan.settings, plan.target.gpu, free) is None


def test_a_card_without_a_name_is_not_refused_for_the_batch_that_its_name_would_decide():
    fails = legroom.plan("qwen3.8-27b", gpu="80.0GiB", vllm="0.28.0", max_model_len=131072, advice=False)
    named = legroom.plan(
        "qwen3.8-27b",
        gpu="80.0GiB",
        vllm="0.28.0",
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=131072,
        advice=False,
    )
    assert named.verdict == "does_not_fit"
    assert fails.verdict == "tight"
    assert "the card was not named" in fails.plan.reason


def test_a_plan_counts_the_requests_of_all_its_engines() -> None:
    options = {"gpu": "l4", "max_model_len": 32768}
    one = legroom.plan("qwen3-0.6b", **options)
    two = legroom.plan("qwen3-0.6b", **options, data_parallel_size=2, gpus=2)
    assert two.plan.holds == pytest.approx(2 * one.plan.holds, rel=0.01)
    said = " ".join(two.text().split())
    assert f"{two.plan.holds:.2f} requests of the full 32,768 tokens, {two.plan.holds / 2:.2f} on each of 2" in said
    assert context_by_user_count(two.plan)[16] == pytest.approx(2 * context_by_user_count(one.plan)[16], rel=0.02)


def test_weights_whose_groups_a_split_would_cut_are_split_by_layers_instead() -> None:
    """29,568 rows are 231 groups of 128; the maker's own checkpoints have 29,696, which are 232."""
    options = {"gpu": "a100-40gb", "gpus": 2, "max_model_len": 4096}
    cut = legroom.plan("qwen2.5-72b-w4a16", **options, tensor_parallel_size=2).plan
    assert cut.memory.unsupported.message.startswith("Weight input_size_per_partition = 14784")
    assert "--pipeline-parallel-size 2" in cut.reason
    assert "smaller --tensor-parallel-size" not in cut.reason
    assert legroom.plan("qwen2.5-72b-w4a16", **options, pipeline_parallel_size=2).plan.memory.unsupported is None
    for padded in ("qwen2.5-72b-awq", "qwen2.5-72b-gptq-int4", "qwen2-72b-awq", "qwen2-vl-72b-gptq-int4"):
        assert legroom.plan(padded, **options, tensor_parallel_size=2).plan.memory.unsupported is None


def test_what_is_missing_is_missing_for_the_whole_start() -> None:
    """Weights beyond the card are only the first thing that a start lacks."""
    for length in (4096, 32768):
        failing = legroom.plan("qwen3-14b", gpu="rtx4090", max_model_len=length, advice=False)
        plan, failure = failing.plan, failing.plan.memory.failure
        assert failure.id == "weights_too_big"
        larger = gpu("rtx4090").total_bytes + plan.missing_bytes / plan.settings.gpu_memory_utilization
        cards = (Machine("rtx4090", memory=str(int(larger + more))) for more in (-GIB // 8, GIB // 8))
        starts = [make_plan(plan.args, plan.target.release, card, advice=False).starts for card in cards]
        assert starts == [False, True]
        assert plan.missing_bytes > failure.needed_bytes - failure.available_bytes
        assert failing.json()["failure"]["missing_bytes"] == plan.missing_bytes


@pytest.mark.parametrize("limit", ["4GiB", "2GiB"])
def test_a_short_host_memory_is_said_once_and_what_helps_on_the_gpu_is_still_found(limit: str) -> None:
    made = make_plan(ServeArgs(model="llama-3.1-8b"), release("0.32.0"), Machine("rtx4090", host_memory=limit))
    assert made.memory.failure.id == "kv_too_small_for_max_len"
    assert any("max_model_len" in each.flags for each in made.advice)
    assert all(each.plan.verdict != "fits" and each.plan.target.host_limit_bytes for each in made.advice)
    assert sum("no flag helps where the host's memory is too small" in note for note in made.notes) == 1


@pytest.mark.parametrize("size", [{"host_memory": "64"}, {"used": "2"}, {"memory": "24"}])
def test_a_size_without_its_unit_is_refused_wherever_it_is_read(size: dict[str, str]) -> None:
    with pytest.raises(LegroomError, match="lacks its unit") as refused:
        make_plan(ServeArgs(model="llama-3.1-8b"), release("0.32.0"), Machine("rtx4090", **size))
    assert refused.value.hint.endswith("GiB")
