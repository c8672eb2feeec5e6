from __future__ import annotations

import json

import pytest

from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.simulation.disaggregation import Disaggregation, replay_disaggregated
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.step_time import fixed_cost
from legroom.simulation.trace import Trace

SETTINGS = SchedulerSettings(num_blocks=500, async_scheduling=True)


def _trace(count: int, prompt: int = 1000, output: int = 5) -> Trace:
    trace = Trace("t", in_seconds=True)
    for i in range(count):
        trace.add(prompt, output, 10.0 * i)
    return trace


def test_a_lone_request_takes_its_prefill_its_transfer_and_its_answer() -> None:
    pools = Disaggregation(1, 1, link_bytes_per_s=2000.0, token_bytes=1.0)
    replayed = replay_disaggregated(_trace(1), SETTINGS, fixed_cost(0.1), pools)
    assert replayed.prefill_p99_s == pytest.approx(0.1) and replayed.transfer_p99_s == pytest.approx(0.5)
    times = replayed.timeline.seconds
    assert times["first_token_s"] == pytest.approx([0.7]) and times["latency_s"] == pytest.approx([1.1])


def test_a_decode_server_computes_one_token_of_each_prompt() -> None:
    pools = Disaggregation(2, 3, link_bytes_per_s=1e9, token_bytes=1.0)
    tally = replay_disaggregated(_trace(12), SETTINGS, fixed_cost(0.1), pools).timeline.tally
    assert tally.finished == 12
    assert tally.scheduled_tokens == 12 * (1000 + 5) and tally.prompt_tokens == 12 * 1000


def test_transfers_to_one_server_queue_for_its_link() -> None:
    trace = _trace(4)
    trace.arrivals[:] = type(trace.arrivals)("d", [0.0] * 4)
    slow = Disaggregation(1, 1, link_bytes_per_s=1000.0, token_bytes=1.0)
    replayed = replay_disaggregated(trace, SETTINGS, fixed_cost(0.1), slow)
    # Two prompts fit in a step: the last of four was computed a step before its transfer could begin.
    assert replayed.transfer_p99_s == pytest.approx(4.0 - 0.1) and replayed.link_busy_ratio > 0.8


@pytest.mark.parametrize("text", ["prefill=1,decode=2", "prefill=0,decode=1,link=5", "link=5", "a=1,prefill=1"])
def test_pools_without_a_server_or_a_link_are_refused(text: str) -> None:
    with pytest.raises(LegroomError, match="both pools and the link"):
        Disaggregation.parse(text)


def test_a_fleet_is_counted_in_sets_of_both_pools(capsys: pytest.CaptureFixture[str]) -> None:
    words = "size llama-3.1-8b --gpu h100 --rate 2 --prompt 500 --answer 50 --ttft 2 --json --disaggregate"
    pools, split = "prefill=1,decode=2,link=50", ["--tensor-parallel-size", "1"]
    assert main([*words.split(), pools, *split]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["disaggregation"] == {"prefill": 1, "decode": 2}
    assert document["rows"][0]["gpus"]["middle"] == 3
