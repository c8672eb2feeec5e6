"""vLLM pods of a Kubernetes cluster, found by label through its API. Needs the extra `legroom[kubernetes]`."""

import contextlib
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.metrics.endpoint import Endpoint
from legroom.records import dataclass, field

DEFAULT_PORT = 8000
_PORT_NAMES = ("http", "metrics", "vllm", "api", "openai", "serving")
_PORT_NOTE, _PATH_NOTE, _SCHEME_NOTE = "prometheus.io/port", "prometheus.io/path", "prometheus.io/scheme"


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str
    ip: str
    ports: tuple[tuple[str, int], ...] = ()
    """(name, number) of each container port."""
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def endpoint(self) -> Endpoint:
        """The pod's metrics endpoint, by its prometheus.io annotations, else by port name."""
        scheme = self.annotations.get(_SCHEME_NOTE, "http")
        path = self.annotations.get(_PATH_NOTE, "/metrics")
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return Endpoint(f"{scheme}://{host}:{self._metrics_port}/{path.lstrip('/')}")

    @property
    def _metrics_port(self) -> int:
        """The port of the annotation, else of a known port name, else vLLM's default or the first declared port."""
        noted = self.annotations.get(_PORT_NOTE, "")
        if noted.isdecimal():
            return int(noted)
        by_name, numbers = dict(self.ports), [number for _, number in self.ports]
        fallback = DEFAULT_PORT if DEFAULT_PORT in numbers or not numbers else numbers[0]
        return next((by_name[name] for name in _PORT_NAMES if name in by_name), fallback)


def pods_api(context: str | None = None) -> Any:
    """A CoreV1Api client of the pod's own cluster or, also for a named context, the kubeconfig's; else LegroomError."""
    try:
        client: Any = import_module("kubernetes.client")
        config: Any = import_module("kubernetes.config")
    except ImportError as error:
        raise LegroomError("reading pods needs the Kubernetes client", "pip install 'legroom[kubernetes]'") from error
    try:
        load_kubernetes_config(config, context)
    except (config.ConfigException, OSError) as error:
        hint = "set KUBECONFIG, or run inside the cluster"
        raise LegroomError("no Kubernetes cluster is configured here", hint, UNREACHABLE) from error
    return client.CoreV1Api()


def load_kubernetes_config(config: Any, context: str | None) -> None:
    """Configures the client, by its module `kubernetes.config`, for the pod's own cluster; for the kubeconfig's, in a
    named context or outside of a pod. Raises its ConfigException."""
    if context is None:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config()
            return
    config.load_kube_config(context=context)


def _running_pod(item: Any) -> Pod | None:
    """A running pod with an address; None for any other, or one being deleted."""
    status, meta = item.status, item.metadata
    if status.phase != "Running" or not status.pod_ip or meta.deletion_timestamp is not None:
        return None
    listed = (port for container in item.spec.containers for port in container.ports or ())
    ports = tuple((port.name or "", int(port.container_port)) for port in listed)
    return Pod(meta.namespace, meta.name, status.pod_ip, ports, meta.annotations or {})


def discovered_endpoints(api: Any, selector: str, namespace: str | None = None) -> dict[str, Endpoint]:
    """The metrics endpoint, by `namespace/name`, of each running pod that the label selector matches in one namespace
    or (None) all; LegroomError for an empty selector, or where the API does not list pods. `api`: see `pods_api`."""
    from kubernetes.client.exceptions import ApiException  # an extra

    if not selector.strip():
        raise LegroomError("no label says which pods run vLLM", "give a label: --kubernetes app=vllm")
    try:
        if namespace:
            listed = api.list_namespaced_pod(namespace, label_selector=selector, _request_timeout=10)
        else:
            listed = api.list_pod_for_all_namespaces(label_selector=selector, _request_timeout=10)
    except ApiException as error:
        where = f"namespace {namespace}" if namespace else "all namespaces"
        is_denied = error.status in {401, 403}
        refused = "not allowed to list pods" if is_denied else "the Kubernetes API refused to list pods"
        message = f"{refused} in {where} (HTTP {error.status})"
        raise LegroomError(message, "kubectl auth can-i list pods", UNREACHABLE) from error
    except Exception as error:
        # The client passes its HTTP library's exceptions on.
        problem = f"the Kubernetes API does not answer ({type(error).__name__})"
        raise LegroomError(problem, "kubectl get pods", UNREACHABLE) from error
    pods = filter(None, map(_running_pod, listed.items))
    return {f"{pod.namespace}/{pod.name}": pod.endpoint for pod in pods}
