"""What stands around a server: proxies, job scripts, commands of a guide, other releases among the files."""

import json

import pytest

from legroom.lint.linter import LintOptions, lint_texts

SCRIPT = "#!/bin/bash\nsource env\n"
SERVES = "vllm serve org/m --api-key $KEY"
JOB = f"#!/bin/bash\n#SBATCH --mem=80G\n#SBATCH %s\n{SERVES}\n"
DOCKER = "FROM vllm/vllm-openai:v0.20.0\n"
COMPOSE = "services:\n  vllm:\n    image: acme/vllm:1\n%s"
READY = "# vllm\nreadinessProbe:\n  httpGet: {path: /health}\n  failureThreshold: %d\n"
ALB = "kind: Ingress\nname: vllm\nspec:\n  ingressClassName: alb\n%s"
ROUTE = "apiVersion: route.openshift.io/v1\nkind: Route\nmetadata:\n  name: vllm\n%s"
POD = "kind: Pod\nimage: a/vllm:1\ncommand:\n- -c\n- |\n  set -x\n  %spython -m vllm.entrypoints.openai.api_server\n"
CLAIM = "# vllm\nkind: PersistentVolume\n---\nkind: PersistentVolumeClaim\nspec:\n  %s\n"
UNIT = "[Unit]\nAfter=network.target\n[Service]\n%sExecStart=/bin/vllm serve /m\n[Install]\nWantedBy=%s.target\n"
PAIRS = {
    "a process id of a subshell": (
        "a.sh",
        f"{SCRIPT}cd /a && nohup {SERVES} > log 2>&1 &\necho $! > pid\n",
        f"{SCRIPT}cd /a\nnohup {SERVES} > log 2>&1 & wait\necho $! > pid\n",
        "restart-missing",
    ),
    "a server in the background": (
        "a.sh",
        f"{SCRIPT}{SERVES} &> log &\n",
        f"{SCRIPT}exec {SERVES}\n",
        "restart-missing",
    ),
    "an entry point of a shell": (
        "Dockerfile",
        f"{DOCKER}ENTRYPOINT python3 -m vllm.entrypoints.openai.api_server --model $M\n",
        f'{DOCKER}ENTRYPOINT ["vllm", "serve", "org/m"]\n',
        "stop-too-short",
    ),
    "a shell between the pod and the server": ("a.yaml", POD % "", POD % "exec ", "stop-too-short"),
    "a balancer of AWS": (
        "a.yaml",
        ALB % "",
        ALB % "  attributes: idle_timeout.timeout_seconds=600\n",
        "stop-too-short",
    ),
    "a balancer of Terraform": (
        "vllm.tf",
        'resource "aws_lb" "a" {\n}\n',
        'resource "aws_lb" "a" {\n  idle_timeout = 600\n}\n',
        "stop-too-short",
    ),
    "a route of OpenShift": (
        "a.yaml",
        ROUTE % "",
        ROUTE % "  annotations: {haproxy.router.openshift.io/timeout: 10m}\n",
        "stop-too-short",
    ),
    "another torch after vLLM": (
        "Dockerfile",
        "FROM a\nRUN pip install vllm==0.20.0\nRUN pip install torch==2.0.1\n",
        "FROM a\nRUN pip install torch==2.0.1\nRUN pip install numpy\n",
        "image-moving",
    ),
    "an empty argument": (
        "Dockerfile",
        f'{DOCKER}CMD [""]\n',
        f'{DOCKER}CMD ["--model", "org/m"]\n',
        "container-command",
    ),
    "a machine without a compiler": (
        "a.sh",
        "apt-get install -y python3-venv\npip install vllm==0.20.0\n",
        "apt-get install -y python3-venv gcc\npip install vllm==0.20.0\n",
        "command-doubtful",
    ),
    "an image without a compiler": (
        "Dockerfile",
        "FROM python:3.12-slim\nRUN pip install vllm==0.20.0\n",
        "FROM python:3.12-slim\nENV URL=http://vllm:8000\nRUN pip install openai\n",
        "command-doubtful",
    ),
    "a check that the proxy answers itself": (
        "nginx.conf",
        "location /health { return 200 'ok'; }\nlocation / { proxy_pass http://vllm; proxy_buffering off; }\n",
        "location /health { proxy_pass http://vllm/health; }\n",
        "probe-missing",
    ),
    "a readiness probe that forgives for minutes": ("a.yaml", READY % 40, READY % 3, "probe-missing"),
    "Prometheus without a volume": (
        "compose.yml",
        "# vllm\nservices:\n  prom:\n    image: prom/prometheus:v3\n",
        "# vllm\nservices:\n  prom:\n    image: prom/prometheus:v3\n    volumes: [d:/prometheus]\n",
        "cache-lost",
    ),
    "a claim of a default class": ("a.yaml", CLAIM % "a: b", CLAIM % "storageClassName: ''", "path-missing"),
    "a token on the command line": (
        "a.sh",
        "# vllm\nhf auth login --token $HF_TOKEN\n",
        "# vllm\nhf auth login\n",
        "secret-written",
    ),
    "a key on the command line": (
        "a.yaml",
        "image: a/vllm:1\nargs:\n- --api-key\n- $(VLLM_API_KEY)\n",
        "image: a/vllm:1\nenv:\n- name: VLLM_API_KEY\n",
        "secret-written",
    ),
    "an old name of the token": (
        "a.sh",
        f"export HUGGING_FACE_HUB_TOKEN=$T\n{SERVES}\n",
        f"export HF_TOKEN=$T\n{SERVES}\n",
        "env-meaning",
    ),
    "a folder of logs": ("a.sh", JOB % "--output=logs/%j.out", JOB % "--output=/tmp/%j.out", "path-missing"),
    "one core": ("a.sh", JOB % "--cpus-per-task=1", JOB % "--cpus-per-task=8", "flag-costly"),
    "a job without a time": (
        "a.sh",
        JOB % "--gres=gpu:1",
        JOB % "--gres=gpu:1\n#SBATCH --time=8:00:00",
        "stop-too-short",
    ),
    "nodes that do nothing": ("a.sh", JOB % "--nodes=2", f"{JOB % '--nodes=2'}srun ray start\n", "gpus-too-few"),
    "a bool of any text": (
        "a.py",
        "import vllm\np.add_argument('--eager', type=bool)\n",
        "import vllm\np.add_argument('--eager', action='store_true')\n",
        "command-doubtful",
    ),
    "a method that LLM does not have": (
        "a.py",
        "from vllm import LLM\nllm = LLM('org/m')\nllm.serve(port=1)\n",
        "from vllm import LLM\nllm = LLM('org/m')\nllm.generate('a')\n",
        "module-unknown",
    ),
    "files that clients read": ("a.sh", f"{SERVES} --allowed-local-media-path /\n", f"{SERVES}\n", "rights-wide"),
    "a user's unit that waits for the system": (
        "vllm.service",
        UNIT % ("", "default"),
        (UNIT % ("", "default")).replace("After=network.target\n", ""),
        "command-doubtful",
    ),
    "a time limit of no start": (
        "vllm.service",
        UNIT.replace("After=", "After=network-online.target ") % ("TimeoutStartSec=600\n", "multi-user"),
        UNIT.replace("After=", "After=network-online.target ") % ("Type=notify\nTimeoutStartSec=600\n", "multi-user"),
        "command-doubtful",
    ),
    "a path of the host": (
        "compose.yml",
        COMPOSE % "    environment:\n    - MODEL=${MODEL_PATH:-/m}\n    volumes:\n    - ${MODEL_PATH:-./m}:/m\n",
        COMPOSE % "    environment:\n    - MODEL=/m\n    volumes:\n    - ${MODEL_PATH:-./m}:/m\n",
        "env-meaning",
    ),
    "an API that vLLM does not have": (
        "a.md",
        "vLLM:\n\n```bash\ncurl https://h/v2/models/m\n```\n",
        "vLLM:\n\n```bash\ncurl https://h/v1/models\n```\n",
        "probe-path",
    ),
    "a window of one step": (
        "a.json",
        json.dumps({"panels": [{"targets": [{"expr": "rate(vllm:prompt_tokens_total[$__interval])"}]}]}),
        json.dumps({"panels": [{"targets": [{"expr": "rate(vllm:prompt_tokens_total[$__rate_interval])"}]}]}),
        "promql-units",
    ),
    "a share with a percent sign": (
        "a.yml",
        "groups:\n- name: a\n  rules:\n  - alert: A\n    expr: vllm:kv_cache_usage_perc > 0.9\n"
        "    annotations: {summary: 'at {{ $value }}%'}\n",
        "groups:\n- name: a\n  rules:\n  - alert: A\n    expr: vllm:kv_cache_usage_perc * 100 > 90\n"
        "    annotations: {summary: 'at {{ $value }}%'}\n",
        "promql-units",
    ),
    "rules of Terraform": (
        "a.tf",
        '  expression = "rate(vllm_prompt_tokens_total[5m])"\n',
        '  expression = "rate(vllm:prompt_tokens_total[5m])"\n',
        "metric-unknown",
    ),
}


