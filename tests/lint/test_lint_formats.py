"""Lint on formats of serving platforms: what is vLLM's in them, what is not, and what is not understood."""

import json

import pytest

from legroom.deployments.container_images import has_unnamed_release, image_release, is_server_image
from legroom.errors import LegroomError
from legroom.lint.lint_report import report_json
from legroom.lint.linter import LintOptions, lint_texts

REMOVED, UNKNOWN = "flag-removed", "flag-unknown"
KUBEAI = """apiVersion: kubeai.org/v1
kind: Model
metadata: {name: m}
spec:
  url: hf://org/m
  engine: VLLM
  resourceProfile: PROFILE
  args:
  - --swap-space=8
"""


def judged(text, path="a.yaml"):
    findings = lint_texts([(path, text)], LintOptions()).findings
    return [(finding.rule, finding.severity, finding.place.line) for finding in findings]


def test_a_kubeai_model_is_a_server():
    assert judged(KUBEAI.replace("PROFILE", "nvidia-gpu-l4:1")) == [(REMOVED, "note", 9)]


def test_a_kubeai_model_on_other_hardware_runs_a_release_that_nobody_names():
    assert judged(KUBEAI.replace("PROFILE", "gaudi-for-text-generation:1")) == [(REMOVED, "note", 9)]


def test_the_catalog_of_kubeais_chart_is_read_like_its_models():
    text = "catalog:\n  m:\n    engine: VLLM\n    url: hf://org/m\n    args: [--swap-space=8]\n"
    assert judged(text) == [(REMOVED, "note", 5)]


def test_another_engine_of_kubeai_is_left_alone():
    assert judged(KUBEAI.replace("VLLM", "OLlama").replace("PROFILE", "cpu:1")) == []


def test_a_worker_of_dynamo_is_given_vllms_flags_and_its_own():
    command = "python3 -m dynamo.vllm --model org/m --swap-space 4 --migration-limit 3 --is-prefill-worker"
    assert judged(f"{command}\n", "a.sh") == [(REMOVED, "note", 1)]


def test_dynamos_frontend_is_no_server_of_vllm():
    graph = (
        "apiVersion: nvidia.com/v1\nkind: DynamoGraphDeployment\nspec:\n  services:\n    Frontend:\n"
        "      mainContainer:\n"
        "        image: my-registry/vllm-runtime:1\n        args: [-m, dynamo.frontend, --router-mode, kv]\n"
    )
    assert judged(graph) == []


def test_dynamo_spreads_ranks_over_nodes_itself():
    graph = (
        "apiVersion: nvidia.com/v1\nkind: DynamoGraphDeployment\nspec:\n  services:\n    Worker:\n"
        "      mainContainer:\n"
        "        image: my-registry/vllm-runtime:1\n        command: [python3, -m, dynamo.vllm]\n"
        "        args: [--model, org/m, --tensor-parallel-size, '16']\n"
        "        resources: {limits: {nvidia.com/gpu: 4}}\n"
    )
    assert "gpus-too-few" not in [rule for rule, _, _ in judged(graph)]


def test_additional_arguments_of_kserve_are_split_as_a_shell_does():
    text = (
        "apiVersion: serving.kserve.io/v1alpha1\nkind: LLMInferenceService\nspec:\n  template:\n    containers:\n"
        "    - name: main\n      env:\n      - name: VLLM_ADDITIONAL_ARGS\n"
        """        value: "--swap-space 4 --hf-overrides '{\\"a\\": 1}'"\n"""
    )
    assert judged(text) == [(REMOVED, "note", 9)]


def test_extra_command_arguments_of_opeas_charts_are_vllms_under_its_key():
    text = "vllm:\n  image: {repository: opea/vllm, tag: latest}\n  extraCmdArgs: [--swap-space, '4']\n"
    assert judged(text) == [(REMOVED, "note", 3)]


def test_extra_arguments_of_a_router_in_the_same_chart_are_its_own():
    assert judged("vllm:\n  routerSpec:\n    extraArgs: [--model, m, --nope]\n") == []


def test_a_recipe_gives_each_feature_its_flags():
    text = "model:\n  min_vllm_version: '0.9'\nfeatures:\n  a:\n    args: ['--max-model-len auto', --swap-space, '4']\n"
    assert judged(text) == [(REMOVED, "note", 5)]


def test_a_template_is_read_without_its_values_and_said_to_be_one():
    text = (
        "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: {{ .Values.image }}\n"
        "    {{- if .x }}\n    command: [vllm, serve, m, --nope, --max-model-len={{ .len }}]\n    {{- end }}\n"
    )
    report = lint_texts([("t.yaml", text)], LintOptions())
    assert [(finding.rule, finding.place.line) for finding in report.findings] == [(UNKNOWN, 7)]
    assert "template" in report.unread[0].reason


def test_a_plan_of_a_template_is_refused(tmp_path):
    from legroom.deployments.deployment import deployment_from_file

    file = tmp_path / "t.yaml"
    file.write_text("{{- if .x }}\ncommand: [vllm, serve, m, --max-model-len={{ .len }}]\n{{- end }}\n")
    with pytest.raises(LegroomError, match="template"):
        deployment_from_file(file)


def test_flags_of_vllm_omni_are_not_judged_and_that_is_said():
    text = "vllm serve org/m --omni --usp 2 --vae-use-tiling\n"
    assert judged(text, "a.sh") == [("flag-of-another", "note", 1)]


