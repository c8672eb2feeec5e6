#!/usr/bin/env python3
"""Ask an installed vLLM's own model classes how many bytes of parameters a rank holds, and write it down as a fixture.

    VLLM_PYTHON tests/recorders/record_weights.py --out tests/fixtures/vllm_weights.jsonl CONFIG.json...
                                        [--ranks 1x1,2x1,1x2] [--keep-quantization] [--prelude FILE]

Run it with the Python of the environment that vLLM is installed in. Model classes are built on the meta device, so
neither weights nor much memory is needed; tensor-parallel (first number) and pipeline-parallel ranks are imitated. On
a machine without a GPU, `--prelude` names a Python file that is run first and may stand in for the CUDA platform.

A line holds the config, the dtype, and for every division of the work the bytes of each pipeline stage.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import tempfile
from pathlib import Path
from typing import Any

QUIET = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class Recorder:
    """Builds model classes of the vLLM that is installed here."""

    def __init__(self) -> None:
        import vllm.distributed.parallel_state as state
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self._state = state
        self._engine_args = EngineArgs
        self._parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        self._ready = False

    def stage_bytes(self, config: dict[str, Any], tp: int, pp: int) -> tuple[str, list[int]]:
        """The dtype, and the parameter bytes of rank 0 of every pipeline stage."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.torch_utils import set_default_torch_dtype

        folder = Path(tempfile.mkdtemp(prefix="record_weights_"))
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        flags = ["--model", str(folder), "--skip-tokenizer-init", "--load-format", "dummy", "--enforce-eager"]
        arguments = self._engine_args.from_cli_args(self._parser.parse_args(flags))
        setup = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
        out = []
        with set_current_vllm_config(setup):
            self._imitate(setup.parallel_config, folder, tp, pp)
            for stage in range(pp):
                group = self._state._PP
                group.world_size, group.ranks, group.rank_in_group, group.rank = pp, list(range(pp)), stage, stage
                setup.compilation_config.static_forward_context.clear()
                with set_default_torch_dtype(setup.model_config.dtype), torch.device("meta"):
                    model = initialize_model(vllm_config=setup)
                out.append(sum(one.numel() * one.element_size() for one in model.parameters()))
                del model
        gc.collect()
        return str(setup.model_config.dtype).removeprefix("torch."), out

    def _imitate(self, parallel: Any, folder: Path, tp: int, pp: int) -> None:
        state = self._state
        if self._ready:
            state.destroy_model_parallel()
        else:
            state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            self._ready = True
        state.initialize_model_parallel(1)
        parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.world_size = tp, pp, tp * pp
        group = state._TP
        group.world_size, group.ranks, group.rank_in_group = tp, list(range(tp)), 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", default="1x1,2x1,4x1,1x2")
    parser.add_argument("--keep-quantization", action="store_true")
    parser.add_argument("--prelude", type=Path)
    asked = parser.parse_args()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if asked.prelude:
        runpy.run_path(str(asked.prelude), run_name="__main__")
    recorder = Recorder()
    with asked.out.open("a", encoding="utf-8") as out:
        for path in asked.configs:
            config = json.loads(path.read_text(encoding="utf-8"))
            if not asked.keep_quantization:
                config.pop("quantization_config", None)
            line: dict[str, Any] = {"name": path.stem, "config": config, "stages": {}}
            for ranks in asked.ranks.split(","):
                tp, _, pp = ranks.partition("x")
                try:
                    line["dtype"], line["stages"][ranks] = recorder.stage_bytes(config, int(tp), int(pp))
                except Exception as problem:
                    print(f"{path.stem} {ranks}: {type(problem).__name__}: {str(problem)[:200]}")
            if line["stages"]:
                out.write(json.dumps(line) + "\n")
                out.flush()


if __name__ == "__main__":
    main()
