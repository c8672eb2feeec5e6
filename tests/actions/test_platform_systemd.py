"""systemd units are restarted and their flags changed by a drop-in.

No systemd runs where these tests run (it wants to be process 1): `systemctl` is a fake on the PATH.
"""

import asyncio
import json
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from platform_fakes import SYSTEMCTL, install

from legroom.actions.platform import ActionFailed, FlagChange, RestartRequest
from legroom.actions.systemd_platform import SystemdUnit, effective_exec_start, unit_quoted

UNIT = """[Service]
Environment=HF_HOME=/models
ExecStart=/usr/bin/vllm serve org/model \\
    --max-model-len 32768 --enable-prefix-caching
Restart=on-failure
"""


@pytest.fixture
def unit(tmp_path, monkeypatch):
    install(tmp_path / "bin", "systemctl", SYSTEMCTL)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("FAKE_STATE", str(tmp_path / "state.json"))
    (tmp_path / "vllm.service").write_text(UNIT)
    state = {
        "unit": "vllm.service",
        "active": "active",
        "starts": 1,
        "file": str(tmp_path / "vllm.service"),
        "folder": str(tmp_path),
    }
    (tmp_path / "state.json").write_text(json.dumps(state))
    return SystemdUnit("vllm.service", folder=tmp_path)


def change_state(tmp_path, **values):
    path = tmp_path / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_restart_changes_the_identity_and_nothing_else_does(unit):
    before = asyncio.run(unit.state())
    assert (before.running, before.underway) == (True, False)
    assert asyncio.run(unit.state()) == before
    asyncio.run(unit.restart(RestartRequest("7")))
    assert asyncio.run(unit.state()).identity != before.identity


def test_a_unit_on_its_way_is_under_way(unit, tmp_path):
    change_state(tmp_path, active="deactivating")
    assert asyncio.run(unit.state()).underway
    change_state(tmp_path, active="active", job="1234")
    assert asyncio.run(unit.state()).underway


def test_a_unit_that_is_not_there_is_said_to_be_missing(unit, tmp_path):
    with pytest.raises(ActionFailed, match=r"other\.service.*not-found"):
        asyncio.run(SystemdUnit("other.service", folder=tmp_path).state())


def test_what_systemd_says_of_a_failure_is_shown_without_secrets(unit, tmp_path):
    change_state(tmp_path, broken=True)
    with pytest.raises(ActionFailed, match="Job for vllm") as failure:
        asyncio.run(unit.restart(RestartRequest("7")))
    assert "verysecret" not in failure.value.message


def test_new_flags_are_a_drop_in_that_undo_takes_away(unit, tmp_path):
    async def go():
        override = await unit.override_place()
        await unit.write_flags(FlagChange({"--max-model-len": "8192", "--enforce-eager": ""}, {"VLLM_X": "a b"}))
        return override

    override = asyncio.run(go())
    written = (tmp_path / "vllm.service.d" / "90-legroom.conf").read_text()
    assert "ExecStart=\nExecStart=/usr/bin/vllm serve org/model --enable-prefix-caching" in written
    assert 'Environment="VLLM_X=a b"' in written
    text = UNIT + written
    assert effective_exec_start(text)[-3:] == ["--max-model-len", "8192", "--enforce-eager"]
    asyncio.run(unit.restore_flags(override))
    assert not (tmp_path / "vllm.service.d" / "90-legroom.conf").exists()
    calls = json.loads((tmp_path / "state.json").read_text())["calls"]
    assert calls.count(["daemon-reload"]) == 2


def test_a_second_change_is_undone_to_the_first(unit, tmp_path):
    async def go():
        await unit.write_flags(FlagChange({"--max-model-len": "8192"}))
        override = await unit.override_place()
        await unit.write_flags(FlagChange({"--max-model-len": "4096"}))
        await unit.restore_flags(override)

    asyncio.run(go())
    assert "--max-model-len 8192" in (tmp_path / "vllm.service.d" / "90-legroom.conf").read_text()


def test_signs_that_systemd_replaces_are_written_twice_and_those_of_the_unit_are_kept(unit, tmp_path):
    (tmp_path / "vllm.service").write_text("[Service]\nExecStart=/usr/bin/vllm serve %i --port $PORT\n")
    asyncio.run(unit.write_flags(FlagChange({"--chat-template": "50% $x"}, {"VLLM_X": "50% $x"})))
    written = (tmp_path / "vllm.service.d" / "90-legroom.conf").read_text()
    assert 'ExecStart=/usr/bin/vllm serve %i --port $PORT --chat-template "50%% $$x"\n' in written
    assert 'Environment="VLLM_X=50%% $x"\n' in written


def test_a_unit_that_runs_a_script_keeps_its_flags(unit, tmp_path):
    (tmp_path / "vllm.service").write_text("[Service]\nExecStart=/opt/start.sh --fast\n")
    for change in (unit.override_place(), unit.write_flags(FlagChange({"--max-model-len": "8192"}))):
        with pytest.raises(ActionFailed, match=r"start\.sh.*cannot see"):
            asyncio.run(change)
    assert not (tmp_path / "vllm.service.d").exists()


def test_without_systemctl_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ActionFailed, match="systemctl is not"):
        asyncio.run(SystemdUnit("vllm.service").state())


@given(st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1), min_size=1))
def test_quoted_words_are_read_back_as_they_were(words):
    line = " ".join(unit_quoted(word) for word in words)
    assert shlex.split(line) == words
    assert effective_exec_start(f"[Service]\nExecStart={line}\n".replace("\\\n", "\\\\\n")) == words or line.endswith(
        "\\"
    )


def test_several_start_lines_are_not_guessed_among():
    with pytest.raises(ActionFailed, match="2 ExecStart"):
        effective_exec_start("ExecStart=/bin/a\nExecStart=/bin/b\n")
