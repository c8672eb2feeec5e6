"""A stand-in with vLLM's process shape, ready in a tenth of a second: API server, engine core, worker.

    stand_in_vllm.py serve MODEL --port N [--host H] [--max-model-len L] [--shutdown-timeout S] [any flag]

What it copies of vLLM 0.32: the engine core is a process of its own with a worker below it; when one of them dies the
API server prints an error and exits 0; SIGTERM ends the engine at once unless --shutdown-timeout gives requests time,
and with requests in flight and no such time the API server hangs; SIGINT ends everything. Worse than vLLM on
purpose: the engine and the worker never notice that the API server is gone.

STAND_IN_KV_TOKENS=N refuses a --max-model-len above N as vLLM does; STAND_IN_START_S waits before it is ready;
STAND_IN_EXIT=N ends with that code instead of starting; while the file STAND_IN_BROKEN is there, it ends with 1.
STAND_IN_LATE_THREAD ends the worker's first thread at once and its last a second after the engine, as a process with
much memory may.
STAND_IN_CGROUP=FOLDER puts it there first, as a container would; in it the prompt "eat" makes the engine take more
memory than it may.
`POST /v1/completions` takes `max_tokens` x 10 ms; the prompt "too much" runs it out of memory, "in pieces" out of
memory in one piece.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_BANNER = "(APIServer pid={pid}) INFO 11-15 05:57:09 [api_utils.py:347]  version 0.32.0"
_ARGS = "(APIServer pid={pid}) INFO 11-15 05:57:10 [api_utils.py:286] non-default args: {args}"
_SIZE = (
    "(EngineCore pid={pid}) INFO 11-15 05:57:24 [kv_cache_utils.py:2327] CPU KV cache size: {tokens:,} tokens, "
    "Maximum concurrency for {length:,} tokens per request: {times:.2f}x"
)
_SHORT = (
    "(EngineCore pid={pid}) ERROR 11-15 05:57:24 [core.py:1123] ValueError: To serve at least one request with the "
    "model's max seq len ({length}), ({need:.2f} GiB KV cache is needed, which is larger than the available KV cache "
    "memory ({have:.2f} GiB). Based on the available memory, the estimated maximum model length is {tokens}. Try "
    "increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
_OOM = (
    "(EngineCore pid=2) ERROR 11-15 05:58:00 [core.py:1123] torch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 512.00 MiB is free. "
    "Including non-PyTorch memory, this process has 78.50 GiB memory in use. Of the allocated memory 76.00 GiB is "
    "allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but unallocated."
)
_PIECES = _OOM.replace("76.00 GiB", "40.00 GiB").replace("500.00 MiB is res", "36.00 GiB is res")


def flag(words: list[str], name: str, default: str) -> str:
    return words[words.index(name) + 1] if name in words else default


class Server:
    """The API server: serves, watches its engine, drains."""

    def __init__(self, words: list[str]) -> None:
        self.model = words[1] if len(words) > 1 else "model"
        self.port, self.host = int(flag(words, "--port", "8000")), flag(words, "--host", "127.0.0.1")
        self.length = int(flag(words, "--max-model-len", "4096"))
        self.tokens = int(os.environ.get("STAND_IN_KV_TOKENS", "32768"))
        self.drain_s = float(flag(words, "--shutdown-timeout", "0"))
        self.running = 0
        self.started_s = time.time()
        self.stopping = False
        self.engine = 0

    def start(self) -> None:
        say(_BANNER.format(pid=os.getpid()))
        say(_ARGS.format(pid=os.getpid(), args={"model": self.model, "max_model_len": self.length}))
        reading, writing = os.pipe()
        self.engine = os.fork()
        if self.engine == 0:
            be_engine(self, writing)
        os.close(writing)
        os.read(reading, 1)  # as vLLM: nothing is served before the engine is ready, or has failed
        time.sleep(float(os.environ.get("STAND_IN_START_S", "0.05")))
        if self.length > self.tokens:
            os.waitpid(self.engine, 0)
            say("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
            sys.exit(1)
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=self.drain, daemon=True).start())
        signal.signal(signal.SIGINT, lambda *_: self.end())
        threading.Thread(target=self.watch_engine, daemon=True).start()
        ThreadingHTTPServer.daemon_threads = True
        http = ThreadingHTTPServer((self.host, self.port), handler_of(self))
        say("INFO:     Application startup complete.")
        http.serve_forever(poll_interval=0.05)

    def watch_engine(self) -> None:
        os.waitpid(self.engine, 0)
        if not self.stopping:
            say(f"(APIServer pid={os.getpid()}) ERROR 11-15 05:58:00 [async_llm.py:700] EngineDeadError: EngineCore")
            os._exit(0)

    def drain(self) -> None:
        self.stopping = True
        say("INFO:     Shutting down")
        until = time.monotonic() + self.drain_s
        while self.running and time.monotonic() < until:
            time.sleep(0.02)
        if self.running and not self.drain_s:
            os.kill(self.engine, signal.SIGKILL)
            say("INFO:     Waiting for connections to close. (CTRL+C to force quit)")
            time.sleep(3600)
        self.end()

    def end(self) -> None:
        self.stopping = True
        os.kill(self.engine, signal.SIGTERM)
        os._exit(0)


def be_engine(server: Server, ready: int) -> None:
    """The engine core; its worker below it. Neither looks at whether the API server lives."""
    if server.length > server.tokens:
        need, have = server.length / (1 << 14), server.tokens / (1 << 14)  # 64 KiB a token
        say(_SHORT.format(pid=os.getpid(), length=server.length, need=need, have=have, tokens=server.tokens))
        os._exit(1)
    worker = os.fork()
    if worker == 0:
        if "STAND_IN_LATE_THREAD" in os.environ:
            threading.Thread(target=outlive, args=(os.getppid(),)).start()
            ctypes.CDLL(None).pthread_exit(None)
        while True:
            time.sleep(3600)

    def stop(*_: object) -> None:
        os.kill(worker, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGUSR1, lambda *_: bytearray(1 << 30))
    times = server.tokens / server.length
    say(_SIZE.format(pid=os.getpid(), tokens=server.tokens, length=server.length, times=times))
    os.write(ready, b".")
    os.waitpid(worker, 0)
    os._exit(1)


def outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.01)
    time.sleep(1.0)


def handler_of(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.show_metrics()
            elif self.path == "/v1/models":
                self.answer({"data": [{"id": server.model, "max_model_len": server.length}]})
            else:
                self.answer({})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers.get("content-length", "0"))) or b"{}")
            if not self.path.startswith("/v1/"):
                self.answer({"detail": "Not Found"}, 404)
                return
            if asked.get("prompt") == "eat":
                os.kill(server.engine, signal.SIGUSR1)
            if asked.get("prompt") in ("too much", "in pieces"):
                say(_OOM if asked["prompt"] == "too much" else _PIECES)
                os.kill(server.engine, signal.SIGKILL)
            server.running += 1
            say("INFO:     Received request")
            try:
                time.sleep(0.01 * int(asked.get("max_tokens", 1)))
                text = "x" * int(asked.get("max_tokens", 1))
                usage = {"prompt_tokens": 1, "completion_tokens": int(asked.get("max_tokens", 1))}
                self.answer({"choices": [{"text": text, "finish_reason": "length"}], "usage": usage})
            finally:
                server.running -= 1

        def show_metrics(self) -> None:
            labels = f'engine="0",model_name="{server.model}"'
            text = (
                f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{labels}}} {server.running}.0\n"
                f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{{labels}}} 0.0\n"
                "# TYPE process_start_time_seconds gauge\n"
                f"process_start_time_seconds {server.started_s}\n"
            )
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def answer(self, document: object, status: int = 200) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            say(f'INFO:     127.0.0.1:1 - "{self.command} {self.path} HTTP/1.1" 200 OK')

    return Handler


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    words = sys.argv[1:]
    if words[:1] != ["serve"]:
        sys.exit("usage: stand_in_vllm.py serve MODEL ...")
    if "STAND_IN_CGROUP" in os.environ:
        Path(os.environ["STAND_IN_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    if "STAND_IN_EXIT" in os.environ:
        sys.exit(int(os.environ["STAND_IN_EXIT"]))
    broken = os.environ.get("STAND_IN_BROKEN")
    if broken and Path(broken).exists():
        sys.exit("RuntimeError: some passing trouble")
    Server(words).start()


if __name__ == "__main__":
    main()
