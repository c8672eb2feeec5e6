"""What sleeping leaves on the card and puts on the host, by release and flags."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from legroom import plan
from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.memory.caching_allocator import CachingAllocator
from legroom.memory.host_needs import pinned_bytes
from legroom.memory.server_states import residue
from legroom.memory.weights.loaded import weight_segments
from legroom.planning.machine import Machine, make_plan
from legroom.planning.plan_json import plan_states
from legroom.units import MIB
from legroom.vllm.parse import parse_flags


def made(model="llama-3.1-8b", vllm="0.32.0", **flags):
    return plan(model, "h200", vllm=vllm, advice=False, **flags).plan


def states(**flags):
    return {state.name: state for state in plan_states(made(**flags))}


def test_a_sleeping_server_keeps_its_context_graphs_and_modules():
    asleep = states()["asleep_1"].device
    assert {"CUDA context", "CUDA graphs", "modules and handles"} <= {term.label for term in asleep.terms}
    assert asleep.bytes == sum(term.bytes for term in asleep.terms)


@pytest.mark.parametrize(("vllm", "pooled"), [("0.23.0", False), ("0.26.0", True), ("0.32.0", True)])
def test_the_tables_of_the_sampler_sleep_with_the_weights_from_0_24_on(vllm, pooled):
    by_name = states(vllm=vllm)
    at_level_1, at_level_2 = by_name["asleep_1"].host, by_name["asleep_2"].host
    assert ("tables of the sampler" in {term.label for term in at_level_1.terms}) == pooled
    assert "tables of the sampler" not in {term.label for term in at_level_2.terms}


def test_both_levels_leave_the_same_on_the_card():
    by_name = states()
    assert by_name["asleep_1"].device == by_name["asleep_2"].device


def test_level_1_pins_every_segment_as_a_power_of_two():
    server = made()
    segments = weight_segments(server.target.model, server.settings, server.target.gpu)
    assert states()["asleep_1"].host.terms[0].bytes == sum(map(pinned_bytes, segments))
    assert sum(map(pinned_bytes, segments)) > sum(segments)


def test_level_2_keeps_buffers_and_no_weights():
    asleep = states()["asleep_2"]
    assert 0 < asleep.host.bytes < 200 * MIB
    assert asleep.wake_s is None


def test_until_0_8_5_level_2_saves_nothing():
    assert states(vllm="0.8.4")["asleep_2"].host.bytes == 0


def test_experts_leave_their_workspace_on_the_card_until_0_32():
    before, now = (states(model="qwen3-30b-a3b", vllm=vllm)["asleep_1"].device for vllm in ("0.28.0", "0.32.0"))
    workspaces = [sum(term.bytes for term in each.terms if term.label == "workspaces") for each in (before, now)]
    assert workspaces[0] > workspaces[1]


def test_waking_takes_the_weights_over_the_bandwidth_of_the_host():
    server = made()
    slow, fast = (plan_states(server, speed)[1].wake_s for speed in (10e9, 50e9))
    assert slow == pytest.approx(5 * fast)


def test_weights_alone_are_back_while_they_are_replaced():
    by_name = states()
    updating = by_name["updating_weights"].device.bytes
    assert by_name["asleep_2"].device.bytes < updating < by_name["serving"].device.bytes


def test_graphs_leave_the_card_where_the_flag_says_so():
    server = made()
    settings = server.settings
    offloading = replace(settings, given=replace(settings.given, others=("--sleep-mode-offload-cudagraph",)))
    kept = residue(server.target.model, server.target.gpu, settings, server.memory.graphs).bytes
    left = residue(server.target.model, server.target.gpu, offloading, server.memory.graphs).bytes
    assert kept - left == server.memory.graphs.bytes


def test_a_release_without_sleep_mode_says_so():
    with pytest.raises(LegroomError, match="no sleep mode"):
        plan_states(made(vllm="0.6.6"))


def test_used_segments_leave_out_empty_ones():
    allocator = CachingAllocator()
    large, small = allocator.allocate(30 * MIB), allocator.allocate(1000)
    assert allocator.used_segments == [30 * MIB, 2 * MIB]
    allocator.free(large)
    assert allocator.used_segments == [2 * MIB]
    allocator.free(small)
    assert allocator.used_segments == []


FIXTURE = Path(__file__).parents[1] / "fixtures" / "h200_pack_0.32.jsonl"
RECORDS = [json.loads(line) for line in FIXTURE.read_text("utf-8").splitlines()]
SLEPT = [record for record in RECORDS if record["kind"] == "sleep"]
COMMANDS = {
    record["server"]: record["command"] for record in RECORDS if record["kind"] == "state" and "command" in record
}


@pytest.mark.parametrize("record", SLEPT, ids=lambda record: f"{record['server']} {record['state']}")
def test_a_recorded_server_slept_as_computed(record):
    parsed = parse_flags(COMMANDS[record["server"]], release("0.32.0")).args
    state = {each.name: each for each in plan_states(make_plan(parsed, release("0.32.0"), Machine("h200")))}[
        record["state"]
    ]
    assert state.device.low <= record["device_bytes"] <= state.device.high
    assert state.device.bytes == pytest.approx(record["device_bytes"], rel=0.04)
    awake = record["rss_before_bytes"]
    assert awake + state.host.bytes == pytest.approx(awake + record["host_bytes"], rel=0.05)
