"""Measures what vLLM uses beside the model: starts a two-layer model and records the engine's memory profile.

    python vllm_stage.py RESULTS.jsonl [--ranks N]
    python vllm_stage.py RESULTS.jsonl -- MODEL [flags of vllm serve]      # that deployment, with dummy weights

Runs with the Python of the user's vLLM, which has no legroom. Weights are dummies, so nothing is downloaded.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_BUDGET_BYTES = 8 << 30  # The model, its profile run and a small pool fit in this.


def main() -> None:
    """Starts vLLM, with a tiny model or the flags after `--`, and appends what it measured to the results file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results")
    parser.add_argument("--ranks", type=int, default=1)
    words = sys.argv[1:]
    served = words[words.index("--") + 1 :] if "--" in words else []
    args = parser.parse_args(words[: words.index("--")] if served else words)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ["LEGROOM_PROBE_RESULTS"] = str(Path(args.results).absolute())
    here = str(Path(__file__).resolve().parent)
    # The engine's processes find the worker class below by its module's name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    sys.path.insert(0, here)
    started = time.monotonic()
    try:
        if served:
            _start_deployment(served, args.results)
        else:
            _start_tiny_model(args.ranks, args.results)
    except Exception as error:
        _append_result(args.results, {"finding": "vllm", "error": f"{type(error).__name__}: {error}"[:500]})
        raise SystemExit(1) from error
    finally:
        print(f"vLLM stage: {time.monotonic() - started:.1f} s", file=sys.stderr)
    sys.stdout.flush()
    os._exit(0)  # an engine's shutdown can take minutes, and the results are written


def _start_tiny_model(ranks: int, results: str) -> None:
    """Starts vLLM on `ranks` GPUs with a tiny model, whose workers append their profile to the file `results`."""
    vllm = importlib.import_module("vllm")
    torch = importlib.import_module("torch")
    nvml_total = _total_bytes()
    budget = 0.1 if nvml_total is None else min(0.9, _BUDGET_BYTES / nvml_total)
    with tempfile.TemporaryDirectory(prefix="legroom-probe-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL), "utf-8")
        vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=16,
            max_num_batched_tokens=2048,
            gpu_memory_utilization=round(budget, 4),
            tensor_parallel_size=ranks,
            worker_cls="vllm_stage_worker.ProbedWorker",
            disable_log_stats=True,
        )
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    _append_result(results, {"finding": "vllm_started", "ranks": ranks, **versions})


def _start_deployment(words: list[str], results: str) -> None:
    """Starts the deployment in `words`, parsed by vLLM itself, with dummy weights; appends the version to `results`."""
    vllm = importlib.import_module("vllm")
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    parsers = [name for name in ("vllm.utils.argparse_utils", "vllm.utils") if _has_parser(name)]
    parser = importlib.import_module(parsers[0]).FlexibleArgumentParser()
    parser.add_argument("model_tag")
    parsed, _ = engine_args.add_cli_args(parser).parse_known_args(words)  # the rest are flags of the API server
    parsed.model = parsed.model_tag
    args = engine_args.from_cli_args(parsed)
    args.load_format, args.worker_cls = "dummy", "vllm_stage_worker.ProbedWorker"
    # `vllm serve` has larger defaults of max_num_seqs and max_num_batched_tokens than the LLM class.
    served = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(args, usage_context=served)
    _append_result(results, {"finding": "vllm_started", "vllm": vllm.__version__, "served": words})


def _has_parser(name: str) -> bool:
    """Whether the module `name` has vLLM's FlexibleArgumentParser, which moved in 0.12."""
    try:
        return hasattr(importlib.import_module(name), "FlexibleArgumentParser")
    except ImportError:
        return False


def _total_bytes() -> int | None:
    """Total memory of the first GPU by NVML, which creates no CUDA context in this process; None without NVML."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).total)
    except Exception:  # without NVML the default share is used
        return None


def _append_result(path: str, line: dict[str, Any]) -> None:
    """Appends `line` (its measurement's name is `finding`) to the results file as a line of JSON."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
