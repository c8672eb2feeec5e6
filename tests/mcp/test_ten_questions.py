"""Questions that people ask agents about vLLM memory, as transcripts: a scripted client calls, facts are checked."""

from __future__ import annotations

import json

import pytest
from test_mcp_tools import FAILED_LOG, ask, build_server, complaint, tools

MANIFEST = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: llama}
spec:
  selector: {matchLabels: {app: llama}}
  template:
    metadata: {labels: {app: llama}}
    spec:
      containers:
        - {name: v, image: "vllm/vllm-openai:v0.11.0", args: [--model, llama-3.1-8b, --max-model-length, "8192"]}
"""
LLAMA = {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "rtx4090"}
BUSY = {"mix": "poisson rate=4 prompt=uniform(2000,4000) output=uniform(200,400) requests=60", "step_ms": 30}


def fits_24_gb(plan):
    assert plan["verdict"] == "does_not_fit"
    assert plan["failure"]["id"] == "kv_too_small_for_max_len"
    assert "max_model_len" in plan["advice"][0]["flags"]


def longest_context(plan):
    assert 20_000 < plan["kv"]["longest_len"] < 131_072


def concurrency(plan):
    assert plan["verdict"] == "fits"
    assert plan["kv"]["max_concurrency"] > 3
    assert plan["kv"]["tokens"] == pytest.approx(plan["kv"]["max_concurrency"] * 8192, rel=0.01)


def which_gpus(size):
    row = size["rows"][-1]
    assert (row["gpu"], row["count"]) == ("NVIDIA H100 80GB HBM3", 2)
    assert row["max_concurrency"] >= 8


def cause_and_fix(diagnosis):
    finding = diagnosis["findings"][0]
    assert finding["cause"] == "kv_too_small_for_max_len"
    assert finding["fixes"][0]["flags"]["max_model_len"] <= 29408


def long_story(entry):
    assert entry["cause"] == "kv_too_small_for_max_len"


def utilization_helps(low, high):
    assert high["kv"]["tokens"] > low["kv"]["tokens"]
    assert high["layout"]["weights_bytes"] == low["layout"]["weights_bytes"]


def fp8_doubles(plain, fp8):
    assert fp8["kv"]["bytes_per_token"] * 2 == plain["kv"]["bytes_per_token"]


def release_changes(old, new):
    assert (old["vllm"], new["vllm"]) == ("0.10.2", "0.32.0")
    assert old["args"]["gpu_memory_utilization"] == 0.9
    assert new["args"]["gpu_memory_utilization"] == 0.92


def neighbour(alone, beside):
    assert (alone["verdict"], beside["verdict"]) == ("fits", "does_not_fit")
    assert beside["failure"]["id"] == "free_memory_lt_requested"


def load_is_held(replay):
    assert replay["finished"] == 60
    assert replay["rejected"] == 0


def manifest_is_wrong(report):
    finding = report["findings"][0]
    assert (finding["rule"], finding["line"]) == ("flag-unknown", 10)


TRANSCRIPTS = {
    "Will Llama 3.1 8B run on my 24 GB card?": ([("plan", LLAMA)], fits_24_gb),
    "What is the longest context that it can serve?": ([("plan", LLAMA)], longest_context),
    "How many users of 8k tokens fit at once?": ([("plan", {**LLAMA, "flags": {"max_model_len": 8192}})], concurrency),
    "Which GPUs do I need for a 70B model and 8 users?": (
        [("size", {"model": "llama-3.1-70b", "context": 8192, "concurrency": 8, "gpus": ["h100"]})],
        which_gpus,
    ),
    "It says that more KV cache is needed. Why, and what do I change?": (
        [("diagnose", {"log": FAILED_LOG, "gpu": "a10", "model": "llama-3.1-8b"})],
        cause_and_fix,
    ),
    "What does LR203 mean?": ([("explain", {"id": "LR203"})], long_story),
    "Does a higher gpu-memory-utilization help?": (
        [
            ("plan", {**LLAMA, "flags": {"gpu_memory_utilization": value, "max_model_len": 8192}})
            for value in (0.85, 0.95)
        ],
        utilization_helps,
    ),
    "Is an FP8 KV cache worth it?": (
        [
            ("plan", {**LLAMA, "gpu": "h100", "flags": flags})
            for flags in ({"max_model_len": 8192}, {"max_model_len": 8192, "kv_cache_dtype": "fp8"})
        ],
        fp8_doubles,
    ),
    "What changes when I upgrade from 0.10.2?": (
        [("plan", {**LLAMA, "gpu": "h100", "vllm": version}) for version in ("0.10.2", "0.32.0")],
        release_changes,
    ),
    "Can another program use the same GPU?": (
        [("plan", {**LLAMA, "flags": {"max_model_len": 8192}, **used}) for used in ({}, {"gpu_used": "6GiB"})],
        neighbour,
    ),
    "Does it hold four requests a second?": (
        [("simulate", {**BUSY, **LLAMA, "gpu": "h100", "flags": {"max_model_len": 8192}})],
        load_is_held,
    ),
    "Is my manifest right?": ([("lint", {"text": MANIFEST, "name": "deploy.yaml"})], manifest_is_wrong),
}


@pytest.mark.parametrize("question", TRANSCRIPTS)
def test_an_agent_gets_the_facts(question, tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    calls, check = TRANSCRIPTS[question]
    results = ask(build_server(local_files=False), *calls)
    assert [result.content for result in results if result.is_error] == []
    check(*(result.structured_content for result in results))


def test_every_schema_is_short_and_every_argument_is_described():
    for tool in tools():
        assert len(json.dumps(tool.input_schema)) < 4000, tool.name
        assert all(schema.get("description") for schema in tool.input_schema["properties"].values()), tool.name
        assert len(tool.description) < 500, tool.name


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("plan", {**LLAMA, "max_model_len": 8192}, "no argument `max_model_len`; vLLM's own arguments go into `flags`"),
        ("plan", {"model": "llama-3.1-8b"}, "`gpu`: Field required. A GPU by name, or a size, such as 'h100'"),
        ("plan", {**LLAMA, "gpus": 0}, "`gpus`: Input should be greater than or equal to 1. How many GPUs"),
        ("plan", {**LLAMA, "gpu": "tpu-v6e"}, "vLLM runs on Google TPUs with other memory accounting"),
        ("lint", {}, "`text`: Field required"),
        ("diagnose", {"file": "x"}, "diagnose has no argument `file`. Its arguments are log, path"),
    ],
)
def test_an_error_says_what_to_write(name, arguments, said):
    assert said in complaint(name, arguments)
