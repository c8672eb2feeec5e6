"""A server that asks for a key still asks for it when it is exported, and does not start without."""

import json
import os
import subprocess

import pytest
import yaml
from planned import planned

from legroom.cli.main import main
from legroom.deployments.deployment import deployment_from_command, deployment_from_file
from legroom.exports.deploy import compose, docker, helm_values, kubernetes, script, systemd
from legroom.exports.export_request import ExportRequest

FORMATS = ("script", "systemd", "docker", "compose", "kubernetes", "helm-values", "env")


def keyed(module):
    """The last file of a server that is given a key."""
    document = planned("8b-h100")
    return module.files(ExportRequest(document.release, document, {}, ("VLLM_API_KEY", "MY_TOKEN")))[-1].text


@pytest.mark.parametrize("name", FORMATS)
def test_a_key_in_the_environment_of_a_command_is_kept_by_name(name, capsys):
    command = ["VLLM_API_KEY=sk-123", "vllm", "serve", "llama-3.1-8b", "--max-model-len", "8192"]
    assert main(["export", name, "--gpu", "h100", "--", *command]) == 0
    out = capsys.readouterr().out
    assert "VLLM_API_KEY" in out or "vllmApiKey" in out
    assert "sk-123" not in out


def test_a_key_that_a_script_exports_is_kept_by_name(tmp_path, capsys):
    (tmp_path / "auth.sh").write_text("export VLLM_API_KEY=sk-123\nvllm serve llama-3.1-8b --max-model-len 8192\n")
    assert main(["export", "script", "--gpu", "h100", "--file", str(tmp_path / "auth.sh")]) == 0
    assert "VLLM_API_KEY" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        "VLLM_API_KEY=sk-1 vllm serve org/m",
        "docker run -e VLLM_API_KEY vllm/vllm-openai:v0.19.0 --model org/m",
        "docker run --env VLLM_API_KEY=sk-1 vllm/vllm-openai:v0.19.0 --model org/m",
    ],
)
def test_the_name_of_a_key_is_read_and_its_value_is_not(command):
    deployment = deployment_from_command(command)
    assert deployment.secret_names == ("VLLM_API_KEY",)
    assert "sk-1" not in repr(deployment)


def test_a_count_of_tokens_is_no_secret():
    deployment = deployment_from_command("VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE=1 vllm serve org/m")
    assert deployment.secret_names == () and deployment.args.env == {"VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "1"}


def test_a_key_by_reference_in_a_manifest_is_kept(tmp_path):
    (tmp_path / "server.yaml").write_text(keyed(kubernetes))
    assert "VLLM_API_KEY" in deployment_from_file(tmp_path / "server.yaml").secret_names


def test_a_pod_does_not_start_without_its_key():
    documents = list(yaml.safe_load_all(keyed(kubernetes)))
    env = documents[1]["spec"]["template"]["spec"]["containers"][0]["env"]
    optional = {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]["optional"]
        for variable in env
        if "valueFrom" in variable
    }
    assert optional == {"VLLM_API_KEY": False, "MY_TOKEN": True, "HF_TOKEN": True}


def test_a_unit_does_not_start_without_its_key():
    lines = keyed(systemd).splitlines()
    assert "EnvironmentFile=/etc/vllm-llama-3-1-8b/secrets.env" in lines
    assert 'ExecStartPre=/bin/sh -c "test -n \\"$$VLLM_API_KEY\\""' in lines


def test_compose_does_not_start_without_the_key():
    (service,) = yaml.safe_load(keyed(compose))["services"].values()
    assert service["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")
    assert service["environment"]["MY_TOKEN"] is None


@pytest.mark.parametrize("module", [script, docker])
def test_a_script_ends_without_the_key(module):
    done = subprocess.run(
        ["bash", "-c", keyed(module)], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "VLLM_API_KEY" in done.stderr


def test_the_chart_is_given_the_key_as_a_reference():
    engine = yaml.safe_load(keyed(helm_values))["servingEngineSpec"]
    assert engine["vllmApiKey"] == {"secretName": "vllm-llama-3-1-8b", "secretKey": "api-key"}
    assert {"MY_TOKEN", "HF_TOKEN"} <= {variable["name"] for variable in engine["modelSpec"][0]["env"]}


@pytest.mark.parametrize("name", FORMATS)
def test_every_variable_that_a_described_server_is_given_reaches_it(name, capsys):
    given = ["HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=4", "TOKENIZERS_PARALLELISM=false", "VLLM_LOGGING_LEVEL=DEBUG"]
    assert main(["export", name, "--gpu", "h100", "--", *given, "vllm", "serve", "llama-3.1-8b"]) == 0
    out = capsys.readouterr().out
    assert all(word.partition("=")[0] in out for word in given)


@pytest.mark.parametrize("name", FORMATS)
def test_a_password_in_an_address_is_a_secret_by_name(name, capsys):
    command = ["HTTPS_PROXY=http://me:geheim@proxy:3128", "vllm", "serve", "llama-3.1-8b"]
    assert main(["export", name, "--gpu", "h100", "--", *command]) == 0
    out = capsys.readouterr().out
    assert "HTTPS_PROXY" in out
    assert "geheim" not in out


def test_where_things_lie_on_one_machine_is_left_out_and_said(capsys):
    command = ["LD_LIBRARY_PATH=/opt/cuda/lib64", "vllm", "serve", "llama-3.1-8b"]
    assert main(["export", "docker", "--gpu", "h100", "--", *command]) == 0
    out = capsys.readouterr().out
    assert "LD_LIBRARY_PATH: given, but left out" in out
    assert "/opt/cuda" not in out


@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_file_says_that_it_knows_of_no_key(name, tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(planned("8b-h100").to_json()))
    assert main(["export", name, "--plan", str(tmp_path / "plan.json")]) == 0
    assert "No API key" in capsys.readouterr().out
    assert main(["export", name, "llama-3.1-8b", "--gpu", "h100"]) == 0
    assert "No API key" not in capsys.readouterr().out


def test_a_plan_file_with_a_key_needs_no_such_remark(tmp_path, capsys):
    document = {**planned("8b-h100").to_json()}
    document["command"] = [*document["command"], "--api-key", "YOUR_API_KEY"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert main(["export", "script", "--plan", str(tmp_path / "plan.json")]) == 0
    assert "No API key" not in capsys.readouterr().out
