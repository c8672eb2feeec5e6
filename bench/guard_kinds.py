"""Every kind of server that a real vLLM on a CPU can be, behind the guard: inside of it, and through the proxy.

    python bench/guard_kinds.py VENV/bin/python [--kinds lora pooling several realtime disaggregated] [--path DIR]

Each kind is served once with the middleware, and the proxy stands in front of it; the same requests go to both:

- lora: a base model and an adapter of it, by the request's `model`;
- pooling: /v1/embeddings, /score, /rerank and /pooling of an embedding model;
- several: two data-parallel engines behind two API servers, 48 requests at once, and a drain that both obey;
- realtime: a WebSocket at /v1/realtime, which takes audio and streams text. The model is a Llama that answers each
  piece of audio with tokens, so that no audio model is needed. uvicorn needs `websockets` for it, which may be in a
  folder of its own (`--path`);
- disaggregated: a prefill and a decode server behind a router, with a guard each. Keys and values go by vLLM's example
  connector, which writes files and needs no GPU. The router has the prefill server make one token, then sends the
  request to the decode server; a refusal (429, 503) it repeats up to five times.

A row says what was sent, what came back with the middleware and with the proxy, and whether that was expected.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from bench_harness import arguments, write_json
from guarded_server import TOKEN, Endpoint, GuardedServer, guarded_server, proxy_before
from tiny_models import write_lora, write_model

TEXTS = ["one", "two", "three"]
COMMON = ("--kv-cache-memory-bytes", "16M")
REQUESTS, PROMPT, TOKENS = 24, 300, 100
"""Of the disaggregated pair; a block of the CPU build has 128 tokens, and only whole ones go from server to server."""
REALTIME = """
from vllm import ModelRegistry
from vllm.inputs import TokensPrompt
from vllm.model_executor.models.llama import LlamaForCausalLM

class TinyRealtime(LlamaForCausalLM):
    supports_realtime = True
    realtime_max_tokens = 4

    @classmethod
    async def buffer_realtime_audio(cls, audio_stream, input_stream, model_config):
        async for piece in audio_stream:
            yield TokensPrompt(prompt_token_ids=[5 + len(piece) % 200] * 8)

def register():
    ModelRegistry.register_model("TinyRealtime", "tiny_realtime:TinyRealtime")
