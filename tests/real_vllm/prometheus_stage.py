"""A real Prometheus that scrapes a real vLLM, a guard and the sidecar while a load provokes alerts.

The rules are those of `legroom export prometheus --vllm 0.32.0 --speed-up 10`: every window and `for` is a tenth.
In each phase exactly the expected alerts must fire; when the load ends, all must resolve.

    python tests/real_vllm/prometheus_stage.py VLLM_PYTHON PROMETHEUS MINUTES

is the quiet hour: the rules as they are exported, so long under a steady load, so long idle, so long under load again.
No alert may fire, and no request fail.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tiny_models
from client_loads import Client, crowd

from legroom.exports.export_request import ExportRequest
from legroom.exports.grafana import dashboard
from legroom.exports.prometheus import rules
from legroom.facts.releases import release

SPEED_UP = 10
BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS = 17, 128, 12
"""Sixteen usable blocks: a dozen requests of one block have room, four of four blocks fill the pool."""
SETTLE_S = 150
"""The longest `for` of a phase's alerts (24 s), the rate window (12 s), and a machine that is slow."""

Load = Callable[[Client], Awaitable[None]]


async def keep(client: Client, count: int, prompt: int, output: int) -> None:
    """That many requests open at any time."""
    while True:
        while client.open < count:
            client.send(client.tokens(prompt), output)
        await asyncio.sleep(0.1)


async def healthy(client: Client) -> None:
    """A few small requests, half of them with a beginning that was seen before."""
    while True:
        while client.open < 4:
            client.send(client.prefixes[0][:256] if client.random.random() < 0.5 else client.tokens(64), 40)
        await asyncio.sleep(0.2)


@dataclass(frozen=True)
class Phase:
    """A load, the alerts that it must raise, and those that it may raise beside them."""

    name: str
    load: Load
    fires: frozenset[str]
    may: frozenset[str] = frozenset()
    inject: Callable[[Stage], None] | None = None
    undo: Callable[[Stage], None] | None = None


def _pressure(client: Client) -> Awaitable[None]:
    return crowd(client, 150, 400, 110)  # four blocks from start to end: four fill the pool, and none is preempted


def _thrash(client: Client) -> Awaitable[None]:
    return keep(client, 24, 24, 700)  # one block at first, six in the end


def _backlog(client: Client) -> Awaitable[None]:
    return crowd(client, 400, 40, 85)  # one block each: the batch is the limit, not the pool


async def _steady(client: Client) -> None:
    """Answers of different lengths, so that something runs at any moment: an engine that is stopped between two batches
    shows no requests at all."""
    while True:
        while client.open < 3:
            client.send(client.tokens(32), client.random.randint(100, 450))
        await asyncio.sleep(0.1)


PHASES = (
    Phase("healthy", healthy, frozenset()),
    Phase("pressure", _pressure, frozenset({"VllmKvPressure", "VllmKvPressureCritical"})),
    # Whether as many wait as run changes with every preemption, so the critical one may come and go.
    Phase(
        "thrash", _thrash, frozenset({"VllmKvPressure", "VllmPreemptionThrash"}), frozenset({"VllmKvPressureCritical"})
    ),
    Phase("backlog", _backlog, frozenset({"VllmQueueBacklog"})),
    Phase(
        "stuck",
        _steady,
        frozenset({"VllmEngineStuck"}),
        inject=lambda stage: stage.engine().suspend(),
        undo=lambda stage: stage.engine().resume(),
    ),
    Phase(
        "down",
        _steady,
        frozenset({"VllmDown"}),
        inject=lambda stage: stage.stop_server(),
        undo=lambda stage: stage.start_server(),
    ),
)


