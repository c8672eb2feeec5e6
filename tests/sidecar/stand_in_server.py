"""A stand-in for vLLM where only its being restarted matters: a process with /metrics that can be told to hang.

    python stand_in_server.py PORT FOLDER

Files in FOLDER steer it: while `stuck` is there three requests run and no token comes, while `busy` holds a number so
many run and finish nothing but tokens come. A start takes `stuck` away, writes `pid`, and adds a line to `starts` with
the action that asked for it. `draining` is there while a drain is on. It is no vLLM: it serves no completions.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
STARTED_S = time.time()
TEXT = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.25
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{{engine="0",model_name="m"}} 0.0
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {tokens}
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started}
"""
tokens = [1.0]  # it has served before


def metrics():
    stuck = (FOLDER / "stuck").exists()
    busy = (FOLDER / "busy").read_text() if (FOLDER / "busy").exists() else "0"
    if not stuck:
        tokens[0] = 1.0 + int((time.time() - STARTED_S) * 1000)
    return TEXT.format(running=3.0 if stuck else float(busy or 0), tokens=tokens[0], started=STARTED_S)


class Pages(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, text, status=200):
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/metrics":
            self.answer(metrics())
        else:
            self.answer(json.dumps({"draining": (FOLDER / "draining").exists(), "running": 0, "waiting": 0}))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.headers.get("Authorization") != "Bearer guard-token":
            self.answer("{}", 403)
        elif asked.get("on"):
            (FOLDER / "draining").touch()
            self.answer("{}")
        else:
            (FOLDER / "draining").unlink(missing_ok=True)
            self.answer("{}")


class Server(ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True


server = Server(("127.0.0.1", PORT), Pages)
(FOLDER / "stuck").unlink(missing_ok=True)
(FOLDER / "draining").unlink(missing_ok=True)
(FOLDER / "pid.new").write_text(str(os.getpid()))
(FOLDER / "pid.new").rename(FOLDER / "pid")
with (FOLDER / "starts").open("a") as starts:
    starts.write(f"{os.environ.get('LEGROOM_ACTION', 'first')} {os.getpid()}\n")
server.serve_forever()
