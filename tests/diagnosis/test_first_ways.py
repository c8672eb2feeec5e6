"""The first way out: what the text names, with its own amounts, for its program, platform and release."""

from __future__ import annotations

from legroom.diagnosis.finding import Finding, Fix
from legroom.diagnosis.log_diagnosis import read_log
from legroom.render.diagnosis_text import readings_text


def first(text: str) -> Finding:
    return read_log([text.encode()], "log").runs[0].findings[0]


def way(text: str) -> Fix:
    return first(text).fixes[0]


def test_the_limit_of_a_container_is_raised_only_where_one_is_named() -> None:
    machine = "vLLM on 4 GPUs, 64 GB of RAM: while it loads the weights the system OOM killer kills the process."
    assert "RAM or swap" in way(machine).steps[0]
    pod = "vLLM in a pod: while it loads the weights the pod is OOMKilled."
    assert "container's memory limit" in way(pod).steps[0]


def test_a_cpuset_is_a_limit_that_is_widened() -> None:
    kernel = (
        "[99] oom-kill:constraint=CONSTRAINT_CPUSET,nodemask=(null),cpuset=vllm,mems_allowed=1,global_oom\n"
        "[99] Out of memory: Killed process 77 (VLLM::Worker_TP) total-vm:9kB, anon-rss:9000000kB\n"
    )
    found = first(kernel)
    assert "NUMA" in found.fixes[0].steps[0]
    assert "cpuset" in found.why
