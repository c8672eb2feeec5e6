"""The four situations, each answered with flags that the plan computes from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legroom import plan
from legroom.live.detectors.base import DetectorFinding
from legroom.live.metrics.sample import EngineSample, Histogram, Sample
from legroom.live.metrics.window import Window
from legroom.live.remedies import remedies_for, traffic
from legroom.planning.plan_document import PlanDocument, plan_from_json
from legroom.planning.plan_json import replan
from legroom.units import GIB


@pytest.fixture(scope="module")
def document() -> PlanDocument:
    made = plan("llama-3.1-8b", gpu="h100", vllm="0.32.0", max_model_len=8192, gpu_memory_utilization=0.6)
    return plan_from_json(made.json())


def window(document: PlanDocument, prompt: int = 3000, answer: int = 1000) -> Window:
    """A server of the planned pool whose requests reach 4,000 tokens."""
    seen = Window("http://host:8000")
    kv = document.kv
    for number in range(20):
        ended = 10.0 * number
        ttft = Histogram((1.0, float("inf")), (ended, ended), ended)
        engine = EngineSample(
            "m",
            "0",
            kv_use=0.99,
            running=60.0,
            waiting=40.0,
            prompt_tokens=prompt * ended,
            generation_tokens=answer * ended,
            finished=ended,
            ttft=ttft,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
        )
        seen.add(Sample(5.0 * number, "http://host:8000", (engine,)))
    return seen


def finding(kind: str, **numbers: float) -> DetectorFinding:
    return DetectorFinding(kind, "http://host:8000", "warning", "t", "r", 0.0, 1.0, numbers)


def test_traffic_is_read_from_the_servers_own_counters(document: PlanDocument) -> None:
    seen = traffic(window(document))
    assert (seen.prompt_tokens, seen.answer_tokens, seen.request_tokens) == (3000, 1000, 4000)
    assert seen.fitting_requests == document.kv.num_blocks * 16 // 4000


def test_a_data_parallel_server_is_answered_for_one_of_its_engines(document: PlanDocument) -> None:
    seen, single = Window("http://host:8000"), window(document)
    for step in range(20):
        ended = 10.0 * step
        ttft = Histogram((1.0, float("inf")), (ended, ended), ended)
        engines = tuple(
            EngineSample(
                "m",
                str(rank),
                running=60.0,
                waiting=40.0,
                prompt_tokens=3000 * ended,
                generation_tokens=1000 * ended,
                finished=ended,
                ttft=ttft,
                num_blocks=document.kv.num_blocks,
                block_size=16,
            )
            for rank in range(4)
        )
        seen.add(Sample(5.0 * step, "http://host:8000", engines))
    assert (traffic(seen).fitting_requests, traffic(seen).at_once) == (
        traffic(single).fitting_requests,
        traffic(single).at_once,
    )
    (best, *_) = remedies_for(finding("pool_pressure"), seen, document)
    assert best.flags == remedies_for(finding("pool_pressure"), single, document)[0].flags
    assert "of each engine" in best.why


def test_the_tokens_that_vllm_names_are_the_pool(document: PlanDocument) -> None:
    # Where two groups of layers share the blocks, every token takes two.
    assert EngineSample("m", "0", num_blocks=1000, block_size=16, size_tokens=8000).pool_tokens == 8000


def test_a_plans_document_is_read_back_as_the_same_plan(document: PlanDocument) -> None:
    again = replan(document)
    assert again.memory.kv.num_blocks == document.kv.num_blocks
    assert again.layout.headroom_bytes == document.layout.headroom_bytes


@pytest.mark.parametrize("kind", ["pool_pressure", "preemption_thrash"])
def test_a_burst_is_answered_with_the_batch_that_the_pool_holds_and_with_larger_pools(
    document: PlanDocument, kind: str
) -> None:
    remedies = remedies_for(finding(kind), window(document), document)
    holds = document.kv.num_blocks * 16 // 4000
    assert remedies[0].flags == {"max_num_seqs": holds}
    assert "--max-num-seqs" in remedies[0].command and str(holds) in remedies[0].command
    larger = next(remedy for remedy in remedies if "gpu_memory_utilization" in remedy.flags)
    assert larger.flags["gpu_memory_utilization"] > 0.6
    # 100 requests of 4,000 tokens: the first share of the card whose pool holds them.
    pools = replan(document)
    again = plan("llama-3.1-8b", gpu="h100", vllm="0.32.0", max_model_len=8192, **larger.flags).json()
    assert again["kv"]["tokens"] >= 400_000 > pools.memory.kv.tokens


def test_a_backlog_with_room_in_the_pool_is_answered_with_a_larger_batch(document: PlanDocument) -> None:
    small = replace(document, command=(*document.command, "--max-num-seqs", "16"))
    remedies = remedies_for(finding("queue_backlog", kv_use=0.3), window(document, 300, 100), small)
    assert remedies[0].flags == {"max_num_seqs": 100}


def test_long_prompts_are_answered_with_the_guard(document: PlanDocument) -> None:
    seen = finding("long_prompt_burst", mean_prompt_tokens=30_000, pool_tokens=270_000)
    remedies = remedies_for(seen, window(document), document)
    assert any("9 such prompts" in remedy.why for remedy in remedies)


def test_creep_is_answered_with_the_room_that_lasts_a_week(document: PlanDocument) -> None:
    headroom = document.layout.headroom_bytes
    slow = remedies_for(finding("memory_creep", bytes_per_h=headroom / 400), window(document), document)
    assert "once a week" in slow[-1].why
    fast = remedies_for(
        finding("memory_creep", bytes_per_h=headroom / 168 + GIB / 16, hours_left=90), window(document), document
    )
    assert fast[0].steps == ("restart within 45 h, drained: legroom watch --daemon --config watch.toml --act restart",)
    wanted = fast[1].flags["gpu_memory_utilization"]
    again = plan("llama-3.1-8b", gpu="h100", vllm="0.32.0", max_model_len=8192, gpu_memory_utilization=wanted).json()
    assert again["layout"]["headroom_bytes"] >= headroom + 10 * GIB
    assert wanted > 0.6 - 0.16


def test_a_useless_prefix_cache_is_answered_with_what_turning_it_off_changes(document: PlanDocument) -> None:
    remedies = remedies_for(finding("prefix_cache_waste", hit_rate=0.01), window(document), document)
    assert remedies[0].flags == {"enable_prefix_caching": False}
    assert f"stays at {document.kv.tokens:,} tokens" in remedies[0].why
    assert "--no-enable-prefix-caching" in remedies[0].command


def test_a_crash_loop_of_a_plan_that_does_not_fit_is_answered_with_flags_that_do() -> None:
    hopeless = plan_from_json(plan("llama-3.1-8b", gpu="rtx 4090", vllm="0.32.0").json())
    assert hopeless.verdict == "does_not_fit"
    remedies = remedies_for(finding("crash_loop"), Window("x"), hopeless)
    assert remedies[0].flags and remedies[0].command
    assert replan(replace(hopeless, command=remedies[0].command)).verdict != "does_not_fit"


def test_a_crash_loop_of_a_plan_that_fits_is_sent_to_the_log(document: PlanDocument) -> None:
    (remedy,) = remedies_for(finding("crash_loop"), Window("x"), document)
    assert remedy.steps == ("legroom diagnose LOG",) and "the plan fits" in remedy.why


def test_fragmentation_is_answered_by_what_this_server_can_take(document: PlanDocument) -> None:
    (remedy,) = remedies_for(finding("fragmentation", held_bytes=5.0 * GIB), Window("x"), document)
    assert remedy.env == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    two_gpus = plan("llama-3.1-8b", gpu="h100", gpus=2, vllm="0.32.0", tensor_parallel_size=2).json()
    (two,) = remedies_for(finding("fragmentation", held_bytes=5.0 * GIB), Window("x"), plan_from_json(two_gpus))
    assert not two.env and "custom all-reduce" in two.why


@pytest.mark.parametrize("kind", ["pool_pressure", "memory_creep", "prefix_cache_waste", "crash_loop"])
def test_without_a_plan_it_says_which_command_makes_one(kind: str) -> None:
    remedies = remedies_for(finding(kind), Window("x"))
    assert any("legroom plan MODEL" in step for remedy in remedies for step in remedy.steps)


def test_a_plan_that_cannot_be_read_is_said() -> None:
    remedies = remedies_for(finding("pool_pressure"), Window("x"), PlanDocument(model="x"))
    assert "not be read" in remedies[-1].why


@pytest.mark.parametrize("kind", ["stuck_engine", "plan_drift", "no_traffic", "unreachable", "something_new"])
def test_every_kind_has_an_answer(kind: str) -> None:
    remedies = remedies_for(finding(kind), Window("x"))
    assert remedies and remedies[0].why and remedies[0].to_json()["why"]
