"""Programs beside the server in the same repository, whose settings are their own."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts

DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm-chat}
spec:
  replicas: 1
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}}
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.20.0
        args: [--model, Qwen/Qwen3-8B]
        ports: [{containerPort: 8000}]
        resources: {limits: {nvidia.com/gpu: 1}}
"""
AUTOSCALER = """\
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: scaler}
spec:
  scaleTargetRef:
    kind: Deployment
    name: NAME
  metrics:
    - type: Resource
      resource:
        name: cpu
"""


def rules(*texts):
    return {(finding.place.path, finding.rule) for finding in lint_texts(texts, LintOptions()).findings}


def test_a_health_check_is_judged_where_the_image_holds_vllm():
    check = "HEALTHCHECK CMD curl -f http://localhost:8000/health\n"
    assert ("Dockerfile", "start-too-short") in rules(("Dockerfile", "FROM acme/vllm:1\n" + check))
    proxy = "# in front of vllm\nFROM python:3.12-slim\nRUN pip install fastapi\n" + check
    assert ("Dockerfile", "start-too-short") not in rules(("Dockerfile", proxy))


@pytest.mark.parametrize(("name", "is_noted"), [("vllm-chat", True), ("vllm-chat-proxy", False)])
def test_an_autoscaler_is_judged_by_what_it_scales(name, is_noted):
    found = rules(("a.yaml", DEPLOYMENT), ("hpa.yaml", AUTOSCALER.replace("NAME", name)))
    assert (("a.yaml", "command-doubtful") in found) == is_noted
    assert (("hpa.yaml", "rollout-stuck") in found) == is_noted


def test_a_proxy_that_is_called_after_vllm_keeps_its_own_start_period():
    service = "  front:\n    build: .\n    container_name: NAME\n    healthcheck:\n      test: curl :8000/health\n"
    text = "services:\n  vllm:\n    image: vllm/vllm-openai:v0.20.0\n" + service + "      start_period: 10s\n"
    assert ("compose.yml", "start-too-short") in rules(("compose.yml", text.replace("NAME", "vllm-chat")))
    assert ("compose.yml", "start-too-short") not in rules(("compose.yml", text.replace("NAME", "vllm-chat-proxy")))


def test_a_series_that_names_its_program_is_that_programs():
    rule = "groups:\n- name: g\n  rules:\n  - alert: A\n    expr: SERIES > 5\n"
    assert ("a.yml", "metric-foreign") in rules(("a.yml", rule.replace("SERIES", "vllm_acme_busy")))
    assert not rules(("a.yml", rule.replace("SERIES", "vllm_gateway_busy")))


def test_variables_of_an_image_with_a_program_of_its_own_are_that_programs():
    values = ("map.yaml", "kind: ConfigMap\ndata:\n  VLLM_QUANTIZATION: awq\n")
    server = ("Dockerfile", 'FROM acme/vllm:1\nENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server"]\n')
    own = ("Dockerfile", 'FROM acme/base:1\nENTRYPOINT ["python", "-m", "acme.cli", "main:Model"]\n')
    assert ("map.yaml", "env-unknown") in rules(values, server)
    assert ("map.yaml", "env-unknown") not in rules(values, own)


def test_a_job_without_vllm_needs_no_gpu():
    job = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: vllm-files}\nspec:\n  template:\n    spec:\n"
    job += "      containers:\n        - image: IMAGE\n          resources:\n            limits:\n"
    job += "              memory: 4Gi\n              cpu: 1\n"
    path = "vllm/job.yaml"
    assert (path, "gpus-too-few") in rules((path, job.replace("IMAGE", "acme/vllm:1")))
    assert (path, "gpus-too-few") not in rules((path, job.replace("IMAGE", "python:3.12-slim")))


def test_a_files_own_name_tells_its_card():
    command = "vllm serve meta-llama/Llama-3.1-405B-Instruct --tensor-parallel-size 8\n"
    other = ("other.sh", "#SBATCH --constraint=H100\n")
    assert ("run.sh", "does-not-fit") in rules(("run.sh", command), other)
    assert ("run_h200.sh", "does-not-fit") not in rules(("run_h200.sh", command), other)


def test_a_volume_below_an_empty_line_is_seen():
    service = "services:\n  vllm:\n    build: .\n    command: vllm serve Qwen/Qwen3-8B\n\nVOLUMES    restart: always\n"
    held = service.replace("VOLUMES", "    volumes:\n      - cache:/root/.cache/huggingface\n")
    assert ("compose.yml", "cache-lost") in rules(("compose.yml", service.replace("VOLUMES", "")))
    assert ("compose.yml", "cache-lost") not in rules(("compose.yml", held))


def test_the_tag_that_a_script_gives_to_its_own_image_is_no_release():
    tag = 'TAG="latest"\n# vllm\n'
    assert ("a.sh", "image-moving") in rules(("a.sh", tag))
    assert ("a.sh", "image-moving") not in rules(("a.sh", tag + "docker build -t me:$TAG .\n"))


def test_a_budget_of_several_replicas_is_no_obstacle():
    values = "vllm:\n  replicaCount: 1\npodDisruptionBudget:\n  enabled: true\n  minAvailable: 1\n"
    assert ("values.yaml", "rollout-stuck") in rules(("values.yaml", values))
    assert ("values.yaml", "rollout-stuck") not in rules(("values.yaml", values + "proxy:\n  replicaCount: 2\n"))
