#!/usr/bin/env python3
"""Ask an installed vLLM's own planner for block counts, and write the answers down as a fixture.

    VLLM_PYTHON tests/recorders/record_blocks.py --out tests/fixtures/vllm_blocks.jsonl.gz [--configs FILE...]
                                       [--bundled NAME...|all] [--only TEXT] [--prelude FILE] [--merge FILE...]

Run it with the Python of the environment that vLLM is installed in. The model class of each config is built on the
meta device, so neither weights nor much memory is needed; tensor- and pipeline-parallel ranks are imitated. On a
machine without a GPU, `--prelude` names a Python file that is run first and may stand in for the CUDA platform.

A line holds what legroom knows of one model's caches (not its config), or one set of flags with vLLM's answers.
`--merge` takes over the cases of earlier recordings.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gzip
import json
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/memory")]

from recorded_model_facts import facts_of

from legroom.facts.bundled import bundled_config, bundled_names, find
from legroom.facts.config.model_config import model_from_config

GIB = 2**30
AVAILABLE = (40 * GIB, 3 * GIB, 200 * 2**20)
QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of flags and ranks."""

    flags: tuple[str, ...]
    tp: int = 1
    pp: int = 1


def cases(config: dict[str, Any], full: bool) -> list[Case]:
    """The matrix for one model; hybrids and drafts add their own."""
    model = model_from_config(config)
    limit = model.max_position_embeddings
    short = str(min(8192, limit))
    length = ("--max-model-len", short)
    if not full:
        return [
            *(Case(length, tp) for tp in (1, 2, 4, 8)),
            Case((*length, "--kv-cache-dtype", "fp8"), 2, 2),
            Case(("--max-model-len", str(limit), "--block-size", "32")),
        ]
    found = [Case(length, tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2)]
    found += [Case((*length, "--kv-cache-dtype", "fp8"), tp) for tp in (1, 4)]
    found += [Case(("--max-model-len", str(limit)), tp) for tp in (1, 8)]
    found += [Case((*length, "--block-size", size)) for size in ("32", "64", "128")]
    found += [
        Case((*length, "--block-size", "64"), 2, 2),
        Case((*length, "--kv-cache-dtype", "fp8", "--block-size", "32"), 2),
        Case((*length, "--max-num-batched-tokens", "2048"), 1),
        Case((*length, "--max-num-batched-tokens", "16384"), 2),
        Case((*length, "--no-enable-prefix-caching"), 1),
        Case((*length, "--no-enable-prefix-caching"), 4),
        Case((*length, "--num-gpu-blocks-override", "700")),
        Case((*length, "--kv-cache-dtype", "int8_per_token_head")),
        Case((*length, "--kv-cache-dtype", "fp8_per_token_head"), 2),
        Case(("--max-model-len", "-1")),
        Case(length, 1, 4),
        Case((*length, "--disable-hybrid-kv-cache-manager")),
        Case((*length, "--no-async-scheduling"), 1),
    ]
    if model.draft_layers:
        speculative = json.dumps({"method": "mtp", "num_speculative_tokens": 2})
        found.append(Case((*length, "--speculative-config", speculative)))
    return found


