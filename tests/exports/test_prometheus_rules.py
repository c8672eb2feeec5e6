"""The exported rules under promtool: every alert with cases in which it fires and cases in which it must not."""

import json
import os
import re
import subprocess
from dataclasses import replace
from functools import cache
from itertools import groupby

import pytest
import yaml
from planned import planned
from rule_cases import CASES, NEVER_STARTED, OWN_CASES, WEEK_CASES
from scraped_servers import HEALTHY, growing, in_turn, level, second

from legroom.exports.export_request import ExportRequest
from legroom.exports.grafana import dashboard as grafana
from legroom.exports.prometheus import rules as prometheus
from legroom.exports.prometheus.alerts import alert_texts
from legroom.facts.metrics import exposed_names
from legroom.facts.releases import release

RELEASES = ("0.4.0", "0.6.6", "0.8.5", "0.11.0", "0.20.0", "0.32.0")
SAME_RULES = ("0.20.0", "0.32.0")
TRIED = [version for version in RELEASES if version != SAME_RULES[0]]
WRITTEN_FOR = [(version, version) for version in TRIED] + [("any", version) for version in TRIED[1:]]
WITH_OPTIONS = [("0.32.0", "0.32.0"), ("any", "0.6.6")]
"""Options change thresholds and matchers; between these two every latency has another name."""
OTHER_RELEASE = [("0.32.0", "0.6.6"), ("0.32.0", "0.8.5"), ("0.6.6", "0.32.0"), ("0.32.0", "0.9.2")]

LOADED = {
    "a full pool with a queue",
    "as many waiting as running in a full pool",
    "a long queue for a full pool is no backlog of another kind",
}
"""Cases in which only alerts on the pool fire."""


@cache
def files_of(written_for, options):
    known = None if written_for == "any" else release(written_for)
    return prometheus.files(ExportRequest(known, None, dict(options)))


def exported(written_for, folder, **options):
    for file in files_of(written_for, tuple(options.items())):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.text)
    return folder


def promtool_test(cases, version):
    """All cases as servers of one Prometheus, and every alert that fires there at the end."""
    expected = [
        {"labels": f'{{alertname="{name}", namespace="{case.says}"}}', "value": 1}
        for case in cases
        for name in case.fires
    ]
    return {
        "interval": f"{cases[0].every_minutes}m",
        "input_series": [row for case in cases for server in case.servers for row in server.series(version, case.says)],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname, namespace) (ALERTS{alertstate="firing"})',
                "eval_time": f"{cases[0].minutes}m",
                "exp_samples": expected,
            }
        ],
    }


