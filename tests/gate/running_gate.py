"""A gate that runs, and the way an API server asks it."""

from __future__ import annotations

import http.client
import json
import ssl
from pathlib import Path
from typing import Any

from spawned import Spawned


def deployment(
    *args: str, gpu: str | None = "NVIDIA-L4", image: str = "vllm/vllm-openai:v0.11.0", **limits: Any
) -> dict:
    """A Deployment of vLLM."""
    pod: dict[str, Any] = {
        "containers": [
            {
                "name": "vllm",
                "image": image,
                "args": list(args) or ["--model", "Qwen/Qwen3-8B", "--max-model-len", "40000"],
                "resources": {"limits": {"nvidia.com/gpu": "1", **limits}},
            }
        ]
    }
    if gpu:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": gpu}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "llm", "namespace": "models"},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": "llm"}},
            "template": {"metadata": {"labels": {"app": "llm"}}, "spec": pod},
        },
    }


def review(
    thing: dict, operation: str = "CREATE", old: dict | None = None, namespace: str = "models", user: str = "admin"
) -> dict:
    request = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "operation": operation,
        "namespace": namespace,
        "dryRun": False,
        "kind": {"group": "apps", "version": "v1", "kind": thing["kind"]},
        "name": "llm",
        "object": thing,
        "oldObject": old,
        "userInfo": {"username": user},
        "options": None,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


class RunningGate(Spawned):
    def __init__(self, folder: Path, *words: str) -> None:
        from legroom.exports.gate_certificates import new_authority, new_certificate

        self.folder, self.authority = folder, new_authority()
        (folder / "ca.crt").write_bytes(self.authority.certificate)
        self.write(new_certificate(self.authority, ["localhost", "legroom-gate.legroom.svc"]))
        address = ("--host", "127.0.0.1", "--port", "0", "--tls-dir", str(folder))
        super().__init__("gate", *address, "--deadline", "30", *words)
        self.context = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def write(self, pair: Any) -> None:
        (self.folder / "tls.crt").write_bytes(pair.certificate)
        (self.folder / "tls.key").write_bytes(pair.key)

    def raw(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection("localhost", self.port, context=self.context, timeout=60)
        connection.request(method, path, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()

    def ask(self, thing: dict, path: str = "/validate", **about: Any) -> dict:
        """The response to a review of this object, asked as an API server asks."""
        status, body = self.raw("POST", path, json.dumps(review(thing, **about)).encode())
        assert status == 200, body
        answer = json.loads(body)
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert answer["response"]["uid"] == "705ab4f5-6393-11e8-b7cc-42010a800002"
        return answer["response"]

    def figure(self, series: str) -> float:
        lines = self.raw("GET", "/metrics")[1].decode().splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))
