"""Finding pods. The real Kubernetes client talks to a stand-in for the cluster's API, which answers as it documents."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from legroom.errors import LegroomError
from legroom.live.metrics.kubernetes_source import discovered_endpoints, metrics_endpoint, pods_api


def cluster_api(port: int) -> Any:
    """The real client, which is imported by the process that runs these tests only."""
    client = pytest.importorskip("kubernetes.client")
    settings = client.Configuration(host=f"http://127.0.0.1:{port}")
    settings.retries = False
    return client.CoreV1Api(client.ApiClient(settings))


def pod(name: str, ip: str | None = "10.0.0.1", phase: str = "Running", **meta: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "prod", **meta},
        "spec": {"containers": [{"name": "vllm", "ports": [{"name": "http", "containerPort": 8080}]}]},
        "status": {"phase": phase, "podIP": ip},
    }


class Cluster:
    """A stand-in for the cluster's API: lists pods, by namespace and label."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.status = 200
        self.asked: list[tuple[str, dict[str, list[str]]]] = []


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, Any]]:
    state = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            state.asked.append((parts.path, parse_qs(parts.query)))
            body = json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": state.items}).encode()
            self.send_response(state.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield state, cluster_api(server.server_port)
    server.shutdown()


def test_running_pods_with_the_label_are_found(cluster: tuple[Cluster, Any]) -> None:
    state, pods = cluster
    state.items = [pod("a"), pod("b", ip="10.0.0.2")]
    targets = discovered_endpoints(pods, "app=vllm", "prod")
    assert {name: target.url for name, target in targets.items()} == {
        "prod/a": "http://10.0.0.1:8080/metrics",
        "prod/b": "http://10.0.0.2:8080/metrics",
    }
    path, query = state.asked[0]
    assert path == "/api/v1/namespaces/prod/pods" and query["labelSelector"] == ["app=vllm"]


def test_without_a_namespace_all_are_asked(cluster: tuple[Cluster, Any]) -> None:
    state, pods = cluster
    discovered_endpoints(pods, "app=vllm")
    assert state.asked[0][0] == "/api/v1/pods"


def test_pods_that_start_end_or_go_are_left_out(cluster: tuple[Cluster, Any]) -> None:
    state, pods = cluster
    state.items = [pod("a", phase="Pending"), pod("b", ip=None), pod("c", deletionTimestamp="2026-01-01T00:00:00Z")]
    assert discovered_endpoints(pods, "app=vllm") == {}


def test_a_refusal_says_what_may_not_be_done(cluster: tuple[Cluster, Any]) -> None:
    state, pods = cluster
    state.status = 403
    with pytest.raises(LegroomError, match="list pods"):
        discovered_endpoints(pods, "app=vllm")


def test_an_api_that_is_gone_is_said() -> None:
    with pytest.raises(LegroomError, match="does not answer") as raised:
        discovered_endpoints(cluster_api(9), "app=vllm")
    assert raised.value.exit_code == 3


def test_a_selector_must_be_given(cluster: tuple[Cluster, Any]) -> None:
    with pytest.raises(LegroomError, match="which pods"):
        discovered_endpoints(cluster[1], " ")


@pytest.mark.parametrize(
    ("made", "url"),
    [
        (("10.0.0.1", (), {}), "http://10.0.0.1:8000/metrics"),
        (("10.0.0.1", (("", 9000),), {}), "http://10.0.0.1:9000/metrics"),
        (("10.0.0.1", (("grpc", 1), ("", 8000)), {}), "http://10.0.0.1:8000/metrics"),
        (("fd00::1", (("metrics", 7),), {}), "http://[fd00::1]:7/metrics"),
        (("1.2.3.4", (("http", 1),), {"prometheus.io/port": "99", "prometheus.io/path": "/m"}), "http://1.2.3.4:99/m"),
    ],
)
def test_where_a_pods_metrics_are(made: tuple[Any, ...], url: str) -> None:
    assert metrics_endpoint(*made).url == url


def test_a_cluster_that_is_named_counts_before_the_one_around(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr("kubernetes.config.load_incluster_config", lambda: asked.append("around"))
    monkeypatch.setattr("kubernetes.config.load_kube_config", lambda *, context: asked.append(context))
    pods_api("other")
    pods_api()
    assert asked == ["other", "around"]
