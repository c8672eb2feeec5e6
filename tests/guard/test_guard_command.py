"""`legroom guard` on the command line."""

import json
import os
import signal
import subprocess
import sys

import pytest

from legroom.cli.main import main
from legroom.guard.policy import parse_policy


def test_the_printed_policy_is_one(capsys):
    assert main(["guard", "--print-policy"]) == 0
    parse_policy(capsys.readouterr().out)


def test_the_policy_is_printed_as_json_too(capsys):
    assert main(["guard", "--print-policy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["queue"]["wait_s"] == 30


def test_a_right_policy_is_fine(tmp_path, capsys):
    path = tmp_path / "policy.toml"
    path.write_text("[pool]\novercommit = 1.5")
    assert main(["guard", "--check", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"]["pool"]["overcommit"] == 1.5


def test_a_wrong_policy_names_line_and_key(tmp_path, capsys):
    path = tmp_path / "policy.toml"
    path.write_text("[pool]\novercomit = 1.5")
    assert main(["guard", "--check", str(path)]) == 2
    printed = capsys.readouterr()
    assert "line 2" in printed.err
    assert "overcomit" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["guard"],
        ["guard", "--upstream", "ftp://x"],
        ["guard", "--upstream", "abc"],
        ["guard", "--upstream", "http://a b"],
        ["guard", "--upstream", "http://x:0"],
        ["guard", "--upstream", "http://x", "--port", "99999"],
        ["guard", "--upstream", "http://x", "--plan", "/nowhere.json"],
        ["guard", "--upstream", "http://x", "--policy", "/nowhere.toml"],
        ["guard", "--upstream", "http://x", "--drain-timeout", "inf"],
        ["guard", "--upstream", "http://x", "--json"],
        ["guard", "--upstream", "http://localhost:8100"],
        ["guard", "--upstream", "http://127.0.0.1:8123/v1", "--port", "8123", "--host", "0.0.0.0"],
    ],
)
def test_a_wrong_call_says_what_is_wrong(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error:")


def test_it_serves_reloads_on_sighup_and_stops_on_sigterm(tmp_path):
    policy = tmp_path / "policy.toml"
    policy.write_text("[pool]\ntokens = 1600")
    words = ["--upstream", "http://me:secret@127.0.0.1:9", "--port", "0", "--policy", str(policy)]
    child = subprocess.Popen(
        [sys.executable, "-m", "legroom", "guard", *words], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    try:
        first = child.stderr.readline()
        assert "guarding http://***@127.0.0.1:9 on http://127.0.0.1:" in first
        assert "1,600 KV tokens" in child.stderr.readline()
        policy.write_text("[pool]\ntokens = 'x'")
        child.send_signal(signal.SIGHUP)
        assert "line 2" in child.stderr.readline()
        child.send_signal(signal.SIGTERM)
        rest = child.communicate(timeout=120)[1]
        assert child.returncode == 0
        assert "secret" not in first + rest
    finally:
        child.kill()
