"""What a worker reads of its allocator, and how often: stand-ins for torch and vLLM."""

from __future__ import annotations

import subprocess
import sys

from worker_stand_in import GIB, MIB, SEGMENTS

from legroom.worker import worker_memory
from legroom.worker.worker_memory import WorkerMemory


def test_every_figure_of_the_allocator_and_the_host_is_a_gauge(worker):
    (memory,) = worker_memory.read_worker_memory()
    assert memory == WorkerMemory(
        0,
        "3",
        70 * GIB,
        7 * GIB,
        4 * GIB,
        5 * GIB,
        2 * GIB,
        GIB,
        GIB,
        GIB,
        GIB,
        6 * GIB,
        3,
        memory.host_rss_bytes,
        5 * MIB,
    )


def test_the_peak_is_that_since_the_last_look(worker):
    worker_memory.read_worker_memory()
    assert worker.resets == [0]


def test_the_peak_is_left_alone_while_vllm_sizes_its_cache_by_it(worker, monkeypatch):
    monkeypatch.setattr(worker_memory, "is_profiling", lambda: True)
    worker_memory.read_worker_memory()
    assert worker.resets == []


def test_a_thread_that_measures_its_peak_is_seen_from_another():
    code = """
import threading, time
from legroom.worker.worker_memory import is_profiling
def determine_available_memory():
    time.sleep(30)
threading.Thread(target=determine_available_memory, daemon=True).start()
while not is_profiling(): time.sleep(0.01)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_segments_are_listed_no_more_often_than_they_cost(worker):
    now, listed = [0.0], []

    def snapshot():
        listed.append(now[0])
        now[0] += 0.01
        return list(SEGMENTS)

    worker.cuda.memory_snapshot = snapshot
    paced = worker_memory.PacedSums(lambda: now[0])
    for _ in range(12):
        assert paced.read(worker.cuda, 0)["largest_free_bytes"] == GIB
        now[0] += 5
    assert len(listed) == 3  # 10 ms each: every twenty seconds
