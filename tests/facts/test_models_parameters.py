"""Every bundled architecture adds up to its parameter count, so a wrong width, layer or head count shows."""

from dataclasses import replace

from legroom.facts import bundled
from legroom.facts.bundled import bundled_names
from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.memory.weights.loaded import parameter_bytes
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve

TOLERANCE = 0.01
UNPUBLISHED = {"internvl3-14b", "kimi-k2", "kimi-k3", "minimax-m3"}
"""Their owners publish rounded counts only ("1T", "7B")."""

NOT_COUNTED = {
    "deepseek-v4-flash": "compressors and hyper-connections",
    "mimo-7b": "the layer that predicts the next token but one",
    "llama-3.2-11b-vision": "cross-attention layers and the encoder",
}
"""What the weights of these still lack, so that the count is not compared."""

BASES = tuple(name for name in bundled_names() if bundled._bundled_of(name).base is None)


def parameters(name: str) -> int:
    model = replace(load(name), quantization=None)
    card, version = gpu("h100"), release("0.26.0")
    cache = "fp8" if name.startswith("deepseek-v4") else None
    args = ServeArgs(model=name, dtype="bfloat16", max_model_len=448, kv_cache_dtype=cache)
    settings = resolve(args, model, card, version)
    return parameter_bytes(model, settings, card) // 2


def test_every_architecture_has_its_parameter_count() -> None:
    assert {name for name in BASES if not bundled._bundled_of(name).parameters} == UNPUBLISHED


def test_every_architecture_adds_up_to_its_parameter_count() -> None:
    counted = [name for name in BASES if name not in UNPUBLISHED | NOT_COUNTED.keys()]
    errors = {name: parameters(name) / bundled._bundled_of(name).parameters - 1 for name in counted}
    assert {name: error for name, error in errors.items() if abs(error) >= TOLERANCE} == {}
