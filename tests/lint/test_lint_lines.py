"""What single lines of files around a server give away, also in files of other tools and in templates."""

import pytest

from legroom.facts import read_data
from legroom.lint.linter import LintOptions, lint_files, lint_texts

POD = "kind: Deployment\nspec: {containers: [{image: 'acme/vllm:1', ports: [{containerPort: 8000}]}]}\n"
SERVICE = "kind: Service\nmetadata: {name: vllm-a}\nspec:\n  type: LoadBalancer\n"


def rules(*texts):
    return {finding.rule for finding in lint_texts(texts, LintOptions()).findings}


LINES = {
    "a moving tag of a chart": ("values.yaml", "vllm:\n  repository: acme/vllm\n  tag: latest\n", "image-moving"),
    "a default that moves": ("compose.yaml", "x: acme/vllm:${VLLM_TAG:-latest}\n", "image-moving"),
    "a moving base": ("Dockerfile", "ARG BASE=latest\nFROM acme/vllm:${BASE}\n", "image-moving"),
    "Terraform": ("main.tf", 'image = "vllm/vllm-openai:latest"\n', "image-moving"),
    "requirements": ("requirements.txt", "vllm>=0.8\n", "image-moving"),
    "a package beside vLLM": ("Dockerfile", "FROM vllm/vllm-openai:v0.20.0\nRUN pip install ray\n", "image-moving"),
    "a branch": ("a.sh", "git clone https://github.com/me/vllm.git\n", "image-moving"),
    "a Service for everybody": ("service.yaml", SERVICE, "api-open"),
    "the host's network": ("a.yaml", "services: {vllm: {network_mode: host}}\n", "api-open"),
    "a role that listens everywhere": ("defaults/main.yml", "vllm_host: 0.0.0.0\n", "api-open"),
    "a key that is off": ("values.yaml", "# vllm\nvllm:\n  apiKeySecret:\n    enabled: false\n", "api-open"),
    "a privileged container": ("a.yaml", "vllm:\n  privileged: true\n", "rights-wide"),
    "a password": (".env", "VLLM_X=1\nADMIN_PASSWORD=hunter22\n", "secret-written"),
    "a volume that goes": ("a.yaml", "# vllm\nvllm:\n- name: hf-cache\n  emptyDir: {}\n", "cache-lost"),
    "a volume that is off": ("values.yaml", "vllm: 1\npersistence:\n  enabled: false\n", "cache-lost"),
    "no volume": ("a.yaml", POD, "cache-lost"),
    "no probe": ("a.yaml", POD, "probe-missing"),
    "no GPU": ("a.yaml", POD, "gpus-too-few"),
    "a long wait before the end": (
        "a.yaml",
        "vllm:\n  preStop:\n    exec:\n      command: [sleep, '60']\n",
        "stop-too-short",
    ),
    "the port of vLLM's processes": ("a.yaml", "env:\n- name: VLLM_PORT\n  value: '8000'\n", "env-meaning"),
    "twice the bytes": ("values.yaml", "vllm:\n  dtype: float32\n", "flag-costly"),
}


@pytest.mark.parametrize("what", LINES)
def test_a_line_is_noted(what):
    path, text, rule = LINES[what]
    assert rule in rules((path, text))


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("values.yaml", "vllm:\n  repository: acme/vllm\n  tag: v0.20.0\n", "image-moving"),
        ("values.yaml", "vllm:\n  # tag: latest\n  tag: v0.20.0\n", "image-moving"),
        ("requirements.txt", "vllm==0.8.5\n", "image-moving"),
        ("a.yaml", "other: {network_mode: host}\n", "api-open"),
        ("a.yaml", "vllm:\n- name: dshm\n  emptyDir: {medium: Memory}\n", "cache-lost"),
        ("a.yaml", "vllm:\n  password: ${PASSWORD}\n", "secret-written"),
    ],
)
def test_a_line_that_is_right_or_not_about_vllm_is_left_alone(path, text, rule):
    assert rule not in rules((path, text))


def test_another_file_may_hold_the_key_the_volume_or_the_probe():
    key = ("secret.yaml", "env:\n- name: VLLM_API_KEY\n  valueFrom: {secretKeyRef: {name: a, key: b}}\n")
    assert "api-open" not in rules(("service.yaml", SERVICE), key)
    claim = ("claim.yaml", "kind: PersistentVolumeClaim\nspec: {claimName: persistentVolumeClaim}\n")
    assert "cache-lost" not in rules(("templates/a.yaml", POD + "# {{ x }}\nx: {{ .Values.x }}\n"), claim)


