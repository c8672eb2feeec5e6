"""What keeps a server's pods: how many may be taken at once, and who may reach them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legroom.exports.deploy.cluster.pod import WATCH_PORT_NAME, metadata, selector
from legroom.exports.deploy.yaml_text import Commented

if TYPE_CHECKING:
    from legroom.exports.deploy.cluster.nodes import NodeSpread
    from legroom.exports.deploy.cluster.settings import ClusterSettings
    from legroom.exports.deploy.server import ExportedServer

CLIENT = {"legroom.dev/vllm-client": "true"}
"""The label of pods that may send requests."""


def disruption_budget(server: ExportedServer, settings: ClusterSettings) -> dict[str, Any]:
    why = (
        "A drained node takes one pod; the next is taken when that one serves again. A group counts as one: all of its "
    )
    why += "pods leave and come back together."
    spec = {"maxUnavailable": Commented(why, 1), "selector": {"matchLabels": selector(server)}}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(server, settings),
        "spec": spec,
    }


def network_policy(server: ExportedServer, settings: ClusterSettings, over: NodeSpread) -> dict[str, Any]:
    """The port of requests for clients with the label and for Prometheus; everything among the pods of a group."""
    ports = [{"port": "http"}]
    scraped = [*ports, {"port": WATCH_PORT_NAME}] if server.options.sidecar else ports
    clients = [{"podSelector": {"matchLabels": CLIENT}}, {"namespaceSelector": {"matchLabels": CLIENT}}]
    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    what = "the guard, which is asked before the pool" if server.options.guard else "the server"
    rules: list[Any] = [
        Commented(
            f"Pods with this label, or all of a namespace with it, reach {what}. Its /-/legroom/ paths need the token "
            "as well."
            if server.options.guard
            else f"Pods with this label, or all of a namespace with it, reach {what}.",
            {"from": clients, "ports": ports},
        ),
        Commented("Prometheus, in the namespace that it usually has.", {"from": monitoring, "ports": scraped}),
    ]
    if over.nodes > 1:
        own = {"from": [{"podSelector": {"matchLabels": selector(server)}}]}
        rules.append(Commented("Ranks open ports of their own choice to each other.", own))
    spec = {"podSelector": {"matchLabels": selector(server)}, "policyTypes": ["Ingress"], "ingress": rules}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(server, settings),
        "spec": spec,
    }
