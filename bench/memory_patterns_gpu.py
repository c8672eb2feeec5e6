#!/usr/bin/env python3
"""A burst, a fragmentation pattern, a leak and a neighbour, five of each, in the worker of a real vLLM on a GPU: named?

    memory_patterns_gpu.py VLLM MODELS OUT [--seeds 5] [--stages faults settings] [--model qwen3-0.6b]
    memory_patterns_gpu.py --judge OUT          the answers again, from what a run left in OUT

faults: one server under a light load. Each fault happens inside a step of its worker (gpu_faults.py), with sizes drawn
by its seed, and is caught there, so that the server goes on; the neighbour is a process of its own. `legroom diagnose`
reads the black box, `legroom fragments` the live server while memory lies in pieces, torch's own snapshots and the
black box, and the detectors of `legroom watch` the server's pages, recorded five times a second: at the usual five
seconds a scrape for a burst and a neighbour, with the clock an hour a second for a leak and pieces, which last.
settings: the same fragmenting requests again in servers with other settings of the allocator; what they answer is held
against what `legroom fragments` computed from the first server's history.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_harness import arguments, read_lines, write_line
from gpu_neighbour import Neighbour
from gpu_server import GpuServer, legroom_json

GIB, MIB = 1 << 30, 1 << 20
CAUSES = {
    "burst": "runtime_activation_burst",
    "fragmentation": "allocator_fragmentation",
    "leak": "leak_over_time",
    "neighbour": "gpu_shared_or_not_free",
}
WATCHED = {
    "burst": "memory_burst",
    "fragmentation": "fragmentation",
    "leak": "memory_creep",
    "neighbour": "gpu_neighbour",
}
SETTINGS = ("expandable_segments:True", "max_split_size_mb:128")
SECONDS = {"burst": 25.0, "neighbour": 25.0, "fragmentation": 3600.0, "leak": 3600.0}
"""What stands for a second of a fault: a scrape every 0.2 s is one every 5 s, and what lasts here for seconds lasts for
hours in a server."""
SCRAPE_INTERVAL_S = 0.2
KEPT_LINES = re.compile(
    rb"^(legroom_worker_|vllm:(num_requests|kv_cache|cache_config|prompt_tokens_total|"
    rb"generation_tokens_total)|process_)[^\n]*$",
    re.MULTILINE,
)
FLAGS = ("--gpu-memory-utilization", "0.55", "--max-model-len", "4096", "--enforce-eager", "--no-enable-prefix-caching")


class Pages:
    """The server's page again and again, each with what goes on at that moment."""

    def __init__(self, server: GpuServer, path: Path) -> None:
        self.server, self.path, self.label = server, path, ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._scrape)

    def __enter__(self) -> Pages:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _scrape(self) -> None:
        while not self._stop.wait(SCRAPE_INTERVAL_S):
            try:
                shown = [match[0].decode() + "\n" for match in KEPT_LINES.finditer(self.server.page())]
            except OSError:
                continue
            write_line(self.path, {"time_s": round(time.time(), 3), "label": self.label, "page": "".join(shown)})


class Load:
    """Requests one after the other: a step is always near."""

    def __init__(self, server: GpuServer, clients: int = 2) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(server,)) for _ in range(clients)]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, server: GpuServer) -> None:
        while not self._stop.is_set():
            if server.ask(20.0, prompt=list(range(5, 69)), max_tokens=16, ignore_eos=True) != 200:
                time.sleep(0.3)


def order(server: GpuServer, fault: dict[str, Any], limit_s: float = 20.0) -> dict[str, Any]:
    """Have the worker do it; its answer."""
    answer, path = server.folder / "fault-done.json", server.folder / "fault.json"
    answer.unlink(missing_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(fault))
    new.replace(path)
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if answer.exists():
            result: dict[str, Any] = json.loads(answer.read_text())
            return result
        time.sleep(0.02)
    return {"outcome": f"no answer within {limit_s:g} s"}


