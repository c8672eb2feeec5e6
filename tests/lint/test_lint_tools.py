"""Lint on what other tools start vLLM with: values of charts, tasks, pipelines, Ray Serve, images built in stages."""

import json

import pytest

from legroom.lint.linter import LintOptions, lint_texts


def findings(text, path="values.yaml"):
    found = lint_texts([(path, text)], LintOptions()).findings
    return [(finding.rule, finding.place.line) for finding in found if finding.rule != "image-moving"]


UNKNOWN = "flag-unknown"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("envs:\n  M: org/m\nrun: |\n  set -e\n  vllm serve $M --nope\n", [(UNKNOWN, 5)]),
        ("jobs:\n  t:\n    steps:\n    - run: |\n        vllm serve m --nope &\n", [(UNKNOWN, 5)]),
        ("- hosts: gpu\n  tasks:\n  - shell: nohup vllm serve org/m --nope &\n", [(UNKNOWN, 3)]),
        ("image:\n  repository: vllm/vllm-openai\n  command: [vllm, serve, m, --nope]\n", [(UNKNOWN, 3)]),
        ("decode:\n  modelCommand: vllmServe\n  args: ['--max-model-len=8k', --nope]\n", [(UNKNOWN, 3)]),
        ("decode:\n  command: [bash, -c]\n  args:\n  - |\n    vllm serve m \\\n      --nope\n", [(UNKNOWN, 6)]),
        ("a:\n  llms:\n  - engine_kwargs:\n      max_model_len: 8\n      seed: 1\n      nope: 1\n", [(UNKNOWN, 6)]),
        (
            "spec:\n  x: {tag: v0.8.5, repository: vllm/x, args: [--max-num-seqs=2, --kv-cache-memory-bytes=1G]}\n",
            [("flag-not-yet", 2)],
        ),
        (
            "m:\n- vllmConfig:\n    extraArgs: [--max-num-seqs, '9', --nope]\n  env: [{name: VLLM_USE_V1, value: 1}]\n",
            [(UNKNOWN, 3), ("env-unknown", 4)],
        ),
    ],
)
def test_a_server_is_found_wherever_it_stands_in_yaml(text, expected):
    assert findings(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "image: lmsysorg/sglang\nnote: not vllm\nargs: [--served-model-name=m, --mem-fraction-static=0.8]\n",
        "description: run vllm serve with --nope to see it fail\n",
        "services:\n  r:\n    image: ghcr.io/vllm-project/production-stack/router:1\n    command: --nope x\n",
        "receivers:\n- slack: '{{ .Alerts }} vllm:gpu_cache_usage_perc'\n",
        "services:\n  $NAME:\n    image: redis:7\n    environment: [MODEL=vllm]\n",
    ],
)
def test_what_is_not_vllms_is_left_alone(text):
    assert findings(text) == []


def test_queries_that_scale_a_server_are_read():
    keda = (
        "apiVersion: keda.sh/v1\nkind: ScaledObject\nspec:\n  triggers:\n  - metadata:\n      query: sum(vllm:nope)\n"
    )
    adapter = (
        """custom:\n- seriesQuery: '{__name__=~"^vllm:num_requests_waitin$"}'\n  name: {as: vllm_num_requests}\n"""
    )
    assert findings(keda) == [("metric-foreign", 6)]
    assert findings(adapter) == [("metric-unknown", 2)]


