"""What a stack of Python frames tells: where the program is, which step of the scheduler it computes, and how the
engine is set up.

vLLM's names are read as attributes that may be missing: they differ by release (0.8 to 0.32), and a record without
a step is better than none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from legroom.black_box import RecordedStep, ScheduledRequest, StackFrame

_MOST_FRAMES = 60
_MOST_REQUESTS = 8
_ABOVE_PACKAGES = ("/site-packages/", "/dist-packages/", "/vllm/")
_STEP = "scheduler_output"
"""The local of every function between the executor and the model that holds the step (0.8 on)."""
_SETTINGS = {
    "model_config": ("model", "max_model_len", "dtype", "quantization", "enforce_eager"),
    "cache_config": ("gpu_memory_utilization", "block_size", "cache_dtype", "num_gpu_blocks", "kv_cache_memory_bytes",
                     "enable_prefix_caching"),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens"),
    "parallel_config": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
}  # fmt: skip
"""Where vLLM keeps what decides memory, and under which names."""
_FLAG_NAMES = {"cache_dtype": "kv_cache_dtype"}
_UNSET = ("auto", "None")


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack_frames(frames: list[FrameType]) -> tuple[StackFrame, ...]:
    """The outermost first, given the innermost first."""
    return tuple(
        StackFrame(_package_path(frame.f_code.co_filename), frame.f_lineno or 0, frame.f_code.co_name)
        for frame in reversed(frames[:_MOST_FRAMES])
    )


def _package_path(name: str) -> str:
    """From the package on: folders above it are the machine's business."""
    above = next((mark for mark in _ABOVE_PACKAGES if mark in name), "/")
    path = name.rpartition(above)[2]
    return f"vllm/{path}" if above == "/vllm/" else path


def engine_step(frames: list[FrameType]) -> RecordedStep | None:
    """The step that the innermost frame which knows of one is about."""
    for frame in frames:
        if _STEP in frame.f_code.co_varnames and (output := frame.f_locals.get(_STEP)) is not None:
            tokens = getattr(output, "num_scheduled_tokens", None)
            if isinstance(tokens, dict):
                return _step(output, tokens, frame.f_locals.get("self"))
    return None


def _step(output: Any, tokens: Mapping[str, int], runner: Any) -> RecordedStep:
    new = {str(request.req_id): request for request in getattr(output, "scheduled_new_reqs", ())}
    computed = {name: getattr(request, "num_computed_tokens", None) for name, request in new.items()}
    computed |= _computed(getattr(output, "scheduled_cached_reqs", ()))
    known = getattr(runner, "requests", None)
    known = known if isinstance(known, dict) else {}
    requests = {str(name): new.get(str(name)) or known.get(name) for name in tokens}
    largest = sorted(tokens, key=lambda name: -tokens[name])[:_MOST_REQUESTS]
    return RecordedStep(
        requests=len(tokens),
        tokens=int(sum(tokens.values())),
        new_requests=len(new),
        largest=tuple(_request(str(name), int(tokens[name]), computed, requests[str(name)]) for name in largest),
        prompt_logprobs=sum(_sampling(request, "prompt_logprobs") is not None for request in requests.values()),
    )


def _computed(cached: Any) -> dict[str, int | None]:
    """One object with lists (0.10 on), or a list of objects."""
    names = getattr(cached, "req_ids", None)
    if names is not None:
        return dict(zip(map(str, names), cached.num_computed_tokens, strict=False))
    return {str(request.req_id): getattr(request, "num_computed_tokens", None) for request in cached}


def _request(name: str, scheduled: int, computed: dict[str, int | None], request: Any) -> ScheduledRequest:
    prompt = getattr(request, "prompt_token_ids", None)
    return ScheduledRequest(
        name[:80], scheduled, computed.get(name), None if prompt is None else len(prompt),
        _sampling(request, "logprobs"), _sampling(request, "prompt_logprobs"),
    )  # fmt: skip


def _sampling(request: Any, name: str) -> int | None:
    value = getattr(getattr(request, "sampling_params", None), name, None)
    return value if isinstance(value, int) else None


def engine_settings(frames: list[FrameType]) -> dict[str, Any]:
    """The settings of the engine that one of these frames works for; {} where none is vLLM's own."""
    for frame in frames:
        if frame.f_code.co_varnames[:1] != ("self",) or "vllm" not in frame.f_code.co_filename:
            continue
        owner = frame.f_locals.get("self")
        for holder in (owner, getattr(owner, "worker", None)):
            config = getattr(holder, "vllm_config", None)
            if config is not None and hasattr(config, "cache_config"):
                return _settings(config)
    return {}


def _settings(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for part, names in _SETTINGS.items():
        for name in names:
            value = getattr(getattr(config, part, None), name, None)
            if value is None or str(value) in _UNSET:
                continue
            number = isinstance(value, (bool, int, float))
            settings[_FLAG_NAMES.get(name, name)] = value if number else str(value).removeprefix("torch.")
    return settings
