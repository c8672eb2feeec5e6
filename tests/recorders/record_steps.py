"""Times of vLLM's steps on a real card: `hook()` before `LLM(...)`, then `measure(llm, loads)`.

Runs inside a process that has vLLM (0.32, the `LLM` class in one process); writes rows in the form of
`tests/fixtures/h200_steps_0.32.json`. A load is {"n": requests, "plen": prompt tokens, "out": output tokens}. Every
load runs twice, and the second time counts: the first one compiles kernels. A step of prompts is the GPU time between
the start of `execute_model` and the end of `sample_tokens`; a decode is the median interval between the starts of the
steps that decode all requests of the load.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import pairwise
from typing import Any, NamedTuple


class TimedStep(NamedTuple):
    tokens: int
    requests: int
    context: int
    pairs: float
    started: float
    events: tuple[Any, Any]

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.requests


STEPS: list[TimedStep] = []


def hook() -> None:
    """Record every step that a worker of this process executes."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    execute, sample = Worker.execute_model, Worker.sample_tokens

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        events[0].record()
        if scheduler_output.total_num_scheduled_tokens:
            STEPS.append(TimedStep(*_scheduled(scheduler_output), time.perf_counter(), events))
        return execute(self, scheduler_output)

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = sample(self, grammar_output)
        if STEPS:
            STEPS[-1].events[1].record()
        return output

    Worker.execute_model, Worker.sample_tokens = execute_model, sample_tokens


def _scheduled(output: Any) -> tuple[int, int, int, float]:
    """Tokens, requests, tokens already computed, and pairs of tokens that attention multiplies."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {request.req_id: request.num_computed_tokens for request in output.scheduled_new_reqs}
    counts = output.num_scheduled_tokens
    pairs = sum(count * computed[name] + count * (count + 1) / 2 for name, count in counts.items())
    return sum(counts.values()), len(counts), sum(computed[name] for name in counts), pairs


def measure(llm: Any, loads: list[dict[str, int]]) -> list[dict[str, Any]]:
    """One row for the decodes of each load, and one for each of its steps of prompts."""
    rows: list[dict[str, Any]] = []
    for load in loads:
        for out in (2, load["out"]):
            took = _run(llm, load["n"], load["plen"], out)
        name = f"b{load['n']} p{load['plen']}"
        for step in took:
            if not step.is_decode:
                seconds = step.events[0].elapsed_time(step.events[1]) / 1000
                rows.append({"load": name, **_sizes(step), "pairs": step.pairs, "seconds": round(seconds, 6)})
        decodes = [step for step in took if step.is_decode and step.requests == load["n"]]
        gaps = [later.started - step.started for step, later in pairwise(decodes[2:])]
        if gaps:
            middle = decodes[len(decodes) // 2]
            rows.append({"load": name, **_sizes(middle), "pairs": 0, "seconds": round(statistics.median(gaps), 6)})
    return rows


def _sizes(step: TimedStep) -> dict[str, int]:
    return {"tokens": step.tokens, "requests": step.requests, "context": step.context}


def _run(llm: Any, requests: int, prompt_tokens: int, output_tokens: int) -> list[TimedStep]:
    import torch
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=output_tokens, min_tokens=output_tokens, detokenize=False, ignore_eos=True)
    draw = random.Random(requests)
    prompts = [{"prompt_token_ids": [draw.randrange(5, 30000) for _ in range(prompt_tokens)]} for _ in range(requests)]
    STEPS.clear()
    llm.generate(prompts, sampling, use_tqdm=False)
    torch.cuda.synchronize()
    return list(STEPS)
