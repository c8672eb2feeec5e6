"""`legroom pack` and `legroom plan --sleep` from the outside."""

import json

import pytest

from legroom.cli.main import main

TWO = (
    "--",
    "vllm",
    "serve",
    "llama-3.1-8b",
    "--max-model-len",
    "16384",
    "--",
    "vllm",
    "serve",
    "qwen3-0.6b",
    "--max-model-len",
    "8192",
)


def answer(capsys, *words, code=0):
    assert main(["pack", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


def complaint(capsys, *words, code=2):
    assert main(["pack", *words]) == code
    return capsys.readouterr().err


def test_the_document_is_as_promised(capsys):
    document = answer(capsys, "--gpu", "h100", *TWO)
    assert document["verdict"] == "fits"
    assert document["order"] == "any"
    assert document["headroom_bytes"] >= 0
    assert [server["model"] for server in document["servers"]] == ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-0.6B"]


def test_each_server_is_a_plan_document_with_its_command(capsys):
    for server in answer(capsys, "--gpu", "h100", *TWO)["servers"]:
        assert server["verdict"] == "fits"
        assert server["failure"] is None
        assert server["command"][:2] == ["vllm", "serve"]
        assert "--kv-cache-memory-bytes" in server["command"]
        assert server["layout"]["headroom_bytes"] >= 0


def test_a_printed_command_plans_to_the_same_pool_beside_the_others(capsys):
    first = answer(capsys, "--gpu", "h100", *TWO)["servers"][0]
    beside = first["layout"]["held_by_others_bytes"]
    assert main(["plan", "--json", "--gpu", "h100", "--gpu-used", str(beside), "--", *first["command"]]) == 0
    assert json.loads(capsys.readouterr().out)["kv"] == first["kv"]


def test_servers_without_a_port_get_one_each(capsys):
    servers = answer(capsys, "--gpu", "h100", *TWO, "--port", "8000")["servers"]
    ports = [server["command"][server["command"].index("--port") + 1] for server in servers]
    assert ports == ["8001", "8000"]


def test_two_of_a_kind_have_two_names(capsys):
    twice = ("--", "vllm", "serve", "qwen3-0.6b", "--max-model-len", "4096") * 2
    assert [server["name"] for server in answer(capsys, "--gpu", "h100", *twice)["servers"]] == [
        "qwen3-0-6b",
        "qwen3-0-6b-2",
    ]


def test_another_program_takes_its_part(capsys):
    document = answer(capsys, "--gpu", "h100", "--other", "trainer=30GiB", *TWO)
    assert document["cards"][0]["others"] == {"trainer": 30 * 2**30}


def test_servers_go_to_slices_of_a_card(capsys):
    document = answer(capsys, "--gpu", "h200", "--gpus", "3g.71gb,3g.71gb", *TWO)
    assert {card["name"] for card in document["cards"]} == {"NVIDIA H200 MIG 3g.71gb"}


def test_a_shift_has_an_order_and_sleepers(capsys):
    words = ("--gpu", "l40s", "--shift", "day=llama-3-1-8b", "--shift", "night=qwen3-0-6b", *TWO)
    document = answer(capsys, *words)
    assert document["order"] == ["llama-3-1-8b", "qwen3-0-6b"]
    assert all("--enable-sleep-mode" in server["command"] for server in document["servers"])
    assert all(server["asleep_bytes"] for server in document["servers"])


def test_what_cannot_fit_is_code_1_with_the_sum_and_the_change(capsys):
    servers = ("--", "vllm", "serve", "llama-3.1-8b", "--", "vllm", "serve", "qwen3-14b")
    document = answer(capsys, "--gpu", "rtx4090", *servers, code=1)
    assert document["verdict"] == "does_not_fit"
    assert document["headroom_bytes"] < 0
    assert main(["pack", "--gpu", "rtx4090", *servers]) == 1
    assert "are needed, and a card has 23.64 GiB: weights, activations, CUDA contexts" in " ".join(
        capsys.readouterr().out.split()
    )


def test_an_unknown_release_is_read_as_the_nearest_and_said(capsys):
    document = answer(capsys, "--gpu", "h100", "--vllm", "0.32.7", *TWO)
    assert document["servers"][0]["vllm"] == "0.32.0"
    assert any("0.32.7" in note for note in document["servers"][0]["notes"])


@pytest.mark.parametrize(
    ("words", "complains"),
    [
        ((), "which GPU?"),
        (("--gpu", "h100"), "which servers?"),
        (("--gpu", "h100", "--", "vllm", "serve", "no-such/model-at-all"), "no-such/model-at-all"),
        (("--gpu", "h100", "--max-model-len", "5", *TWO), "no option of pack"),
        (("--gpu", "h100", "--gpus", "9z.1gb", *TWO), "MIG slice"),
        (("--gpu", "h100", "--other", "trainer", *TWO), "NAME=SIZE"),
        (("--gpu", "h100", "--other", "trainer=1GiB@\u00b2", *TWO), "NAME=SIZE"),
        (("--gpu", "h100", "--other", "trainer=2GiB@4", *TWO), "counted from 0"),
        (("--gpu", "h100", "--shift", "day=nobody", *TWO), "there is no server 'nobody'"),
        (("--gpu", "h100", "--shift", "day=llama-3-1-8b", *TWO), "awake in no shift"),
        (("--gpu", "h100", *TWO, "--weight", "no"), "not a share"),
    ],
)
def test_bad_input_is_said_plainly(capsys, monkeypatch, words, complains):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["pack", *words]) in (2, 3)
    assert complains in capsys.readouterr().err


@pytest.mark.parametrize("name", ["compose", "systemd", "llama-swap"])
def test_files_come_with_the_document(capsys, name):
    document = answer(capsys, "--gpu", "h100", "--format", name, *TWO)
    assert all("Written by legroom" in file["text"] for file in document["files"])


def test_a_plan_with_sleep_has_its_states(capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--sleep", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [state["state"] for state in document["states"]] == ["serving", "asleep_1", "asleep_2", "updating_weights"]
    assert "--enable-sleep-mode" in document["command"]


def test_a_faster_host_wakes_it_sooner(capsys):
    times = []
    for speed in ("10GB/s", "50GB/s"):
        assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--sleep", "--host-bandwidth", speed, "--json"]) == 0
        times.append(json.loads(capsys.readouterr().out)["states"][1]["wake_s"])
    assert times[0] == pytest.approx(5 * times[1])


def test_a_pooling_model_takes_no_more_kv_cache_than_one_step_reads(capsys):
    words = ("--gpu", "h100", "--", "vllm", "serve", "llama-3.1-8b", "--max-model-len", "16384")
    packed = answer(capsys, *words, "--", "vllm", "serve", "qwen3-embedding-0.6b")
    chat, embedder = packed["servers"]
    args = embedder["args"]
    tokens = args["max_num_batched_tokens"] + args["max_model_len"]
    assert args["max_model_len"] <= embedder["kv"]["tokens"] <= tokens + 2 * embedder["kv"]["block_size"]
    assert chat["pool_bytes"] > 10 * embedder["pool_bytes"]


def test_what_stays_free_for_a_desktop_is_named(capsys):
    servers = ("--", "vllm", "serve", "qwen3-0.6b", "--max-model-len", "8192")
    said = {}
    for card in ("rtx4090", "l4"):
        assert main(["pack", "--gpu", card, *servers]) == 0
        said[card] = capsys.readouterr().out
    assert ", and a desktop may take 1.20 GiB" in said["rtx4090"]
    assert "desktop" not in said["l4"]