def rules(*texts):
    return {finding.rule for finding in lint_texts(texts, LintOptions()).findings}


@pytest.mark.parametrize("case", PAIRS)
def test_a_mistake_is_told_and_what_looks_like_it_is_not(case):
    path, wrong, right, rule = PAIRS[case]
    assert rule in rules((path, wrong))
    assert rule not in rules((path, right))


DEPLOYMENT = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: vllm-a}\nspec:\n  replicas: %d\n  selector: {}\n"
DEPLOYMENT += "  template:\n    metadata: {labels: {app: a}}\n    spec: {containers: [{name: v, image: a/b}]}\n"
BUDGET = "apiVersion: policy/v1\nkind: PodDisruptionBudget\nmetadata: {name: vllm}\nspec:\n  minAvailable: 1\n"
BUDGET += "  selector: {matchLabels: {app: a}}\n"


def test_a_budget_of_one_pod_keeps_its_node_from_being_drained():
    for replicas, is_told in ((1, True), (2, False)):
        found = lint_texts([("a.yaml", DEPLOYMENT % replicas), ("b.yaml", BUDGET)], LintOptions()).findings
        assert any("no node is drained" in each.message for each in found) == is_told


def test_a_monitor_that_matches_two_services_of_the_same_pods_counts_them_twice():
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: vllm-%s, labels: {app: a}}\n"
    service += "spec: {selector: {app: %s}, ports: [{name: http, port: 80}]}\n"
    monitor = "apiVersion: monitoring.coreos.com/v1\nkind: ServiceMonitor\nmetadata: {name: vllm}\n"
    monitor += "spec: {selector: {matchLabels: {app: a}}, endpoints: [{port: http}]}\n"
    for other, is_told in (("a", True), ("b", False)):
        services = [("s.yaml", service % ("x", "a")), ("t.yaml", service % ("y", other))]
        found = lint_texts([*services, ("m.yaml", monitor)], LintOptions()).findings
        assert any("each is scraped as often" in each.message for each in found) == is_told


