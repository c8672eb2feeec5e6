"""`legroom ui --api-only`: the API alone, and a Python client made from its own description."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from spawned import Spawned

from legroom.cli.main import main

pytest.importorskip("uvicorn")
ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "docs" / "samples" / "kv-too-small.log"
TOKEN = "sesame-open-up"


class ServedApi(Spawned):
    def __init__(self, *words: str, token: str = TOKEN) -> None:
        super().__init__("ui", "--api-only", "--port", "0", *words, LEGROOM_API_TOKEN=token)

    def ask(self, method: str, path: str, body: object = None, host: str = "localhost", token: str = TOKEN):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"content-type": "application/json", "host": host}
        if token:
            headers["authorization"] = f"Bearer {token}"
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()

    def wait_until_ready(self) -> None:
        """The workers warm up beside the first answers: a probe asks until they have, and so does a test."""
        deadline = time.monotonic() + 120
        while self.ask("GET", "/readyz")[0] != 200:
            assert time.monotonic() < deadline, "the server never became ready"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def api() -> Iterator[ServedApi]:
    server = ServedApi()
    server.wait_until_ready()
    yield server
    server.end()


def test_a_plan_is_answered_to_who_has_the_token(api):
    status, body = api.ask("POST", "/api/plan", {"model": "llama-3.1-8b", "gpu": "h100"})
    assert (status, json.loads(body)["verdict"]) == (200, "fits")
    assert api.ask("POST", "/api/plan", {"model": "llama-3.1-8b", "gpu": "h100"}, token="")[0] == 401


def test_lint_is_answered(api):
    request = {"files": [{"path": "start.sh", "text": "vllm serve a/b --made-up 1"}]}
    status, body = api.ask("POST", "/api/lint", request)
    assert status == 200
    assert [finding["rule"] for finding in json.loads(body)["findings"]] == ["flag-unknown"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_and_prometheus_need_no_token(api, path):
    assert api.ask("GET", path, token="", host="10.0.0.7:8401")[0] == 200


def test_requests_are_counted(api):
    api.ask("POST", "/api/plan", {"model": "llama-3.1-8b", "gpu": "h100"})
    page = api.ask("GET", "/metrics")[1].decode()
    assert 'legroom_api_requests_total{endpoint="plan",status="200"}' in page
    assert "legroom_api_request_seconds_bucket" in page


def test_there_is_no_page(api):
    assert api.ask("GET", "/")[0] == 404
    assert api.ask("GET", "/api/live")[0] == 404
    assert api.ask("GET", "/api/plan")[0] == 405


def test_an_address_that_others_reach_needs_a_token(capsys, monkeypatch):
    monkeypatch.delenv("LEGROOM_API_TOKEN", raising=False)
    assert main(["ui", "--api-only", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "there is no token" in capsys.readouterr().err


def test_without_a_token_any_name_of_the_server_is_answered():
    server = ServedApi("--host", "0.0.0.0", "--no-token", token="")
    try:
        assert server.ask("GET", "/api/releases", host="legroom-api.tools.svc", token="")[0] == 200
    finally:
        server.end()


def test_ctrl_c_ends_it_without_a_word():
    server = ServedApi()
    assert server.ask("GET", "/healthz")[0] == 200
    assert server.end() == (0, "")


@pytest.fixture(scope="module")
def client_package(api, tmp_path_factory):
    """What openapi-python-client makes of /openapi.json, imported."""
    pytest.importorskip("openapi_python_client")
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_bytes(api.ask("GET", "/openapi.json")[1])
    words = ["generate", "--path", str(folder / "openapi.json"), "--output-path", str(folder / "legroom_client")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", *words, "--meta", "none", "--fail-on-warning"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(folder))
    yield importlib.import_module("legroom_client")
    sys.path.remove(str(folder))


def generated(client_package, name):
    return importlib.import_module(f"{client_package.__name__}.{name}")


def test_a_generated_client_plans(api, client_package):
    client = client_package.AuthenticatedClient(base_url=api.url.rstrip("/"), token=TOKEN)
    request = generated(client_package, "models").PlanRequest.from_dict(
        {"model": "llama-3.1-8b", "gpu": "l4", "flags": {"max_model_len": 8192}}
    )
    document = generated(client_package, "api.default.plan").sync(client=client, body=request)
    assert document.verdict == "fits"
    assert document.args["max_model_len"] == 8192


def test_a_generated_client_sizes_lints_and_diagnoses(api, client_package):
    client = client_package.AuthenticatedClient(base_url=api.url.rstrip("/"), token=TOKEN)
    models = generated(client_package, "models")
    size = models.SizeRequest.from_dict({"model": "llama-3.1-8b", "cards": ["l4"]})
    assert generated(client_package, "api.default.size").sync_detailed(client=client, body=size).status_code == 200
    lint = models.LintRequest.from_dict({"files": [{"path": "start.sh", "text": "vllm serve a/b --made-up 1"}]})
    assert (
        generated(client_package, "api.default.lint").sync(client=client, body=lint).findings[0].rule == "flag-unknown"
    )
    log = models.DiagnoseRequest.from_dict({"log": SAMPLE.read_text("utf-8"), "gpu": "rtx4090"})
    answer = generated(client_package, "api.default.diagnose").sync(client=client, body=log)
    assert answer.verdict == "cause found"


def test_a_generated_client_is_told_what_was_wrong(api, client_package):
    client = client_package.AuthenticatedClient(base_url=api.url.rstrip("/"), token=TOKEN)
    request = generated(client_package, "models").PlanRequest.from_dict({"model": "nobody/nothing", "gpu": "h100"})
    answer = generated(client_package, "api.default.plan").sync_detailed(client=client, body=request)
    assert answer.status_code == 422
    assert "nobody/nothing" in answer.parsed.error.message


def test_a_server_that_has_answered_is_ready_while_it_still_warms_up(monkeypatch):
    import asyncio

    from starlette.testclient import TestClient

    from legroom.web.app import create_app
    from legroom.web.endpoint_processes import EndpointProcesses, WorkerLimits
    from legroom.web.security import Access

    async def never(processes):
        await asyncio.Event().wait()

    monkeypatch.setattr(EndpointProcesses, "warm_up", never)
    with TestClient(create_app(Access(), WorkerLimits(), None, page=False), base_url="http://localhost") as client:
        assert client.get("/readyz").status_code == 503
        assert client.post("/api/plan", json={"model": "llama-3.1-8b", "gpu": "h100"}).status_code == 200
        assert client.get("/readyz").status_code == 200


def test_a_request_that_takes_too_long_is_ended_and_the_next_one_is_answered():
    import asyncio

    from legroom.web.endpoint_processes import EndpointProcesses, Refused, WorkerLimits

    async def call(limit_s):
        return await EndpointProcesses(WorkerLimits(1, call_s=limit_s)).call("releases", b"{}")

    async def go():
        with pytest.raises(Refused) as refused:
            await call(0.001)
        return refused.value.status, (await call(60)).status

    assert asyncio.run(go()) == (422, 200)


def test_limits_out_of_range_are_refused():
    assert main(["ui", "--api-only", "--workers", "0"]) == 2
    assert main(["ui", "--api-only", "--timeout", "0"]) == 2
