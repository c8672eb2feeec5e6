"""`legroom upgrade`: the releases, the ways to say what runs, the document, and what is wrong with a call."""

import json
import re

import pytest
from metrics_server import Answering, answering

from legroom.cli.main import main

SERVE = ("--", "vllm", "serve", "llama-3.1-8b", "--max-model-len", "32768")


def document(capsys, *words):
    code = main(["upgrade", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    code = main(["upgrade", *words])
    return code, capsys.readouterr().err


def test_the_document_has_both_plans_the_changes_and_the_command(capsys):
    code, told = document(capsys, "0.19.1", "0.20.0", "--gpu", "h100", *SERVE)
    assert code == 0
    assert (told["from"]["vllm"], told["to"]["vllm"]) == ("0.19.1", "0.20.0")
    assert all(set(change) == {"what", "why", "bytes"} for change in told["changes"])
    moved = told["to"]["layout"]["kv_cache_bytes"] - told["from"]["layout"]["kv_cache_bytes"]
    assert sum(change["bytes"] for change in told["changes"]) == moved == told["kv_cache_bytes"]
    assert told["command"][:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]


def test_a_server_that_does_not_start_on_the_new_release_answers_1(capsys):
    words = ("0.7.3", "0.8.0", "--gpu", "rtx4090", "--", "vllm", "serve", "qwen2.5-32b", "--tensor-parallel-size", "4")
    code, told = document(capsys, *words)
    assert (code, told["to"]["verdict"]) == (1, "does_not_fit")


def test_an_image_names_the_release_that_runs_today(capsys):
    line = "docker run --gpus all vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B"
    assert document(capsys, "0.20.0", "--gpu", "h100", "--command", line)[1]["from"]["vllm"] == "0.11.0"


def test_flags_stand_beside_the_releases_without_a_command(capsys):
    told = document(capsys, "0.20", "0.21", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "4096")[1]
    assert told["from"]["args"]["max_model_len"] == 4096


MANIFEST = """\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  template:
    spec:
      nodeSelector: {{nvidia.com/gpu.product: NVIDIA-L4}}
      containers: [{{name: v, image: "vllm/vllm-openai:v{tag}", args: [--model, {model}, --max-model-len, "4096"]}}]
"""


def test_every_server_of_a_manifest_is_told(tmp_path, capsys):
    first = MANIFEST.format(name="a", tag="0.11.0", model="Qwen/Qwen3-8B")
    second = MANIFEST.format(name="b", tag="0.19.0", model="Qwen/Qwen3-4B")
    path = tmp_path / "deploy.yaml"
    path.write_text(f"{first}---\n{second}")
    told = document(capsys, "0.32.0", "--file", str(path))[1]
    assert [(each["from"]["vllm"], each["from"]["model"]) for each in told["servers"]] == [
        ("0.11.0", "Qwen/Qwen3-8B"),
        ("0.19.0", "Qwen/Qwen3-4B"),
    ]
    assert told["from"]["model"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "to which release?"),
        (("0.20.0",), "which server?"),
        (("0.19.1", "0.20.0", "--gpu", "h100", "--"), "which server?"),
        (("0.20.0", "--gpu", "h100", *SERVE), "from which release?"),
        (("0.19.1", "abc", "--gpu", "h100", *SERVE), "'abc' is not a vLLM release"),
        (("abc", "0.32.0", "--gpu", "h100", *SERVE), "'abc' is not a vLLM release"),
        (("0.19.1", "0.20.0", *SERVE), "which GPU?"),
        (("0.19.1", "0.20.0", "--gpu", "h100", *SERVE, "--no-flag-like-this"), "no vLLM release has"),
        (("0.20.0", "--url", "http://127.0.0.1:9", "--gpu", "h100", *SERVE), "--url says what runs"),
    ],
)
def test_a_wrong_call_is_told_what_is_missing(capsys, words, says):
    code, message = refused(capsys, *words)
    assert code == 2
    assert says in message


def test_a_server_that_does_not_answer_is_unreachable(capsys):
    assert refused(capsys, "0.20.0", "--url", "http://127.0.0.1:9", "--gpu", "h100")[0] == 3


