"""`legroom plan --diff`: what a change does to every server of a file."""

import json
import subprocess

import pytest

from legroom.cli.main import main

MANIFEST = """\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  template:
    spec:
      nodeSelector: {{nvidia.com/gpu.product: {gpu}}}
      containers:
        - name: v
          image: vllm/vllm-openai:{tag}
          args: [--model, Qwen/Qwen3-8B, --max-model-len, "{length}"]
          env: [{{name: HF_TOKEN, value: "{token}"}}]
"""


def manifest(name="qwen", gpu="NVIDIA-L4", tag="v0.11.0", length=8192, token="hf_secret"):
    return MANIFEST.format(name=name, gpu=gpu, tag=tag, length=length, token=token)


def diff(tmp_path, capsys, old, new, *words):
    (tmp_path / "old.yaml").write_text(old)
    (tmp_path / "new.yaml").write_text(new)
    code = main(["plan", "--diff", str(tmp_path / "old.yaml"), str(tmp_path / "new.yaml"), *words])
    return code, capsys.readouterr().out


def servers(tmp_path, capsys, old, new, *words):
    code, out = diff(tmp_path, capsys, old, new, "--json", *words)
    return code, json.loads(out)["servers"]


def changes(server):
    return {change["what"]: (change["old"], change["new"]) for change in server["changes"]}


def test_a_flag_that_changes_is_told_with_what_it_does(tmp_path, capsys):
    code, (server,) = servers(tmp_path, capsys, manifest(), manifest(length=4096))
    assert code == 0
    assert changes(server)["--max-model-len"] == ("8192", "4096")
    assert changes(server)["longest request"] == ("8,192 tokens", "4,096 tokens")
    assert server["verdict"] == {"old": "fits", "new": "fits"}


def test_a_change_that_breaks_the_server_answers_with_1(tmp_path, capsys):
    code, (server,) = servers(tmp_path, capsys, manifest(), manifest(length=40000))
    assert code == 1
    assert server["verdict"] == {"old": "fits", "new": "does_not_fit"}
    assert server["new"]["failure"]["id"] == "kv_too_small_for_max_len"


def test_another_card_is_told_with_the_bytes(tmp_path, capsys):
    _, (server,) = servers(tmp_path, capsys, manifest(), manifest(gpu="NVIDIA-H100-80GB-HBM3"))
    assert changes(server)["GPUs"] == ("1 x NVIDIA L4", "1 x NVIDIA H100 80GB HBM3")
    cache = next(change for change in server["changes"] if change["what"] == "KV cache")
    assert cache["bytes"] > 40 << 30


def test_another_release_is_told(tmp_path, capsys):
    _, (server,) = servers(tmp_path, capsys, manifest(), manifest(tag="v0.12.0"))
    assert changes(server)["vLLM"] == ("0.11.0", "0.12.0")


def test_nothing_that_matters_is_said_to_be_nothing(tmp_path, capsys):
    code, out = diff(tmp_path, capsys, manifest(), manifest() + "# a comment\n")
    assert code == 0
    assert "nothing that memory depends on has changed" in out


def test_servers_are_matched_by_name(tmp_path, capsys):
    old = manifest("a") + "---\n" + manifest("b", length=2048)
    new = manifest("b", length=4096) + "---\n" + manifest("a")
    _, (b, a) = servers(tmp_path, capsys, old, new)
    assert changes(b)["--max-model-len"] == ("2048", "4096")
    assert changes(a) == {}


def test_new_and_removed_servers_are_told(tmp_path, capsys):
    both = manifest("a") + "---\n" + manifest("b")
    _, (_, new) = servers(tmp_path, capsys, manifest("a"), both)
    assert (new["old"], new["verdict"]["old"]) == (None, None)
    _, (_, gone) = servers(tmp_path, capsys, both, manifest("a"))
    assert gone["new"] is None


def test_the_gpu_can_be_said_for_both(tmp_path, capsys):
    _, (server,) = servers(tmp_path, capsys, manifest(), manifest(length=4096), "--gpu", "h100")
    assert server["new"]["gpu"]["name"] == "NVIDIA H100 80GB HBM3"


def test_no_secret_is_shown(tmp_path, capsys):
    _, out = diff(tmp_path, capsys, manifest(token="hf_one"), manifest(token="hf_two", length=4096), "--markdown")
    assert "hf_" not in out


def test_a_model_that_is_not_known_is_not_understood(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    unknown = manifest().replace("Qwen/Qwen3-8B", "acme/secret-9b")
    code, out = diff(tmp_path, capsys, unknown, unknown)
    assert code == 0
    assert "not understood" in out


def test_markdown_is_a_table(tmp_path, capsys):
    _, out = diff(tmp_path, capsys, manifest(), manifest(length=4096), "--markdown")
    assert "| --max-model-len | 8192 | 4096 |  |" in out


def test_a_revision_of_git_can_be_one_side(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy.yaml").write_text(manifest())
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "deploy.yaml").write_text(manifest(length=4096))
    assert main(["plan", "--diff", "HEAD:deploy.yaml", "deploy.yaml"]) == 0
    assert "8192 -> 4096" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--diff", "nothing.yaml", "nothing.yaml"],
        ["--diff", "HEAD:nothing.yaml", "/dev/null"],
        ["--markdown", "llama-3.1-8b", "--gpu", "l4"],
        ["--diff", "/dev/null", "/dev/null", "llama-3.1-8b"],
    ],
)
def test_a_wrong_call_is_said(tmp_path, capsys, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    assert "error:" in capsys.readouterr().err


def test_a_tight_server_is_told_in_colour_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    code, out = diff(tmp_path, capsys, manifest(), manifest(length=24576))
    assert code == 0
    assert "fits -> \x1b[38;5;214;1mtight\x1b[0m" in out
