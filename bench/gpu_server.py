"""A real `vllm serve` with legroom and the faults of gpu_faults.py beside it, for benches that run on a GPU machine.

Nothing has to be installed: legroom is taken from this tree, and its entry point from a folder that is made here.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench_harness import ROOT, free_port

LEGROOM_POINT = "legroom_worker_memory = legroom.worker.plugin:register"
FAULTS_POINT = "legroom_bench_faults = gpu_faults:register"
_BLOCKS = re.compile(rb'num_gpu_blocks="(\d+)"')


def beside_vllm(folder: Path) -> str:
    """A PYTHONPATH under which vLLM finds legroom's plugin and the faults as if they were installed."""
    metadata = folder / "legroom_bench-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: legroom-bench\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", LEGROOM_POINT, FAULTS_POINT, ""]))
    return os.pathsep.join((str(folder), str(ROOT / "src"), str(ROOT / "bench")))


def legroom_json(*words: str, timeout_s: float = 60.0, env: dict[str, str] | None = None) -> dict[str, Any]:
    """What a command of legroom's answers with `--json`; where it answers nothing, why."""
    paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    try:
        command = [sys.executable, "-m", "legroom", words[0], "--json", *words[1:]]
        variables = os.environ | {"PYTHONPATH": paths} | (env or {})
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=variables)
        answer: dict[str, Any] = json.loads(run.stdout)
        return answer
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {timeout_s:g} s"}
    except ValueError:
        return {"error": run.stderr.strip()[-600:], "exit": run.returncode}


class GpuServer:
    """One server. `vllm` is the command; `folder` gets its log, its records and its faults' files."""

    def __init__(
        self,
        vllm: str,
        model: Path,
        folder: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        limit_s: float = 90.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port, self.limit_s = folder, free_port(), limit_s
        self.url = f"http://127.0.0.1:{self.port}"
        self.model, self.flags = model, flags
        self.log, self.records = folder / "server.log", folder / "records"
        own_flags = f"--served-model-name m --load-format dummy --host 127.0.0.1 --port {self.port}"
        self.words = [vllm, "serve", str(model), *own_flags.split(), *flags]
        own = {
            "LEGROOM_WORKER_MEMORY": "1",
            "LEGROOM_BLACKBOX_DIR": str(self.records),
            "LEGROOM_HOME": str(folder / "home"),
            "LEGROOM_FAULTS": str(folder),
            "PYTHONPATH": os.pathsep.join(filter(None, (beside_vllm(folder / "beside"), os.environ.get("PYTHONPATH")))),
        }
        self.env = os.environ | own | (env or {})

    def start(self) -> bool:
        """Whether it serves within its time."""
        self.began_s = time.monotonic()
        self.child = subprocess.Popen(
            self.words, env=self.env, stdout=self.log.open("ab"), stderr=subprocess.STDOUT, start_new_session=True
        )
        while time.monotonic() - self.began_s < self.limit_s and self.child.poll() is None:
            if self.is_healthy():
                self.start_s = time.monotonic() - self.began_s
                return True
            time.sleep(0.1)
        return False

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stop(self, limit_s: float = 10.0) -> None:
        for number, wait_s in ((signal.SIGTERM, limit_s), (signal.SIGKILL, 5.0)):
            if self.child.poll() is None:
                self.child.send_signal(number)
                try:
                    self.child.wait(wait_s)
                except subprocess.TimeoutExpired:
                    continue

    def ended_within(self, seconds: float) -> bool:
        try:
            self.child.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False

    def ask(self, timeout_s: float = 60.0, **body: Any) -> int:
        """The status of a completion; 0 where the connection broke."""
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps({"model": "m", **body}).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                answer.read()
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def ask_all(self, bodies: Sequence[dict[str, Any]], timeout_s: float = 60.0) -> list[int]:
        """All at once."""
        with ThreadPoolExecutor(max(len(bodies), 1)) as pool:
            return list(pool.map(lambda body: self.ask(timeout_s, **body), bodies))

    def page(self) -> bytes:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            return bytes(answer.read())

    def num_blocks(self) -> int | None:
        shown = _BLOCKS.search(self.page())
        return int(shown[1]) if shown else None

    def black_boxes(self) -> list[Path]:
        return sorted(self.records.glob("*.json")) if self.records.is_dir() else []


def planned_blocks(model: Path, flags: Sequence[str], gpu: str, env: dict[str, str] | None = None) -> int | None:
    """What `legroom plan` says of a server of these flags, in blocks of its pool."""
    variables = [f"{name}={value}" for name, value in (env or {}).items() if name.startswith("VLLM_")]
    line = " ".join([*variables, shlex.join(["vllm", "serve", str(model), *flags])])
    plan = legroom_json("plan", "--gpu", gpu, "--vllm", "0.32.0", "--no-advice", "--command", line)
    blocks = plan.get("kv", {}).get("num_blocks")
    return blocks if isinstance(blocks, int) else None