@pytest.mark.parametrize(("asked", "used"), [("0.19.7", "0.19.1"), ("0.2.0", "0.4.0"), ("9.9", "0.32.0")])
def test_a_release_without_facts_is_the_nearest_and_says_so(capsys, asked, used):
    code = main(["upgrade", asked, "0.20.0", "--gpu", "h100", *SERVE])
    out = capsys.readouterr().out
    assert code == 0
    assert f"vLLM {used} -> 0.20.0" in out
    assert re.search(rf"note: .*{re.escape(asked)}", out)


def test_a_downgrade_says_that_it_is_one(capsys):
    assert main(["upgrade", "0.21.0", "0.20.0", "--gpu", "h100", *SERVE]) == 0
    assert "a downgrade" in capsys.readouterr().out


def test_all_shows_where_it_changed_in_one_table(capsys):
    assert main(["upgrade", "0.18.0", "0.21.0", "--all", "--gpu", "h100", *SERVE]) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^  (0\.\d+\.\d+)  ", out, re.MULTILINE)
    assert rows == ["0.18.0", "0.20.0", "0.21.0"]
    assert "5 releases" in out


CACHE_CONFIG = (
    'vllm:cache_config_info{engine="0",block_size="16",cache_dtype="auto",gpu_memory_utilization="0.85",'
    'num_gpu_blocks="24500",kv_cache_memory_bytes="None",num_gpu_blocks_override="None"} 1\n'
)
INFO = {
    "vllm_config": {
        "scheduler_config": {"max_num_seqs": 64, "max_num_batched_tokens": 8192},
        "parallel_config": {"tensor_parallel_size": 1},
        "model_config": {"enforce_eager": True, "dtype": "torch.bfloat16", "quantization": None},
    }
}


def vllm_server(version="0.19.1", info=None, cache_config=CACHE_CONFIG):
    served = {"data": [{"id": "chat", "root": "meta-llama/Llama-3.1-8B", "max_model_len": 32768}]}
    answers = {
        "/version": {"version": version},
        "/v1/models": served,
        "/server_info": info,
        "/metrics": 'vllm:num_requests_running{engine="0",model_name="chat"} 0\n' + cache_config,
    }

    class Handler(Answering):
        def do_GET(self):
            known = answers.get(self.path.partition("?")[0])
            body = known if isinstance(known, str) else json.dumps(known)
            self.answer(body.encode(), 404 if known is None else 200)

    return answering(Handler)


def test_a_running_server_tells_its_release_model_and_flags(capsys):
    with vllm_server(info=INFO) as url:
        told = document(capsys, "0.32.0", "--url", url, "--gpu", "h100")[1]
    start = told["from"]
    assert (start["vllm"], start["model"]) == ("0.19.1", "meta-llama/Llama-3.1-8B")
    assert start["command"] == [
        "vllm",
        "serve",
        "meta-llama/Llama-3.1-8B",
        "--max-model-len",
        "32768",
        "--max-num-seqs",
        "64",
        "--gpu-memory-utilization",
        "0.85",
        "--enforce-eager",
    ]


def test_a_server_that_does_not_tell_all_says_which_flags_to_give(capsys):
    with vllm_server() as url:
        assert main(["upgrade", "0.32.0", "--url", url, "--gpu", "h100", "--max-num-seqs", "64", "--json"]) == 0
    captured = capsys.readouterr()
    assert "beside --url" in captured.err
    assert json.loads(captured.out)["from"]["args"]["max_num_seqs"] == 64


def test_a_server_with_another_pool_than_planned_is_remarked(capsys):
    with vllm_server(cache_config=CACHE_CONFIG.replace("24500", "9000")) as url:
        assert main(["upgrade", "0.32.0", "--url", url, "--gpu", "h100"]) == 0
    assert "144,000 slots" in capsys.readouterr().err


def test_something_else_than_vllm_at_the_address_is_said_so(capsys):
    class Handler(Answering):
        def do_GET(self):
            self.answer(b"<html>hello</html>")

    with answering(Handler) as url:
        code, message = refused(capsys, "0.32.0", "--url", url, "--gpu", "h100")
    assert code == 3
    assert "as vLLM does" in message


def test_a_list_of_releases_marks_the_tight_ones_and_says_why(capsys):
    server = ("--", "vllm", "serve", "Qwen/Qwen3-32B", "--max-model-len", "32768", "--gpu-memory-utilization", "0.97")
    assert main(["upgrade", "0.16.0", "0.20.0", "--all", "--gpu", "a100-80gb", *server]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("  0.17.0 tight")] == [["0.17.0", "tight"]]
    assert "are tight: at the high end of the error band the card runs over" in " ".join(out.split())
