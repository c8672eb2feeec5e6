"""Non-torch memory, and what is used beside the budget."""

from __future__ import annotations

import pytest
from recorded_runs import H200, models, recorded, settle

from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.memory.activation.profile_run import activation, activation_cold
from legroom.memory.cudagraph_memory import graph_estimate
from legroom.memory.overhead import (
    cached_bytes,
    communication_bytes,
    communicator_ranks,
    cuda_context,
    held_at_start,
    non_torch,
    outside,
    runner_buffers,
    sampler_tables,
)
from legroom.memory.weights.loaded import weights
from legroom.units import GIB, MIB
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve, served_model

WHOLE = [run for run in recorded() if "kv_cache_bytes" in run.seen]
LLAMA = models()["g-llama"]
MOE = models()["g-qwen30b"]


def test_kv_bytes_follow_to_a_third_of_a_percent() -> None:
    for run in WHOLE:
        what = (run.model, run.settings, H200)
        peak = (activation_cold if run.compile == "cold" else activation)(*what).bytes
        inside = run.seen["weights_bytes"] + peak + graph_estimate(*what).bytes + non_torch(*what).bytes
        assert abs((run.seen["budget_bytes"] - inside) / run.seen["kv_cache_bytes"] - 1) < 0.0035, run.id


def test_the_peak_use_of_the_card_follows_to_one_percent_of_it() -> None:
    close = 0
    for run in WHOLE:
        what = (run.model, run.settings, H200)
        used = run.seen["weights_bytes"] + run.seen["kv_cache_bytes"] + outside(*what).bytes
        used += activation(*what).bytes + graph_estimate(*what).bytes + non_torch(*what).bytes
        close += abs(used - run.seen["used_bytes"]) < 0.01 * H200.total_bytes
    assert close / len(WHOLE) >= 0.9


def test_the_context_is_outside_except_where_the_release_counts_the_whole_card() -> None:
    counted = settle(LLAMA, "0.8.5", max_model_len=8192)
    later = settle(LLAMA, "0.11.0", max_model_len=8192)
    assert "CUDA context" in [term.label for term in non_torch(LLAMA, counted, H200).terms]
    assert "CUDA context" not in [term.label for term in outside(LLAMA, counted, H200).terms]
    assert "CUDA context" in [term.label for term in outside(LLAMA, later, H200).terms]


def test_the_context_of_an_h200_is_the_one_measured() -> None:
    assert abs(cuda_context(H200).bytes - 552402944) < MIB


def test_the_v2_runner_keeps_a_count_for_every_sequence_and_token() -> None:
    settings = settle(LLAMA, max_num_seqs=1024, max_model_len=8192)
    assert settings.runner == "V2"
    assert abs(sampler_tables(LLAMA, settings) - 551.6 * MIB) < 2 * MIB
    assert runner_buffers(LLAMA, settings, H200) > sampler_tables(LLAMA, settings)


def test_runner_buffers_count_inside_the_budget_from_0_27_on() -> None:
    before, since = (settle(LLAMA, version, max_num_seqs=1024, max_model_len=8192) for version in ("0.26.0", "0.27.0"))
    grown = non_torch(LLAMA, since, H200).bytes - non_torch(LLAMA, before, H200).bytes
    assert abs(grown - sampler_tables(LLAMA, since)) < 64 * MIB


def test_every_kv_group_has_a_block_table_of_its_own() -> None:
    # Gemma 3 4B: 29 sliding layers and 5 full ones make seven groups of five, 1592 MiB beside weights and KV cache
    # on an H200 with vLLM 0.26.0.
    gemma = load("google/gemma-3-4b-it")
    short, long = (settle(gemma, "0.26.0", max_model_len=length, max_num_seqs=1024) for length in (8192, 131072))
    grown = runner_buffers(gemma, long, H200) - runner_buffers(gemma, short, H200)
    assert grown == 2 * 7 * 1024 * (131072 - 8192) // 16 * 4


def test_one_gpu_needs_no_communication_buffers() -> None:
    assert communication_bytes(settle(LLAMA), H200) == 0


def test_fused_all_reduce_takes_its_workspace_on_hopper_from_0_17_on() -> None:
    h100, a100 = gpu("NVIDIA H100 80GB HBM3"), gpu("NVIDIA A100-SXM4-80GB")
    new = settle(LLAMA, "0.19.0", h100, tensor_parallel_size=2)
    old = settle(LLAMA, "0.15.0", h100, tensor_parallel_size=2)
    assert communication_bytes(new, h100) > 1.7 * GIB > communication_bytes(old, h100)
    assert communication_bytes(settle(LLAMA, "0.19.0", a100, tensor_parallel_size=2), a100) < GIB / 2


def test_terms_add_up() -> None:
    for run in WHOLE:
        for rule in (outside, non_torch):
            figure = rule(run.model, run.settings, H200)
            assert sum(term.bytes for term in figure.terms) == figure.bytes
            assert figure.low <= figure.bytes <= figure.high


def test_shared_memory_is_charged_for_the_host() -> None:
    spark = gpu("NVIDIA GB10")
    settings = settle(MOE, "0.25.1", spark, max_num_seqs=32)
    assert non_torch(MOE, settings, spark).bytes > 2 * GIB


