"""Every kind of server that a real vLLM on a CPU can be, behind the guard: inside of it, and through the proxy.

    python bench/guard_kinds.py VENV/bin/python [--kinds lora,pooling,several,realtime] [--also-on-path DIR]

Each kind is served once with the middleware, and the proxy stands in front of it; the same requests go to both:

- lora: a base model and an adapter of it, by the request's `model`;
- pooling: /v1/embeddings, /score, /rerank and /pooling of an embedding model;
- several: two data-parallel engines behind two API servers, 48 requests at once, and a drain that both obey;
- realtime: a WebSocket at /v1/realtime, which takes audio and streams text. The model is a Llama that answers each
  piece of audio with tokens, so that no audio model is needed. uvicorn needs `websockets` for it, which may be in a
  folder of its own (`--also-on-path`).

A row says what was asked, what the middleware and the proxy answered, and whether that is what was to be expected.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/real_vllm"))
from guarded_server import TOKEN, Endpoint, GuardedServer, guarded_server, proxy_before
from tiny_models import write_lora, write_model

TEXTS = ["one", "two", "three"]
COMMON = ("--max-model-len", "512", "--kv-cache-memory-bytes", "16M")
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
    asked: str
    inside: str
    through: str
    expected: bool


Checks = Callable[[GuardedServer, Endpoint], Iterator[Row]]


def compare(asked: str, places: tuple[Endpoint, Endpoint], look: Callable[[Endpoint], str], good: str) -> Row:
    inside, through = (look(place) for place in places)
    return Row(asked, inside, through, inside == through == good)


def lora(server: GuardedServer, proxy: Endpoint) -> Iterator[Row]:
    wish = {"prompt": [5] * 20, "max_tokens": 8, "ignore_eos": True}
    yield compare(
        "an adapter by its name",
        (server, proxy),
        lambda place: str(place.post(wish | {"model": "tuned"})[2]["model"]),
        "tuned",
    )
    inside, through = (len({answered_tokens(place, model) for model in ("tiny", "tuned")}) for place in (server, proxy))
    yield Row("different tokens of base model and adapter", str(inside), str(through), inside == through == 2)
    yield compare(
        "an adapter that is not there",
        (server, proxy),
        lambda place: str(place.post(wish | {"model": "nobody"})[0]),
        "404",
    )
    yield held_nothing(server)


def answered_tokens(place: Endpoint, model: str) -> tuple[int, ...]:
    wish = {"prompt": [5, 40, 77], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return tuple(place.post(wish | {"model": model})[2]["choices"][0]["token_ids"])


def pooling(server: GuardedServer, proxy: Endpoint) -> Iterator[Row]:
    asked: list[tuple[str, dict[str, Any], Callable[[Any], str], str]] = [
        ("/v1/embeddings", {"input": TEXTS}, lambda told: f"{len(told['data'])} vectors", "3 vectors"),
        ("/pooling", {"input": TEXTS}, lambda told: f"{len(told['data'])} vectors", "3 vectors"),
        ("/score", {"text_1": "one", "text_2": TEXTS}, lambda told: f"{told['data'][0]['score']:.2f}", "1.00"),
        ("/rerank", {"query": "two", "documents": TEXTS}, lambda told: told["results"][0]["document"]["text"], "two"),
    ]
    for path, body, look, good in asked:
        yield compare(
            path,
            (server, proxy),
            lambda place, path=path, body=body, look=look: look(place.post({"model": "tiny", **body}, path)[2]),
            good,
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

    def drain(on: bool) -> None:
        server.post({"on": on}, "/-/legroom/drain", authorization=f"Bearer {TOKEN}")

    def statuses(place: Endpoint) -> str:
        return ", ".join(
            f"{count} x {status}"
            for status, count in Counter(place.post(body | {"max_tokens": 1})[0] for _ in range(20)).items()
        )

    yield compare("48 at once", (server, proxy), burst, "48 whole")
    engines = [line for line in server.page().splitlines() if line.startswith("vllm:generation_tokens_total{")]
    busy = sum(float(line.rpartition(" ")[2]) > 0 for line in engines)
    yield Row("engines that worked", str(busy), "", busy == 2)
    drain(True)
    yield compare("20 while one API server was told to drain", (server, proxy), statuses, "20 x 503")
    drain(False)
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
                    told = await socket.receive_json()
                    kind = {"transcription.delta": "deltas", "transcription.done": "done"}.get(told["type"], "error")
                    kinds += [kind] if kind != kinds[-1] else []
                return ", ".join(kinds)
        except aiohttp.WSServerHandshakeError as refusal:
            return str(refusal.status)


def held_nothing(server: GuardedServer) -> Row:
    tokens = server.metric("legroom_guard_reserved_tokens")
    return Row("tokens reserved in the end", f"{tokens:.0f}", "", tokens == 0)


KINDS: dict[str, Checks] = {"lora": lora, "pooling": pooling, "several": several, "realtime": realtime}


def flags_of(kind: str, folder: Path) -> tuple[str, ...]:
    if kind == "lora":
        return ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"tuned={write_lora(folder / 'lora')}")
    return {"pooling": ("--runner", "pooling", "--convert", "embed"), "several": ("--data-parallel-size", "2")}.get(
        kind, ()
    )


def realtime_plugin(folder: Path) -> str:
    """A folder that, on the path, gives vLLM the realtime model."""
    metadata = folder / "tiny_realtime-0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "tiny_realtime.py").write_text(REALTIME)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-realtime\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ntiny_realtime = tiny_realtime:register\n")
    return str(folder)


def play(python: Path, kind: str, folder: Path, also_on_path: str) -> list[Row]:
    config: dict[str, Any] = {"architectures": ["TinyRealtime"]} if kind == "realtime" else {}
    paths = [also_on_path] if also_on_path else []
    paths += [realtime_plugin(folder / "plugin")] if kind == "realtime" else []
    model = write_model(folder / "tiny", **config)
    with (
        guarded_server(python, folder, model, *COMMON, *flags_of(kind, folder), PYTHONPATH=":".join(paths)) as server,
        proxy_before(server) as (proxy, _),
    ):
        return list(KINDS[kind](server, proxy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", type=Path, help="vLLM's Python")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--also-on-path", default="", metavar="DIR")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, list[Row]] = {}
    for kind in args.kinds.split(","):
        with tempfile.TemporaryDirectory() as folder:
            results[kind] = play(args.python, kind, Path(folder), args.also_on_path)
        for row in results[kind]:
            mark = "" if row.expected else "  NOT AS EXPECTED"
            print(f"{kind:9} {row.asked:42} {row.inside:24} {row.through:20}{mark}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({kind: [row._asdict() for row in rows] for kind, rows in results.items()}))
    sys.exit(not all(row.expected for rows in results.values() for row in rows))


if __name__ == "__main__":
    main()
