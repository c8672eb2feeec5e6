"""What looks wrong and may be right: another release, another program, a placeholder. Never an error of lint."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts

RUNNER = "--runner generate"
"""A flag that came with 0.10.1."""


def errors(text, path):
    findings = lint_texts([(path, text)], LintOptions()).findings
    return [finding.rule for finding in findings if finding.severity == "error"]


def warnings(text, path):
    findings = lint_texts([(path, text)], LintOptions()).findings
    return [finding.rule for finding in findings if finding.severity == "warning"]


def notes(text, path):
    findings = lint_texts([(path, text)], LintOptions()).findings
    return [finding.rule for finding in findings if finding.severity == "note"]


def rules(expression):
    return f"groups:\n- name: g\n  rules:\n  - alert: A\n    expr: |\n      {expression}\n"


IN_09 = f'FROM vllm/vllm-openai:v0.9.0\nRUN %s\nENTRYPOINT ["sh", "-c", "vllm serve org/m {RUNNER}"]\n'
IN_POD = f"""apiVersion: v1
kind: Pod
spec:
  containers:
  - image: vllm/vllm-openai:v0.9.0
    command: [sh, -c, 'pip install -U vllm && vllm serve m {RUNNER}']
"""


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (f"# tested with vllm==0.8.0\nvllm serve org/m {RUNNER}\n", "a.sh"),
        (f"pip install vllm==0.8.0\ngit clone https://h/me/vllm\nvllm serve m {RUNNER}\n", "a.sh"),
        (f"pip install vllm==0.8.0\n[ $(vllm --version) = 0.8.0 ] || vllm serve org/m {RUNNER}\n", "a.sh"),
        (f"```bash\npip install vllm==0.8.0\npip install -U vllm\nvllm serve org/m {RUNNER}\n```\n", "a.md"),
        (f"```bash\ndocker run vllm/vllm-openai:v0.8.0\n```\n\n```bash\nvllm serve m {RUNNER}\n```\n", "a.md"),
        (IN_09 % "pip install git+https://github.com/me/vllm", "Dockerfile"),
        (IN_09 % "uv pip install --system -U vllm", "Dockerfile"),
        (IN_POD, "a.yaml"),
    ],
)
def test_a_release_that_is_only_likely_makes_a_flag_of_another_one_a_note(text, path):
    assert (errors(text, path), warnings(text, path)) == ([], [])
    assert "flag-not-yet" in notes(text, path)


def test_what_a_dockerfile_installs_over_its_image_is_what_runs():
    assert warnings(IN_09 % "pip install vllm==0.11.0", "Dockerfile") == []


@pytest.mark.parametrize(
    ("image", "path"),
    [("repository: vllm/vllm-openai\n    tag: ''", "values.yaml"), ("repository: vllm/vllm-openai", "values.yaml")],
)
def test_an_image_whose_tag_is_left_to_the_chart_may_be_of_any_release(image, path):
    values = f"vllm:\n  image:\n    {image}\n  args: [--model, org/m, --swap-space, '4']\n"
    assert (errors(values, path), warnings(values, path)) == ([], [])


def test_an_image_that_compose_builds_itself_only_has_the_name():
    service = "{build: ., image: 'vllm/vllm-openai:latest', command: '--model org/m --swap-space 4'}"
    text = f"services: {{a: {service}}}"
    assert (errors(text, "compose.yml"), warnings(text, "compose.yml")) == ([], [])
    assert "flag-removed" in notes(text, "compose.yml")


@pytest.mark.parametrize(
    "text",
    [
        "pip install vllm==0.11.0 vllm-ascend==0.11.0\nvllm serve org/m --npu-flag\n",
        "docker run vllm/vllm-omni:v0.12.0 --model org/m --stage-configs-path x\n",
        "docker run me/vllm-openai-custom:v0.11.0 --model org/m --own-flag\n",
        "docker run us/vllm-openai:v0.6.1-edb07092-20250118 --model org/m --own-flag\n",
        "pip install vllm==0.11.0\ndocker run me/server:1 --model org/m --max-model-len 100 --own-flag\n",
    ],
)
def test_a_flag_of_a_plugin_a_fork_or_another_server_is_a_warning(text):
    assert (errors(text, "a.sh"), warnings(text, "a.sh")) == ([], ["flag-unknown"])


@pytest.mark.parametrize("port", ["PORT", "N", "{}", "{0}", "%d", "%PORT%", "@PORT@", "__PORT__", "???", "<n>"])
def test_a_placeholder_is_no_wrong_value(port):
    assert errors(f'cmd = ["vllm", "serve", "org/m", "--port", "{port}"]\n', "a.py") == []


@pytest.mark.parametrize("size", ["1/2/4", "1|2", "{2,4}", "2,4", "[N]"])
def test_a_document_may_leave_several_values_to_choose_from(size):
    assert errors(f"```bash\nvllm serve org/m --tensor-parallel-size '{size}'\n```\n", "a.md") == []


def test_a_placeholder_in_json_is_no_wrong_value():
    config = '{"method": "mtp", "num_speculative_tokens": N}'
    assert errors(f"```bash\nvllm serve org/m --speculative-config '{config}'\n```\n", "a.md") == []


@pytest.mark.parametrize("setting", ["tensor_parallel_size: auto", "gpu_memory_utilization: 90"])
def test_settings_under_vllm_s_names_may_be_read_by_another_program(setting):
    text = f"engine_kwargs:\n  model: org/m\n  max_model_len: 4096\n  {setting}\n"
    assert (errors(text, "a.yaml"), warnings(text, "a.yaml")) == ([], ["flag-value"])


@pytest.mark.parametrize(
    "pattern", ["ray_vllm_num_requests_running", "vllm:num_requests|vllm_num_requests", "vllm_num_requests|vllm_power"]
)
def test_a_pattern_that_may_match_something_is_no_error(pattern):
    assert errors(f"curl -s localhost:8080/metrics | grep -E '{pattern}'\n", "a.sh") == []


@pytest.mark.parametrize("series", ["vllm_kv_cache_usage_percent", "vllm_gpu_cache_usage_perc"])
def test_an_exporter_may_show_percent(series):
    assert "alert-never" not in errors(rules(f"{series} > 90"), "a.yml")


def test_vllm_s_own_series_is_never_above_one():
    assert errors(rules("vllm:kv_cache_usage_perc > 90"), "a.yml") == ["alert-never"]


def test_a_build_for_other_hardware_may_have_a_series_of_its_own():
    assert errors(rules("vllm:npu_cache_usage_perc > 0.9"), "a.yml") == []


@pytest.mark.parametrize("module", ["openai.multi_model_api_server", "sagemaker.api_server"])
def test_a_fork_may_have_a_module_of_its_own(module):
    text = f"python -m vllm.entrypoints.{module} --model m\n"
    assert (errors(text, "a.sh"), warnings(text, "a.sh")) == ([], ["module-unknown"])


@pytest.mark.parametrize(
    ("variable", "image", "flags"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "vllm/vllm-openai:v0.24.0", "-tp 2"),
        ("PYTORCH_ALLOC_CONF", "vllm/vllm-openai:v0.24.0", "--kv-offloading-size 4"),
        ("PYTORCH_HIP_ALLOC_CONF", "rocm/vllm:v0.9.0", "--enable-sleep-mode"),
    ],
)
def test_expandable_segments_are_an_error_only_where_vllm_itself_refuses_them(variable, image, flags):
    run = f"docker run --ipc host -e {variable}=expandable_segments:True {image}"
    assert (errors(f"{run} --model m {flags}\n", "a.sh"), warnings(f"{run} --model m {flags}\n", "a.sh")) == (
        [],
        ["allocator-breaks"],
    )


BUCKETS = "sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m]))"
LATENCY = "sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[5m]))"
HITS, QUERIES = (f"rate(vllm:prefix_cache_{name}_total[5m])" for name in ("hits", "queries"))


@pytest.mark.parametrize(
    "expression",
    [
        "vllm:num_preemptions_total - vllm:num_preemptions_total offset 5m > 10",
        "sum(vllm:prompt_tokens_total) - sum(vllm:generation_tokens_total) > 1000",
        f"histogram_quantile(0.99, {LATENCY}) > 1800",
        f"histogram_quantile(0.99, {BUCKETS}) > 120",
        f"{QUERIES} > 0.1 and {HITS} / {QUERIES} < 0.2",
        f"histogram_quantile(0.9, {BUCKETS} and on() sum(rate(vllm:request_success_total[5m])) > 0) > 3",
        "histogram_quantile(0.9, sum(rate(vllm:time_to_first_token_seconds[5m]))) > 3",
    ],
)
def test_promql_that_may_well_be_meant_so_is_no_error(expression):
    assert errors(rules(expression), "a.yml") == []


def test_an_unhealthy_container_of_compose_goes_on_starting():
    service = (
        "{image: 'vllm/vllm-openai:v0.20.0', ipc: host, command: '--model meta-llama/Llama-3.1-70B-Instruct -tp 4',"
        " healthcheck: {test: x, interval: 5s, retries: 3}}"
    )
    text = f"services: {{a: {service}}}"
    assert (errors(text, "compose.yml"), warnings(text, "compose.yml")) == ([], ["start-too-short"])


@pytest.mark.parametrize("image", ["me/vllm-app:0.5.0", "ecr/vllm:0.9-gpu-py312", "vllm/vllm-openai:v0.10.0rc2"])
def test_a_number_that_may_be_the_image_s_own_or_a_part_of_one_is_not_sure(image):
    text = f"docker run {image} --model org/m {RUNNER}\n"
    assert (errors(text, "a.sh"), warnings(text, "a.sh")) == ([], [])
    assert "flag-not-yet" in notes(text, "a.sh")


def test_a_flag_that_a_script_adds_only_where_its_variable_is_set_is_not_without_a_value():
    guarded = 'if [ -n "$Q" ]; then\n  CMD="$CMD --quantization $Q"\nfi\n'
    script = f'Q="${{Q:-}}"\nCMD="vllm serve org/m"\n{guarded}exec $CMD --seed 1\n'
    assert errors(script, "a.sh") == []
    assert errors(script.replace("${Q:-}", ""), "a.sh") == []


def test_flags_of_a_simulator_are_its_own_whatever_its_image_is_called():
    args = "[--model, org/m, --time-to-first-token, '2000', --mode, random]"
    container = f"image: '{{{{ .Values.vllm.image }}}}'\n    args: {args}"
    pod = f"apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - {container}\n"
    assert (errors(pod, "a.yaml"), warnings(pod, "a.yaml")) == ([], [])


def test_a_reset_that_switches_mig_on_is_what_it_takes():
    reset = "nvidia-smi --gpu-reset -i 0\nvllm serve org/m\n"
    assert warnings(reset, "a.sh") == ["gpu-reset"]
    assert warnings(f"nvidia-smi -i 0 -mig 1\n{reset}", "a.sh") == []


def test_values_of_a_chart_with_names_of_its_own_are_no_config_file_of_vllm():
    assert warnings("model: org/m\nquantization: awq\ndtype: half\nmaxModelLen: 4096\n", "values.yaml") == []


def test_a_token_that_says_where_it_goes_is_no_secret():
    assert warnings("HF_TOKEN=token_here vllm serve org/m\n", "a.sh") == []


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("nvcr.io/nvidia/vllm:25.09-py3", []),
        ("nvcr.io/nvidia/vllm:26.06-py3", ["flag-removed"]),
        ("rocm/vllm:main_20250513", []),
        ("rocm/vllm:main", ["flag-removed"]),
    ],
)
def test_an_image_with_a_date_holds_no_release_of_a_later_day(image, expected):
    found = notes(f"docker run {image} vllm serve org/m --swap-space 4\n", "a.sh")
    assert [rule for rule in found if rule == "flag-removed"] == expected


FAILS = "docker run vllm/vllm-openai:latest --model org/m --swap-space 4"
TEMPLATE = """apiVersion: v1
kind: Pod
spec:
  containers:
  - image: vllm/vllm-openai:latest
    args:
    - --model=m
    {{- if .Values.swap }}
    - --swap-space=4
    {{- end }}
