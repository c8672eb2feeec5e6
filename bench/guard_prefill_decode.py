"""A prefill and a decode server behind a router, each with a guard: inside of them, and as proxies before them.

    python bench/guard_prefill_decode.py VENV/bin/python

Both are a real vLLM. The keys and values go from one to the other by vLLM's own example of a connector, which writes
files: the one that needs no GPU. The router does what those in vLLM's examples do: it has the prefill server make one
token, then sends the request as it came to the decode server. A refusal of either (429, 503) it repeats when it was
told to, and passes on when it was refused five times.

A row says what was asked, what came back with the guards inside and with proxies, and whether that was to be expected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/real_vllm"))
from guarded_server import TOKEN, Endpoint, GuardedServer, guarded_server, proxy_before
from tiny_models import write_model

FLAGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "16M", "--seed", "1")
REQUESTS = 24
PROMPT = 300
"""Tokens; a block of the CPU build has 128, and only whole ones go from server to server."""
TOKENS = 100
MOST_TRIES = 5


class Pair(NamedTuple):
    prefill: Endpoint
    decode: Endpoint


class Router:
    """Sends a request to the prefill server first, then to the decode server."""

    def __init__(self, pair: Pair) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, headers, answer = routed(pair, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if "retry-after" in headers:
                    self.send_header("Retry-After", headers["retry-after"])
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.request_queue_size = 64
        self.endpoint = Endpoint(self._server.server_port)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def routed(pair: Pair, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    answer = patiently(pair.prefill, body | {"max_tokens": 1})
    return answer if answer[0] != 200 else patiently(pair.decode, body)


def patiently(place: Endpoint, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    for _ in range(MOST_TRIES):
        status, headers, answer = place.post(body)
        if status not in (429, 503):
            break
        time.sleep(min(float(headers.get("retry-after", 1)), 1.0))
    return status, headers, answer


def prompt(number: int) -> list[int]:
    return [5 + (number + place * 7) % 200 for place in range(PROMPT)]


def look(pair: Pair, servers: tuple[GuardedServer, GuardedServer], first: int) -> Iterator[tuple[str, str, str]]:
    """What was asked, what came back, and what was to be expected."""
    wish = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    router = Router(pair)
    try:
        before = [server.metric("legroom_guard_admitted_total") for server in servers]
        loaded = servers[1].metric("vllm:external_prefix_cache_hits_total")
        with ThreadPoolExecutor(REQUESTS) as threads:
            bodies = [wish | {"prompt": prompt(first + number)} for number in range(REQUESTS)]
            answers = list(threads.map(router.endpoint.post, bodies))
        whole = Counter(
            status if status != 200 else f"{len(answer['choices'][0]['token_ids'])} tokens"
            for status, _, answer in answers
        )
        yield (
            f"{REQUESTS} at once",
            ", ".join(f"{count} x {what}" for what, count in whole.items()),
            (f"{REQUESTS} x {TOKENS} tokens"),
        )
        admitted = [
            server.metric("legroom_guard_admitted_total") - was for server, was in zip(servers, before, strict=True)
        ]
        yield "admitted by each guard", " and ".join(f"{count:.0f}" for count in admitted), f"{REQUESTS} and {REQUESTS}"
        loaded = servers[1].metric("vllm:external_prefix_cache_hits_total") - loaded
        yield (
            "prompt tokens that the decode server got from the prefill server",
            f"{loaded:.0f}",
            (f"{REQUESTS * (PROMPT // 128) * 128}"),
        )
        alone = servers[0].post(bodies[0])[2]["choices"][0]["token_ids"]
        same = answers[0][2]["choices"][0]["token_ids"] == alone
        yield "the same tokens as from one server", "yes" if same else "no", "yes"
        drain(servers[0], True)
        status, headers, _ = router.endpoint.post(wish | {"prompt": prompt(first + 120), "max_tokens": 1})
        yield (
            "while the prefill server drains",
            f"{status}{', Retry-After' if 'retry-after' in headers else ''}",
            ("503, Retry-After"),
        )
        drain(servers[0], False)
        yield "afterwards", str(router.endpoint.post(wish | {"prompt": prompt(first + 120), "max_tokens": 1})[0]), "200"
        reserved = [server.metric("legroom_guard_reserved_tokens") for server in servers]
        yield "tokens reserved in the end", " and ".join(f"{count:.0f}" for count in reserved), "0 and 0"
    finally:
        router.close()


def drain(server: GuardedServer, on: bool) -> None:
    server.post({"on": on}, "/-/legroom/drain", authorization=f"Bearer {TOKEN}")


def transfer(role: str, files: Path) -> str:
    connector = {"kv_connector": "ExampleConnector", "kv_role": role}
    return json.dumps(connector | {"kv_connector_extra_config": {"shared_storage_path": str(files)}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="vLLM's Python")
    args = parser.parse_args()
    is_good = True
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, files = write_model(folder / "tiny"), folder / "files"
        files.mkdir()
        started = []
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            own = folder / name
            own.mkdir()
            flags = (*FLAGS, "--kv-transfer-config", transfer(role, files))
            started.append(stack.enter_context(guarded_server(args.python, own, model, *flags)))
        servers = started[0], started[1]
        proxies = [stack.enter_context(proxy_before(server))[0] for server in servers]
        for place, pair, first in (("inside", Pair(*servers), 0), ("proxies", Pair(*proxies), 50)):
            for asked, came, expected in look(pair, servers, first):
                mark = "" if came == expected else f"  NOT AS EXPECTED ({expected})"
                is_good = is_good and came == expected
                print(f"{place:8} {asked:66} {came}{mark}", flush=True)
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
