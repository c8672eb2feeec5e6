"""One worker process of the gate: an object at a time from standard input, its judgement on standard output.

What an object makes a worker do can take long or grow large; the process is what bounds both.
`python -m legroom.gate.judge_worker`
"""

from __future__ import annotations

import gc
import json
import os
import resource
from contextlib import suppress
from typing import BinaryIO

from legroom.gate.judgement import Judgement, judge
from legroom.web.worker import Frame, answer_frames

_MOST_MEMORY_BYTES = 1 << 30
_OK, _BUG = 200, 500
_EXAMPLES = (("Qwen/Qwen3-8B", "h100"), ("Qwen/Qwen3-8B", "l4"), ("Qwen/Qwen3-30B-A3B-FP8", "l40s"))
"""One that fits, one that a single change fixes, and a quantized one with experts."""
_GARBAGE_AFTER = 20_000
"""Objects made before the collector looks: an object makes many that live as long as its judgement."""
_LESS_URGENT = 5
"""What is remembered is answered before what must be computed."""


def main() -> None:
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    with suppress(OSError):
        os.nice(_LESS_URGENT)
    _warm_up()
    answer_frames(_answered)


def _warm_up() -> None:
    """Judge what has most things in it, so that no object waits for a module or for facts. They stay, so the collector
    need not look at them again."""
    for model, card in _EXAMPLES:
        container = {"name": "vllm", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", model]}
        metadata = {"annotations": {"legroom/gpu": card}}
        judge({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_AFTER)


def _answered(frame: Frame, source: BinaryIO) -> tuple[int, bytes]:
    try:
        request = json.loads(frame.body.partition(b"\n")[2])
        answer = judge(request["object"], request["default_gpu"], search=request["search"], hub=request["hub"])
        return _OK, json.dumps(answer.to_json() | {"is_searched": answer.is_searched}).encode()
    except MemoryError:
        return _OK, json.dumps(Judgement("not_understood", ("Not understood: it is too large.",)).to_json()).encode()
    except Exception:
        import traceback  # noqa: PLC0415

        traceback.print_exc()
        return _BUG, b"{}"


if __name__ == "__main__":
    main()
