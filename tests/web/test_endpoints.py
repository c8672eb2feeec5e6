"""The endpoints without HTTP: the documents of the command line, and nothing of this machine opened."""

from __future__ import annotations

import base64
import json
import pickle
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.explain.catalog_entries import entries_of_label, title_of_label
from legroom.facts import read_data
from legroom.facts.releases import latest
from legroom.render.translation import in_language
from legroom.web.endpoints import ENDPOINTS, BadRequest, answer, call
from legroom.web.endpoints.plans import plan_of_request
from legroom.web.schemas import request_name, response_name, schemas

ROOT = Path(__file__).parents[2]
GAP = re.compile(r"\{\w+\}")
SAMPLE = ROOT / "docs" / "samples" / "kv-too-small.log"
PLAN = {"model": "llama-3.1-8b", "gpu": "h100", "flags": {"max_model_len": 8192}}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main([*words, "--json"])
    return json.loads(capsys.readouterr().out)


def problem(name: str, request: Any) -> dict[str, Any]:
    return json.loads(call(name, json.dumps(request)))["error"]


def test_a_plan_is_the_document_of_the_command_line(capsys):
    words = ("plan", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "8192")
    assert answer("plan", PLAN) == printed(capsys, *words)


def test_a_plan_that_does_not_fit_has_the_same_advice_as_the_command_line(capsys):
    words = ("plan", "llama-3.1-70b", "--gpu", "rtx4090", "--gpus", "2", "--tensor-parallel-size", "2")
    request = {"model": "llama-3.1-70b", "gpu": "rtx4090", "gpus": 2, "flags": {"tensor_parallel_size": 2}}
    assert answer("plan", request) == printed(capsys, *words)


def test_a_plan_without_advice_is_that_of_the_command_line(capsys):
    words = ("plan", "llama-3.1-70b", "--gpu", "rtx4090", "--no-advice")
    assert answer("plan", {"model": "llama-3.1-70b", "gpu": "rtx4090", "advice": False}) == printed(capsys, *words)


def test_a_cold_start_is_planned_as_on_the_command_line(capsys):
    words = ("plan", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "8192", "--cold")
    assert answer("plan", {**PLAN, "cold": True}) == printed(capsys, *words)


def test_the_page_says_what_the_command_line_says(capsys):
    request = {"model": "llama-3.1-8b", "gpu": "l4", "language": "en"}
    words = answer("plan", request)["words"]
    main(["plan", "llama-3.1-8b", "--gpu", "l4"])
    told = " ".join(capsys.readouterr().out.split())
    sentences = [words["headline"], words["short"], words["basis"], words["advice"][0]["text"]]
    sentences += [row["text"] for row in words["pool"]]
    assert [sentence for sentence in sentences if sentence not in told] == []
    assert "too few, so the first start fails" in told
    assert words["to_run"] == ["vllm", "serve", "meta-llama/Llama-3.1-8B", "--max-model-len", "26624"]


def test_the_words_of_a_plan_are_chinese_with_the_same_numbers():
    english, chinese = (
        answer("plan", {"model": "llama-3.1-8b", "gpu": "l4", "language": language})["words"]
        for language in ("en", "zh")
    )
    assert chinese["short"] == "需要 16.00 GiB，现有 4.37 GiB：缺 11.63 GiB"
    assert chinese["to_run"] == english["to_run"]
    assert all(one["text"] != other["text"] for one, other in zip(english["pool"], chinese["pool"], strict=True))


def test_a_wish_is_searched_as_on_the_command_line(capsys):
    words = ("plan", "llama-3.1-8b", "--gpu", "h100", "--want-context", "8k", "--want-concurrency", "4")
    request = {"model": "llama-3.1-8b", "gpu": "h100", "want": {"context": 8192, "users": 4}}
    told = answer("plan", {**request, "language": "en"})
    assert "holds 4 requests of 8,192 tokens" in told.pop("words")["headline"]
    assert told == printed(capsys, *words)
    assert told["search"]["model"] == told["model"] == "meta-llama/Llama-3.1-8B"


