"""Packed servers as files: read back by what reads them, in an order and bound together."""

from __future__ import annotations

import yaml

from legroom.deployments.deployment import deployment_from_file
from legroom.exports.deploy.pack_files import pack_files
from legroom.facts.gpus import gpu
from legroom.facts.model_sources import load
from legroom.facts.releases import release
from legroom.planning.packing.gpu_packing import PackRequest, pack
from legroom.planning.packing.needs import PackedServer
from legroom.planning.packing.placement import Card, Shift
from legroom.planning.plan import Target
from legroom.vllm.args import ServeArgs


def packed(*shifts):
    def server(name, model, port):
        args = ServeArgs(model=model, max_model_len=8192, max_num_seqs=128, others=("--port", port))
        return PackedServer(name, Target(load(model), gpu("h100"), 1, release("0.32.0")), args)

    servers = (server("chat", "llama-3.1-8b", "8000"), server("batch", "qwen3-14b", "8001"))
    return pack(PackRequest(servers, (Card(0, gpu("h100")),), tuple(Shift(*shift) for shift in shifts)))


DAY_AND_NIGHT = (("day", frozenset({"chat"})), ("night", frozenset({"batch"})))


def files(name, *shifts):
    return {file.path: file.text for file in pack_files(packed(*shifts), name)}


def test_compose_starts_one_after_the_other():
    services = yaml.safe_load(files("compose")["compose.yaml"])["services"]
    assert list(services) == ["vllm-chat", "vllm-batch"]
    assert services["vllm-batch"]["depends_on"] == {"vllm-chat": {"condition": "service_healthy"}}


def test_units_are_ordered_and_part_of_one_target():
    units = files("systemd")
    assert "vllm-chat.service" in units["vllm-batch.service"].split("After=")[1].splitlines()[0]
    assert "PartOf=vllm-pack.target" in units["vllm-chat.service"]
    assert "Wants=vllm-chat.service vllm-batch.service" in units["vllm-pack.target"]


def test_llama_swap_keeps_them_together():
    config = yaml.safe_load(files("llama-swap")["llama-swap.yaml"])
    assert config["groups"] == {"pack": {"swap": False, "exclusive": False, "members": ["chat", "batch"]}}
    assert config["models"]["chat"]["cmd"].endswith("--port ${PORT}")


def test_a_shift_puts_the_others_to_sleep_before_it_wakes_its_own():
    script = files("systemd", *DAY_AND_NIGHT)["shift-night.sh"]
    assert script.index("8000/sleep?level=1") < script.index("systemctl start vllm-batch") < script.index("/wake_up")


def test_only_the_first_shift_starts_with_the_target():
    units = files("systemd", *DAY_AND_NIGHT)
    assert "Wants=vllm-chat.service\n" in units["vllm-pack.target"]
    assert "[Install]" not in units["vllm-batch.service"]


def test_llama_swap_unloads_the_other_shift():
    groups = yaml.safe_load(files("llama-swap", *DAY_AND_NIGHT)["llama-swap.yaml"])["groups"]
    assert groups["night"] == {"swap": False, "exclusive": True, "members": ["batch"]}


def test_legroom_reads_a_unit_back_with_its_pool(tmp_path):
    unit = tmp_path / "vllm-chat.service"
    unit.write_text(files("systemd")["vllm-chat.service"])
    read = deployment_from_file(str(unit), release("0.32.0"))
    assert read.args.kv_cache_memory_bytes == packed().packed[0].pool_bytes
