"""`legroom plan` from the outside: the JSON contract, the ways to say what runs, the exit codes."""

import json
import xml.etree.ElementTree as ET

import pytest

from legroom.cli.main import main

LAYOUT = {
    "total_bytes",
    "budget_bytes",
    "weights_bytes",
    "activation_bytes",
    "cuda_graph_bytes",
    "non_torch_bytes",
    "kv_cache_bytes",
    "outside_bytes",
    "peak_used_bytes",
    "headroom_bytes",
}
ARGS = {
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "block_size",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
}
TOP = {"model", "vllm", "gpu", "args", "layout", "kv", "verdict", "failure", "advice", "command", "confidence"}
KV = {"block_size", "num_blocks", "tokens", "bytes_per_token", "max_concurrency", "longest_len"}


@pytest.fixture(autouse=True)
def _no_store(monkeypatch, tmp_path):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "store"))


def plan(capsys, *words, code=None):
    """The document that a call prints."""
    left_with = main(["plan", *words, "--json"])
    out, err = capsys.readouterr()
    assert code is None or left_with == code, err
    return json.loads(out)


def check_layout(layout):
    assert layout.keys() >= LAYOUT
    assert all(type(layout[name]) is int for name in LAYOUT)
    inside = sum(layout[f"{name}_bytes"] for name in ("weights", "activation", "cuda_graph", "non_torch"))
    assert layout["peak_used_bytes"] == inside + max(layout["kv_cache_bytes"], 0) + layout["outside_bytes"]
    assert layout["headroom_bytes"] == layout["total_bytes"] - layout["peak_used_bytes"]


@pytest.mark.parametrize(
    "words",
    [
        ("llama-3.1-8b", "--gpu", "h100"),
        ("llama-3.1-8b", "--gpu", "t4"),
        ("gemma-3-27b", "--gpu", "h200", "--vllm", "0.26.0"),
        ("deepseek-v3", "--gpu", "h200", "--tensor-parallel-size", "8"),
        ("qwen3-32b", "--gpu", "a100-80gb", "--pipeline-parallel-size", "2"),
        ("llama-3.1-8b", "--gpu", "24GiB", "--vllm", "0.6.3"),
        ("mixtral-8x7b", "--gpu", "h100", "--gpus", "2", "--tensor-parallel-size", "2", "--vllm", "0.10.2"),
    ],
    ids=" ".join,
)
def test_the_document_keeps_its_contract(capsys, words):
    document = plan(capsys, *words)
    assert document.keys() >= TOP
    assert document["gpu"].keys() >= {"name", "count", "total_bytes"}
    assert document["args"].keys() >= ARGS
    assert document["kv"].keys() >= KV
    assert document["verdict"] in ("fits", "tight", "does_not_fit")
    check_layout(document["layout"])
    for rank in document["ranks"]:
        check_layout(rank)
    for advice in document["advice"]:
        assert advice.keys() >= {"flags", "why", "layout", "command"}
        check_layout(advice["layout"])
    for name, figure in document["confidence"].items():
        assert figure["kind"] in ("exact", "measured", "estimated")
        assert figure["low"] <= document["layout"][name] <= figure["high"]
    failure = document["failure"]
    assert (failure is not None) == (document["verdict"] == "does_not_fit")
    if failure:
        assert failure.keys() >= {"id", "message", "needed_bytes", "available_bytes"}
    assert document["command"][:2] == ["vllm", "serve"]


def test_it_fits_is_code_0_and_it_does_not_is_code_1(capsys):
    assert plan(capsys, "llama-3.1-8b", "--gpu", "h100", code=0)["verdict"] == "fits"
    assert plan(capsys, "qwen3-14b", "--gpu", "l4", code=1)["verdict"] == "does_not_fit"


