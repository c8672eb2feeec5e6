"""Kubernetes rollouts, flags, scale and leases, with the real client against a stand-in for the API server.

No cluster runs here: a small HTTP server keeps one Deployment and any Lease, with generations and conflicts.
"""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

from legroom.actions.kubernetes_platform import RESTARTED_BY, KubernetesLease, Workload
from legroom.actions.platform import ActionFailed, FlagChange, RestartRequest, scale

# Looked for and not imported: that takes half a second, which every process that collects the tests would spend.
pytestmark = pytest.mark.skipif(find_spec("kubernetes") is None, reason="no kubernetes here")


class Api(BaseHTTPRequestHandler):
    def answer(self, document, status=200):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    def body(self):
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def do_GET(self):
        kept = self.server.objects.get(self.path)
        self.answer(kept or {"kind": "Status", "code": 404}, 200 if kept else 404)

    def do_POST(self):
        made = self.body()
        path = f"{self.path}/{made['metadata']['name']}"
        if path in self.server.objects:
            return self.answer({"kind": "Status", "code": 409}, 409)
        made["metadata"]["resourceVersion"] = "1"
        self.server.objects[path] = made
        return self.answer(made, 201)

    def do_PUT(self):
        made, kept = self.body(), self.server.objects[self.path]
        if made["metadata"]["resourceVersion"] != kept["metadata"]["resourceVersion"]:
            return self.answer({"kind": "Status", "code": 409}, 409)
        made["metadata"]["resourceVersion"] = str(int(made["metadata"]["resourceVersion"]) + 1)
        self.server.objects[self.path] = made
        return self.answer(made)

    def do_PATCH(self):
        kept, change = self.server.objects.get(self.path), self.body()
        if kept is None:
            return self.answer({"kind": "Status", "code": 404}, 404)
        spec = change["spec"]
        self.server.patches.append(spec)
        if "replicas" in spec:
            kept["spec"]["replicas"] = spec["replicas"]
        template = spec.get("template", {})
        kept["spec"]["template"]["metadata"]["annotations"] |= template.get("metadata", {}).get("annotations", {})
        for container in template.get("spec", {}).get("containers", []):
            kept["spec"]["template"]["spec"]["containers"][0] |= {k: v for k, v in container.items() if v is not None}
        kept["status"] |= dict.fromkeys(("updatedReplicas", "readyReplicas"), kept["spec"]["replicas"])
        return self.answer(kept)


DEPLOYMENT = "/apis/apps/v1/namespaces/ml/deployments/vllm"


@pytest.fixture
def api(tmp_path, monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    server.patches = []
    server.objects = {
        DEPLOYMENT: {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "vllm", "generation": 1},
            "spec": {
                "replicas": 2,
                "selector": {"matchLabels": {"a": "b"}},
                "template": {
                    "metadata": {"annotations": {"kept": "yes"}},
                    "spec": {
                        "containers": [
                            {"name": "main", "image": "v", "args": ["--model", "m", "--max-model-len", "32768"]}
                        ]
                    },
                },
            },
            "status": {"observedGeneration": 1, "updatedReplicas": 2, "readyReplicas": 2},
        }
    }
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
    }
    (tmp_path / "kube").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kube"))
    # The client remembers the variable from its import.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kube"))
    yield server
    server.shutdown()
    server.server_close()


WORKLOAD = Workload("vllm", "ml", context="c", poll_s=0.02)


def test_a_restart_is_one_rollout_however_often_it_is_asked_for(api):
    before = asyncio.run(WORKLOAD.state())
    assert (before.running, before.underway) == (True, False)
    asyncio.run(WORKLOAD.restart(RestartRequest("17", 10)))
    after = asyncio.run(WORKLOAD.state())
    asyncio.run(WORKLOAD.restart(RestartRequest("17", 10)))
    assert asyncio.run(WORKLOAD.state()) == after
    assert after.identity != before.identity
    assert [patch["template"]["metadata"]["annotations"][RESTARTED_BY] for patch in api.patches] == ["17"]


def test_a_rollout_that_does_not_end_is_said(api):
    api.objects[DEPLOYMENT]["metadata"]["generation"] = 5
    assert asyncio.run(WORKLOAD.state()).underway
    with pytest.raises(ActionFailed, match="within 0 s"):
        asyncio.run(WORKLOAD.restart(RestartRequest("1", 0)))


def test_flags_are_patched_into_the_container_and_undone(api):
    args = lambda: api.objects[DEPLOYMENT]["spec"]["template"]["spec"]["containers"][0]["args"]  # noqa: E731
    override = asyncio.run(WORKLOAD.override_place())
    asyncio.run(WORKLOAD.write_flags(FlagChange({"--max-model-len": "8192"}, {"A": "1"})))
    assert args() == ["--model", "m", "--max-model-len", "8192"]
    assert api.patches[-1]["template"]["spec"]["containers"][0]["env"] == [{"name": "A", "value": "1"}]
    asyncio.run(WORKLOAD.restore_flags(override))
    assert args() == ["--model", "m", "--max-model-len", "32768"]
    assert api.patches[-1]["template"]["spec"]["containers"][0]["env"] is None, "there was none before"


def test_flags_that_a_script_holds_are_not_changed(api):
    container = api.objects[DEPLOYMENT]["spec"]["template"]["spec"]["containers"][0]
    container |= {"command": ["/bin/sh", "-c"], "args": ["vllm serve m --max-model-len 32768"]}
    for change in (WORKLOAD.override_place(), WORKLOAD.write_flags(FlagChange({"--max-model-len": "8192"}))):
        with pytest.raises(ActionFailed, match=r"/bin/sh -c .*cannot see"):
            asyncio.run(change)
    assert api.patches == []


def test_scaling_patches_the_number(api):
    assert "from 2 to 3" in asyncio.run(scale(WORKLOAD, 3))
    assert api.objects[DEPLOYMENT]["spec"]["replicas"] == 3


def test_one_holder_has_the_lease(api):
    lease = KubernetesLease("ml", context="c")
    assert asyncio.run(lease.take("g", "one", 60))
    assert not asyncio.run(lease.take("g", "two", 60))
    assert asyncio.run(lease.take("g", "one", 60))
    asyncio.run(lease.release("g", "two"))
    assert not asyncio.run(lease.take("g", "two", 60))
    asyncio.run(lease.release("g", "one"))
    assert asyncio.run(lease.take("g", "two", 60))


def test_a_lease_that_has_ended_is_anybodys(api):
    lease = KubernetesLease("ml", context="c")
    assert asyncio.run(lease.take("g", "one", 60))
    (path,) = (path for path in api.objects if "leases" in path)
    api.objects[path]["spec"]["renewTime"] = "2020-01-01T00:00:00.000000Z"
    assert asyncio.run(lease.take("g", "two", 60))


def test_what_kubernetes_does_not_know_is_said(api):
    with pytest.raises(ActionFailed, match="answered 404"):
        asyncio.run(Workload("other", "ml", context="c").state())
    with pytest.raises(ActionFailed, match="no container x"):
        asyncio.run(Workload("vllm", "ml", container="x", context="c").override_place())


def test_without_a_configuration_it_says_so(api):
    with pytest.raises(ActionFailed, match="no Kubernetes configuration"):
        asyncio.run(Workload("vllm", "ml", context="other").state())
