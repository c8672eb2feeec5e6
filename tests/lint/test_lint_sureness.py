"""An error of lint means that the release is sure; what is only likely is a warning, what was not understood a note."""

import pytest

from legroom.deployments.container_images import container_command, has_moving_tag, is_server_image
from legroom.deployments.shell.lexer import Word
from legroom.facts.releases import release
from legroom.lint.linter import LintOptions, lint_texts


def judged(text, path="a.sh", **options):
    findings = lint_texts([(path, text)], LintOptions(**options)).findings
    return [(finding.rule, finding.severity) for finding in findings if finding.rule != "image-moving"]


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        ("vllm serve org/m --swap-space 4\n", "note"),
        ("# vllm==0.20.0\nvllm serve org/m --swap-space 4\n", "note"),
        ("pip install vllm==0.20.0\nvllm serve org/m --swap-space 4\n", "error"),
        ("docker run vllm/vllm-openai:v0.20.0 --model org/m --swap-space 4\n", "error"),
        ("docker run vllm/vllm-openai:latest --model org/m --swap-space 4\n", "error"),
        ("docker run me/vllm:latest --model org/m --swap-space 4\n", "note"),
    ],
)
def test_a_removed_flag_is_an_error_only_where_the_release_is_sure(text, severity):
    assert judged(text) == [("flag-removed", severity)]


def test_a_release_that_was_asked_for_is_sure():
    assert judged("vllm serve org/m --swap-space 4\n", release=release("0.20.0")) == [("flag-removed", "error")]


@pytest.mark.parametrize(
    ("flag", "severity"), [("--max-model-lenn", "error"), ("--nope", "error"), ("--gpu-memory-utilization-gb", "error")]
)
def test_a_flag_that_no_release_has_is_an_error(flag, severity):
    assert judged(f"vllm serve org/m {flag} 8\n") == [("flag-unknown", severity)]


def test_a_flag_that_no_release_has_is_an_error_in_vllms_own_image():
    assert judged("docker run vllm/vllm-openai:v0.20.0 --model org/m --nope\n") == [("flag-unknown", "error")]


def test_a_choice_of_a_newer_build_is_a_warning_where_the_release_is_not_sure():
    assert judged("vllm serve org/m --moe-backend next_year\n") == [("flag-value", "warning")]


def test_a_value_that_every_release_refuses_is_an_error():
    assert judged("vllm serve org/m --max-model-len many\n") == [("flag-value", "error")]


@pytest.mark.parametrize(
    ("series", "severity"),
    [
        ("vllm:gpu_cache_usage_perc", "warning"),
        ("vllm_num_requests_waiting", "error"),
        ("vllm_gpu_cache_usage_perc", "error"),
        ("vllm:num_requests_waitin", "error"),
        ("vllm_request_duration_seconds_bucket", "note"),
    ],
)
def test_a_series_of_other_releases_is_a_warning_and_an_exporters_a_note(series, severity):
    rule = f"groups:\n- name: g\n  rules:\n  - record: a:b:c\n    expr: {series}\n"
    assert judged(rule, "a.yml") == [("metric-unknown", severity)]


def test_only_vllms_own_image_follows_its_releases():
    assert has_moving_tag("vllm/vllm-openai:latest") and has_moving_tag("docker.io/vllm/vllm-openai")
    assert not has_moving_tag("rocm/vllm:latest") and not has_moving_tag("vllm/vllm-openai:v0.9.0")


def test_an_image_that_watches_vllm_is_not_its_server():
    assert not is_server_image("ghcr.io/me/vllm-monitor")
    given = (Word("--url", 0), Word("http://a:8000", 6))
    assert container_command("ghcr.io/me/my-vllm-thing", (), given, 0) == given


def test_a_placeholder_in_a_document_is_no_word_of_a_command():
    assert judged("```bash\nvllm serve org/m [options]\n```\n", "a.md") == []


def test_compose_splits_what_stands_in_a_default():
    text = (
        "services:\n  a:\n    image: vllm/vllm-openai:v0.22.0\n    command: >-\n      org/m\n"
        "      ${EXTRA---seed 1 --reasoning-parser qwen3}\n"
    )
    assert judged(text, "compose.yaml") == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("# vllm --swap-space 4\n", "a.sh"),
        ("run.py --device cpu  # vllm\n", "a.sh"),
        ("image: vllm/vllm-openai:v0.9.0\nmore:\n  swap_space: 4\n", "a.yaml"),
        ('names = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"]  # metrics\n', "a.py"),
    ],
)
def test_a_comment_another_program_an_older_release_and_both_names_are_left_alone(text, path):
    assert judged(text, path) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("python -m vllm_gaudi.entrypoints.openai.multi_model_api_server --port 1\n", "a.sh"),
        ("# for vllm\nexport VLLM_SKIP_WARMUP=true\n", "a.sh"),
        ("import vllm\nargs = vllm.EngineArgs(model='org/m', logits_processors=[])\n", "a.py"),
        ("FROM x\nRUN cp /p/vllm/entrypoints/openai/api_server.py /w/api_server.py\n", "Dockerfile"),
        ('# metrics\nshown = {"vllm_num_requests_running": "vllm:num_requests_running"}\n', "a.py"),
        ("vllm:\n  expr: sum(vllm:healthy_pods_total)\n", "a.yaml"),
    ],
)
def test_what_is_a_plugin_s_or_another_program_s_is_left_alone(text, path):
    assert judged(text, path) == []