def test_a_plan_has_a_speed_with_its_range_and_a_price():
    told = answer("speed", PLAN)
    one, everyone = told["one_user_tokens_per_s"], told["all_users_tokens_per_s"]
    assert one["low"] < one["estimate"] < one["high"] < everyone["estimate"]
    assert told["usd_per_hour"] == answer("speed", {**PLAN, "gpus": 2})["usd_per_hour"] / 2
    assert answer("speed", {**PLAN, "gpu": "24GiB"})["usd_per_hour"] is None


def test_the_models_of_a_card_are_those_of_the_command_line(capsys):
    told = answer("card", {"gpu": "rtx4090", "names": ["qwen3-32b", "qwen3-32b-awq", "qwen3-0.6b"]})
    rows = {row["name"]: row for row in printed(capsys, "models", "qwen3-32b-awq", "--gpu", "rtx4090")["models"]}
    assert [row["name"] for row in told["models"]] == ["qwen3-32b-awq", "qwen3-0.6b"]
    assert told["models"][0] == rows["qwen3-32b-awq"]
    lacking = answer("card", {"gpu": "rtx4090", "names": ["qwen3-14b"]})["too_large"]
    assert lacking[0]["short_bytes"] > 0


def test_an_upgrade_is_the_document_of_the_command_line(capsys):
    words = ("upgrade", "0.20.0", "0.32.0", "--gpu", "h100")
    main([*words, "--json", "--", "vllm", "serve", "llama-3.1-8b"])
    told = json.loads(capsys.readouterr().out)
    made = answer("upgrade", {"model": "llama-3.1-8b", "gpu": "h100", "vllm": "0.20.0", "to": "0.32.0"})
    assert [change["why"] for change in made["words"]["changes"]] == [change["why"] for change in made["changes"]]
    assert {name: made[name] for name in ("from", "to", "changes", "command")} == {
        name: told[name] for name in ("from", "to", "changes", "command")
    }
    assert "0.32.0 starts" in made["words"]["headline"]


def test_two_servers_are_packed_as_on_the_command_line(capsys):
    commands = [f"vllm serve {model} --max-model-len 8192" for model in ("llama-3.1-8b", "qwen3-4b")]
    main(["pack", "--gpu", "h100", "--json", *(word for line in commands for word in ("--", *line.split()))])
    told = json.loads(capsys.readouterr().out)
    made = answer("pack", {"gpu": "h100", "commands": commands})
    assert [server["command"] for server in made["servers"]] == [server["command"] for server in told["servers"]]
    assert answer("pack", {"gpu": "l4", "commands": commands[:1]})["words"]["headline"].startswith(
        "1 server on NVIDIA L4"
    )


def test_options_of_packed_servers_are_read_as_on_the_command_line(capsys):
    commands = [
        "vllm serve llama-3.1-8b --max-model-len 8192 --weight 2 --name chat",
        "vllm serve qwen3-4b --weight=1 --want-context 16k --want-concurrency 4",
        "vllm serve bge-m3",
    ]
    main(["pack", "--gpu", "h100", "--json", *(word for line in commands for word in ("--", *line.split()))])
    told = json.loads(capsys.readouterr().out)
    made = answer("pack", {"gpu": "h100", "commands": commands})
    assert [server["command"] for server in made["servers"]] == [server["command"] for server in told["servers"]]
    assert [server["name"] for server in made["servers"]] == ["chat", "qwen3-4b", "bge-m3"]
    assert "weight" not in str([server["command"] for server in made["servers"]])
    assert made["words"]["holds"][2] == "keeps no KV cache"
    assert (
        answer("pack", {"gpu": "h100", "commands": commands, "language": "zh"})["words"]["holds"][2] == "没有 KV 缓存"
    )
    wrong = problem("pack", {"gpu": "h100", "commands": ["vllm serve qwen3-4b --weight much"]})
    assert wrong["message"] == "--weight much is not a share"


def test_servers_are_packed_for_the_release_that_is_named():
    asked = {"gpu": "h100", "commands": ["vllm serve qwen3-4b"]}
    assert [answer("pack", {**asked, "vllm": vllm})["servers"][0]["vllm"] for vllm in ("0.10.2", None)] == [
        "0.10.2",
        latest().version,
    ]


