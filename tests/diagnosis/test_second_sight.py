"""What decides beside a wrapper line: the error inside it, who holds the card, another program."""

from __future__ import annotations

import pytest

from legroom.diagnosis.log_diagnosis import read_log

_OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11.00 GiB"


def _run(text: str):
    """The diagnosis of the text's first run."""
    return read_log([text.encode()]).runs[0]


@pytest.mark.parametrize("path", ["transformers/integrations/sdpa_attention.py", "torch/nn/modules/conv.py"])
def test_frames_of_another_library_are_another_programs(path: str) -> None:
    text = f'  File "/opt/py/site-packages/{path}", line 9, in forward\n{_OOM} of which 1.00 GiB is free.'
    assert _run(text).other_engine == "engine_pytorch"
    assert not _run(f"(EngineCore pid=7) ERROR 05-19 22:17:53 [core.py:386] vLLM failed\n{text}").other_engine


def test_error_inside_a_wrapper_outweighs_the_question_below_it() -> None:
    wrapper = "('Worker failed with error %s, please check the stack trace above for the root cause', "
    text = f"ERROR 05-19 22:17:53 [core.py:386] RuntimeError: {wrapper}\"'list' object has no attribute 'shape'\")\n"
    run = _run(text + "\nWhy is the memory of four cards not enough for this model, and how can I make it faster?")
    assert run.findings[0].cause == "not_memory"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("vLLM: Engine core initialization failed. ibv_modify_qp EINVAL, the interface lost its address", "not_memory"),
        (
            "vllm 启动失败：Engine core initialization failed\nComfyUI 占着 10.5G/12G，vllm 要 4G",
            "gpu_shared_or_not_free",
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (8192), 2.0 GiB KV cache is needed,"
            " which is larger than the available KV cache memory (0.5 GiB).\nThe previous container was still releasing"
            " its VRAM; a minute later vLLM started.",
            "gpu_shared_or_not_free",
        ),
        (
            "vLLM on Ray: Didn't receive health check response for replica x after 10.0s, marking it unhealthy.",
            "not_memory",
        ),
        ("With vLLM, loading the weights via fastsafetensors balloons memory and the box crashes", "host_ram_oom"),
    ],
)
def test_words_beside_the_error_decide(text: str, cause: str) -> None:
    assert _run(text).findings[0].cause == cause
