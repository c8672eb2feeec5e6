"""Settings written back as a command line."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.flags import choices, flags_of
from legroom.facts.releases import known_releases, release
from legroom.vllm.args import ServeArgs
from legroom.vllm.command_line import command
from legroom.vllm.flag_values import FIELDS
from legroom.vllm.parse import parse_flags

SAFE_TEXT = st.text("abcXYZ019/._- ", min_size=1, max_size=12).filter(lambda t: t.strip() and t != "None")
MAPPINGS = st.dictionaries(st.text("abc_", min_size=1, max_size=5), st.integers(0, 99), min_size=1, max_size=3)


def values_for(flag: Any, kind: str, version: str) -> st.SearchStrategy[Any]:
    allowed = choices(flag.name, release(version)) if flag.kind in ("str", "int") else None
    if allowed:
        return st.sampled_from([choice for choice in allowed if choice is not None])
    if kind.startswith("bool"):
        return st.booleans() if flag.kind != "switch" else st.just(True)
    if kind.startswith("int") or flag.kind == "int":
        return st.integers(1, 10**9)
    if kind.startswith("float"):
        return st.floats(0.01, 1, allow_nan=False)
    if kind.startswith("Mapping"):
        return MAPPINGS
    if kind.startswith("tuple"):
        return st.lists(st.integers(1, 512), min_size=1, max_size=5).map(tuple)
    return SAFE_TEXT


@st.composite
def serve_args(draw: st.DrawFn) -> tuple[ServeArgs, str]:
    version = draw(st.sampled_from(known_releases()))
    table = {flag.dest: flag for flag in flags_of(release(version)).values()}
    chosen: dict[str, Any] = {"model": draw(SAFE_TEXT.filter(lambda t: not t.startswith("-")))}
    names = sorted(set(FIELDS) & set(table) - {"model", "optimization_level", "cudagraph_capture_sizes"})
    for name in draw(st.lists(st.sampled_from(names), max_size=6, unique=True)):
        chosen[name] = draw(values_for(table[name], FIELDS[name], version))
    if release(version).at_least("0.12.0"):
        chosen["optimization_level"] = draw(st.sampled_from([None, 0, 3]))
        chosen["cudagraph_capture_sizes"] = draw(st.sampled_from([None, (1, 2), (8,)]))
    env = draw(st.dictionaries(st.sampled_from(["VLLM_USE_V1", "NCCL_DEBUG"]), SAFE_TEXT, max_size=2))
    others = draw(st.sampled_from([(), ("--port", "80"), ("--trust-remote-code", "--served-model-name", "a", "b")]))
    if release(version).before("0.4.1"):
        others = ()
    return ServeArgs(env=env, others=others, **chosen), version


@given(serve_args())
def test_a_command_reads_back_as_the_settings_it_was_written_from(case: tuple[ServeArgs, str]) -> None:
    args, version = case
    environment = [f"{name}={value}" for name, value in args.env.items()]
    found = parse_flags([*environment, *command(args, release(version))], release(version))
    assert [p for p in found.problems if p.kind != "ignored"] == []
    assert found.args == args


def test_old_releases_start_the_module() -> None:
    words = command(ServeArgs(model="M", max_model_len=4096), release("0.4.2"))
    assert words == ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "M", "--max-model-len", "4096")


def test_a_field_the_release_has_no_flag_for_is_left_out() -> None:
    assert command(ServeArgs(model="M", kv_cache_memory_bytes=1), release("0.9.0")) == ("vllm", "serve", "M")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.10.0", ("--compilation-config", '{"cudagraph_capture_sizes": [1, 2]}')),
        ("0.32.0", ("--cudagraph-capture-sizes", "1", "2")),
    ],
)
def test_capture_sizes_are_written_as_the_release_takes_them(version: str, words: tuple[str, ...]) -> None:
    args = ServeArgs(model="M", cudagraph_capture_sizes=(1, 2))
    assert command(args, release(version))[3:] == words


def test_speculative_decoding_is_written_as_the_release_takes_it() -> None:
    args = ServeArgs(model="M", speculative_config={"model": "D", "num_speculative_tokens": 5})
    old = command(args, release("0.6.3"))
    assert old[3:] == ("--speculative-model", "D", "--num-speculative-tokens", "5")
    assert command(args, release("0.9.0"))[3] == "--speculative-config"
