"""The user's command: read, checked, and edited without touching what was not asked for."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.facts.releases import release
from legroom.run.run_file import script
from legroom.run.server_command import ServerCommand, read_command
from legroom.run.tasks import apply_changes
from legroom.vllm.command_line import value_of, with_settings

NEW = release("0.32.0")


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    program = tmp_path / "vllm"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def read(*words: str) -> ServerCommand:
    return read_command(words, "0.32.0", os.environ)


def edited(text: str, **changes: object) -> str:
    words = text.split()
    return " ".join(with_settings(words, 2, changes, NEW))


def test_a_flag_is_replaced_where_it_stands_in_any_spelling():
    for written in ("--max-model-len 2048", "--max-model-len=2048", "--max_model_len 2048", "--max-model 2048"):
        assert (
            edited(f"vllm serve m {written} --seed 1", max_model_len=880) == "vllm serve m --seed 1 --max-model-len 880"
        )


def test_a_short_name_is_the_same_flag():
    assert edited("vllm serve m -tp 3", tensor_parallel_size=2) == "vllm serve m --tensor-parallel-size 2"


def test_a_flag_that_was_given_twice_is_gone_twice():
    assert edited("vllm serve m --max-model-len 1 --max-model-len 2", max_model_len=None) == "vllm serve m"


def test_a_removed_flag_goes_with_its_value():
    assert edited("vllm serve m --swap-space 4 --seed 1", swap_space=None) == "vllm serve m --seed 1"


def test_a_removed_switch_does_not_take_the_next_word_along():
    assert edited("vllm serve --use-v2-block-manager m", use_v2_block_manager=None) == "vllm serve m"


def test_a_negated_switch_is_the_same_flag():
    words = "vllm serve m --no-enable-chunked-prefill"
    assert edited(words, enable_chunked_prefill=True) == "vllm serve m --enable-chunked-prefill"


def test_a_flag_without_its_value_is_taken_out():
    assert edited("vllm serve m --seed 1 --max-model-len", max_model_len=None) == "vllm serve m --seed 1"


def test_a_list_goes_as_a_whole():
    words = "vllm serve m --cudagraph-capture-sizes 1 2 4 --seed 1"
    assert edited(words, cudagraph_capture_sizes=None) == "vllm serve m --seed 1"


@given(st.lists(st.sampled_from(["--seed 1", "--port=80", "-tp 2", "--enforce-eager", "--api-key k"]), unique=True))
def test_what_is_not_changed_stays_as_it_was_written(flags):
    text = " ".join(["vllm serve m", *flags])
    assert edited(text) == text
    assert edited(text, max_model_len=8) == f"{text} --max-model-len 8"


def test_what_a_command_says_is_found_as_it_was_written():
    words = ["vllm", "serve", "m", "--max-model-len", "2k", "--enforce-eager"]
    assert value_of(words, 2, "max_model_len", NEW) == "2k"
    assert value_of(words, 2, "enforce_eager", NEW) == ""
    assert value_of(words, 2, "seed", NEW) is None


def test_a_command_that_is_not_vllm_is_refused():
    with pytest.raises(LegroomError, match="a vLLM server") as error:
        read("sleep", "100")
    assert error.value.exit_code == 2


def test_no_command_at_all_is_refused():
    with pytest.raises(LegroomError, match="which server"):
        read()


def test_a_container_cannot_be_held():
    with pytest.raises(LegroomError, match="container"):
        read("docker", "run", "vllm/vllm-openai", "--model", "m")


def test_a_vllm_that_is_not_there_is_unreachable():
    with pytest.raises(LegroomError, match="not installed") as error:
        read("/nowhere/vllm", "serve", "m")
    assert error.value.exit_code == 3


def test_a_python_without_vllm_says_so():
    with pytest.raises(LegroomError, match="has no vLLM") as error:
        read_command([sys.executable, "-m", "vllm.entrypoints.openai.api_server"], None, os.environ)
    assert error.value.exit_code == 3


def test_where_it_listens_is_read_from_the_flags(vllm):
    command = read(vllm, "serve", "m", "--host", "0.0.0.0", "--port", "9000")
    assert (command.host, command.port, command.url) == ("127.0.0.1", 9000, "http://127.0.0.1:9000")


@pytest.mark.parametrize("port", ["0", "-1", "65536", "100000"])
def test_a_port_that_is_none_is_refused(vllm, port):
    with pytest.raises(LegroomError, match="is no port") as error:
        read(vllm, "serve", "m", "--port", port)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("flags", ["--headless", "--uds s", "--grpc", "--ssl-certfile c --ssl-cert-reqs 2"])
def test_a_server_whose_health_cannot_be_asked_is_refused_and_not_killed_later(vllm, flags):
    with pytest.raises(LegroomError, match=r"no HTTP port|certificate of its clients"):
        read(vllm, "serve", "m", *flags.split())


@pytest.mark.parametrize("before", [[], ["env"], ["/usr/bin/env"]])
def test_variables_before_the_command_are_the_servers(vllm, before):
    command = read(*before, "VLLM_CPU_KVCACHE_SPACE=4", vllm, "serve", "m")
    assert command.env == {"VLLM_CPU_KVCACHE_SPACE": "4"}
    assert command.words[0] == vllm


def test_flags_that_the_release_refuses_are_known_before_the_start(vllm):
    assert "removed" in read(vllm, "serve", "m", "--swap-space", "4").problems[0]


def test_a_script_holds_no_secret():
    text = script(["vllm", "serve", "m x", "--api-key", "hunter2", "--seed", "1"], {"OMP_NUM_THREADS": "1"})
    assert "hunter2" not in text
    assert "VLLM_API_KEY" in text
    assert "exec vllm serve 'm x' --seed 1" in text
    assert "export OMP_NUM_THREADS=1" in text


def test_a_vllm_that_only_the_servers_own_environment_shows_is_found(tmp_path):
    info = tmp_path / "vllm-0.19.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.19.0\n")
    words = [
        f"PYTHONPATH={tmp_path}",
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "llama-3.1-8b",
    ]
    assert read_command(words, None, os.environ).stated_release == "0.19.0"


def changed(vllm: str, *flags: str, **changes: object) -> list[str]:
    """The flags of a command after a restart for which these changes were left."""
    by_name = {name.replace("_", "-"): value for name, value in changes.items()}
    question = {"words": [vllm, "serve", "m", *flags], "env": {}, "vllm": "0.32.0", "gpus": {}}
    return list(apply_changes(question | {"changes": {"flags": by_name}})["words"][3:])


@pytest.mark.parametrize(
    ("flags", "changes", "after"),
    [
        ("-tp 1", {"-tp": "2"}, "--tensor-parallel-size 2"),
        ("--max_model_len 8", {"--max-model-le": 16}, "--max-model-len 16"),
        ("--enable-prefix-caching", {"--no-enable-prefix-caching": ""}, "--no-enable-prefix-caching"),
        ("--no-enable-prefix-caching", {"--no-enable-prefix-caching": None}, ""),
        ("--no-enable-prefix-caching", {"--enable-prefix-caching": True}, "--enable-prefix-caching"),
        ("--enable-prefix-caching", {"--enable-prefix-caching": "false"}, "--no-enable-prefix-caching"),
        ("--enable-prefix-caching", {"--enable-prefix-caching": False}, "--no-enable-prefix-caching"),
        ("", {"--enforce-eager": ""}, "--enforce-eager"),
    ],
)
def test_what_is_left_for_a_restart_may_be_spelt_as_vllm_takes_it(vllm, flags, changes, after):
    assert " ".join(changed(vllm, *flags.split(), **changes)) == after


def test_what_is_left_for_a_restart_and_would_be_refused_is_not_taken(vllm):
    with pytest.raises(LegroomError, match="--nosuchflag"):
        changed(vllm, "--max-model-len", "8", **{"--nosuchflag": "1"})


def test_what_is_left_for_a_restart_does_not_move_the_server(vllm):
    with pytest.raises(LegroomError, match="would move"):
        changed(vllm, "--port", "8000", **{"--por": "9000"})
