"""Pools that were given outright: the fix is as large as one request of the full length needs, whatever the model."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from pathlib import Path

import pytest

from legroom.run.expectation import Gpus, expected_pool
from legroom.run.healing import Bounds, Remedy, find_remedy
from legroom.run.server_command import read_command

_PATH = Path(__file__).parents[1] / "real_vllm/tiny_models.py"
_SPEC = importlib.util.spec_from_file_location("tiny_models", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
tiny_models = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tiny_models)

NOTHING = (
    "ValueError: To serve at least one request with the model's max seq len (2048), (0.0 GiB KV cache is needed, which "
    "is larger than the available KV cache memory (0.0 GiB). Based on the available memory, the estimated maximum "
    "model length is {fits}. Try increasing `gpu_memory_utilization`.\n"
)
NO_BLOCKS = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.\n"
VERSION = "(APIServer pid=1) INFO 11-15 05:57:09 [api_utils.py:347]  version 0.32.0\n"


@pytest.fixture
def mend(tmp_path: Path):
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run(kind: str, log: str, *flags: str, env: tuple[str, ...] = (), **bounds: object) -> Remedy:
        model = tiny_models.write_model(tmp_path / kind, kind)
        path = tmp_path / "log"
        path.write_text(VERSION + log)
        command = read_command([*env, str(program), "serve", str(model), *flags], "0.32.0", os.environ)
        return find_remedy(path, command, Bounds(**bounds), Gpus(), os.environ)

    return run


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_a_pool_that_holds_nothing_grows_until_one_request_fits(mend, kind):
    remedy = mend(kind, NOTHING.format(fits=0), "--max-model-len", "2048", "--kv-cache-memory-bytes", "100K")
    assert remedy.words[-2] == "--kv-cache-memory-bytes"
    assert remedy.expected.verdict == "fits"
    assert remedy.expected.max_concurrency >= 1
    assert "--max-model-len" in remedy.words


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_it_grows_no_more_than_it_has_to(mend, kind):
    remedy = mend(kind, NOTHING.format(fits=0), "--max-model-len", "2048", "--kv-cache-memory-bytes", "100K")
    command = read_command(remedy.words, "0.32.0", os.environ)
    halved = [*remedy.words[:-1], str(int(remedy.words[-1]) // 2)]
    assert expected_pool(command, {}, Gpus()).verdict == "fits"
    assert expected_pool(read_command(halved, "0.32.0", os.environ), {}, Gpus()).verdict == "does_not_fit"


def test_a_pool_that_holds_a_good_part_stays_and_the_length_shrinks(mend):
    remedy = mend("llama", NOTHING.format(fits=896), "--max-model-len", "2048", "--kv-cache-memory-bytes", "512K")
    assert remedy.words[-2:] == ("--max-model-len", "896")


def test_where_the_length_must_stay_the_pool_grows(mend):
    flags = ("--max-model-len", "2048", "--kv-cache-memory-bytes", "512K")
    remedy = mend("llama", NOTHING.format(fits=896), *flags, keep=("max_model_len",))
    assert remedy.words[-2] == "--kv-cache-memory-bytes"
    assert mend("llama", NOTHING.format(fits=896), *flags, min_context=2048).words == remedy.words


def test_too_few_blocks_become_enough(mend):
    remedy = mend("llama", NOTHING.format(fits=384), "--max-model-len", "2048", "--num-gpu-blocks-override", "4")
    assert remedy.words[-2:] == ("--num-gpu-blocks-override", "17")


def test_a_pool_of_one_byte_becomes_one(mend):
    remedy = mend("llama", NO_BLOCKS, "--kv-cache-memory-bytes", "1")
    assert remedy.cause == "no_cache_blocks"
    assert remedy.expected.max_concurrency >= 1


def test_no_space_becomes_a_gib(mend):
    remedy = mend("gemma3", NO_BLOCKS, env=("VLLM_CPU_KVCACHE_SPACE=0",))
    assert remedy.env == {"VLLM_CPU_KVCACHE_SPACE": "1"}
    assert "was 0" in remedy.changed
