"""Sweeps on a real Ray cluster of two nodes: what they find is what this machine finds, whatever is lost on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_node import NODE

from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.planning.search_space import CapacityGoal
from legroom.planning.sizing import named_gpus, size_models
from legroom.sweeps.ray_cluster import RayExecutor
from legroom.vllm.args import ServeArgs

LOAD = "poisson rate=2 requests=30 prompt=lognormal(600,0.8) output=lognormal(100,0.6)"
GIVEN = ["--model", "qwen3-8b", "--gpu", "l4", "--max-model-len", "8192", "--max-num-batched-tokens", "2048"]
SEARCH = ["simulate", "--synthetic", LOAD, *GIVEN, "--choose", "--json"]
MATRIX = ["size", "llama-3.1-8b", "llama-3.1-70b", "--gpu", "h100,l4,t4", "--concurrency", "32", "--matrix", "--json"]


def _legroom(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "legroom", *words], capture_output=True, timeout=120, check=False)


@contextmanager
def _by_value() -> Iterator[None]:
    """The functions of this file travel as code: the nodes have no tests."""
    from ray import cloudpickle

    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _sweep(cluster: Any, work: Callable[[Any, Any], Any], shared: Any, items: list[Any]) -> dict[int, Any]:
    with _by_value():
        return dict(RayExecutor(cluster.address).run(work, shared, items))


@pytest.mark.parametrize("words", [SEARCH, MATRIX], ids=["choose", "matrix"])
def test_the_answer_is_that_of_this_machine_byte_for_byte(cluster: Any, words: list[str]) -> None:
    here, there = _legroom(*words), _legroom(*words, "--ray", cluster.address)
    assert there.stderr == here.stderr + b"on Ray: 2 nodes with 2 cores\n"
    assert (there.returncode, there.stdout) == (here.returncode, here.stdout)


def test_progress_is_reported_cell_by_cell(cluster: Any) -> None:
    shares: list[float] = []
    goal, cards = CapacityGoal(4096, 1.0, (1, 2)), named_gpus("h100,l4")
    size_models(
        ["llama-3.1-8b"], release("0.32.0"), ServeArgs(), goal, cards, RayExecutor(cluster.address), shares.append
    )
    assert shares == [0.5, 1.0]


def _node(_shared: None, seconds: float) -> str:
    import ray

    time.sleep(seconds)
    return str(ray.get_runtime_context().get_node_id())


def test_every_node_works(cluster: Any) -> None:
    assert len(set(_sweep(cluster, _node, None, [0.2] * 12).values())) == 2


def test_workers_are_the_most_items_at_work_at_once(cluster: Any) -> None:
    with _by_value():
        began_s = time.monotonic()
        results = RayExecutor(cluster.address, workers=1).run(_node, None, [0.5] * 6)
        assert sorted(number for number, _ in results) == list(range(6))
    assert time.monotonic() - began_s >= 3.0


def _version(_shared: None, _item: int) -> str:
    import legroom

    return str(Path(legroom.__file__))


def test_the_nodes_run_the_legroom_of_this_machine_without_having_one(cluster: Any) -> None:
    import legroom

    (shipped,) = set(_sweep(cluster, _version, None, [0]).values())
    assert "py_modules" in shipped
    assert shipped != legroom.__file__


def _die_once(folder: str, number: int) -> int:
    mark = Path(folder, str(number))
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def test_an_item_whose_worker_was_killed_is_done_again(cluster: Any, tmp_path: Path) -> None:
    assert _sweep(cluster, _die_once, str(tmp_path), list(range(6))) == {n: n * n for n in range(6)}
    assert (tmp_path / "3").exists()


def _begin(folder: str, number: int) -> int:
    """Leaves its node's name, so that the test knows whose work it destroys."""
    import ray

    with Path(folder, ray.get_runtime_context().get_node_id()).open("a") as begun:
        begun.write(f"{number}\n")
    time.sleep(0.5)
    return number * number


def _killed_node(cluster: Any, folder: Path) -> str | None:
    """The name of a node that worked, once it was killed.

    Neither the head nor the node that this process, a driver, joined: all nodes are on this machine, Ray picks any of
    them, and a driver ends with its node.
    """
    import ray

    own = ray.get_runtime_context().get_node_id()
    for node in list(cluster.worker_nodes):
        if node.node_id != own and (folder / node.node_id).exists():
            os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            cluster.remove_node(node, allow_graceful=False)
            return str(node.node_id)
    return None


def _wait_until_known_to_be_dead(node_id: str) -> None:
    """Or the next driver joins what is left of it."""
    import ray

    deadline_s = time.monotonic() + 60
    while any(node["Alive"] and node["NodeID"] == node_id for node in ray.nodes()):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def test_a_node_that_is_lost_loses_nothing(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(**NODE)
    killed, results = None, {}
    with _by_value():
        for number, result in RayExecutor(cluster.address).run(_begin, str(tmp_path), list(range(24))):
            results[number] = result
            killed = killed or _killed_node(cluster, tmp_path)
            if killed and len(results) == 24:
                _wait_until_known_to_be_dead(killed)
    assert killed
    assert results == {number: number * number for number in range(24)}


def test_what_ray_prints_of_a_lost_node_is_not_in_the_answer(cluster: Any, capfd: Any, tmp_path: Path) -> None:
    cluster.add_node(**NODE)
    killed = None
    with _by_value():
        for _ in RayExecutor(cluster.address).run(_begin, str(tmp_path), list(range(8))):
            killed = killed or _killed_node(cluster, tmp_path)
            if killed:
                _wait_until_known_to_be_dead(killed)
    assert killed
    assert capfd.readouterr().out == ""  # Ray says "(raylet) Raylet is terminated" there, if it is quick enough


def _fail(_shared: None, number: int) -> int:
    raise LegroomError(f"number {number} is wrong", "give another")


def test_an_error_of_the_work_is_the_error_of_the_sweep(cluster: Any, monkeypatch: Any) -> None:
    import ray

    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", lambda reference, **_: cancelled.append(reference))
    with pytest.raises(LegroomError, match="number 7 is wrong") as raised:
        _sweep(cluster, _fail, None, [7])
    assert raised.value.hint == "give another"
    assert not cancelled  # Ray ends a driver that cancels a task whose error has just come


def _cores_in_use(address: str) -> float:
    """Asked in a process of its own: a driver stays the driver of one cluster."""
    code = (
        f"import ray; ray.init({address!r}, log_to_driver=False, logging_level='ERROR');"
        "print(ray.cluster_resources()['CPU'] - ray.available_resources().get('CPU', 0))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    return float(asked.stdout)


def test_ctrl_c_stops_the_tasks_of_the_cluster(cluster: Any) -> None:
    endless = "poisson rate=50 requests=300000 prompt=lognormal(2000,0.8) output=lognormal(900,0.6)"
    words = ["simulate", "--synthetic", endless, "--blocks", "4000", "--step-ms", "30", "--choose"]
    command = [sys.executable, "-m", "legroom", *words, "--ray", cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "on Ray" not in (line := process.stderr.readline()):
            assert line or process.poll() is None
        deadline_s = time.monotonic() + 60
        while _cores_in_use(cluster.address) == 0 and time.monotonic() < deadline_s:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        process.communicate(timeout=30)
    assert time.monotonic() - began_s < 15
    assert process.returncode == 130
    assert _cores_in_use(cluster.address) == 0
