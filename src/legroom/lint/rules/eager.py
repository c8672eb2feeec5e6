"""Servers that run without CUDA graphs."""

from __future__ import annotations

from legroom.deployments.subjects import StartedServer
from legroom.lint.rule import Context, Findings, Rule, checks, finding, flag_place
from legroom.units import human_bytes

_WHY = (
    "Without CUDA graphs every decoding step is slower. It saves the graphs' memory alone, and before 0.20 not one KV "
    "block comes of it, because graphs were not counted in the budget (LR201)."
)
RULE = Rule("eager", "note", "--enforce-eager", _WHY)


@checks(StartedServer, RULE)
def server_without_cuda_graphs(server: StartedServer, context: Context) -> Findings:
    """A server with --enforce-eager, which decodes slower without CUDA graphs."""
    if not context.parsed_args(server).args.enforce_eager:
        return
    plan = context.plan_of(server)
    graphs = plan.layout.cuda_graph_bytes if plan else 0
    saved = f" ({human_bytes(graphs)} in the plan)" if graphs else ""
    message = f"--enforce-eager saves the memory of CUDA graphs{saved} and slows every decoding step"
    if context.release_of(server).before("0.20.0"):
        message += "; before 0.20 it adds no KV block"
    suggestion = "leave it out unless graph capture is what runs out (LR302)"
    yield finding(RULE, flag_place(server, "--enforce-eager"), message, suggestion)