def test_a_row_of_several_nodes_says_so():
    rows = answer("size", {"model": "deepseek-v3", "cards": ["h100"], "language": "en"})["rows"]
    assert [row["notes"] for row in rows] == [
        ["more than 8 GPUs are several nodes"] if row["count"] > 8 else [] for row in rows
    ]
    assert any(row["notes"] for row in rows)
    (note,) = next(
        row["notes"]
        for row in answer("size", {"model": "deepseek-v3", "cards": ["h100"], "language": "zh"})["rows"]
        if row["notes"]
    )
    assert note == "超过 8 张 GPU 需要多个节点"


def test_a_replay_on_a_tight_server_says_so_and_one_of_several_engines_too():
    tight = {
        "model": "llama-3.3-70b",
        "gpu": "h100",
        "gpus": 4,
        "flags": {"tensor_parallel_size": 4, "gpu_memory_utilization": 0.97},
    }
    asked = {"mix": {"requests": 20}, "language": "en"}
    planned, replayed = answer("plan", tight), answer("simulate", {**asked, "plan": tight})
    assert planned["verdict"] == "tight"
    assert f"such a server is tight: {planned['reason']}" in replayed["words"]["notes"]
    two = {"model": "llama-3.1-8b", "gpu": "h100", "flags": {"data_parallel_size": 2}}
    figures = {row["name"]: row["text"] for row in answer("simulate", {**asked, "plan": two})["words"]["figures"]}
    assert figures["engines"].startswith("2 data-parallel engines: they share the load in turn")
    assert figures["load"].startswith("10 requests")


def test_a_planned_server_is_a_file_and_one_that_does_not_start_is_none():
    made = answer("files", {"plan": PLAN, "format": "compose"})["files"]
    assert [file["path"] for file in made] == ["compose.yaml"]
    assert "--max-model-len" in made[0]["text"]
    assert (
        "does not start"
        in problem("files", {"plan": {"model": "llama-3.1-8b", "gpu": "l4"}, "format": "systemd"})["message"]
    )


def test_a_diagnosis_is_the_document_of_the_command_line(capsys):
    request = {"log": SAMPLE.read_text("utf-8"), "gpu": "rtx4090"}
    expected = printed(capsys, "diagnose", str(SAMPLE), "--gpu", "rtx4090")
    expected["sources"][0]["source"] = "the log"  # a text has no name
    assert answer("diagnose", request) == expected


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_finding_says_how_to_check_its_fix_as_the_command_line_does(capsys, language):
    main(["diagnose", str(SAMPLE), "--lang", language])
    told = "".join(capsys.readouterr().out.split())
    first, *_ = answer("diagnose", {"log": SAMPLE.read_text("utf-8"), "language": language})["findings"]
    assert first["verify"] and "".join(first["verify"].split()) in told


def test_a_size_is_the_document_of_the_command_line(capsys):
    words = ("size", "llama-3.1-8b", "--context", "4096", "--gpu", "l4,h100", "--gpus", "8")
    request = {"model": "llama-3.1-8b", "context": 4096, "cards": ["l4", "h100"]}
    assert answer("size", request) == printed(capsys, *words)


def test_a_load_is_sized_in_gpus_and_money_and_a_request_above_the_length_is_told():
    mix = {"rate_per_s": 5, "requests": 200, "prompt_tokens": 800, "output_tokens": 100}
    request = {"model": "llama-3.1-8b", "cards": ["h100"], "mix": mix, "first_token_s": 2, "time_per_token_ms": 50}
    (row, *_) = answer("size", request)["rows"]
    assert row["holds"] and row["gpus"]["low"] <= row["gpus"]["middle"] <= row["gpus"]["high"]
    assert row["usd_per_hour"]["middle"] == pytest.approx(row["gpus"]["middle"] * row["price"]["usd_per_hour"])
    short = answer("size", {**request, "flags": {"max_model_len": 1024}, "language": "zh"})
    assert not any(row["holds"] for row in short["rows"])
    assert short["words"]["reasons"][0].startswith("有请求长达")


