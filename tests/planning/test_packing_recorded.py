"""Servers that legroom packed onto one H200: what each was seen to hold there is what legroom computes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.facts.releases import release
from legroom.planning.machine import Machine, make_plan
from legroom.vllm.parse import parse_flags

FIXTURES = Path(__file__).parents[1] / "fixtures"


def recorded(name):
    return [json.loads(line) for line in (FIXTURES / name).read_text("utf-8").splitlines()]


def cases():
    """Every server of both recordings, with the most that its process held."""
    for file in ("h200_pack_0.32.jsonl", "h200_pack_0.32_first.jsonl"):
        records = recorded(file)
        orders = [record for record in records if record["kind"] == "order"]
        for server in next(record for record in records if record["kind"] == "pack")["servers"]:
            peak = max(order["peaks"].get(server["name"], 0) for order in orders)
            yield pytest.param(server["command"], peak, id=f"{file[:-6]} {server['name']}")


@pytest.mark.parametrize(("command", "peak"), list(cases()))
def test_a_server_under_load_held_what_is_computed(command, peak):
    made = make_plan(parse_flags(command, release("0.32.0")).args, release("0.32.0"), Machine("h200"), advice=False)
    assert made.layout.peak_used_bytes == pytest.approx(peak, rel=0.01)


def test_all_six_orders_started_and_answered():
    orders = [record for record in recorded("h200_pack_0.32.jsonl") if record["kind"] == "order"]
    assert len({tuple(order["order"]) for order in orders}) == 6
    assert sum(order["failed_starts"] + order["failed_requests"] for order in orders) == 0


def test_the_card_held_what_was_planned_before():
    records = recorded("h200_pack_0.32.jsonl")
    planned = next(record for record in records if record["kind"] == "pack")["used_bytes"]
    for order in (record for record in records if record["kind"] == "order"):
        assert order["used_bytes"] == [pytest.approx(planned, rel=0.01)] * len(order["used_bytes"])