"""


class Row(NamedTuple):
    sent: str
    inside: str
    through: str
    expected: bool


Checks = Callable[[GuardedServer, Endpoint], Iterator[Row]]


def compare(sent: str, places: tuple[Endpoint, Endpoint], send: Callable[[Endpoint], str], expected: str) -> Row:
    inside, through = (send(place) for place in places)
    return Row(sent, inside, through, inside == through == expected)


def drain(server: GuardedServer, on: bool) -> None:
    server.post({"on": on}, "/-/legroom/drain", authorization=f"Bearer {TOKEN}")


def lora(server: GuardedServer, proxy: Endpoint) -> Iterator[Row]:
    body = {"prompt": [5] * 20, "max_tokens": 8, "ignore_eos": True}
    yield compare(
        "an adapter by its name",
        (server, proxy),
        lambda place: str(place.post(body | {"model": "tuned"})[2]["model"]),
        "tuned",
    )
    inside, through = (len({answered_tokens(place, model) for model in ("tiny", "tuned")}) for place in (server, proxy))
    yield Row("different tokens of base model and adapter", str(inside), str(through), inside == through == 2)
    yield compare(
        "an adapter that is not there",
        (server, proxy),
        lambda place: str(place.post(body | {"model": "missing"})[0]),
        "404",
    )
    yield held_nothing(server)


def answered_tokens(place: Endpoint, model: str) -> tuple[int, ...]:
    body = {"prompt": [5, 40, 77], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return tuple(place.post(body | {"model": model})[2]["choices"][0]["token_ids"])


def pooling(server: GuardedServer, proxy: Endpoint) -> Iterator[Row]:
    requests: list[tuple[str, dict[str, Any], Callable[[Any], str], str]] = [
        ("/v1/embeddings", {"input": TEXTS}, lambda answer: f"{len(answer['data'])} vectors", "3 vectors"),
        ("/pooling", {"input": TEXTS}, lambda answer: f"{len(answer['data'])} vectors", "3 vectors"),
        ("/score", {"text_1": "one", "text_2": TEXTS}, lambda answer: f"{answer['data'][0]['score']:.2f}", "1.00"),
        ("/rerank", {"query": "two", "documents": TEXTS}, lambda said: said["results"][0]["document"]["text"], "two"),
    ]
    for path, body, show, expected in requests:
        yield compare(
            path,
            (server, proxy),
            lambda place, path=path, body=body, show=show: show(place.post({"model": "tiny", **body}, path)[2]),
            expected,
        )
    yield compare(
        "an input over the context",
        (server, proxy),
        lambda place: str(place.post({"model": "tiny", "input": "x" * 600}, "/v1/embeddings")[0]),
        "400",
    )
    yield held_nothing(server)


def several(server: GuardedServer, proxy: Endpoint) -> Iterator[Row]:
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 100, "ignore_eos": True}

    def burst(place: Endpoint) -> str:
        with ThreadPoolExecutor(48) as threads:
            answers = list(threads.map(lambda _: place.post(body)[2]["usage"]["completion_tokens"], range(48)))
        return f"{Counter(answers)[100]} whole"

    def statuses(place: Endpoint) -> str:
        return ", ".join(
            f"{count} x {status}"
            for status, count in Counter(place.post(body | {"max_tokens": 1})[0] for _ in range(20)).items()
        )

    yield compare("48 at once", (server, proxy), burst, "48 whole")
    engines = [line for line in server.page().splitlines() if line.startswith("vllm:generation_tokens_total{")]
    busy = sum(float(line.rpartition(" ")[2]) > 0 for line in engines)
    yield Row("engines that worked", str(busy), "", busy == 2)
    drain(server, True)
    yield compare("20 while one API server was answer to drain", (server, proxy), statuses, "20 x 503")
    drain(server, False)
    yield compare("20 afterwards", (server, proxy), statuses, "20 x 200")
    yield held_nothing(server)


def realtime(server: GuardedServer, proxy: Endpoint) -> Iterator[Row]:
    inside, through = asyncio.run(talk(server.url)), asyncio.run(talk(proxy.url))
    yield Row("a spoken session", inside, through, inside == "session, deltas, done" and through == "501")


async def talk(url: str) -> str:
    """One session: audio in, text out; the kinds of events that came, or the status that refused it."""
    audio = base64.b64encode(b"\0\0" * 1600).decode()
    async with aiohttp.ClientSession() as session:
        try:
            async with session.ws_connect(
                f"{url}/v1/realtime", timeout=aiohttp.ClientWSTimeout(ws_receive=60)
            ) as socket:
                kinds = [(await socket.receive_json())["type"].partition(".")[0]]
                for event in (
                    {"type": "session.update", "model": "tiny"},
                    {"type": "input_audio_buffer.commit"},
                    {"type": "input_audio_buffer.append", "audio": audio},
                    {"type": "input_audio_buffer.append", "audio": audio},
                    {"type": "input_audio_buffer.commit", "final": True},
                ):
                    await socket.send_json(event)
                while kinds[-1] not in ("done", "error"):
                    answer = await socket.receive_json()
                    kind = {"transcription.delta": "deltas", "transcription.done": "done"}.get(answer["type"], "error")
                    kinds += [kind] if kind != kinds[-1] else []
                return ", ".join(kinds)
        except aiohttp.WSServerHandshakeError as refusal:
            return str(refusal.status)


def held_nothing(server: GuardedServer) -> Row:
    tokens = server.metric("legroom_guard_reserved_tokens")
    return Row("tokens reserved in the end", f"{tokens:.0f}", "", tokens == 0)


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
    answer = post_with_retries(pair.prefill, body | {"max_tokens": 1})
    return answer if answer[0] != 200 else post_with_retries(pair.decode, body)


def post_with_retries(place: Endpoint, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
    for _ in range(5):
        status, headers, answer = place.post(body)
        if status not in (429, 503):
            break
        time.sleep(min(float(headers.get("retry-after", 1)), 1.0))
    return status, headers, answer


def prompt(number: int) -> list[int]:
    return [5 + (number + place * 7) % 200 for place in range(PROMPT)]


def disaggregated(pair: Pair, servers: list[GuardedServer], first: int) -> Iterator[tuple[str, str, str]]:
    """What was sent, what came back, and what was expected."""
    body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    router = Router(pair)

    def both(metric: str) -> list[float]:
        return [server.metric(metric) for server in servers]

    try:
        admitted = both("legroom_guard_admitted_total")
        loaded = servers[1].metric("vllm:external_prefix_cache_hits_total")
        with ThreadPoolExecutor(REQUESTS) as threads:
            bodies = [body | {"prompt": prompt(first + number)} for number in range(REQUESTS)]
            answers = list(threads.map(router.endpoint.post, bodies))
        whole = Counter(
            f"{len(answer['choices'][0]['token_ids'])} tokens" if status == 200 else str(status)
            for status, _, answer in answers
        )
        counts = ", ".join(f"{count} x {what}" for what, count in whole.items())
        yield f"{REQUESTS} at once", counts, f"{REQUESTS} x {TOKENS} tokens"
        admitted = [now - was for now, was in zip(both("legroom_guard_admitted_total"), admitted, strict=True)]
        yield "admitted by each guard", " and ".join(f"{count:.0f}" for count in admitted), f"{REQUESTS} and {REQUESTS}"
        loaded = servers[1].metric("vllm:external_prefix_cache_hits_total") - loaded
        yield "prompt tokens from the prefill server", f"{loaded:.0f}", f"{REQUESTS * (PROMPT // 128) * 128}"
        alone = servers[0].post(bodies[0])[2]["choices"][0]["token_ids"]
        yield "the same tokens as from one server", str(answers[0][2]["choices"][0]["token_ids"] == alone), "True"
        last = body | {"prompt": prompt(first + 120), "max_tokens": 1}
        drain(servers[0], True)
        status, headers, _ = router.endpoint.post(last)
        shown = f"{status}{', Retry-After' if 'retry-after' in headers else ''}"
        yield "while the prefill server drains", shown, "503, Retry-After"
        drain(servers[0], False)
        yield "afterwards", str(router.endpoint.post(last)[0]), "200"
        reserved = both("legroom_guard_reserved_tokens")
        yield "tokens reserved in the end", " and ".join(f"{count:.0f}" for count in reserved), "0 and 0"
    finally:
        router.close()


def play_disaggregated(python: Path, folder: Path) -> list[Row]:
    with contextlib.ExitStack() as stack:
        model, files = write_model(folder / "tiny"), folder / "files"
        files.mkdir()
        servers = []
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            (folder / name).mkdir()
            connector = {"kv_connector": "ExampleConnector", "kv_role": role}
            connector |= {"kv_connector_extra_config": {"shared_storage_path": str(files)}}
            flags = (*COMMON, "--max-model-len", "1024", "--seed", "1", "--kv-transfer-config", json.dumps(connector))
            servers.append(stack.enter_context(guarded_server(python, folder / name, model, *flags)))
        proxies = [stack.enter_context(proxy_before(server))[0] for server in servers]
        inside = list(disaggregated(Pair(*servers), servers, 0))
        through = list(disaggregated(Pair(*proxies), servers, 50))
        pairs = zip(inside, through, strict=True)
        return [Row(sent, came, other, came == other == expected) for (sent, came, expected), (_, other, _) in pairs]


KINDS: dict[str, Checks] = {"lora": lora, "pooling": pooling, "several": several, "realtime": realtime}


def flags_of(kind: str, folder: Path) -> list[str]:
    own = {"pooling": "--runner pooling --convert embed", "several": "--data-parallel-size 2"}.get(kind, "")
    if kind == "lora":
        own = f"--enable-lora --max-lora-rank 8 --lora-modules tuned={write_lora(folder / 'lora')}"
    return [*COMMON, "--max-model-len", "512", *own.split()]


def realtime_plugin(folder: Path) -> str:
    """A folder that, on the path, gives vLLM the realtime model."""
    metadata = folder / "tiny_realtime-0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "tiny_realtime.py").write_text(REALTIME)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-realtime\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ntiny_realtime = tiny_realtime:register\n")
    return str(folder)


def play(python: Path, kind: str, folder: Path, also_on_path: str) -> list[Row]:
    if kind == "disaggregated":
        return play_disaggregated(python, folder)
    config: dict[str, Any] = {"architectures": ["TinyRealtime"]} if kind == "realtime" else {}
    paths = [also_on_path] if also_on_path else []
    paths += [realtime_plugin(folder / "plugin")] if kind == "realtime" else []
    model = write_model(folder / "tiny", **config)
    with (
        guarded_server(python, folder, model, *flags_of(kind, folder), PYTHONPATH=":".join(paths)) as server,
        proxy_before(server) as (proxy, _),
    ):
        return list(KINDS[kind](server, proxy))


def main() -> None:
    args = arguments(__doc__, "python:path", kinds=(*KINDS, "disaggregated"), path="", json=Path)
    results: dict[str, list[Row]] = {}
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            results[kind] = play(args.python, kind, Path(folder), args.path)
        for row in results[kind]:
            mark = "" if row.expected else "  NOT AS EXPECTED"
            print(f"{kind:13} {row.sent:42} {row.inside:24} {row.through:20}{mark}", flush=True)
    write_json(args.json, {kind: [row._asdict() for row in rows] for kind, rows in results.items()})
    sys.exit(not all(row.expected for rows in results.values() for row in rows))


if __name__ == "__main__":
    main()
