"""The unit: systemd takes it, and its times follow from the plan."""

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from planned import SERVERS, planned, request

from legroom.deployments.deployment import deployment_from_file
from legroom.errors import LegroomError
from legroom.exports.deploy import systemd
from legroom.exports.deploy.exported_server import planned_server
from legroom.exports.export_request import ExportRequest
from legroom.planning.plan_document import plan_from_json

ANALYZE = shutil.which("systemd-analyze")


def unit(which, /, **options):
    return systemd.files(request(which, **options))[0].text


def read(text):
    parser = configparser.RawConfigParser(strict=False, comment_prefixes=("#",))
    parser.optionxform = str
    parser.read_string(text.replace("\\\n", " "))
    return parser


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed")
@pytest.mark.parametrize("extras", [{}, {"with_guard": True, "with_sidecar": True}], ids=["plain", "guarded"])
def test_systemd_analyze_verifies_every_unit(tmp_path, extras):
    folder = tmp_path / "bin"
    folder.mkdir()
    for program in ("vllm", "python", "legroom"):
        (folder / program).write_text("#!/bin/sh\n")
        (folder / program).chmod(0o755)
    units = []
    for name in SERVERS:
        for file in systemd.files(request(name, name=f"s{name.replace('.', '-')}", bin=str(folder), **extras)):
            (tmp_path / file.path).write_text(file.text)
            units.append(str(tmp_path / file.path))
    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", *units],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
    )
    own = [line for line in done.stderr.splitlines() if str(tmp_path) in line or line.startswith("s")]
    assert (done.returncode, own) == (0, []), done.stderr


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_the_times_cover_the_load_and_the_drain(name):
    service = read(unit(name))["Service"]
    times = planned_server(planned(name)).times
    assert int(service["TimeoutStartSec"]) >= times.expected_s
    assert int(service["TimeoutStopSec"]) > times.drain_s
    assert service["KillMode"] == "mixed"


def test_a_crash_loop_is_noticed_within_the_window():
    parser = read(unit("70b-tp4"))
    burst, window = int(parser["Unit"]["StartLimitBurst"]), int(parser["Unit"]["StartLimitIntervalSec"])
    longest = int(parser["Service"]["TimeoutStartSec"]) + int(parser["Service"]["RestartSec"])
    assert window > burst * longest


def test_legroom_reads_its_own_unit_back(tmp_path):
    path = tmp_path / "vllm.service"
    path.write_text(unit("speculative"))
    deployment = deployment_from_file(path)
    assert deployment.args.speculative_config["num_speculative_tokens"] == 4
    assert deployment.args.model == "meta-llama/Llama-3.1-8B"


def test_the_guard_is_drained_before_the_signal():
    text = unit("8b-h100", with_guard=True)
    assert "--middleware legroom.guard.Guard" in text
    assert "/-/legroom/drain" in read(text)["Service"]["ExecStop"]


def test_watch_is_bound_to_the_server():
    files = systemd.files(request("8b-h100", with_sidecar=True))
    assert [file.path for file in files] == ["vllm-llama-3-1-8b.service", "vllm-llama-3-1-8b-watch.service"]
    assert read(files[1].text)["Unit"]["BindsTo"] == "vllm-llama-3-1-8b.service"


def test_a_relative_program_folder_is_refused():
    with pytest.raises(LegroomError, match="absolute"):
        unit("8b-h100", bin="bin")


@pytest.mark.parametrize(
    ("word", "written"),
    [("plain", "plain"), ("50%", "50%%"), ("$HOME", "$$HOME"), ("a b", '"a b"'), ('{"a": 1}', '"{\\"a\\": 1}"')],
)
def test_words_are_quoted_as_systemd_unquotes_them(word, written):
    assert systemd.quoted(word) == written


def with_plan(env=None, model=None, flags=()):
    document = dict(planned("8b-h100").to_json())
    command = [*document["command"], *flags]
    command[2] = model or command[2]
    made = plan_from_json({**document, "env": env or {}, "command": command})
    return ExportRequest(made.release, made, {})


@pytest.mark.parametrize(
    ("value", "written"), [("$HOME", "VLLM_X=$HOME"), ("50%", "VLLM_X=50%%"), ("a $b", '"VLLM_X=a $b"')]
)
def test_a_dollar_in_a_variable_stays_one_because_systemd_expands_none_there(value, written):
    (file,) = systemd.files(with_plan(env={"VLLM_X": value}))
    assert f"Environment={written}" in file.text.splitlines()


def test_a_program_folder_with_a_space_is_quoted_in_both_units():
    server, watch = systemd.files(request("8b-h100", with_sidecar=True, bin="/opt/my vllm/bin"))
    assert 'ExecStart="/opt/my vllm/bin/vllm" serve' in server.text
    assert 'ExecStart="/opt/my vllm/bin/legroom" watch' in watch.text


@pytest.mark.parametrize("user", ["a b", "", "x\nExecStart=/bin/true"])
def test_what_is_no_user_is_refused(user):
    with pytest.raises(LegroomError, match="--user"):
        unit("8b-h100", user=user)


def test_a_cache_is_named_only_for_releases_that_read_it():
    assert "VLLM_CACHE_ROOT" not in unit("0.4.2")
    assert "VLLM_CACHE_ROOT=%S/" in unit("v0-0.6.3")


def test_a_relative_model_is_refused_with_its_whole_path():
    with pytest.raises(LegroomError, match="starts elsewhere") as caught:
        systemd.files(with_plan(model="./my models/llama"))
    assert str(Path.cwd() / "my models/llama") in caught.value.hint