def run(*words_, cwd):
    # Collecting garbage a quarter as often saves a quarter of promtool's time.
    seldom = {**os.environ, "GOGC": "400", "GOMAXPROCS": "1"}
    done = subprocess.run(words_, cwd=cwd, env=seldom, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("written_for", [*RELEASES, "any"])
def test_promtool_takes_the_rules_and_the_configuration(promtool, tmp_path, written_for):
    exported(written_for, tmp_path)
    code, output = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", prometheus.RULES_FILE, cwd=tmp_path)
    assert code == 0, output
    code, output = run(promtool, "check", "config", prometheus.CONFIG_FILE, cwd=tmp_path)
    assert code == 0, output


def in_one_run(case):
    """Cases with the same rules and the same clock."""
    return tuple(case.options.items()), case.every_minutes, case.rules_every_minutes, case.minutes


def keep_one_alert(file, name):
    """Leave an alert and the series that it reads of a file of rules: promtool's time is by the rule."""
    groups = yaml.safe_load(file.read_text())["groups"]
    rules = {rule.get("alert") or rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}
    read, left = set(), [name]
    while left:
        read.add(reader := left.pop())
        left += [other for other in rules if other in rules[reader] and other not in read]
    for group in groups:
        group["rules"] = [rule for rule in group["rules"] if (rule.get("alert") or rule["record"]) in read]
    file.write_text(json.dumps({"groups": groups}))


def fire_exactly(promtool, tmp_path, cases, written_for, version, alert=None):
    for number, ((options, _, every, _), alike) in enumerate(groupby(sorted(cases, key=in_one_run), in_one_run)):
        folder = exported(written_for, tmp_path / str(number), **dict(options))
        if alert:
            keep_one_alert(folder / prometheus.RULES_FILE, alert)
        groups = yaml.safe_load((folder / prometheus.RULES_FILE).read_text())["groups"]
        document = {
            "rule_files": [prometheus.RULES_FILE],
            "evaluation_interval": f"{every}m",
            # Else promtool takes them in any order, and what an alert reads is a coarse step old or not by chance.
            "group_eval_order": [group["name"] for group in groups],
            "tests": [promtool_test(list(alike), version)],
        }
        # JSON is YAML, and thousands of series are written ten times as fast.
        (folder / "test.yml").write_text(json.dumps(document))
        code, output = run(promtool, "test", "rules", "test.yml", cwd=folder)
        assert code == 0, output


def test_releases_with_the_same_metrics_have_the_same_rules():
    older, newer = (prometheus.files(ExportRequest(release(version)))[0].text for version in SAME_RULES)
    assert older.replace(*SAME_RULES) == newer
    series = ([row for case in CASES for server in case.servers for row in server.series(v, "")] for v in SAME_RULES)
    assert next(series) == next(series)


def one_case_an_alert(cases):
    """A healthy server, and the first case of each alert."""
    firsts = {name: case for case in reversed(cases) for name in case.fires}
    return [case for case in cases if case.servers == (HEALTHY,) or case in firsts.values()]


@pytest.mark.parametrize(("written_for", "version"), WRITTEN_FOR, ids=lambda value: value)
def test_exactly_the_right_alerts_fire(promtool, tmp_path, written_for, version):
    cases = [case for case in CASES if not case.since or release(version).at_least(case.since)]
    if (written_for, version) not in WITH_OPTIONS:
        cases = [case for case in cases if not case.options]
        if version != TRIED[0]:
            # Releases in between differ in the names of metrics alone: an alert that fires reads those of its release.
            cases = one_case_an_alert(cases)
    fire_exactly(promtool, tmp_path, cases, written_for, version)


@pytest.mark.parametrize(("written_for", "version"), OTHER_RELEASE, ids=lambda value: value)
def test_rules_of_another_release_say_that_they_miss_its_metrics_and_nothing_that_is_false(
    promtool, tmp_path, written_for, version
):
    """Without the KV use nobody can say that the pool has room, or that it is full."""
    listed = [case for case in CASES if case.servers == (HEALTHY,) or case.says in LOADED]
    sees_pool = version == "0.9.2"  # it has today's name of the KV use, not that of the time between tokens
    missing = frozenset({"VllmMetricsMissing"})
    blind = [replace(case, fires=missing | (case.fires if sees_pool else set())) for case in listed]
    fire_exactly(promtool, tmp_path, blind, written_for, version)


@pytest.mark.parametrize(("written_for", "version"), WITH_OPTIONS)
def test_a_server_is_compared_with_itself_a_week_ago(promtool, tmp_path, written_for, version):
    fire_exactly(promtool, tmp_path, WEEK_CASES, written_for, version, alert="VllmTrafficStopped")


def test_exactly_the_right_alerts_fire_on_what_legroom_itself_measures(promtool, tmp_path):
    fire_exactly(promtool, tmp_path, OWN_CASES, "0.32.0", "0.32.0")


@cache
def expressions(version):
    """Everything that the rules and the dashboard of a release ask."""
    known = None if version == "any" else release(version)
    rules, _ = prometheus.files(ExportRequest(known, planned("8b-h100")))
    asked = [rule["expr"] for group in yaml.safe_load(rules.text)["groups"] for rule in group["rules"]]
    (dashboard,) = grafana.files(ExportRequest(known, planned("8b-h100")))
    document = json.loads(dashboard.text)
    asked += [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    return asked + [annotation["expr"] for annotation in document["annotations"]["list"]]


@pytest.mark.parametrize("version", [*RELEASES, "0.17.0"])
def test_only_metrics_that_the_release_shows_are_asked_for(version):
    asked = {name for expr in expressions(version) for name in re.findall(r"(?<!legroom:)\bvllm:\w+", expr)}
    assert asked
    assert asked <= exposed_names(release(version))


@pytest.mark.parametrize("version", [*RELEASES, "0.17.0", "any"])
def test_promtool_reads_every_expression_of_the_dashboard(promtool, tmp_path, version):
    rules = [
        {"record": f"r{number}", "expr": expr.replace("$__rate_interval", "5m").replace("$__interval", "1m")}
        for number, expr in enumerate(expressions(version))
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    code, output = run(promtool, "check", "rules", "rules.yml", cwd=tmp_path)
    assert code == 0, output


def test_an_alert_tells_its_values_in_words(promtool, tmp_path):
    exported("0.32.0", tmp_path, runbook_base="https://wiki.example.org")
    server = HEALTHY.but(kv_use=level(0.98), waiting=level(3), preemptions=growing(6))
    told = {
        "summary": "KV cache pressure on llama on a:8000",
        "description": "The KV cache of llama on a:8000 is up to 98% full while 3 requests wait and 0.10 are "
        "preempted per second. A full pool alone is healthy; full with a queue or with preemptions means that the load "
        "is larger than what it can hold.",
        "runbook_url": "https://wiki.example.org/VllmKvPressure.md",
    }
    labels = {"severity": "warning", "job": "vllm", "namespace": "llama", "instance": "a:8000"}
    labels |= {"model_name": "llama", "engine": "0"}
    check = {"eval_time": "20m", "alertname": "VllmKvPressure"}
    test = {
        "interval": "1m",
        "input_series": server.series("0.32.0", "llama"),
        "alert_rule_test": [{**check, "exp_alerts": [{"exp_labels": labels, "exp_annotations": told}]}],
    }
    document = {"rule_files": [prometheus.RULES_FILE], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    code, output = run(promtool, "test", "rules", "test.yml", cwd=tmp_path)
    assert code == 0, output


PRESSED = """
- {kv_use: 1.0, waiting: 4, running: 8, is: 4}
- {kv_use: 0.8, waiting: 4, running: 3, is: 4}
- {kv_use: 0.8, waiting: 4, running: 30, is: 0}
- {kv_use: 1.0, waiting: 0, running: 8, is: 0}
- {kv_use: 0.0, waiting: 4, running: 0, is: 0}
- {kv_use: [1.0, 0.25], waiting: 4, running: [4, 1], is: 4}
"""


def looks(measured):
    """A gauge that stays, or one that goes round: the last look of a case falls into its gap."""
    return in_turn(tuple(measured)) if isinstance(measured, list) else level(measured)


@pytest.mark.parametrize("version", ["0.6.6", "0.32.0"])
def test_the_pressure_that_the_dashboard_shows_is_that_of_the_alert_engine_by_engine(promtool, tmp_path, version):
    """A full engine without a queue beside one with a queue and room is no pressure."""
    (dashboard,) = grafana.files(ExportRequest(release(version)))
    (panel,) = (panel for panel in json.loads(dashboard.text)["panels"] if panel["title"] == "Pressure")
    expr = re.sub(r"\$(cluster|namespace|job|instance|model)\b", ".*", panel["targets"][0]["expr"])
    servers = yaml.safe_load(PRESSED)
    rows = [
        row
        for number, server in enumerate(servers)
        for row in HEALTHY.but(**{role: looks(server[role]) for role in ("kv_use", "waiting", "running")}).series(
            version, f"m{number}"
        )
    ]
    if version != "0.6.6":  # V0 has no engines
        rows += second(HEALTHY, kv_use=level(1.0)).series(version, "m2")
    expected = [
        {
            "labels": f'{{job="vllm", namespace="m{number}", instance="a:8000", model_name="m{number}"}}',
            "value": server["is"],
        }
        for number, server in enumerate(servers)
    ]
    test = {
        "interval": "1m",
        "input_series": rows,
        "promql_expr_test": [{"expr": expr, "eval_time": "5m", "exp_samples": expected}],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    code, output = run(promtool, "test", "rules", "test.yml", cwd=tmp_path)
    assert code == 0, output


TARGETS = {
    "all of a namespace's targets are gone": ({"a": "1x80 _x20", "b": "1x80 _x20"}, True),
    "all are gone, and nothing but up was recorded": ({"a": "1x80 _x20", "b": "1x80 _x20"}, False),
    "one of three targets is gone": ({"a": "1x80 _x20", "b": "1x100", "c": "1x100"}, False),
    "an autoscaler took one of three": ({"a": "1x80 _x20", "b": "1x100", "c": "1x100"}, False),
    "a Deployment was scaled from three to two": ({"a": "1x80 _x20", "b": "1x100", "c": "1x100"}, False),
    "a Deployment was scaled from four to one": (dict.fromkeys("abc", "1x80 _x20") | {"d": "1x100"}, False),
    "a busy Deployment was deleted": ({"a": "1x80 _x20", "b": "1x80 _x20"}, False),
    "a busy Deployment was scaled to zero": ({"a": "1x80 _x20"}, False),
    "an autoscaler wanted three all along": ({"a": "1x80 _x20", "b": "1x100", "c": "1x100"}, True),
    "one of a fleet whose wanted number changes": (
        {"a": "1x80 _x20", "b": "1x100", "c": "1x100", "d": "_x10 1x10 _x10 1x70"},
        False,
    ),
    "two of three that a Deployment wants are gone": ({"a": "1x80 _x20", "b": "1x80 _x20", "c": "1x100"}, True),
    "a rolling update that added a pod for minutes": (
        {"a": "1x80 _x20", "b": "1x100", "c": "1x100", "d": "_x78 1x22"},
        False,
    ),
    "pods that a rolling update replaced": ({"a": "1x80 _x20", "b": "_x80 1x20"}, False),
    "targets that are down, not gone": ({"a": "1x80 0x20", "b": "1x80 0x20"}, False),
}
BUSY = (
    "all of a namespace's targets are gone",
    "a busy Deployment was deleted",
    "a busy Deployment was scaled to zero",
)


WANTED = {
    "an autoscaler took one of three": ("horizontalpodautoscaler_status_desired", "3x78 2x22"),
    "a Deployment was scaled from three to two": ("deployment_spec", "3x78 2x22"),
    "a Deployment was scaled from four to one": ("deployment_spec", "4x78 1x22"),
    "a busy Deployment was deleted": ("deployment_spec", "2x78 _x22"),
    "a busy Deployment was scaled to zero": ("deployment_spec", "1x78 0x22"),
    "an autoscaler wanted three all along": ("horizontalpodautoscaler_status_desired", "3x100"),
    "one of a fleet whose wanted number changes": ("deployment_spec", "3x10 4x10 3x10 4x50 3x20"),
    "two of three that a Deployment wants are gone": ("deployment_spec", "3x100"),
    "a rolling update that added a pod for minutes": ("deployment_spec", "3x100"),
    "pods that a rolling update replaced": ("deployment_spec", "1x100"),
}


def test_targets_that_are_gone_from_discovery_are_missed_by_namespace(promtool, tmp_path):
    exported("0.32.0", tmp_path)
    keep_one_alert(tmp_path / prometheus.RULES_FILE, "VllmTargetsMissing")
    rows = [
        {"series": f'up{{job="vllm",cluster="c1",namespace="{case}",instance="{name}"}}', "values": values}
        for case, (targets, _) in TARGETS.items()
        for name, values in targets.items()
    ]
    rows += [
        {"series": f'kube_{kind}_replicas{{cluster="c1",namespace="{case}"}}', "values": values}
        for case, (kind, values) in WANTED.items()
    ]
    rows += [
        {
            "series": f'vllm:num_requests_running{{job="vllm",cluster="c1",namespace="{case}",instance="{name}"}}',
            "values": "8x80",
        }
        for case in BUSY
        for name in TARGETS[case][0]
    ]
    expected = [
        {"labels": f'{{cluster="c1", job="vllm", namespace="{case}"}}', "value": 1}
        for case, (_, fires) in TARGETS.items()
        if fires
    ]
    asked = 'sum by (cluster, namespace, job) (ALERTS{alertname="VllmTargetsMissing", alertstate="firing"})'
    check = {"expr": asked, "eval_time": "98m", "exp_samples": expected}
    test = {"interval": "1m", "input_series": rows, "promql_expr_test": [check]}
    document = {"rule_files": [prometheus.RULES_FILE], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    code, output = run(promtool, "test", "rules", "test.yml", cwd=tmp_path)
    assert code == 0, output


def test_a_pod_that_never_came_up_is_told_by_kubernetes_alone(promtool, tmp_path):
    fire_exactly(promtool, tmp_path, NEVER_STARTED, "0.32.0", "0.32.0", "VllmNeverStarted")


def test_a_long_load_makes_the_window_of_a_crash_loop_long_enough(promtool, tmp_path):
    """Seven minutes a start: five of them never fall into a quarter of an hour."""
    plan = planned("70b-tp4")
    for file in prometheus.files(ExportRequest(plan.release, plan, {"disk_speed": "400MB/s"})):
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).write_text(file.text)
    starts = "1000x7 _x6 2000x1 _x6 3000x1 _x6 4000x1 _x6 5000x1 _x6 6000x2"
    rows = HEALTHY.but({"process_start_time_seconds": starts}).series("0.32.0", "m")
    check = {"expr": 'count(ALERTS{alertname="VllmCrashLoop", alertstate="firing"})', "eval_time": "48m"}
    test = {
        "interval": "1m",
        "input_series": rows,
        "promql_expr_test": [{**check, "exp_samples": [{"labels": "{}", "value": 1}]}],
    }
    document = {"rule_files": [prometheus.RULES_FILE], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    code, output = run(promtool, "test", "rules", "test.yml", cwd=tmp_path)
    assert code == 0, output


@pytest.mark.parametrize("version", ["0.6.6", "0.32.0", "any"])
def test_every_aggregation_keeps_cluster_namespace_and_job(version):
    for expr in expressions(version):
        for labels in re.findall(r"\bby \(([^)]*)\)", expr):
            assert {"cluster", "namespace", "job"} <= {label.strip() for label in labels.split(",")}, expr


def test_every_recording_rule_names_its_level():
    rules, _ = prometheus.files(ExportRequest(release("0.32.0")))
    names = [
        rule["record"] for group in yaml.safe_load(rules.text)["groups"] for rule in group["rules"] if "record" in rule
    ]
    assert {name.partition(":")[0] for name in names} == {"engine", "instance", "model"}


def test_every_alert_has_a_case_that_fires_it():
    fired = {name for case in (*CASES, *WEEK_CASES, *OWN_CASES, *NEVER_STARTED) for name in case.fires}
    assert fired | {"VllmTargetsMissing"} == set(alert_texts())
