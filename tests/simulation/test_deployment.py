"""What a plan brings to the simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from legroom.cli.main import main
from legroom.facts import DATA_FOLDER
from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan import Plan
from legroom.simulation.fast.accounting import expert_read_seconds, step_seconds
from legroom.simulation.from_plan import hardware, planned_scheduler
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.step_time import Efficiency, ServerEfficiency, model_class, roofline, why_other_maker
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import simulate
from legroom.vllm.args import ServeArgs


def _plan(model: str, vllm: str = "0.32.0", gpu: str = "h200", **flags: Any) -> Plan:
    return make_plan(ServeArgs(model=model, **flags), release(vllm), Machine(gpu=gpu), advice=False)


def test_a_model_with_windows_brings_its_groups() -> None:
    taken = planned_scheduler(_plan("gemma-3-12b"))
    assert taken.flags["groups"] == (*[LayerGroup(1024)] * 5, LayerGroup())
    assert any("5 of sliding window 1,024, 1 of full attention" in note for note in taken.notes)


def test_flags_are_those_the_release_resolves() -> None:
    plan = _plan("llama-3.1-8b", max_num_seqs=77, enable_prefix_caching=False)
    flags = planned_scheduler(plan).flags
    assert (flags["max_num_seqs"], flags["enable_prefix_caching"]) == (77, False)
    assert flags["num_blocks"] == plan.memory.kv.num_blocks
    assert flags["async_scheduling"] == plan.settings.async_scheduling


def test_a_recurrent_state_is_a_fixed_number_of_blocks() -> None:
    taken = planned_scheduler(_plan("qwen3-next-80b-a3b", tensor_parallel_size=2))
    assert any(group.fixed_blocks for group in taken.flags["groups"])
    assert not taken.flags["enable_prefix_caching"]
    assert any("recurrent state" in note for note in taken.notes)


def test_states_are_held_from_the_first_token_to_the_last() -> None:
    settings = SchedulerSettings(
        100, max_model_len=400, enable_prefix_caching=False, groups=(LayerGroup(), LayerGroup(fixed_blocks=2))
    )
    trace = Trace()
    trace.add(16, 40)
    free: list[int] = []
    timeline = simulate(trace, settings, lambda step: free.append(step.free_blocks))
    assert free[0] == 99 - 1 - 2
    assert free[-2] == 99 - 4 - 2
    assert timeline.tally.finished == 1


def test_groups_may_have_blocks_of_their_own_size() -> None:
    settings = SchedulerSettings(
        100, max_model_len=400, enable_prefix_caching=False, groups=(LayerGroup(), LayerGroup(block_size=32))
    )
    trace = Trace()
    trace.add(64, 2)
    free: list[int] = []
    simulate(trace, settings, lambda step: free.append(step.free_blocks))
    assert free[0] == 99 - 4 - 2


def test_an_old_release_brings_the_v0_rules() -> None:
    flags = planned_scheduler(_plan("llama-3.1-8b", "0.6.2", max_model_len=8192)).flags
    assert (flags["engine"], flags["watermark"]) == ("V0", 0.01)


def test_experts_that_no_token_chooses_are_not_read() -> None:
    rank = hardware(_plan("qwen3-30b-a3b"))
    assert rank.expert_share == pytest.approx(8 / 128)
    assert rank.expert_bytes > 0.9 * 57e9
    # About 3 of its 30 billion parameters work on a token.
    assert 2 * 2.4e9 < rank.flops_per_token + rank.expert_flops_per_token < 2 * 3.4e9
    cost = roofline(rank)
    few, many = (cost.weights + cost.experts * (1 - cost.idle**tokens) for tokens in (1, 1000))
    assert few < many / 8


def test_attention_counts_heads() -> None:
    # 32 layers of 32 heads of 128: scores and their use, two operations each.
    assert hardware(_plan("llama-3.1-8b")).flops_per_pair == 2 * 32 * 32 * (128 + 128)


def test_a_window_is_read_no_further_than_it_reaches() -> None:
    rank = hardware(_plan("gpt-oss-20b"))
    assert rank.window == 128
    assert rank.window_bytes_per_token == rank.kv_bytes_per_token == 12 * 2 * 8 * 64 * 2
    cost = roofline(rank)._replace(host_request=0.0)
    assert step_seconds(cost, 200, 200 * 4000, 200) - step_seconds(cost, 200, 200 * 2000, 200) == pytest.approx(
        200 * 2000 * cost.kv_token
    )


def test_a_decode_of_latent_attention_multiplies_the_whole_latent_in_every_head() -> None:
    rank = hardware(_plan("deepseek-v2-lite"))
    assert rank.decode_flops_per_pair == 27 * 2 * 16 * (512 + 64 + 512)
    assert rank.kv_bytes_per_token == 27 * (512 + 64) * 2


def test_a_recurrent_state_costs_a_request_and_not_its_context() -> None:
    rank = hardware(_plan("nemotron-nano-9b-v2"))
    assert rank.state_bytes > 2 * rank.state_elements > 0
    attention = [layer.mixer for layer in _plan("nemotron-nano-9b-v2").target.model.layers if layer.mixer]
    assert rank.mixers == len(attention) > rank.state_layers > 0
    assert roofline(rank).request > 10 * roofline(replace(rank, state_bytes=0)).request


@pytest.mark.parametrize(
    ("vllm", "gpu", "ranks", "is_sorted"),
    [
        ("0.10.2", "h200", 4, False),
        ("0.12.0", "h200", 4, True),
        ("0.12.0", "h200", 8, False),
        ("0.16.0", "h200", 4, True),
        ("0.17.0", "h200", 4, False),
        ("0.12.0", "b200", 4, True),
        ("0.16.0", "b200", 4, False),
        ("0.12.0", "rtx pro 6000", 4, False),
    ],
)
def test_deep_gemm_multiplies_experts_in_scaled_blocks_where_the_release_prefers_it(
    vllm: str, gpu: str, ranks: int, is_sorted: bool
) -> None:
    rank = hardware(_plan("qwen3-235b-a22b-fp8", vllm, gpu, tensor_parallel_size=ranks))
    assert rank.has_deep_gemm_experts == is_sorted
    slow, fast = (roofline(rank, server=ServerEfficiency(deep_gemm_layer_s=added)) for added in (1e-4, 0.0))
    assert slow.overhead - fast.overhead == pytest.approx(is_sorted * 94e-4 * rank.latency_ratio)


def test_short_convolutions_start_fewer_kernels_than_scans() -> None:
    short, scan = hardware(_plan("lfm2-8b-a1b")), hardware(_plan("granite-4.0-h-micro"))
    assert (short.state_layers, short.scan_layers) == (18, 0)
    assert scan.scan_layers == scan.state_layers == 36


def test_windows_cost_what_a_prompt_sees_of_them() -> None:
    rank = hardware(_plan("olmo-3-7b"))
    assert rank.window_flops_per_pair == 3 * rank.flops_per_pair
    cost = roofline(rank)._replace(pair=0.0, host=0.0, launch=0.0, launch_captured=0.0)
    unseen = cost._replace(window_pair=0.0)
    near, far = (step_seconds(cost, 8000, held, 1) - step_seconds(unseen, 8000, held, 1) for held in (8096, 80_000))
    assert near == far == pytest.approx(7999 * 4096 * cost.window_pair, rel=1e-3)


def test_attention_of_short_requests_costs_by_kv_head() -> None:
    assert hardware(_plan("llama-3.1-8b")).kv_heads == 32 * 8
    assert hardware(_plan("llama-3.1-8b", tensor_parallel_size=2)).kv_heads == 32 * 4
    assert hardware(_plan("mamba-codestral-7b")).kv_heads == 0


def test_the_fit_states_its_residuals_on_what_did_not_make_it() -> None:
    text = (DATA_FOLDER / "step_fit.json").read_text(encoding="utf-8")
    document = json.loads(text)
    rank = hardware(_plan("llama-3.1-8b"))
    assert roofline(rank) == roofline(rank, Efficiency(**document["fitted"]))
    left_out = document["left_out_models"]
    for name in ("dense", "experts", "state-space", "latent attention"):
        assert left_out[name]["gpu"]["median_error"] < 0.10
        assert left_out[name]["batches"]["median_error"] < 0.10
    assert max(abs(load["error"]) for load in document["whole_loads"]) < 0.20


def test_a_scheduler_that_is_not_asynchronous_adds_its_time_to_every_step() -> None:
    rank, server = hardware(_plan("llama-3.1-8b")), ServerEfficiency(sync_s=1e-3, sync_request_s=1e-5)
    hidden, added = (roofline(replace(rank, is_async=is_async), server=server) for is_async in (True, False))
    for tokens, running in ((8, 8), (4096, 8)):
        steps = (step_seconds(cost, tokens, 8 * 1000, running) for cost in (added, hidden))
        waited = next(steps) - next(steps)
        assert waited >= 1e-3
    assert not hardware(_plan("llama-3.1-8b", async_scheduling=False)).is_async


def test_real_text_chooses_fewer_experts_than_independent_tokens_would() -> None:
    rank = hardware(_plan("qwen3-30b-a3b"))
    even, real = (roofline(rank, server=ServerEfficiency(choice_exponent=power)) for power in (1.0, 0.9))
    assert [expert_read_seconds(real, n) / expert_read_seconds(even, n) for n in (1, 16, 8192)] == [
        pytest.approx(1.0),
        pytest.approx((1 - (1 - 8 / 128) ** 16**0.9) / (1 - (1 - 8 / 128) ** 16)),
        pytest.approx(1.0),
    ]


def test_cards_that_share_layers_send_each_other_every_token_twice_a_layer() -> None:
    one, two, four = (hardware(_plan("llama-3.1-8b", tensor_parallel_size=size)) for size in (1, 2, 4))
    assert (one.all_reduces, two.all_reduces) == (0, 2 * 32)
    # A ring of n cards: each sends (n - 1) / n of the sum twice; 4,096 values of 2 bytes.
    assert two.sent_bytes_per_token == 64 * 2 * (1 / 2) * 4096 * 2
    assert four.sent_bytes_per_token == 64 * 2 * (3 / 4) * 4096 * 2


def test_all_reduces_over_pcie_pass_from_card_to_card_and_take_longer_between_machines() -> None:
    server = ServerEfficiency(pcie_hop_s=1e-5, network_hop_s=7e-5, pcie_ratio=0.5)
    alone = roofline(hardware(_plan("llama-3.1-8b", gpu="l40s")), server=server).overhead
    for gpu, size, hop_s, link in (("l40s", 2, 1e-5, 32), ("rtx pro 6000", 8, 1e-5, 64), ("gb10", 2, 7e-5, 25)):
        rank = replace(hardware(_plan("llama-3.1-8b", gpu=gpu, tensor_parallel_size=size)), latency_ratio=1.98 / 2.52)
        cost = roofline(rank, server=server)
        assert cost.overhead - alone == pytest.approx(64 * hop_s * (size - 1))
        assert cost.exchange == pytest.approx(rank.sent_bytes_per_token / (0.5 * link * 1e9))


def test_kernels_take_as_long_as_the_clock_of_the_card_makes_them() -> None:
    slow, fast = (roofline(hardware(_plan("qwen3-0.6b", gpu=gpu))).overhead for gpu in ("a100 80gb", "rtx 5090"))
    assert slow / fast == pytest.approx(2.41 / 1.41)


@pytest.mark.parametrize(
    ("model", "vllm", "gpu", "has_them"),
    [
        ("gpt-oss-20b", "0.32.0", "h200", True),
        ("gpt-oss-20b", "0.32.0", "b200", False),
        ("gpt-oss-20b", "0.10.2", "b200", True),
        ("qwen3-30b-a3b-fp8", "0.32.0", "b200", True),
        ("QuantTrio/Qwen3-Coder-30B-A3B-Instruct-AWQ", "0.32.0", "rtx 5090", False),
    ],
)
def test_experts_in_marlin_or_in_one_kernel_quantize_no_activations(
    model: str, vllm: str, gpu: str, has_them: bool
) -> None:
    assert hardware(_plan(model, vllm, gpu)).has_quantized_experts == has_them


def test_sparse_latent_attention_is_of_the_class_of_latent_attention() -> None:
    assert model_class(hardware(_plan("deepseek-v3.2", tensor_parallel_size=8))) == "latent attention"


def test_the_exchange_between_cards_is_beside_computing_and_reading() -> None:
    cost = roofline(hardware(_plan("llama-3.1-8b", tensor_parallel_size=2)))
    without = cost._replace(exchange=0.0)
    assert step_seconds(cost, 8192, 8192, 1) == pytest.approx(
        step_seconds(without, 8192, 8192, 1) + 8192 * cost.exchange
    )


def test_a_step_of_decodes_is_never_quicker_than_the_host() -> None:
    small = roofline(hardware(_plan("qwen3-0.6b")), server=ServerEfficiency())
    assert step_seconds(small, 1, 100, 1) == pytest.approx(small.host + small.host_request)
    large = roofline(hardware(_plan("llama-3.1-8b")))
    assert step_seconds(large, 1, 100, 1) > large.host + large.host_request


def test_prompts_beyond_the_largest_graph_wait_for_the_host_to_start_each_kernel() -> None:
    cost = roofline(hardware(_plan("qwen3-0.6b")))
    inside, beyond = int(cost.captured), int(cost.captured) + 1
    assert step_seconds(cost, inside, inside, 1) == cost.launch_captured
    assert step_seconds(cost, beyond, beyond, 1) == cost.launch > cost.launch_captured


def test_without_graphs_every_step_is_started_kernel_by_kernel() -> None:
    cost = roofline(hardware(_plan("qwen3-0.6b", enforce_eager=True)))
    assert step_seconds(cost, 1, 100, 1) == pytest.approx(cost.launch + cost.host_request)


def test_starting_the_kernels_of_experts_is_a_share_of_starting_the_others() -> None:
    rank = hardware(_plan("qwen3-30b-a3b", enforce_eager=True))
    whole, half = (roofline(rank, server=ServerEfficiency(expert_launch_ratio=ratio)).launch for ratio in (1.0, 0.5))
    fitted = json.loads((DATA_FOLDER / "step_fit.json").read_text(encoding="utf-8"))["fitted"]
    assert whole - half == pytest.approx(0.5 * 48 * fitted["expert_launch_layer_s"])


def test_a_card_of_nvidia_without_nvidia_in_its_name_is_not_of_another_maker() -> None:
    nvidia, other = (_plan("qwen2.5-1.5b", gpu=gpu, dtype="float16") for gpu in ("t4", "mi300x"))
    assert why_other_maker(other) and not why_other_maker(nvidia)
    for plan, ratio in ((nvidia, 1.0), (other, 2.0)):
        steps = [roofline(hardware(plan), server=ServerEfficiency(other_maker_ratio=each)) for each in (2.0, 1.0)]
        slow, fast = (step_seconds(cost._replace(host=0.0, launch=0.0), 8192, 8192, 1) for cost in steps)
        assert slow == pytest.approx(ratio * fast)


def test_weights_and_activations_of_8_bits_compute_at_the_rate_of_fp8() -> None:
    whole, quantized = hardware(_plan("llama-3.1-8b")), hardware(_plan("llama-3.1-8b", quantization="fp8"))
    assert quantized.is_fp8
    assert quantized.flops_s == pytest.approx(2 * whole.flops_s, rel=0.01)


def test_the_command_says_what_was_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_step": 0, "prompt_len": 2000, "output_len": 30}\n', encoding="utf-8")
    assert main(["simulate", str(path), "--model", "gpt-oss-20b", "--gpu", "h200", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "from the plan (V1 engine)" in err
    assert [group["sliding_window"] for group in json.loads(out)["settings"]["groups"]] == [128, None]


def test_a_deployment_that_does_not_start_has_no_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_step": 0, "prompt_len": 20, "output_len": 30}\n', encoding="utf-8")
    assert main(["simulate", str(path), "--model", "qwen3-8b", "--gpu", "l4"]) == 2
    assert "does not start" in capsys.readouterr().err