@dataclass
class Stage:
    """Everything that runs."""

    folder: Path
    python: Path
    prometheus: str
    ports: Iterator[int]
    speed_up: int = SPEED_UP
    stack: ExitStack = field(default_factory=ExitStack)
    server: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        # Each port is drawn when it is about to be used: vLLM opens sockets of its own while it starts.
        self.vllm_port = next(self.ports)
        self.url = f"http://127.0.0.1:{self.vllm_port}"
        self.guard_port = self.watch_port = 0
        self.guard_url = self.prometheus_url = ""
        self.model = tiny_models.write_model(self.folder / "tiny")
        self.beside_vllm = tiny_models.beside_vllm(self.folder)
        self.began_s = time.time()

    def launch(self, name: str, words: list[str], **env: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("wb")
        child = subprocess.Popen(
            words, env=os.environ | env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=self.folder
        )
        self.stack.callback(_end, child)
        return child

    def start_server(self) -> None:
        words = tiny_models.serve_words(
            self.python,
            self.model,
            self.vllm_port,
            "--dtype",
            "float32",
            "--served-model-name",
            "tiny",
            "--max-model-len",
            "1024",
            "--kv-cache-memory-bytes",
            "16M",
            "--num-gpu-blocks-override",
            str(BLOCKS),
            "--block-size",
            str(BLOCK_SIZE),
            "--max-num-seqs",
            str(MAX_NUM_SEQS),
        )
        inside = {"PYTHONPATH": self.beside_vllm, "LEGROOM_WORKER_MEMORY": "1"}
        self.server = self.launch("vllm", words, **tiny_models.SERVE_ENV, **inside)
        self.wait_until(lambda: self.has_ended() or _answers(f"{self.url}/health"), 600, "vLLM to serve")
        if self.has_ended():
            raise RuntimeError(f"vLLM ended: {(self.folder / 'vllm.log').read_text(errors='replace')[-2000:]}")

    def has_ended(self) -> bool:
        return self.server is not None and self.server.poll() is not None

    def stop_server(self) -> None:
        assert self.server
        _end(self.server)

    def engine(self) -> psutil.Process:
        assert self.server
        children = psutil.Process(self.server.pid).children(recursive=True)
        return next(child for child in children if "EngineCore" in " ".join([child.name(), *child.cmdline()]))

    def start_companions(self) -> None:
        legroom = [sys.executable, "-m", "legroom"]
        self.guard_port, self.watch_port = next(self.ports), next(self.ports)
        self.guard_url = f"http://127.0.0.1:{self.guard_port}"
        home = {"LEGROOM_HOME": str(self.folder / "home")}
        self.launch("guard", [*legroom, "guard", "--upstream", self.url, "--port", str(self.guard_port)], **home)
        config = self.folder / "watch.toml"
        config.write_text(f'port = {self.watch_port}\ninterval_s = 2\n[[servers]]\nurl = "{self.url}"\n')
        self.launch("watch", [*legroom, "watch", "--daemon", "--config", str(config)], **home)
        self.wait_until(lambda: _answers(f"{self.guard_url}/metrics"), 60, "the guard")
        self.wait_until(lambda: _answers(f"http://127.0.0.1:{self.watch_port}/metrics"), 60, "the sidecar")

    def start_prometheus(self) -> None:
        options = {
            "speed_up": str(self.speed_up),
            "target": [f"127.0.0.1:{self.vllm_port}"],
            "guard": [f"127.0.0.1:{self.guard_port}"],
            "watch": [f"127.0.0.1:{self.watch_port}"],
        }
        for file in rules.files(ExportRequest(release("0.32.0"), None, options)):
            path = self.folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text)
        address = f"127.0.0.1:{next(self.ports)}"
        self.prometheus_url = f"http://{address}"
        self.launch(
            "prometheus",
            [
                self.prometheus,
                f"--config.file={self.folder / rules.CONFIG_FILE}",
                f"--storage.tsdb.path={self.folder / 'tsdb'}",
                f"--web.listen-address={address}",
            ],
        )
        self.wait_until(lambda: _answers(f"{self.prometheus_url}/-/ready"), 60, "Prometheus")
        self.began_s = time.time()

    def wait_until(self, true: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                logs = {path.name: path.read_text(errors="replace")[-1500:] for path in self.folder.glob("*.log")}
                raise TimeoutError(f"waited {seconds:.0f} s for {what}: {json.dumps(logs, indent=1)}")
            time.sleep(0.5)

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.prometheus_url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=30
        ) as answer:
            return json.loads(answer.read())["data"]

    def firing(self) -> set[str]:
        """The alerts that fire now."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"}

    def returns_data(self, expr: str) -> bool:
        """Whether an expression of the dashboard had any value since the start."""
        for name, value in {
            "$__rate_interval": "12s",
            "$__interval": "5s",
            "$model": ".*",
            "$cluster": ".*",
            "$namespace": ".*",
            "$job": ".*",
            "$instance": ".*",
        }.items():
            expr = expr.replace(name, value)
        found = self.get("query_range", query=expr, start=str(self.began_s), end=str(time.time()), step="2")
        return any(value != "NaN" for series in found["result"] for _, value in series["values"])


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                continue
    # The engine may outlive the API server that was interrupted.
    if _group_is_alive(child.pid):
        os.killpg(child.pid, signal.SIGKILL)


def _group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def running_stage(
    python: Path, prometheus_tool: str, ports: Iterator[int], speed_up: int = SPEED_UP
) -> Iterator[Stage]:
    """A server, a guard, a sidecar and a Prometheus, all ended at the end."""
    with tempfile.TemporaryDirectory() as folder:
        stage = Stage(Path(folder), python, prometheus_tool, ports, speed_up)
        with stage.stack:
            stage.start_server()
            stage.start_companions()
            stage.start_prometheus()
            yield stage


@dataclass
class PhaseOutcome:
    """What a phase brought."""

    phase: Phase
    fired: set[str]
    fired_after_s: float | None
    resolved_after_s: float | None

    @property
    def problems(self) -> list[str]:
        found = [f"{name} did not fire" for name in sorted(self.phase.fires - self.fired)]
        found += [f"{name} fired" for name in sorted(self.fired - self.phase.fires - self.phase.may)]
        return found + (["alerts did not resolve"] if self.resolved_after_s is None else [])


async def play(stage: Stage, phase: Phase, healthy_s: float = 40) -> PhaseOutcome:
    """The load until its alerts fire (a healthy one: for a while), then nothing until they are gone."""
    fired: set[str] = set()
    began = time.monotonic()
    fired_after = None
    async with Client(stage.url, "tiny") as client, Client(stage.guard_url, "tiny") as guarded:
        tasks = [asyncio.create_task(phase.load(client))]
        if phase.name == "healthy":
            tasks.append(
                asyncio.create_task(keep(guarded, 2, 32, 20))
            )  # through the guard, so that it has something to say
        if phase.inject:
            await asyncio.sleep(5)
            await asyncio.to_thread(phase.inject, stage)
        limit = healthy_s if not phase.fires else SETTLE_S
        while time.monotonic() - began < limit:
            fired |= await asyncio.to_thread(stage.firing)
            if phase.fires and phase.fires <= fired:
                fired_after = time.monotonic() - began
                await asyncio.sleep(5)  # long enough for one more to show that should not
                fired |= await asyncio.to_thread(stage.firing)
                break
            await asyncio.sleep(1)
        if phase.undo:
            await asyncio.to_thread(phase.undo, stage)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ended = time.monotonic()
    while time.monotonic() - ended < SETTLE_S:
        now = await asyncio.to_thread(stage.firing)
        fired |= now
        if not now:
            return PhaseOutcome(phase, fired, fired_after, time.monotonic() - ended)
        await asyncio.sleep(1)
    return PhaseOutcome(phase, fired, fired_after, None)


def dashboard_expressions() -> list[tuple[str, str]]:
    """(where, expression) of everything that the dashboard asks."""
    (file,) = dashboard.files(ExportRequest(release("0.32.0"), None, {}))
    document = json.loads(file.text)
    found = [(panel["title"], target["expr"]) for panel in document["panels"] for target in panel.get("targets", ())]
    return found + [(f"annotation {one['name']}", one["expr"]) for one in document["annotations"]["list"]]


ON_GPUS_ALONE = "legroom_worker_reserved_bytes"
"""What PyTorch's allocator holds of a GPU: a CPU server has none."""


