"""Other programs are called by their words, with a deadline, behind a gate that a kill closes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from legroom.actions.command_platform import CommandPlatform
from legroom.actions.platform import (
    ActionFailed,
    FlagChange,
    Override,
    RestartRequest,
    forget_override,
    keep_override,
    kept_override,
    undo_file,
    write_atomically,
)
from legroom.actions.programs import process_identity, run_checked, run_program
from legroom.actions.run_platform import RunChild


def test_words_are_never_read_as_shell(tmp_path):
    done = asyncio.run(run_program(["printf", "%s", "$(touch bad); `id` > x"], timeout_s=10))
    assert (done.code, done.output) == (0, "$(touch bad); `id` > x")

    async def noted(pid, identity):
        assert process_identity(pid) == identity

    gated = asyncio.run(
        run_program(["printf", "%s|", "a b", "$HOME;", '"'], timeout_s=10, request=RestartRequest("1", launched=noted))
    )
    assert gated.output == 'a b|$HOME;|"|'


def test_a_program_that_is_missing_or_slow_or_fails_is_a_sentence():
    with pytest.raises(ActionFailed, match="no-such-program is not installed"):
        asyncio.run(run_program(["no-such-program"], timeout_s=1))
    with pytest.raises(ActionFailed, match=r"within 0\.2 s"):
        asyncio.run(run_program(["sleep", "60"], timeout_s=0.2))
    with pytest.raises(ActionFailed, match=r"trying failed: sh ended with 3: oh no \*\*\*"):
        asyncio.run(run_checked(["sh", "-c", "echo oh no hf_abcdefghijkl; exit 3"], "trying", timeout_s=10))


KILLED_AT_THE_GATE = """
import asyncio, os, signal, sys
from legroom.actions.platform import RestartRequest
from legroom.actions.programs import run_program
async def launched(pid, identity):
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(run_program(["touch", sys.argv[1]], timeout_s=10, request=RestartRequest("1", launched=launched)))
"""


def test_a_program_whose_start_was_not_recorded_never_runs(tmp_path):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT_THE_GATE, tmp_path / "done"], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    pid = int(killed.stdout)
    for _ in range(1800):
        if process_identity(pid) is None:
            break
        time.sleep(0.05)
    assert process_identity(pid) is None
    assert not (tmp_path / "done").exists()


def test_an_identity_is_of_one_process_alone():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert process_identity(child.pid) == process_identity(child.pid) != process_identity(os.getpid())
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_identity(child.pid) is None, "a zombie serves nobody"
    child.wait()
    assert process_identity(child.pid) is None


def test_a_command_restarts_with_the_server_and_the_flags_it_is_told(tmp_path):
    output = tmp_path / "said"
    platform = CommandPlatform(
        f'echo "$LEGROOM_SERVER $LEGROOM_ACTION" > {output}; cat "$LEGROOM_FLAGS_FILE" >> {output}',
        "http://a:8000",
        flags_file=tmp_path / "flags.json",
    )
    override = asyncio.run(platform.override_place())
    asyncio.run(platform.write_flags(FlagChange({"--seed": "1"})))
    asyncio.run(platform.restart(RestartRequest("17", 10)))
    first, rest = output.read_text().split("\n", 1)
    assert first == "http://a:8000 17"
    assert json.loads(rest)["flags"] == {"--seed": "1"}
    asyncio.run(platform.restore_flags(override))
    assert not (tmp_path / "flags.json").exists()


def test_a_command_knows_its_server_by_a_pid_file(tmp_path):
    path = tmp_path / "pid"
    platform = CommandPlatform("true", pid_file=path)
    assert asyncio.run(platform.state()).running is False
    path.write_text(f"{os.getpid()}\n")
    assert asyncio.run(platform.state()).identity == process_identity(os.getpid())
    path.write_text("none\n")
    with pytest.raises(ActionFailed, match="no process id"):
        asyncio.run(platform.state())
    assert asyncio.run(CommandPlatform("true").state()).identity is None


def test_a_command_without_a_flags_file_keeps_its_flags():
    with pytest.raises(ActionFailed, match="flags_file"):
        asyncio.run(CommandPlatform("true").override_place())


# A stand-in for `legroom run`: replaces its child on SIGHUP and writes the record that `run` writes.
RUN = """
import json, os, signal, subprocess, sys
from pathlib import Path
record = Path(sys.argv[1])
def start(*_):
    global child
    if child:
        child.kill(); child.wait()
    child = subprocess.Popen(["sleep", "600"])
    words = ["vllm", "serve", "m", "--port", "1"]
    record.write_text(json.dumps({"pid": os.getpid(), "child_pid": child.pid, "command": words}))
def stop(*_):
    child.kill(); child.wait(); sys.exit(0)
child = None
signal.signal(signal.SIGHUP, start)
signal.signal(signal.SIGTERM, stop)
start()
while True:
    signal.pause()
"""


def test_a_run_is_restarted_by_a_hangup_and_reads_its_flags_file(tmp_path):
    record = tmp_path / "runs" / "8000.json"
    record.parent.mkdir()
    run = subprocess.Popen([sys.executable, "-c", RUN, record])
    try:
        for _ in range(1800):
            if record.exists() and record.read_text():
                break
            time.sleep(0.05)
        child = RunChild(8000, tmp_path)
        before = asyncio.run(child.state())
        asyncio.run(child.write_flags(FlagChange({"--seed": "1"})))
        flags = tmp_path / "runs" / "8000.flags.json"
        assert json.loads(flags.read_text()) == {"flags": {"--seed": "1"}, "env": {}}
        asyncio.run(child.restore_flags(Override("", json.dumps(["vllm", "serve", "m", "--no-async-scheduling"]))))
        assert json.loads(flags.read_text())["flags"] == {"--port": None, "--no-async-scheduling": ""}
        asyncio.run(child.restart(RestartRequest("1", 20)))
        after = asyncio.run(child.state())
        assert after.identity not in (None, before.identity)
    finally:
        run.terminate()
        run.wait(120)
    with pytest.raises(ActionFailed, match="is gone"):
        asyncio.run(child.state())


def test_no_run_on_a_port_is_said(tmp_path):
    with pytest.raises(ActionFailed, match="port 9"):
        asyncio.run(RunChild(9, tmp_path).state())


def test_what_stood_before_is_kept_until_it_is_forgotten(tmp_path):
    for before in (None, "ExecStart=vllm --api-key hf_abcdefghijkl"):
        keep_override(3, Override("/etc/x", before), tmp_path)
        assert kept_override(3, tmp_path) == Override("/etc/x", before)
    assert undo_file(3, tmp_path).stat().st_mode & 0o077 == 0
    forget_override(3, tmp_path)
    assert kept_override(3, tmp_path) is None


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ActionFailed, match="cannot be written"):
        write_atomically(Path(tmp_path / "file" / "x"), "text")
