"""What the search for flags prefers, and what it says where no setting holds the load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.cli.main import main
from legroom.simulation.fast.rows import StepCost
from legroom.simulation.flag_search import (
    Candidate,
    Choice,
    ReplayTask,
    best_outcome,
    card_that_holds,
    choose,
    frontier,
    promising_candidates,
    replay_candidate,
    replicas_that_hold,
)
from legroom.simulation.replay_outcome import Goal, ReplayOutcome, outcome_of
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.trace import Trace
from legroom.simulation.trace_replay import simulate
from legroom.simulation.traces import synthetic
from legroom.sweeps import ProcessExecutor


def _outcome(seats: int = 1, **figures: float) -> ReplayOutcome:
    given = {
        "num_blocks": 100,
        "finished": 10,
        "rejected": 0,
        "preemptions": 0,
        "throughput": 100.0,
        "goodput": 100.0,
        "good_ratio": 1.0,
        "first_token_p99": 1.0,
        "latency_p99": 10.0,
        "wait_growth_ratio": 0.0,
        "keeps_up": True,
        "peak_ratio": 0.5,
        "hit_ratio": 0.0,
        **figures,
    }
    return ReplayOutcome({"max_num_seqs": seats}, **given)  # type: ignore[arg-type]


def _arrivals(every: float, count: int = 60) -> Trace:
    trace = Trace(in_seconds=True)
    for i in range(count):
        trace.add(100, 50, i * every)
    return trace


def _candidates(*seats: int, blocks: int = 400) -> list[Candidate]:
    return [
        Candidate({"max_num_seqs": n}, SchedulerSettings(blocks, max_num_seqs=n), StepCost(0.1, 0.0, 0.0, 0.0))
        for n in seats
    ]


def _search(trace: Trace, candidates: list[Candidate], goal: Goal | None = None) -> Choice:
    return choose(trace, candidates, goal or Goal(), executor=ProcessExecutor(1))


def test_a_setting_that_preempts_and_serves_more_is_better_than_one_that_does_not() -> None:
    timid = _outcome(8, throughput=97.0, goodput=97.0, keeps_up=False, latency_p99=1118.0)
    bold = _outcome(32, throughput=182.0, goodput=182.0, keeps_up=False, latency_p99=557.0, preemptions=67)
    assert best_outcome([timid, bold], Goal()) is bold


def test_of_settings_that_keep_up_the_shortest_p99_is_best_whatever_the_last_answer_takes() -> None:
    late_end = _outcome(8, throughput=90.0, goodput=90.0, latency_p99=10.0)
    early_end = _outcome(16, throughput=99.0, goodput=99.0, latency_p99=14.0)
    assert best_outcome([early_end, late_end], Goal()) is late_end


def test_a_setting_that_keeps_up_is_better_than_one_that_does_not() -> None:
    keeps_up = _outcome(8, throughput=50.0, goodput=50.0, latency_p99=60.0)
    falls_behind = _outcome(16, throughput=99.0, goodput=99.0, keeps_up=False)
    assert best_outcome([falls_behind, keeps_up], Goal()) is keeps_up


def test_of_settings_that_differ_by_less_than_a_percent_the_one_with_fewer_preemptions_is_best() -> None:
    often, seldom = _outcome(32, preemptions=9, latency_p99=9.95), _outcome(16, preemptions=2)
    assert best_outcome([often, seldom], Goal()) is seldom


def test_of_a_batch_the_highest_throughput_is_best() -> None:
    slow, fast = _outcome(8, goodput=50.0, latency_p99=5.0), _outcome(16, goodput=99.0, latency_p99=9.0)
    assert best_outcome([slow, fast], Goal(), arrives_at_once=True) is fast


def test_goodput_counts_only_requests_within_the_latency_asked_for() -> None:
    trace = Trace(in_seconds=True)
    trace.add(10, 5, 0.0)
    trace.add(10, 15, 0.0)
    timeline = simulate(trace, SchedulerSettings(100), cost=StepCost(0.1, 0.0, 0.0, 0.0))
    outcome = outcome_of({}, [timeline], Goal(latency_p99=1.0))
    assert outcome.throughput == pytest.approx(20 / 1.5)
    assert outcome.goodput == pytest.approx(5 / 1.5)
    assert outcome.good_ratio == 0.5


def test_a_server_that_is_sent_more_than_it_serves_does_not_keep_up() -> None:
    # One request at a time, 5 s each: one a second is five times too many.
    choice = _search(_arrivals(1.0), _candidates(1))
    assert not choice.holds
    assert choice.best.wait_growth_ratio == pytest.approx(4.0, rel=0.02)


def test_bursts_that_are_worked_off_do_not_count_as_falling_behind() -> None:
    trace = synthetic.read("bursts burst=10 rate=0.5 requests=200 prompt=100 output=20")
    choice = _search(trace, _candidates(2))
    assert choice.best.first_token_p99 > 5
    assert choice.holds


def test_a_load_that_ends_before_its_answers_is_said_not_to_be_sustained_if_it_is_not() -> None:
    # Eight seats and answers of 5 s serve 1.6 requests a second; the eight of this load find a seat each.
    choice = _search(_arrivals(0.25, 8), _candidates(8))
    assert choice.holds
    assert choice.sustained is False
    assert _search(_arrivals(0.7, 8), _candidates(8)).sustained is True


def test_a_load_that_lasts_longer_than_its_answers_is_not_repeated() -> None:
    assert _search(_arrivals(1.0), _candidates(64)).sustained is None


def test_a_repeated_load_keeps_its_rate_and_tells_its_requests_apart() -> None:
    longer = _arrivals(2.0, 5).repeated(3)
    assert list(longer.checked().arrivals) == [2.0 * i for i in range(15)]


def test_requests_that_all_come_at_once_have_no_rate_to_keep_up_with() -> None:
    assert _search(_arrivals(0.0), _candidates(1)).holds


def test_a_p99_above_the_one_asked_for_is_not_held() -> None:
    trace = _arrivals(10.0)
    assert _search(trace, _candidates(1), Goal(latency_p99=5.5)).holds
    assert not _search(trace, _candidates(1), Goal(latency_p99=4.5)).holds


def test_the_frontier_leaves_out_what_only_preempts_less() -> None:
    choice = _search(_arrivals(0.1, 100), _candidates(2, 8, 32, blocks=80))
    assert [outcome.flags for outcome in choice.frontier] == [choice.best.flags]
    assert choice.best.preemptions > 0


def test_the_frontier_leaves_out_what_serves_nothing_within_the_limits() -> None:
    late, useful = _outcome(1, goodput=0.0, first_token_p99=0.5), _outcome(2, goodput=0.3)
    assert frontier([late, useful]) == [useful]
    assert frontier([late]) == [late]


def test_replicas_share_the_load_and_every_request_is_served_once() -> None:
    trace = _arrivals(1.0)
    shares = list(trace.shares(7, 16))
    assert len(shares) == 7
    assert sorted(name for share in shares for name in share.ids or ()) == sorted(f"r{i}" for i in range(60))


def test_of_many_replicas_a_sample_stands_for_all() -> None:
    trace = _arrivals(0.1, 400)
    assert [len(share) for share in trace.shares(40, 4)] == [10] * 4
    assert replay_candidate(ReplayTask(trace, Goal(), replicas=40), _candidates(1)[0]).finished == 400


def test_as_many_replicas_are_named_as_the_load_needs() -> None:
    # 5 s a request, one at a time, one a second: five servers, busy all the time.
    trace = _arrivals(1.0)
    candidates = _candidates(1)
    choice = _search(trace, candidates)
    fleet = replicas_that_hold(trace, choice, "l4", promising_candidates(trace, choice, candidates))
    assert fleet is not None
    assert (fleet.gpu, fleet.replicas) == ("l4", 5)
    assert choice.goal.is_met(fleet.outcome)


def test_no_number_of_replicas_shortens_a_request_that_is_served_alone() -> None:
    trace, candidates = _arrivals(1.0), _candidates(1, 4)
    choice = _search(trace, candidates, Goal(latency_p99=1.0))
    assert replicas_that_hold(trace, choice, "", promising_candidates(trace, choice, candidates)) is None


def test_the_first_card_that_holds_the_load_alone_is_named() -> None:
    trace = _arrivals(1.0)
    choice = _search(trace, _candidates(1))
    fleet = card_that_holds(trace, choice, [("small", _candidates(2)), ("none", []), ("large", _candidates(64))])
    assert fleet is not None
    assert (fleet.gpu, fleet.replicas) == ("large", 1)


def test_the_few_settings_tried_further_differ_in_how_many_requests_run_at_once() -> None:
    trace, candidates = _arrivals(0.1), _candidates(2, 4, 8, 16, 32, 64)
    few = promising_candidates(trace, _search(trace, candidates), candidates)
    assert len({candidate.settings.max_num_seqs for candidate in few}) == len(few) == 4


# The command

_LOAD = "poisson rate=0.1 requests=12 prompt=200 output=50"
_FEW_SETTINGS = [
    "--max-num-batched-tokens",
    "2048",
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--gpu-memory-utilization",
    "0.9",
    "--workers",
    "1",
    "--json",
]


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, object]]:
    code = main(["simulate", *words, "--choose"])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_has_the_hub_id_and_every_flag_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _run(
        capsys,
        "--synthetic",
        _LOAD,
        "--model",
        "qwen3-8b",
        "--gpu",
        "l4",
        "--max-model-len",
        "8192",
        "--block-size",
        "16",
        "--scheduling-policy",
        "priority",
        "--no-scheduler-reserve-full-isl",
        "--kv-cache-dtype",
        "fp8",
        "--served-model-name",
        "chat",
        *_FEW_SETTINGS,
    )
    assert code == 0
    command = document["command"]
    assert isinstance(command, list)
    assert command[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    line = " ".join(command)
    for flag in (
        "--max-model-len 8192",
        "--block-size 16",
        "--scheduling-policy priority",
        "--kv-cache-dtype fp8",
        "--no-scheduler-reserve-full-isl",
        "--served-model-name chat",
        "--max-num-batched-tokens 2048",
        "--gpu-memory-utilization 0.9",
        "--enable-prefix-caching",
        "--max-num-seqs",
    ):
        assert line.count(flag) == 1, flag


def test_flags_of_a_command_line_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    line = "vllm serve Qwen/Qwen3-8B --max-num-seqs 48 --max-model-len 4096"
    _, document = _run(
        capsys, "--synthetic", _LOAD, "--command", line, "--gpu", "l4", *_FEW_SETTINGS, "--block-size", "16"
    )
    assert document["tried"] == 1
    assert "--max-num-seqs 48" in " ".join(document["command"])  # type: ignore[arg-type]


def test_a_load_that_no_setting_holds_is_the_answer_no_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    load = "poisson rate=4 requests=60 prompt=1200 output=200"
    words = ["--synthetic", load, "--model", "qwen3-8b", "--gpu", "l4", "--max-model-len", "4096", *_FEW_SETTINGS]
    code, document = _run(capsys, *words)
    assert code == 1
    assert document["holds"] is False
    replicas, card = document["would_hold"]  # type: ignore[misc]
    assert replicas["gpu"] == "l4"
    assert replicas["replicas"] > 1
    assert card["replicas"] == 1
    assert card["command"][:3] == replicas["command"][:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]


def test_a_card_that_only_the_file_names_is_the_one_that_larger_ones_are_compared_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(
        "apiVersion: v1\nkind: Pod\nspec:\n  nodeSelector: {nvidia.com/gpu.product: NVIDIA-L4}\n"
        "  containers:\n  - name: vllm\n    image: vllm/vllm-openai:v0.11.2\n"
        "    args: [--model=Qwen/Qwen3-8B, --max-model-len=4096]\n"
        "    resources: {limits: {nvidia.com/gpu: '1'}}\n",
        encoding="utf-8",
    )
    load = "poisson rate=4 requests=60 prompt=1200 output=200"
    code, document = _run(capsys, "--synthetic", load, "--file", str(manifest), *_FEW_SETTINGS)
    assert code == 1
    replicas, card = document["would_hold"]  # type: ignore[misc]
    assert (replicas["gpu"], card["replicas"]) == ("NVIDIA-L4", 1)


def test_the_text_says_what_is_missing_and_what_would_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_step": i, "prompt_len": 40, "output_len": 30} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["--max-num-batched-tokens", "512", "--block-size", "16", "--workers", "1"]
    assert main(["simulate", str(path), "--blocks", "40", "--choose", *words]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "1.03 requests" in shown
    assert "replicas" in shown


def test_a_latency_that_cannot_be_reached_is_said_to_be_that_of_a_request_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_step": 40 * i, "prompt_len": 40, "output_len": 30} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["--max-num-batched-tokens", "512", "--block-size", "16", "--workers", "1", "--slo-latency", "10"]
    assert main(["simulate", str(path), "--blocks", "40", "--choose", *words]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "is 29 steps" in shown


def test_a_time_per_token_is_a_goal_of_the_search_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival": i, "prompt_len": 40, "output_len": 30} for i in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["--max-num-batched-tokens", "512", "--block-size", "16", "--workers", "1", "--step-ms", "20"]
    assert main(["simulate", str(path), "--blocks", "40", "--choose", *words, "--tpot", "10"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "0.02 s" in shown


def test_a_search_with_a_tier_finds_more_hits_than_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"arrival": 2 * i, "prompt_len": 160, "output_len": 4, "prefix_id": i % 4, "prefix_len": 144} for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["simulate", str(path), "--blocks", "14", "--choose", "--workers", "1", "--step-ms", "20", "--json"]
    words += ["--max-num-batched-tokens", "512", "--block-size", "16", "--enable-prefix-caching"]
    main(words)
    without = json.loads(capsys.readouterr().out)
    main([*words, "--tier", "cpu=200blocks"])
    with_tier = json.loads(capsys.readouterr().out)
    assert with_tier["chosen"]["hit_ratio"] > without["chosen"]["hit_ratio"]
    assert with_tier["tried"] == without["tried"]


def test_milliseconds_are_no_goal_of_a_trace_in_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_step": 1, "prompt_len": 40, "output_len": 30}\n', encoding="utf-8")
    assert main(["simulate", str(path), "--blocks", "40", "--choose", "--tpot", "10"]) == 2
    assert "counts steps" in capsys.readouterr().err


def test_an_interruption_while_replicas_are_tried_keeps_the_best_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_step": i, "prompt_len": 40, "output_len": 30} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("legroom.simulation.flag_search.replicas_that_hold", interrupted)
    words = ["--max-num-batched-tokens", "512", "--block-size", "16", "--workers", "1"]
    assert main(["simulate", str(path), "--blocks", "40", "--choose", *words]) == 130
    assert "was not looked for: the search was interrupted" in capsys.readouterr().out


def test_a_load_of_requests_that_are_all_too_long_is_said_to_be_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"arrival_step": 0, "prompt_len": 400, "output_len": 30}) + "\n", encoding="utf-8")
    words = ["--max-num-batched-tokens", "512", "--block-size", "16", "--workers", "1", "--max-model-len", "100"]
    assert main(["simulate", str(path), "--blocks", "40", "--choose", *words]) == 1
    shown = capsys.readouterr().out
    assert "No setting serves any request of this load" in shown
    assert "More replicas" not in shown
