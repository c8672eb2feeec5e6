"""Do first fixes start? Fails a real vLLM in many ways, diagnoses its log, runs the command of the first fix as it is
printed, and waits for the server.

    python bench/diagnose_start.py --vllm VENV/bin/vllm [--case NAME ...] [--log-only] [--json FILE]

Needs a vLLM that runs here (a CPU build will do); makes its own tiny models. The failures are those of `run_heal.py`.
The command that failed is given to the diagnosis beside its log; with `--log-only` it is not, and cases that end before
vLLM prints its flags are left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_harness import arguments, write_json
from run_heal import CASES
from tiny_models import SERVE_ENV, SERVE_FLAGS, write_model

_ASSIGNMENT = re.compile(r"([A-Z_][A-Z0-9_]*)=(.*)", re.DOTALL)


def start(vllm: str, words: Sequence[str], env: Mapping[str, str], log: Path, patience_s: float) -> str:
    """`ready`, `failed` or `too slow`; the server is gone afterwards."""
    environ = {**os.environ, **SERVE_ENV, **env}
    with log.open("wb") as out:
        server = subprocess.Popen([vllm, *words[1:]], stdout=out, stderr=out, env=environ, start_new_session=True)
    try:
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            if b"Application startup complete" in log.read_bytes():
                return "ready"
            if server.poll() is not None:
                return "failed"
            time.sleep(0.5)
        return "too slow"
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def diagnosed(log: Path, line: str | None) -> dict[str, Any]:
    """What `legroom diagnose --json` says."""
    words = [sys.executable, "-m", "legroom", "diagnose", str(log), "--json"]
    words += ["--command", line] if line else []
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return dict(json.loads(done.stdout)) if done.stdout else {"findings": [], "error": done.stderr}


def try_case(name: str, vllm: str, models: Path, port: int, patience_s: float, log_only: bool) -> dict[str, Any]:
    """One failure, its first fix, and what the server does with it."""
    kind, flags, env = CASES[name]
    model = str(write_model(models / kind, kind))
    words = ["vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port), *SERVE_FLAGS, *flags]
    line = " ".join([*(f"{key}={value}" for key, value in env.items()), shlex.join(words)])
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first.log", Path(folder) / "second.log"
        before = start(vllm, words, env, first, patience_s)
        answer = diagnosed(first, None if log_only else line)
        finding = answer["findings"][0] if answer["findings"] else {}
        fix = finding.get("fixes", [{}])[0] if finding else {}
        command = list(fix.get("command", ()))
        found = {"case": name, "before": before, "cause": finding.get("cause"), "command": shlex.join(command)}
        if not command:
            return {**found, "after": "no command", "why": fix.get("why", answer.get("error", ""))}
        fixed_env: dict[str, str] = {}
        while command and (variable := _ASSIGNMENT.fullmatch(command[0])):
            fixed_env[variable[1]] = variable[2]
            command.pop(0)
        after = start(vllm, command, fixed_env, second, patience_s)
        errors = [text for text in second.read_text("utf-8", "replace").splitlines() if "Error" in text]
        return {**found, "after": after, "last": errors[-1:] if after != "ready" else []}


def main() -> None:
    args = arguments(__doc__, vllm=str, case=(), port=18431, patience=240.0, log_only=False, json=Path)
    results = []
    with tempfile.TemporaryDirectory() as models:
        for number, name in enumerate(args.case or CASES):
            port = args.port + number
            results.append(try_case(name, args.vllm, Path(models), port, args.patience, args.log_only))
            print(json.dumps(results[-1]), flush=True)
    failed = [result for result in results if result["before"] == "failed"]
    started = sum(result["after"] == "ready" for result in failed)
    summary = {"failures": len(failed), "started with the first fix": started}
    write_json(args.json, {**summary, "cases": results})
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