def test_flags_in_a_form_that_is_not_read_are_said_to_be_not_understood():
    text = "vllm_runs:\n- settings: '--max-model-len 8192 --nope'\n"
    report = lint_texts([("a.yaml", text)], LintOptions())
    assert [(finding.rule, finding.severity) for finding in report.findings] == [("not-understood", "note")]
    assert report_json(report)["not_understood"] == 1


def test_docker_in_a_python_list_keeps_its_own_flags():
    text = 'run(["docker", "run", "--rm", "-d", "vllm/vllm-openai", "--model", "m", "--nope"])\n'
    assert judged(text, "a.py") == [(UNKNOWN, "warning", 1)]


def test_a_python_list_that_is_joined_for_a_shell_may_hold_a_flag_with_its_value():
    text = 'cmd = ["vllm", "serve", "m", "--reasoning-parser deepseek_r1", "--nope"]\nrun(" ".join(cmd))\n'
    assert judged(text, "a.py") == [(UNKNOWN, "warning", 1)]


def test_a_line_of_a_log_that_quotes_a_command_starts_nothing():
    text = "```\n[12:00:00] INFO run.py:1: starting: vllm serve m --nope\n```\n"
    assert judged(text, "a.md") == []


def test_json_in_an_unquoted_variable_keeps_its_quotes():
    text = 'MORE="--limit-mm-per-prompt {\\"image\\":3,\\"video\\":3}"\nvllm serve m $MORE\n'
    assert judged(text, "a.sh") == []


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("org/server-vllm0.7.0:latest", "0.7.0"),
        ("gpustack/runner:cuda12.8-vllm0.11.0", "0.11.0"),
        ("lmcache/vllm-openai:v0.3.5", None),
        ("vllm/vllm-openai:v0.10.2", "0.10.2"),
    ],
)
def test_a_release_is_read_wherever_an_image_names_it(image, release):
    assert image_release(image) == release


@pytest.mark.parametrize(
    "image", ["ghcr.io/vllm-project/semantic-router/extproc:latest", "x/vllm-router:1", "vllm-project/aibrix:1"]
)
def test_an_image_of_the_project_beside_vllm_starts_no_server(image):
    assert not is_server_image(image)


def test_an_image_with_a_tag_of_its_own_hides_its_release():
    assert has_unnamed_release("registry/vllm:build-7") and not has_unnamed_release("vllm/vllm-openai:latest")


def test_a_version_that_a_sentence_quotes_installs_nothing():
    text = "Older hosts need `vllm==0.6.3`.\n\n```bash\nvllm serve m --swap-space 4\n```\n"
    assert judged(text, "a.md") == [(REMOVED, "note", 4)]


def test_the_beginning_of_a_removed_flag_is_a_removed_flag():
    assert judged("vllm serve m --disable-log-request\n", "a.sh") == [(REMOVED, "note", 1)]


def test_a_value_that_is_left_out_is_not_judged():
    assert judged("vllm serve m --kv-transfer-config '{...}'\n", "a.sh") == []


def test_dashboards_of_google_cloud_ask_in_promql():
    board = {"mosaicLayout": {"tiles": [{"prometheusQuery": "vllm:gpu_cache_usage_perc"}]}}
    assert judged(json.dumps(board), "d.json") == [("metric-unknown", "warning", 1)]


def test_a_metric_that_an_autoscaler_asks_for_is_read():
    text = (
        "apiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nspec:\n  metrics:\n  - pods:\n      metric:\n"
        "        name: prometheus.googleapis.com|vllm:gpu_cache_usage_perc|gauge\n"
    )
    assert judged(text) == [("metric-unknown", "warning", 7)]


def test_a_histogram_in_code_may_be_named_without_its_endings():
    text = 'METRICS = {"vllm:time_to_first_token_seconds": 1}  # from /metrics\n'
    assert judged(text, "a.py") == []


def test_a_name_of_another_release_in_code_is_a_warning():
    text = 'value = metrics["vllm:gpu_cache_usage_perc"]\n'
    assert judged(text, "a.py") == [("metric-unknown", "warning", 1)]


def test_the_stages_of_vllm_omni_have_settings_of_their_own():
    text = "stages:\n- engine_args:\n    model_stage: a\n    max_num_seqs: 1\n    enforce_eager: true\n    seed: 1\n"
    assert judged(text) == []


def test_another_program_that_is_told_to_use_vllm_has_its_own_flags():
    assert judged("ramalama --runtime vllm serve --name x m\n", "a.sh") == []


def test_a_script_runs_in_the_image_beside_it():
    text = "image: rocm/vllm-dev:august\ncommands:\n- vllm serve m --swap-space 4\n"
    assert judged(text) == [(REMOVED, "note", 3)]


def test_a_document_about_one_image_is_of_the_release_that_the_image_names():
    text = "```bash\ndocker pull intel/vllm:0.11.0-xpu\n```\n\n```bash\nvllm serve m --swap-space 4\n```\n"
    assert judged(text, "a.md") == [("flag-ignored", "note", 6)]


def test_a_document_about_an_image_that_hides_its_release_is_judged_with_care():
    text = "```bash\ndocker pull intel/my-vllm:1.3\n```\n\n```bash\nvllm serve m --swap-space 4\n```\n"
    assert judged(text, "a.md") == [(REMOVED, "note", 6)]


def test_a_pattern_for_series_of_a_plugin_is_a_warning():
    assert judged("curl localhost:8000/metrics | grep vllm_neuron\n", "a.sh") == [("metric-grep", "warning", 1)]
