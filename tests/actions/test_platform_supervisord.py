"""A real supervisord, started for these tests, whose programs legroom restarts and gives new flags."""

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from legroom.actions.platform import ActionFailed, FlagChange, RestartRequest
from legroom.actions.supervisord_platform import SupervisordProgram, with_command

BIN = Path(sys.executable).parent
CONFIG = """[unix_http_server]
file={folder}/s.sock
[supervisord]
logfile={folder}/log
pidfile={folder}/pid
nodaemon=true
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl=unix://{folder}/s.sock
[program:vllm]
command={folder}/vllm serve m
    --max-model-len 32768
startsecs=0
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not (BIN / "supervisord").exists():
        pytest.skip("supervisor is not installed: pip install supervisor")
    folder = tmp_path_factory.mktemp("sv")
    server = folder / "vllm"
    server.write_text(f'#!/bin/sh\necho "$@" > {folder}/args\nexec {shutil.which("sleep")} 600\n')
    server.chmod(0o755)
    config = folder / "supervisord.conf"
    config.write_text(CONFIG.format(folder=folder))
    daemon = subprocess.Popen([BIN / "supervisord", "-c", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(BIN), prepend=":")
        program = SupervisordProgram("vllm", config)
        for _ in range(900):
            try:
                if asyncio.run(program.state()).running and (folder / "args").exists():
                    break
            except ActionFailed:
                pass
            time.sleep(0.1)
        yield program
    daemon.terminate()
    daemon.wait(120)


def args(program):
    path = program.config.with_name("args")
    for _ in range(1800):
        if path.exists() and path.read_text():
            return path.read_text().strip()
        time.sleep(0.05)
    raise AssertionError("the program never wrote its arguments")


def test_a_restart_gives_another_process(program):
    before = asyncio.run(program.state())
    assert before.running
    asyncio.run(program.restart(RestartRequest("1", 30)))
    after = asyncio.run(program.state())
    assert after.running
    assert after.identity not in (None, before.identity)


def test_new_flags_reach_the_program_and_undo_takes_them_back(program):
    override = asyncio.run(program.override_place())
    for change, expected in (
        (lambda: program.write_flags(FlagChange({"--max-model-len": "8192"})), "serve m --max-model-len 8192"),
        (lambda: program.restore_flags(override), "serve m --max-model-len 32768"),
    ):
        asyncio.run(change())
        program.config.with_name("args").unlink()
        asyncio.run(program.restart(RestartRequest("2", 30)))
        assert args(program) == expected


def test_a_program_that_is_not_there_is_said_to_be_missing(program):
    with pytest.raises(ActionFailed, match="other"):
        asyncio.run(SupervisordProgram("other", program.config).state())


def test_without_a_daemon_it_says_so(program, tmp_path):
    config = tmp_path / "c.conf"
    config.write_text(CONFIG.format(folder=tmp_path))
    with pytest.raises(ActionFailed, match="does not answer"):
        asyncio.run(SupervisordProgram("vllm", config).state())


def test_only_the_command_of_the_one_program_changes():
    text = "[program:a]\ncommand=vllm serve a\n[program:b]\nuser=x\ncommand = vllm serve b --seed 1\n"
    changed = with_command(text, "b", FlagChange({"--seed": "100%"}))
    assert changed == "[program:a]\ncommand=vllm serve a\n[program:b]\nuser=x\ncommand=vllm serve b --seed 100%%\n"
    with pytest.raises(ActionFailed, match=r"no .program:c. section"):
        with_command(text, "c", FlagChange({"--seed": "2"}))


def test_names_that_supervisord_replaces_stay_names():
    text = "[program:b]\ncommand=%(ENV_HOME)s/bin/vllm serve m --port 80%(process_num)02d --x 5%%\n"
    changed = with_command(text, "b", FlagChange({"--seed": "1"}))
    assert changed.count("%(ENV_HOME)s") == changed.count("%(process_num)02d") == 1
    assert "%%(" not in changed and "5%%" in changed


def test_an_inline_comment_is_no_part_of_the_command():
    text = "[program:b]\ncommand=vllm serve m ; the large one\n  --port 8001 # as the balancer has it\n"
    changed = with_command(text, "b", FlagChange({"--seed": "1"}))
    assert changed == "[program:b]\ncommand=vllm serve m --port 8001 --seed 1\n"


def test_a_command_with_an_open_quote_cannot_be_changed():
    with pytest.raises(ActionFailed, match="No closing quotation"):
        with_command("[program:b]\ncommand=vllm serve 'm\n", "b", FlagChange({"--seed": "1"}))
