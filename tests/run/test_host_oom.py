"""A server that the kernel kills for want of host memory: `run` names it, with the limit, the peak and the cure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
from own_cgroup import limited_cgroup

from legroom.live.kernel_memory import Cgroup, KernelAccount, KernelKill
from legroom.run.expectation import Gpus
from legroom.run.healing import Bounds, death_text, find_remedy
from legroom.run.restart_policy import ProcessDeath
from legroom.run.run_file import ProcessRecord
from legroom.run.server_command import read_command
from legroom.run.tasks import find_fix
from legroom.units import GIB

NO_BOUNDS, NO_GPU = Bounds(), Gpus()


@pytest.fixture
def own_cgroup() -> Iterator[Path]:
    with limited_cgroup() as folder:
        yield folder


def test_a_server_that_its_real_cgroup_kills_while_it_serves_is_diagnosed_and_restarted(run, own_cgroup):
    supervised = run("--no-verify", STAND_IN_CGROUP=str(own_cgroup))
    supervised.serving()
    supervised.attempt(1, "eat")
    said = supervised.said("diagnosis:")
    assert "LR501" in said
    assert "may use 0.09 GiB" in said and "at the peak" in said
    assert "the memory limit" in supervised.said("nothing is changed:")
    supervised.serving(times=2)
    assert supervised.end() == 0
    detail = supervised.incidents()[0]
    assert detail.kind == "died_serving"


def test_a_server_that_is_moved_into_its_cgroup_late_is_followed_there(own_cgroup, tmp_path):
    record = ProcessRecord(tmp_path / "log")
    with subprocess.Popen(["sleep", "60"]) as server:
        record.track_cgroup(server.pid)
        (own_cgroup / "cgroup.procs").write_text(str(server.pid))
        record.track_cgroup(server.pid)
        server.kill()
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        record.track_cgroup(server.pid)  # it has ended, and nobody has collected it
    assert record.task_input()["account"]["cgroup"]["folder"] == str(own_cgroup)


@pytest.fixture
def diagnosed(tmp_path):
    vllm, log = tmp_path / "vllm", tmp_path / "log"
    vllm.write_text(f"#!{sys.executable}\n")
    vllm.chmod(0o755)
    log.write_text("(EngineCore pid=2) INFO 11-15 05:57:24 [core.py:100] loading\n")

    def diagnose(*flags: str, bounds: Bounds = NO_BOUNDS, gpus: Gpus = NO_GPU, **how):
        command = read_command([str(vllm), "serve", "Qwen/Qwen3-8B", *flags], "0.32.0", {})
        return find_remedy(log, command, bounds, gpus, {}, **how)

    return diagnose


def at_limit(limit_gib: float) -> KernelKill:
    limit = int(limit_gib * GIB)
    return KernelKill(limit, "/sys/fs/cgroup/memory.max", limit, 64 * GIB, "VLLM::Worker", limit // 2)


def test_on_a_cpu_the_kv_cache_is_made_to_fit_the_limit(diagnosed):
    remedy = diagnosed("--kv-cache-memory-bytes", "32G", kill=at_limit(40))
    assert (remedy.cause, remedy.entry, remedy.is_memory) == ("host_ram_oom", "LR501", True)
    at = remedy.words.index("--kv-cache-memory-bytes")
    assert 16 * GIB < int(remedy.words[at + 1]) < 32 * GIB


def test_a_limit_that_leaves_no_room_for_a_kv_cache_is_to_be_raised_to_what_the_plan_says(diagnosed):
    remedy = diagnosed("--kv-cache-memory-bytes", "8G", kill=at_limit(4))
    assert not remedy.words
    assert "27 GiB" in remedy.refused


def test_the_kernels_words_name_the_victim_the_limit_and_the_peak(diagnosed):
    remedy = diagnosed("--kv-cache-memory-bytes", "8G", kill=at_limit(4))
    assert "killed VLLM::Worker, which held 2.00 GiB," in remedy.failed
    assert "4.00 GiB (/sys/fs/cgroup/memory.max), of which 4.00 GiB" in remedy.failed
    assert "8.00 GiB KV cache" in remedy.failed


def test_on_a_card_the_plan_says_what_the_host_must_give(diagnosed):
    remedy = diagnosed("--kv-offloading-size", "40", kill=at_limit(32), gpus=Gpus("l40s", 1))
    assert "GiB processes" in remedy.failed
    at = remedy.words.index("--kv-offloading-size")
    assert 0 < int(remedy.words[at + 1]) < 40


def test_a_machine_without_a_limit_that_is_full_has_no_limit_to_raise(diagnosed):
    kill = KernelKill(None, "", None, 64 * GIB)
    remedy = diagnosed("--kv-cache-memory-bytes", "8G", kill=kill)
    assert "64.00 GiB of RAM" in remedy.failed
    assert "more RAM" in remedy.refused and not remedy.words


def test_a_kept_flag_stays_also_then(diagnosed):
    kept = Bounds(keep=("kv_cache_memory_bytes",))
    assert not diagnosed("--kv-cache-memory-bytes", "32G", kill=at_limit(40), bounds=kept).words


def test_an_engine_whose_status_its_parent_collected_is_still_named(diagnosed):
    death = ProcessDeath("EngineCore", 7, None)
    remedy = diagnosed(death=death, ended=death_text(death, None))
    assert remedy.failed.startswith("EngineCore (pid 7) ended") and not remedy.words


@pytest.mark.parametrize(
    ("number", "kills", "said"),
    [
        (9, 0, "died of SIGKILL, sent by somebody and not by the kernel"),
        (9, None, "died of SIGKILL; whether the kernel"),
        (None, 0, "not by the kernel's out-of-memory killer"),
        (11, 0, "died of SIGSEGV"),
    ],
)
def test_the_words_name_the_signal_and_whether_the_kernel_sent_it(number, kills, said):
    assert said in death_text(ProcessDeath("EngineCore", 7, number), KernelAccount(None, None, kills, 0.0))


def test_a_kill_that_only_the_cgroup_counts_names_the_process_that_died(diagnosed, tmp_path):
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "memory.events").write_text("oom_kill 1\n")
    account = asdict(KernelAccount(Cgroup(str(cgroup), str(tmp_path), 2), 0, None, 1e12))  # the kernel's log is older
    question = {"words": [str(tmp_path / "vllm"), "serve", "Qwen/Qwen3-8B"], "env": {}, "vllm": "0.32.0"}
    question |= {"keep": [], "min_context": None, "min_concurrency": None, "tried": [], "gpus": asdict(NO_GPU)}
    question |= {"log": str(tmp_path / "log"), "account": account, "death": asdict(ProcessDeath("EngineCore", 7, 9))}
    assert "The kernel killed EngineCore (pid 7)" in find_fix(question)["failed"]


def test_a_worker_that_somebody_killed_is_no_shortage_whatever_the_log_guesses(diagnosed, tmp_path):
    said = "(EngineCore pid=2) ERROR 11-15 05:57:24 [multiproc_executor.py:316] Worker proc VllmWorker-0 died "
    (tmp_path / "log").write_text(f"{said}unexpectedly (exit code: -9), shutting down executor.\n")
    death = ProcessDeath("VLLM::Worker", 7, 9)
    remedy = diagnosed(death=death, ended=death_text(death, None))
    assert (remedy.is_memory, remedy.by_signal) == (False, True)
    assert "VLLM::Worker (pid 7) died of SIGKILL" in remedy.failed


def test_a_server_that_is_killed_before_it_says_anything_is_told_by_its_signal(diagnosed, tmp_path):
    (tmp_path / "log").write_text("")
    death = ProcessDeath("its keeper", 7, 9)
    assert diagnosed(death=death, ended=death_text(death, None)).by_signal


def test_a_warning_of_python_is_not_quoted_as_the_last_word(diagnosed, tmp_path):
    said = "[core_client.py:818] engine core exited unexpectedly"
    warning = "tracker.py:254: UserWarning: leaked objects\n  warnings.warn('leaked')\n"
    (tmp_path / "log").write_text(f"{said}\n{warning}")
    assert diagnosed().failed.endswith(said)
