"""The tools as an agent meets them: through the SDK's own client, over stdio and over HTTP on loopback."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import anyio
import pytest
from free_ports import free_port

from legroom.cli.main import main

TOOLS = {"plan", "size", "diagnose", "explain", "search_catalog", "simulate", "lint"}
FAILED_LOG = (
    "INFO 11-01 10:00:00 [api_server.py:1] vLLM API server version 0.10.2\n"
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (3.59 GiB). Based on the available memory, the estimated "
    "maximum model length is 29408. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when "
    "initializing the engine.\n"
)


def build_server(**options):
    from legroom.mcp import mcp_tools

    return mcp_tools.build_server(**options)


def connected(server):
    import mcp

    return mcp.Client(server)


def ask(server, *calls):
    """The answers of tool calls, over one connection."""

    async def talk():
        async with connected(server) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return anyio.run(talk)


def answer(name, arguments, local_files=True):
    """What a tool answers to a call that is right."""
    [result] = ask(build_server(local_files=local_files), (name, arguments))
    assert not result.is_error, result.content
    return result.structured_content


def complaint(name, arguments, local_files=True):
    """What a tool says to a call that is wrong."""
    [result] = ask(build_server(local_files=local_files), (name, arguments))
    assert result.is_error
    return result.content[0].text


def tools():
    async def talk():
        async with connected(build_server(local_files=True)) as client:
            return (await client.list_tools()).tools

    return anyio.run(talk)


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))


def test_every_tool_is_described_and_every_argument_has_a_type():
    found = {tool.name: tool for tool in tools()}
    assert set(found) == TOOLS
    for tool in found.values():
        assert len(tool.description) > 40
        assert tool.output_schema
        assert tool.annotations.read_only_hint
        for name, schema in tool.input_schema["properties"].items():
            assert schema.keys() & {"type", "anyOf", "enum", "$ref"}, (tool.name, name)


def test_the_main_arguments_carry_examples():
    examples = {
        (tool.name, name)
        for tool in tools()
        for name, schema in tool.input_schema["properties"].items()
        if "examples" in schema
    }
    assert {
        ("plan", "gpu"),
        ("plan", "flags"),
        ("diagnose", "log"),
        ("explain", "id"),
        ("search_catalog", "query"),
        ("simulate", "requests"),
    } <= examples


def test_plan_answers_with_the_document_of_the_command_line(capsys):
    document = answer("plan", {"model": "llama-3.1-8b", "gpu": "l4", "flags": {"max_model_len": 8192}})
    assert main(["plan", "llama-3.1-8b", "--gpu", "l4", "--max-model-len", "8192", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert document["layout"] == printed["layout"]
    assert document["kv"] == printed["kv"]
    assert document["verdict"] == "fits"


def test_plan_reads_a_command_line_too():
    command = "vllm serve llama-3.1-8b --max-model-len 8192"
    said = answer("plan", {"command": command, "gpu": "l4"})
    flagged = answer("plan", {"model": "llama-3.1-8b", "gpu": "l4", "flags": {"max-model-len": 8192}})
    assert said["layout"] == flagged["layout"]


def test_a_mistake_is_a_tool_error_with_message_and_hint():
    said = complaint("plan", {"model": "llama-3.1-9b", "gpu": "l4"})
    assert "llama-3.1-9b" in said
    assert "llama-3.1-8b" in said


def test_a_flag_that_the_release_does_not_take_is_named():
    said = complaint("plan", {"model": "llama-3.1-8b", "gpu": "l4", "flags": {"max_num_on_the_fly_batches": 4}})
    assert "max-num-on-the-fly-batches" in said


def test_a_wrong_type_is_refused_by_the_schema():
    assert "gpus" in complaint("plan", {"model": "llama-3.1-8b", "gpu": "l4", "gpus": 0})


def test_size_answers_with_the_document_of_the_command_line(capsys):
    document = answer("size", {"model": "llama-3.1-8b", "context": 8192, "concurrency": 16, "gpus": ["h100", "l4"]})
    words = ["--context", "8192", "--concurrency", "16", "--gpu", "h100,l4", "--json"]
    assert main(["size", "llama-3.1-8b", *words]) == 0
    assert document == json.loads(capsys.readouterr().out)
    assert "name of a model" in complaint("size", {"model": "/etc"}, local_files=False)


def test_lint_names_the_rule_and_the_line():
    script = "#!/bin/bash\nvllm serve Qwen/Qwen3-8B --max-num-on-the-fly-batches 4\n"
    findings = answer("lint", {"text": script, "name": "start.sh"})["findings"]
    assert [(each["rule"], each["line"]) for each in findings if each["severity"] == "error"] == [("flag-unknown", 2)]


def test_diagnose_finds_the_cause_and_its_entry():
    document = answer("diagnose", {"log": FAILED_LOG, "model": "llama-3.1-8b", "gpu": "a10"})
    assert document["verdict"] == "cause found"
    assert document["findings"][0]["cause"] == "kv_too_small_for_max_len"
    assert answer("explain", {"id": document["findings"][0]["entry"]})["cause"] == "kv_too_small_for_max_len"


def test_diagnose_reads_a_file_over_stdio_only(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(FAILED_LOG)
    assert answer("diagnose", {"path": str(log)})["findings"]
    assert "over HTTP" in complaint("diagnose", {"path": str(log)}, local_files=False)


def test_over_http_a_model_is_a_name_and_not_a_path(tmp_path):
    assert "name of a model" in complaint("plan", {"model": str(tmp_path), "gpu": "l4"}, local_files=False)
    said = complaint("plan", {"command": f"vllm serve {tmp_path}", "gpu": "l4"}, local_files=False)
    assert "name of a model" in said


@pytest.mark.parametrize("arguments", [{}, {"log": "  "}, {"log": "x", "path": "y"}, {"path": "/nowhere/at/all.log"}])
def test_diagnose_says_what_is_missing(arguments):
    assert complaint("diagnose", arguments)


def test_explain_speaks_chinese():
    assert "KV 缓存" in answer("explain", {"id": "lr203", "lang": "zh"})["title"]


def test_an_unknown_entry_is_told_with_the_nearest():
    assert "LR203" in complaint("explain", {"id": "LR2O3"})


def test_search_takes_a_line_of_a_log():
    found = answer("search_catalog", {"query": "No available memory for the cache blocks", "limit": 2})
    assert found["hits"][0]["id"] == "LR201"
    assert len(found["hits"]) <= 2


def test_simulate_replays_requests():
    requests = [{"arrival_step": 0, "prompt_len": 100, "output_len": 20}] * 3
    document = answer("simulate", {"requests": requests, "num_blocks": 100})
    assert (document["finished"], document["preemptions"]) == (3, 0)


def test_simulate_sizes_the_pool_by_a_plan():
    requests = [{"arrival_step": 0, "prompt_len": 100, "output_len": 20}]
    document = answer(
        "simulate", {"requests": requests, "model": "llama-3.1-8b", "gpu": "l4", "flags": {"max_model_len": 8192}}
    )
    plan = answer("plan", {"model": "llama-3.1-8b", "gpu": "l4", "flags": {"max_model_len": 8192}})
    assert document["usable_blocks"] == plan["kv"]["num_blocks"] - 1


def test_simulate_says_which_card_an_ambiguous_name_was_read_as():
    requests = [{"arrival_step": 0, "prompt_len": 100, "output_len": 20}]
    arguments = {"requests": requests, "model": "llama-3.1-8b", "flags": {"max_model_len": 8192}}
    assert "read as 40 GB" in answer("simulate", {**arguments, "gpu": "a100"})["notes"][0]
    assert "notes" not in answer("simulate", {**arguments, "gpu": "a100-80gb"})


def test_simulate_takes_a_mix_with_the_time_of_a_step():
    mix = "poisson rate=4 prompt=uniform(50,100) output=uniform(5,20) requests=40"
    assert "step_ms" in complaint("simulate", {"mix": mix, "num_blocks": 200})
    assert answer("simulate", {"mix": mix, "num_blocks": 200, "step_ms": 30})["finished"] == 40


@pytest.mark.parametrize(
    "arguments",
    [{}, {"requests": []}, {"requests": [{"prompt_len": 5, "output_len": 5}]}, {"mix": "nonsense", "num_blocks": 10}],
)
def test_simulate_says_what_is_missing(arguments):
    assert complaint("simulate", arguments)


def test_over_stdio_the_sdk_client_lists_and_calls():
    import mcp

    server = mcp.StdioServerParameters(command=sys.executable, args=["-m", "legroom", "mcp"], env=dict(os.environ))

    async def talk():
        async with connected(server) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            return names, await client.call_tool("explain", {"id": "LR203"})

    names, result = anyio.run(talk)
    assert names == TOOLS
    assert result.structured_content["id"] == "LR203"


@contextmanager
def http_server(*words):
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "legroom", "mcp", "--http", f"127.0.0.1:{port}", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ},
    )
    try:
        for _ in range(600):
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.communicate(timeout=120)


def test_over_http_the_sdk_client_lists_and_calls(tmp_path):
    with http_server() as url:
        found, told, refused = ask(
            url,
            ("search_catalog", {"query": "碎片"}),
            ("explain", {"id": "LR406"}),
            ("diagnose", {"path": str(tmp_path / "vllm.log")}),
        )
    assert found.structured_content["hits"][0]["id"] == "LR406"
    assert told.structured_content["cause"] == "allocator_fragmentation"
    assert refused.is_error


def test_over_http_no_folder_that_a_log_or_a_command_names_is_read(tmp_path):
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    call = {"log": FAILED_LOG, "command": f"vllm serve {tmp_path}", "gpu": "rtx4090"}

    def layouts(local_files):
        fixes = answer("diagnose", call, local_files=local_files)["findings"][0]["fixes"]
        return [fix["layout"] for fix in fixes if fix["layout"]]

    assert layouts(local_files=True)
    assert not layouts(local_files=False)
