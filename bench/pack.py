"""`legroom pack` and `legroom plan --sleep` against what a real card showed.

    python bench/pack.py tests/fixtures/h200_pack_0.32.jsonl

The file is legroom's own recording: what was predicted before the runs, every start in every order with the card's use
once all were up under load and after a restart, and the states of servers that slept. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
TOTAL_WITHIN, DEVICE_WITHIN, HOST_WITHIN = 0.01, 0.02, 0.05


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record["kind"] == kind]


def relative(measured: float, predicted: float) -> float:
    """By how much the prediction was off, as a share of what was measured."""
    return (predicted - measured) / measured if measured else 0.0


def pack_scores(records: Sequence[Record]) -> dict[str, Any]:
    """Starts and requests that failed, and the worst difference between the card's use and the plan."""
    planned = of_kind(records, "pack")[0]["used_bytes"]
    orders = of_kind(records, "order")
    errors = [relative(used, planned) for order in orders for used in order["used_bytes"]]
    return {
        "orders": len({tuple(order["order"]) for order in orders}),
        "starts": sum(order["starts"] for order in orders),
        "failed_starts": sum(order["failed_starts"] for order in orders),
        "failed_requests": sum(order["failed_requests"] for order in orders),
        "restarted": sorted({order["restarted"] for order in orders if order["restarted"]}),
        "worst_total": max(errors, key=abs, default=0.0),
    }


def sleep_scores(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The states of every server that slept, with what was predicted. Host memory: all that its processes hold."""
    return [
        {
            "server": record["server"],
            "state": record["state"],
            "device": relative(record["device_bytes"], record["predicted"]["device_bytes"]),
            "host": relative(
                record["rss_before_bytes"] + record["host_bytes"],
                record["rss_before_bytes"] + record["predicted"]["host_bytes"],
            ),
        }
        for record in of_kind(records, "sleep")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    records = read(parser.parse_args().file)
    packed, slept = pack_scores(records), sleep_scores(records)
    print(f"{packed['orders']} orders, {packed['starts']} starts, {packed['failed_starts']} failed")
    print(f"  restarted under load: {', '.join(packed['restarted'])}; failed requests: {packed['failed_requests']}")
    print(f"  total use against the plan, worst {packed['worst_total']:+.2%}   target <= {TOTAL_WITHIN:.0%}")
    for row in slept:
        print(f"  {row['server']:10s} {row['state']:10s} device {row['device']:+7.2%}   host {row['host']:+7.2%}")
    document = {
        **packed,
        "sleep_device_worst": max((abs(row["device"]) for row in slept), default=0.0),
        "sleep_host_worst": max((abs(row["host"]) for row in slept), default=0.0),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
