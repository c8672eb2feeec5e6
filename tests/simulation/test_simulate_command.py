from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from legroom.cli.main import main
from legroom.live.thresholds import Thresholds
from legroom.simulation.replay_outcome import LONG_QUEUE_S


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    rows = [{"id": f"q{i}", "arrival_step": i, "prompt_len": 40, "output_len": 30} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_json_is_the_documented_one(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", trace, "--blocks", "20", "--max-num-seqs", "8", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    documented = {
        "steps",
        "finished",
        "preemptions",
        "recomputed_tokens",
        "peak_blocks",
        "peak_running",
        "rejected",
        "wasted_slot_ratio",
        "queue",
    }
    assert documented <= set(document)
    assert {"p50_steps", "p99_steps", "max"} <= set(document["queue"])
    assert document["finished"] == 12


@pytest.mark.parametrize(
    ("blocks", "every", "verdict", "status"),
    [("400", 20, "holds", 0), ("7", 45, "holds_with_waiting", 0), ("20", 1, "falls_behind", 1)],
)
def test_the_verdict_says_whether_the_load_is_held(
    blocks: str, every: int, verdict: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.jsonl"
    # Two requests at a time: a pool of 6 usable blocks holds one of them.
    rows = [{"id": f"q{i}", "arrival_step": i // 2 * every, "prompt_len": 40, "output_len": 20} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["simulate", str(path), "--blocks", blocks, "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == verdict
    assert (document["load"]["served"] < document["load"]["arriving"] / 2) == (verdict == "falls_behind")


def test_a_server_that_refuses_requests_does_not_hold_the_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    rows = [
        {"id": f"q{i}", "arrival_step": 20 * i, "prompt_len": 40 + i % 2 * 400, "output_len": 20} for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["simulate", str(path), "--blocks", "400", "--max-model-len", "200", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "turns_away"


def test_waits_in_steps_count_from_arrival_as_those_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    mix = "poisson rate=40 prompt=500 output=100 requests=100"
    assert main(["simulate", "--synthetic", mix, "--blocks", "200", "--step-ms", "20", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    step_s = document["seconds"]["makespan_s"] / document["steps"]
    assert document["first_token"]["p50_steps"] == pytest.approx(
        document["seconds"]["first_token_s"]["p50"] / step_s, abs=1
    )


def test_a_timeline_has_a_line_for_every_step(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "steps.jsonl"
    main(["simulate", trace, "--blocks", "20", "--timeline", str(out), "--json"])
    steps = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert list(steps[0]) == ["step", "scheduled", "preempted", "finished", "running", "waiting", "free_blocks"]
    assert steps[0]["scheduled"] == {"q0": 40}
    assert len(steps) == json.loads(capsys.readouterr().out)["steps"]


def test_the_totals_with_and_without_a_timeline_are_the_same(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["simulate", trace, "--blocks", "14", "--max-num-seqs", "8", "--json"]
    main(flags)
    fast = capsys.readouterr().out
    main([*flags, "--timeline", str(tmp_path / "steps.jsonl")])
    assert capsys.readouterr().out == fast


def test_a_gpu_that_comes_in_two_sizes_is_said_to_be_read_as_one(
    trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["simulate", trace, "--model", "llama-3.1-8b", "--gpu", "a100", "--max-model-len", "8192", "--json"])
    assert "read as 40 GB: say a100-80gb for the other" in capsys.readouterr().err
    main(["simulate", trace, "--model", "llama-3.1-8b", "--gpu", "a100-80gb", "--max-model-len", "8192", "--json"])
    assert "read as" not in capsys.readouterr().err


def test_the_picture_tells_whether_the_pool_held(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["simulate", trace, "--blocks", "10"])
    assert "ran dry" in capsys.readouterr().out
    main(["simulate", trace, "--blocks", "400"])
    assert "Holds the load" in capsys.readouterr().out


def test_a_load_whose_first_token_takes_minutes_is_not_said_to_be_held(capsys: pytest.CaptureFixture[str]) -> None:
    mix = "uniform rate=0.001 prompt=100 output=2 requests=4"
    main(["simulate", "--synthetic", mix, "--blocks", "200", "--step-ms", "40000"])
    assert capsys.readouterr().out.startswith("Serves the load late: 4 of 4 requests served; the first token takes")
    assert main(["simulate", "--synthetic", mix, "--blocks", "200", "--step-ms", "40000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "serves_late"
    main(["simulate", "--synthetic", mix, "--blocks", "200", "--step-ms", "20000"])
    assert capsys.readouterr().out.startswith("Holds the load: 4 of 4 requests served; the first token takes 20 s")


def test_the_drawing_is_an_svg(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "load.svg"
    main(["simulate", trace, "--blocks", "400", "--svg", str(out)])
    assert out.read_text(encoding="utf-8").startswith("<svg")


def test_choose_ends_with_a_command(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--blocks", "80", "--max-num-batched-tokens", "512", "--block-size", "16", "--workers", "1", "--json"]
    assert main(["simulate", trace, "--choose", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["chosen"]["preemptions"] == 0
    assert document["command"][:2] == ["vllm", "serve"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--blocks", "20"], "which trace"),
        (["nowhere.jsonl", "--blocks", "20"], "cannot read the trace nowhere.jsonl"),
        (["llama-3.1-8b", "--gpu", "h100"], "--model llama-3.1-8b"),
        (["--synthetic", "guests=20", "--blocks", "20"], "rate, users, think, prompt, output, requests, long, prefix"),
        (["--synthetic", "users=20", "--blocks", "20"], "--step-ms"),
        (["--synthetic", "users=20 rate=2", "--blocks", "20"], "both rate= and users="),
        (["--synthetic", "poisson think=30", "--blocks", "20"], "add users=N"),
        (["--synthetic", "users=20 think=soon", "--blocks", "20"], "is not a time to think"),
        (["--synthetic", "users=0", "--blocks", "20"], "1 to 1,000,000"),
        (
            ["--synthetic", "users=2", "--model", "qwen3-8b", "--gpu", "h100", "--autoscale", "2"],
            "users= is replayed on one server",
        ),
        (["--synthetic", "poisson prompt=-5", "--blocks", "20"], "at least 1 token"),
        (["TRACE", "--blocks", "20", "--blocks", "30"], "--blocks is given twice"),
        (["TRACE"], "how large is the pool"),
        (["TRACE", "--blocks", "1"], "holds nothing"),
        (["TRACE", "--blocks", "20", "--max-num-sequences", "4"], "--max-num-sequences"),
        (["TRACE", "--blocks", "20", "--synthetic", "poisson rate=1"], "give one of them"),
        (["--synthetic", "poisson rate=1", "--blocks", "20"], "--step-ms"),
    ],
)
def test_a_wrong_call_is_told_in_a_sentence(
    trace: str, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *[trace if word == "TRACE" else word for word in words]]) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert told.out == ""


def test_the_python_call_finds_what_the_command_finds(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    import legroom
    from legroom.simulation.replay_outcome import load_verdict
    from legroom.simulation.scheduler_settings import SchedulerSettings

    main(["simulate", trace, "--blocks", "14", "--max-num-seqs", "8", "--json"])
    timeline = legroom.simulate(trace, SchedulerSettings(14, max_num_seqs=8, max_model_len=70))
    expected = {**timeline.as_json(), **load_verdict(timeline).as_json()}
    assert expected == json.loads(capsys.readouterr().out)


def test_a_simulated_server_that_will_not_start_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    mix = ["--synthetic", "poisson rate=1 prompt=60 output=5 requests=4"]
    main(["simulate", "--model", "qwen3-8b", "--gpu", "rtx4090", *mix])
    assert "may not start" in capsys.readouterr().err
    main(["simulate", "--model", "qwen3-8b", "--gpu", "rtx4090", "--max-model-len", "8192", *mix])
    assert "may not start" not in capsys.readouterr().err


_TWO_ENGINES = ["--model", "qwen3-0.6b", "--gpu", "l4", "--max-model-len", "4096", "--data-parallel-size", "2"]


@pytest.mark.parametrize(("mix", "half"), [("rate=2 requests=40", 20), ("users=20 requests=60", 30)])
def test_an_engine_of_a_data_parallel_server_gets_its_share_of_the_load(
    mix: str, half: int, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["simulate", "--synthetic", f"poisson {mix} prompt=500 output=50", *_TWO_ENGINES]
    assert main([*load, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["finished"], document["data_parallel_engines"]) == (half, 2)
    main(load)
    said = " ".join(capsys.readouterr().out.split())
    assert f"on each of 2 data-parallel engines {half} of {half} requests served" in said
    assert ("each of 10 users gets" in said) == ("users" in mix)


def test_a_limit_is_judged_without_a_search_too(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["simulate", "--synthetic", "uniform rate=1 prompt=100 output=9 requests=9", "--blocks", "99"]
    load += ["--step-ms", "100"]
    assert main([*load, "--ttft", "1"]) == 0
    assert main([*load, "--ttft", "0.05"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "misses its limits: the p99 of the first token is 0.1 s, and 0.05 was asked for; 9 of 9" in said
    assert main([*load, "--tpot", "50", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "misses_limits"


def test_a_load_that_ends_before_the_server_is_full_is_not_said_to_prove_much(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ["simulate", "--synthetic", "uniform rate=2 prompt=60 output=300 requests=12", "--blocks", "260"]
    assert main([*load, "--step-ms", "100"]) == 0
    assert "If it went on at this rate, the server would fall behind." in " ".join(capsys.readouterr().out.split())


def test_a_long_queue_is_waiting_and_a_rate_is_told_with_its_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["simulate", "--synthetic", "uniform users=2 think=1 prompt=32000 output=30 requests=40", "--blocks", "9000"]
    assert main([*load, "--step-ms", "1000", "--max-num-batched-tokens", "2048", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "holds_with_waiting"
    assert Thresholds().queue_wait_s == LONG_QUEUE_S
    main([*load, "--step-ms", "1000", "--max-num-batched-tokens", "2048"])
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"the first token takes [\d.]+ s \(p50\); after it each of 2 users gets 1 tokens a second", said)