def test_a_failure_comes_with_flags_that_mend_it(capsys):
    document = plan(capsys, "qwen3-32b", "--gpu", "h100", code=1)
    assert document["failure"]["id"] == "kv_too_small_for_max_len"
    first = document["advice"][0]
    words = first["command"][3:]
    mended = plan(capsys, "qwen3-32b", "--gpu", "h100", *words, code=0)
    assert mended["verdict"] == first["verdict"] != "does_not_fit"
    assert mended["layout"] == first["layout"]


def test_no_advice_is_given_unasked(capsys):
    assert plan(capsys, "qwen3-32b", "--gpu", "h100", "--no-advice")["advice"] == []


def test_explain_math_shows_terms_that_add_up(capsys):
    document = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--explain-math")
    for name in ("weights_bytes", "kv_cache_bytes", "outside_bytes"):
        terms = document["terms"][name]
        assert sum(term["bytes"] for term in terms) == document["layout"][name]


def test_gpu_memory_overrides_the_total(capsys):
    document = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--gpu-memory", "79.10GiB")
    assert document["gpu"]["total_bytes"] == int(79.10 * 2**30)


def test_memory_held_by_others_can_stop_the_start(capsys):
    document = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--gpu-used", "20GiB", code=1)
    assert document["failure"]["id"] == "free_memory_lt_requested"


