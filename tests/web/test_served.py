"""The served page's API over HTTP, from a server that is shared by all tests here."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from metrics_server import Metrics, serving
from spawned import Spawned

from legroom.cli.main import main
from legroom.live.metrics.endpoint import is_loopback_host
from legroom.web.security import Access, denial

pytest.importorskip("uvicorn")
ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "docs" / "samples" / "kv-too-small.log"
PLAN = {"model": "llama-3.1-8b", "gpu": "h100"}


class Served(Spawned):
    def __init__(self, *words: str) -> None:
        super().__init__("ui", "--port", "0", *words)

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, dict, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        if isinstance(body, dict):
            body, headers = json.dumps(body), {"content-type": "application/json", **headers}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.end()


def test_a_plan_is_answered(served):
    status, _, body = served.ask("POST", "/api/plan", PLAN)
    assert status == 200
    assert json.loads(body)["verdict"] == "fits"


def test_an_input_error_is_told_with_its_hint(served):
    status, _, body = served.ask("POST", "/api/plan", {"model": "nobody/nothing", "gpu": "h100"})
    assert status == 422
    assert set(json.loads(body)["error"]) == {"message", "hint", "exit_code"}


@pytest.mark.parametrize("body", ["{", "[]", "NaN", '{"gpu": NaN}', "\ud800".encode("utf-8", "surrogatepass"), ""])
def test_a_body_that_is_no_request_is_refused(served, body):
    assert served.ask("POST", "/api/plan", body, **{"content-type": "application/json"})[0] == 400


def test_a_body_of_another_type_is_refused(served):
    assert served.ask("POST", "/api/plan", "x=1", **{"content-type": "application/x-www-form-urlencoded"})[0] == 415


def test_a_log_may_be_streamed(served):
    plain = {"content-type": "text/plain"}
    status, _, body = served.ask("POST", "/api/diagnose?gpu=rtx4090", SAMPLE.read_bytes(), **plain)
    assert status == 200
    assert json.loads(body)["findings"][0]["entry"] == "LR203"


def test_what_an_address_says_beside_a_log_is_checked(served):
    assert served.ask("POST", f"/api/diagnose?vllm={'9' * 100}", {"log": "x"})[0] == 400
    assert (
        served.ask("POST", "/api/diagnose?nonsense=1", SAMPLE.read_bytes(), **{"content-type": "text/plain"})[0] == 400
    )


def test_a_binary_log_is_no_crash(served):
    status, _, body = served.ask("POST", "/api/diagnose", os.urandom(1 << 20), **{"content-type": "text/plain"})
    assert status in (200, 422)
    assert json.loads(body)


def test_a_log_that_says_it_is_too_large_is_refused_at_once(served):
    headers = {"content-type": "text/plain", "content-length": str(5 << 30)}
    status, _, body = served.ask("POST", "/api/diagnose", b"", **headers)
    assert status == 413
    assert "larger than 4 GiB" in json.loads(body)["error"]["message"]


def test_a_json_body_has_a_limit(served):
    headers = {"content-type": "application/json", "content-length": str(81 << 20)}
    assert served.ask("POST", "/api/plan", b"", **headers)[0] == 413


def test_a_log_of_many_megabytes_is_read_to_its_end(served):
    noise = b"INFO 11-15 03:00:00 [loggers.py:1] nothing to see here\n" * 400_000
    body = noise + SAMPLE.read_bytes()
    status, _, answer = served.ask("POST", "/api/diagnose?gpu=rtx4090", body, **{"content-type": "text/plain"})
    assert status == 200
    assert json.loads(answer)["findings"][0]["evidence"][0]["line"] > 400_000


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_another_name_for_this_machine_is_not_answered(served, host):
    assert served.ask("POST", "/api/plan", PLAN, host=host)[0] == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"])
def test_a_page_of_another_origin_is_not_answered(served, origin):
    assert served.ask("POST", "/api/plan", PLAN, origin=origin)[0] == 403


def test_the_page_of_its_own_origin_is_answered(served):
    assert served.ask("POST", "/api/plan", PLAN, origin=f"http://127.0.0.1:{served.port}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/api/releases", "/nothing", "/openapi.json"])
def test_every_answer_has_the_policy(served, path):
    policy = served.ask("GET", path)[1]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/%2e%2e/app.py", "/.hidden", "/page_files.py", "/%00"])
def test_only_files_of_the_page_are_served(served, path):
    assert served.ask("GET", path)[0] in (400, 404)


def test_the_page_says_that_it_is_served(served):
    status, headers, body = served.ask("GET", "/")
    assert status == 200
    assert b'name="legroom-edition" content="served"' in body
    assert served.ask("GET", "/", **{"if-none-match": headers["etag"]})[0] == 304


def test_the_live_feed_says_that_nothing_is_watched(served):
    status, _, body = served.ask("GET", "/api/live")
    assert status == 404
    assert "--watch" in json.loads(body)["error"]["hint"]


def test_an_unknown_method_is_told_what_is_allowed(served):
    for method in ("GET", "DELETE"):
        status, headers, _ = served.ask(method, "/api/plan")
        assert status == 405
        assert headers["allow"] == "POST"


def test_ctrl_c_ends_it_cleanly():
    server = Served()
    server.ask("GET", "/healthz")
    code, errors = server.end()
    assert (code, errors) == (0, "")


def test_a_port_in_use_is_one_sentence(served):
    words = [sys.executable, "-m", "legroom", "ui", "--port", str(served.port)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1 port {served.port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_a_token_nothing_is_answered_without_it():
    server = Served("--token", "correct-horse")
    try:
        assert server.ask("POST", "/api/plan", PLAN)[0] == 401
        assert server.ask("POST", "/api/plan", PLAN, authorization="Bearer wrong-horse")[0] == 401
        assert server.ask("POST", "/api/plan", PLAN, authorization="Bearer correct-horse")[0] == 200
        status, headers, _ = server.ask("GET", "/?token=correct-horse")
        assert status == 303
        assert "HttpOnly" in headers["set-cookie"]
        cookie = headers["set-cookie"].partition(";")[0]
        assert server.ask("GET", "/", cookie=cookie)[0] == 200
        assert server.ask("GET", "/healthz")[0] == 200
    finally:
        server.end()


def test_a_server_that_cannot_be_reached_is_a_look_of_the_live_feed():
    server = Served("--watch", "http://127.0.0.1:9", "--interval", "1")
    try:
        server.ask("GET", "/healthz")
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        connection.request("GET", "/api/live")
        answer, lines = connection.getresponse(), []
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        while not any(line.startswith('data: {"server"') for line in lines):
            lines.append(answer.readline().decode())
        assert json.loads(lines[-1].removeprefix("data: "))["state"] == "unreachable"
    finally:
        code, errors = server.end()
    assert (code, errors) == (0, "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback_addresses_are_known(host):
    assert is_loopback_host(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.evil", "example.org", ""])
def test_other_addresses_are_not_loopback(host):
    assert not is_loopback_host(host)


def test_a_link_from_another_site_may_open_the_page_but_not_ask_the_api():
    headers = {"host": "127.0.0.1:1", "sec-fetch-site": "cross-site"}
    assert denial(Access(), "GET", "/", "", headers) is None
    refused = denial(Access(), "GET", "/api/models", "", headers)
    assert refused is not None
    assert refused.status_code == 403


def first_events(server: Served, count: int) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.request("GET", "/api/live")
    answer = connection.getresponse()
    return [_event(answer) for _ in range(count)]


def _event(answer: http.client.HTTPResponse) -> str:
    lines = iter(answer.readline, b"\n")
    return b"".join(lines).decode()


def test_the_live_feed_shows_the_plan_beside_the_server(tmp_path):
    pytest.importorskip("aiohttp")
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"model": "tiny", "vllm": "0.32.0", "kv": {"num_blocks": 2000, "block_size": 16}}))
    with serving(Metrics()) as vllm:
        server = Served("--watch", vllm, "--interval", "0.5", "--plan", str(plan))
        try:
            events = first_events(server, 6)
        finally:
            server.end()
    text = next(text for text in events if text.startswith("event: plan\n"))
    blocks = json.loads(text.partition("data: ")[2])["figures"][0]
    assert (blocks["name"], blocks["planned"], blocks["actual"], blocks["is_as_planned"]) == (
        "num_blocks",
        2000,
        1001,
        False,
    )


def test_a_plan_without_a_watched_server_is_a_sentence(tmp_path):
    words = [sys.executable, "-m", "legroom", "ui", "--port", "0", "--plan", "plan.json"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 2
    assert "--watch" in ended.stderr


def test_watching_without_what_it_takes_names_both_extras(monkeypatch, capsys):
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aiohttp" else known(name))
    assert main(["ui", "--port", "0", "--watch", "http://127.0.0.1:9"]) == 3
    assert "legroom[ui,watch]" in capsys.readouterr().err
