from __future__ import annotations

import json

import pytest

from legroom.cli.main import main
from legroom.drawing.terminal import PLAIN
from legroom.facts.bundled import find
from legroom.facts.gpus import gpu
from legroom.facts.releases import latest
from legroom.planning.plan import Target, plan, sure_longest_len
from legroom.planning.search_space import CapacityGoal
from legroom.render.size_text import card_models_text
from legroom.simulation.card_models import CardModels, CardSearch, decode_rate, models_on_card
from legroom.simulation.from_plan import hardware
from legroom.sweeps import ProcessExecutor
from legroom.units import GIB
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import served_model

NAMES = ("llama-3.1-8b", "llama-3.1-8b-nvidia-fp8", "qwen3-0.6b", "qwen3-14b", "bge-large-en-v1.5", "deepseek-v3")


@pytest.fixture(scope="module")
def on_rtx4090() -> CardModels:
    models = [model for name in NAMES if (model := find(name))]
    goal = CapacityGoal(8192, 4.0, (1,), "balanced")
    search = CardSearch(gpu("rtx4090"), 1, latest(), ServeArgs(), goal)
    return models_on_card(models, search, ProcessExecutor(1))


def test_every_model_that_fits_holds_the_users(on_rtx4090: CardModels) -> None:
    generating = [each for each in on_rtx4090.fitting if each.bundled.name != "bge-large-en-v1.5"]
    assert {each.bundled.name for each in generating} >= {"llama-3.1-8b-nvidia-fp8", "qwen3-0.6b"}
    assert all(each.fit.holds >= 4 and each.longest_len >= 8192 for each in generating)


def test_the_longest_request_for_sure_is_that_of_the_plan_also_below_the_wish() -> None:
    """A tight plan may start with the wished length and is not sure to."""
    search = CardSearch(gpu("rtx4090"), 2, latest(), ServeArgs(), CapacityGoal(8192, 1.0, (2,), "balanced"))
    (row,) = models_on_card([find("qwen2.5-72b-awq")], search, ProcessExecutor(1)).fitting
    assert row.fit.plan.verdict == "tight"
    assert row.longest_len == sure_longest_len(row.fit.plan) < 8192


def test_a_model_is_listed_once_with_the_checkpoint_that_gives_up_least(on_rtx4090: CardModels) -> None:
    families = [each.family for each in on_rtx4090.best_of_each]
    assert len(families) == len(set(families))
    best = {each.family: each for each in on_rtx4090.best_of_each}["llama-3.1-8b"]
    others = [each for each in on_rtx4090.fitting if each.family == "llama-3.1-8b"]
    assert len(best.fit.losses) == min(len(each.fit.losses) for each in others)


def test_no_more_users_are_shown_than_the_server_runs_at_once() -> None:
    search = CardSearch(gpu("rtx4090"), 1, latest(), ServeArgs(), CapacityGoal(8192, 4.0, (1,), "balanced"))
    small = find("mamba-130m")
    assert small is not None
    answer = models_on_card([small], search, ProcessExecutor(1))
    (row,) = answer.fitting
    assert row.fit.plan is not None and row.fit.holds > row.fit.plan.settings.max_num_seqs
    assert row.as_json()["runs_at_once"] == row.fit.plan.settings.max_num_seqs
    shown = card_models_text(answer, PLAIN).split("mamba-130m")[1].split()
    assert shown[3] == f"{row.fit.plan.settings.max_num_seqs}"


def test_what_lacks_memory_says_how_much(on_rtx4090: CardModels) -> None:
    missing = {each.bundled.name: each.fit.short_bytes for each in on_rtx4090.nearest_missing}
    weights_bytes = 27 * 2**30
    assert missing["qwen3-14b"] > weights_bytes - on_rtx4090.search.gpu.total_bytes


def test_a_faster_card_has_a_faster_user(on_rtx4090: CardModels) -> None:
    rates = {each.bundled.name: each.rate for each in on_rtx4090.fitting}
    small, large = rates["qwen3-0.6b"], rates["llama-3.1-8b-nvidia-fp8"]
    assert small is not None and large is not None
    assert large.low < large.estimate < large.high < small.high
    assert rates.get("bge-large-en-v1.5") is None


def test_all_users_together_are_faster_than_one_and_each_of_them_slower(on_rtx4090: CardModels) -> None:
    for each in on_rtx4090.fitting:
        row = each.as_json()
        if one := row["tokens_per_s"]:
            assert one["estimate"] < row["all_users_tokens_per_s"]["estimate"] < 4 * one["estimate"]


def test_a_list_is_sorted_by_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"name": "name", "context": "longest_len", "users": "max_concurrency"}
    for order, figure in figures.items():
        assert main(["models", "qwen3-4b", "--gpu", "rtx4090", "--sort", order, "--json"]) == 0
        values = [row[figure] for row in json.loads(capsys.readouterr().out)["models"]]
        assert len(values) > 2
        assert values == sorted(values, reverse=order != "name")


def test_what_other_programs_use_of_the_card_is_not_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "llama-3.1-8b", "--gpu", "24GiB", "--gpu-used", "0", "--json"]) == 0
    before = {row["name"] for row in json.loads(capsys.readouterr().out)["models"]}
    assert main(["models", "llama-3.1-8b", "--gpu", "24GiB", "--gpu-used", "12GiB", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["models"]} < before
    assert main(["models", "llama-3.1-8b", "--gpu", "24GiB", "--gpu-used", "12"]) == 2


def test_the_command_lists_what_the_gpu_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "qwen3-0.6b", "--gpu", "t4", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"vllm", "gpu", "gpus", "context", "users", "models", "too_large"} <= set(document)
    assert document["models"][0]["command"][:2] == ["vllm", "serve"]
    assert main(["models", "deepseek-v3", "--gpu", "t4"]) == 1
    assert main(["models", "qwen3-0.6b", "--gpu", "t4", "--users", "0"]) == 2


@pytest.mark.parametrize(("model", "card"), [("llama-3.1-8b", "h100"), ("llama-3.1-8b", "rtx4090"), ("qwen3-4b", "l4")])
def test_every_step_reads_offloaded_weights_over_pcie(model: str, card: str) -> None:
    offloaded_gb, speeds = 4, []
    for size in (0, offloaded_gb):
        args = ServeArgs(model=model, max_model_len=8192, cpu_offload_gb=float(size))
        made = plan(Target(served_model(args), gpu(card), 1, latest()), args)
        rate = decode_rate(made, 8192)
        assert rate is not None
        speeds.append(rate.estimate)
    added_s = 1 / speeds[1] - 1 / speeds[0]
    assert added_s > 0.9 * offloaded_gb * GIB * (1 / gpu(card).pcie_bytes_s - 1 / gpu(card).bandwidth_bytes_s)
    assert speeds[1] < gpu(card).pcie_bytes_s / (offloaded_gb * GIB)


@pytest.mark.parametrize(
    ("model", "card"), [("qwen3-14b-awq", "rtx4090"), ("llama-3.1-8b", "h100"), ("gpt-oss-20b", "l4")]
)
def test_no_rate_exceeds_what_the_card_can_read(model: str, card: str) -> None:
    args = ServeArgs(model, max_model_len=8192)
    planned = plan(Target(served_model(args), gpu(card), 1, latest()), args)
    rate = decode_rate(planned, 8192)
    assert rate is not None
    read_bytes = hardware(planned).weights_bytes + 8192 * hardware(planned).kv_bytes_per_token
    assert rate.low < rate.estimate <= rate.high <= gpu(card).bandwidth_bytes_s / read_bytes * 1.001
