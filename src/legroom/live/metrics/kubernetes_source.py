"""vLLM pods of a Kubernetes cluster, found by label through its API. Needs the extra `legroom[kubernetes]`."""

import contextlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.metrics.endpoint import Endpoint

DEFAULT_PORT = 8000
_PORT_NAMES = ("http", "metrics", "vllm", "api", "openai", "serving")
_PORT_NOTE, _PATH_NOTE, _SCHEME_NOTE = "prometheus.io/port", "prometheus.io/path", "prometheus.io/scheme"


def metrics_endpoint(ip: str, ports: Sequence[tuple[str, int]], annotations: Mapping[str, str]) -> Endpoint:
    """The metrics endpoint of a pod with these (name, number) `ports`: by its prometheus.io annotations, else the port
    with a known name, vLLM's default port or the first one."""
    by_name, numbers = dict(ports), [number for _, number in ports]
    fallback = DEFAULT_PORT if DEFAULT_PORT in numbers or not numbers else numbers[0]
    port = next((by_name[name] for name in _PORT_NAMES if name in by_name), fallback)
    port = int(annotations[_PORT_NOTE]) if annotations.get(_PORT_NOTE, "").isdecimal() else port
    scheme, path = annotations.get(_SCHEME_NOTE, "http"), annotations.get(_PATH_NOTE, "/metrics")
    return Endpoint(f"{scheme}://{f'[{ip}]' if ':' in ip else ip}:{port}/{path.lstrip('/')}")


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
    """Configures `config` (the module `kubernetes.config`) for the pod's own cluster, else or for a named `context` for
    the kubeconfig's. Raises its ConfigException."""
    if context is None:
        with contextlib.suppress(config.ConfigException):
            config.load_incluster_config()
            return
    config.load_kube_config(context=context)


def discovered_endpoints(api: Any, selector: str, namespace: str | None = None) -> dict[str, Endpoint]:
    """`namespace/name` -> metrics endpoint of each running pod that the label selector matches, in one namespace or
    (None) all; LegroomError for an empty selector or where the API fails. `api`: from `pods_api`."""
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
    found: dict[str, Endpoint] = {}
    for status, meta, spec in ((item.status, item.metadata, item.spec) for item in listed.items):
        if status.phase == "Running" and status.pod_ip and meta.deletion_timestamp is None:
            ports = [port for container in spec.containers for port in container.ports or ()]
            named = [(port.name or "", int(port.container_port)) for port in ports]
            found[f"{meta.namespace}/{meta.name}"] = metrics_endpoint(status.pod_ip, named, meta.annotations or {})
    return found
