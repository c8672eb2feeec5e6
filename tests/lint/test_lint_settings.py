"""Settings whose effect follows from others: nested flags, limits, short names, shares of a series."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts

POD = """\
apiVersion: v1
kind: Pod
metadata: {name: a}
spec:
  containers:
  - name: vllm
    image: vllm/vllm-openai:v0.20.0
    args: [--model, Qwen/Qwen3-8B, ARGS]
    env: [{name: VLLM_ALLOW_RUNTIME_LORA_UPDATING, value: "LOADS"}]
    resources: {limits: {nvidia.com/gpu: 1, memory: LIMIT}}
    volumeMounts: [{name: shm, mountPath: /dev/shm}]
  volumes: [{name: shm, emptyDir: {medium: Memory SIZE}}]
"""


def pod(args="--max-num-seqs=8", limit="64Gi", size="", loads="true"):
    text = POD.replace("ARGS", args).replace("LIMIT", limit).replace(" SIZE", size).replace("LOADS", loads)
    return lint_texts([("a.yaml", text)], LintOptions()).findings


@pytest.mark.parametrize("key", ["vllm", "server_args", "engine-config"])
def test_flags_below_a_key_of_a_tool_are_read(key):
    text = f"{key}:\n  max-model-len: 4096\n  kv-cache-dtype: auto\n  num-scheduler-steps: 4\n  quantization: auto\n"
    found = lint_texts([("run.yaml", f"name: a\n{text}")], LintOptions()).findings
    assert [(each.rule, each.place.line) for each in found] == [("flag-removed", 5)]


def test_flags_in_a_file_of_a_config_map_are_read():
    text = "apiVersion: v1\nkind: ConfigMap\ndata:\n  config.yaml: |\n    vllm:\n      max-model-len: 4096\n"
    found = lint_texts([("a.yaml", f"{text}      swap-space: 4\n")], LintOptions()).findings
    assert [(each.rule, each.severity, each.place.line) for each in found] == [("flag-removed", "note", 7)]


@pytest.mark.parametrize(
    ("limit", "size", "is_noted"),
    [("16Gi", ", sizeLimit: 8Gi", True), ("32Gi", ", sizeLimit: 8Gi", False), ("10Gi", "", True), ("64Gi", "", False)],
)
def test_shared_memory_counts_into_the_memory_limit(limit, size, is_noted):
    messages = [each.message for each in pod(limit=limit, size=size) if each.rule == "host-memory"]
    assert any("/dev/shm" in each for each in messages) == is_noted


@pytest.mark.parametrize(("loads", "is_warned"), [("true", False), ("false", True), ("0", True)])
def test_adapters_that_may_not_be_loaded_are_none(loads, is_warned):
    warned = [each for each in pod("--enable-lora", loads=loads) if each.rule == "flag-ignored"]
    assert bool(warned) == is_warned


def test_a_flag_that_argparse_completes_is_noted():
    (found,) = (each for each in pod("--max-num-seq=8") if each.rule == "flag-costly")
    assert (found.severity, found.suggestion) == ("note", "write --max-num-seqs")
    assert "flag-costly" not in {each.rule for each in pod("--max-num-seqs=8")}


ALL = "rate(vllm:request_success_total[5m])"
ABORTED = 'rate(vllm:request_success_total{finished_reason="abort"}[5m])'


@pytest.mark.parametrize(
    ("query", "rules"),
    [
        (f"{ABORTED} / {ALL} > 0.1", ["promql-ratio"]),
        (f"sum({ABORTED}) / sum({ALL}) > 0.1", []),
        (f"{ABORTED} / ignoring(finished_reason) {ALL} > 0.1", []),
    ],
)
def test_a_rate_over_its_own_total_needs_sums(query, rules):
    rule = f"groups:\n- name: g\n  rules:\n  - alert: A\n    expr: '{query}'\n"
    assert [each.rule for each in lint_texts([("a.yml", rule)], LintOptions()).findings] == rules


SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: vllm}\n"


@pytest.mark.parametrize(("path", "severities"), [("base/p.yaml", []), ("overlay/p.yaml", ["note"]), ("", ["warning"])])
def test_service_links_that_another_folder_switches_off_leave_a_note(path, severities):
    patch = [(path, "kind: Deployment\nspec: {template: {spec: {enableServiceLinks: false}}}\n")] if path else []
    found = lint_texts([("base/s.yaml", SERVICE), *patch], LintOptions()).findings
    assert [each.severity for each in found if each.rule == "service-named-vllm"] == severities


def test_a_rollout_waits_for_gpus_whose_number_a_variable_holds():
    pod = (
        "spec: {containers: [{image: '${IMAGE}', args: [--model, m/m], resources: {limits: {nvidia.com/gpu: '${N}'}}}]}"
    )
    text = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: a}\nspec:\n  selector: {matchLabels: {a: vllm}}\n"
    text += f"  template:\n    metadata: {{labels: {{a: vllm}}}}\n    {pod}\n"
    assert "rollout-stuck" in {each.rule for each in lint_texts([("a.yaml", text)], LintOptions()).findings}
    free = text.replace("spec:\n  sel", "spec:\n  strategy: {type: Recreate}\n  sel")
    assert "rollout-stuck" not in {each.rule for each in lint_texts([("a.yaml", free)], LintOptions()).findings}
