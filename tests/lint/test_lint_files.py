"""Lint on each kind of file, and on files that cannot be read."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from legroom import plan
from legroom.cli.main import main
from legroom.deployments.shell.simple_commands import simple_commands
from legroom.deployments.source_text import Text
from legroom.lint.linter import SEARCHED, LintOptions, lint_texts
from legroom.lint.promql_reader import comparisons, series_names
from legroom.lint.rule import rules_by_id
from legroom.lint.rules import all_checks
from legroom.planning.plan_document import plan_from_json

ROOT = Path(__file__).parents[2]
RULES_FILE = "groups: [{name: a, rules: [{alert: A, expr: 'EXPR'}]}]"


def lint(text, path="file", **options):
    return lint_texts([(path, text)], LintOptions(**options))


def rules_of(text, path="file", **options):
    return [finding.rule for finding in lint(text, path, **options).findings]


def alert(expression, **options):
    return rules_of(RULES_FILE.replace("EXPR", expression), "rules.yml", **options)


# Alert rules


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("vllm:kv_cache_usage_perc > 0.9", ["alert-full-pool"]),
        ("avg_over_time(vllm:kv_cache_usage_perc[5m]) >= 0.95", ["alert-full-pool"]),
        ("vllm:kv_cache_usage_perc > 0.9 and vllm:num_requests_waiting > 0", []),
        ("vllm:kv_cache_usage_perc > 0.9 and rate(vllm:num_preemptions_total[5m]) > 0", []),
        ("vllm:kv_cache_usage_perc > 90", ["alert-full-pool", "alert-never"]),
        ("vllm:kv_cache_usage_perc * 100 > 90", ["alert-full-pool"]),
        ("rate(vllm:request_success_total[5m]) == 0", ["alert-no-traffic"]),
        ("rate(vllm:generation_tokens_total[5m]) == 0 and vllm:num_requests_running > 0", []),
        ("up == 0", []),
        ("histogram_quantile(0.99, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 5", []),
        ("vllm:num_requests_runing > 0", ["metric-unknown"]),
        ("vllm:num_preemptions > 0", ["metric-unknown"]),
        ("(vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc) > 0.9 and vllm:num_requests_waiting > 0", []),
        ("vllm:gpu_cache_usage_perc > 0.9 and vllm:num_requests_waiting > 0", ["metric-unknown"]),
    ],
)
def test_alerts(expression, expected):
    assert sorted(alert(expression)) == sorted(expected)


def test_a_threshold_is_held_against_the_plan():
    document = plan_from_json(plan("llama-3.1-8b", "h100", max_num_seqs=64).json())
    assert alert("vllm:num_requests_running > 100", plan=document) == ["alert-never"]
    assert alert("vllm:num_requests_running > 60", plan=document) == []


def test_rules_of_the_operator_and_rules_in_a_config_map_are_read():
    crd = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "spec": yaml.safe_load(RULES_FILE)}
    assert rules_of(yaml.safe_dump(crd).replace("EXPR", "vllm_x_total"), "r.yaml") == ["metric-foreign"]
    mounted = (
        "apiVersion: v1\nkind: ConfigMap\ndata:\n  rules.yml: |\n    groups:\n    - name: a\n      rules:\n"
        "      - alert: A\n        expr: vllm_num_requests_running > 1\n"
    )
    report = lint(mounted, "map.yaml")
    assert [(finding.rule, finding.place.line, finding.place.column) for finding in report.findings] == [
        ("metric-unknown", 9, 15)
    ]


def test_a_series_that_the_rules_record_is_known():
    text = yaml.safe_dump({"groups": [{"name": "a", "rules": [{"record": "vllm:own", "expr": "1"}]}]})
    used = RULES_FILE.replace("EXPR", "vllm:own > 1")
    assert lint_texts([("a.yml", text), ("b.yml", used)], LintOptions()).findings == ()


# PromQL


EXPRESSIONS = [
    'sum by (model_name, le) (rate(a:b_bucket{x="vllm:c", y=~"d|e"}[5m] offset 1m)) > bool 0.5',
    "a / on (instance, job) group_left (x) b",
    'count without (a) ({__name__="vllm:x", b="c"})',
    "max_over_time(deriv(rate(q_total[1m])[30m:1m])[1h:5m])",
    "quantile(0.9, x) unless ignoring (le) y or z and vector(1)",
    "label_replace(up, 'a', '$1', 'b', '(.*)') # vllm:in_a_comment",
    "-x ^ 2 % 3 + 1e-3 * 0x1F",
    "topk(3, sum(increase(x_total[2h])) by (pod))",
    "x @ start() + y @ 1609746000",
]


def names_of_parser(expression):
    parser = pytest.importorskip("promql_parser")
    names = []

    def walk(node):
        kind = type(node).__name__
        if kind == "VectorSelector":
            named = node.name or next(m.value for m in node.matchers.matchers if m.name == "__name__")
            names.append(named)
        for attribute in ("expr", "lhs", "rhs", "param", "vector_selector"):
            inner = getattr(node, attribute, None)
            if inner is not None and not isinstance(inner, (str, float, int)):
                walk(inner)
        for inner in getattr(node, "args", None) or ():
            walk(inner)

    walk(parser.parse(expression))
    return sorted(names)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_series_names_are_those_of_a_real_parser(expression):
    assert sorted(series.text for series in series_names(expression)) == names_of_parser(expression)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_names_stand_where_they_are_said_to_stand(expression):
    for series in series_names(expression):
        assert expression[series.offset :].startswith(series.text)


def test_variables_of_a_dashboard_do_not_hide_the_names():
    expression = 'rate(vllm:a_total{job="$job"}[$__rate_interval]) / [[scale]] + ${x:pipe} * vllm:b'
    assert [series.text for series in series_names(expression)] == ["vllm:a_total", "vllm:b"]


@given(st.text(alphabet="ab:_(){}[]\"'`$#@0123456789.emsd><=!~+-*/%^, \n\\", max_size=60))
def test_no_text_upsets_the_readers_of_expressions_and_scripts(text):
    list(series_names(text))
    list(comparisons(text))
    list(simple_commands(Text("x", text)))


@given(
    st.text(max_size=200), st.sampled_from(["a.sh", "a.yml", "a.json", "a.service", "a.md", "Dockerfile", "a.py", "a"])
)
def test_no_text_upsets_lint(text, path):
    lint(text, path)


_PIECES = [
    "vllm serve m ",
    "--nope ",
    "<<EOF\n",
    "EOF\n",
    "```",
    "\n",
    "FROM x\n",
    "RUN ",
    "COPY ",
    "cmd = [",
    "]",
    '"',
    "'",
    "(",
    ")",
    "args: ",
    "- ",
    "  ",
    "${A[@]}",
    "A=(",
    "engine_kwargs: {",
    "}",
    ": ",
    "|\n",
    "\\",
    "[Service]\n",
    "ExecStart=",
    "&a ",
    "*a",
    "services:\n",
    "extends: ",
    '"panels": [',
    "LLM(",
    "from vllm import LLM\n",
    "VLLM_USE_V1=1 ",
    "#!/bin/bash\n",
]


@given(
    st.lists(st.sampled_from(_PIECES), max_size=40).map("".join),
    st.sampled_from(["a.sh", "a.yml", "a.json", "a.service", "a.md", "Dockerfile", "a.py", "a.env", "a"]),
)
def test_no_torn_file_upsets_lint(text, path):
    lint(text, path)


# Servers


def manifest(**changes):
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--model", "org/m", "--tensor-parallel-size", "2", "--shutdown-timeout", "60"],
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        "startupProbe": {"httpGet": {"path": "/health", "port": 8000}, "failureThreshold": 60},
    }
    pod = {
        "terminationGracePeriodSeconds": 120,
        "runtimeClassName": "nvidia",
        "containers": [{**container, **changes.get("container", {})}],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        **changes.get("pod", {}),
    }
    return yaml.safe_dump({"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": {"spec": pod}}})


def test_a_sound_manifest_is_clean():
    assert rules_of(manifest(), "pod.yaml") == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"container": {"volumeMounts": []}}, ["shm-missing"]),
        ({"container": {"startupProbe": {"periodSeconds": 5, "failureThreshold": 3}}}, ["start-too-short"]),
        ({"container": {"env": [{"name": "HF_TOKEN", "value": "hf_abc"}]}}, ["secret-written"]),
        ({"container": {"args": ["--model", "org/m", "--enforce-eager"]}}, ["eager"]),
        (
            {"container": {"command": ["sh", "-c", "vllm serve org/m --nope && pkill -f vllm"], "args": []}},
            ["flag-unknown", "kill-by-pattern"],
        ),
    ],
)
def test_manifests(changes, expected):
    assert sorted(rules_of(manifest(**changes), "pod.yaml")) == sorted(expected)


def test_the_release_of_an_image_decides_unless_one_is_named():
    text = manifest(container={"image": "vllm/vllm-openai:v0.10.2"})
    assert rules_of(text, "pod.yaml") == ["flag-not-yet"]


def test_a_probe_is_held_against_the_planned_load():
    document = plan_from_json(plan("llama-3.1-70b", "h100", tensor_parallel_size=4).json())
    planned = manifest(container={"args": ["--model", "meta-llama/Llama-3.1-70B", "--tensor-parallel-size", "4"]})
    assert "start-too-short" in rules_of(planned, "pod.yaml", plan=document)
    assert "start-too-short" in rules_of(planned, "pod.yaml")


def test_a_server_of_another_model_is_not_held_against_the_plan():
    document = plan_from_json(plan("llama-3.1-70b", "h100", tensor_parallel_size=4).json())
    other = manifest(container={"args": ["--model", "org/m", "--tensor-parallel-size", "2", "--enforce-eager"]})
    (finding,) = lint(other, "pod.yaml", plan=document).findings
    assert finding.rule == "eager"
    assert "in the plan" not in finding.message


def test_flags_that_differ_from_the_plan_are_named():
    document = plan_from_json(plan("llama-3.1-8b", "h100", max_model_len=8192).json())
    script = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 4096 --max-num-seqs 1024"
    assert rules_of(script, "start.sh", plan=document) == ["plan-differs"]


def test_compose_and_docker_and_units_and_configs():
    compose = "services:\n  a:\n    image: vllm/vllm-openai:v0.32.0\n    command: --model org/m -tp 2 --swap-space 4\n"
    assert sorted(rules_of(compose, "compose.yaml")) == ["flag-removed", "flag-value", "shm-missing"]
    docker = "docker run --gpus 2 --ipc=host -e VLLM_ATTENTION_BACKEND=X vllm/vllm-openai:v0.32.0 --model org/m -tp 2\n"
    assert rules_of(docker, "run.sh") == ["env-unknown"]
    unit = (
        '[Service]\nEnvironment="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"\n'
        "ExecStart=/x/vllm serve org/m \\\n  --enable-sleep-mode\nTimeoutStopSec=5min\n"
    )
    assert rules_of(unit, "a.service") == ["flag-ignored"]  # no VLLM_SERVER_DEV_MODE
    assert rules_of(unit, "a.service", release=known("0.19.0")) == ["allocator-breaks", "flag-ignored"]
    config = "model: org/m\nmax-model-len: 8192\nswap-space: 4\n"
    report = lint(config, "config.yaml")
    assert [(finding.rule, finding.place.line) for finding in report.findings] == [("flag-removed", 3)]


def known(version):
    from legroom.facts.releases import release

    return release(version)


def test_arrays_and_variables_of_a_script_are_followed():
    text = 'extra="--swap-space 4"\nflags=(\n  # a comment\n  --nope 1\n)\nexec vllm serve org/m $extra "${flags[@]}"\n'
    report = lint(text, "start.sh")
    assert [(finding.rule, finding.place.line) for finding in report.findings] == [
        ("flag-removed", 1),
        ("flag-unknown", 4),
    ]


def test_expandable_segments_break_custom_all_reduce_in_the_releases_that_are_known_for_it():
    text = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True vllm serve org/m -tp 2"
    assert rules_of(text, "a.sh", release=known("0.26.0")) == ["allocator-breaks"]
    assert rules_of(text + " --disable-custom-all-reduce", "a.sh", release=known("0.26.0")) == []
    assert rules_of(text.replace(" -tp 2", " --kv-offloading-size 4"), "a.sh", release=known("0.26.0")) == [
        "allocator-breaks"
    ]


# What legroom itself writes


@pytest.mark.parametrize("written_for", ["0.6.6", "0.10.2", "0.32.0", "any"])
def test_the_rules_that_legroom_exports_are_clean(written_for, tmp_path, capsys):
    folder = str(tmp_path / "out") + "/"
    assert main(["export", "prometheus", "--vllm", written_for, "-o", folder]) == 0
    assert main(["lint", "--vllm", written_for, folder]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("format_name", ["script", "docker", "systemd", "compose", "kubernetes"])
@pytest.mark.parametrize("extras", [(), ("--with-guard", "--with-sidecar")], ids=["plain", "guarded"])
def test_what_legroom_exports_is_clean(format_name, extras, tmp_path, capsys):
    folder = str(tmp_path / "out") + "/"
    server = ["llama-3.1-70b", "--gpu", "h100", "--tensor-parallel-size", "4"]
    assert main(["plan", *server, "--json"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert main(["export", format_name, "--plan", str(tmp_path / "plan.json"), "-o", folder, *extras]) == 0
    code = main(["lint", "--plan", str(tmp_path / "plan.json"), folder])
    assert code == 0, capsys.readouterr().out


# Silencing


def test_a_comment_silences_a_rule_on_its_line_or_below():
    assert rules_of("vllm serve org/m --nope # legroom: ignore flag-unknown", "a.sh") == []
    below = "# legroom: ignore flag-unknown\nvllm serve org/m \\\n  --nope 1\nvllm serve org/m --nope\n"
    assert [finding.place.line for finding in lint(below, "a.sh").findings] == [4]
    other = "vllm serve org/m --nope # legroom: ignore eager"
    assert rules_of(other, "a.sh") == ["flag-unknown"]
    whole = "# legroom: ignore-file flag-unknown\n\nvllm serve org/m\nvllm serve org/m --nope"
    assert rules_of(whole, "a.sh") == []
    assert lint(whole, "a.sh").ignored == 1


# Bad input


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("rules.yml", "groups:\n - name: [a\n", "not valid YAML"),
        ("dash.json", '{"panels": [}', "not valid JSON"),
        ("dash.json", '{"title": "x", "widgets": [], "layout_type": "ordered"}', "another product (Datadog)"),
        ("deploy.yaml", "spec:\n  image: {{ .Values.image }}\n  {{- if .x }}\n", "template"),
        ("a.service", "[Unit]\nDescription=x\n[Service]\nType=exec\n", "without ExecStart"),
    ],
)
def test_what_cannot_be_read_is_said_and_the_rest_goes_on(path, text, reason):
    report = lint_texts([(path, text), ("good.sh", "vllm serve org/m --nope")], LintOptions())
    assert reason in report.unread[0].reason
    assert [finding.rule for finding in report.findings] == ["flag-unknown"]


@pytest.mark.parametrize(
    ("path", "text"),
    [("a.json", '{"x": 1}'), ("dash.json", '{"panels": [{"targets": [{"expr": "up"}]}]}'), ("a.yaml", "on: push\n")],
)
def test_what_has_nothing_to_do_with_vllm_is_skipped(path, text):
    report = lint(text, path)
    assert (report.unread, len(report.skipped)) == ((), 1)


# The command


def test_exit_codes(tmp_path, capsys):
    clean, wrong, broken = tmp_path / "c.sh", tmp_path / "w.sh", tmp_path / "b.yml"
    clean.write_text("vllm serve org/m\n")
    wrong.write_text("vllm serve org/m --max-model-lenn 8\n")
    broken.write_text("a: [\n")
    assert main(["lint", str(clean)]) == 0
    assert main(["lint", str(clean), str(wrong)]) == 1
    assert main(["lint", str(clean), str(wrong), str(broken)]) == 2
    assert main(["lint", str(tmp_path / "none.yml")]) == 2
    assert main(["lint"]) == 2
    assert main(["lint", "--ignore", "no-such-rule", str(clean)]) == 2
    assert main(["lint", "--ignore", "flag-unknown", str(wrong)]) == 0
    assert f"{wrong}:1:18: error:" in capsys.readouterr().out


def test_notes_do_not_fail_unless_asked(tmp_path):
    path = tmp_path / "a.sh"
    path.write_text("vllm serve org/m --enforce-eager\n")
    assert main(["lint", str(path)]) == 0
    assert main(["lint", "--fail-on", "note", str(path)]) == 1


def test_json_is_one_document(tmp_path, capsys):
    path = tmp_path / "a.sh"
    path.write_text("vllm serve org/m --nope\n")
    main(["lint", "--json", str(path)])
    document = json.loads(capsys.readouterr().out)
    assert document["findings"][0]["rule"] == "flag-unknown"
    assert document["findings"][0]["line"] == 1


def test_sarif_is_valid_by_its_schema(tmp_path, capsys):
    schema = ROOT / ".tools" / "sarif-2.1.0.json"
    path, broken = tmp_path / "a b.sh", tmp_path / "b.yml"
    path.write_text("vllm serve org/m --nope\npkill -f vllm\n")
    broken.write_text("a: [\n")
    main(["lint", "--sarif", "-", str(path), str(broken)])
    document = json.loads(capsys.readouterr().out)
    assert document["version"] == "2.1.0"
    assert [result["ruleId"] for result in document["runs"][0]["results"]] == ["flag-unknown", "kill-by-pattern"]
    if not schema.exists():
        pytest.skip("the SARIF schema is not here: run bin/setup-tools sarif")
    jsonschema.validate(document, json.loads(schema.read_text("utf-8-sig")))


def test_every_rule_says_why_and_a_page_lists_it(capsys):
    page = (ROOT / "docs" / "lint.md").read_text("utf-8")
    assert main(["lint", "--rules"]) == 0
    listed = capsys.readouterr().out
    for rule in rules_by_id().values():
        assert rule.help.endswith((".", ")."))
        assert f"`{rule.id}`" in page
        assert rule.id in listed
    assert len(all_checks()) >= 20


def test_the_pre_commit_hook_is_given_every_file_that_a_folder_is_searched_for():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    names = ["Dockerfile", "deploy/Dockerfile.gpu", "etc/supervisord.conf", *(f"a/b{suffix}" for suffix in SEARCHED)]
    assert [name for name in names if not re.search(hook["files"], name)] == []


def test_the_pre_commit_hook_names_a_command_that_works(tmp_path):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
    path = tmp_path / "start.sh"
    path.write_text("vllm serve org/m --nope\n")
    words = [*hook["entry"].split(), *hook.get("args", []), str(path)]
    command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr


def test_only_vllm_skips_files_that_do_not_name_it(tmp_path, capsys):
    other = tmp_path / "broken.yaml"
    other.write_text("a: [1\n")
    assert main(["lint", "--only-vllm", "--json", str(other)]) == 0
    assert [skipped["path"] for skipped in json.loads(capsys.readouterr().out)["skipped"]] == [str(other)]


# Rules that only some releases break


def test_a_flag_that_does_nothing_is_told_from_one_that_is_refused():
    script = "vllm serve org/m --swap-space 4"
    assert rules_of(script, "a.sh", release=known("0.7.0")) == []
    assert rules_of(script, "a.sh", release=known("0.12.0")) == ["flag-ignored"]
    assert rules_of(script, "a.sh", release=known("0.18.0")) == ["flag-removed"]


def test_a_hidden_series_is_told_with_what_took_its_place():
    text = RULES_FILE.replace("EXPR", "vllm:gpu_cache_usage_perc > 0.9 and vllm:num_requests_waiting > 0")
    report = lint(text, "r.yml", release=known("0.11.1"))
    assert [(finding.rule, finding.suggestion) for finding in report.findings] == [
        ("metric-hidden", "write vllm:kv_cache_usage_perc")
    ]