def test_files_inside_a_value_are_read_by_their_kind():
    patch = "kind: Kustomization\napiVersion: v1\npatches:\n- patch: |-\n    apiVersion: v1\n    kind: Pod\n    spec:\n"
    pod = "      containers:\n      - image: vllm/vllm-openai\n        args: [--nope]\n"
    assert findings(patch + pod) == [(UNKNOWN, 10)]
    serve = "apiVersion: v1\nkind: RayService\nspec:\n  serveConfigV2: |\n    apps:\n    - name: vllm\n      args:\n"
    assert findings(serve + "        engine_kwargs: {max_model_len: 1, dtype: auto, nope: 1}\n") == [(UNKNOWN, 8)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("spec:\n  templates:\n  - container: {image: vllm/vllm-openai, args: [--model, m, --nope]}\n", [(UNKNOWN, 5)]),
        ("spec:\n  predictor:\n    model:\n      modelFormat: {name: vLLM}\n      args: [--nope]\n", [(UNKNOWN, 7)]),
        ("spec:\n  predictor:\n    model:\n      modelFormat: {name: huggingface}\n      args: [--nope]\n", []),
        (
            "spec:\n  containers:\n  - image: vllm/x:v0.20.0\n    env: [{name: VLLM_ADDITIONAL_ARGS, value: --nope}]\n",
            [(UNKNOWN, 6)],
        ),
        ("spec:\n  initContainers:\n  - image: x\n    command: [sh, -c, 'pkill -f vllm']\n", [("kill-by-pattern", 6)]),
    ],
)
def test_containers_are_found_where_an_operator_has_them(text, expected):
    assert findings("apiVersion: v1\nkind: X\n" + text) == expected


def test_scripts_and_settings_of_a_config_map_are_read():
    head = "apiVersion: v1\nkind: ConfigMap\ndata:\n"
    script = "  start.sh: |\n    vllm serve m --nope\n"
    config = "  config.yaml: |\n    model: m\n    max-model-len: 8\n    swap-space: 4\n"
    assert findings(head + script + config) == [(UNKNOWN, 5), ("flag-removed", 9)]


def test_a_variable_is_told_where_it_stands_though_a_script_inside_sees_it():
    pod = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai\n    command: [sh, -c]\n"
    rest = "    args:\n    - |\n      vllm serve m\n    env:\n    - {name: VLLM_USE_V1, value: '1'}\n"
    assert findings(pod + rest) == [("env-unknown", 11)]
    assert findings("envs: {VLLM_USE_V1: '1'}\nrun: |\n  true\n  vllm serve m --port 1\n") == [("env-unknown", 1)]
    program = 'run("vllm serve m --port 1",\n  env={"VLLM_USE_V1": "1"})'
    assert findings(program, "a.py") == [("env-unknown", 2)]
    assert findings("export VLLM_USE_V1=1\ntrue\nbash -c 'vllm serve m'", "a.sh") == [("env-unknown", 1)]


@pytest.mark.parametrize("indent", [" ", "\t"])
def test_manifests_rules_and_dashboards_are_read_from_json_too(indent):
    pod = {"kind": "Pod", "apiVersion": "v1", "spec": {"containers": [{"image": "vllm/x", "args": ["--nope"]}]}}
    rule = {
        "kind": "PrometheusRule",
        "apiVersion": "v1",
        "spec": {"groups": [{"rules": [{"record": "a", "expr": "vllm:no"}]}]},
    }
    query = {"kind": "PanelQuery", "spec": {"query": {"group": "prometheus", "spec": {"expr": "vllm:no"}}}}
    board = {"apiVersion": "dashboard.grafana.app/v2", "kind": "Dashboard", "spec": {"elements": {"p": query}}}
    by_document = [findings(json.dumps(document, indent=indent), "a.json") for document in (pod, rule, board)]
    assert [[rule for rule, _ in pairs] for pairs in by_document] == [[UNKNOWN], ["metric-foreign"], ["metric-foreign"]]


# Releases


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("task.yaml", "setup: pip install vllm==0.6.3\nrun: |\n  vllm serve m --kv-cache-memory-bytes 1G\n"),
        ("s.sh", "uv pip install 'vllm[audio]==0.6.3.post1'\nvllm serve m --kv-cache-memory-bytes 1G\n"),
        ("app.py", "I = pip('vllm==0.6.3')\nC = ['vllm', 'serve', 'm', '--kv-cache-memory-bytes', '1G']\n"),
    ],
)
def test_the_release_that_a_file_installs_is_the_one_it_serves_with(path, text):
    assert [rule for rule, _ in findings(text, path) if rule != "release-unsafe"] == ["flag-not-yet"]
    assert findings(text.replace("==0.6.3", "==0.11.0").replace(".post1", ""), path) == []


