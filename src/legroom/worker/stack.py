"""Reads a stack of Python frames inside vLLM: call sites, the scheduler step being computed, and engine settings.
vLLM's names differ by release (0.8 to 0.32), so every attribute may be missing."""

from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from legroom.black_box import RecordedStep, ScheduledRequest, StackFrame

_MOST_FRAMES = 60
_MOST_REQUESTS = 8
_ABOVE_PACKAGES = ("/site-packages/", "/dist-packages/", "/vllm/")
_STEP = "scheduler_output"  # The local variable with the step, in every function between executor and model (0.8 on).
_BATCH = "input_batch"
"""The local variable of the V2 model runner, which no longer has the step when it samples (0.16 on)."""
_SETTINGS = {
    "model_config": ("model", "max_model_len", "dtype", "quantization", "enforce_eager"),
    "cache_config": (
        *("gpu_memory_utilization", "block_size", "cache_dtype", "num_gpu_blocks", "kv_cache_memory_bytes"),
        "enable_prefix_caching",
    ),
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens"),
    "parallel_config": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
}
"""The settings that memory depends on, by vLLM's config object."""
_FLAG_NAMES = {"cache_dtype": "kv_cache_dtype"}
_UNSET = ("auto", "None")


def with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame, its caller, the caller's caller and so on; nothing for None."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack_frames(frames: list[FrameType]) -> tuple[StackFrame, ...]:
    """The call sites of frames given innermost first, outermost first."""
    sites = ((frame.f_code, frame.f_lineno or 0) for frame in reversed(frames[:_MOST_FRAMES]))
    return tuple(StackFrame(_package_path(code.co_filename), line, code.co_name) for code, line in sites)


def _package_path(name: str) -> str:
    """A source file's path from its package on (`vllm/...`), without the machine's folders."""
    above = next((mark for mark in _ABOVE_PACKAGES if mark in name), "/")
    path = name.rpartition(above)[2]
    return f"vllm/{path}" if above == "/vllm/" else path


def engine_step(frames: list[FrameType]) -> RecordedStep | None:
    """The scheduler step in the locals of the innermost frame that has scheduled tokens; None where none has."""
    output, batch = _innermost_local(frames, _STEP), _innermost_local(frames, _BATCH)
    tokens: Any = getattr(output, "num_scheduled_tokens", None)
    batched = _scheduled_tokens_of_batch(batch)
    if batched and (not isinstance(tokens, dict) or tokens.keys() != batched.keys()):
        output, tokens = batch, batched  # the engine's outer frames may be at the next step already
    if not isinstance(tokens, dict):
        return None
    new = {str(request.req_id): request for request in getattr(output, "scheduled_new_reqs", ())}
    computed = {name: getattr(request, "num_computed_tokens", None) for name, request in new.items()}
    computed |= _computed_tokens(getattr(output, "scheduled_cached_reqs", ()))
    known = _known_requests(frames)
    requests = {str(name): _request_facts(new[str(name)]) if str(name) in new else known(name) for name in tokens}
    largest = sorted(tokens, key=lambda name: -tokens[name])[:_MOST_REQUESTS]
    return RecordedStep(
        requests=len(tokens),
        tokens=int(sum(tokens.values())),
        new_requests=len(new),
        largest=tuple(
            ScheduledRequest(str(name)[:80], int(tokens[name]), computed.get(str(name)), *requests[str(name)])
            for name in largest
        ),
        prompt_logprobs=sum(request.prompt_logprobs is not None for request in requests.values()),
    )


def _innermost_local(frames: list[FrameType], name: str) -> Any:
    """The innermost frame's local variable `name` that has `num_scheduled_tokens`; None without one."""
    for frame in frames:
        if name in frame.f_code.co_varnames:
            value = frame.f_locals.get(name)
            if getattr(value, "num_scheduled_tokens", None) is not None:
                return value
    return None