@pytest.mark.parametrize(("name", "is_told"), [("vllm-b", True), ("vllm-a", False), ("grafana", False)])
def test_a_command_for_an_object_that_no_manifest_makes_is_told(name, is_told):
    texts = [("a.yaml", DEPLOYMENT % 1), ("Makefile", f"stop:\n\tkubectl delete deploy {name} -n x\n")]
    assert ("port-unreachable" in rules(*texts)) == is_told


def test_a_request_of_a_guide_for_a_model_that_no_server_has_is_told():
    serves = f"#!/bin/bash\n{SERVES}\n"
    for model, is_told in (("org/other", True), ("org/m", False)):
        guide = f'Ask vLLM:\n\n    curl http://<ip>/v1/completions -d \'{{"model": "{model}"}}\'\n'
        assert ("model-name" in rules(("a.sh", serves), ("README.md", guide))) == is_told


REMOVED = "vllm serve org/m --swap-space 4 --api-key $KEY\n"


def test_a_flag_that_a_release_named_beside_it_has_is_not_judged_by_the_newest():
    build = ("b.sh", 'TAG=${vLLM_TAG:-"v0.6.0"}\ndocker pull vllm/vllm-openai:$TAG\n')
    assert "flag-removed" in rules(("a.sh", REMOVED))
    assert "flag-removed" not in rules(("a.sh", REMOVED), build)


def test_an_option_that_a_program_declares_is_its_own():
    program = "import vllm\np.add_argument('--num-scheduler-steps', type=int)\np.add_argument('--max-num-seqs')\n"
    call = "#!/bin/sh\n# for vllm\npython3 bench.py --num-scheduler-steps 8 --max-num-seqs 4\n"
    assert {"flag-removed", "not-understood"} <= rules(("a.sh", call))
    assert not {"flag-removed", "not-understood"} & rules(("a.sh", call), ("bench.py", program))


def test_a_service_that_is_only_called_after_vllm_is_no_server():
    for name in ("vllm-memory-calculator", "vllm_logger"):
        text = f"services:\n  {name}:\n    build: .\n    ports: ['8008:8000']\n"
        assert not {"api-open", "start-too-short", "restart-missing"} & rules((f"vllm-tools/{name}.yml", text))
    assert "api-open" in rules(
        ("vllm-tools/compose.yml", "services:\n  vllm:\n    build: .\n    ports: ['8008:8000']\n")
    )


def test_a_simulator_is_no_server_whatever_its_file_is_called():
    text = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: vllm}\nspec:\n  template:\n    spec:\n"
    text += "      containers:\n      - name: sim\n        image: ghcr.io/llm-d/llm-d-inference-sim:v0.8.0\n"
    text += "        args: [--model, meta-llama/Llama-3.1-8B-Instruct, --max-num-seqs, '8']\n        livenessProbe:\n"
    text += "          httpGet: {path: /health}\n        ports: [{containerPort: 8000}]\n"
    assert not {"model-gated", "start-too-short", "not-understood"} & rules(("k8s/vllm.yaml", text))


def test_a_manifest_in_a_script_is_judged_line_by_line():
    text = f"#!/bin/bash\nkubectl apply -f - <<EOF\n{ALB % ''}EOF\n"
    assert "stop-too-short" in rules(("a.sh", text))


def test_an_alert_is_joined_by_the_labels_that_it_keeps():
    rule = "groups:\n- name: a\n  rules:\n  - alert: A\n    expr: max by (pod) (vllm:kv_cache_usage_perc) > 0.9\n"
    found = lint_texts([("a.yml", rule)], LintOptions()).findings
    assert any("and on (pod)" in each.suggestion for each in found)
    assert not any("and on (instance)" in each.suggestion for each in found)


def test_an_autoscaler_that_waits_for_its_own_series_at_zero_is_an_error():
    text = "kind: ScaledObject\nspec:\n  minReplicaCount: %d\n  triggers:\n  - query: vllm:num_requests_running\n"
    found = {each.rule: each.severity for each in lint_texts([("a.yaml", text % 0)], LintOptions()).findings}
    assert found["rollout-stuck"] == "error"
    assert "rollout-stuck" not in rules(("a.yaml", text % 1))
