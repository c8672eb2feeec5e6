"""The quick proof of `legroom run`: with which key, past which proxy, and of servers that complete nothing."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from legroom.run import tasks
from legroom.verify.openai_client import smoke_test

CONTEXT = 1000
NO_ROUTE = (404, {"detail": "Not Found"})


@pytest.fixture
def server():
    """Serves what `refusals` does not refuse up to `longest` tokens, and keeps what it was asked."""
    seen = {"refusals": {}, "longest": CONTEXT, "too_long": (500, {}), "asked": [], "keys": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, {"data": [{"id": "tiny", "max_model_len": CONTEXT}]} if "models" in self.path else {})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen["asked"].append((self.path, body))
            seen["keys"].append(self.headers["authorization"])
            fine = len(body.get("prompt", ())) <= seen["longest"]
            self.answer(*seen["refusals"].get(self.path, (200, {}) if fine else seen["too_long"]))

        def answer(self, status, document):
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    seen["url"] = f"http://127.0.0.1:{http.server_port}"
    yield seen
    http.shutdown()


def test_a_server_that_fails_at_the_full_context_is_not_proven(server):
    server["longest"] = 500
    ok, text = smoke_test(server["url"], "key")
    assert not ok
    assert "500" in text
    assert server["keys"] == ["Bearer key"] * 2


def test_a_server_that_is_gone_is_not_proven():
    assert smoke_test("http://127.0.0.1:9")[0] is False


def test_the_request_at_the_full_context_is_exactly_that_long(server):
    assert smoke_test(server["url"]) == (True, "serves tiny: one completion and a request of 1,000 tokens")
    body = server["asked"][1][1]
    assert len(body["prompt"]) + body["max_tokens"] == CONTEXT
    assert body["ignore_eos"] is True


def test_a_proxy_of_the_environment_is_not_asked(server, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setattr("urllib.request._opener", None)  # urllib reads the environment once
    assert smoke_test(server["url"])[0] is True


@pytest.mark.parametrize(
    "refusal",
    [
        NO_ROUTE,
        (501, {"error": {"message": "The model does not support Completions API"}}),
        (400, {"error": {"message": "The model does not support Completions API"}}),
    ],
)
def test_a_server_of_embeddings_is_proven_with_those(server, refusal):
    server["refusals"] = {"/v1/completions": refusal}
    works, text = smoke_test(server["url"])
    assert works and "one embedding" in text
    assert len(server["asked"][-1][1]["input"]) == CONTEXT


def test_a_classifier_is_proven_with_what_it_pools(server):
    server["refusals"] = {"/v1/completions": NO_ROUTE, "/v1/embeddings": NO_ROUTE}
    works, text = smoke_test(server["url"])
    assert works and "one pooled input" in text
    assert [path for path, _ in server["asked"][-2:]] == ["/pooling"] * 2


def test_a_server_of_neither_is_not_judged(server):
    server["refusals"] = dict.fromkeys(("/v1/completions", "/v1/embeddings", "/pooling"), NO_ROUTE)
    ok, text = smoke_test(server["url"])
    assert ok is None
    assert "pools nothing" in text


def test_a_full_context_that_the_guard_does_not_let_in_is_no_fault_of_the_server(server):
    server["longest"] = 500
    refusal = {"error": {"message": "The prompt has 996 tokens; at most 500 are served.", "code": "prompt_too_long"}}
    server["too_long"] = (400, refusal)
    ok, text = smoke_test(server["url"])
    assert ok is True
    assert text == "serves tiny: one completion and none of 1,000 tokens, which the guard does not let in"


def test_a_refusal_of_another_kind_is_not_proven(server):
    server["refusals"] = {"/v1/completions": (400, {"error": {"message": "no memory"}})}
    ok, text = smoke_test(server["url"])
    assert ok is False
    assert "400" in text and "no memory" in text


def test_the_key_that_stands_before_the_command_is_the_one_that_is_sent(server, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "of the shell")
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    vllm = tmp_path / "vllm"
    vllm.write_text(f"#!{sys.executable}\n")
    vllm.chmod(0o755)
    question = {
        "words": [str(vllm), "serve", "tiny"],
        "env": {"VLLM_API_KEY": "own"},
        "vllm": "0.32.0",
        "verify": True,
        "url": server["url"],
        "log": str(tmp_path / "log"),
        "gpus": {},
    }
    assert tasks.verify_and_calibrate(question)["ok"] is True
    assert set(server["keys"]) == {"Bearer own"}
