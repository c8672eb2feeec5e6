"""`legroom preflight`: the node that is really there against the pod's own command."""

import json
import os
import stat

import pytest

from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.live.gpu_memory import GpuMemory
from legroom.units import GIB, MIB
from legroom.verify.node_preflight import NodeState, gpus_from_nvidia_smi, preflight, read_node_state
from legroom.vllm.parse import parse_flags


def l4(index=0, used=340 * MIB):
    return GpuMemory(index, "NVIDIA L4", f"GPU-{index}", 23034 * MIB, used)


def asked(words, *gpus, version="0.11.0", host_memory=None, **node):
    args = parse_flags(words.split(), release(version)).args
    return preflight(args, release(version), NodeState(gpus, **node), host_memory)


def finding(answer, name):
    return next((check.finding for check in answer.checks if check.name == name), None)


def test_a_server_that_the_node_holds_passes():
    answer = asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", l4(), driver="575.51.03")
    assert answer.ok
    assert (finding(answer, "memory"), finding(answer, "driver")) == ("ok", "ok")


def test_what_the_driver_keeps_for_itself_is_held_by_nobody():
    assert asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", l4()).plan.target.held_by_others_bytes == 0


def test_what_another_process_holds_of_the_card_counts():
    answer = asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", l4(used=12 * GIB))
    assert not answer.ok
    assert finding(answer, "memory") == "failure"


def test_a_server_that_is_too_large_fails_with_a_flag_that_would_start():
    answer = asked("vllm serve Qwen/Qwen3-8B", l4())
    assert not answer.ok
    message = next(check.message for check in answer.checks if check.name == "memory")
    assert "would stop with" in message
    assert "--max-model-len" in message


def test_fewer_gpus_than_the_flags_ask_for_fail():
    answer = asked("vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2", l4())
    assert (answer.ok, finding(answer, "gpus")) == (False, "failure")


def test_a_driver_that_is_too_old_is_warned_of():
    answer = asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", l4(), driver="535.129.03")
    assert (answer.ok, finding(answer, "driver")) == (True, "warning")


@pytest.mark.parametrize(("size", "expected"), [(64 * MIB, "failure"), (512 * MIB, "warning"), (16 * GIB, "ok")])
def test_several_ranks_need_shared_memory(size, expected):
    words = "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --tensor-parallel-size 2"
    assert finding(asked(words, l4(), l4(1), shm_bytes=size), "shm") == expected


