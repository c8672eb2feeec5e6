"""Kill anything at any moment: does `legroom run` ever leave a process, a bound port or a hole in the journal?

    python bench/run_kills.py --rounds 200                       # a stand-in with vLLM's process shape, up in 0.1 s
    python bench/run_kills.py --rounds 12 --vllm VENV/bin/vllm   # the real one

Every round starts a server below `legroom run` and kills one of legroom, its keeper, the API server, the engine core
or a worker, with SIGKILL or SIGTERM, while it starts, serves, or drains with requests in flight. Processes are told by
a mark in their environment, which nobody below can lose. Afterwards nothing with that mark may live, the port
must be free, and every incident that legroom named must be in the journal.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/real_vllm"))
from tiny_models import SERVE_ENV, SERVE_FLAGS, write_model

from legroom.live.journal.journal import Journal
from legroom.process_table import descendants

TARGETS = ("legroom", "keeper", "API server", "engine core", "worker")
MOMENTS = ("start-up", "serving", "drain")
MARK = "LEGROOM_KILLS_ROUND"
CLEAN_S = 20.0
"""How long everything may take to be gone once legroom is."""


def marked(mark: str) -> list[int]:
    """Every living process of a round."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def is_bound(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


class Round:
    """One server, one kill, and what was left."""

    def __init__(
        self, folder: Path, vllm: str, model: str, flags: list[str], seed: int, port: int, slow_s: float
    ) -> None:
        self.dice = random.Random(seed)
        self.target, self.moment = self.dice.choice(TARGETS), self.dice.choice(MOMENTS)
        self.number = self.dice.choice((signal.SIGKILL, signal.SIGTERM))
        # Below the ports that the system hands out itself: nobody else may happen to have it afterwards.
        self.home, self.port, self.mark, self.slow_s = folder / "home", port, uuid.uuid4().hex, slow_s
        self.said = folder / f"said-{seed}"
        words = [sys.executable, "-m", "legroom", "run", "--vllm", "0.32.0", "--no-verify", "--restart-delay", "0.1"]
        words += ["--drain", "3", "--", vllm, "serve", model, "--host", "127.0.0.1", "--port", str(self.port), *flags]
        env = {**os.environ, **SERVE_ENV, MARK: self.mark, "LEGROOM_HOME": str(self.home)}
        env["STAND_IN_START_S"] = str(round(self.dice.uniform(0.02, 0.5), 2))
        with self.said.open("wb") as err:
            self.run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=err, env=env)

    def play(self) -> dict[str, Any]:
        if self.moment == "start-up":
            time.sleep(self.dice.uniform(0, self.slow_s))
        else:
            self._await(b"legroom: serving at")
            time.sleep(self.dice.uniform(0, 0.5))
        if self.moment == "drain":
            for _ in range(3):
                threading.Thread(target=self._request, daemon=True).start()
            time.sleep(self.dice.uniform(0.1, 0.4))
            self.run.send_signal(signal.SIGTERM)
            time.sleep(self.dice.uniform(0, 0.6))
        hit = self._kill()
        self._settle(hit)
        return self._left(hit)

    def _await(self, text: bytes, patience_s: float = 300.0) -> bool:
        until = time.monotonic() + patience_s
        while time.monotonic() < until and self.run.poll() is None:
            if text in self.said.read_bytes():
                return True
            time.sleep(0.05)
        return False

    def _request(self) -> None:
        body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 150}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    def _pid(self) -> int:
        if self.target == "legroom":
            return self.run.pid
        file = json.loads((self.home / f"runs/{self.port}.json").read_text())
        if self.target in ("keeper", "API server"):
            return int(file["keeper_pid" if self.target == "keeper" else "child_pid"])
        # The real ones give themselves titles, and have a resource tracker beside them; the stand-in has only the two.
        title = b"EngineCore" if self.target == "engine core" else b"Worker"
        below = sorted(descendants(file["child_pid"]))
        named = [pid for pid in below if title in Path(f"/proc/{pid}/cmdline").read_bytes()[:32]]
        return named[0] if named else below[0 if self.target == "engine core" else -1]

    def _kill(self) -> str:
        """Who was hit; legroom where the one that was meant is not there at this moment."""
        try:
            os.kill(self._pid(), self.number)
            return self.target
        except (OSError, IndexError, ValueError, KeyError):
            self.run.send_signal(self.number)
            return "legroom"

    def _settle(self, hit: str) -> None:
        """Let legroom answer, then end it as an operator would, if it is still there."""
        if hit != "legroom" and self.moment == "serving" and self.run.poll() is None:
            served = self.said.read_bytes().count(b"legroom: serving at")
            until = time.monotonic() + 4 * self.slow_s
            while time.monotonic() < until and self.run.poll() is None:
                if self.said.read_bytes().count(b"legroom: serving at") > served:
                    break
                time.sleep(0.05)
        elif hit != "legroom":
            time.sleep(0.3)
        if self.run.poll() is None:
            self.run.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.run.wait(60)

    def _left(self, hit: str) -> dict[str, Any]:
        hung = self.run.poll() is None
        until = time.monotonic() + CLEAN_S
        while (orphans := marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.05)
        said = self.said.read_text("utf-8", "replace")
        own = "\n".join(line for line in said.splitlines() if line.startswith("legroom: "))
        named = {int(number) for number in re.findall(r"incident (\d+)", own)}
        with Journal.open(self.home / "journal.db") as journal:
            lost = sorted(number for number in named if journal.incident(number) is None)
            problems = journal.problems()
        crashed = "nobody had asked" in own or "the server died" in own
        result = {
            "target": hit,
            "signal": self.number.name,
            "moment": self.moment,
            "orphans": len(orphans),
            "port_bound": is_bound(self.port),
            "lost": lost,
            "journal": list(problems),
            "incidents": len(named),
            "unjournalled": crashed and not named,
            "hung": hung,
            "exit_code": self.run.poll(),
            "traceback": "Traceback" in own or "This is a bug in legroom" in said,
        }
        result["clean"] = not (
            orphans or result["port_bound"] or lost or problems or hung or result["unjournalled"] or result["traceback"]
        )
        if not result["clean"]:
            result["said"] = said[-3000:]
            for pid in orphans:
                os.kill(pid, signal.SIGKILL)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--vllm", help="a real one; without it the stand-in")
    parser.add_argument("--port", type=int, default=18170, help="the first of ten")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vllm, flags, slow_s = args.vllm, [], 2.0
        if vllm is None:
            vllm = str(stand_in(folder))
        else:
            flags, slow_s = [*SERVE_FLAGS, "--kv-cache-memory-bytes", "16M"], 60.0
            flags += ["--max-model-len", "2048", "--served-model-name", "tiny"]
        model = str(write_model(folder / "llama"))
        for number in range(args.rounds):
            port = args.port + number % 10
            results.append(Round(folder, vllm, model, flags, args.seed + number, port, slow_s).play())
            if not results[-1]["clean"]:
                print(json.dumps(results[-1], indent=1), flush=True)
    show(results)
    if args.json:
        args.json.write_text(json.dumps({"seed": args.seed, "rounds": results}, indent=1))


