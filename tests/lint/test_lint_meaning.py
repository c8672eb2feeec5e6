"""Lint on what a file means: probes and limits against its own model, and PromQL over series that exist."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts

POD = """apiVersion: v1
kind: Pod
metadata: {name: m}
spec:
  nodeSelector: {cloud.google.com/gke-accelerator: GPU}
  volumes: [{name: shm, emptyDir: {medium: Memory}}]
  containers:
  - image: vllm/vllm-openai:v0.32.0
    command: [vllm, serve, MODEL, --tensor-parallel-size, 'RANKS', --max-model-len, '4096']
    volumeMounts: [{name: shm, mountPath: /dev/shm}]
    startupProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 10, failureThreshold: FAILURES}
    resources:
      limits: {nvidia.com/gpu: RANKS, memory: MEMORY}
"""
LLAMA_70B = "meta-llama/Llama-3.1-70B-Instruct"


def pod(model=LLAMA_70B, ranks=4, failures=600, memory="200Gi", gpu="nvidia-h100-80gb"):
    values = {"MODEL": model, "RANKS": ranks, "FAILURES": failures, "MEMORY": memory, "GPU": gpu}
    text = POD
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


def judged(text, path="a.yaml"):
    return [(finding.rule, finding.severity) for finding in lint_texts([(path, text)], LintOptions()).findings]


def test_a_pod_with_room_and_time_is_clean():
    assert judged(pod()) == []


def test_a_probe_that_no_disk_can_meet_is_an_error():
    assert judged(pod(failures=3)) == [("start-too-short", "error")]


def test_a_probe_that_only_the_page_cache_can_meet_is_a_warning():
    assert judged(pod(failures=6)) == [("start-too-short", "warning")]


def test_a_flag_error_does_not_hide_a_probe_that_is_too_short():
    text = pod(failures=6).replace("--max-model-len", "--max-model-lenx")
    assert judged(text) == [("flag-unknown", "error"), ("start-too-short", "warning")]


def test_too_few_gpus_are_an_error_also_where_the_release_looks_for_a_ray_cluster_that_no_file_names():
    text = pod().replace("gpu: 4", "gpu: 2").replace("v0.32.0", "v0.10.2")
    assert ("gpus-too-few", "error") in judged(text)
    assert ("gpus-too-few", "error") not in judged(text.replace("[vllm,", "[ray, start, --head, '&&', vllm,"))
    assert lint_texts([("a.yaml", text)], LintOptions()).release == "0.10.2"


def test_a_memory_limit_below_what_the_ranks_hold_is_an_error():
    assert judged(pod(memory="4Gi")) == [("host-memory", "error")]


def test_a_memory_limit_is_judged_without_knowing_the_model():
    assert judged(pod(model="org/unknown", memory="4Gi")) == [("host-memory", "error")]


def test_a_model_that_its_own_gpu_cannot_hold_is_an_error():
    assert judged(pod(ranks=1)) == [("does-not-fit", "error")]


def test_a_gpu_that_is_not_named_is_never_certain_to_be_too_small():
    assert judged(pod(ranks=1).replace("cloud.google.com/gke-accelerator", "pool")) == [("does-not-fit", "warning")]


def rule_file(expression, alert=True):
    name = "alert: A" if alert else "record: a"
    return f"groups:\n- name: g\n  rules:\n  - {name}\n    expr: |\n      {expression}\n"


@pytest.mark.parametrize(
    ("expression", "rule"),
    [
        ("rate(vllm:num_requests_running[5m]) > 1", "promql-rate-of-gauge"),
        ("vllm:num_preemptions_total > 100", "promql-counter-level"),
        ("histogram_quantile(0.9, sum(rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 2", "promql-no-le"),
        (
            "histogram_quantile(0.9, sum by (job) (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 2",
            "promql-no-le",
        ),
        ("histogram_quantile(0.9, rate(vllm:time_to_first_token_seconds_bucket[5m])) > 500", "promql-units"),
        (
            "rate(vllm:inter_token_latency_seconds_sum[5m]) / rate(vllm:inter_token_latency_seconds_count[5m]) > 50",
            "promql-units",
        ),
        ("rate(vllm:prefix_cache_hits_total[5m]) < 0.3", "promql-ratio"),
        ("100 * rate(vllm:prefix_cache_hits_total[5m]) < 30", "promql-ratio"),
        ("0x64 * rate(vllm:prefix_cache_hits_total[5m]) < 30", "promql-ratio"),
        ("rate(vllm:spec_decode_num_accepted_tokens_total[5m]) < 0.6", "promql-ratio"),
        ("rate(sum(vllm:num_requests_waiting)[5m:]) > 1", "promql-rate-of-gauge"),
        ("rate({__name__='vllm:num_requests_waiting'}[5m]) > 1", "promql-rate-of-gauge"),
        ("vllm:e2e_request_latency_seconds_count > 100", "promql-counter-level"),
        ("histogram_quantile(0.9, rate(vllm:time_to_first_token_seconds_sum[5m])) > 1", "promql-no-le"),
        ("histogram_quantile(0.9, vllm:num_requests_waiting) > 1", "promql-no-le"),
        ("histogram_quantile(0.9, rate(vllm:request_decode_time_seconds_bucket[5m])) > 60000", "promql-units"),
        ("histogram_quantile(0.9, rate(vllm:time_to_first_token_seconds_bucket[5m])) * 1000 > 0.5", "promql-units"),
    ],
)
def test_an_alert_that_means_something_else_is_an_error(expression, rule):
    assert judged(rule_file(expression)) == [(rule, "error")]


@pytest.mark.parametrize(
    "expression",
    [
        "increase(vllm:num_preemptions_total[5m]) > 100",
        "histogram_quantile(0.9, sum by (le, job) (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 2",
        "histogram_quantile(0.9, sum(rate(vllm:time_to_first_token_seconds_bucket[5m])) by (le)) > 2",
        "histogram_quantile(0.9, sum without (pod) (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 2",
        "histogram_quantile(0.9, rate(vllm:time_to_first_token_seconds_bucket[5m])) * 1000 > 500",
        "histogram_quantile(0.9, rate(vllm:e2e_request_latency_seconds_bucket[5m])) > 300",
        "rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m]) < 0.3",
        "deriv(vllm:num_requests_running[5m]) > 1",
        "rate(count_over_time(vllm:num_requests_running[5m])[5m:]) > 1",
        "rate(vllm:generation_tokens_total[5m]) < 1 and vllm:request_success_total > 0",
        "rate(vllm:time_to_first_token_seconds_count[5m]) > 500",
    ],
)
def test_an_alert_that_means_what_it_says_is_left_alone(expression):
    assert judged(rule_file(expression)) == []


def test_a_total_in_a_panel_is_what_it_says():
    assert judged("dashboards:\n- expr: sum(vllm:request_success_total)\n") == []


@pytest.mark.parametrize(
    ("expression", "rule"),
    [
        ("histogram_quantile(0.9, rate(vllm:e2e_request_latency_seconds_bucket[5m])) > 500", "promql-units"),
        ("histogram_quantile(0.9, vllm:time_to_first_token_seconds_bucket) > 1", "promql-no-le"),
        ("vllm:prefix_cache_hits_total / vllm:prefix_cache_queries_total < 0.3", "promql-counter-level"),
        ("avg(vllm:request_success_total) < 1", "promql-counter-level"),
    ],
)
def test_an_alert_that_may_be_meant_so_is_a_warning(expression, rule):
    assert judged(rule_file(expression)) == [(rule, "warning")]


def test_a_ratio_that_became_two_counters_is_written_as_their_quotient():
    report = lint_texts([("a.yaml", rule_file("vllm:gpu_prefix_cache_hit_rate < 0.5"))], LintOptions())
    assert [finding.suggestion for finding in report.findings] == [
        "write rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m])"
    ]


def scaled_object(query, threshold):
    return (
        "apiVersion: keda.sh/v1alpha1\nkind: ScaledObject\nspec:\n  triggers:\n  - type: prometheus\n"
        f"    metricType: Value\n    metadata:\n      query: {query}\n      threshold: '{threshold}'\n"
    )


@pytest.mark.parametrize(
    ("query", "threshold", "expected"),
    [
        ("sum(vllm:request_success_total)", "5", [("promql-counter-level", "error")]),
        ("avg(vllm:kv_cache_usage_perc)", "80", [("alert-never", "error")]),
        ("sum(vllm:num_requests_waiting)", "5", []),
        ("avg(vllm:kv_cache_usage_perc)", "0.8", []),
    ],
)
def test_the_threshold_of_an_autoscaler_is_judged_like_an_alert_s(query, threshold, expected):
    assert judged(scaled_object(query, threshold)) == expected


def test_a_pool_that_is_too_small_within_the_error_of_the_estimate_is_a_warning():
    text = pod("meta-llama/Llama-3.1-8B-Instruct", 1, gpu="nvidia-l4").replace("v0.32.0", "v0.8.5")
    assert ("does-not-fit", "warning") in judged(text.replace("4096", "32768"))


CONNECTOR = '{\\"kv_connector\\": \\"NixlConnector\\", \\"kv_role\\": \\"kv_both\\"}'
LLM_SERVICE = f"""apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
metadata: {{name: m}}
spec:
  model: {{uri: hf://{LLAMA_70B}}}
  parallelism: {{tensor: 4}}
  template:
    containers:
    - name: main
      image: vllm/vllm-openai:v0.32.0
      env:
      - name: VLLM_ADDITIONAL_ARGS
        value: "--max-model-len 4096 --kv-transfer-config '{CONNECTOR}'"
      resources: {{limits: {{nvidia.com/gpu: 4, memory: 200Gi}}}}
      startupProbe: {{periodSeconds: PERIOD}}
"""


def test_the_flags_of_an_llm_inference_service_are_split_as_a_shell_splits_them():
    assert judged(LLM_SERVICE.replace("PERIOD", "600")) == []


def test_the_probe_of_an_llm_inference_service_is_judged_by_its_model():
    assert judged(LLM_SERVICE.replace("PERIOD", "10")) == [("start-too-short", "error")]


def test_a_model_of_the_production_stack_is_judged_like_a_pod():
    text = (
        "servingEngineSpec:\n  modelSpec:\n  - name: m\n    repository: vllm/vllm-openai\n    tag: v0.32.0\n"
        f"    modelURL: {LLAMA_70B}\n    requestGPU: 4\n    limitMemory: 4Gi\n"
        "    vllmConfig: {tensorParallelSize: 4, maxModelLen: 4096, extraArgs: [--swap-space, '4']}\n"
    )
    found = [("flag-removed", "error"), ("host-memory", "error"), ("model-gated", "note")]
    assert sorted(judged(text)) == found
