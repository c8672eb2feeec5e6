"""Metric names by release: renames, endings, engines, and what to write instead of a wrong one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts import metrics
from legroom.facts.releases import known_releases, release

RELEASES = st.sampled_from(known_releases()).map(release)


def test_the_kv_gauge_changed_its_name_in_0_9_2() -> None:
    assert metrics.name_of("kv_use", release("0.9.1")) == "vllm:gpu_cache_usage_perc"
    assert metrics.name_of("kv_use", release("0.9.2")) == "vllm:kv_cache_usage_perc"
    assert metrics.name_of("kv_use", release("0.10.0"), "v0") == "vllm:gpu_cache_usage_perc"


def test_counters_are_queried_with_total_whatever_their_declared_name() -> None:
    for version in ("0.8.5", "0.9.0", "0.32.0"):
        assert metrics.name_of("preemptions", release(version)) == "vllm:num_preemptions_total"
        assert metrics.name_of("generation_tokens", release(version)) == "vllm:generation_tokens_total"


def test_an_info_is_scraped_with_its_ending() -> None:
    assert "vllm:cache_config_info" in metrics.exposed_names(release("0.4.0"))
    assert metrics.name_of("cache_config", release("0.4.0"), "v0") == "vllm:cache_config_info"
    assert metrics.names_of("cache_config") == ("vllm:cache_config_info",)


def test_names_of_a_role_come_newest_first() -> None:
    assert metrics.names_of("kv_use") == ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert metrics.names_of("prefix_hits") == ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")


def test_a_hidden_metric_is_known_but_not_queried() -> None:
    hidden = [m for m in metrics.metrics_of(release("0.11.2"), "v1") if m.name == "vllm:gpu_cache_usage_perc"]
    assert hidden[0].hidden and hidden[0].deprecated and not hidden[0].condition
    assert metrics.name_of("inter_token", release("0.12.0")) == "vllm:inter_token_latency_seconds"


def test_what_a_release_does_not_measure_has_no_name() -> None:
    assert metrics.name_of("prompt_tokens_recomputed", release("0.18.0")) == "vllm:prompt_tokens_recomputed_total"
    assert metrics.name_of("prompt_tokens_recomputed", release("0.32.0")) is None
    assert metrics.name_of("swapped", release("0.32.0")) is None


def test_the_pool_size_is_a_label_of_the_cache_settings() -> None:
    found = [m for m in metrics.metrics_of(release("0.32.0")) if m.name == "vllm:cache_config_info"]
    assert {"num_gpu_blocks", "block_size", "engine"} <= set(found[0].labels)


@pytest.mark.parametrize(
    ("wrong", "version", "right"),
    [
        ("vllm_num_requests_running", "0.32.0", "vllm:num_requests_running"),
        ("vllm_gpu_cache_usage_perc", "0.32.0", "vllm:kv_cache_usage_perc"),
        ("vllm:gpu_cache_usage_perc", "0.12.0", "vllm:kv_cache_usage_perc"),
        ("vllm:kv_cache_usage_perc", "0.8.0", "vllm:gpu_cache_usage_perc"),
        ("vllm:generation_tokens", "0.32.0", "vllm:generation_tokens_total"),
        ("vllm:time_per_output_token_seconds_bucket", "0.32.0", "vllm:inter_token_latency_seconds_bucket"),
        ("vllm_prefix_cache_hit_rate", "0.32.0", "vllm:prefix_cache_hits_total"),
        ("vllm:gpu_prefix_cache_hit_rate", "0.32.0", "vllm:prefix_cache_hits_total"),
        ("vllm_num_gpu_blocks", "0.32.0", "vllm:cache_config_info"),
        ("vllm:num_request_runing", "0.32.0", "vllm:num_requests_running"),
        ("vllm:gpu_prefix_cache_hits", "0.32.0", "vllm:prefix_cache_hits_total"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(wrong: str, version: str, right: str) -> None:
    assert metrics.nearest(wrong, release(version)) == right


def test_a_right_name_needs_no_other_and_nonsense_has_none() -> None:
    assert metrics.nearest("vllm:kv_cache_usage_perc", release("0.32.0")) is None
    assert metrics.nearest("up", release("0.32.0")) is None


@given(RELEASES, st.sampled_from(sorted(metrics.roles())), st.sampled_from(["v0", "v1"]))
def test_a_name_to_query_exists_in_its_release(version, role, engine) -> None:  # type: ignore[no-untyped-def]
    name = metrics.name_of(role, version, engine)
    if name is not None:
        exposed = metrics.exposed_names(version, engine)
        assert name in exposed or f"{name}_bucket" in exposed
        assert name in metrics.names_of(role)


@given(RELEASES, st.sampled_from(sorted(metrics.all_exposed_names())))
def test_what_is_suggested_exists_in_the_release(version, name) -> None:  # type: ignore[no-untyped-def]
    found = metrics.nearest(name, version)
    exposed = metrics.exposed_names(version)
    assert found is None or found in exposed or f"{found}_bucket" in exposed


def test_every_role_names_declared_metrics() -> None:
    declared = {m.name for version in known_releases() for m in metrics.metrics_of(release(version))}
    assert {name for names in metrics.roles().values() for name in names} <= declared
    assert metrics.role_of("vllm:time_to_first_token_seconds_bucket") == "ttft"