class FaultRun:
    """All faults in one server, and the questions to legroom beside it."""

    def __init__(self, server: GpuServer, out: Path, neighbour: Neighbour) -> None:
        self.server, self.out, self.neighbour = server, out, neighbour
        self.pool = ThreadPoolExecutor(6)
        self.rows: list[dict[str, Any]] = []
        self.answers: list[tuple[dict[str, Any], str, Future[dict[str, Any]]]] = []

    def run(self, kind: str, seed: int, pages: Pages) -> dict[str, Any]:
        name = f"{kind}-{seed}"
        row: dict[str, Any] = {"fault": name, "kind": kind, "seed": seed}
        known = {path.name for path in self.server.black_boxes()}
        if kind == "leak":
            order(self.server, {"kind": "fill", "leave_bytes": 10 * GIB + seed * GIB})
            time.sleep(3 * SCRAPE_INTERVAL_S)
        pages.label = name
        time.sleep(3 * SCRAPE_INTERVAL_S)
        row["result"] = self._fault(kind, seed, name)
        if kind == "fragmentation":
            self._ask(row, "fragments_url", "fragments", self.server.url)
        time.sleep(1.4)
        pages.label = ""
        self._collect(row, kind, name, known)
        self.neighbour.give_back()
        row["after"] = order(self.server, {"kind": "give_back"})
        time.sleep(2 * SCRAPE_INTERVAL_S)
        self.rows.append(row)
        print(name, {key: value for key, value in row["result"].items() if key != "requests"}, flush=True)
        return row

    def _fault(self, kind: str, seed: int, name: str) -> dict[str, Any]:
        fault = {"kind": kind, "seed": seed, "name": name, "contained": True}
        if kind == "neighbour":
            self.neighbour.leave((200 + 150 * seed) * MIB)
            time.sleep(3 * SCRAPE_INTERVAL_S)
            return order(self.server, fault | {"kind": "request", "bytes": 2 * GIB + seed * 700 * MIB})
        if kind == "leak":
            fault |= {"least_bytes": (60 + 20 * seed) * MIB, "most_bytes": (220 + 20 * seed) * MIB, "every_s": 0.05}
        return order(self.server, fault)

    def _collect(self, row: dict[str, Any], kind: str, name: str, known: set[str]) -> None:
        records = [path for path in self.server.black_boxes() if path.name not in known]
        row["records"] = [path.name for path in records]
        if records:
            self._ask(row, "diagnose", "diagnose", str(records[0]))
            self._ask(row, "fragments_box", "fragments", str(records[0]))
        snapshots = [
            str(path) for end in ("-before", "") if (path := self.server.folder / f"{name}{end}.pickle").exists()
        ]
        if snapshots:
            self._ask(row, "fragments_snapshot", "fragments", *snapshots)

    def _ask(self, row: dict[str, Any], key: str, *words: str) -> None:
        self.answers.append((row, key, self.pool.submit(legroom_json, *words, timeout_s=40.0)))

    def finish(self) -> None:
        for row, key, future in self.answers:
            row[key] = brief(key, future.result())
        for row in self.rows:
            write_line(self.out / "faults.jsonl", row)


