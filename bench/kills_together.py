"""Kill anything at any moment while run, guard and sidecar hold one server together: what is lost, what starts twice?

    python bench/kills_together.py --kills 200                       # a stand-in with vLLM's process shape
    python bench/kills_together.py --kills 20 --vllm VENV/bin/vllm   # the real one
    python bench/kills_together.py --default-thresholds              # a sidecar as it comes

One server below `legroom run`, a `legroom guard` in front of it, and an acting sidecar that is as hasty as can be (two
scrapes without an answer, and it would restart), all with one journal. Clients send requests through the guard all the
time. A kill hits one of seven: run, its keeper, the API server, the engine core, a worker, the guard, the sidecar; with
SIGKILL or SIGTERM; while the server serves, or while it is still coming back from the kill before. What dies of
legroom's own is started again by the bench, as a unit with Restart=always would be. One kill in six comes while run
drains: it gets a SIGTERM first.

- A request is lost when it gets neither its answer nor a refusal that it can repeat (503, 429, no connection, or the
  guard's 502 while there is no server). One that was under way when a process on its path died is counted apart:
  nothing can save it.
- Every launch of the server writes its pid down. A life of the server that ended without being hit is a restart too
  many. A sidecar that dies may cost nothing at all.
- A page is false where a `legroom run` held the server: it would have come back by itself.
- In the end nothing may be left but what is in the journal: no process, no bound port, no incident that was named and
  is not there.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from bench_harness import ROOT, arguments, write_json
from tiny_models import SERVE_ENV, SERVE_FLAGS, write_model

from legroom.live.journal.journal import Journal
from legroom.process_table import descendants, process_start_ticks, process_title
from legroom.run.health import port_problem

SERVER_PARTS = ("keeper", "API server", "engine core", "worker")
TARGETS = ("run", *SERVER_PARTS, "guard", "sidecar")
MARK = "LEGROOM_KILLS_ROUND"
"""An environment variable that every process below the bench inherits."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM)
CLIENTS = 6
LATE_S = 0.25
"""A request that was on its way when its server died may have been counted as begun a moment later."""
SIDECAR = """
port = {port}
act = ["notify", "restart"]
token = "act-token"
[limits]
per_hour = 3600
per_day = 86400
first_pause_s = 0
restart_deadline_s = 120
[[servers]]
url = "http://127.0.0.1:{server}"
platform = "run"
"""
HASTY = """
[thresholds]
unreachable_hold = { samples = 2, seconds = 0.1 }
calm = { samples = 1, seconds = 0.0 }
crash_restarts = 1000000
"""


