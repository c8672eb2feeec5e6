"""Every option is named by a document; options of `simulate` that change a replay do change it."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from legroom.cli.main import COMMANDS, command_parser, main

ROOT = Path(__file__).parents[2]
VLLM_FLAGS = {
    "--block-size",
    "--enable-chunked-prefill",
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
}
SHORT = {"--output"}
"""Documented by their short form, -o."""


def long_options(parser: argparse.ArgumentParser) -> set[str]:
    options = {word for word in parser._option_string_actions if word.startswith("--")}
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return options.union(*(long_options(child) for action in nested for child in action.choices.values()))


def test_every_option_is_documented():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    words = {word.strip("`,.;:()[]|'\"") for page in pages for word in page.read_text("utf-8").split()}
    named = {part for word in words for part in (word, word.partition("=")[0])}
    for command in COMMANDS:
        own = long_options(command_parser(command.name, importlib.import_module(command.module)))
        missing = own - named - VLLM_FLAGS - SHORT - {"--help", "--json"}
        assert {word for word in missing if not word.startswith("--no-")} == set(), command.name


@pytest.mark.parametrize(
    ("options", "figure"),
    [
        (["--watermark", "0.4"], "peak_blocks"),
        (["--num-speculative-tokens", "3", "--acceptance", "0.9"], "steps"),
        (["--sliding-windows", "32"], "peak_blocks"),
        (["--long-prefill-token-threshold", "16"], "steps"),
    ],
)
def test_an_option_of_the_scheduler_changes_the_replay(options, figure, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    requests = [{"arrival_step": step, "prompt_len": 64, "output_len": 32} for step in range(12)]
    trace.write_text("\n".join(map(json.dumps, requests)))

    def replayed(*more: str) -> float:
        assert main(["simulate", str(trace), "--blocks", "40", *more, "--json"]) in (0, 1)
        return json.loads(capsys.readouterr().out)[figure]

    assert replayed(*options) != replayed()


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("size", "--ttft"),
        ("size", "--tpot"),
        ("size", "--budget"),
        ("simulate", "--ttft"),
        ("simulate", "--slo-latency"),
    ],
)
def test_a_limit_is_a_number_above_nothing(command, option, text, capsys):
    assert main([command, "llama-3.1-8b", f"{option}={text}"]) == 2
    assert f"argument {option}: {text!r} is not a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize("measured", ["nan", "inf", "5@nan,3", "5@-1,3", "5@1,inf", "5@1,x"])
def test_a_measured_step_is_of_numbers_that_a_server_can_have(measured, capsys):
    words = ["simulate", "--synthetic", "poisson rate=8 prompt=9 output=9 requests=9", "--model", "qwen3-0.6b"]
    assert main([*words, "--gpu", "l4", f"--measured-step-ms={measured}"]) == 2
    assert "not MS[@RUNNING,TOKENS]" in capsys.readouterr().err


def test_a_measured_step_scales_the_seconds_of_a_replay(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"arrival": n, "prompt_len": 64, "output_len": 32}) for n in range(4)))
    words = ["simulate", str(trace), "--model", "qwen3-0.6b", "--gpu", "l4", "--max-model-len", "2048", "--json"]
    measured = ["--measured-step-ms", "500@4,400"]
    documents = []
    for more in ([], measured):
        assert main([*words, *more]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    makespans = [document["seconds"]["makespan_s"] for document in documents]
    assert makespans[1] > 3 * makespans[0]
