"""Flags by release."""

from __future__ import annotations

import pytest
from release_messages import all_messages, core_messages, family

from legroom.facts.flags import advice, all_flag_names, choices, default, env_default, flag_history, flags_of
from legroom.facts.releases import known_releases, release


def test_the_newest_release_has_the_flags_its_parser_has() -> None:
    names = {flag.name for flag in flags_of(release("0.32.0")).values()}
    assert len(names) == 316


@pytest.mark.parametrize(
    ("name", "first", "removed_in"),
    [
        ("--swap-space", "0.4.0", "0.18.0"),
        ("--cuda-graph-sizes", "0.9.0", "0.13.0"),
        ("--kv-cache-memory-bytes", "0.10.2", None),
        ("--disable-log-requests", "0.4.0", "0.17.0"),
    ],
)
def test_a_flag_knows_when_it_came_and_went(name: str, first: str, removed_in: str | None) -> None:
    history = flag_history(name)
    assert history is not None
    assert (history.first, history.removed_in) == (first, removed_in)


def test_defaults_change_with_the_release() -> None:
    assert default("--gpu-memory-utilization", release("0.19.1")) == 0.9
    assert default("--gpu-memory-utilization", release("0.20.0")) == 0.92
    assert env_default("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", release("0.19.0")) in (False, 0)
    assert env_default("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", release("0.20.0")) in (True, 1)


def test_choices_change_with_the_release() -> None:
    assert choices("--kv-cache-dtype", release("0.4.0")) == ("auto", "fp8_e5m2")
    assert "nvfp4" in (choices("--kv-cache-dtype", release("0.32.0")) or ())
    assert choices("--block-size", release("0.32.0")) is None


def test_the_short_form_o_moved_to_the_optimization_level() -> None:
    assert flags_of(release("0.11.2"))["-O"].name == "--compilation-config"
    assert "-O" not in flags_of(release("0.12.0"))


def test_every_engine_flag_that_is_gone_has_an_entry_on_what_to_do() -> None:
    gone = [name for name in all_flag_names() if (history := flag_history(name)) and history.removed_in]
    untold = {name for name in gone if advice(name) is None}
    assert untold <= {"--model-name", "--system-prompt", "--url", "--version", "--use-gpu-for-pooling-score"}


def test_what_replaces_a_flag_is_a_flag_itself() -> None:
    known = set(all_flag_names())
    for name in known:
        told = advice(name)
        if told and told.use.startswith("--"):
            assert told.use.split()[0].split(".")[0] in known


def test_every_release_has_flags_of_every_kind_that_matters() -> None:
    for version in known_releases():
        table = flags_of(release(version))
        for name in ("--model", "--max-model-len", "--max-num-seqs", "--gpu-memory-utilization", "-tp", "-q"):
            assert name in table, (version, name)


def test_messages_compile_and_share_families() -> None:
    assert len(all_messages()) > len(core_messages()) > 1000
    for message in core_messages():
        assert message.pattern().groups >= len(message.fields)
    assert any(release("0.9.0").within(*span) for message in family("no_blocks") for span in message.spans)
