"""A scaled fleet: the policy grows with the load, does not flap, and serves everything it was sent."""

import json
import math
import random
from functools import cache

import pytest

from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.planning.autoscaling_policy import SYNC_S, scaling_policy
from legroom.simulation.autoscale import _Controller, replay_autoscaled
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.step_time import fixed_cost
from legroom.simulation.trace import Trace

SETTINGS = SchedulerSettings(
    num_blocks=501, block_size=16, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=2048
)
COST = fixed_cost(0.03)


def day(hours=2.0, low=0.2, high=3.0, seed=1):
    """Load that rises and falls once."""
    draw, trace, time_s = random.Random(seed), Trace(in_seconds=True), 0.0
    while time_s < hours * 3600:
        rate = low + (high - low) * math.sin(math.pi * time_s / (hours * 3600)) ** 2
        time_s += draw.expovariate(rate)
        trace.add(draw.randrange(100, 600), draw.randrange(50, 300), time_s)
    return trace


@cache
def two_hours(start_s, seed=1):
    return run(day(seed=seed), start_s=start_s)


def run(trace, least=1, most=8, start_s=120.0):
    return replay_autoscaled(trace, SETTINGS, COST, scaling_policy(least, most, start_s, 4.0), None)


def test_every_request_is_served_once():
    assert two_hours(60.0).finished == len(day())


def test_the_fleet_grows_with_the_load_and_shrinks_after_it():
    replicas = [sample.replicas for sample in run(day(hours=1.0, high=8.0)).samples]
    assert max(replicas) > 2
    assert replicas[-1] < max(replicas)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("start_s", [60.0, 300.0, 900.0])
def test_the_policy_that_is_exported_does_not_flap(seed, start_s):
    assert two_hours(start_s, seed).flaps == 0


def test_load_must_last_before_a_replica_is_asked_for():
    """As the controller does it: of what was asked for within the window, the least counts."""
    policy = scaling_policy(1, 8, 400.0, 4.0)
    once, lasting = _Controller(policy, 1), _Controller(policy, 1)
    for number in range(20):
        once.decide(15.0 * number, 0.1, 40 if number == 10 else 0)
        lasting.decide(15.0 * number, 0.1, 40 if number >= 10 else 0)
    assert (once.replicas, lasting.replicas) == (1, 2)
    assert lasting.changes[0][0] >= 150 + policy.up_window_s - SYNC_S


def test_a_short_burst_costs_no_more_than_doubling():
    trace = Trace(in_seconds=True)
    for number in range(200):
        trace.add(400, 50, 600 + number * 0.01)
    trace.add(10, 10, 3600)
    assert max(sample.replicas for sample in run(trace, start_s=300.0).samples) <= 2


def test_a_policy_without_patience_flaps_and_is_told_so():
    policy = scaling_policy(1, 8, 300.0, 4.0)
    controller = _Controller(policy, 1)
    for step in range(400):
        controller.decide(step * 15.0, 1.8 if step // 20 % 2 else 0.2, 0)
    assert sum(after < before for _, before, after in controller.changes) <= 1


def test_a_replica_that_starts_serves_nothing_before_its_start():
    for sample in two_hours(900.0).samples:
        if sample.time_s < 900:
            assert sample.ready == 1


def test_a_trace_in_steps_is_refused():
    trace = Trace()
    trace.add(10, 10, 0)
    with pytest.raises(LegroomError, match="arrivals in steps"):
        run(trace)


def test_the_command_tells_the_policy_and_what_it_cost(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival": number * 2.0, "prompt_len": 200, "output_len": 50} for number in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["simulate", str(path), "--blocks", "500", "--step-ms", "30", "--autoscale", "4", "--start", "200s"]
    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["finished"] == 300 and document["steady"] is True
    assert document["policy"]["start_s"] == 200
    assert main(words) == 0
    assert "The fleet is steady" in capsys.readouterr().out
    assert main([*words[:-2]]) == 2
    assert "--start" in capsys.readouterr().err
