"""Docker containers and Compose services. No Docker daemon runs here: `docker` is a fake on the PATH."""

import asyncio
import json

import pytest
from platform_fakes import DOCKER, install

from legroom.actions.docker_platform import ComposeService, DockerContainer
from legroom.actions.platform import ActionFailed, FlagChange, RestartRequest, scale


@pytest.fixture
def docker(tmp_path, monkeypatch):
    install(tmp_path / "bin", "docker", DOCKER)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("FAKE_STATE", str(tmp_path / "state.json"))
    state = {"names": ["vllm0"], "running": True, "starts": 1, "command": ["--model", "m", "--max-model-len=32768"]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    return lambda: json.loads((tmp_path / "state.json").read_text())


@pytest.fixture
def service(docker, tmp_path):
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    return ComposeService(tmp_path / "compose.yaml", "vllm")


def test_a_container_is_restarted_and_told_apart_from_before(docker):
    container = DockerContainer("vllm0", stop_s=33)
    before = asyncio.run(container.state())
    asyncio.run(container.restart(RestartRequest("1")))
    assert asyncio.run(container.state()).identity != before.identity
    assert ["restart", "--time", "33", "vllm0"] in docker()["calls"]


def test_a_container_that_is_not_there_is_said_to_be_missing(docker):
    with pytest.raises(ActionFailed, match="No such container"):
        asyncio.run(DockerContainer("other").state())


def test_the_flags_of_a_container_alone_cannot_be_changed(docker):
    with pytest.raises(ActionFailed, match="cannot change") as failure:
        asyncio.run(DockerContainer("vllm0").override_place())
    assert "Compose" in failure.value.hint


def test_a_compose_service_gets_an_override_file_that_undo_takes_away(service, tmp_path, docker):
    override = asyncio.run(service.override_place())
    asyncio.run(service.write_flags(FlagChange({"--max-model-len": "8192"}, {"A": "b"})))
    written = json.loads((tmp_path / "compose.legroom.yaml").read_text())
    assert written == {
        "services": {"vllm": {"command": ["--model", "m", "--max-model-len", "8192"], "environment": {"A": "b"}}}
    }
    asyncio.run(service.restart(RestartRequest("1")))
    assert str(tmp_path / "compose.legroom.yaml") in docker()["calls"][-1]
    asyncio.run(service.restore_flags(override))
    assert not (tmp_path / "compose.legroom.yaml").exists()


@pytest.mark.parametrize("words", [["bash", "-c", "vllm serve m"], ["/bin/sh", "start.sh"]])
def test_a_compose_service_that_runs_a_script_keeps_its_flags(service, tmp_path, docker, words):
    (tmp_path / "state.json").write_text(json.dumps(docker() | {"command": words}))
    for change in (service.override_place(), service.write_flags(FlagChange({"--max-model-len": "8192"}))):
        with pytest.raises(ActionFailed, match="cannot see"):
            asyncio.run(change)
    assert not (tmp_path / "compose.legroom.yaml").exists()


def test_a_dollar_sign_reaches_the_server_of_a_compose_service(service, tmp_path, docker):
    asyncio.run(service.write_flags(FlagChange({"--chat-template": "$x"}, {"A": "$y"})))
    written = json.loads((tmp_path / "compose.legroom.yaml").read_text())["services"]["vllm"]
    assert (written["command"][-1], written["environment"]) == ("$$x", {"A": "$$y"})


def test_a_service_without_a_command_keeps_its_flags(tmp_path, docker):
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    with pytest.raises(ActionFailed, match="no command"):
        asyncio.run(ComposeService(tmp_path / "compose.yaml", "bare").write_flags(FlagChange({"--seed": "1"})))
    with pytest.raises(ActionFailed, match="no service other"):
        asyncio.run(ComposeService(tmp_path / "compose.yaml", "other").write_flags(FlagChange({"--seed": "1"})))


def test_a_compose_service_is_scaled_and_a_container_is_not(service, docker):
    assert "from 1 to 3" in asyncio.run(scale(service, 3))
    assert docker()["scaled"] == "vllm=3"
    assert "legroom cannot scale" in asyncio.run(scale(DockerContainer("vllm0"), 2))
    with pytest.raises(ActionFailed, match="below one"):
        asyncio.run(scale(service, 0))
