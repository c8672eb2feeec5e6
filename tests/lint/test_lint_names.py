"""Names of series in dashboards and patterns, and short names of flags."""

import json

import pytest

from legroom.facts.releases import release
from legroom.lint.linter import LintOptions, lint_texts
from legroom.lint.promql_reader import series_names


def findings(text, path, vllm="0.32.0"):
    return lint_texts([(path, text)], LintOptions(release(vllm))).findings


def dashboard(*targets, variables=(), **panel):
    document = {"templating": {"list": list(variables)}, "panels": [{"targets": list(targets), **panel}]}
    return [finding.rule for finding in findings(json.dumps(document), "dash.json")]


# Dashboards


@pytest.mark.parametrize("kind", ["custom", "textbox", "constant"])
def test_the_values_of_a_variable_are_no_series(kind):
    assert dashboard(variables=[{"type": kind, "name": "job", "query": "vllm_prod,vllm_staging"}]) == []


def test_the_query_of_a_variable_is_read():
    query = {"type": "query", "name": "m", "query": "label_values(vllm:num_request_running, job)"}
    assert dashboard(variables=[query]) == ["metric-unknown"]


def test_queries_of_another_data_source_are_not_promql():
    logs = '{app="vllm"} | json | vllm_level="error"'
    assert dashboard({"expr": logs, "datasource": {"type": "loki"}}) == []
    assert dashboard({"expr": logs}, datasource={"type": "loki", "uid": "x"}) == []
    own = {"expr": "vllm:num_requests_runing", "datasource": {"type": "prometheus"}}
    assert dashboard({"expr": logs, "datasource": "Loki"}, own, datasource="-- Mixed --") == ["metric-unknown"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('{"vllm:a", job="b"}', ["vllm:a"]),
        ('{job="b", "vllm:a"}', ["vllm:a"]),
        ('{__name__=~"vllm:a"}', ["vllm:a"]),
        ('{__name__=~"vllm:a.*"}', []),
        ('{__name__!="vllm:a"}', []),
        ('{"a.label"="vllm:b"}', []),
    ],
)
def test_a_selector_names_its_series_in_several_ways(expression, expected):
    named = list(series_names(expression))
    assert [series.text for series in named] == expected
    assert all(expression[series.offset :].startswith(series.text) for series in named)


# Patterns


@pytest.mark.parametrize(
    "text",
    [
        "grep -h num_requests /data/metrics/vllm_node1.txt",
        "curl -s localhost:8000/metrics | sed 's/^vllm:/vllm_/' | grep '^vllm_num_requests'",
        "curl -s localhost:8000/metrics | tr ':' '_' | grep vllm_num_requests",
        "curl -s localhost:8000/metrics | sed 's/vllm:num/vllm_num/'",
        "curl -s localhost:8000/metrics | grep -A 2 vllm:num_requests > vllm_now.txt",
    ],
)
def test_files_and_names_that_were_rewritten_are_no_patterns(text):
    assert findings(text, "a.sh") == ()


@pytest.mark.parametrize(
    "text",
    [
        "curl -s localhost:8000/metrics | grep -A 2 vllm_num_requests",
        "curl -s localhost:8000/metrics | grep -v '#' | grep -e up -e vllm_num_requests",
        "curl -s localhost:8000/metrics | sed 's/{.*}//' | grep -E '^vllm_num_requests'",
        "curl -s localhost:8000/metrics | awk -F ' ' '/vllm_num_requests/ {print $2}'",
    ],
)
def test_a_pattern_that_matches_no_series_is_found(text):
    (finding,) = findings(text, "a.sh")
    assert (finding.rule, finding.suggestion) == ("metric-grep", "write vllm:num_requests")


# Short names


@pytest.mark.parametrize(
    ("flags", "vllm", "rule", "suggestion"),
    [
        ("-dp 2", "0.5.5", "flag-not-yet", "leave it out"),
        ("-cc.mode=3", "0.5.5", "flag-not-yet", "leave it out"),
        ("-cc.mode=3", "0.10.2", "flag-not-yet", "write -O"),
        ("-O.mode=3", "0.12.0", "flag-removed", "write -cc"),
        ("-O.mode=3", "0.32.0", "flag-removed", "write -cc"),
        ("-zz 3", "0.32.0", "flag-unknown", "leave it out"),
    ],
)
def test_a_short_name_has_the_history_of_its_flag(flags, vllm, rule, suggestion):
    (finding,) = findings(f"vllm serve org/m {flags}", "a.sh", vllm)
    assert (finding.rule, finding.suggestion, finding.place.column) == (rule, suggestion, 18)


@pytest.mark.parametrize(("flags", "vllm"), [("-dp 2 -O 3 -cc.mode=3", "0.32.0"), ("-O.level=3", "0.10.2")])
def test_a_short_name_that_the_release_has_is_right(flags, vllm):
    assert findings(f"vllm serve org/m {flags}", "a.sh", vllm) == ()


@pytest.mark.parametrize(
    ("vllm", "name"),
    [
        ("0.32.0", "vllm:prompt_tokens_recomputed_total"),
        ("0.32.0", "vllm:cpu_cache_usage_perc"),
        ("0.32.0", "vllm:num_requests_swapped"),
        ("0.10.2", "vllm:mm_cache_hits_total"),
    ],
)
def test_a_series_that_measures_something_else_is_not_offered_for_one_of_another_release(vllm, name):
    rules = f"groups:\n- rules:\n  - record: a\n    expr: {name}\n"
    (finding,) = findings(rules, "a.yml", vllm)
    assert (finding.rule, finding.suggestion) == ("metric-unknown", "leave it out: this release shows nothing like it")


def test_a_removed_series_under_the_prefix_of_kserve_is_found():
    rule = "groups:\n- name: g\n  rules:\n  - record: a\n    expr: kserve_vllm:gpu_cache_usage_perc\n"
    report = lint_texts([("a.yaml", rule)], LintOptions())
    assert [(finding.rule, finding.suggestion) for finding in report.findings] == [
        ("metric-unknown", "write kserve_vllm:kv_cache_usage_perc")
    ]


def test_series_that_a_program_among_the_files_shows_itself_are_right():
    program = (
        "from prometheus_client import Counter\nimport vllm\nDONE = Counter('vllm_request_success_total', 'done')\n"
    )
    rules = "groups:\n- name: a\n  rules:\n  - {record: 'a:b', expr: 'rate(vllm_request_success_total[5m])'}\n"
    script = "curl -s localhost:8000/metrics | grep vllm_request_success_total\n"
    texts = [("rules.yml", rules), ("look.sh", script)]
    alone = [finding.rule for finding in lint_texts(texts, LintOptions()).findings]
    beside = [finding.rule for finding in lint_texts([*texts, ("app.py", program)], LintOptions()).findings]
    assert (alone, beside) == (["metric-unknown", "metric-grep"], [])