def test_one_rank_needs_none():
    assert finding(asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", l4(), shm_bytes=64 * MIB), "shm") is None


def test_a_memory_limit_that_is_too_small_fails():
    answer = asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", l4(), memory_limit_bytes=1 * GIB)
    assert not answer.ok


def test_the_servers_own_limit_can_be_said():
    words = "vllm serve Qwen/Qwen3-8B --max-model-len 8192"
    assert asked(words, l4(), memory_limit_bytes=1 * GIB, host_memory="32GiB").ok


def test_a_card_that_is_not_known_is_planned_by_its_size():
    answer = asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", GpuMemory(0, "NVIDIA X999", "GPU-0", 48 * GIB, 0))
    assert answer.ok


def test_no_gpu_is_said_plainly():
    with pytest.raises(LegroomError, match="no NVIDIA GPU") as raised:
        asked("vllm serve Qwen/Qwen3-8B")
    assert raised.value.exit_code == 3


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """A program that prints what nvidia-smi prints, for a machine without NVML."""
    monkeypatch.setattr("legroom.verify.node_preflight.nvml_devices", tuple)
    program = tmp_path / "nvidia-smi"

    def write(*rows):
        lines = (row if row.startswith(("case ", "echo ")) else f"[ $1 = -L ] || echo '{row}'" for row in rows)
        program.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return write


def test_without_nvml_nvidia_smi_is_asked(nvidia_smi):
    nvidia_smi("0, NVIDIA L4, GPU-aaa, 23034, 1514, 535.129.03", "1, [N/A], x, [N/A], 0, 535.129.03")
    gpus, driver = gpus_from_nvidia_smi()
    assert [(gpu.name, gpu.used_bytes) for gpu in gpus] == [("NVIDIA L4", 1514 * MIB)]
    assert driver == "535.129.03"
    assert read_node_state().gpus == gpus


def test_only_the_gpus_that_the_server_may_see_count(nvidia_smi):
    nvidia_smi("0, NVIDIA L4, GPU-aaa, 23034, 20000, 575.51", "1, NVIDIA L4, GPU-bbb, 23034, 400, 575.51")
    assert [gpu.uuid for gpu in read_node_state("1").gpus] == ["GPU-bbb"]
    assert [gpu.uuid for gpu in read_node_state("GPU-b").gpus] == ["GPU-bbb"]
    assert (read_node_state("7").gpus, read_node_state("7").hidden_gpus) == ((), 2)


def test_the_commands_own_choice_of_gpus_counts(nvidia_smi, capsys):
    nvidia_smi("0, NVIDIA L4, GPU-aaa, 23034, 20000, 575.51", "1, NVIDIA L4, GPU-bbb, 23034, 400, 575.51")
    words = ["preflight", "--vllm", "0.11.0", "--host-memory", "64GiB", "--json", "--", "env", "CUDA_VISIBLE_DEVICES=1"]
    assert main([*words, "vllm", "serve", "Qwen/Qwen3-8B", "--max-model-len", "8192"]) == 0
    assert len(json.loads(capsys.readouterr().out)["node"]["gpus"]) == 1


def test_hidden_gpus_are_not_said_to_be_missing():
    with pytest.raises(LegroomError, match="CUDA_VISIBLE_DEVICES hides all 2 GPUs"):
        asked("vllm serve Qwen/Qwen3-8B", hidden_gpus=2)


def test_a_mig_slice_is_a_card_of_its_own(nvidia_smi):
    whole = "0, NVIDIA H100 80GB HBM3, GPU-aaa, 81559, 0, 575.51"
    nvidia_smi(
        f'case "$1" in -L) ;; *) echo "{whole}"; exit ;; esac',
        "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaa)'",
        "echo '  MIG 3g.40gb     Device  0: (UUID: MIG-one)'",
        "echo '  MIG 1g.10gb     Device  1: (UUID: MIG-two)'",
    )
    names = [(gpu.name, gpu.uuid) for gpu in read_node_state().gpus]
    card = "NVIDIA H100 80GB HBM3 MIG"
    assert names == [(f"{card} 3g.40gb", "MIG-one"), (f"{card} 1g.10gb", "MIG-two")]
    assert asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", *read_node_state("MIG-one").gpus).ok
    assert not asked("vllm serve Qwen/Qwen3-8B --max-model-len 8192", *read_node_state("MIG-two").gpus).ok


def test_the_reason_goes_to_the_termination_log(nvidia_smi, tmp_path, capsys):
    nvidia_smi("0, NVIDIA L4, GPU-aaa, 23034, 400, 575.51.03")
    log = tmp_path / "termination-log"
    log.touch()
    words = ["--termination-log", str(log), "--vllm", "0.11.0", "--host-memory", "64GiB"]
    assert main(["preflight", *words, "--json", "--", "vllm", "serve", "Qwen/Qwen3-8B"]) == 1
    assert "does not hold" in log.read_text()
    assert len(log.read_bytes()) < 4096
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["plan"]["verdict"]) == (False, "does_not_fit")


def test_a_call_that_is_wrong_is_told_in_the_termination_log_too(nvidia_smi, tmp_path, capsys):
    nvidia_smi("0, NVIDIA L4, GPU-aaa, 23034, 400, 575.51.03")
    log = tmp_path / "termination-log"
    log.touch()
    words = ["--termination-log", str(log), "--vllm", "0.11.0", "--", "nginx"]
    assert main(["preflight", *words]) == 2
    assert log.read_text().startswith("legroom preflight: no vLLM server in the command")


def test_where_there_is_no_termination_log_none_is_made(nvidia_smi, tmp_path, capsys):
    nvidia_smi("0, NVIDIA L4, GPU-aaa, 23034, 400, 575.51.03")
    words = ["--termination-log", str(tmp_path / "none"), "--vllm", "0.11.0", "--host-memory", "64GiB", "--warn-only"]
    assert main(["preflight", *words, "--", "vllm", "serve", "Qwen/Qwen3-8B"]) == 0
    assert not (tmp_path / "none").exists()
    assert "does not hold" in capsys.readouterr().out


def test_a_machine_without_a_gpu_exits_with_3(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("legroom.verify.node_preflight.nvml_devices", tuple)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["preflight", "--", "vllm", "serve", "Qwen/Qwen3-8B"]) == 3
    assert "no NVIDIA GPU" in capsys.readouterr().err
