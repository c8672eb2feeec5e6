"""Several servers on one machine: they start in any order, and where they cannot, that is shown."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.memory.overhead import desktop_bytes
from legroom.planning.packing.gpu_packing import PackRequest, pack
from legroom.planning.packing.needs import OtherProgram, PackedServer, server_needs
from legroom.planning.packing.pack_changes import changes_that_fit, meet_goals, proof
from legroom.planning.packing.placement import Card, Shift
from legroom.planning.plan import Target, plan
from legroom.planning.search_space import CapacityGoal
from legroom.render.pack_text import pack_text
from legroom.units import GIB
from legroom.vllm.args import ServeArgs, is_given

model_of = cache(load)  # what is worked out of a model is remembered with the model
RELEASES = ("0.6.3", "0.6.4", "0.8.5", "0.9.1", "0.10.0", "0.10.2", "0.19.0", "0.26.0", "0.32.0")


def server(model="llama-3.1-8b", card="h100", vllm="0.32.0", name=None, **flags):
    more = {key: flags.pop(key) for key in ("weight", "goal") if key in flags}
    args = ServeArgs(model=model, **{"max_model_len": 8192, "max_num_seqs": 128, **flags})
    return PackedServer(name or model, Target(model_of(model), gpu(card), 1, release(vllm)), args, **more)


def cards(name="h100", count=1, others=()):
    card = gpu(name)
    return tuple(Card(number, card, desktop_bytes(card), others if number == 0 else ()) for number in range(count))


def three(vllm):
    return (
        server("llama-3.1-8b", vllm=vllm, max_model_len=16384),
        server("mistral-7b", vllm=vllm),
        server("qwen2.5-7b", vllm=vllm),
    )


def started_last(packed, beside):
    """The plan of a packed server that finds these bytes on its card."""
    return plan(replace(packed.plan.target, held_by_others_bytes=beside), packed.plan.args)


@pytest.mark.parametrize("vllm", RELEASES)
def test_every_server_gets_the_same_pool_in_every_order(vllm):
    result = pack(PackRequest(three(vllm), cards()))
    assert result.verdict != "does_not_fit"
    for order in permutations(result.packed):
        beside = 0
        for packed in order:
            made = started_last(packed, beside)
            assert made.memory.failure is None, f"{packed.name} after {beside / GIB:.1f} GiB: {made.memory.failure}"
            assert made.memory.kv.num_blocks == packed.plan.memory.kv.num_blocks
            beside += packed.peak_bytes


@pytest.mark.parametrize("vllm", RELEASES)
def test_the_peaks_and_their_bands_fit_the_card_together(vllm):
    result = pack(PackRequest(three(vllm), cards()))
    total = gpu("h100").total_bytes
    assert sum(packed.peak_bytes for packed in result.packed) <= total
    assert result.cards[0].sure_headroom_bytes >= 0


def test_the_pool_is_bounded_by_bytes_where_the_release_takes_them():
    new, old = (pack(PackRequest(three(vllm), cards())).packed[0].plan.args for vllm in ("0.10.2", "0.10.0"))
    assert new.kv_cache_memory_bytes is not None
    assert new.num_gpu_blocks_override is None
    assert old.kv_cache_memory_bytes is None
    assert old.num_gpu_blocks_override is not None


def test_a_release_that_charges_for_neighbours_gets_a_share_that_counts_them():
    shares = [packed.plan.args.gpu_memory_utilization for packed in pack(PackRequest(three("0.8.5"), cards())).packed]
    assert min(shares) > 0.9


def test_what_is_left_is_shared_by_weight():
    heavy = (server(name="a", weight=3.0), server("mistral-7b", name="b"))
    a, b = pack(PackRequest(heavy, cards("h200"))).packed
    extra = [packed.pool_bytes - packed.needs.least_pool_bytes for packed in (a, b)]
    assert extra[0] == pytest.approx(3 * extra[1], rel=0.01)


def test_no_pool_is_larger_than_its_requests_can_use():
    small = server("qwen3-0.6b", max_model_len=2048, max_num_seqs=4)
    packed = pack(PackRequest((small,), cards("h200"))).packed[0]
    assert packed.plan.memory.kv.max_concurrency == pytest.approx(4, abs=0.1)


def test_a_given_pool_stays_as_given():
    given_pool = server(kv_cache_memory_bytes=4 * GIB)
    assert pack(PackRequest((given_pool, server("mistral-7b")), cards())).packed[0].pool_bytes == 4 * GIB


def test_a_program_that_is_not_vllm_keeps_its_part():
    trainer = OtherProgram("trainer", 40 * GIB)
    with_trainer = pack(PackRequest((server(),), cards(others=(trainer,))))
    assert with_trainer.packed[0].peak_bytes <= gpu("h100").total_bytes - 40 * GIB
    assert with_trainer.packed[0].plan.target.held_by_others_bytes == 40 * GIB


def test_an_encoder_without_a_kv_cache_gets_no_pool():
    embedder = server("bge-large-en-v1.5", max_model_len=None, max_num_seqs=None)
    packed = pack(PackRequest((server(), embedder), cards())).packed[1]
    assert packed.pool_bytes == 0
    assert packed.plan.args.kv_cache_memory_bytes is None
    assert packed.plan.memory.failure is None


def test_large_servers_go_to_cards_of_their_own():
    servers = (server("qwen3-32b", name="large"), server(name="a"), server("mistral-7b", name="b"))
    result = pack(PackRequest(servers, cards(count=2)))
    placed = {packed.name: packed.cards for packed in result.packed}
    assert placed["a"] == placed["b"] != placed["large"]
    assert {packed.plan.args.env["CUDA_VISIBLE_DEVICES"] for packed in result.packed} == {"0", "1"}


def test_a_server_on_two_cards_has_the_same_pool_on_both():
    wide = server("llama-3.1-70b", name="wide", tensor_parallel_size=2)
    result = pack(PackRequest((wide, server("qwen3-0.6b", name="small")), cards("h200", 2)))
    assert result.verdict == "fits"
    assert result.packed[0].cards == (0, 1)
    assert all(use.headroom_bytes >= 0 for use in result.cards)


def test_three_servers_that_can_never_fit_are_shown_the_sum():
    result = pack(PackRequest((server(), server("qwen3-14b"), server("qwen3-32b")), cards("l40s")))
    assert result.verdict == "does_not_fit"
    assert result.headroom_bytes < 0
    assert "without any KV cache" in proof(result)[0]


def test_a_server_that_no_card_holds_alone_is_offered_to_be_split():
    result = pack(PackRequest((server("qwen3-32b", "l40s"), server("qwen3-8b", "l40s")), cards("l40s")))
    (change,) = (change for change in changes_that_fit(result) if change.server == "qwen3-32b")
    assert change.flags == {"tensor_parallel_size": 2}
    assert change.result.verdict != "does_not_fit"
    assert len(change.result.request.cards) == change.gpus


def test_servers_that_one_card_does_not_hold_are_split_over_the_cards_that_are_there():
    large = [server(model, max_model_len=8192) for model in ("llama-3.1-70b", "qwen2.5-72b")]
    result = meet_goals(pack(PackRequest(tuple(large), cards(count=8))))
    assert result.verdict == "fits"
    assert result.splits == {"llama-3.1-70b": 2, "qwen2.5-72b": 2}
    assert "llama-3.1-70b: --tensor-parallel-size 2, as one card does not hold it" in pack_text(result)
    assert meet_goals(pack(PackRequest(tuple(large), cards(count=3)))).verdict == "does_not_fit"


def test_cards_that_hold_the_same_are_shown_once():
    text = pack_text(pack(PackRequest((server(tensor_parallel_size=2), server("qwen2.5-7b")), cards(count=4))))
    assert "GPUs 0, 1: " in text or "GPUs 1, 2: " in text
    assert text.count("NVIDIA H100") == 3


def test_every_change_that_is_offered_makes_them_fit():
    servers = (
        server("llama-3.1-8b", "rtx4090", max_model_len=16384),
        server("qwen3-0.6b", "rtx4090", max_model_len=40960),
    )
    result = pack(PackRequest(servers, cards("rtx4090")))
    assert result.verdict == "does_not_fit"
    changes = changes_that_fit(result)
    assert changes
    assert all(change.result.verdict != "does_not_fit" for change in changes)


def test_one_awake_at_a_time_fits_where_both_do_not():
    servers = (server("qwen3-14b", "l40s", name="day"), server("llama-3.1-8b", "l40s", name="night"))
    request = PackRequest(servers, cards("l40s"))
    assert pack(request).verdict == "does_not_fit"
    shifts = tuple(Shift(name, frozenset({name})) for name in ("day", "night"))
    result = pack(replace(request, shifts=shifts))
    assert result.verdict == "fits"
    assert result.order == ("day", "night")
    assert all(is_given(packed.plan.args, "--enable-sleep-mode") for packed in result.packed)


def test_a_wish_is_held_by_the_pool():
    wishing = server(max_model_len=None, max_num_seqs=None, goal=CapacityGoal(32768, 6.0))
    result = pack(PackRequest((wishing, server("mistral-7b")), cards("h200")))
    kv = result.packed[0].plan.memory.kv
    assert result.packed[0].plan.settings.max_model_len == 32768
    assert kv.max_concurrency >= 6


def test_a_wish_that_does_not_fit_as_usual_is_granted_by_other_flags():
    wishing = server("llama-3.1-8b", "l40s", max_model_len=None, max_num_seqs=None, goal=CapacityGoal(32768, 3.0))
    neighbour = server("qwen3-0.6b", "l40s", max_model_len=16384, kv_cache_memory_bytes=15 * GIB)
    usual = pack(PackRequest((wishing, neighbour), cards("l40s")))
    granted = meet_goals(usual)
    assert usual.verdict == "does_not_fit"
    assert granted.verdict != "does_not_fit"
    assert granted.packed[0].plan.memory.kv.max_concurrency >= 3


def test_a_wish_for_too_many_requests_is_answered_with_how_many_fit():
    wishing = server(max_model_len=None, max_num_seqs=None, goal=CapacityGoal(32768, 40.0))
    result = pack(PackRequest((wishing, server("mistral-7b")), cards()))
    fewer = [
        change.flags["want_concurrency"] for change in changes_that_fit(result) if "want_concurrency" in change.flags
    ]
    assert 1 <= fewer[0] < 40


MODELS = ("qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b", "mistral-7b", "qwen3-14b")


@given(
    st.lists(
        st.tuples(st.sampled_from(MODELS), st.sampled_from((2048, 8192, 30000)), st.floats(0.5, 4)),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(("l40s", "h100", "rtx4090")),
    st.integers(1, 3),
)
def test_whatever_is_packed_no_card_runs_over_and_every_server_starts(asked, card, count):
    servers = tuple(
        server(model, card, name=f"{model}-{number}", max_model_len=length, weight=weight)
        for number, (model, length, weight) in enumerate(asked)
    )
    result = pack(PackRequest(servers, cards(card, count)))
    if result.verdict == "does_not_fit":
        assert result.headroom_bytes < 0 or any(packed.plan.memory.failure for packed in result.packed)
        return
    assert all(use.headroom_bytes >= 0 for use in result.cards)
    for packed in result.packed:
        assert packed.plan.memory.failure is None
        assert packed.pool_bytes >= server_needs(packed.needs.server).least_pool_bytes
