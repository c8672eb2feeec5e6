"""Lint on what a file means: probes and limits against its own model, and PromQL over series that exist."""

import pytest

from legroom.lint.lint import Options, lint_texts

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
    livenessProbe: {periodSeconds: 10, failureThreshold: FAILURES}
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
    return [(finding.rule, finding.severity) for finding in lint_texts([(path, text)], Options()).findings]


def test_a_pod_with_room_and_time_is_clean():
    assert judged(pod()) == []


def test_a_probe_that_no_disk_can_meet_is_an_error():
    assert judged(pod(failures=3)) == [("start-too-short", "error")]


def test_a_probe_that_only_the_page_cache_can_meet_is_a_warning():
    assert judged(pod(failures=6)) == [("start-too-short", "warning")]


def test_a_memory_limit_below_what_the_ranks_hold_is_an_error():
    assert judged(pod(memory="4Gi")) == [("host-memory", "error")]


def test_a_memory_limit_is_judged_without_knowing_the_model():
    assert judged(pod(model="org/unknown", memory="4Gi")) == [("host-memory", "error")]


def test_a_model_that_its_own_gpu_cannot_hold_is_an_error():
    assert judged(pod(ranks=1)) == [("does-not-fit", "error")]


def test_a_gpu_that_is_not_named_is_not_judged():
    assert judged(pod(ranks=1).replace("cloud.google.com/gke-accelerator", "pool")) == []


def rule_file(expression, alert=True):
    name = "alert: A" if alert else "record: a"
    return f"groups:\n- name: g\n  rules:\n  - {name}\n    expr: |\n      {expression}\n"


@pytest.mark.parametrize(
    ("expression", "rule"),
    [
        ("rate(vllm:num_requests_running[5m]) > 1", "promql-rate-of-gauge"),
        ("vllm:num_preemptions_total > 100", "promql-counter-level"),
        ("histogram_quantile(0.9, sum(rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 2", "promql-no-le"),
        ("histogram_quantile(0.9, sum by (job) (rate(vllm:time_to_first_token_seconds_bucket[5m]))) > 2",
         "promql-no-le"),
        ("histogram_quantile(0.9, rate(vllm:time_to_first_token_seconds_bucket[5m])) > 500", "promql-units"),
        ("rate(vllm:inter_token_latency_seconds_sum[5m]) / rate(vllm:inter_token_latency_seconds_count[5m]) > 50",
         "promql-units"),
        ("rate(vllm:prefix_cache_hits_total[5m]) < 0.3", "promql-ratio"),
    ],
)  # fmt: skip
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
        "rate(vllm:time_to_first_token_seconds_count[5m]) > 500",
    ],
)
def test_an_alert_that_means_what_it_says_is_left_alone(expression):
    assert judged(rule_file(expression)) == []


def test_a_total_in_a_panel_is_what_it_says():
    assert judged("dashboards:\n- expr: sum(vllm:request_success_total)\n") == []
