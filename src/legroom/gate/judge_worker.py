"""One worker process of the gate: an object at a time from standard input, its judgement on standard output.

What an object makes a worker do can take long or grow large; the process is what bounds both.
`python -m legroom.gate.judge_worker`
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from contextlib import suppress
from typing import BinaryIO

from legroom.gate.judgement import Judgement, judge
from legroom.web.worker import Frame, answer_frames

_MOST_MEMORY_BYTES = 1 << 30
_OK, _BUG = 200, 500
_EXAMPLES = (
    ("Qwen/Qwen3-8B", "NVIDIA-H100-80GB-HBM3"),
    ("Qwen/Qwen3-8B", "NVIDIA-L4"),
    ("Qwen/Qwen3-30B-A3B-FP8", "NVIDIA-L40S"),
    ("nobody/knows-this", "NVIDIA-L40S"),
)
"""One that fits, one that a single change fixes, a quantized one with experts, and one for which names are compared."""
_GARBAGE_AFTER = 20_000
"""Objects made before the collector looks: an object makes many that live as long as its judgement."""
_LESS_URGENT, _LEAST_URGENT = 5, 19
"""What is remembered is answered before what must be computed, and a verdict before a search. A process may only ever
become less urgent, and the workers of one pool are asked for one of the two alone."""


def main() -> None:
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    _yield_to_others(_LESS_URGENT)
    _warm_up()
    answer_frames(_answered)


def _yield_to_others(niceness: int) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)


def _search_when_idle() -> None:
    """On a core only while nobody else wants it: whoever wakes up takes it at once."""
    _yield_to_others(_LEAST_URGENT)
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _warm_up() -> None:
    """Judge what has most things in it, so that no object waits for a module or for facts. They stay, so the collector
    need not look at them again."""
    for model, card in _EXAMPLES:
        container = {"name": "vllm", "image": "vllm/vllm-openai:v0.11.0", "args": ["--model", model]}
        pod = {"nodeSelector": {"nvidia.com/gpu.product": card}, "containers": [container]}
        judge({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": pod})
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_AFTER)


def _answered(frame: Frame, source: BinaryIO) -> tuple[int, bytes]:
    try:
        request = json.loads(frame.body.partition(b"\n")[2])
        if request["search"] == "whole":
            _search_when_idle()
        answer = judge(
            request["object"],
            request["default_gpu"],
            search=request["search"],
            hub=request["hub"],
            answer_by_s=request["answer_by_s"],
        )
        return _OK, json.dumps(answer.to_record()).encode()
    except MemoryError:
        return _OK, json.dumps(Judgement("not_understood", ("Not understood: it is too large.",)).to_record()).encode()
    except Exception:
        import traceback

        traceback.print_exc()
        return _BUG, b"{}"


if __name__ == "__main__":
    main()