def test_a_whole_number_may_be_written_with_a_point():
    request = {"model": "llama-3.1-8b", "cards": ["l4"], "context": 4096, "max_gpus": 2}
    assert answer("size", {**request, "context": 4096.0, "max_gpus": 2.0}) == answer("size", request)


def test_an_entry_is_the_document_of_the_command_line(capsys):
    assert answer("entry", {"id": "lr203", "language": "zh"}) == printed(capsys, "explain", "LR203", "--lang", "zh")


def test_a_pasted_config_is_planned_under_its_own_name():
    made = answer("plan", {"model": "me/mine", "config": LLAMA, "gpu": "l4"})
    assert made["model"] == "me/mine"
    assert made["command"][:3] == ["vllm", "serve", "me/mine"]


def test_a_pasted_config_takes_the_place_of_a_bundled_model_of_that_name():
    smaller = answer("plan", {"model": "llama-3.1-8b", "config": {**LLAMA, "num_hidden_layers": 2}, "gpu": "h100"})
    assert smaller["layout"]["weights_bytes"] < answer("plan", PLAN)["layout"]["weights_bytes"] / 2


def test_requests_about_one_model_and_one_card_share_both_so_that_a_slider_finds_the_figures_kept():
    first, second = (
        plan_of_request(
            {"model": "llama-3.1-8b", "gpu": "24GiB", "flags": {"gpu_memory_utilization": share}}, advice=False
        )
        for share in (0.8, 0.9)
    )
    assert first.target.model is second.target.model
    assert first.target.gpu is second.target.gpu


def test_two_configs_of_one_name_are_two_models():
    layouts = [
        answer("plan", {"model": "a/b", "config": {**LLAMA, "num_hidden_layers": layers}, "gpu": "h100"})["layout"]
        for layers in (2, 4)
    ]
    assert layouts[0]["weights_bytes"] < layouts[1]["weights_bytes"]


@pytest.mark.parametrize("config", [{}, {"model_type": 7}, {"hidden_size": "x" * 1000}, {"num_hidden_layers": -1}])
def test_a_broken_config_is_a_sentence(config):
    assert problem("plan", {"config": config, "gpu": "h100"})["exit_code"] == 2


def test_the_working_adds_up_to_the_plan():
    parts = {part["part"]: part["bytes"] for part in answer("math", PLAN)["terms"]}
    layout = answer("plan", PLAN)["layout"]
    assert {name: layout[name] for name in parts if name in layout} == {
        name: bytes_ for name, bytes_ in parts.items() if name in layout
    }


def test_every_server_of_a_text_is_read_with_its_line():
    text = "vllm serve Qwen/Qwen3-8B --max-model-len 4096\nvllm serve llama-3.1-8b --enforce-eager --port 9000\n"
    servers = answer("read", {"text": text})["servers"]
    assert [server["model"] for server in servers] == ["Qwen/Qwen3-8B", "llama-3.1-8b"]
    assert [server["place"] for server in servers] == ["line 1", "line 2"]
    assert servers[1]["flags"]["enforce_eager"] is True


def test_a_read_server_keeps_the_memory_limit_of_its_container():
    text = "docker run --memory 24g vllm/vllm-openai:v0.11.0 --model meta-llama/Llama-3.1-8B-Instruct"
    limit = answer("read", {"text": text})["servers"][0]["host_memory"]
    assert (
        answer("plan", {"model": "llama-3.1-8b", "gpu": "h100", "host_memory": limit})["host"]["given_bytes"]
        == 24 << 30
    )


def test_what_was_read_can_be_planned():
    text = "docker run --gpus 2 vllm/vllm-openai:v0.10.0 --model Qwen/Qwen3-8B --tensor-parallel-size 2 --port 9000"
    server = answer("read", {"text": text})["servers"][0]
    request = {"model": server["model"], "vllm": server["vllm"], "flags": server["flags"], "gpus": server["gpus"]}
    assert answer("plan", {**request, "gpu": "l40s"})["vllm"] == "0.10.0"


