"""A fixture for `bench/pack.py` from what a run on a GPU wrote.

    python bench/record_pack.py RESULTS.jsonl PACK.json SLEEP.json > tests/fixtures/h200_pack_0.32.jsonl

RESULTS.jsonl has a line for each start (`start`), for the card's use with all servers up and after a restart (`full`),
for each order as it ended (`order`) and for each state of a server that slept (`sleep_state`). PACK.json and SLEEP.json
are what legroom predicted before. Host memory is what the server's processes held more than before they first slept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_STATES = {"serving": "serving", "asleep_1": "asleep_1", "asleep_2": "asleep_2", "weights_awake": "updating_weights"}
ABOUT = {
    "kind": "about",
    "how": "vLLM 0.32.0 (PyPI wheel, torch 2.11.0+cu130) on one NVIDIA H200, dummy weights, `vllm serve` with its web "
    "server, recorded by legroom on 16 November 2026. pack: what legroom planned before the runs. order: the servers "
    "started in this order, each under load (full prefill steps and bursts of requests) as soon as it was up; where "
    "`restarted` names one, it was ended and started again beside the others. used_bytes: NVML's use less that of the "
    "idle card, with all up and after the restart; peaks: the most that NVML showed of each server's process. sleep: "
    "servers on their own, after load.",
    "vllm": "0.32.0",
    "gpu": "NVIDIA H200",
}


def plain_words(words: Sequence[str]) -> list[str]:
    """A command with the model's name in place of its folder."""
    return [Path(word).name if word.startswith("/") else word for word in words]


def pack_record(pack: Row) -> Row:
    kept = ("name", "peak_bytes", "pool_bytes", "spread_bytes")
    servers = [
        {name: server[name] for name in kept} | {"command": plain_words(server["command"])}
        for server in pack["servers"]
    ]
    return {
        "kind": "pack",
        "used_bytes": pack["used_bytes"],
        "headroom_bytes": pack["headroom_bytes"],
        "servers": servers,
    }


def order_record(ended: Row, starts: Sequence[Row], full: Sequence[Row]) -> Row:
    return {
        "kind": "order",
        "order": ended["order"],
        "restarted": next((row["restarted"] for row in full if "restarted" in row), None),
        "starts": len(starts),
        "failed_starts": sum(not row["ok"] for row in starts),
        "start_s": [row["s"] for row in starts],
        "used_bytes": [row["used"] for row in full],
        "peaks": peaks(ended, full),
        "requests": sum(ended["requests"].values()),
        "failed_requests": sum(ended["errors"].values()),
    }


def peaks(ended: Row, full: Sequence[Row]) -> dict[str, int]:
    """What each server's process held with all up: processes are numbered in the order in which they started."""
    alive = [name for name in ended["order"] if not ended["errors"][name]]
    shown = sorted(full[0].get("processes") or []) if full else []
    return {name: bytes_ for name, (_, bytes_) in zip(alive, shown, strict=False)} if len(shown) == len(alive) else {}


def sleep_record(row: Row, awake: Row, predicted: Row) -> Row:
    key = _STATES.get(row["state"])
    record = {
        "kind": "sleep" if key in ("asleep_1", "asleep_2") else "state",
        "server": row["server"],
        "state": row["state"],
        "device_bytes": row["device"],
        "host_bytes": resident(row) - resident(awake),
        "rss_before_bytes": resident(awake),
        "took_s": row.get("took_s"),
    }
    if key is None:
        return record
    figures = ("device_bytes", "device_low", "device_high", "host_bytes", "wake_s")
    record["predicted"] = {name: predicted["states"][key][name] for name in figures}
    return record | ({"command": plain_words(predicted["command"])} if key == "serving" else {})


def resident(row: Row) -> int:
    return sum(process["VmRSS"] for process in row["rss"])


def records(results: Sequence[Row], pack: Row, sleepers: Sequence[Row]) -> Iterator[Row]:
    yield ABOUT
    yield pack_record(pack)
    predicted = {row["name"]: row for row in sleepers}
    starts: list[Row] = []
    full: list[Row] = []
    awake: dict[str, Row] = {}
    for row in results:
        if row["kind"] == "start":
            starts.append(row)
        elif row["kind"] == "full":
            full.append(row)
        elif row["kind"] == "order":
            yield order_record(row, starts, full)
            starts, full = [], []
        elif row["kind"] == "sleep_state":
            starts = []
            awake.setdefault(row["server"], row)
            yield sleep_record(row, awake[row["server"]], predicted[row["server"]])


def main() -> None:
    results, pack, sleepers = (Path(name).read_text(encoding="utf-8") for name in sys.argv[1:4])
    rows = [json.loads(line) for line in results.splitlines() if line.strip()]
    for record in records(rows, json.loads(pack), json.loads(sleepers)):
        print(json.dumps(record))


if __name__ == "__main__":
    main()
