"""Settings that people name in words, with the value that was in force."""

import pytest

from legroom.diagnosis.told_settings import mentions


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("I set gpu_memory_utilization to 0.97", "gpu_memory_utilization", 0.97),
        ("the ratio is already at .95", "gpu_memory_utilization", 0.95),
        ("GPU memory utilization 95 %", "gpu_memory_utilization", 0.95),
        ("lowering utilisation from 0.95 to 0.5", "gpu_memory_utilization", 0.5),
        ("ratio .9/.85/.7/.5: same spot", "gpu_memory_utilization", 0.9),
        ("利用率从0.9调到0.95", "gpu_memory_utilization", 0.95),
        ("tensor parallel 2 and max model len 32768", "max_model_len", 32768),
        ("with a 32,768-token context window", "max_model_len", 32768),
        ("context: 128k", "max_model_len", 131072),
        ("max-model-len 8192 → 4096", "max_model_len", 4096),
        ("64 max sequences", "max_num_seqs", 64),
        ("32,768 max batched tokens", "max_num_batched_tokens", 32768),
        ("4-way tensor parallel", "tensor_parallel_size", 4),
        ("TP4 on one node", "tensor_parallel_size", 4),
        ("kv cache dtype fp8_e5m2", "kv_cache_dtype", "fp8_e5m2"),
    ],
)
def test_a_setting_in_words_has_its_value(text: str, name: str, value: float | str) -> None:
    assert {mention.name: mention.newest for mention in mentions(text)}[name] == value


@pytest.mark.parametrize(
    "text",
    ["a sliding window of 4096", "KV cache utilization 0.95", "GPU utilization is at 95 %", "a context of 2 GiB"],
)
def test_other_quantities_are_no_settings(text: str) -> None:
    assert not list(mentions(text))
