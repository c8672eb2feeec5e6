"""The runbook pages: one for each alert, up to date, with catalog entries and commands that exist."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from planned import planned

from legroom.cli.main import COMMANDS, main
from legroom.exports.export_request import ExportRequest
from legroom.exports.prometheus import alert_runbooks
from legroom.exports.prometheus import rules as prometheus
from legroom.exports.prometheus.alerts import alert_texts
from legroom.facts.releases import release
from legroom.planning.plan_document import plan_from_json

PAGES = Path(__file__).parents[2] / "docs/runbooks"


def alerts(**options):
    rules, _ = prometheus.files(ExportRequest(release("0.32.0"), None, options))
    return [rule for group in yaml.safe_load(rules.text)["groups"] for rule in group["rules"] if "alert" in rule]


def test_the_pages_in_the_docs_are_what_the_command_writes():
    written = {file.path: file.text for file in alert_runbooks.files(ExportRequest(None))}
    kept = {path.name: path.read_text("utf-8") for path in PAGES.glob("*.md")}
    assert kept == written, "run: legroom export alert-runbooks --vllm any -o docs/runbooks"


def test_every_alert_leads_to_its_page():
    for rule in alerts():
        assert (PAGES / f"{rule['alert']}.md").exists()
        assert "runbook_url" not in rule["annotations"]  # a path without a host leads nowhere


def test_the_base_of_the_links_can_be_named():
    urls = [rule["annotations"]["runbook_url"] for rule in alerts(runbook_base="https://wiki.example.org/vllm/")]
    assert urls[0] == "https://wiki.example.org/vllm/VllmKvPressure.md"


def test_every_alert_says_what_where_and_how_bad():
    for rule in alerts():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"]["summary"]
        assert "{{" in rule["annotations"]["description"], rule["alert"]
        assert "<" not in rule["annotations"]["description"]


def test_the_configuration_scrapes_what_was_named(promtool, tmp_path):
    options = {"target": ["a:8000", "b:8000"], "guard": ["g:8100"], "watch": ["w:9100"]}
    for file in prometheus.files(ExportRequest(None, None, options)):
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).write_text(file.text)
    config = yaml.safe_load((tmp_path / prometheus.CONFIG_FILE).read_text())
    jobs = {scrape["job_name"]: scrape for scrape in config["scrape_configs"]}
    assert jobs["vllm"]["static_configs"][0]["targets"] == ["a:8000", "b:8000"]
    assert jobs["legroom-guard"]["metric_relabel_configs"][0]["regex"] == "legroom_.*"
    done = subprocess.run(
        [promtool, "check", "config", prometheus.CONFIG_FILE], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_puts_its_figures_into_the_alerts():
    plan = planned("8b-h100")
    rules, _ = prometheus.files(ExportRequest(plan.release, plan))
    assert f"the pool holds {plan.kv.tokens:,} tokens" in rules.text
    assert f"{plan.args['max_num_seqs']:,} may run at once" in rules.text


@pytest.mark.parametrize("name", sorted(alert_texts()))
def test_the_commands_that_a_page_names_exist(name):
    text = (PAGES / f"{name}.md").read_text("utf-8")
    known = {command.name for command in COMMANDS}
    assert set(re.findall(r"`legroom ([a-z]+)", text)) <= known


@pytest.mark.parametrize(
    ("words_", "expected"),
    [
        (("--ttft-p99", "soon"), "is not a time"),
        (("--inter-token-p99", "-1"), "is not a time"),
        (("--speed-up", "1000"), "not a factor"),
        (("--job", 'a"b'), "not a job name"),
        (("--target", "http://gpu1:8000/metrics"), "is not an address"),
        (("--vllm", "9.x"), "not a version number"),
        (("--vllm", "0.3.0"), "older than any release"),
    ],
    ids=str,
)
def test_a_wrong_option_says_what_is_wrong(capsys, words_, expected):
    assert main(["export", "prometheus", *words_]) == 2
    assert expected in capsys.readouterr().err


def test_a_speed_up_divides_every_time_and_changes_nothing_else():
    usual, quick = alerts(), alerts(speed_up="10")
    assert [rule["alert"] for rule in usual] == [rule["alert"] for rule in quick]
    pressure = {rule["alert"]: rule for rule in quick}["VllmKvPressure"]
    assert pressure["for"] == "12s"
    usually = {rule["alert"]: rule for rule in usual}["VllmKvPressure"]["expr"]
    assert "[2m]" in usually
    assert pressure["expr"] == usually.replace("[2m]", "[12s]")


def planned_with(*flags):
    document = dict(planned("8b-dp2").to_json())
    made = plan_from_json({**document, "command": [*document["command"], *flags]})
    return ExportRequest(made.release, made, {})


def scraped(request):
    _, config = prometheus.files(request)
    return yaml.safe_load(config.text)["scrape_configs"][0]


def test_the_planned_server_is_scraped_where_it_listens(promtool, tmp_path):
    assert scraped(planned_with("--port", "9000"))["static_configs"] == [{"targets": ["localhost:9000"]}]
    made = planned_with("--ssl-certfile", "/c.pem", "--ssl-keyfile", "/k.pem")
    assert scraped(made)["scheme"] == "https"
    for file in prometheus.files(made):
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).write_text(file.text)
    done = subprocess.run(
        [promtool, "check", "config", prometheus.CONFIG_FILE], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout


def down_rule(plan, **options):
    rules, _ = prometheus.files(ExportRequest(plan.release, plan, options))
    every = [rule for group in yaml.safe_load(rules.text)["groups"] for rule in group["rules"]]
    return next(rule for rule in every if rule.get("alert") == "VllmDown")


def test_a_first_start_takes_as_long_as_one_checkpoint_and_the_disk_say():
    single, copies = planned("8b-h100"), planned("8b-dp2")
    assert "offset 4m30s" in down_rule(single)["expr"] == down_rule(copies)["expr"]
    assert "offset 3m" in down_rule(single, disk_speed="5GB/s")["expr"]
    assert down_rule(single)["for"] == "2m"


@pytest.mark.parametrize(("up", "fires"), [("1x20 0x5", 1), ("_x5 0x20", 0), ("0x40", 1), ("1x20 0 0 1x5", 0)])
def test_a_large_server_that_was_up_is_missed_in_two_minutes_and_a_first_start_is_not(promtool, tmp_path, up, fires):
    plan = planned("70b-tp4")
    rule = down_rule(plan)
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "down", "rules": [rule]}]}))
    expected = [{"labels": "{}", "value": 1}] if fires else []
    check = {"expr": 'count(ALERTS{alertstate="firing"})', "eval_time": "24m", "exp_samples": expected}
    if up == "0x40":
        check["eval_time"] = "40m"
    series = [{"series": 'up{job="vllm",instance="a:8000"}', "values": up}]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [check]}
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    done = subprocess.run([promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