def test_a_read_server_says_what_plan_says_of_a_flag_that_the_asked_release_refuses():
    def refused(text, **asked):
        return answer("read", {"text": text, **asked})["servers"][0]["refused"]

    line = "vllm serve Qwen/Qwen3-14B-AWQ --max-modl-len 16384"
    said = problem("plan", {"model": "Qwen/Qwen3-14B-AWQ", "gpu": "l4", "flags": {"max_modl_len": 16384}})
    assert refused(line) == {"why": said["message"], "action": said["hint"]}
    assert "--max-model-len" in said["hint"]
    assert refused(line, language="zh")["why"] != said["message"]
    old = "vllm serve Qwen/Qwen3-8B --guided-decoding-backend outlines"
    assert refused(old) and refused(old, vllm="0.8.5") is None


def test_keys_in_a_text_are_not_repeated():
    read = call("read", json.dumps({"text": "vllm serve a/b --api-key sk-very-secret"}))
    assert "very-secret" not in read


def test_a_load_has_a_curve_whose_preemptions_add_up():
    answered = answer("simulate", {"mix": {"requests": 200}, "blocks": 400, "step_ms": 30})
    curve = answered["timeline"]
    assert sum(curve["preemptions"]) == answered["preemptions"] > 0
    assert max(curve["blocks_in_use"]) == answered["peak_blocks"]
    assert len({len(column) for column in curve.values()}) == 1
    assert len(curve["step"]) <= 2048
    assert curve["time_s"] == sorted(curve["time_s"])


def test_flags_that_memory_depends_on_come_first():
    flags = answer("flags", {"vllm": "0.10.0"})["flags"]
    matters = [flag["memory"] for flag in flags]
    assert matters == sorted(matters, reverse=True)
    assert "max_model_len" in {flag["name"] for flag in flags[:20]}