def stand_in(folder: Path) -> Path:
    """A `vllm` that is the stand-in."""
    path = folder / "vllm"
    server = ROOT / "tests/run/stand_in_vllm.py"
    path.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(server)!r}, run_name='__main__')\n")
    path.chmod(0o755)
    return path


def show(results: list[dict[str, Any]]) -> None:
    print(f"{'killed':14} {'while':10} {'SIGKILL':>8} {'SIGTERM':>8} {'clean':>8}")
    rows = collections.defaultdict(list)
    for result in results:
        rows[result["target"], result["moment"]].append(result)
    for (target, moment), kills in sorted(rows.items()):
        hard = sum(kill["signal"] == "SIGKILL" for kill in kills)
        clean = sum(kill["clean"] for kill in kills)
        print(f"{target:14} {moment:10} {hard:8} {len(kills) - hard:8} {clean:4}/{len(kills)}")
    print(
        f"{len(results)} kills: {sum(kill['orphans'] for kill in results)} orphans, "
        f"{sum(kill['port_bound'] for kill in results)} ports left bound, "
        f"{sum(len(kill['lost']) for kill in results)} journal entries lost of "
        f"{sum(kill['incidents'] for kill in results)}, {sum(not kill['clean'] for kill in results)} rounds not clean"
    )


if __name__ == "__main__":
    main()
