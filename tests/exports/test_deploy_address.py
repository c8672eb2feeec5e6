"""Probes, waits and drains ask the server where it listens, in the way it answers."""

import http.server
import shlex
import shutil
import socketserver
import subprocess
import threading
import tomllib

import pytest
import yaml
from planned import planned

from legroom.errors import LegroomError
from legroom.exports.deploy import compose, docker, helm_values, kubernetes, systemd
from legroom.exports.deploy.serve_command import Address, address_of, parse_command
from legroom.exports.export_request import ExportRequest
from legroom.facts.releases import latest
from legroom.planning.plan_document import plan_from_json

TLS = ("--ssl-certfile", "/etc/tls/cert.pem", "--ssl-keyfile", "/etc/tls/key.pem")
INSIDE = [docker, compose, kubernetes, helm_values]
needs_curl = pytest.mark.skipif(shutil.which("curl", path="/usr/bin:/bin") is None, reason="curl is not installed")


def text(module, *flags, which="8b-h100", **options):
    document = planned(which).to_json()
    with_flags = plan_from_json({**document, "command": [*document["command"], *flags]})
    return module.files(ExportRequest(with_flags.release, with_flags, options))[-1].text


def pod(*flags, **options):
    documents = list(yaml.safe_load_all(text(kubernetes, *flags, **options)))
    return next(document for document in documents if document["kind"] == "Deployment")["spec"]["template"]


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ((), "http://127.0.0.1:8000"),
        (("--port", "9000"), "http://127.0.0.1:9000"),
        (("--port", "80\u00b2"), "http://127.0.0.1:8000"),
        (("--host", "0.0.0.0"), "http://127.0.0.1:8000"),
        (("--host", "::"), "http://[::1]:8000"),
        (("--host", "10.0.0.5"), "http://10.0.0.5:8000"),
        (TLS, "https://127.0.0.1:8000"),
    ],
)
def test_the_address_follows_from_the_flags(flags, url):
    assert address_of(parse_command(["vllm", "serve", "m", *flags], latest())).url == url


def test_a_unit_waits_where_the_server_listens():
    assert "http://10.0.0.5:8000/health" in text(systemd, "--host", "10.0.0.5")
    assert "-k -o /dev/null https://127.0.0.1:8000/health" in text(systemd, *TLS)
    assert "--unix-socket /run/vllm.sock" in text(systemd, "--uds", "/run/vllm.sock")


def test_the_guard_is_drained_where_the_server_listens():
    assert "https://127.0.0.1:8000/-/legroom/drain" in text(systemd, *TLS, with_guard=True)


def test_a_server_with_tls_is_probed_with_it():
    made = pod(*TLS)
    container = made["spec"]["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    assert made["metadata"]["annotations"]["prometheus.io/scheme"] == "https"
    (service,) = yaml.safe_load(text(compose, *TLS))["services"].values()
    assert service["healthcheck"]["test"][-1] == "https://127.0.0.1:8000/health"
    assert "-k" in service["healthcheck"]["test"]
    assert "-k https://127.0.0.1:8000/health" in text(docker, *TLS)


def test_an_old_release_with_tls_is_drained_through_it():
    hook = pod(*TLS, which="0.10.2")["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert "https://127.0.0.1:8000/metrics" in hook


def test_the_sidecar_takes_the_certificate_of_the_server():
    documents = yaml.safe_load_all(text(kubernetes, *TLS, with_sidecar=True))
    settings = next(document["data"]["watch.toml"] for document in documents if document["kind"] == "ConfigMap")
    (server,) = tomllib.loads(settings)["servers"]
    assert server == {"url": "https://127.0.0.1:8000", "verify_tls": False}


@pytest.mark.parametrize("module", INSIDE)
@pytest.mark.parametrize(
    "flags",
    [("--host", "127.0.0.1"), ("--host", "localhost"), ("--uds", "/run/v.sock"), (*TLS, "--ssl-cert-reqs", "2")],
)
def test_a_container_that_nobody_could_ask_is_refused(module, flags):
    with pytest.raises(LegroomError, match=flags[-2]):
        text(module, *flags)


@pytest.mark.parametrize("module", [systemd, *INSIDE])
@pytest.mark.parametrize("flag", ["--headless", "--grpc"])
def test_a_server_that_answers_no_http_is_refused_where_it_would_be_killed_for_it(module, flag):
    with pytest.raises(LegroomError, match=flag):
        text(module, flag)


def test_the_chart_is_not_given_a_server_with_tls():
    with pytest.raises(LegroomError, match="http"):
        text(helm_values, *TLS)


def test_a_socket_is_not_watched_by_the_sidecar():
    with pytest.raises(LegroomError, match="--uds"):
        text(systemd, "--uds", "/run/vllm.sock", with_sidecar=True)


@needs_curl
def test_the_line_reaches_a_server_behind_a_socket(tmp_path):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *args):
            pass

        def address_string(self):
            return "socket"

    path = str(tmp_path / "a b.sock")
    with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        line = Address(socket=path).curl("/health")
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        server.shutdown()
    assert (done.stdout, shlex.split(line)[0]) == ("/health", "curl")