def test_gpus_default_to_what_the_flags_need(capsys):
    words = ("llama-3.1-8b", "--gpu", "l4", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    assert plan(capsys, *words)["gpu"]["count"] == 4


def test_a_value_of_a_vllm_flag_is_not_taken_for_the_model(capsys):
    document = plan(capsys, "--tensor-parallel-size", "2", "llama-3.1-8b", "--gpu", "l4")
    assert document["args"]["tensor_parallel_size"] == 2
    assert "Llama-3.1-8B" in document["model"]


def test_equals_signs_work_for_both_kinds_of_flags(capsys):
    document = plan(capsys, "llama-3.1-8b", "--gpu=h100", "--max-model-len=4096")
    assert document["args"]["max_model_len"] == 4096


SAME = (
    ("llama-3.1-8b", "--max-num-seqs", "64"),
    ("--", "vllm", "serve", "llama-3.1-8b", "--max-num-seqs", "64"),
    ("--", "python", "-m", "vllm.entrypoints.openai.api_server", "--model", "llama-3.1-8b", "--max-num-seqs", "64"),
    ("--command", "CUDA_VISIBLE_DEVICES=0 vllm serve llama-3.1-8b --max-num-seqs 64"),
    ("--command", "docker run --gpus 1 vllm/vllm-openai:v0.32.0 --model llama-3.1-8b --max-num-seqs 64"),
    ("--command", "vllm serve llama-3.1-8b", "--max-num-seqs", "64"),
)


@pytest.mark.parametrize("words", SAME, ids=" ".join)
def test_however_it_is_said_the_plan_is_the_same(capsys, words):
    # Own options come first: what follows `--` belongs to the server.
    assert main(["plan", "--gpu", "h100", "--json", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--max-num-seqs", "64")
    assert document["layout"] == expected["layout"]
    assert document["kv"] == expected["kv"]


def test_llm_arguments_are_read(capsys):
    document = plan(capsys, "--gpu", "h100", "--python", "LLM('llama-3.1-8b', max_model_len=8192, enforce_eager=True)")
    assert document["args"]["max_model_len"] == 8192
    assert document["args"]["enforce_eager"] is True


def test_a_manifest_is_read(capsys, tmp_path):
    manifest = tmp_path / "deploy.yaml"
    manifest.write_text(
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\nspec:\n  template:\n    spec:\n      containers:\n"
        "      - name: vllm\n        image: vllm/vllm-openai:v0.11.0\n        args: [--model, llama-3.1-8b, "
        "--max-model-len, '8192']\n        resources: {limits: {nvidia.com/gpu: 1}}\n"
    )
    document = plan(capsys, "--gpu", "h100", "--file", str(manifest))
    assert document["vllm"] == "0.11.0"
    assert document["args"]["max_model_len"] == 8192


def test_a_vllm_config_file_is_read(capsys, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("max-model-len: 4096\nmax-num-seqs: 32\n")
    document = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--config", str(config), "--max-num-seqs", "16")
    assert document["args"]["max_model_len"] == 4096
    assert document["args"]["max_num_seqs"] == 16


def test_the_servers_variables_count(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert plan(capsys, "llama-3.1-8b", "--gpu", "h100")["args"]["runner"] == "V1"
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert plan(capsys, "llama-3.1-8b", "--gpu", "h100")["args"]["runner"] == "V2"


def test_keys_in_the_environment_do_not_leak(capsys, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")
    main(["plan", "llama-3.1-8b", "--gpu", "h100", "--json", "--explain-math"])
    out, err = capsys.readouterr()
    assert "very-secret" not in out + err


def test_an_unknown_release_uses_the_nearest_below_and_says_so(capsys):
    document = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--vllm", "0.99.0")
    assert document["vllm"] == "0.32.0"
    assert any("0.99.0" in note for note in document["notes"])


def test_the_cold_start_has_the_smaller_cache(capsys):
    document = plan(capsys, "llama-3.1-8b", "--gpu", "h100")
    assert document["first_start"]["num_blocks"] < document["kv"]["num_blocks"]
    cold = plan(capsys, "llama-3.1-8b", "--gpu", "h100", "--cold")
    assert cold["kv"]["num_blocks"] == document["first_start"]["num_blocks"]


def test_the_picture_is_written_as_svg(capsys, tmp_path):
    picture = tmp_path / "plan.svg"
    assert main(["plan", "qwen3-32b", "--gpu", "h100", "--svg", str(picture)]) == 1
    text = "".join(ET.parse(picture).getroot().itertext())
    assert "weights" in text
    assert "vllm serve Qwen/Qwen3-32B" in text
    capsys.readouterr()


def test_a_measured_term_is_used_and_said(capsys, monkeypatch):
    import dataclasses

    from legroom.memory.deployment_memory import Measurements
    from legroom.planning import machine

    def measured(target, args):
        return dataclasses.replace(target, seen=Measurements(non_torch_bytes=123 * 2**20, source="my.log"))

    monkeypatch.setattr(machine, "with_measurements", measured)
    document = plan(capsys, "llama-3.1-8b", "--gpu", "h100")
    assert document["layout"]["non_torch_bytes"] == 123 * 2**20
    assert document["confidence"]["non_torch_bytes"]["kind"] == "measured"


@pytest.mark.parametrize(
    ("image", "platform"),
    [
        ("vllm/vllm-tpu:latest", "Google TPUs"),
        ("quay.io/ascend/vllm-ascend:v0.11.0", "Huawei Ascend"),
        ("vault.habana.ai/gaudi-docker/vllm:latest", "Intel Gaudi"),
    ],
)
def test_a_server_on_an_accelerator_that_is_not_modelled_is_refused(image, platform, capsys):
    command = ["docker", "run", image, "vllm", "serve", "meta-llama/Llama-3.1-8B"]
    assert main(["plan", "--gpu", "h100", "--", *command]) == 2
    assert f"vLLM runs on {platform} with other memory accounting" in capsys.readouterr().err


@pytest.mark.parametrize(("gpu", "runtime"), [("Arc Pro B60", "XPU"), ("mi210", "HIP"), ("l4", "CUDA")])
def test_the_error_of_too_large_weights_names_the_runtime_of_the_card(gpu, runtime, capsys):
    assert main(["plan", "llama-3.1-70b", "--gpu", gpu, "--no-advice", "--json"]) == 1
    message = json.loads(capsys.readouterr().out)["failure"]["message"]
    assert message.startswith(f"torch.OutOfMemoryError: {runtime} out of memory")
