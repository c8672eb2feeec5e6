"""`legroom watch --prometheus --once`: one question is not one scrape, because Prometheus remembers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs

from metrics_server import Answering, answering

from legroom.cli.main import main

SCRAPE_S = 15.0
PRESSED = {"vllm:num_requests_running": 30.0, "vllm:num_requests_waiting": 500.0, "vllm:kv_cache_usage_perc": 0.99}


def rows(query: str, time_s: float, values: dict[str, float]) -> list[dict[str, object]]:
    """What Prometheus answers of one server that it scrapes every SCRAPE_S seconds."""
    if query == "up":
        return []
    scraped_s = time_s // SCRAPE_S * SCRAPE_S
    shown = values | {"vllm:generation_tokens_total": scraped_s, "vllm:request_success_total": scraped_s}
    labels = {"instance": "gpu1:8000", "model_name": "m", "engine": "0"}
    if query.startswith("timestamp"):
        return [{"metric": labels, "value": [time_s, str(scraped_s)]}]
    return [{"metric": labels | {"__name__": name}, "value": [time_s, str(value)]} for name, value in shown.items()]


@contextmanager
def prometheus(values: dict[str, float]) -> Iterator[str]:
    class Handler(Answering):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            found = rows(form["query"][0], float(form.get("time", [str(time.time())])[0]), values)
            body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": found}}).encode()
            self.answer(body)

    with answering(Handler) as url:
        yield url


def test_a_server_in_trouble_is_found_at_once(capsys):
    with prometheus(PRESSED) as url:
        assert main(["watch", "--prometheus", url, "--once"]) == 1
    assert "500" in capsys.readouterr().out
