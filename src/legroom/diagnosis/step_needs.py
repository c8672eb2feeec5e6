"""How much a step lacked: the request that failed, and what the same step would have asked for after it."""

from __future__ import annotations

from legroom.black_box import BlackBox
from legroom.diagnosis.fix_planner import FixPlanner
from legroom.units import GIB

_LOGPROB_BYTES = 10
"""For a prompt's token and a word of the vocabulary: logits in bfloat16, log-probabilities in float32, and a copy
while they are ranked (`_get_prompt_logprobs_dict` and `gather_logprobs` of vLLM's first model runner)."""
_CHUNK_TOKENS = 1024
"""The second model runner takes a prompt's log-probabilities in pieces (`compute_prompt_logprobs_with_chunking`,
0.16 to 0.32)."""
_RUNNER_V2 = "vllm/v1/worker/gpu/"


def missing_bytes(planner: FixPlanner) -> int:
    """What the step lacked: the request that failed, or what was still to follow it where the record shows that."""
    oom = planner.case.oom
    if oom is None:
        return GIB
    short = oom.wanted_bytes - (oom.free_bytes or 0)
    need = short if short > 0 else oom.wanted_bytes  # free, but not in one piece
    record = planner.case.black_box
    if record is None or record.step is None or not record.step.prompt_logprobs or planner.base is None:
        return need
    whole = _prompt_tokens(record) * planner.base.target.model.vocab_size * _LOGPROB_BYTES
    return max(need, whole - (oom.free_bytes or 0) - (oom.unallocated_bytes or 0))


def _prompt_tokens(record: BlackBox) -> int:
    """Whose log-probabilities are there at once. Prompts are taken one after the other, so the largest decides."""
    tokens = max((request.scheduled_tokens for request in record.step.largest), default=0) if record.step else 0
    frames = record.request.frames if record.request else ()
    return min(tokens, _CHUNK_TOKENS) if any(frame.file.startswith(_RUNNER_V2) for frame in frames) else tokens
