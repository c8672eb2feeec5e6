"""A Service whose name makes Kubernetes set a variable of vLLM's."""

from __future__ import annotations

import re

from legroom.deployments.yaml_nodes import Node
from legroom.lint.rule import Context, Findings, Rule, checks, finding

_WHY = "Kubernetes sets VLLM_PORT=tcp://... in every pod of its namespace that starts after it, and vLLM refuses a URI."
RULE = Rule("service-named-vllm", "warning", "A Service called vllm", _WHY)
_LINKS_OFF = re.compile(r"enableServiceLinks:\s*[\"']?false")


@checks(Node, RULE)
def service_sets_vllm_port(document: Node, context: Context) -> Findings:
    """A Service named `vllm` where the file does not switch service links off."""
    name = document.get("metadata", "name")
    is_called_vllm = document.text("kind") == "Service" and name is not None and name.scalar == "vllm"
    if name is not None and is_called_vllm and not _LINKS_OFF.search(document.source.text):
        message = "a Service called vllm sets VLLM_PORT=tcp://... in later pods, and vLLM then does not start"
        suggestion = "call it otherwise, or set enableServiceLinks: false in the pods"
        yield finding(RULE, document.source.place(name.offset), message, suggestion, len("vllm"))