"""


def test_a_mistake_in_a_document_is_a_warning_and_in_a_template_a_note():
    document = f"```console\n$ {FAILS}\n```\n"
    assert (errors(document, "a.md"), warnings(document, "a.md")) == ([], ["flag-removed"])
    assert (errors(TEMPLATE, "templates/pod.yaml"), warnings(TEMPLATE, "templates/pod.yaml")) == ([], [])
    assert "flag-removed" in notes(TEMPLATE, "templates/pod.yaml")


@pytest.mark.parametrize(
    "flags", ["--tensor-parallel-size num_gpus", "--port port", "--max-model-len max_len OPTIONS", "--seed 1 etc"]
)
def test_a_word_for_a_number_in_a_document_is_left_to_its_reader(flags):
    assert errors(f"```bash\ndocker run vllm/vllm-openai:v0.20.0 --model m {flags}\n```\n", "a.md") == []


def test_a_variable_that_asking_for_all_gpus_overrules_is_not_sure():
    service = "{image: 'vllm/vllm-openai:v0.20.0', ipc: host, environment: [NAME=0], command: '--model m -tp 2'}"
    text = f"services: {{a: {service}}}"
    assert errors(text.replace("NAME", "NVIDIA_VISIBLE_DEVICES"), "compose.yml") == []
    assert errors(text.replace("NAME", "CUDA_VISIBLE_DEVICES"), "compose.yml") == ["gpus-too-few"]


def test_the_second_spelling_of_an_alternative_is_no_error():
    assert errors(rules("vllm:num_requests_waiting > 3 or vllm_num_requests_waiting > 3"), "a.yml") == []


def test_series_that_prometheus_renames_have_the_other_name():
    scrape = "scrape_configs:\n- metric_relabel_configs:\n  - {regex: 'vllm:(.*)', replacement: 'vllm_$1'}\n"
    rule = rules("vllm_num_requests_waiting > 3")
    findings = lint_texts([("prometheus.yml", scrape), ("rules.yml", rule)], LintOptions()).findings
    assert [(finding.rule, finding.severity) for finding in findings] == [("metric-unknown", "warning")]