@pytest.mark.parametrize(
    "image", ["us/vllm-openai:v0.6.1-edb07092-20250118", "rocm/vllm:v0.6.1", "intel/vllm:0.6.1-xpu"]
)
def test_a_build_that_is_not_vllm_s_own_makes_a_flag_of_another_release_a_note(image):
    text = f"docker run {image} --model org/m --disable-fastapi-docs\n"
    assert judged(text, "a.sh") == [("flag-not-yet", "note")]


def test_a_document_with_several_images_does_not_say_which_one_a_command_runs_in():
    images = "Use `vllm/vllm-openai:v0.6.1` or `vllm/vllm-openai:nightly-abc`.\n"
    text = f"{images}\n```bash\nvllm serve org/m --disable-fastapi-docs\n```\n"
    assert judged(text, "a.md") == []


def test_a_command_in_a_temporary_file_is_read():
    text = "cat << EOF > $ARGS\nvllm serve org/m --swap-space 4 --max-model-len REPLACE_ENV_LEN\nEOF\n"
    assert judged(text, "a.sh") == [("flag-removed", "note")]


def test_flags_of_a_script_that_no_server_is_given_are_not_understood():
    assert judged("# vllm\nrun_it --max-model-len 4096\n", "a.sh") == [("not-understood", "note")]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ('["0"]', [("gpus-too-few", "error")]),
        ('["0,1"]', []),
        ('["${IDS:-0}"]', [("gpus-too-few", "error")]),
        ('["${IDS}"]', []),
        ('["${IDS:?set it}"]', []),
    ],
)
def test_a_variable_may_hold_the_ids_of_several_gpus(ids, expected):
    compose = f"""services:
  vllm:
    image: vllm/vllm-openai:v0.20.0
    ipc: host
    command: [--model, org/m, -tp, "2"]
    deploy: {{resources: {{reservations: {{devices: [{{driver: nvidia, capabilities: [gpu], device_ids: {ids}}}]}}}}}}
"""
    assert judged(compose, "compose.yaml") == expected


@pytest.mark.parametrize(
    "flags",
    [
        "--model <org>/<model-name>",
        "--model org/m --gpu-memory-utilization 0.15-0.45",
        "--model org/m --gpu-memory-utilization 'best_share(model)'",
    ],
)
def test_what_a_document_leaves_to_its_reader_is_no_wrong_value(flags):
    command = f"docker run --gpus all vllm/vllm-openai:latest {flags}"
    assert judged(f"```bash\n{command}\n```\n", "README.md") == []


def test_a_range_is_a_wrong_value_in_a_script():
    command = "docker run --gpus all vllm/vllm-openai:latest --model org/m --gpu-memory-utilization 0.15-0.45\n"
    assert judged(command) == [("flag-value", "error")]


@pytest.mark.parametrize(("name", "is_warned_of"), [("VLLM_LOGING_LEVEL", True), ("VLLM_CACHE_ROOT", False)])
def test_a_variable_that_no_release_reads_is_warned_of(name, is_warned_of):
    assert bool(judged(f"export {name}=x\nvllm serve org/m\n")) is is_warned_of


@pytest.mark.parametrize(
    ("pattern", "is_warned_of"),
    [("vllm serve", True), ("http.server.*3001", False), ("kubectl port-forward.*svc/argocd-server", False)],
)
def test_processes_that_have_nothing_to_do_with_serving_may_be_ended_by_a_pattern(pattern, is_warned_of):
    assert bool(judged(f'pkill -f "{pattern}"\nvllm serve org/m\n')) is is_warned_of


def test_a_build_for_another_system_may_have_flags_that_its_release_lacks():
    command = "docker run me/vllm-openai:v0.10.0-macos --model org/m --runner generate\n"
    assert judged(command) == [("flag-not-yet", "note")]


@pytest.mark.parametrize(
    ("beside", "severity"), [("vllm_num_requests_running", "error"), ("vllm_request_failure_total", "warning")]
)
def test_an_underscore_for_the_colon_is_sure_unless_an_exporter_s_series_are_asked_for_beside_it(beside, severity):
    both = f"[{{record: a, expr: vllm_num_requests_waiting}}, {{record: b, expr: {beside}}}]"
    assert judged(f"groups: [{{name: a, rules: {both}}}]", "rules.yml")[0] == ("metric-unknown", severity)


def test_a_variable_that_is_empty_unless_someone_sets_it_is_no_missing_value():
    service = "{image: 'vllm/vllm-openai:v0.20.0', command: '--model org/m --api-key ${KEY:-} --seed ${SEED:-}'}"
    assert judged(f"services: {{a: {service}}}", "docker-compose.yml") == []


@pytest.mark.parametrize(("series", "severity"), [("vllm_acme_widgets", "note"), ("vllm:nothing_total", "warning")])
def test_a_series_that_vllm_never_showed_may_be_another_programs(series, severity):
    rule = f"groups:\n- name: g\n  rules:\n  - record: a:b:c\n    expr: {series}\n"
    assert judged(rule, "a.yml") == [("metric-foreign", severity)]


def test_a_series_of_failures_is_not_replaced_by_one_of_successes():
    rule = "groups:\n- name: g\n  rules:\n  - record: a:b:c\n    expr: vllm:request_failure_total\n"
    assert "success" not in lint_texts([("a.yml", rule)], LintOptions()).findings[0].suggestion