def marked(mark: str) -> list[int]:
    """Every living process with the mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def stand_in(folder: Path) -> Path:
    """A `vllm` that is the stand-in."""
    path, server = folder / "vllm", ROOT / "tests/run/stand_in_vllm.py"
    path.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(server)!r}, run_name='__main__')\n")
    path.chmod(0o755)
    return path


@dataclass
class Request:
    """One request of a client, and what became of it."""

    began_s: float
    ended_s: float = 0.0
    fate: str = ""


@dataclass
class Kill:
    """One kill, and when what it hit was gone."""

    target: str
    signal: str
    moment: str
    at_s: float
    gone_s: float = float("inf")
    back_s: float | None = None
    """Until a request was answered again."""
    lives: list[int] = field(default_factory=list)


class Together:
    """The server and the three that hold it."""

    def __init__(
        self, folder: Path, vllm: str, flags: list[str], port: int, real: bool, seed: int, hasty: bool
    ) -> None:
        self.folder, self.port, self.guard_port, self.sidecar_port = folder, port, port + 1, port + 2
        self.home, self.launches, self.real = folder / "home", folder / "launches", real
        self.dice, self.mark = random.Random(seed), uuid.uuid4().hex
        self.kills: list[Kill] = []
        self.requests: list[Request] = []
        self.is_over = asyncio.Event()
        self.launches.touch()
        wrapper = folder / "bin/vllm"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\necho $$ >> {self.launches}\nexec {vllm} "$@"\n')
        wrapper.chmod(0o755)
        config = folder / "watch.toml"
        settings = SIDECAR.format(port=self.sidecar_port, server=port)
        config.write_text(f"interval_s = {0.5 if real else 0.05}{settings}{HASTY}" if hasty else settings)
        model = str(write_model(folder / "tiny"))
        serve = [str(wrapper), "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
        own = ["run", "--vllm", "0.32.0", "--no-verify", "--restart-delay", "0", "--restarts", "1000", "--drain", "5"]
        self.words = {
            "run": [*own, "--", *serve],
            "guard": ["guard", "--upstream", f"http://127.0.0.1:{port}", "--port", str(self.guard_port)],
            "sidecar": ["watch", "--daemon", "--config", str(config)],
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._known_outages: list[tuple[float, float]] | None = None
        self.unheld_s: list[float] = []

    def start(self, name: str) -> None:
        env = {**os.environ, **SERVE_ENV, MARK: self.mark, "LEGROOM_HOME": str(self.home)}
        env["STAND_IN_START_S"] = "0.4"
        with (self.folder / f"{name}.log").open("ab") as log:
            words = [sys.executable, "-m", "legroom", *self.words[name]]
            self.processes[name] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)

    async def keep_started(self) -> None:
        """What a unit with Restart=always does."""
        while not self.is_over.is_set():
            for name, process in tuple(self.processes.items()):
                if process.poll() is not None:
                    self.start(name)
            if not self._is_held():
                self.unheld_s.append(time.time())
            await asyncio.sleep(0.1)

    def _is_held(self) -> bool:
        """Whether a `legroom run` that lives has written its record."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.home / f"runs/{self.port}.json").read_text())["pid"] == self.processes["run"].pid
        return False

    # Clients

    async def client(self, number: int) -> None:
        dice = random.Random(number)
        timeout = aiohttp.ClientTimeout(total=60.0)
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while not self.is_over.is_set():
                request = Request(time.monotonic())
                request.fate = await self._send(session, dice.randrange(5, 40))
                request.ended_s = time.monotonic()
                self.requests.append(request)
                if request.fate != "answered":
                    await asyncio.sleep(0.05)

    async def _send(self, session: aiohttp.ClientSession, tokens: int) -> str:
        body = {"model": "tiny", "prompt": "x" * 20, "max_tokens": tokens, "ignore_eos": True}
        url = f"http://127.0.0.1:{self.guard_port}/v1/completions"
        try:
            async with session.post(url, json=body) as answer:
                text = await answer.text()
                if answer.status == 200:
                    whole = json.loads(text)["usage"]["completion_tokens"] == tokens
                    return "answered" if whole else "cut short"
                if answer.status in (429, 503):
                    return "refused"
                return "server down" if answer.status == 502 and "upstream_down" in text else f"status {answer.status}"
        except aiohttp.ClientConnectorError:
            return "nobody there"
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            return type(error).__name__

    # Kills

    def lives(self) -> list[int]:
        return [int(line) for line in self.launches.read_text().split()]

    def _pid(self, target: str) -> int:
        if target in self.processes:
            return self.processes[target].pid
        record = json.loads((self.home / f"runs/{self.port}.json").read_text())
        if target in ("keeper", "API server"):
            return int(record["keeper_pid" if target == "keeper" else "child_pid"])
        below = sorted(descendants(int(record["child_pid"])))
        wanted = b"EngineCore" if target == "engine core" else b"Worker"
        named = [pid for pid in below if wanted in process_title(pid)[:32]]
        return named[0] if named else below[0 if target == "engine core" else -1]

    def is_answered_since(self, at_s: float) -> bool:
        return any(request.fate == "answered" and request.began_s > at_s for request in self.requests[-200:])

    async def kill(self, moment: str, targets: Sequence[str] = TARGETS, signals: Sequence[int] = SIGNALS) -> Kill:
        while True:
            target, number = self.dice.choice(targets), signal.Signals(self.dice.choice(signals))
            living = [pid for pid in self.lives()[-3:] if process_start_ticks(pid)]
            try:
                os.kill(self._pid(target), number)
                break
            except (OSError, IndexError, ValueError, KeyError, TypeError):
                await asyncio.sleep(0.01)  # it is not there at this moment: another one
        kill = Kill(target, number.name, moment, time.monotonic())
        if target not in ("guard", "sidecar") and (target, number) != ("keeper", signal.SIGTERM):  # a keeper ignores it
            kill.lives = living
        self.kills.append(kill)
        asyncio.get_running_loop().create_task(self._see_gone(kill, self.processes.get(target)))
        return kill

    async def _see_gone(self, kill: Kill, process: subprocess.Popen[bytes] | None) -> None:
        """When the process on the requests' path was gone: the guard, or every life of the server that was hit."""
        while not self.is_over.is_set():
            is_there = process is not None and process.poll() is None
            if kill.target == "run":  # it may launch once more before it dies
                since = self.lives()
                kill.lives += [
                    pid for pid in since[-1:] if is_there and process_start_ticks(pid) and pid not in kill.lives
                ]
            if not is_there and not any(process_start_ticks(pid) for pid in kill.lives):
                kill.gone_s = time.monotonic()
                return
            await asyncio.sleep(0.005)

    async def play(self, count: int, slow_s: float) -> None:
        for name in self.words:
            self.start(name)
        tasks = [asyncio.create_task(self.keep_started())]
        tasks += [asyncio.create_task(self.client(number)) for number in range(CLIENTS)]
        await self._until_answered(0.0, 60 * slow_s)
        for number in range(count):
            in_haste = number > 0 and self.dice.random() < 0.3
            if in_haste:
                await asyncio.sleep(self.dice.uniform(0, slow_s))
            else:
                await self._recovered(60 * slow_s)
                await asyncio.sleep(self.dice.uniform(0.1, 1.0))
            moment = "coming back" if in_haste else "drain" if self.dice.random() < 0.25 else "serving"
            if moment == "drain":
                await self.kill("drain", ("run",), (signal.SIGTERM,))
                await asyncio.sleep(self.dice.uniform(0, 0.6))
            kill = await self.kill(moment)
            print(f"\r{number + 1} {kill.signal} {kill.target:12}", end="", file=sys.stderr, flush=True)
        await self._recovered(60 * slow_s)
        await asyncio.sleep(1.0)
        self.is_over.set()
        await asyncio.gather(*tasks)

    async def _recovered(self, patience_s: float) -> None:
        """Until requests are answered again after every kill so far, and legroom's three are there."""
        if not self.kills:
            return
        last = self.kills[-1]
        await asyncio.sleep(0.3)
        if last.target in ("guard", "run") or last.lives:
            until = time.monotonic() + 15.0
            while last.gone_s == float("inf") and time.monotonic() < until:  # a keeper does not hear SIGTERM
                await asyncio.sleep(0.02)
        since_s = last.gone_s if last.gone_s < float("inf") else last.at_s
        await self._until_answered(since_s, patience_s)
        last.back_s = round(time.monotonic() - last.at_s, 2)

    async def _until_answered(self, since_s: float, patience_s: float) -> None:
        until = time.monotonic() + patience_s
        while not self.is_answered_since(since_s):
            if time.monotonic() > until:
                tail = (self.folder / "run.log").read_text("utf-8", "replace")[-3000:]
                sys.exit(f"it did not come back: {self.kills[-1:]}\n{tail}")
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        for name in ("guard", "sidecar", "run"):
            self.processes[name].send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()

    def _judged(self, request: Request) -> str:
        """What became of it, seen beside the kills."""
        if request.fate in ("answered", "refused", "nobody there"):
            return request.fate
        on_path = [kill for kill in self.kills if kill.target == "guard" or kill.lives]
        if any(request.began_s <= kill.gone_s + LATE_S and request.ended_s >= kill.at_s for kill in on_path):
            return "in flight"
        if request.fate == "server down" and any(begin <= request.began_s <= end for begin, end in self._outages()):
            return "server down"
        return "lost"

    def _outages(self) -> list[tuple[float, float]]:
        """From each kill of the server (and from the first start on) until a request that came later was answered."""
        if self._known_outages is None:
            answered = sorted((one.began_s, one.ended_s) for one in self.requests if one.fate == "answered")
            gone = [0.0, *(kill.gone_s for kill in self.kills if kill.lives)]
            self._known_outages = [
                (gone_s, next((ended_s for began_s, ended_s in answered if began_s > gone_s), float("inf")))
                for gone_s in gone
            ]
        return self._known_outages

    def result(self) -> dict[str, Any]:
        until = time.monotonic() + 20
        while (orphans := marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.1)
        fates = collections.Counter(self._judged(request) for request in self.requests)
        lost = [request for request in self.requests if self._judged(request) == "lost"]
        hit = {pid for kill in self.kills for pid in kill.lives}
        lives = self.lives()
        said = "".join((self.folder / f"{name}.log").read_text("utf-8", "replace") for name in self.words)
        stamps = re.findall(r"^(\S+) legroom: .*does not answer: http", said, re.MULTILINE)
        pages = [time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%S")) for stamp in stamps]
        own = "\n".join(line for line in said.splitlines() if "legroom: " in line)
        with Journal.open(self.home / "journal.db") as journal:
            named = {int(number) for number in re.findall(r"legroom: .*incident (\d+)", own)}
            missing = sorted(number for number in named if journal.incident(number) is None)
            problems = [row[0] for row in journal._db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        titles = [process_title(pid).replace(b"\0", b" ").decode("utf-8", "replace") for pid in orphans]
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        return {
            "kills": len(self.kills),
            "requests": len(self.requests),
            "fates": dict(fates),
            "lost": [asdict(request) for request in lost],
            "launches": len(lives),
            "lives_hit": len(hit & set(lives)),
            "restarts_too_many": [pid for pid in lives[:-1] if pid not in hit],
            "sidecar_restarts": said.count("restart: "),
            "pages": len(pages),
            "pages_without_run": sum(any(-1.0 < at_s - page < 2.0 for at_s in self.unheld_s) for page in pages),
            "incidents": len(named),
            "journal_missing": missing,
            "journal_problems": problems,
            "orphans": titles,
            "ports_bound": [p for p in (self.port, self.guard_port, self.sidecar_port) if port_problem("127.0.0.1", p)],
            "tracebacks": said.count("This is a bug in legroom"),
            "rounds": [asdict(kill) for kill in self.kills],
        }


def show(result: dict[str, Any]) -> None:
    print(f"\n{'killed':14} {'while':12} {'SIGKILL':>8} {'SIGTERM':>8} {'back after (median, worst)':>28}")
    rows = collections.defaultdict(list)
    for kill in result["rounds"]:
        rows[kill["target"], kill["moment"]].append(kill)
    for (target, moment), kills in sorted(rows.items()):
        hard = sum(kill["signal"] == "SIGKILL" for kill in kills)
        back = sorted(kill["back_s"] for kill in kills if kill["back_s"] is not None)
        times = f"{back[len(back) // 2]:.1f} s, {back[-1]:.1f} s" if back else ""
        print(f"{target:14} {moment:12} {hard:8} {len(kills) - hard:8} {times:>28}")
    fates = {"in flight": 0, "lost": 0, **result["fates"]}
    print(
        f"{result['kills']} kills, {result['requests']} requests: {fates.get('answered', 0)} answered, "
        f"{fates.get('refused', 0)} refused, {fates.get('server down', 0)} told that the server is down, "
        f"{fates.get('nobody there', 0)} met nobody, "
        f"{fates['in flight']} were in flight at a kill and lost, {fates['lost']} were lost otherwise\n"
        f"{result['launches']} launches, {result['lives_hit']} lives hit, "
        f"{len(result['restarts_too_many'])} restarts too many; {len(result['orphans'])} orphans, "
        f"{len(result['ports_bound'])} ports left bound, {len(result['journal_missing'])} journal entries missing of "
        f"{result['incidents']}, {result['tracebacks']} tracebacks\n{result['pages']} pages that the server does not "
        f"answer, {result['pages_without_run']} of them while no run held it"
    )


def main() -> None:
    args = arguments(
        __doc__, kills=200, vllm=str, port=18270, seed=int(time.time()), json=Path, keep=Path, default_thresholds=False
    )
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["--served-model-name", "tiny"]
        if args.vllm:
            flags += [*SERVE_FLAGS, "--kv-cache-memory-bytes", "16M", "--max-model-len", "2048"]
        server = args.vllm or str(stand_in(folder))
        together = Together(
            folder, server, flags, args.port, args.vllm is not None, args.seed, not args.default_thresholds
        )
        try:
            asyncio.run(together.play(args.kills, 20.0 if args.vllm else 1.0))
        finally:
            together.stop()
        result = together.result() | {"seed": args.seed, "vllm": "real" if args.vllm else "stand-in"}
    show(result)
    write_json(args.json, result)


if __name__ == "__main__":
    main()