def test_nccl_starts_before_the_first_look_at_free_memory_since_0_11() -> None:
    h100 = gpu("NVIDIA H100 80GB HBM3")
    before, since = (settle(LLAMA, version, h100, tensor_parallel_size=2) for version in ("0.10.2", "0.11.0"))
    assert held_at_start(LLAMA, before, h100).bytes == cuda_context(h100).bytes
    assert 1.4 * GIB < held_at_start(LLAMA, since, h100).bytes < 2.1 * GIB
    assert "communication" in [term.label for term in outside(LLAMA, since, h100).terms]


@pytest.mark.parametrize(
    ("model", "release", "flags", "ranks"),
    [
        (LLAMA, "0.19.0", {"tensor_parallel_size": 2}, (2,)),
        (LLAMA, "0.12.0", {"tensor_parallel_size": 2}, (2, 2)),
        (LLAMA, "0.19.0", {"tensor_parallel_size": 2, "data_parallel_size": 2}, (2,)),
        (LLAMA, "0.19.0", {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}, (2, 4)),
        (MOE, "0.19.0", {"tensor_parallel_size": 4}, (4, 4)),
        (MOE, "0.19.0", {"data_parallel_size": 4}, (4, 4)),
        (MOE, "0.29.0", {"tensor_parallel_size": 2, "data_parallel_size": 2}, (2, 2, 4)),
        (MOE, "0.29.0", {}, ()),
    ],
)
def test_every_parallel_group_of_several_ranks_has_a_communicator(model, release, flags, ranks) -> None:
    assert communicator_ranks(model, settle(model, release, **flags)) == ranks


def test_experts_on_h100s_hold_a_second_communicator_of_half_a_gib_at_the_start() -> None:
    h100 = gpu("NVIDIA H100 80GB HBM3")
    for ranks, dense_gib, experts_gib in ((2, 1.53, 2.01), (4, 1.55, 2.07)):  # 0.19.0: total less free memory
        for model, truth_gib in ((LLAMA, dense_gib), (MOE, experts_gib)):
            held = held_at_start(model, settle(model, "0.19.0", h100, tensor_parallel_size=ranks), h100)
            assert abs(held.bytes / GIB - truth_gib) < 0.05


def test_what_lies_outside_the_budget_is_never_less_than_nothing() -> None:
    # A profile run that sorts the logits reserves more than serving keeps: the rest idles inside the budget.
    model, card = load("llama-3.1-8b"), gpu("h200")
    settings = resolve(ServeArgs(model="llama-3.1-8b"), model, card, release("0.10.2"))
    figure = outside(model, settings, card)
    assert figure.bytes >= figure.low >= 0
    assert sum(term.bytes for term in figure.terms) == figure.bytes


def test_the_fused_all_reduce_runs_on_nvlink_servers_alone() -> None:
    def wire(name: str) -> int:
        card = gpu(name)
        return communication_bytes(settle(LLAMA, "0.25.0", card, tensor_parallel_size=2, max_model_len=8192), card)

    assert wire("h100") == wire("b200") > GIB
    assert wire("rtx 5090") == wire("a100 80gb") < 64 * MIB


def test_torch_serves_with_an_empty_cache_from_0_29_on() -> None:
    before = settle(LLAMA, "0.26.0", max_model_len=8192)
    after = settle(LLAMA, "0.32.0", max_model_len=8192)
    assert cached_bytes(LLAMA, after, H200) < 0.6 * cached_bytes(LLAMA, before, H200)


def test_a_model_with_an_encoder_keeps_a_batch_of_embeddings() -> None:
    model = load("Qwen/Qwen2.5-VL-7B-Instruct")
    flags = {"max_model_len": 8192, "max_num_batched_tokens": 8192}
    seeing = settle(model, "0.32.0", **flags)
    blind = settle(model, "0.32.0", language_model_only=True, **flags)
    assert sampler_tables(model, seeing) - sampler_tables(model, blind) == 8192 * 3584 * 2


def test_looking_drafts_up_needs_the_tokens_and_a_mask_for_each_draft() -> None:
    flags = {"max_model_len": 8192, "max_num_seqs": 64}
    drafting = settle(LLAMA, "0.32.0", speculative_config={"method": "ngram", "num_speculative_tokens": 4}, **flags)
    more = sampler_tables(LLAMA, drafting) - sampler_tables(LLAMA, settle(LLAMA, "0.32.0", **flags))
    assert more == 64 * (4 * LLAMA.vocab_size // 8 + 8192 * 4)


def test_v0_leaves_the_weights_of_a_draft_model_outside_its_budget() -> None:
    spec = {"model": "Qwen/Qwen2.5-Coder-1.5B-Instruct", "num_speculative_tokens": 4}
    args = ServeArgs(model="Qwen/Qwen2.5-Coder-3B-Instruct", max_model_len=4096, speculative_config=spec)
    card, model = gpu("rtx4090"), served_model(args)
    early, late = (resolve(args, model, card, release(version)) for version in ("0.6.4", "0.7.3"))
    draft = [term for term in outside(model, late, card).terms if term.label == "the draft model"]
    assert 2.7 * GIB < draft[0].bytes < 3.2 * GIB
    assert weights(model, early, card).bytes - weights(model, late, card).bytes == draft[0].bytes
    assert "the draft model" not in {term.label for term in outside(model, early, card).terms}
