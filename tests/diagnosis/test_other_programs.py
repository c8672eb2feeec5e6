"""Texts of other programs: named as such, with their own levers, and never asserted as vLLM's memory failure."""

from __future__ import annotations

import pytest

from legroom.diagnosis.log_diagnosis import read_log
from legroom.diagnosis.verdict import Diagnosis

OF_OTHERS = {
    "SGLang's scheduler": ("[TP0] Decode out of memory happened. #retracted_reqs: 3", "SGLang"),
    "SGLang in Chinese": ("我用 sglang 跑 72B，报 CUDA out of memory", "SGLang"),
    "llama.cpp's server": ("llama-server -m a.gguf -c 40000 -ngl 99: cudaMalloc failed: out of memory", "llama.cpp"),
    "KoboldCpp": ("koboldcpp with 12k context: CUDA error: out of memory in ggml_cuda_pool", "llama.cpp"),
    "Ollama by its settings": ("cudaMalloc failed: out of memory, OLLAMA_NUM_PARALLEL=8", "Ollama"),
    "Ollama in Chinese": ("ollama 跑 70b 显存不足：cudaMalloc failed: out of memory", "Ollama"),
    "TGI's warm-up": (
        "ERROR text_generation_launcher: Method Warmup encountered an error. CUDA out of memory. Tried 1 GiB",
        "Text Generation Inference",
    ),
    "ExLlama": ("exllamav3 loader: torch.OutOfMemoryError: CUDA out of memory when loading", "ExLlama"),
    "an image program": ("AUTOMATIC1111 with --medvram: CUDA out of memory. Tried to allocate 3.00 GiB", "Diffusion"),
    "JAX": ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes. XLA_PYTHON_CLIENT_PREALLOCATE", "JAX"),
    "TensorFlow": ("bfc_allocator.cc:479] Allocator (GPU_0_bfc) ran out of memory trying to allocate 3.0GiB", "JAX"),
    "Whisper": ("faster-whisper medium: RuntimeError: CUDA failed with error out of memory", "faster-whisper"),
    "a fork": ("aphrodite run acme/m: ValueError: No available memory for the cache blocks.", "Aphrodite"),
    "embeddings": ("infinity_emb v2: torch.OutOfMemoryError: CUDA out of memory with batch 900", "embedding"),
    "a quantizer": ("AutoAWQForCausalLM: CUDA out of memory while quantizing layer 11", "AutoAWQ"),
    "transformers": (
        'AutoModelForCausalLM.from_pretrained("acme/m-70B").cuda()\ntorch.OutOfMemoryError: CUDA out of memory. Tried',
        "transformers",
    ),
    "a fine-tuning": ("Unsloth QLoRA of a 14B: OutOfMemoryError in trainer.train()", "training step"),
    "an adapter's frame": (
        'File "/x/peft/tuners/lora/layer.py", line 5, in forward\ntorch.OutOfMemoryError: CUDA out of memory. Tried',
        "training step",
    ),
    "a training in Chinese": ("LLaMA-Factory 微调 7B，训练 20 步后爆显存 CUDA out of memory", "training step"),
}


def diagnosis(text: str) -> Diagnosis:
    return read_log([f"{text}\n".encode()]).runs[0]


@pytest.mark.parametrize(("text", "name"), OF_OTHERS.values(), ids=OF_OTHERS)
def test_the_memory_of_another_program_is_no_failure_of_vllm(text: str, name: str) -> None:
    made = diagnosis(text)
    assert not made.findings
    assert made.other_engine
    assert any(name in note for note in made.notes)


@pytest.mark.parametrize(
    "text",
    [
        "vLLM dies with CUDA out of memory on my 24 GB card. The same model runs in ollama without trouble.",
        "With sglang it works; with vLLM I get CUDA out of memory while it loads.",
        "ValueError: No available memory for the cache blocks. Elsewhere, using llama.cpp, vLLM's model fits.",
    ],
)
def test_a_program_that_is_only_compared_does_not_own_the_failure(text: str) -> None:
    assert not diagnosis(text).other_engine


def test_a_trainer_that_runs_vllm_owns_its_failure() -> None:
    made = diagnosis("GRPOTrainer with use_vllm=True: torch.OutOfMemoryError: CUDA out of memory in trainer.train()")
    assert made.findings and not made.other_engine
