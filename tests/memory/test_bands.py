"""Error bands: one for the whole sum, wider with every property that is hardly known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from weight_cases import LLAMA_8B, model

import legroom
from legroom.errors import LegroomError
from legroom.facts.fit import ROOT, BandRow, Properties, bands, evidence, half_band, row_at, weights_band, weights_rows
from legroom.facts.gpus import gpu
from legroom.facts.releases import release as known_release
from legroom.figures import exact
from legroom.memory.activation.profile_run import first_start_leftover_bytes
from legroom.memory.bands import band_class, card_family, weights_class
from legroom.planning.plan import Plan, cold_start

GIB = 2**30


def planned(model: str = "llama-3.1-8b", card: str = "h200", **flags: Any) -> Plan:
    return legroom.plan(model, gpu=card, vllm=flags.pop("vllm", "0.32.0"), advice=False, **flags).plan


def evidence_of(plan: Plan) -> tuple[str, tuple[tuple[str, str], ...]]:
    return evidence(band_class(plan.target.model, plan.settings, plan.target.gpu).properties)


@pytest.mark.parametrize(
    ("plan", "kind", "rare"),
    [
        ({}, "measured", ()),
        ({"vllm": "0.30.0"}, "text", (("release", "0.30"),)),
        ({"card": "rtx4090"}, "text", ()),
        ({"tensor_parallel_size": 2, "gpus": 2}, "text", ()),
        ({"model": "gemma-3-4b"}, "measured", (("media", "Gemma3ForConditionalGeneration"),)),
        ({"card": "b580", "vllm": "0.6.6"}, "other", (("card", "intel"), ("release", "0.6"))),
    ],
)
def test_a_property_of_which_fewer_than_ten_starts_are_known_is_rare(
    plan: dict[str, Any], kind: str, rare: tuple[tuple[str, str], ...]
) -> None:
    assert evidence_of(planned(**plan)) == (kind, rare)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("h100", "hopper"),
        ("a100-80gb", "ampere"),
        ("l4", "ada"),
        ("rtx5090", "blackwell"),
        ("t4", "turing-volta"),
        ("mi300x", "amd"),
        ("gb10", "unified"),
        ("24GiB", "unknown"),
    ],
)
def test_cards_are_told_apart_by_family(name: str, family: str) -> None:
    assert card_family(gpu(name)) == family


def test_every_rare_property_widens_the_share_of_the_card_by_the_growth() -> None:
    known = (("card", "hopper"), ("release", "0.32"), ("gpus", "one"))
    halves = [half_band("kv_cache", known + (("media", "unheard of"),) * n, 1, 10**9) for n in range(6)]
    assert [halves[n + 1] / halves[n] for n in range(3)] == pytest.approx([bands()["growth"]] * 3, rel=0.001)
    assert halves[3] == halves[4] == halves[5]


def test_a_release_that_was_only_read_has_a_wider_band_than_a_measured_one() -> None:
    measured, read = (half_band("kv_cache", (("card", card),), 1, 10**9) for card in ("hopper", "ampere"))
    assert read > 3 * measured


@pytest.mark.parametrize(
    ("vaguer", "than"),
    [
        ((("card", "ada"), ("media", "Gemma4ForConditionalGeneration")), (("card", "ada"), ("media", "text"))),
        ((("card", "ada"), ("draft", "draft")), (("card", "ada"), ("draft", "none"))),
        ((("card", "unified"), ("memory", "shared")), (("card", "ada"),)),
        ((("card", "amd"),), (("card", "ada"),)),
    ],
)
def test_encoders_drafts_shared_memory_and_other_makers_cards_have_wider_bands(
    vaguer: Properties, than: Properties
) -> None:
    assert half_band("kv_cache", vaguer, 1, 10**9) > half_band("kv_cache", than, 1, 10**9)


def test_where_nobody_said_so_the_band_holds_the_first_start_and_later_ones() -> None:
    warm = planned()
    cold = cold_start(warm)
    assert warm.layout.kv_cache.low < cold.layout.kv_cache.bytes < warm.layout.kv_cache.bytes
    assert cold.layout.activation.bytes <= warm.layout.activation.high
    assert halves(cold)[0] < halves(warm)[0]


def test_the_band_of_the_sum_is_not_the_sum_of_the_worst_cases() -> None:
    layout = planned(card="a100-80gb").layout
    parts = (layout.weights, layout.activation, layout.cuda_graph, layout.non_torch)
    assert layout.kv_cache.bytes - layout.kv_cache.low < sum(part.high - part.bytes for part in parts)


def test_pooled_bytes_that_were_asked_for_are_exact() -> None:
    kv_cache = planned(kv_cache_memory_bytes=8 * GIB).layout.kv_cache
    assert (kv_cache.kind, kv_cache.low, kv_cache.high) == ("exact", 8 * GIB, 8 * GIB)


def test_a_card_that_was_never_seen_gets_a_wide_band() -> None:
    layout = planned(card="b580").layout
    assert layout.kv_cache.bytes - layout.kv_cache.low >= 0.015 * layout.total_bytes


def test_a_measured_card_has_a_narrower_band_than_one_that_was_only_read() -> None:
    measured, read = planned().layout.kv_cache, planned(vllm="0.31.0").layout.kv_cache
    assert measured.high - measured.low < read.high - read.low


def test_a_total_that_the_user_gives_is_no_doubt() -> None:
    known = legroom.plan("qwen3-8b", gpu="l4", gpu_memory="22.03GiB", vllm="0.32.0", advice=False).layout.kv_cache
    guessed = legroom.plan("qwen3-8b", gpu="l4", vllm="0.32.0", advice=False).layout.kv_cache
    assert known.high - known.low < guessed.high - guessed.low


def halves(plan: Plan) -> tuple[int, int]:
    kv_cache = plan.layout.kv_cache
    return kv_cache.bytes - kv_cache.low, kv_cache.high - kv_cache.bytes


def test_a_sampler_that_no_flag_names_may_only_leave_more() -> None:
    below, above = halves(planned(card="h100", gpu_memory="79.18GiB", vllm="0.10.2", enforce_eager=True))
    saved = 1024 * 128256 * 24
    assert above - below == pytest.approx(saved, rel=0.01)


def test_from_0_11_1_on_the_sampler_is_no_doubt() -> None:
    below, above = halves(planned(card="h100", gpu_memory="79.18GiB", vllm="0.11.1", enforce_eager=True))
    assert below == above


def test_a_card_seen_with_larger_totals_than_the_usual_one_may_leave_more_than_it_may_lack() -> None:
    card = gpu("rtx3090")
    below, above = halves(planned(card="rtx3090", vllm="0.17.1", max_model_len=8192, enforce_eager=True))
    assert card.total_high_bytes - card.total_bytes > card.total_bytes - card.total_low_bytes
    assert above > below


def test_a_name_that_two_cards_share_reaches_up_to_the_larger() -> None:
    plan = planned(card="a100", vllm="0.19.0")
    larger = planned(card="a100-80gb", vllm="0.19.0")
    assert plan.layout.kv_cache.low < plan.layout.kv_cache.bytes < larger.layout.kv_cache.bytes
    assert plan.layout.kv_cache.high >= larger.layout.kv_cache.bytes


def stored_as(method: dict[str, Any] | None, **fields: Any) -> tuple[str, ...]:
    config = LLAMA_8B | fields | ({"quantization_config": method} if method else {})
    read = planned().target
    return weights_class(band_class(model(config), planned().settings, read.gpu), exact(0))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
}


@pytest.mark.parametrize(
    ("method", "fields", "path"),
    [
        (None, {}, ("plain", "text")),
        (AWQ, {}, ("quantized", "awq", "text")),
        (AWQ, EXPERTS, ("unlisted", "text")),
        (AWQ | {"modules_to_not_convert": ["mlp.gate"]}, EXPERTS, ("quantized", "awq", "text")),
        (NVFP4, {}, ("quantized", "nvfp4", "text")),
    ],
)
def test_weights_are_classed_by_how_they_are_stored_and_whether_the_config_lists_it(
    method: dict[str, Any] | None, fields: dict[str, Any], path: tuple[str, ...]
) -> None:
    assert stored_as(method, **fields) == path


def test_fp8_weights_that_marlin_repacks_are_a_class_of_their_own() -> None:
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    read = model(LLAMA_8B | {"quantization_config": fp8})
    classes = [band_class(read, planned().settings, gpu(name)).weights for name in ("a100-80gb", "l4", "h100")]
    assert classes == ["fp8_marlin", "fp8_marlin", "fp8"]
    older = replace(planned().settings, release=known_release("0.28.0"))
    assert band_class(read, older, gpu("l4")).weights == "fp8"


def test_a_part_that_nothing_explains_only_takes_from_the_pool() -> None:
    below, above = halves(planned("qwen3.6-27b-nvfp4", "rtx5090", vllm="0.26.0", max_model_len=16384, max_num_seqs=4))
    assert below > above


ROWS = {
    "": BandRow(1.0, 2.0, 0.5, 40, 9),
    "read": BandRow(2.0, 3.0, 0.01, 30, 8),
    "read/text": BandRow(4.0, 4.0, 1.0, 20, 7),
}


@pytest.mark.parametrize(
    ("path", "row", "seen"),
    [
        (("read", "text"), "read/text", True),
        (("read", "text", "amd"), "read/text", False),
        (("measured",), "", False),
        ((), "", True),
    ],
)
def test_the_nearest_class_above_speaks_for_one_without_a_row(path: tuple[str, ...], row: str, seen: bool) -> None:
    assert row_at(ROWS, path) == (ROWS[row], seen)


def test_no_band_of_weights_is_wider_than_the_class_was_ever_off() -> None:
    assert weights_band(ROWS, ("read",), 1000, 10_000) == (100, 100)


def test_a_class_of_weights_without_starts_gets_more_than_the_one_above_it() -> None:
    factor = bands()["unseen"]["factor"]
    assert weights_band(ROWS, ("read", "text", "amd"), 100, 10**6) == (int(400 * factor), int(400 * factor))
    assert weights_rows()[ROOT].records > 0


def test_nothing_to_doubt_makes_no_band() -> None:
    assert half_band("kv_cache", (("card", "intel"),), 0, 10**6) == 0


@pytest.mark.parametrize(("release", "may_stay"), [("0.26.0", False), ("0.28.0", True), ("0.32.0", False)])
def test_a_freed_copy_of_the_embedding_may_stay_reserved_from_0_27_to_0_31(release: str, may_stay: bool) -> None:
    """0.27 charges the drop of free memory; 0.32 limits cuts from freed blocks in its profile run."""
    made = planned(vllm=release)
    assert bool(first_start_leftover_bytes(made.target.model, made.settings, made.target.gpu)) == may_stay


def test_a_card_that_is_not_known_is_planned_by_the_total_given_for_it() -> None:
    with pytest.raises(LegroomError, match="not known"):
        legroom.plan("qwen3-8b", gpu="CMP 170HX", vllm="0.32.0", advice=False)
    planned_ = legroom.plan("qwen3-8b", gpu="CMP 170HX", gpu_memory="64GiB", vllm="0.32.0", advice=False)
    assert (planned_.layout.total_bytes, planned_.verdict) == (64 * 2**30, "fits")
    with pytest.raises(LegroomError, match="does not model"):
        legroom.plan("qwen3-8b", gpu="TPU v5e", gpu_memory="16GiB", vllm="0.32.0", advice=False)
