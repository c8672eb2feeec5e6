"""What `legroom export` writes for the nodes of a group, read and checked by a real vLLM's own `vllm serve`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import SERVE_ENV

from legroom import plan
from legroom.exports.deploy import kserve, kubernetes
from legroom.exports.export_request import ExportRequest
from legroom.planning.plan_document import plan_from_json

DENSE = ("llama-3.1-405b", "h100", {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "max_model_len": 16384})
WIDE = ("deepseek-v3", "h200", {"data_parallel_size": 16, "enable_expert_parallel": True, "max_model_len": 16384})
POD = {"LWS_LEADER_ADDRESS": "leader.group", "LWS_WORKER_INDEX": "1", "VLLM_HOST_IP": "10.0.0.1"}
"""What LeaderWorkerSet and the kubelet tell a group's second pod."""
READ = """
import json, sys
from vllm.entrypoints.cli import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

starts = []
serve.run_headless = lambda args: starts.append("headless")
serve.run_multi_api_server = lambda args: starts.append("api servers")
serve.run_server = lambda args: starts.append("api server")
serve.uvloop.run = lambda coroutine: None
command = serve.ServeSubcommand()
parser = command.subparser_init(FlexibleArgumentParser().add_subparsers(dest="subparser"))
answers = []
for words in json.load(sys.stdin):
    try:
        args = parser.parse_args(words)
        command.validate(args)
        command.cmd(args)
        names = ("data_parallel_start_rank", "data_parallel_rank", "node_rank", "nnodes", "api_server_count",
                 "data_parallel_address", "master_addr", "data_parallel_size_local")
        answers.append({"start": starts.pop(), **{name: getattr(args, name) for name in names}})
    except (Exception, SystemExit) as error:
        answers.append({"start": f"refused: {error}"})
print("\\n" + json.dumps(answers))
"""
"""All of `vllm serve` but the start."""


def asked(planned: tuple[str, str, dict[str, Any]], *words: str, **options: Any) -> ExportRequest:
    model, gpu, flags = planned
    made = plan(model, gpu, vllm="0.32.0", advice=False, **flags).json()
    made["command"] = [*made["command"], *words]
    document = plan_from_json(made)
    return ExportRequest(document.release, document, options)


LOCAL = ("--data-parallel-size-local", "8")
GROUPS = {
    "ranks": (DENSE, "--nnodes", "2"),
    "copies": (WIDE, "--api-server-count", "4"),
    "hybrid": (WIDE, "--data-parallel-hybrid-lb", *LOCAL),
    "external": (("llama-3.1-8b", "h100", {"data_parallel_size": 2}), "--data-parallel-external-lb"),
}


def containers(request_: ExportRequest) -> Iterator[dict[str, Any]]:
    """The first pod's, then that of the others."""
    for document in yaml.safe_load_all(kubernetes.files(request_)[-1].text):
        if document["kind"] == "LeaderWorkerSet":
            group = document["spec"]["leaderWorkerTemplate"]
            for role in ("leader", "worker"):
                yield group[f"{role}Template"]["spec"]["containers"][0]


def kserve_words(request_: ExportRequest) -> Iterator[list[str]]:
    """As its template of several nodes (0.20.0, config-llm-worker-data-parallel.yaml) starts the two kinds of pods."""
    (file,) = kserve.files(request_)
    spec = yaml.safe_load(file.text)["spec"]
    sizes = spec["parallelism"]
    for part, more in (("template", "--api-server-count 8"), ("worker", "--headless")):
        theirs = (
            f"/mnt/models --port 8000 {more} --tensor-parallel-size {sizes['tensor']} --data-parallel-size "
            f"{sizes['data']} --data-parallel-size-local {sizes['dataLocal']} --data-parallel-address 10.0.0.1 "
            f"--data-parallel-rpc-port 5555 --data-parallel-start-rank {0 if part == 'template' else 8}"
        )
        yield [*theirs.split(), *shlex.split(" ".join(spec[part]["containers"][0]["args"]))]


def started(container: dict[str, Any], stub: Path) -> list[str]:
    """The words that reach vllm from a container, after the kubelet and its shell."""
    words = [*container["command"], *container["args"]]
    for name, value in POD.items():
        words = [word.replace(f"$({name})", value) for word in words]
    env = {**POD, "PATH": f"{stub}:/usr/bin:/bin"}
    done = subprocess.run([word.replace("$$", "$") for word in words], env=env, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[1:-1]


@pytest.fixture(scope="module")
def read(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], ...]]:
    """What a real vLLM makes of the first and of the second pod of every group."""
    stub = tmp_path_factory.mktemp("stub")
    (stub / "vllm").write_text("#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n")
    (stub / "vllm").chmod(0o755)
    words = [started(each, stub) for group in GROUPS.values() for each in containers(asked(*group))]
    words += kserve_words(asked(WIDE, "--api-server-count", "4"))
    done = subprocess.run(
        [str(vllm_python), "-c", READ],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **SERVE_ENV},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    pairs = zip(answers[::2], answers[1::2], strict=True)
    return dict(zip([*GROUPS, "kserve"], pairs, strict=True))


def test_nodes_that_share_ranks_are_told_apart(read: dict[str, tuple[dict[str, Any], ...]]) -> None:
    leader, worker = read["ranks"]
    assert (leader["start"], leader["node_rank"], leader["master_addr"]) == ("api server", 0, "10.0.0.1")
    assert (worker["start"], worker["node_rank"], worker["master_addr"]) == ("headless", 1, "leader.group")


def test_a_node_of_copies_starts_behind_those_of_the_first(read: dict[str, tuple[dict[str, Any], ...]]) -> None:
    leader, worker = read["copies"]
    assert (leader["start"], leader["api_server_count"]) == ("api servers", 4)
    assert (worker["start"], worker["data_parallel_start_rank"]) == ("headless", 8)


def test_every_node_behind_a_hybrid_balancer_has_its_own_api_servers(
    read: dict[str, tuple[dict[str, Any], ...]],
) -> None:
    assert [(each["start"], each["data_parallel_start_rank"]) for each in read["hybrid"]] == [
        ("api servers", 0),
        ("api servers", 8),
    ]


def test_every_copy_behind_an_external_balancer_has_its_rank(read: dict[str, tuple[dict[str, Any], ...]]) -> None:
    assert [(each["start"], each["data_parallel_rank"]) for each in read["external"]] == [
        ("api server", 0),
        ("api server", 1),
    ]


def test_kserves_own_words_and_the_exported_ones_start_both_kinds_of_pods(
    read: dict[str, tuple[dict[str, Any], ...]],
) -> None:
    leader, worker = read["kserve"]
    assert (leader["start"], leader["api_server_count"]) == ("api servers", 4)
    assert (worker["start"], worker["data_parallel_start_rank"]) == ("headless", 8)
