"""The start script and the environment file: what they say is what was planned, and shells accept them."""

import json
import os
import subprocess
from dataclasses import replace

import pytest
from planned import SERVERS, planned, request

from legroom import plan
from legroom.cli.main import main
from legroom.deployments.deployment import deployment_from_command
from legroom.errors import LegroomError
from legroom.exports.deploy import env_file, script
from legroom.exports.deploy.exported_server import planned_server
from legroom.exports.export_request import ExportRequest
from legroom.facts.flags import flags_of
from legroom.facts.releases import latest
from legroom.facts.releases import release as known_release
from legroom.planning.plan_document import plan_from_json
from legroom.vllm.parse import parse_flags

NAMES = sorted(SERVERS)


def script_of(which, /, **options):
    (file,) = script.files(request(which, **options))
    assert file.executable
    return file.text


def bash(text, tmp_path, **variables):
    """Run the script with a `vllm` and a `python` that print what they were given."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("vllm", "python"):
        program = folder / name
        program.write_text('#!/bin/bash\nprintf "%s\\n" "$(basename "$0")" "$@"\n')
        program.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("guard", [False, True])
def test_shellcheck_finds_nothing_in_any_script(shellcheck, tmp_path, guard):
    for name in NAMES:
        (tmp_path / f"{name}.sh").write_text(script_of(name, with_guard=guard))
    done = subprocess.run(
        [shellcheck, *map(str, sorted(tmp_path.glob("*.sh")))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_running_the_script_starts_the_planned_command(name, tmp_path):
    words = bash(script_of(name), tmp_path)
    server = planned_server(planned(name))
    assert tuple(words) == server.words.words()


@pytest.mark.parametrize("name", NAMES)
def test_a_script_has_no_flag_that_its_release_lacks(name):
    document = planned(name)
    server = planned_server(document)
    parsed = parse_flags(server.words.words(), document.release)
    assert [problem for problem in parsed.problems if problem.stops_vllm] == []
    assert {phrase.flag for phrase in server.phrases} <= set(flags_of(document.release))


@pytest.mark.parametrize("name", NAMES)
def test_writing_the_defaults_out_changes_nothing_of_the_memory(name):
    document = planned(name)
    _, gpu, flags = SERVERS[name]
    args = parse_flags(planned_server(document).words.words(), document.release).args
    written = {
        dest: getattr(args, dest)
        for dest in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
    }
    again = plan(SERVERS[name][0], gpu, advice=False, **{**flags, **written}).json()
    assert plan_from_json(again).kv == document.kv
    assert plan_from_json(again).layout == document.layout


def test_every_flag_is_explained_with_its_number():
    text = script_of("70b-tp4")
    document = planned("70b-tp4")
    lines = text.splitlines()
    flags = [i for i, line in enumerate(lines) if line.startswith("  --")]
    assert len(flags) >= 6
    assert all(lines[i - 1].startswith("  # ") for i in flags)
    assert f"{document.kv.max_concurrency:.2f}" in text
    assert f"{document.layout.kv_cache_bytes / 2**30:.2f} GiB" in text


def test_vllm_is_told_to_drain_from_the_release_that_can():
    assert "--shutdown-timeout 60" in script_of("0.19.0")
    assert "--shutdown-timeout" not in script_of("0.10.2")
    assert "SIGTERM" in script_of("0.10.2")


def test_expandable_segments_are_left_out_where_custom_all_reduce_breaks_them():
    text = script_of("70b-tp4")
    assert "expandable_segments:True" not in text
    assert "custom all-reduce of 4 ranks" in text


def test_expandable_segments_are_set_where_little_room_is_left_on_one_card():
    made = plan("llama-3.1-8b", "l4", max_model_len=8192, gpu_memory_utilization=0.97, max_num_batched_tokens=16384)
    document = {**made.json(), "verdict": "tight"}
    document["layout"] = {**document["layout"], "headroom_bytes": 10}
    text = script.script_text(planned_server(plan_from_json(document)))
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text


def given_allocator(which, value):
    document = {**planned(which).to_json(), "env": {"PYTORCH_CUDA_ALLOC_CONF": value}}
    return script.script_text(planned_server(plan_from_json(document)))


def test_given_expandable_segments_that_break_the_server_are_left_out_and_that_is_said():
    text = given_allocator("70b-tp4", "expandable_segments:True")
    assert "export PYTORCH_CUDA_ALLOC_CONF" not in text
    assert "PYTORCH_CUDA_ALLOC_CONF was given" in text
    assert "No allocator settings" not in text


def test_what_else_was_given_with_them_is_kept():
    text = given_allocator("70b-tp4", "max_split_size_mb:128,expandable_segments:True")
    assert "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128\n" in text


@pytest.mark.parametrize(("which", "value"), [("8b-h100", "expandable_segments:True"), ("70b-tp4", "backend:native")])
def test_an_allocator_setting_that_breaks_nothing_is_kept(which, value):
    text = given_allocator(which, value)
    assert f"export PYTORCH_CUDA_ALLOC_CONF={value}\n" in text
    assert "No allocator settings" not in text


def test_the_shell_of_the_caller_is_no_part_of_an_export(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert main(["export", "script", "llama-3.1-70b", "--gpu", "h100", "-tp", "4", "--max-model-len", "8192"]) == 0
    text = capsys.readouterr().out
    assert "VLLM_LOGGING_LEVEL" not in text
    assert "PYTORCH_CUDA_ALLOC_CONF" not in text


@pytest.mark.parametrize(("vllm", "breaks"), [("0.19.0", True), ("0.32.0", False)])
def test_sleep_mode_forbids_expandable_segments_before_0_20_1(vllm, breaks):
    made = plan("llama-3.1-8b", "l4", vllm=vllm, max_model_len=8192).json()
    made["layout"]["headroom_bytes"] = 10
    made["command"].append("--enable-sleep-mode")
    text = script.script_text(planned_server(plan_from_json(made)))
    assert ("expandable_segments:True" not in text) == breaks


def test_a_long_load_lengthens_the_time_the_engine_is_waited_for():
    assert "VLLM_ENGINE_READY_TIMEOUT_S=4440" in script_of("70b-tp4")
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in script_of("70b-tp4", disk_speed="5GB/s", download_speed="5GB/s")
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in script_of("0.10.2", disk_speed="1MB/s")  # came with 0.14.0


def test_secrets_are_named_and_never_written():
    made = plan("llama-3.1-8b", "h100").json()
    made["command"] += ["--api-key", "sk-very-secret", "--hf-token=hf_secret"]
    made["env"] = {"VLLM_API_KEY": "sk-other", "VLLM_LOGGING_LEVEL": "DEBUG"}
    asked = ExportRequest(latest(), plan_from_json(made), {})
    for module in (script, env_file):
        (file,) = module.files(asked)
        assert "secret\n" not in file.text
        assert not {"sk-very-secret", "hf_secret", "sk-other"} & set(file.text.replace("=", " ").split())
        assert "VLLM_API_KEY" in file.text
        assert "VLLM_LOGGING_LEVEL=DEBUG" in file.text


def test_the_environment_a_server_was_planned_with_is_kept(tmp_path):
    made = plan("llama-3.1-8b", "h100", env={"VLLM_LOGGING_LEVEL": "it's $HOME"}).json()
    (file,) = script.files(ExportRequest(latest(), plan_from_json(made), {}))
    shown = bash(file.text.replace("exec vllm", "env | grep VLLM_LOGGING_LEVEL; exec vllm"), tmp_path)
    assert shown[0] == "VLLM_LOGGING_LEVEL=it's $HOME"


def test_a_json_value_survives_the_shell(tmp_path):
    words = bash(script_of("speculative"), tmp_path)
    value = words[words.index("--speculative-config") + 1]
    assert json.loads(value)["num_speculative_tokens"] == 4


def with_command(*words):
    return planned_server(replace(planned("8b-h100"), command=words))


def test_a_script_is_a_deployment_that_legroom_reads_back():
    deployment = deployment_from_command(script.script_text(with_command("vllm", "serve", "org/m", "--port", "9")))
    assert deployment.args.model == "org/m"


def test_a_program_is_started_by_the_path_it_was_given_with():
    by_path = with_command("/venv/bin/vllm", "serve", "./tiny")
    assert "exec /venv/bin/vllm serve ./tiny" in script.script_text(by_path)
    module = ["/venv/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "./tiny"]
    assert f"exec {' '.join(module)}" in script.script_text(with_command(*module))


def test_a_command_with_its_plan_becomes_a_script_with_numbers():
    document = planned("8b-h100")
    words = ("vllm", "serve", "meta-llama/Llama-3.1-8B", "--port", "8001")
    text = script.script_text(planned_server(replace(document, command=words)))
    assert "--port 8001" in text
    assert "GiB of KV cache" in text


@pytest.mark.parametrize("words", [["ls"], ["vllm", "serve"], ["vllm", "serve", "--port", "1"], []])
def test_what_is_no_server_is_said(words):
    with pytest.raises(LegroomError):
        with_command(*words)


@pytest.mark.parametrize(
    "options", [{"name": "Not A Name"}, {"disk_speed": "fast"}, {"disk_speed": "1"}, {"drain": "-1"}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(LegroomError):
        script.files(request("8b-h100", **options))


def test_an_old_release_is_started_by_its_module(tmp_path):
    words = bash(script_of("0.4.2"), tmp_path)
    assert words[:5] == ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "meta-llama/Llama-2-7b-hf"]
    assert known_release("0.4.2").before("0.5.2")
