"""A server that shows vLLM's metrics as a test sets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Metrics:
    """What the next look will see. Counters grow by their rate with every look."""

    def __init__(self, **values: float) -> None:
        self.values = {"kv_use": 0.42, "running": 8, "waiting": 0, "preemptions": 0, "tokens": 1000} | values
        self.per_look = {"tokens": 400.0, "preemptions": 0.0}
        self.status = 200
        self.looks = 0

    def text(self) -> str:
        self.looks += 1
        for name, rate in self.per_look.items():
            self.values[name] += rate
        label, now = '{engine="0",model_name="tiny"}', self.values
        size = 'engine="0",num_gpu_blocks="1001",block_size="16",enable_prefix_caching="True"'
        return (
            f"# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{label} {now['kv_use']}\n"
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} {now['running']}\n"
            f"# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{label} {now['waiting']}\n"
            f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total{label} {now['preemptions']}\n"
            f"# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total{label} {now['tokens']}\n"
            f"# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total{label} {now['tokens'] * 3}\n"
            f"# TYPE vllm:prefix_cache_queries counter\nvllm:prefix_cache_queries_total{label} {now['tokens'] * 3}\n"
            f"# TYPE vllm:prefix_cache_hits counter\nvllm:prefix_cache_hits_total{label} {now['tokens']}\n"
            f"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{{size}}} 1\n"
        )


class Answering(BaseHTTPRequestHandler):
    """Says nothing of the requests that it answers."""

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(metrics: Metrics) -> Iterator[str]:
    class Handler(Answering):
        def do_GET(self) -> None:
            self.answer(metrics.text().encode() if metrics.status == 200 else b"no", metrics.status)

    with answering(Handler) as url:
        yield url


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server on loopback for as long as it is needed: its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
