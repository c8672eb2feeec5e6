"""Options of a server in a cluster: replicas, cache, autoscaling and restrictions."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy.containers import JOURNAL
from legroom.records import dataclass

DEFAULT_GPUS_PER_NODE = 8
_CACHES = ("shared", "pod")
_SCALERS = ("hpa", "keda")
_ROOT_HOME = "/root"
_OWN_HOME = "/home/vllm"


@dataclass(frozen=True)
class ClusterSettings:
    namespace: str | None = None
    replicas: int = 1
    most_replicas: int = 0
    """The maximum of autoscaling; 0: no autoscaling."""
    scaler: str = ""
    prometheus_url: str = ""
    """The Prometheus that KEDA queries."""
    cache: str = "claim"
    """`claim`: one volume for the only pod; `shared`: one that every pod writes to; `pod`: each pod has its own, which
    ends with it; `kept`: each pod of a LeaderWorkerSet has its own, which stays."""
    restricted: bool = False
    network_policy: bool = False
    gpus_per_node: int = DEFAULT_GPUS_PER_NODE

    @property
    def several(self) -> bool:
        """Whether more than one replica may run."""
        return max(self.replicas, self.most_replicas) > 1

    @property
    def own_volumes(self) -> bool:
        """Whether a new pod starts with an empty volume."""
        return self.cache in ("pod", "kept")

    @property
    def home(self) -> str:
        """$HOME in the container, which holds the caches of vLLM, PyTorch, Triton and FlashInfer."""
        return _OWN_HOME if self.restricted else _ROOT_HOME

    @property
    def journal(self) -> str:
        return JOURNAL.replace(_ROOT_HOME, self.home, 1)


def add_cluster_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--namespace", metavar="NAME", help="where it goes (default: left to kubectl)")
    group.add_argument("--replicas", metavar="N", help="copies of the server (default: 1)")
    group.add_argument(
        "--cache",
        choices=_CACHES,
        help="where several pods keep downloads: one volume that all of them write to (ReadWriteMany), or one for each "
        "pod (default: one for each)",
    )
    group.add_argument("--gpus-per-node", metavar="N", help=f"cards of one node (default: {DEFAULT_GPUS_PER_NODE})")
    group.add_argument(
        "--restricted", action="store_true", help="non-root, read-only root file system: Pod Security `restricted`"
    )
    group.add_argument(
        "--network-policy", action="store_true", help="only what needs the server may reach it, and its own group"
    )
    group.add_argument("--autoscale", metavar="N", help="scale up to N replicas, on waiting requests and KV use")
    group.add_argument("--scaler", choices=_SCALERS, help="what scales it (default: keda)")
    group.add_argument(
        "--prometheus-url", metavar="URL", help="where KEDA asks (default: http://prometheus-operated:9090)"
    )


def cluster_settings(options: Mapping[str, Any], nodes: int = 1, *, keeps_volumes: bool = False) -> ClusterSettings:
    """The validated options of a server over `nodes`; `keeps_volumes`: a LeaderWorkerSet keeps its volumes."""
    replicas = _count(options, "replicas", 1)
    most = _count(options, "autoscale", 0)
    if most and most <= replicas:
        raise LegroomError(
            f"--autoscale {most} leaves nothing to scale: {replicas} run already",
            f"name more than {replicas}, or leave it out",
        )
    pods = max(replicas, most) * nodes
    cache = options.get("cache") or ("pod" if pods > 1 else "claim")
    if cache == "pod" and keeps_volumes:
        cache = "kept"
    return ClusterSettings(
        namespace=_namespace(options.get("namespace")),
        replicas=replicas,
        most_replicas=most,
        scaler=(options.get("scaler") or "keda") if most else "",
        prometheus_url=options.get("prometheus_url") or "http://prometheus-operated:9090",
        cache=str(cache),
        restricted=bool(options.get("restricted")),
        network_policy=bool(options.get("network_policy")),
        gpus_per_node=_count(options, "gpus_per_node", DEFAULT_GPUS_PER_NODE),
    )


def _count(options: Mapping[str, Any], name: str, default: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    if not (str(text).isascii() and str(text).isdigit() and 0 < int(text) < 10_000):
        flag = "--" + name.replace("_", "-")
        raise LegroomError(f"{flag} {text!r} is not a number of at least 1", f"write it like {flag} 4")
    return int(text)


def _namespace(namespace: str | None) -> str | None:
    if namespace is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        raise LegroomError(f"--namespace {namespace!r} is not a name", "use lowercase letters, digits and dashes")
    return namespace
