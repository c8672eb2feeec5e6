"""The dashboard: valid by Grafana's own types, complete, stable, with the plan in it."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from planned import planned, request

from legroom.cli.main import main
from legroom.exports.export_request import ExportRequest
from legroom.exports.grafana import dashboard as grafana
from legroom.exports.prometheus import rules as prometheus
from legroom.facts.releases import release

SCHEMAS = Path(__file__).parents[2] / ".tools/grafana"
RELEASES = ("0.4.0", "0.6.6", "0.8.5", "0.10.2", "0.17.0", "0.20.0", "0.32.0", "any")


def dashboard(version="0.32.0", plan=None, **options):
    known = None if version == "any" else release(version)
    (file,) = grafana.files(ExportRequest(known, plan, options))
    return json.loads(file.text)


def panels(document):
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def schema(name):
    schemas = sorted(SCHEMAS.glob(f"*/{name}.json"))
    if not schemas:
        pytest.skip("no schemas of Grafana here: run bin/setup-tools grafana")
    return json.loads(schemas[-1].read_text())


def closed(document):
    """Without what Grafana reads and its types leave out: a Prometheus annotation's expression."""
    for annotation in document["annotations"]["list"]:
        assert annotation.pop("expr")
    return document


@pytest.mark.parametrize("version", RELEASES)
def test_the_dashboard_is_valid_by_grafanas_own_types(version):
    jsonschema.validate(closed(dashboard(version)), schema("dashboard"), jsonschema.Draft7Validator)


def test_the_dashboard_of_a_plan_is_valid_too():
    jsonschema.validate(closed(dashboard(plan=planned("8b-h100"))), schema("dashboard"), jsonschema.Draft7Validator)


@pytest.mark.parametrize("kind", ["timeseries", "stat", "bargauge", "table"])
def test_the_options_of_every_panel_are_valid_by_grafanas_own_types(kind):
    chosen = [panel for panel in panels(dashboard(plan=planned("8b-h100"))) if panel["type"] == kind]
    assert chosen
    for panel in chosen:
        options = schema(f"{kind}-Options")
        partial(options)
        jsonschema.validate(panel.get("options", {}), options, jsonschema.Draft7Validator)
        custom = panel["fieldConfig"]["defaults"].get("custom")
        if custom:
            jsonschema.validate(custom, partial(schema(f"{kind}-FieldConfig")), jsonschema.Draft7Validator)


def partial(of):
    """Grafana fills in what a panel leaves out: its own defaults. What is there must still be right."""
    name = of["$ref"].rsplit("/", 1)[1]
    of["definitions"][name].pop("required", None)
    return of


@pytest.mark.parametrize("version", RELEASES)
def test_every_panel_says_what_it_shows_and_has_a_unit_and_a_query(version):
    for panel in panels(dashboard(version)):
        assert len(panel["description"]) > 10, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert all(target["expr"].strip() for target in panel["targets"])


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    document = dashboard(plan=planned("8b-h100"))
    assert len({panel["id"] for panel in document["panels"]}) == len(document["panels"])
    taken = set()
    for panel in document["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_everything_reads_the_chosen_data_source():
    document = dashboard()
    variables = [variable["name"] for variable in document["templating"]["list"]]
    assert variables == ["datasource", "cluster", "namespace", "job", "model", "instance"]
    sources = [panel["datasource"]["uid"] for panel in panels(document)]
    sources += [annotation["datasource"]["uid"] for annotation in document["annotations"]["list"]]
    assert set(sources) == {"${datasource}"}


def test_the_plan_is_beside_reality():
    plan = planned("8b-h100")
    titles = {panel["title"]: panel for panel in panels(dashboard(plan=plan))}
    parts = [target["expr"] for target in titles["Planned layout of one GPU"]["targets"]]
    assert f"vector({plan.layout.weights_bytes})" in parts
    steps = titles["Running"]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[-1]["value"] == plan.args["max_num_seqs"]
    assert str(plan.kv.tokens) in titles["Tokens in the KV cache"]["targets"][0]["expr"]


def test_the_figures_of_a_data_parallel_plan_are_those_of_all_its_engines():
    plan = planned("8b-dp2")
    titles = {panel["title"]: panel for panel in panels(dashboard(plan=plan))}
    steps = titles["Running"]["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert steps[-1]["value"] == 2 * plan.args["max_num_seqs"]
    assert f"vector({2 * plan.kv.tokens})" in titles["Tokens in the KV cache"]["targets"][1]["expr"]
    assert str(2 * plan.kv.tokens) in titles["Recomputed share"]["targets"][0]["expr"]


def test_a_model_without_a_kv_cache_has_no_panel_and_no_sentence_about_a_pool_of_nothing():
    plan = planned("embedder")
    titles = {panel["title"] for panel in panels(dashboard(plan=plan))}
    assert "Planned layout of one GPU" in titles
    assert "Tokens in the KV cache" not in titles
    rules, _ = prometheus.files(ExportRequest(plan.release, plan))
    assert "By the plan the pool" not in rules.text


@pytest.mark.parametrize("version", ["0.6.6", "0.32.0", "any"])
def test_the_reported_pool_keeps_the_labels_that_hold_it(version):
    titles = {panel["title"]: panel for panel in panels(dashboard(version))}
    (target,) = titles["The pool as the servers report it"]["targets"]
    kept = target["expr"].partition("by (")[2].partition(")")[0].split(", ")
    assert {"instance", "num_gpu_blocks", "block_size", "cache_dtype"} <= set(kept)
    assert "without" not in target["expr"]


def test_latency_targets_become_thresholds():
    titles = {panel["title"]: panel for panel in panels(dashboard(ttft_p99="2s"))}
    assert titles["Time to first token"]["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] == 2


def test_the_uid_is_the_same_for_the_same_deployment_and_another_for_another():
    first, again = dashboard(plan=planned("8b-h100")), dashboard(plan=planned("8b-h100"), ttft_p99="2s")
    other = dashboard(plan=planned("70b-tp4"))
    assert first["uid"] == again["uid"] != other["uid"]
    assert dashboard()["uid"] == dashboard("any")["uid"] == "legroom-vllm"
    assert len(first["uid"]) <= 40


def test_the_same_request_gives_the_same_text():
    assert grafana.files(request("8b-h100")) == grafana.files(request("8b-h100"))


def test_without_the_sdk_it_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "grafana_foundation_sdk", None)
    assert main(["export", "grafana", "--vllm", "0.32.0"]) == 3
    assert "pip install 'legroom[export]'" in capsys.readouterr().err