def _scheduled_tokens_of_batch(batch: Any) -> dict[str, int]:
    """Request id -> scheduled tokens in vLLM's input batch; empty where it does not tell."""
    names, counts = getattr(batch, "req_ids", None), getattr(batch, "num_scheduled_tokens", None)
    if not isinstance(names, list) or counts is None:
        return {}
    return {str(name): int(count) for name, count in zip(names, counts, strict=False)}


def _computed_tokens(cached: Any) -> dict[str, int | None]:
    """Request id -> computed tokens of the step's `cached` requests: an object of lists (0.10+), or objects."""
    names = getattr(cached, "req_ids", None)
    if names is not None:
        return dict(zip(map(str, names), cached.num_computed_tokens, strict=False))
    return {str(request.req_id): getattr(request, "num_computed_tokens", None) for request in cached}


class _RequestFacts(NamedTuple):
    """Lengths and sampling parameters of a request, without its text."""

    prompt_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


_KnownRequests = Callable[[str], _RequestFacts]


def _known_requests(frames: list[FrameType]) -> _KnownRequests:
    """A function from request id to facts, of the model runner in these frames; all facts None where it has none."""
    for frame in frames:
        if frame.f_code.co_varnames[:1] != ("self",):
            continue
        runner = frame.f_locals.get("self")
        requests, states = getattr(runner, "requests", None), getattr(runner, "req_states", None)
        if isinstance(requests, dict):
            return lambda name, requests=requests: _request_facts(requests.get(name))  # type: ignore[misc]
        if isinstance(getattr(states, "req_id_to_index", None), dict):
            prompts = getattr(runner, "prompt_logprobs_worker", None)
            return lambda name, states=states, prompts=prompts: _facts_of_v2(states, prompts, name)  # type: ignore[misc]
    return lambda name: _RequestFacts()


def _request_facts(request: Any) -> _RequestFacts:
    """Lengths and sampling parameters of a request of the scheduler or the V1 model runner."""
    prompt, parameters = getattr(request, "prompt_token_ids", None), getattr(request, "sampling_params", None)
    values = (getattr(parameters, name, None) for name in ("logprobs", "prompt_logprobs"))
    known = (value if isinstance(value, int) else None for value in values)
    return _RequestFacts(None if prompt is None else len(prompt), *known)


def _facts_of_v2(states: Any, prompts: Any, request_id: str) -> _RequestFacts:
    """Lengths and sampling parameters of a request in the V2 model runner's arrays (`states`, `prompts`)."""
    index = states.req_id_to_index.get(request_id)
    if index is None:
        return _RequestFacts()
    lengths = getattr(states.prompt_len, "np", states.prompt_len)  # a copy of GPU memory from 0.20 on
    uses = getattr(prompts, "uses_prompt_logprobs", None)
    counts = getattr(prompts, "num_prompt_logprobs", None)  # 0.20 on
    prompt_logprobs = None
    if uses is not None and uses[index]:
        prompt_logprobs = int(counts[index]) if counts is not None else 1
    return _RequestFacts(int(lengths[index]), None, prompt_logprobs)


def engine_settings(frames: list[FrameType]) -> dict[str, Any]:
    """The settings that memory depends on, by flag, of the engine found in these frames; {} where none has one."""
    for frame in frames:
        if frame.f_code.co_varnames[:1] != ("self",) or "vllm" not in frame.f_code.co_filename:
            continue
        owner = frame.f_locals.get("self")
        for holder in (owner, getattr(owner, "worker", None)):
            config = getattr(holder, "vllm_config", None)
            if config is not None and hasattr(config, "cache_config"):
                settings: dict[str, Any] = {}
                for part, names in _SETTINGS.items():
                    for name in names:
                        value = getattr(getattr(config, part, None), name, None)
                        if value is None or str(value) in _UNSET:
                            continue
                        number = isinstance(value, (bool, int, float))
                        settings[_FLAG_NAMES.get(name, name)] = value if number else str(value).removeprefix("torch.")
                return settings
    return {}