def test_releases_begin_with_the_newest():
    releases = answer("releases", {})["releases"]
    assert releases[0] == "0.32.0"


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("plan", {"model": str(ROOT), "gpu": "h100"}),
        ("plan", {"model": "tests/web", "gpu": "h100"}),
        ("plan", {"model": "~/x", "gpu": "h100"}),
        ("plan", {**PLAN, "flags": {"speculative_config": {"model": str(ROOT), "num_speculative_tokens": 2}}}),
        ("size", {"model": "../x"}),
        ("hub", {"id": "../../etc/passwd"}),
    ],
)
def test_a_path_is_never_opened(name, request_, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert problem(name, request_)["exit_code"] == 2


def test_files_that_a_text_names_are_not_read(tmp_path):
    beside = tmp_path / "config.yaml"
    beside.write_text("model: stolen/model\nmax-model-len: 77\n")
    text = f"vllm serve a/b --config {beside}"
    assert "stolen" not in call("read", json.dumps({"text": text}))
    assert "stolen" not in call("diagnose", json.dumps({"log": "CUDA out of memory\n", "command": str(beside)}))
    assert "stolen" not in call("diagnose", json.dumps({"log": "CUDA out of memory\n", "command": text}))


def test_a_model_that_is_not_bundled_is_not_looked_up(monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it asked the network"))
    assert "give its config.json" in problem("plan", {"model": "nobody/nothing", "gpu": "h100"})["hint"]


@pytest.mark.parametrize("name", sorted(ENDPOINTS))
@pytest.mark.parametrize("request_", [None, [], 1, "x", {"nonsense": 1}])
def test_a_request_of_another_form_is_refused(name, request_):
    with pytest.raises(BadRequest):
        answer(name, request_)


def test_a_request_that_is_nested_without_end_is_refused():
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(BadRequest, match="nested"):
        answer("plan", {"gpu": "h100", "config": deep})


def test_every_endpoint_has_schemas_for_both_ways():
    assert {schema(name) for name in ENDPOINTS for schema in (request_name, response_name)} <= set(schemas())


def test_a_memory_snapshot_is_answered_with_its_picture():
    sample = Path(__file__).parents[2] / "docs" / "samples" / "pinned-segments.pickle"
    request = {"file": base64.b64encode(sample.read_bytes()).decode()}
    document = answer("fragments", request)
    assert document["would_expandable_segments_help"] is True
    assert document["svg"].startswith("<svg")
    chinese = answer("fragments", {**request, "language": "zh"})
    texts = (chinese["headline"], chinese["advice"], *(row["text"] for row in chinese["parts"]))
    assert all(re.search("[\u4e00-\u9fff]", text) for text in texts)


@pytest.mark.parametrize("file", ["no base64!", base64.b64encode(pickle.dumps(print)).decode()])
def test_a_file_that_is_no_snapshot_is_an_input_error(file):
    with pytest.raises(LegroomError):
        answer("fragments", {"file": file})


def test_the_file_that_is_not_in_base64_is_named():
    with pytest.raises(LegroomError, match="the earlier file is not in base64"):
        answer("fragments", {"file": "AAAA", "earlier": "no base64!"})


def test_the_page_says_what_the_command_line_prints_and_its_chinese_is_whole():
    sys.path.insert(0, str(ROOT / "bench"))
    from same_words import differences, random_request

    draw = random.Random(20)
    found = [differences(random_request(draw), advice=False) for _ in range(20)]
    assert [each for each in found if each != ([], [])] == []


def test_the_fix_of_a_diagnosis_is_chinese_sentence_by_sentence():
    told = answer("diagnose", {"log": SAMPLE.read_text(), "gpu": "rtx4090", "language": "zh"})
    assert not re.search("[a-z]+ [a-z]+ [a-z]+ ", told["findings"][0]["fixes"][0]["why"])


def test_a_pair_of_unlike_cards_is_answered_in_chinese_with_the_smaller_one():
    error = problem("plan", {"model": "llama-3.1-8b", "gpu": "rtx4090,rtx3090", "language": "zh"})
    assert "--gpu rtx3090 --gpus 2" in error["hint"]
    assert "每个 rank" in error["hint"] and "显卡" in error["message"]
    assert "every rank" not in error["hint"]


def test_an_error_is_told_in_the_language_of_the_request():
    with pytest.raises(LegroomError) as raised:
        answer("plan", {"model": "llama-3.1-8b", "gpu": "h100", "flags": {"max_model_len": 200000}, "language": "zh"})
    assert raised.value.message == "--max-model-len 200000 超过模型的上限 131072 token"


def test_every_step_and_reason_of_a_diagnosis_has_chinese():
    fixes = [*read_data("diagnosis_texts.json")["fixes"].values()]
    for row in read_data("lookalikes.json")["rows"]:
        fixes += [row, *row["fixes"]]
    texts = {text for fix in fixes if isinstance(fix, dict) for text in (fix["why"], *fix.get("steps", ()))}
    # What is told of a driver or a build is filled in after the sentence.
    told = {re.sub(r"[{](driver|build)_story[}]", "", text) for text in texts}
    prose = [text for text in told if re.search(r"(^|[ (])[a-z]{3,} [a-z]{2,} [a-z]{2,}|[a-z] [a-z]+[.]$", text)]
    assert len(prose) > 300
    assert [text for text in prose if not re.search("[\u4e00-\u9fff]", in_language(text, "zh"))] == []


def test_every_gap_of_a_chinese_sentence_is_one_of_the_english():
    sentences = read_data("sentences_zh.json")["sentences"]
    assert [
        text for text, chinese in sentences.items() if not set(GAP.findall(chinese)) <= set(GAP.findall(text))
    ] == []
    two = in_language("another checkpoint, its weights in 4 bits; keys and values in 8 bits", "zh")
    assert two == "换用权重为 4 位的模型文件；键和值为 8 位"
    assert in_language("No such sentence is known; 3 users.", "zh") == "No such sentence is known; 3 users."


def test_a_row_of_the_gpu_table_fits_with_the_flags_of_its_command():
    asked = {"model": "llama-3.1-70b", "context": 8192, "concurrency": 13, "cards": ["l4"]}
    row = answer("size", asked)["rows"][0]
    assert row["gives_up"] and row["count"]
    server = answer("read", {"text": " ".join(row["command"])})["servers"][0]
    request = {"model": row["model"], "gpu": row["gpu"], "gpus": row["count"], "advice": False}
    assert answer("plan", {**request, "flags": server["flags"]})["verdict"] == row["verdict"] != "does_not_fit"


def test_a_search_may_keep_the_model():
    want = {"context": 8192, "users": 16}
    request = {"model": "meta-llama/Llama-3.1-8B-Instruct", "gpu": "l4", "gpus": 1, "want": want}
    assert "FP8" in answer("plan", request)["model"]
    kept = answer("plan", {**request, "want": {**want, "keep_model": True}})
    assert kept["model"] == request["model"]


def test_the_speed_is_of_the_users_who_are_wished_for():
    wished = answer("speed", {**PLAN, "want": {"context": 8192, "users": 2}})
    assert wished["users"] == 2 < answer("speed", PLAN)["users"]


def test_a_mix_without_spread_has_requests_of_one_length():
    mix = {"requests": 20, "rate_per_s": 5, "prompt_tokens": 700, "output_tokens": 50, "spread": False}
    load = answer("simulate", {"mix": mix, "blocks": 2000, "step_ms": 30, "language": "en"})["words"]["figures"][0]
    assert load["text"].count("p50 700, p99 700") == load["text"].count("p50 50, p99 50") == 1


def test_an_upgrade_tells_of_metrics_and_bugs_as_the_command_line_does():
    request = {"model": "meta-llama/Llama-3.1-8B", "gpu": "a100-80gb", "vllm": "0.8.5", "to": "0.32.0"}
    words = answer("upgrade", request)["words"]
    assert any("vllm:gpu_cache_usage_perc" in text for text in words["metrics"])
    assert words["bugs"]


def test_a_read_server_brings_the_card_that_its_manifest_names():
    pod = (
        "apiVersion: v1\nkind: Pod\nspec:\n  nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S}\n"
        "  containers:\n  - image: vllm/vllm-openai:v0.11.2\n    args: [--model=Qwen/Qwen3-8B]\n"
    )
    server = answer("read", {"text": pod})["servers"][0]
    planned = answer("plan", {"model": server["model"], "gpu": server["gpu"], "flags": {}})
    assert planned["gpu"]["name"] == "NVIDIA L40S"


@pytest.mark.parametrize("log", ["INFO: vLLM API server version 0.11.2\nINFO: Shutting down\n", "hello\n"])
def test_a_diagnosis_without_a_cause_has_the_headline_of_the_command_line(log, tmp_path, capsys):
    (tmp_path / "log").write_text(log, encoding="utf-8")
    for language in ("en", "zh"):
        headline = answer("diagnose", {"log": log, "language": language})["headline"]
        main(["diagnose", str(tmp_path / "log"), "--lang", language])
        assert headline in "".join(capsys.readouterr().out.splitlines()[0])


LOAD = {"rate_per_s": 4, "prompt_tokens": 4000, "output_tokens": 500, "requests": 20}


def test_a_simulation_says_how_far_its_seconds_may_be_off_as_the_command_line_does(capsys):
    words = answer("simulate", {"plan": PLAN, "mix": {**LOAD, "spread": False}, "language": "en"})["words"]
    mix = "poisson rate=4 requests=20 prompt=4000 output=500"
    main(["simulate", "--synthetic", mix, "--model", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "8192"])
    assert words["notes"][-1].startswith("seconds are estimated: a step may take ")
    assert words["notes"][-1] in capsys.readouterr().err


def test_a_load_that_is_not_held_says_what_to_try_next():
    slow = {"plan": {**PLAN, "gpu": "l4"}, "mix": {**LOAD, "requests": 200, "spread": False}, "language": "en"}
    document = answer("simulate", slow)
    assert document["verdict"] == "falls_behind"
    assert "the count of GPUs on this page" in document["words"]["notes"][0]


def test_an_upgrade_has_the_figures_of_the_command_line(capsys):
    document = answer("upgrade", {**PLAN, "vllm": "0.11.2", "to": "0.32.0", "language": "en"})
    main(["upgrade", "0.11.2", "0.32.0", "--gpu", "h100", "llama-3.1-8b", "--max-model-len", "8192"])
    shown = capsys.readouterr().out
    assert all(cell in shown for row in document["words"]["figures"] for cell in row)
    assert any("first start" in row[0] for row in document["words"]["figures"])
    assert all(change["what"] in shown for change in document["words"]["outside"][:1])


def test_what_not_to_try_is_told_in_chinese_too():
    told = [text for rows in read_data("diagnosis_texts.json")["dead_ends"].values() for row in rows for text in row]
    same = [text for text in told if in_language(text, "zh") == text]
    assert not [
        text for text in same if " " in text and not text.startswith(("--", "PYTORCH", "VLLM", "torch", "device"))
    ]


def test_servers_that_do_not_fit_have_the_changes_of_the_command_line(capsys):
    lines = ["vllm serve llama-3.1-8b --max-model-len 8192", "vllm serve Qwen/Qwen3-32B"]
    request = {"gpu": "h100", "gpus": 1, "commands": lines, "language": "en"}
    changes = answer("pack", request)["words"]["changes"]
    assert changes[0].startswith("--gpus 2 ")
    assert any("--shift " in change for change in changes)


def test_a_count_of_gpus_names_smaller_weights_as_the_command_line_does():
    load = {"mix": {"users": 50, "requests": 200, "prompt_tokens": 4000, "output_tokens": 200}, "cards": ["h200"]}
    document = answer("size", {"model": "meta-llama/Llama-3.3-70B-Instruct", "language": "en", **load})
    assert document["words"]["smaller"].startswith("not tried: smaller weights")
    assert all(row["users_per_usd"] for row in document["rows"] if row["holds"])


def test_a_card_that_is_tight_says_why_in_both_languages():
    asked = {"names": ["qwen3.5-9b"], "gpu": "rtx4090", "context": 32768, "users": 4}
    for language, says in (("en", "a desktop on this card"), ("zh", "桌面")):
        (row,) = answer("card", {**asked, "language": language})["models"]
        assert (row["verdict"], row["parameters"] > 9e9) == ("tight", True)
        assert says in row["reason"]


def test_a_request_beyond_a_limit_is_refused_in_words_and_not_in_those_of_a_schema():
    beyond = {
        "plan": {**PLAN, "want": {"context": 999_999_999_999, "users": 1}},
        "simulate": {"mix": {"requests": 10**9}, "plan": PLAN},
    }
    for name, where in (
        ("plan", "want.context takes 100,000,000 at most"),
        ("simulate", "mix.requests takes 50,000 at most"),
    ):
        with pytest.raises(BadRequest) as refused:
            answer(name, beyond[name])
        assert refused.value.message == f"the request is not of the form that {name} takes: {where}"
        with pytest.raises(BadRequest) as refused:
            answer(name, {**beyond[name], "language": "zh"})
        assert refused.value.message.startswith("请求不符合") and "schema" not in refused.value.message


def test_a_deployment_that_does_not_start_is_refused_by_the_title_of_its_cause():
    too_long = {"plan": {"model": "llama-3.1-8b", "gpu": "l4"}, "mix": {"requests": 5}}
    title = title_of_label("kv_too_small_for_max_len")
    with pytest.raises(LegroomError, match=re.escape(f"does not start ({title})")):
        answer("simulate", {**too_long, "language": "en"})
    with pytest.raises(LegroomError) as refused:
        answer("simulate", {**too_long, "language": "zh"})
    assert entries_of_label("kv_too_small_for_max_len")[0].title.zh in refused.value.message


def test_the_title_of_every_failure_of_a_start_is_translated():
    for label in (
        "weights_too_big",
        "no_cache_blocks",
        "hybrid_state_cache_limit",
        "cudagraph_capture_oom",
        "host_ram_oom",
    ):
        title = entries_of_label(label)[0].title
        assert in_language(title.en, "zh") == title.zh
