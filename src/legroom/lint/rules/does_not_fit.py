"""Servers that do not start on the GPU that their file requests."""

from __future__ import annotations

from dataclasses import replace

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, Findings, Rule, checks, finding
from legroom.lint.server_plan import file_plan_of, refusal_of_server

_WHY = (
    "The plan of the file's own model, flags and GPU ends without room for a KV cache, or the release refuses the "
    "flags: vLLM stops at the start."
)
RULE = Rule("does-not-fit", "error", "A server that does not fit the GPU that its file asks for", _WHY)


@checks(StartedServer, RULE)
def server_does_not_fit_gpu(server: StartedServer, context: Context) -> Findings:
    """A server that vLLM refuses to start, or that does not fit one of the GPUs its file names."""
    if not server.gpu_names or not server.runs_on_gpus:
        return
    release = context.release_of(server)
    refusal = None if context.has_unknown_release(server) else refusal_of_server(server, release)
    if refusal is not None:
        certain = context.is_release_given or bool(server.named_release)
        message = f"vLLM {release} will not start: {refusal.message}"
        yield finding(RULE, server.place, message, refusal.hint, is_certain=certain)
        return
    # Another rule is about the host's memory.
    own = file_plan_of(replace(server, memory_limit_bytes=None), release)
    for gpu_name, plan in zip(server.gpu_names, own.plans if own is not None else (), strict=False):
        failure = plan.memory.failure
        if own is not None and (failure is not None or plan.verdict == "does_not_fit"):
            message = f"it does not fit {gpu_name}: {failure.message if failure else plan.reason}"
            suggestion = "legroom plan --file FILE shows the flags that do"
            yield finding(RULE, server.place, message, suggestion, is_certain=own.verdict == "does_not_fit")
            return