NAMES = {
    "a flag's name as a variable": (".env", "VLLM_GPU_MEMORY_UTILIZATION=0.9\n", "env-unknown"),
    "a variable of old releases": ("values.yaml", "vllm:\n  VLLM_USE_V1: '1'\n", "env-unknown"),
    "a flag that is gone": ("main.tf", 'command = "vllm serve m --num-scheduler-steps 8"\n', "flag-removed"),
    "a gated model": (".env", "VLLM_X=1\nMODEL=meta-llama/Llama-3.1-8B-Instruct\n", "model-gated"),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_name_is_judged_where_no_server_is_read(what):
    path, text, rule = NAMES[what]
    assert rule in rules((path, text))


def test_a_name_that_another_file_reads_pins_or_fills_in_is_left_alone():
    script = ("start.sh", 'vllm serve m --gpu-memory-utilization "$VLLM_GPU_MEMORY_UTILIZATION"\n')
    assert "env-unknown" not in rules((".env", "VLLM_GPU_MEMORY_UTILIZATION=0.9\n"), script)
    assert "flag-removed" not in rules(("main.tf", 'a = "vllm/vllm-openai:v0.8.5 --num-scheduler-steps 8"\n'))
    token = ("secret.yaml", "kind: ExternalSecret\nname: hf-token\n")
    assert "model-gated" not in rules((".env", "VLLM_X=1\nMODEL=meta-llama/Llama-3.1-8B-Instruct\n"), token)


def manifests(labels="a: b", space="x", target="http", backend="vllm-a"):
    pod = "{image: 'acme/vllm:1', ports: [{name: http, containerPort: 8000}]}"
    return (
        f"apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: d, namespace: x}}\nspec:\n"
        f"  template: {{metadata: {{labels: {{a: b}}}}, spec: {{containers: [{pod}]}}}}\n---\n"
        f"apiVersion: v1\nkind: Service\nmetadata: {{name: vllm-a, namespace: {space}}}\n"
        f"spec: {{selector: {{{labels}}}, ports: [{{port: 80, targetPort: {target}}}]}}\n---\n"
        "apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: i}\n"
        f"spec: {{rules: [{{http: {{paths: [{{backend: {{service: {{name: {backend}}}}}}}]}}}}]}}\n"
    )


@pytest.mark.parametrize(
    ("changes", "found"),
    [({}, 0), ({"labels": "a: c"}, 1), ({"space": "y"}, 1), ({"target": "web"}, 1), ({"backend": "other"}, 1)],
)
def test_a_service_and_an_ingress_find_what_they_name(changes, found):
    findings = lint_texts([("a.yaml", manifests(**changes))], LintOptions()).findings
    assert sum(each.rule == "port-unreachable" for each in findings) == found


def test_a_container_name_of_two_services_is_refused_unless_profiles_part_them():
    service = "{image: 'vllm/vllm-openai:v0.20.0', command: --model m/m, container_name: v%s}"
    pair = f"services:\n  a: {service}\n  b: {service}\n"
    assert "manifest-refused" in rules(("compose.yaml", pair % ("", "")))
    assert "manifest-refused" not in rules(("compose.yaml", pair % ("", ", profiles: [b]")))


def test_a_hook_after_the_start_keeps_probes_from_running():
    probe = "livenessProbe: {periodSeconds: 5}, args: [--model, Qwen/Qwen3-8B]"
    pod = f"apiVersion: v1\nkind: Pod\nspec: {{containers: [{{image: 'vllm/vllm-openai:v0.20.0', {probe}%s}}]}}\n"
    hook = ", lifecycle: {postStart: {exec: {command: [sh, -c, wait]}}}"
    assert "start-too-short" in rules(("a.yaml", pod % ""))
    assert "start-too-short" not in rules(("a.yaml", pod % hook))


def test_templates_and_files_of_other_tools_are_found_in_a_folder(tmp_path):
    for name in ("main.tf", "compose.template", "requirements-gpu.txt", "head-env.template"):
        (tmp_path / name).write_text("# vllm\n")
    assert len(lint_files([str(tmp_path)], LintOptions()).files) == 4


def test_every_row_says_what_is_wrong_and_what_to_do():
    for row in read_data("line_mistakes.json")["rows"]:
        assert row["message"] and row["suggestion"] and "(?P<at>" in row["pattern"], row