def test_a_server_older_than_any_known_release_is_judged_by_the_oldest_one():
    old = "services:\n  v: {image: 'vllm/vllm-openai:v0.3.3', command: --model m/m --tensor-parallel-size 2}\n"
    report = lint_texts([("a.yml", old), ("b.sh", "vllm serve m --nope")], LintOptions())
    assert "shm-missing" in {each.rule for each in report.findings if each.place.path == "a.yml"}
    assert "flag-unknown" in {each.rule for each in report.findings}
    assert not report.unread


@pytest.mark.parametrize("image", ["lmcache/vllm-openai:v0.4.1", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:0.4.1"])
def test_an_image_that_is_numbered_by_another_project_names_no_release(image):
    text = f"services:\n  v: {{image: '{image}', command: --model m --kv-cache-memory-bytes 1G}}\n"
    assert findings(text, "compose.yml") == []


# Dockerfiles


def test_a_stage_has_the_image_and_the_command_of_the_one_it_is_built_on():
    base = 'FROM vllm/vllm-openai:v0.11.0 AS base\nENV VLLM_USE_V1=1\nCMD ["--model", "m", "--nope"]\n'
    assert findings(base + "FROM base\n", "Dockerfile") == [(UNKNOWN, 3)]
    assert findings(base + 'FROM base\nENTRYPOINT ["vllm", "serve", "m"]\n', "Dockerfile") == []
    assert findings(base + 'FROM base\nCMD ["--nope"]\nENTRYPOINT ["vllm", "serve", "m"]\n', "Dockerfile") == [
        (UNKNOWN, 5)
    ]
    assert findings(base + 'FROM vllm/vllm-openai:v0.20.0\nCMD ["--model", "m"]\n', "Dockerfile") == []


def test_scripts_that_a_dockerfile_writes_are_read_and_their_lines_are_no_instructions():
    text = "FROM x\nCOPY <<EOF /start.sh\n#!/bin/sh\nvllm serve m --nope\nCMD --also\nEOF\nRUN <<E\npkill -f vllm\nE\n"
    assert findings(text, "Dockerfile") == [(UNKNOWN, 4), ("kill-by-pattern", 8)]
    assert findings("FROM x\n<<E\nvllm serve m --nope\nE\n", "Dockerfile") == []


# Python


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('cmd = ["vllm", "serve", MODEL,\n  "--nope"]', 2),
        ('def f():\n  cmd = ["vllm", "serve", "m"]\n  cmd += ["--port", str(p)]\n  cmd.append("--nope")', 4),
        ('more = ["--nope"]\nrun(["vllm", "serve", m, *more])', 1),
        ('cmd = ["python", "-m", "vllm.entrypoints.openai.api_server"] + [\n"--nope"]', 2),
        ('run(f"vllm serve {model} --port {port} --nope", shell=True)', 1),
        ('P = "é"; run(["vllm", "serve", "m", "--a" if x else "--port", P]); run(["vllm", "serve", "--nope"])', 1),
        ('from vllm import LLM\nllm = LLM("m", max_model_len=n,\n  gpu_memory_utilisation=0.5)', 3),
        ('import vllm\nvllm.LLM(model="m", tensor_parallel_sizes=2)', 2),
    ],
)
def test_a_server_that_python_starts_is_read(text, line):
    assert findings(text, "serve.py")[-1:] == [(UNKNOWN, line)]


@pytest.mark.parametrize(
    "text",
    [
        '"""vllm serve m --nope"""',
        "from crewai import LLM\nLLM(model='m', nope_parallel_size=2)",
        'from vllm import LLM\nLLM("m", dtype="half" if x else "auto", enforce_eager=False, seed=None)',
        'from vllm import LLM\nLLM("m", enforce_eager=args.eager, block_size=2048, runner=...)',
        'cmd = ["vllm", "serve", "m", "--dtype", "half" if x else "auto", *rest, f"--port={p}"]',
        'def a():\n  cmd = ["vllm", "serve", "m"]\ndef b():\n  cmd = ["other"]\n  cmd += ["--nope"]',
        "print('vllm serve is a command' % (",
        'help = "vllm serve is needed"',
    ],
)
def test_python_that_starts_nothing_wrong_is_clean(text):
    assert findings(text, "serve.py") == []