class Planner:
    """vLLM's planner behind one call a case."""

    def __init__(self) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self.engine_args = EngineArgs
        self.parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        self.started = False

    def ask(self, config: dict[str, Any], case: Case) -> dict[str, Any]:
        """Settings that vLLM resolved and its answer for each amount of memory."""
        import vllm.distributed.parallel_state as state
        from vllm.config import set_current_vllm_config
        from vllm.usage.usage_lib import UsageContext

        folder = Path(tempfile.mkdtemp(prefix="legroom_blocks_"))
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(plain), "utf-8")
        arguments = ["--model", str(folder), "--skip-tokenizer-init", "--load-format", "dummy", "--enforce-eager"]
        parsed = self.parser.parse_args([*arguments, *case.flags])
        vllm_config = self.engine_args.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)
        model_config = vllm_config.model_config
        if case.pp > 1 and not model_config.registry.is_pp_supported_model(model_config.architectures, model_config):
            raise NotImplementedError("vLLM does not split this architecture into stages")
        with set_current_vllm_config(vllm_config):
            if self.started:
                state.destroy_model_parallel()
            else:
                state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
                self.started = True
            state.initialize_model_parallel(1)
            stages, backends = self._stage_specs(vllm_config, case, state)
            return self._answers(vllm_config, stages, backends, case)

    @staticmethod
    def _stage_specs(vllm_config: Any, case: Case, state: Any) -> tuple[list[dict[str, Any]], list[Any]]:
        """The cache specs that each stage's layers ask for."""
        import torch
        from vllm.config.vllm import get_layers_from_vllm_config
        from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.platforms import current_platform
        from vllm.utils.torch_utils import set_default_torch_dtype
        from vllm.v1.kv_cache_interface import AttentionSpec
        from vllm.v1.worker.gpu_model_runner import customize_attention_spec

        parallel = vllm_config.parallel_config
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size = case.tp, case.pp
        parallel.world_size = case.tp * case.pp
        group = state.get_tp_group()
        group.world_size, group.ranks, group.rank_in_group = case.tp, list(range(case.tp)), 0
        stages: list[dict[str, Any]] = []
        backends: list[Any] = []
        for stage in range(case.pp):
            group = state.get_pp_group()
            group.world_size, group.ranks = case.pp, list(range(case.pp))
            group.rank_in_group = group.rank = stage
            vllm_config.compilation_config.static_forward_context.clear()
            with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
                built = [initialize_model(vllm_config=vllm_config)]
                draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
                if draft is not None and stage == case.pp - 1:
                    built.append(initialize_model(vllm_config=vllm_config, model_config=draft))
            if stage == 0:
                current_platform.update_block_size_for_backend(vllm_config)
            specs = {}
            for name, layer in get_layers_from_vllm_config(vllm_config, AttentionLayerBase).items():
                shares = getattr(layer, "kv_sharing_target_layer_name", None)
                spec = None if shares else layer.get_kv_cache_spec(vllm_config)
                if spec is None:
                    continue
                backend = layer.get_attn_backend()
                if backend not in backends:
                    backends.append(backend)
                specs[name] = customize_attention_spec(backend, spec) if isinstance(spec, AttentionSpec) else spec
            stages.append(specs)
            del built
        return stages, backends

    @staticmethod
    def _answers(vllm_config: Any, stages: list[dict[str, Any]], backends: list[Any], case: Case) -> dict[str, Any]:
        import vllm.v1.core.kv_cache_utils as planner
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
        from vllm.v1.engine import core

        every = [spec for one in stages for spec in one.values()]
        core.register_all_kvcache_specs(vllm_config)
        layouts = [layout.name for layout in get_supported_kv_cache_layouts(backends)]
        core.resolve_kv_cache_layout(vllm_config, [layouts], every)
        model_config, scheduler = vllm_config.model_config, vllm_config.scheduler_config
        length = model_config.max_model_len
        answers = []
        for available in AVAILABLE:
            answer: dict[str, Any] = {"available_bytes": available}
            try:
                plans = planner.get_kv_cache_configs(vllm_config, [dict(one) for one in stages], [available] * case.pp)
                plan = planner.generate_scheduler_kv_cache_config(plans)
                tokens, concurrency = planner.get_kv_cache_capacity(vllm_config, plan)
                groups = plans[0].kv_cache_groups
                answer |= {
                    "num_blocks": plan.num_blocks,
                    "tokens": tokens,
                    "concurrency": round(concurrency, 4),
                    "max_model_len": model_config.max_model_len,
                    "needed_bytes": planner._max_memory_usage_bytes_from_groups(vllm_config, groups),
                    "groups": len(groups),
                }
            except ValueError as problem:
                answer["error"] = str(problem)
            finally:
                model_config.max_model_len = length
            answers.append(answer)
        return {
            "dtype": str(model_config.dtype).removeprefix("torch."),
            "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
            "block_size": vllm_config.cache_config.block_size,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "batches": vllm_config.max_concurrent_batches,
            "prefix_caching": vllm_config.cache_config.enable_prefix_caching,
            "backends": [backend.get_name() for backend in backends],
            "answers": answers,
        }


def sources(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Configs by name: files, and models that come with legroom."""
    found = [(Path(name).stem, json.loads(Path(name).read_text("utf-8"))) for name in options.configs]
    names = bundled_names() if options.bundled == ["all"] else options.bundled
    for name in names:
        model = find(name)
        if model is not None and model.base is None:
            found.append((name, dict(bundled_config(model))))
    return [(name, config) for name, config in found if options.only in name]


def opened(path: Path, mode: str) -> IO[str]:
    """A recording, packed where its name says so."""
    return gzip.open(path, mode, encoding="utf-8") if path.suffix == ".gz" else path.open(mode, encoding="utf-8")  # type: ignore[return-value]


def write(out: IO[str], row: dict[str, Any]) -> None:
    """One line, at once, so that a broken run keeps what it has."""
    out.write(json.dumps(row, separators=(",", ":")) + "\n")
    out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="*", default=[])
    parser.add_argument("--bundled", nargs="*", default=[])
    parser.add_argument("--only", default="")
    parser.add_argument("--prelude")
    parser.add_argument("--merge", nargs="*", default=[])
    parser.add_argument("--full", action="store_true", help="the wide matrix for every model")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if options.prelude:
        runpy.run_path(options.prelude, run_name="prelude")
    planner = Planner()
    import vllm

    version = vllm.__version__.partition("+")[0]
    seen: set[str] = set()
    known: set[str] = set()
    with opened(Path(options.out), "wt") as out:
        for path in options.merge:
            with opened(Path(path), "rt") as lines:
                for line in lines:
                    out.write(line)
                    known.add(json.dumps(json.loads(line).get("facts")))
        for name, config in sources(options):
            started, failed, answered = time.monotonic(), 0, 0
            model = model_from_config(config, name)
            full = options.full or model.architecture not in seen
            seen.add(model.architecture)
            facts = facts_of(model)
            if json.dumps(facts) in known:
                continue  # another size of the same caches, or a quantized copy
            known.add(json.dumps(facts))
            for case in cases(config, full):
                try:
                    answer = planner.ask(config, case)
                except Exception as problem:
                    failed += 1
                    print(f"{name} {case}: {type(problem).__name__}: {str(problem)[:300]}", file=sys.stderr)
                    if failed > 3 and not answered:
                        break
                    continue
                row = {"model": name, "vllm": version, "flags": case.flags, "tp": case.tp, "pp": case.pp, **answer}
                if not answered:
                    write(out, {"facts_of": name, "facts": facts})
                write(out, row)
                answered += 1
            print(f"{name}: {time.monotonic() - started:.0f} s, {failed} failed", file=sys.stderr)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
