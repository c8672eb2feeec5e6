"""The moment when the weights load: the most that torch holds before vLLM profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from legroom.facts.gpus import gpu
from legroom.facts.releases import release
from legroom.memory.deployment_memory import deployment_memory
from legroom.memory.weights.loaded import loaded_weights
from legroom.units import GIB
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve, served_model

CARD = gpu("rtx4090")
MODEL = served_model(ServeArgs(model="Qwen/Qwen3-14B"))


def settled(version: str, **given: object) -> EngineSettings:
    args = replace(ServeArgs(model="m", max_model_len=2048), **given)  # type: ignore[arg-type]
    return resolve(args, MODEL, CARD, release(version))


@pytest.mark.parametrize(("version", "peak_gib"), [("0.12.0", 27.6), ("0.15.1", 39.9), ("0.16.0", 15.5)])
def test_online_quantization_holds_the_whole_model_until_it_goes_layer_by_layer(version: str, peak_gib: float):
    loaded = loaded_weights(MODEL, settled(version, quantization="fp8"), CARD)
    assert loaded.peak_bytes / GIB == pytest.approx(peak_gib, abs=0.4)
    assert loaded.figure.bytes < 16 * GIB


def test_a_model_that_only_fits_once_quantized_dies_while_it_loads():
    failure = deployment_memory(MODEL, CARD, settled("0.12.0", quantization="fp8")).failure
    assert failure is not None
    assert failure.id == "loading_oom"
    assert failure.needed_bytes > failure.available_bytes


def test_a_plain_checkpoint_loads_without_a_peak_of_its_own():
    loaded = loaded_weights(MODEL, settled("0.19.0"), CARD)
    assert (loaded.peak_bytes, loaded.why) == (loaded.figure.bytes, "")


def test_fastsafetensors_stages_a_file_on_the_gpu():
    staged = loaded_weights(MODEL, settled("0.19.0", others=("--load-format", "fastsafetensors")), CARD)
    assert staged.peak_bytes - staged.figure.bytes == 5 * 10**9


def test_a_layer_quantized_from_files_reuses_the_block_of_the_matrix_before_it():
    # 0.21+ splits no block of 20 MiB: 25 MiB of fused FP8 queries take the freed 50 MiB of the output matrix.
    files, dummy = (
        loaded_weights(MODEL, settled("0.27.1", quantization="fp8", others=others), CARD).figure.bytes
        for others in ((), ("--load-format", "dummy"))
    )
    assert 0 < files - dummy < GIB


def test_weights_quantized_while_loading_are_estimated():
    assert loaded_weights(MODEL, settled("0.22.0", quantization="fp8"), CARD).figure.kind == "estimated"
    assert loaded_weights(MODEL, settled("0.22.0"), CARD).figure.kind == "exact"
