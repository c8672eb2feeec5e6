"""Metrics text into samples: every release's names, bad answers, and equality with prometheus_client's own parser."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from legroom.facts import metrics
from legroom.facts.releases import known_releases, release
from legroom.live.metrics.exposition import NotMetrics, parse_sample, slots_by_name
from legroom.live.metrics.sample import Sample
from legroom.live.metrics.scrape_recording import sample_series

REAL = Path(__file__).parents[1] / "fixtures/live/metrics_0.32.0.txt"


def read(text: str) -> Sample:
    return parse_sample(text, 100.0, "http://host:8000")


def test_a_real_answer_of_0_32_0_is_read_in_full() -> None:
    sample = parse_sample(REAL.read_bytes(), 100.0, "http://host:8000")
    (engine,) = sample.engines
    assert engine.key == ("tiny-llama", "0")
    assert (engine.num_blocks, engine.block_size, engine.pool_tokens) == (256, 128, 32768)
    assert engine.max_concurrency == 16.0
    assert engine.size_tokens == engine.pool_tokens == 32768
    assert engine.prefix_caching is True
    missing = [
        name
        for name in (
            "kv_use",
            "running",
            "waiting",
            "preemptions",
            "prefix_queries",
            "prefix_hits",
            "prompt_tokens",
            "generation_tokens",
            "finished",
            "ttft",
            "inter_token",
            "e2e_latency",
            "queue_time",
            "request_prompt_tokens",
        )
        if getattr(engine, name) is None
    ]
    assert missing == []
    assert sample.process_start_s is not None
    assert sample.notes == ()


def test_a_real_answer_gives_the_numbers_that_prometheus_client_reads() -> None:
    text = REAL.read_text()
    values = {
        (sample.name, sample.labels.get("le"), sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    (engine,) = read(text).engines
    assert engine.generation_tokens == values["vllm:generation_tokens_total", None, None]
    assert engine.kv_use == values["vllm:kv_cache_usage_perc", None, None]
    assert engine.finished == sum(
        value for (name, _, _), value in values.items() if name == "vllm:request_success_total"
    )
    assert engine.ttft is not None
    for bound, count in zip(engine.ttft.bounds, engine.ttft.counts, strict=True):
        shown = "+Inf" if math.isinf(bound) else str(bound)
        assert count == values["vllm:time_to_first_token_seconds_bucket", shown, None]


ENGINES = [
    (version, engine)
    for version in known_releases()
    for engine in ("v0", "v1")
    if metrics.name_of("running", release(version), engine)
]


def test_every_release_is_read_by_the_names_it_shows() -> None:
    for version, engine in ENGINES:
        check_names(version, engine)


def check_names(version: str, engine: str) -> None:
    lines = []
    shown = {}
    for role in ("kv_use", "running", "waiting", "preemptions", "prefix_queries", "prefix_hits", "generation_tokens"):
        name = metrics.name_of(role, release(version), engine)
        if name is not None:
            shown[role] = float(len(shown) + 1)
            lines.append(f'{name}{{model_name="m"}} {shown[role]}')
    (sample,) = read("\n".join(lines) + "\n").engines
    assert {role: getattr(sample, role) for role in shown} == shown, (version, engine)


def test_where_the_old_and_the_new_name_are_shown_the_new_one_counts_once() -> None:
    labels = '{engine="0",model_name="m"}'
    both = [
        f"vllm:gpu_cache_usage_perc{labels} 0.5",
        f"vllm:kv_cache_usage_perc{labels} 0.6",
        f"vllm:gpu_prefix_cache_queries_total{labels} 7",
        f"vllm:prefix_cache_queries_total{labels} 8",
    ]
    for lines in (both, both[::-1]):
        (engine,) = read("\n".join(lines) + "\n").engines
        assert (engine.kv_use, engine.prefix_queries) == (0.6, 8.0)


def test_engines_and_models_of_one_server_stay_apart_and_add_up() -> None:
    sample = read(
        'vllm:num_requests_running{engine="0",model_name="a"} 1\n'
        'vllm:num_requests_running{engine="1",model_name="a"} 2\n'
        'vllm:num_requests_running{engine="0",model_name="b"} 4\n'
        'vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.2\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="a"} 0.9\n'
        'vllm:cache_config_info{engine="0",num_gpu_blocks="100",block_size="16"} 1\n'
        'vllm:cache_config_info{engine="1",num_gpu_blocks="300",block_size="16"} 1\n'
    )
    assert [engine.key for engine in sample.engines] == [("a", "0"), ("a", "1"), ("b", "0")]
    assert sample.running == 7
    assert sample.kv_use == pytest.approx((0.2 * 100 + 0.9 * 300) / 400)
    assert sample.kv_use_max == 0.9


def test_engines_of_a_data_parallel_server_each_have_their_part_of_the_blocks_that_every_row_names() -> None:
    sample = read(
        'vllm:num_requests_running{engine="0",model_name="a"} 1\n'
        'vllm:num_requests_running{engine="1",model_name="a"} 2\n'
        'vllm:cache_config_info{engine="0",num_gpu_blocks="34",block_size="128"} 1\n'
        'vllm:cache_config_info{engine="1",num_gpu_blocks="34",block_size="128"} 1\n'
    )
    assert [engine.num_blocks for engine in sample.engines] == [17, 17]
    assert sample.num_blocks == 34
    again = read("".join(f"{name} {value}\n" for name, value in sample_series(sample)))
    assert [engine.num_blocks for engine in again.engines] == [17, 17]


def test_v0_tells_its_pool_once_for_the_server() -> None:
    sample = read(
        'vllm:num_requests_running{model_name="m"} 1\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="27000",enable_prefix_caching="False"} 1.0\n'
    )
    assert (sample.engines[0].num_blocks, sample.engines[0].prefix_caching) == (27000, False)


def test_names_that_collectors_rewrote_are_read_too() -> None:
    text = 'ray_vllm_num_requests_running{model_name="m"} 3\nvllm_generation_tokens{model_name="m"} 5\n'
    assert read(text).running == 3
    assert read(text).total("generation_tokens") == 5


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "empty"),
        ("<!DOCTYPE html><html><body>502</body></html>", "HTML"),
        ('{"detail":"Not Found"}', "JSON"),
        ("# HELP up x\n# TYPE up gauge\nup 1\n", "none of a vLLM"),
        ("hello\nworld\n", "no metrics"),
        ("\0\1\2", "binary"),
    ],
)
def test_what_is_no_metrics_says_what_it_is(body: str, says: str) -> None:
    with pytest.raises(NotMetrics, match=says):
        read(body)


def test_no_numbers_are_left_out_and_noted_and_do_not_spread() -> None:
    sample = read(
        'vllm:kv_cache_usage_perc{model_name="m"} NaN\n'
        'vllm:num_requests_waiting{model_name="m"} +Inf\n'
        'vllm:num_requests_running{model_name="m"} 2\n'
    )
    assert (sample.kv_use, sample.waiting, sample.running) == (None, None, 2)
    assert len(sample.notes) == 2


@pytest.mark.parametrize(("use", "waiting"), [("1e300", "-Inf"), ("-0.1", "-1"), ("42", "1e308")])
def test_numbers_that_no_server_can_have_are_unknown(use: str, waiting: str) -> None:
    sample = read(
        f'vllm:kv_cache_usage_perc{{model_name="m"}} {use}\n'
        f'vllm:num_requests_waiting{{model_name="m"}} {waiting}\n'
        'vllm:num_requests_running{model_name="m"} 2\n'
        'vllm:cache_config_info{block_size="0",num_gpu_blocks="-5"} 1\n'
    )
    (engine,) = sample.engines
    assert (sample.kv_use, sample.waiting, sample.running) == (None, None, 2)
    assert (engine.num_blocks, engine.block_size) == (None, None)


def test_a_line_cut_in_half_is_not_believed() -> None:
    sample = read('vllm:num_requests_running{model_name="m"} 2\nvllm:generation_tokens_total{model_name="m"} 12')
    assert sample.total("generation_tokens") is None
    assert "cut short" in sample.notes[0]


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_waiting{model_name="m" 5',
        "vllm:num_requests_waiting{a=b} 5",
        'vllm:num_requests_waiting{model_name="m"} five',
        "vllm:num_requests_waiting",
    ],
)
def test_a_malformed_line_is_left_out_and_noted(line: str) -> None:
    sample = read(f'vllm:num_requests_running{{model_name="m"}} 2\n{line}\n')
    assert (sample.running, sample.waiting) == (2, None)
    assert sample.notes


def test_a_histogram_with_a_hole_is_left_out() -> None:
    name = "vllm:time_to_first_token_seconds"
    sample = read(f'{name}_bucket{{le="0.1"}} 3\n{name}_bucket{{le="1.0"}} 5\n{name}_sum 4\n{name}_count 5\n')
    assert sample.engines[0].ttft is None
    assert sample.notes


LABEL_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@given(
    LABEL_TEXT,
    LABEL_TEXT,
    st.dictionaries(
        st.sampled_from(["running", "waiting", "generation_tokens", "preemptions"]), st.floats(0, 1e12), min_size=1
    ),
    st.dictionaries(st.just("kv_use"), st.floats(0, 1)),
    st.booleans(),
)
def test_any_labels_and_values_are_read_as_prometheus_client_reads_them(model, engine, counts, use, stamped) -> None:  # type: ignore[no-untyped-def]
    values = counts | use
    labels = f'{{model_name="{escaped(model)}",engine="{escaped(engine)}"}}'
    stamp = " 1700000000000" if stamped else ""
    text = "".join(f"{metrics.names_of(role)[0]}{labels} {value!r}{stamp}\n" for role, value in values.items())
    theirs = {
        (sample.name, sample.labels["model_name"], sample.labels["engine"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    (mine,) = read(text).engines
    assert theirs == {(metrics.names_of(role)[0], *mine.key): getattr(mine, role) for role in values}


@given(st.binary(max_size=400))
def test_no_bytes_make_it_fail_in_another_way(body: bytes) -> None:
    try:
        parse_sample(body, 1.0, "x")
    except NotMetrics:
        return


@given(st.integers(0, 60_000))
def test_half_of_a_real_answer_is_a_sample_or_none_and_never_a_wrong_number(cut: int) -> None:
    whole = REAL.read_bytes()
    try:
        half = parse_sample(whole[:cut], 1.0, "x")
    except NotMetrics:
        return
    full = parse_sample(whole, 1.0, "x")
    for mine, theirs in zip(half.engines, full.engines, strict=False):
        for name in ("kv_use", "running", "waiting", "generation_tokens", "preemptions", "ttft", "num_blocks"):
            assert getattr(mine, name) in {None, getattr(theirs, name)}


def test_counters_are_wanted_with_and_without_their_ending() -> None:
    assert {b"vllm:num_preemptions_total", b"vllm:num_preemptions"} <= slots_by_name().keys()


@pytest.mark.parametrize(
    "body",
    [
        "process_start_time_seconds 1.7e9\ngo_goroutines 5\n",
        'vllm:num_requests_running{model_name="m"} NaN\n',
        'vllm:cache_config_info{num_gpu_blocks="9",block_size="16"} 1\nvllm:num_requests_running NaN\n',
    ],
)
def test_an_answer_without_a_figure_of_a_vllm_is_none_of_a_vllm(body: str) -> None:
    with pytest.raises(NotMetrics, match="of a vLLM"):
        read(body)


def test_a_v0_that_shows_its_pool_before_its_first_figures_is_a_vllm() -> None:
    assert read('vllm:cache_config_info{num_gpu_blocks="9",block_size="16"} 1\n').engines == ()


@pytest.mark.parametrize(
    "line",
    [
        'vllm:generation_tokens_total{model_name="a # {b}"} 5',
        'vllm:generation_tokens_total{model_name="m"}  5 1700000000',
    ],
)
def test_a_line_gives_its_own_value_whatever_stands_around_it(line: str) -> None:
    assert read(line + "\n").total("generation_tokens") == 5


def test_an_exemplar_never_becomes_the_value() -> None:
    sample = read('vllm:num_requests_running 1\nvllm:generation_tokens_total{model_name="m"} 5 # {trace_id="x"} 1.0\n')
    assert sample.total("generation_tokens") is None and sample.notes


def test_finished_requests_are_counted_once_under_every_name_and_every_repeat() -> None:
    sample = read(
        'vllm:request_success{finished_reason="stop"} 5\n'
        'vllm:request_success_total{finished_reason="stop"} 5\n'
        'vllm:request_success_total{finished_reason="stop"} 5\n'
        'vllm:request_success_total{finished_reason="abort"} 2\n'
    )
    assert (sample.total("finished"), sample.engines[0].aborted) == (7, 2)


def test_a_model_name_never_steers_a_terminal() -> None:
    (engine,) = read('vllm:num_requests_running{engine="0",model_name="\x1b[31mm\x07\x9b2J"} 1\n').engines
    assert engine.key == ("[31mm2J", "0")


def test_replicas_of_ray_serve_that_answer_together_are_told_apart() -> None:
    text = "".join(
        f'ray_vllm_num_requests_running{{engine="0",model_name="m",ReplicaId="{replica}"}} {running}\n'
        f'ray_vllm_cache_config_info{{engine="0",ReplicaId="{replica}",num_gpu_blocks="{blocks}",block_size="16"}} 1\n'
        for replica, running, blocks in (("ab", 3, 100), ("cd", 4, 100), ("ef", 5, 300))
    )
    sample = parse_sample(text, 1.0, "a")
    assert [(engine.engine, engine.running, engine.num_blocks) for engine in sample.engines] == [
        ("0 of ab", 3, 100),
        ("0 of cd", 4, 100),
        ("0 of ef", 5, 300),
    ]


def test_memory_of_the_workers_is_added_up_and_what_they_hold_of_the_host_is_left_out() -> None:
    rows = (
        "vllm:num_requests_running 1",
        'legroom_worker_used_bytes{rank="0",gpu="0"} 60',
        'legroom_worker_used_bytes{rank="1",gpu="1"} 70',
        'legroom_worker_used_bytes{rank="2",gpu="cpu"} 1000',
        'legroom_worker_reserved_bytes{rank="0",gpu="0"} 50',
    )
    sample_read = read("\n".join((*rows, "")))
    assert (sample_read.memory_used_bytes, sample_read.reserved_bytes, sample_read.allocated_bytes) == (130, 50, None)


def test_host_memory_of_the_workers_is_added_up_whether_or_not_they_have_a_gpu() -> None:
    rows = (
        "vllm:num_requests_running 1",
        'legroom_worker_host_rss_bytes{rank="0",gpu="0"} 60',
        'legroom_worker_host_rss_bytes{rank="1",gpu="cpu"} 70',
    )
    assert read("\n".join((*rows, ""))).host_rss_bytes == 130


def test_the_api_servers_own_host_memory_is_on_the_page_of_a_real_server() -> None:
    assert read(REAL.read_text("utf-8")).api_server_rss_bytes == 616_931_328
