"""`legroom export prometheus --operator`: the same rules, and what to scrape, as objects of the Prometheus operator."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.exports.deploy.address import Address, address_of
from legroom.exports.deploy.cluster.pod import WATCH_PORT_NAME
from legroom.exports.deploy.words import take_apart

if TYPE_CHECKING:
    from legroom.exports.request import ExportRequest

_API = "monitoring.coreos.com/v1"
_NAME = "legroom-vllm"
_JOB_LABEL = "app.kubernetes.io/name"
"""Its value becomes the job: `legroom export kubernetes` labels every pod and Service with `vllm`."""
_MONITORS = {"pod": ("PodMonitor", "podMetricsEndpoints"), "service": ("ServiceMonitor", "endpoints")}
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?=[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_SCRAPE_S = 15


def operator_objects(
    groups: Sequence[Mapping[str, Any]], job: str, watch_job: str, request: ExportRequest
) -> list[dict[str, Any]]:
    """A PrometheusRule with the groups, and a monitor of the pods or Services with the label that names the job."""
    about = _metadata(request.options)
    rules = {"apiVersion": _API, "kind": "PrometheusRule", "metadata": about, "spec": {"groups": list(groups)}}
    kind, endpoints = _MONITORS[request.options.get("monitor") or "pod"]
    spec = {
        "jobLabel": _JOB_LABEL,
        "selector": {"matchLabels": {_JOB_LABEL: job}},
        endpoints: [_endpoint(request), *([_sidecar(watch_job)] if kind == "PodMonitor" else [])],
    }
    return [rules, {"apiVersion": _API, "kind": kind, "metadata": about, "spec": spec}]


def _endpoint(request: ExportRequest) -> dict[str, Any]:
    plan = request.plan
    address = address_of(take_apart(plan.command, plan.release)) if plan else Address()
    endpoint: dict[str, Any] = {"port": "http", "path": "/metrics", "interval": f"{_SCRAPE_S}s"}
    # A worker of a group over several nodes has the label too, and no port: the operator scrapes no pod without it.
    if address.tls:
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    return endpoint


def _sidecar(job: str) -> dict[str, Any]:
    """`legroom watch` beside a server, under a job of its own: it is no server that lacks vLLM's series. The operator
    scrapes no pod that has no such port."""
    named = {"targetLabel": "job", "replacement": job}
    return {"port": WATCH_PORT_NAME, "path": "/metrics", "interval": f"{_SCRAPE_S}s", "relabelings": [named]}


def _metadata(options: Mapping[str, Any]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "legroom"}
    for text in options.get("operator_label") or ():
        if not _LABEL.fullmatch(text):
            raise LegroomError(
                f"--operator-label {text!r} is not a label", "write it like --operator-label release=kube-prometheus"
            )
        key, _, value = text.partition("=")
        labels[key] = value
    namespace = options.get("namespace")
    where = {"namespace": namespace} if namespace else {}
    return {"name": _NAME, **where, "labels": labels}
