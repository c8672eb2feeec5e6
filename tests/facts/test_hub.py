"""The Hub path, against a small server on loopback that answers as the Hub does (HF_ENDPOINT points to it).

huggingface_hub reads its settings on import, so each set of settings is a process of its own.
"""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from legroom.facts.bundled import bundled_config, find

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(http.server.BaseHTTPRequestHandler):
    """`/{owner}/{name}/resolve/{revision}/{file}`, with the headers the Hub sends."""

    files: ClassVar[dict[str, dict[str, bytes]]] = {}

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        owner, name, _, revision, *rest = (*self.path.strip("/").split("/"), "", "", "")
        repo, filename = f"{owner}/{name}", "/".join(part for part in rest if part)
        if owner == "slow":
            time.sleep(30)
        if owner == "gated" and "good-token" not in self.headers.get("authorization", ""):
            return self.refuse(403 if self.headers.get("authorization") else 401, "GatedRepo")
        if owner == "broken":
            return self.refuse(500, "")
        if repo not in self.files:
            return self.refuse(401, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if filename not in self.files[repo]:
            return self.refuse(404, "EntryNotFound")
        self.send_file(self.files[repo][filename], body)
        return None

    def send_file(self, content: bytes, body: bool) -> None:
        etag = hashlib.sha1(content).hexdigest()
        span = self.headers.get("range", "")
        if span:
            first, last = span.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
        self.send_response(206 if span else 200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if code == "RepoNotFound":
            self.send_header("X-Error-Message", "Repository not found")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def safetensors(size: int) -> bytes:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    return len(header).to_bytes(8, "little") + header


def llama() -> bytes:
    found = find("llama-3.2-1b")
    assert found is not None
    return json.dumps(bundled_config(found)).encode()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}, "metadata": {"total_size": 7}}
    quantization = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    FakeHub.files = {
        "me/one": {"config.json": llama(), "model.safetensors": safetensors(1000)},
        "me/sharded": {
            "config.json": llama(),
            "model.safetensors.index.json": json.dumps(shards).encode(),
            "model-1.safetensors": safetensors(1000),
            "model-2.safetensors": safetensors(500),
        },
        "me/quantized": {"config.json": llama(), "hf_quant_config.json": json.dumps(quantization).encode()},
        "me/garbage": {"config.json": b"<html>not a config</html>"},
        "me/list": {"config.json": b"[]"},
        "me/empty": {"README.md": b""},
        "me/huge": {"config.json": b" " * (21 * 2**20)},
        "gated/model": {"config.json": llama()},
    }
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


ASK = """
import json, os, sys
from legroom.errors import LegroomError
from legroom.facts.model_sources import load
for line in sys.stdin:
    name, revision, token = json.loads(line)
    os.environ["HF_TOKEN"] = token
    try:
        model = load(name, revision=revision or None)
        quantization = model.quantization.method if model.quantization else None
        answer = [0, model.name, model.hidden_size, model.checkpoint_bytes, quantization]
    except LegroomError as error:
        answer = [error.exit_code, error.message, error.hint]
    print(json.dumps(answer), flush=True)
"""


class Asker:
    """A process with its own Hub settings that answers one question a line."""

    def __init__(self, endpoint: str, cache: Path, **env: str) -> None:
        settings = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(cache),
            "HF_HUB_ETAG_TIMEOUT": "2",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "HF_HUB_DISABLE_XET": "1",
        }
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASK],
            env={**clean, **settings, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, model: str, revision: str = "", token: str = "") -> list[Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([model, revision, token]), file=self.process.stdin, flush=True)
        answer: list[Any] = json.loads(self.process.stdout.readline())
        return answer

    def __enter__(self) -> "Asker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=120)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def ask(hub: str, cache: Path) -> Iterator[Asker]:
    with Asker(hub, cache) as asker:
        yield asker


@pytest.fixture(scope="module")
def ask_offline(hub: str, cache: Path, ask: Asker) -> Iterator[Asker]:
    ask("me/one")
    with Asker(hub, cache, HF_HUB_OFFLINE="1") as asker:
        yield asker


@pytest.fixture(scope="module")
def ask_nowhere(cache: Path, ask: Asker) -> Iterator[Asker]:
    ask("me/one")
    with Asker("http://127.0.0.1:9", cache) as asker:
        yield asker


def test_a_hub_model_is_read_from_its_config_and_safetensors_header(ask: Asker) -> None:
    assert ask("me/one") == [0, "me/one", 2048, 1000, None]


def test_the_headers_of_every_shard_are_added_up_and_no_weights_are_read(ask: Asker, cache: Path) -> None:
    assert ask("me/sharded")[3] == 1500
    assert not list(cache.rglob("*.safetensors"))


def test_a_quantization_file_beside_the_config_is_read(ask: Asker) -> None:
    assert ask("me/quantized")[4] == "modelopt"


def test_what_is_in_the_cache_is_used_offline(ask_offline: Asker) -> None:
    assert ask_offline("me/one")[:3] == [0, "me/one", 2048]


def test_what_is_in_the_cache_is_used_when_the_hub_is_out_of_reach(ask_nowhere: Asker) -> None:
    assert ask_nowhere("me/one")[:3] == [0, "me/one", 2048]


def test_an_unknown_model_offline_is_unreachable_and_names_near_ones(ask_offline: Asker) -> None:
    code, message, hint = ask_offline("someone/Llama-3.1-9B-Instruct-tuned")
    assert code == 3
    assert "offline" in message
    assert "llama-3.1-8b" in hint


def test_no_network_is_exit_code_3(ask_nowhere: Asker) -> None:
    code, message, _ = ask_nowhere("someone/some-model")
    assert code == 3
    assert "could not be reached" in message


def test_a_hub_that_hangs_is_given_up_on(ask: Asker) -> None:
    code, message, _ = ask("slow/model")
    assert code == 3
    assert "could not be reached" in message


@pytest.mark.parametrize("token", ["", "hf_bad"])
def test_a_gated_model_says_how_to_get_in(ask: Asker, token: str) -> None:
    code, message, hint = ask("gated/model", token=token)
    assert code == 3
    assert "gated" in message
    assert "HF_TOKEN" in hint


def test_a_gated_model_opens_with_the_right_token(hub: str, tmp_path: Path) -> None:
    with Asker(hub, tmp_path) as ask:
        assert ask("gated/model", token="hf_good-token")[:2] == [0, "gated/model"]


def test_a_missing_model_names_near_ones(ask: Asker) -> None:
    code, message, hint = ask("me/Qwen2.5-7B-Instruc")
    assert code == 2
    assert "no model" in message
    assert "qwen2.5-7b" in hint


def test_a_missing_revision_is_named_as_such(ask: Asker) -> None:
    code, message, _ = ask("me/one", "v9")
    assert (code, "revision" in message) == (2, True)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("me/garbage", "not JSON"),
        ("me/list", "JSON list"),
        ("me/empty", "no config.json"),
        ("me/huge", "which no config"),
    ],
)
def test_an_answer_that_is_no_config_is_refused(ask: Asker, model: str, words: str) -> None:
    code, message, _ = ask(model)
    assert code == 2
    assert words in message


def test_a_hub_in_trouble_is_exit_code_3(ask: Asker) -> None:
    assert ask("broken/model")[0] == 3
