"""A spread of planned servers that every deployment format is written for."""

from functools import cache

from legroom import plan
from legroom.exports.export_request import ExportRequest
from legroom.planning.plan_document import plan_from_json

SERVERS = {
    "8b-h100": ("llama-3.1-8b", "h100", {}),
    "70b-tp4": ("llama-3.1-70b", "h100", {"tensor_parallel_size": 4, "max_model_len": 32768}),
    "8b-l4-fp8-kv": ("llama-3.1-8b", "l4", {"kv_cache_dtype": "fp8", "max_model_len": 8192, "max_num_seqs": 64}),
    "8b-offload": ("llama-3.1-8b", "l4", {"cpu_offload_gb": 4, "max_model_len": 4096, "enforce_eager": True}),
    "8b-dp2": ("llama-3.1-8b", "h100", {"data_parallel_size": 2, "tensor_parallel_size": 2, "max_model_len": 8192}),
    "qwen-pp2": ("qwen3-32b", "l40s", {"pipeline_parallel_size": 2, "max_model_len": 8192}),
    "speculative": (
        "llama-3.1-8b",
        "h200",
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}},
    ),
    "embedder": ("bge-large-en-v1.5", "l4", {}),
    "v0-0.6.3": ("llama-3.1-8b", "a100-80gb", {"vllm": "0.6.3", "max_model_len": 16384, "swap_space": 8}),
    "0.8.5-tp2": ("llama-3.1-8b", "a10g", {"vllm": "0.8.5", "tensor_parallel_size": 2, "max_model_len": 16384}),
    "0.10.2": ("qwen3-8b", "rtx4090", {"vllm": "0.10.2", "max_model_len": 8192}),
    "0.19.0": ("mistral-7b", "l40s", {"vllm": "0.19.0"}),
    "0.20.0-tp8": ("llama-3.1-70b", "a100-80gb", {"vllm": "0.20.0", "tensor_parallel_size": 8}),
    "0.4.2": ("llama-2-7b", "a100-80gb", {"vllm": "0.4.2"}),
}


@cache
def planned(name):
    """The plan document of one of them."""
    model, gpu, flags = SERVERS[name]
    made = plan(model, gpu, advice=False, **flags)
    assert made.verdict != "does_not_fit", f"{name} must start to be exported"
    return plan_from_json(made.json())


def request(which, /, **options):
    """A request to export one of them."""
    document = planned(which)
    return ExportRequest(document.release, document, options)


NAMES_OF_FLEETS = ("8b-h100", "70b-tp4", "0.8.5-tp2", "embedder")
