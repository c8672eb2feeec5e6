"""Servers that do not start on the GPU that their file requests."""

from __future__ import annotations

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, Findings, Rule, checks, finding
from legroom.lint.server_plan import plan_of_server, refusal_of_server

RULE = Rule(
    "does-not-fit",
    "error",
    "A server that does not fit the GPU that its file asks for",
    "The plan of the file's own model, flags and GPU ends without room for a KV cache, or the release refuses the "
    "flags: vLLM stops at the start.",
)


@checks(StartedServer, RULE)
def server_does_not_fit_gpu(server: StartedServer, context: Context) -> Findings:
    if len(server.gpu_names) != 1 or context.has_unknown_release(server):
        return
    release = context.release_of(server)
    own, refusal = plan_of_server(server, release), refusal_of_server(server, release)
    if refusal is not None:
        certain = context.is_release_given or bool(server.named_release)
        message = f"vLLM {release} will not start: {refusal.message}"
        yield finding(RULE, server.place, message, refusal.hint, is_certain=certain)
    if own is None or not own.is_gpu_known or own.plan.verdict == "fits":
        return
    failure, certain = own.plan.memory.failure, own.plan.verdict == "does_not_fit"
    if failure is None and not certain:
        return
    message = f"it does not fit {server.gpu_names[0]}: {failure.message if failure else own.plan.reason}"
    suggestion = "legroom plan --file FILE shows the flags that do"
    yield finding(RULE, server.place, message, suggestion, is_certain=certain)