def test_what_python_sets_in_the_environment_is_the_servers():
    text = 'import os\nfrom vllm import LLM\nos.environ["VLLM_USE_V1"] = "1"\nLLM("m")'
    assert findings(text, "a.py") == [("env-unknown", 3)]


@pytest.mark.parametrize(
    "text",
    [
        "from vllm.v1.metrics.reader import Metric\ndef preempted(m: Metric): return m.name == 'vllm:num_preemptions'",
        "for m in llm.get_metrics():\n  print(m.name == 'vllm:iteration_tokens_total')",
    ],
)
def test_a_family_is_known_whoever_gives_it_and_whatever_its_name_ends_in(text):
    assert findings(text, "a.py") == []


def test_families_have_no_total_and_series_do():
    families = 'for m in llm.get_metrics():\n  if m.name in ("vllm:num_preemptions", "vllm:generation_token"): pass'
    report = lint_texts([("a.py", families)], LintOptions())
    assert [finding.suggestion for finding in report.findings] == ["write vllm:generation_tokens"]
    scraped = 'requests.get(url + "/metrics")\nvalue = series["vllm:num_preemptions"]'
    assert findings(scraped, "a.py") == [("metric-unknown", 2)]


def test_code_that_knows_both_names_of_a_series_is_right():
    text = 'metrics = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")'
    assert findings(text, "a.py") == []
    assert findings(text.replace("kv_cache_usage_perc", "num_requests_running"), "a.py") == [("metric-unknown", 1)]


def test_a_series_that_a_program_shows_itself_is_known_to_every_file():
    program = 'from prometheus_client import Counter\nC = Counter(\n  "vllm_pii_requests", "of a router")'
    rules = "groups:\n- rules:\n  - record: a\n    expr: rate(vllm_pii_requests_total[5m])\n"
    assert lint_texts([("r.py", program), ("a.yml", rules)], LintOptions()).findings == ()


def test_a_metrics_adapter_of_kubernetes_shows_names_without_colons():
    line = "kubectl get --raw /apis/custom.metrics.k8s.io/v1beta1/namespaces/a/metrics | grep vllm_num_requests_waiting"
    assert findings(line, "a.sh") == []


def test_a_series_that_is_named_as_recorded_ones_are_is_not_vllms():
    rules = (
        "groups:\n- rules:\n  - alert: A\n    expr: vllm_limits:kv > 1 and vllm:hit_ratio:5m > 1 and vllm_limits > 1\n"
    )
    assert findings(rules) == [("metric-foreign", 4)]


SUPERVISED = """; of the machine
[supervisord]
nodaemon=true
[program:vllm]
command=/opt/vllm/bin/vllm serve org/m ; the old one
    --nope --shutdown-timeout 60
environment=VLLM_USE_V1="1",HF_TOKEN=%(ENV_HF_TOKEN)s
autorestart=true
[program:other]
command=bash -c "vllm serve org/m --nope"
stopwaitsecs=120
[eventlistener:x]
command=vllm serve org/m --nope
"""


def test_programs_of_supervisord_are_read_with_their_variables():
    expected = [("stop-too-short", 4), ("flag-unknown", 6), ("env-unknown", 7), ("flag-unknown", 10)]
    assert findings(SUPERVISED, "supervisord.conf") == expected


def test_a_block_of_a_document_may_be_supervisords():
    text = f"# How\n\n```ini\n{SUPERVISED}```\n"
    assert [rule for rule, _ in findings(text, "how.md")] == [rule for rule, _ in findings(SUPERVISED, "a.conf")]