def empty_expressions(stage: Stage) -> list[str]:
    """Expressions that never had a value, those on GPUs left out."""
    asked = [(title, expr) for title, expr in dashboard_expressions() if ON_GPUS_ALONE not in expr]
    return [f"{title}: {expr}" for title, expr in asked if not stage.returns_data(expr)]


async def _arrivals(client: Client, per_s: float) -> None:
    """Short requests, half of them with a beginning that was seen before."""
    while per_s:
        await asyncio.sleep(client.random.expovariate(per_s))
        new = client.tokens(client.random.randint(32, 200))
        client.send(new if client.random.random() < 0.5 else client.prefixes[0][:256], client.random.randint(10, 60))


async def quiet(stage: Stage, minutes: float) -> None:
    """Every alert that is pending or fires while nothing is wrong."""
    for name, per_s in (("steady", 0.7), ("idle", 0.0), ("steady again", 0.7)):
        seen: dict[str, int] = {}
        async with Client(stage.guard_url, "tiny") as client:
            task = asyncio.create_task(_arrivals(client, per_s))
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                for alert in (await asyncio.to_thread(stage.get, "alerts"))["alerts"]:
                    key = f"{alert['labels']['alertname']} {alert['state']}"
                    seen[key] = seen.get(key, 0) + 1
                await asyncio.sleep(5)
            task.cancel()
            print(f"{name}: {client.done} answered, {client.failed} failed; alerts: {seen or 'none'}", flush=True)
    groups = stage.get("rules")["groups"]
    broken = [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"]
    print(f"{sum(len(group['rules']) for group in groups)} rules, {len(broken)} that could not be evaluated")


if __name__ == "__main__":
    with running_stage(Path(sys.argv[1]).absolute(), sys.argv[2], iter(range(18620, 18700)), speed_up=1) as running:
        asyncio.run(quiet(running, float(sys.argv[3])))