def brief(key: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The part of an answer that is judged."""
    if "error" in answer:
        return answer
    if key == "diagnose":
        findings = answer["findings"]
        return {
            "causes": [[finding["cause"], finding["confidence"]] for finding in findings],
            "why": findings[0]["why"] if findings else "",
            "fixes": [
                {name: fix[name] for name in ("flags", "env", "steps")}
                for fix in (findings[0]["fixes"] if findings else [])
            ],
        }
    parts = {part["part"]: {name: part[name] for name in part if name != "part"} for part in answer["parts"]}
    return {name: value for name, value in answer.items() if name != "parts"} | {"parts": parts}


def faults(vllm: str, model: Path, out: Path, seeds: int) -> None:
    server = GpuServer(vllm, model, out / "faults", *FLAGS, env={"LEGROOM_FAULTS_HISTORY": "1"})
    neighbour = Neighbour()
    try:
        if not server.start():
            sys.exit(f"vLLM did not start: {server.log.read_text()[-2000:]}")
        run = FaultRun(server, out, neighbour)
        neighbour.give_back()
        with Load(server), Pages(server, out / "pages.jsonl") as pages:
            time.sleep(1.0)
            for seed in range(1, seeds + 1):
                for kind in CAUSES:
                    run.run(kind, seed, pages)
        run.finish()
    finally:
        server.stop()
        neighbour.end()


def settings(vllm: str, model: Path, out: Path) -> None:
    """The same requests under other settings."""
    rows = [row for row in rows_in(out / "faults.jsonl") if row["kind"] == "fragmentation"]
    for conf in SETTINGS:
        server = GpuServer(vllm, model, out / conf.partition(":")[0], *FLAGS, env={"PYTORCH_ALLOC_CONF": conf})
        try:
            if not server.start():
                write_line(out / "settings.jsonl", {"settings": conf, "outcome": "vLLM did not start"})
                continue
            with Load(server):
                for row in rows:
                    fault = {
                        "kind": "fragmentation",
                        "seed": row["seed"],
                        "contained": True,
                        "requests": row["result"]["requests"],
                    }
                    result = order(server, fault)
                    order(server, {"kind": "give_back"})
                    row_out = {"fault": row["fault"], "settings": conf, "outcome": result["outcome"]}
                    write_line(out / "settings.jsonl", row_out)
                    print(row_out, flush=True)
        finally:
            server.stop()


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    return read_lines(path) if path.exists() else iter(())


def watched(pages: list[dict[str, Any]], seconds: float) -> set[str]:
    """What `legroom watch` finds in these pages, with so many seconds for each of theirs."""
    from legroom.live.detectors import Watcher
    from legroom.live.metrics.exposition import parse_sample

    watcher, kinds = Watcher("http://127.0.0.1:8000"), set[str]()
    for page in pages:
        time_s = 1_790_000_000.0 + (page["time_s"] - pages[0]["time_s"]) * seconds
        watcher.take(parse_sample(page["page"].encode(), time_s, "http://127.0.0.1:8000"))
        kinds |= {finding.kind for finding in watcher.findings}
    return kinds & {*WATCHED.values()}


def named(row: dict[str, Any], pages: list[dict[str, Any]]) -> dict[str, bool]:
    kind = row["kind"]
    causes = row.get("diagnose", {}).get("causes", [])
    snapshot, box = (row.get(f"fragments_{source}", {}) for source in ("snapshot", "box"))
    leak = snapshot.get("parts", {}).get("leak")
    others = box.get("parts", {}).get("others")
    seen = {
        "burst": snapshot.get("would_expandable_segments_help") is False and not others,
        "fragmentation": snapshot.get("would_expandable_segments_help") is True
        and row.get("fragments_url", {}).get("parts", {}).get("free_in_pieces", {}).get("bytes", 0) > GIB,
        "leak": bool(leak and leak["sites"]) and "keep_request_state" in leak["sites"][0]["place"],
        "neighbour": others is not None and box.get("would_expandable_segments_help") is False,
    }
    mine = [page for page in pages if page["label"] == row["fault"]]
    return {
        "diagnose": bool(causes) and causes[0][0] == CAUSES[kind],
        "fragments": seen[kind],
        "watch": bool(mine) and watched(mine, SECONDS[kind]) == {WATCHED[kind]},
    }


def report(out: Path) -> None:
    pages = list(rows_in(out / "pages.jsonl"))
    counts: dict[str, dict[str, int]] = {}
    for row in rows_in(out / "faults.jsonl"):
        answers = named(row, pages)
        count = counts.setdefault(row["kind"], {"of": 0} | dict.fromkeys(answers, 0))
        count["of"] += 1
        for by, right in answers.items():
            count[by] += right
        if not all(answers.values()):
            print(row["fault"], answers, row.get("diagnose", {}).get("causes"))
    for kind, count in counts.items():
        print(f"{kind:14s}", *(f"{by} {number} of {count['of']}" for by, number in count.items() if by != "of"))
    agreements(out)
    print(json.dumps(counts))


def agreements(out: Path) -> None:
    """What the replay said of a setting against what the card did."""
    replayed = {row["fault"]: row.get("fragments_snapshot", {}) for row in rows_in(out / "faults.jsonl")}
    tried = [
        (row["fault"], row["settings"], row["outcome"]) for row in rows_in(out / "settings.jsonl") if "fault" in row
    ]
    same = silent = 0
    for name, conf, outcome in tried:
        part = replayed.get(name, {}).get("parts", {}).get("failed_request", {})
        said = conf in part.get("served_by", ()), conf in part.get("refused_by", ())
        silent += not any(said)
        same += said == (outcome == "served", outcome != "served")
        if any(said) and said != (outcome == "served", outcome != "served"):
            print("differs:", name, conf, "on the card", outcome, "replayed", part.get("served_by"))
    print(f"settings replayed: {same} of {len(tried)} as on the card, {silent} not told")


def main() -> None:
    if sys.argv[1:2] == ["--judge"]:
        report(Path(sys.argv[2]))
        return
    stages = ("faults", "settings")
    args = arguments(__doc__, "vllm", "models:path", "out:path", seeds=5, stages=stages, model="qwen3-0.6b")
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.models / args.model
    if "faults" in args.stages:
        faults(args.vllm, model, args.out, args.seeds)
    if "settings" in args.stages:
        settings(args.vllm, model, args.out)
    report(args.out)


if __name__ == "__main__":
    main()
