"""What legroom's own recording of vLLM 0.32 on an H200 taught: each test is of one start in it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import H200

from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.planning.plan import Plan, Target, cold_start, plan
from legroom.vllm.args import ServeArgs

RECORDED = Path(__file__).parent.parent / "fixtures/h200_0.32.jsonl"
MIB = 2**20


@cache
def lines() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in RECORDED.read_text().splitlines())


def run(name: str) -> dict[str, Any]:
    return next(line for line in lines() if line.get("id") == name)


def planned(name: str, folder: Path) -> Plan:
    """The plan of a recorded start, made from the files it was started with."""
    recorded = run(name)
    args = json.loads(json.dumps(recorded["args"]).replace("{models}", str(folder)))
    draft = Path((args.get("speculative_config") or {}).get("model", "")).name
    for model in filter(None, (recorded["model"], draft)):
        (folder / model).mkdir()
        for file, content in next(line["files"] for line in lines() if line.get("name") == model).items():
            (folder / model / file).write_text(json.dumps(content))
    home = str(folder / recorded["model"])
    return plan(Target(load(home), H200, 1, release("0.32.0")), ServeArgs(model=home, usage="serve", **args))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("H-mamba-codestral-7b", "a config that names no length takes the one it is asked for"),
        ("S-qwen3next-mtp", "a prediction layer that the config does not name"),
        ("T-apertus-8b", "xIELU in plain torch"),
        ("Q-llama-fp8-static", "a product that is written in 8 bits"),
        ("V-omni", "towers inside thinker_config"),
        ("V-omni-audio", "no vision tower where only recordings are allowed"),
    ],
)
def test_the_kv_cache_is_within_a_quarter_percent_of_what_was_recorded(name: str, why: str, tmp_path: Path) -> None:
    assert planned(name, tmp_path).layout.kv_cache.bytes == pytest.approx(
        run(name)["available_kv_bytes"], rel=2.5e-3
    ), why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("V-internvl3", "attention over parts of the keys"),
        ("V-glm-4.1v", "a video of eleven frames, filled up to twelve"),
        ("V-llama-4-scout", "a rotary embedding in float32"),
        ("V-granite-vision", "the outputs of all blocks are kept"),
        ("V-kimi-vl", "a table of rotations that stays"),
        ("V-minicpm-v-image", "a resampler that attends at the width of the language model"),
        ("V-phi-4-mm", "a tower that the config does not describe, and a speech encoder"),
        ("V-pixtral", "Pixtral's tower below the name of LLaVA"),
        ("V-whisper", "a decoder that keeps six hidden states"),
        ("T-olmo-2-7b", "code of the Transformers library"),
        ("P-qwen3-embedding-0.6b", "no sampler, so no tables for one"),
        ("S-mimo-mtp", "hidden states that wait while the checkpoint's own layers draft"),
        ("S-glm-4.5-air-l6-mtp", "the experts' workspace is kept while its own layers draft"),
        ("Q-mixtral-l6-fp8", "inputs of experts in 8 bits"),
        ("H-falcon-mamba-7b", "Mamba-1 returns after its convolution"),
    ],
)
def test_the_kv_cache_is_within_a_thousandth_of_what_was_recorded(name: str, why: str, tmp_path: Path) -> None:
    assert planned(name, tmp_path).layout.kv_cache.bytes == pytest.approx(run(name)["available_kv_bytes"], rel=1e-3), (
        why
    )


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("afm-4.5b", "ReLU squared in plain torch"),
        ("phi-2", "gelu_new in plain torch"),
        ("starcoder-15b", "hidden states of tokens, positions and their sum"),
        ("olmo-7b", "queries and keys rotated in float32, behind a norm"),
        ("olmo-3-7b", "a table of rotations for each kind of layer"),
        ("mellum2-12b-a2.5b", "queries normed and rotated out of place"),
        ("hunyuan-a13b-l6", "queries normed after they were rotated"),
        ("pythia-6.9b", "queries rotated in the model's dtype"),
        ("laguna-xs", "one gate a head"),
        ("laguna-m.1-l6", "a gate for every value, activated in float32"),
        ("k-exaone-236b-a23b-l5", "normed queries and keys beside experts"),
        ("kimi-k2-thinking-l3", "experts of packed integers on Humming"),
        ("hyperclovax-seed-think-14b", "sums that are tensors of their own"),
        ("N-granite-3.3-8b-fp8", "a product in 8 bits beside its gate"),
        ("Q-llama-online-fp8", "no product on cuBLAS, and a gate that is freed"),
    ],
)
def test_the_peak_and_the_weights_are_within_fifteen_megabytes(name: str, why: str, tmp_path: Path) -> None:
    seen, layout = run(name), planned(name, tmp_path).layout
    for figure, recorded in ((layout.activation, "peak_activation"), (layout.weights, "weights_bytes")):
        assert figure.bytes == pytest.approx(seen[recorded], abs=15 * MIB), f"{recorded}: {why}"


@pytest.mark.parametrize("name", ["H-granite-h-micro", "H-falcon-h1-0.5b", "H-nemotron-nano-12b-v2"])
def test_a_first_start_of_a_state_space_tunes_its_kernels(name: str, tmp_path: Path) -> None:
    seen, warm = run(name)["peak_activation"], planned(name, tmp_path)
    assert cold_start(warm).layout.activation.bytes == pytest.approx(seen, rel=0.05)
    assert warm.layout.activation.bytes < seen <= warm.layout.activation.high * 1.05


@pytest.mark.parametrize("name", ["H-granite-h-tiny", "L-olmoe-8x8", "V-qwen2-vl-2b", "H-lfm2-8b-a1b", "S-mimo-mtp"])
def test_rests_of_segments_follow_from_the_allocations_of_loading(name: str, tmp_path: Path) -> None:
    seen, layout = run(name), planned(name, tmp_path).layout
    beside = seen["requested_memory"] - seen["available_kv_bytes"] - seen["weights_bytes"] - seen["peak_activation"]
    assert layout.non_torch.bytes == pytest.approx(beside, abs=3 * MIB)


@pytest.mark.parametrize("name", ["V-internvl3", "V-glm-4.1v", "V-llama-4-scout", "V-minicpm-v-image", "V-phi-4-mm"])
def test_an_encoder_that_sets_the_peak_is_planned_within_two_percent(name: str, tmp_path: Path) -> None:
    recorded = run(name)
    assert recorded["live_at_peak"]["in"] == "encoder"
    assert planned(name, tmp_path).layout.activation.bytes == pytest.approx(recorded["peak_activation"], rel=0.02)


@pytest.mark.parametrize("name", ["S-eagle", "S-eagle3"])
def test_the_hidden_states_that_a_draft_head_reads_are_in_the_peak(name: str, tmp_path: Path) -> None:
    seen = run(name)["peak_activation"]
    assert planned(name, tmp_path).layout.activation.bytes == pytest.approx(seen, abs=MIB)


def test_the_weights_of_a_tower_that_no_item_may_use_are_left_out(tmp_path: Path) -> None:
    assert planned("V-omni-audio", tmp_path).layout.weights.bytes == pytest.approx(
        run("V-omni-audio")["weights_bytes"], abs=4 * MIB
    )


def test_the_peak_of_xielu_is_the_one_recorded_to_the_megabyte(tmp_path: Path) -> None:
    seen = run("T-apertus-8b")["peak_activation"]
    assert planned("T-apertus-8b", tmp_path).layout.activation.bytes == pytest.approx(seen, abs=MIB)
