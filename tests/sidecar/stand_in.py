"""Starting the stand-in server and a sidecar that restarts it by a command, for tests and benches."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

SERVER = Path(__file__).with_name("stand_in_server.py")


def restart_script(folder: Path, port: int) -> Path:
    """Stops the server of the pid file and starts another, which outlives whoever asked."""
    script = folder / "restart.sh"
    script.write_text(
        "#!/bin/sh\n"
        f"old=$(cat {folder}/pid)\n"
        'kill -9 "$old"\n'
        # A zombie is gone too: in a container whose first process collects nobody, it stays one.
        'while grep -qs "^State:.[^Z]" "/proc/$old/status"; do sleep 0.01; done\n'
        f"setsid {sys.executable} {SERVER} {port} {folder} </dev/null >{folder}/log 2>&1 &\n"
        f'while [ "$(cat {folder}/pid)" = "$old" ]; do sleep 0.01; done\n'
    )
    script.chmod(0o755)
    return script


def start_server(folder: Path, port: int) -> None:
    # Its own session and a shell between: nobody is its parent, as with a server that an init runs.
    line = f"setsid {sys.executable} {SERVER} {port} {folder} </dev/null >{folder}/log 2>&1 &"
    subprocess.run(["/bin/sh", "-c", line], check=True)
    wait_for(lambda: (folder / "pid").exists() and answers(f"http://127.0.0.1:{port}/metrics"))


def stop_server(folder: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


def starts(folder: Path) -> list[str]:
    """Which action asked for each start of the server."""
    return [line.split()[0] for line in (folder / "starts").read_text().splitlines()]


def write_config(folder: Path, port: int, own_port: int, server: str = "", **more: object) -> Path:
    """watch.toml for the stand-in: hasty detectors, no pauses, restarts turned on."""
    lines = {
        "interval_s": 0.05,
        "port": own_port,
        "journal": "journal.db",
        "act": ["notify", "restart"],
        "token": "act-token",
        **more,
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    text += f"""
[limits]
per_hour = 3600
per_day = 86400
first_pause_s = 0
drain_deadline_s = 5
restart_deadline_s = 20

[thresholds]
stuck_hold = {{ samples = 2, seconds = 0.1 }}
unreachable_hold = {{ samples = 60, seconds = 5 }}
calm = {{ samples = 2, seconds = 0.1 }}
crash_restarts = 1000000

[[servers]]
url = "http://127.0.0.1:{port}"
group = "llama"
platform = "command"
restart_command = "{restart_script(folder, port)}"
pid_file = "pid"
settle_s = 0.3
drain = {{ by = "guard", token = "guard-token" }}
{server}
"""
    path = folder / "watch.toml"
    path.write_text(text)
    return path


RUN = "import sys; from pathlib import Path; from legroom.sidecar.sidecar import run_sidecar; \
from legroom.sidecar.watch_config import read_config; sys.exit(run_sidecar(read_config(Path(sys.argv[1]))))"


def start_sidecar(config: Path, log: Path) -> subprocess.Popen:
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-c", RUN, str(config)], stdout=output, stderr=output)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def wait_for(true, seconds: float = 90.0, every_s: float = 0.02) -> None:
    end_s = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end_s:
            raise AssertionError("it never came true")
        time.sleep(every_s)
