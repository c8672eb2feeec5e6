"""What another release does to a server: bytes, pool, flags, metrics, bugs, and the command that keeps its capacity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import known_releases, release
from legroom.planning.capacity_search import SearchAnswer
from legroom.planning.machine import Machine
from legroom.planning.plan import Target, plan
from legroom.planning.search_space import CapacityGoal
from legroom.planning.upgrades import kept_capacity as capacities
from legroom.planning.upgrades.changed_flags import args_on_release
from legroom.planning.upgrades.kept_capacity import kept_capacity
from legroom.planning.upgrades.kv_changes import kv_changes
from legroom.planning.upgrades.release_upgrade import upgrade
from legroom.render.upgrade_text import upgrade_text
from legroom.units import GIB
from legroom.vllm.args import ServeArgs
from legroom.vllm.parse import parse_flags

MODELS = ("llama-3.1-8b", "gemma-3-27b", "qwen3-30b-a3b", "deepseek-v2-lite", "qwen2.5-vl-7b", "qwen3.5-9b")
FLAGS = {
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.8,
    "kv_cache_memory_bytes": 10 * GIB,
}

NO_ANSWER = SearchAnswer(CapacityGoal(1), None, (), (), 0)


def made(words, old, new, card="h100", **options):
    args = parse_flags(words.split(), release(old)).args
    return upgrade(args, release(old), release(new), Machine(card), **options)


@given(
    model=st.sampled_from(MODELS),
    card=st.sampled_from(("h100", "rtx4090", "t4", "mi300x", "b200")),
    releases=st.tuples(st.sampled_from(known_releases()), st.sampled_from(known_releases())),
    flags=st.sets(st.sampled_from(sorted(FLAGS)), max_size=4),
    others=st.sampled_from((0, 3 * GIB)),
)
def test_the_bytes_of_the_changes_add_up_to_the_difference_of_the_kv_cache(model, card, releases, flags, others):
    args = ServeArgs(model, **{name: FLAGS[name] for name in flags})
    try:
        plans = [
            plan(Target(load(model), gpu(card), 4, release(version), held_by_others_bytes=others), args)
            for version in releases
        ]
    except LegroomError:
        return
    pools = [each.layout.kv_cache.bytes for each in plans]
    assert sum(change.bytes for change in kv_changes(*plans)) == pools[1] - pools[0]


def test_going_back_undoes_every_byte():
    there = made("vllm serve llama-3.1-8b", "0.19.1", "0.32.0").changes
    back = made("vllm serve llama-3.1-8b", "0.32.0", "0.19.1").changes
    assert [change.bytes for change in back] == [-change.bytes for change in there]


def test_a_new_default_is_named_as_the_reason_of_its_bytes():
    changes = {change.what: change for change in made("vllm serve llama-3.1-8b", "0.19.1", "0.20.0").changes}
    assert changes["share of the card"].why.endswith("from 0.9 to 0.92")
    assert changes["share of the card"].bytes == pytest.approx(0.02 * gpu("h100").total_bytes, abs=2)


@pytest.mark.parametrize(
    ("old", "new"), [("0.6.3", "0.6.4"), ("0.8.3", "0.8.4"), ("0.8.5", "0.9.0"), ("0.29.0", "0.30.0")]
)
def test_a_default_that_vllm_computes_is_not_shown_as_its_source(old, new):
    shown = " ".join(flag.why for flag in made("vllm serve qwen3-0.6b --enforce-eager", old, new).flags)
    assert not any(mark in shown for mark in (" if ", "not ModelConfig", "envs.", "()"))


def test_a_flag_that_is_given_does_not_change_with_the_default():
    told = made("vllm serve llama-3.1-8b --gpu-memory-utilization 0.9", "0.19.1", "0.20.0")
    assert "share of the card" not in {change.what for change in told.changes}
    assert "--gpu-memory-utilization" not in {flag.flag for flag in told.flags}


def test_graphs_that_come_to_be_counted_are_bytes_of_their_own():
    changes = {change.what: change.bytes for change in made("vllm serve llama-3.1-8b", "0.19.1", "0.20.0").changes}
    assert changes["CUDA-graph estimate"] < 0


def test_the_v1_engine_profiles_a_sampler_with_four_times_the_sequences():
    told = made("vllm serve qwen2.5-7b --max-model-len 16384", "0.7.3", "0.8.2", "rtx4090")
    largest = told.changes[0]
    assert (largest.what, largest.bytes < -3 * GIB) == ("sequences at once", True)
    assert "256 to 1,024" in largest.why


def test_the_same_release_changes_nothing():
    told = made("vllm serve llama-3.1-8b", "0.20.0", "0.20.0")
    assert (told.changes, told.flags, told.metrics, told.remarks) == ((), (), (), ())


def test_bytes_that_are_given_do_not_move():
    told = made("vllm serve llama-3.1-8b --kv-cache-memory-bytes 21474836480", "0.19.1", "0.32.0")
    assert told.changes == ()


GEMMA_4 = (
    "vllm serve google/gemma-4-31B-it-qat-w4a16-ct --max-model-len 131072 --max-num-batched-tokens 8192 "
    "--kv-cache-memory-bytes 53681848320"
)


def test_ten_times_the_tokens_of_gemma_4_are_another_meaning_of_the_printed_line():
    # vLLM issue 43308: 54,608 and 384,522 tokens, 2.93 requests with both
    told = made(GEMMA_4, "0.20.0", "0.21.0", "a100-80gb")
    pool = {row.what: (row.old, row.new) for row in told.pool}
    assert pool["tokens as vLLM prints them"][0] == 54608
    assert pool["tokens as vLLM prints them"][1] == pytest.approx(384522, rel=1e-3)
    assert pool["longest requests at once"][0] == pool["longest requests at once"][1] == pytest.approx(2.93, abs=0.01)
    assert len(told.remarks) > 0
    assert "54,608" in told.remarks[0]


def test_the_printed_line_of_a_plain_model_needs_no_remark():
    assert made("vllm serve llama-3.1-8b", "0.20.0", "0.21.0").remarks == ()


def test_a_request_that_is_counted_larger_is_remarked():
    # vLLM issue 49878: one request of Gemma 4 takes 40 % more with 0.26
    words = "vllm serve google/gemma-4-31b-it --kv-cache-memory-bytes 52613349376 --max-num-batched-tokens 32768"
    told = made(words, "0.25.1", "0.26.0", "rtx pro 6000")
    assert any("262,144 tokens" in remark for remark in told.remarks)


def test_a_removed_flag_is_named_and_left_out_of_the_command():
    told = made("vllm serve qwen2.5-7b --max-model-len 8192 --device cuda", "0.8.5", "0.12.0")
    assert next((flag.flag, flag.kind) for flag in told.flags) == ("--device", "refused")
    assert "--device" not in told.kept.command


def test_a_renamed_flag_keeps_its_value_under_its_new_name():
    words = ["vllm", "serve", "x", "--chat-template-text-format", "string"]
    args = args_on_release(parse_flags(words, release("0.6.4")).args, release("0.8.5"))
    assert args.others == ("--chat-template-content-format", "string")


def test_speculative_flags_of_an_old_release_become_the_config_of_a_new_one():
    words = "vllm serve llama-3.1-8b --speculative-model [ngram] --num-speculative-tokens 4 --ngram-prompt-lookup-max 4"
    args = args_on_release(parse_flags(words.split(), release("0.6.6")).args, release("0.12.0"))
    assert args.speculative_config["num_speculative_tokens"] == 4


def test_a_variable_that_is_no_longer_read_is_named():
    args = ServeArgs("llama-3.1-8b", env={"VLLM_USE_V1": "0"})
    told = upgrade(args, release("0.10.0"), release("0.32.0"), Machine("h100"))
    assert ("VLLM_USE_V1", "unread_variable") in [(flag.flag, flag.kind) for flag in told.flags]


def test_renamed_metrics_come_with_their_new_names():
    gone = {metric.name: metric.instead for metric in made("vllm serve llama-3.1-8b", "0.10.0", "0.32.0").metrics}
    assert gone["vllm:gpu_cache_usage_perc"] == "vllm:kv_cache_usage_perc"
    assert gone["vllm:time_per_output_token_seconds"] == "vllm:inter_token_latency_seconds"


def test_bugs_that_end_and_begin_are_those_the_server_sets_off():
    told = made("vllm serve llama-3.1-8b", "0.26.0", "0.32.0")
    assert "v2_graphs_uncounted" in {bug.id for bug in told.bugs_ended}
    assert all(bug.is_in(release("0.32.0")) for bug in told.bugs_begun)


def test_the_command_keeps_todays_requests_and_headroom():
    told = made("vllm serve llama-3.1-8b --max-model-len 32768", "0.26.0", "0.32.0", "h200")
    kept = told.kept
    assert kept.keeps_requests
    assert kept.keeps_headroom
    assert kept.plan.memory.kv.max_concurrency >= told.old.memory.kv.max_concurrency * 0.999
    assert told.new.memory.kv.max_concurrency < told.old.memory.kv.max_concurrency
    assert list(kept.flags) == ["gpu_memory_utilization"]


def test_a_tight_command_is_not_named_where_the_unchanged_one_fits_and_holds_more():
    told = made("vllm serve qwen3-32b --max-model-len 30720", "0.10.2", "0.32.0", "a100-80gb")
    assert told.kept.flags == {}
    assert told.kept.plan.verdict == "fits"
    assert told.kept.keeps_requests


def test_a_command_that_already_keeps_all_stays_as_it_is():
    assert made("vllm serve qwen2.5-7b --max-model-len 16384", "0.7.3", "0.12.0", "rtx4090").kept.flags == {}


def test_where_no_change_is_surer_to_start_the_command_stays_as_it_is():
    told = made("vllm serve Qwen/Qwen3-32B --max-model-len 36864", "0.10.2", "0.32.0", "a100-80gb")
    assert told.kept.plan.verdict == "tight"
    assert told.kept.keeps_requests and told.kept.flags == {}


def test_a_default_that_takes_the_cache_away_is_set_back_to_todays():
    told = made("vllm serve qwen2.5-7b --max-model-len 16384", "0.7.3", "0.8.2", "rtx4090")
    assert told.kept.keeps_requests
    assert told.kept.flags["max_num_seqs"] == 256


def test_a_lower_default_of_sequences_is_held_at_todays():
    old = plan(Target(load("llama-3.1-8b"), gpu("h200"), 1, release("0.32.0")), ServeArgs("llama-3.1-8b"))
    new = plan(Target(load("llama-3.1-8b"), gpu("h200"), 1, release("0.7.3")), ServeArgs("llama-3.1-8b"))
    assert new.settings.max_num_seqs < old.settings.max_num_seqs
    assert kept_capacity(old, new).flags["max_num_seqs"] == old.settings.max_num_seqs


def test_a_search_is_for_the_requests_of_all_data_parallel_engines(monkeypatch):
    goals = []
    monkeypatch.setattr(capacities, "_flag_choices", lambda old, new: iter(()))
    monkeypatch.setattr(capacities, "search_flags", lambda targets, args, goal, **_: goals.append(goal) or NO_ANSWER)
    args = ServeArgs("llama-3.1-8b", data_parallel_size=2)
    old, new = (plan(Target(load(args.model), gpu("h100"), 2, release(name)), args) for name in ("0.20.0", "0.32.0"))
    kept_capacity(old, new)
    assert [goal.concurrency for goal in goals] == [2 * old.memory.kv.max_concurrency]


def test_what_cannot_be_kept_is_not_claimed():
    told = made("vllm serve qwen2.5-32b --tensor-parallel-size 4 --max-num-seqs 1024", "0.7.3", "0.8.0", "rtx4090")
    assert not told.new.starts
    assert not told.kept.keeps_requests or told.kept.plan.starts


def test_a_server_that_does_not_start_today_has_no_capacity_to_keep():
    told = made("vllm serve qwen3-14b", "0.20.0", "0.21.0", "l4")
    assert told.kept.flags == {}
    assert not told.kept.keeps_requests


def test_an_encoder_without_a_kv_cache_moves_no_byte_of_one():
    told = made("vllm serve BAAI/bge-m3", "0.19.1", "0.32.0")
    assert (told.changes, told.remarks) == ((), ())


def test_every_release_between_is_walked_in_order():
    steps = made("vllm serve llama-3.1-8b", "0.18.0", "0.21.0", every_release=True).steps
    assert [step.release.version for step in steps] == [
        "0.18.0",
        "0.18.1",
        "0.19.0",
        "0.19.1",
        "0.20.0",
        "0.20.1",
        "0.20.2",
        "0.21.0",
    ]
    assert [step.release.version for step in steps if step.changes] == ["0.20.0", "0.21.0"]


def test_the_steps_of_a_walk_add_up_too():
    told = made("vllm serve llama-3.1-8b", "0.10.0", "0.32.0", every_release=True)
    moved = sum(change.bytes for step in told.steps for change in step.changes)
    assert moved == told.new.layout.kv_cache.bytes - told.old.layout.kv_cache.bytes


def test_a_release_in_between_that_refuses_the_command_is_a_row_of_its_own(monkeypatch):
    from legroom.planning.upgrades import release_upgrade as module

    plan_it = module.plan

    def refusing(target, args):
        if target.release.version == "0.20.1":
            raise LegroomError("not this one")
        return plan_it(target, args)

    monkeypatch.setattr(module, "plan", refusing)
    steps = {
        step.release.version: step
        for step in made("vllm serve llama-3.1-8b", "0.20.0", "0.21.0", every_release=True).steps
    }
    assert steps["0.20.1"].plan is None
    assert "not this one" in steps["0.20.1"].refused
    assert steps["0.20.2"].plan is not None


def test_a_release_that_refuses_the_command_is_the_answer_no():
    with pytest.raises(LegroomError) as refused:
        made("vllm serve llama-3.1-8b --max-model-len -1", "0.32.0", "0.10.0")
    assert refused.value.exit_code == 1
    assert refused.value.message.startswith("vLLM 0.10.0 ")


@pytest.mark.parametrize(
    ("words", "old", "new", "said"),
    [
        ("--long-prefill-token-threshold 1000000", "0.25.1", "0.32.0", "vLLM 0.32.0 does not take this command: long_"),
        ("--convert embed", "0.20.2", "0.32.0", "vLLM 0.20.2 does not take this command: AssertionError"),
        ("--convert embed", "0.32.0", "0.20.2", "vLLM 0.20.2 does not take this command: AssertionError"),
        ("--max-num-partial-prefills 2", "0.20.2", "0.32.0", "; 0.32.0 takes it with the flags that it has"),
        ("--enable-eplb", "0.28.0", "0.32.0", "; nor does 0.32.0: enable_expert_parallel must be True"),
    ],
)
def test_a_setting_that_one_of_the_releases_refuses_is_told(words, old, new, said):
    with pytest.raises(LegroomError) as refused:
        made(f"vllm serve llama-3.1-8b {words}", old, new)
    assert refused.value.exit_code == 1
    assert said in refused.value.message


def test_a_new_release_that_takes_what_the_old_one_refused_is_told():
    with pytest.raises(LegroomError, match=r"; 0\.32\.0 takes it"):
        made("vllm serve llama-3.1-8b --convert embed", "0.20.2", "0.32.0")
    told = made("vllm serve gpt-oss-20b --quantization mxfp8", "0.20.2", "0.32.0")
    assert told.new.starts
    assert "With 0.20.2 the same command does not start: Setting `quantization_config`" in " ".join(
        upgrade_text(told).split()
    )
