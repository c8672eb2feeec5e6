"""What files that nobody had seen before showed: mistakes in scripts, units, runtimes and Services, and what is right
there although it looks like one."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts

IMAGE = "vllm/vllm-openai:v0.20.0"


def found(*texts):
    """(rule, severity, line) of every finding in texts, each with its path."""
    findings = lint_texts(texts, LintOptions()).findings
    return [(each.rule, each.severity, each.place.line) for each in findings]


def rules(*texts):
    return {rule for rule, _, _ in found(*texts)}


def deployment(spec="selector: {matchLabels: {app: llm}}", meta="metadata: {labels: {app: llm}}", resources="{}"):
    return f"""apiVersion: apps/v1
kind: Deployment
metadata: {{name: llm, labels: {{app: llm}}}}
spec:
  {spec}
  template:
    {meta}
    spec:
      containers:
      - name: vllm
        image: {IMAGE}
        args: [--model, org/m]
        resources: {resources}
"""


PROGRAM = "[program:llm]\ncommand=/opt/vllm/bin/vllm serve org/m\n%sautorestart=true\n[program:web]\ncommand=web\n"
UNIT = (
    "[Unit]\n%s[Service]\nUser=%s\n%sExecStart=/opt/vllm/bin/vllm serve org/m\n[Install]\nWantedBy=multi-user.target\n"
)
RUNTIME = f"kind: ServingRuntime\nspec:\n  containers:\n  - image: {IMAGE}\n    args: [--port=8080]\n%s"
LIMITS = f"kind: Pod\nspec:\n  containers:\n  - image: {IMAGE}\n    resources:\n      limits:\n        cpu: 4\n%s"
LIMITS += "        nvidia.com/gpu: 1\n      requests:\n        memory: 8Gi\n"
VOLUME = f"services:\n  llm:\n    image: {IMAGE}\n    volumes:\n    - ${{HUB_CACHE}}:/root/.cache/huggingface\n"
ALL_GPUS = (
    f"services:\n  llm:\n    image: {IMAGE}\n    command: --model org/m --tensor-parallel-size %s\n    count: all\n"
)
PROMETHEUS = "kind: Deployment\nmetadata: {name: of-vllm}\nspec:\n  containers:\n  - image: prom/prometheus:v3.1.0\n%s"
VENV = (
    '#!/bin/bash\napt-get install -y --no-install-recommends python3-venv%s\n"${ENV}/bin/pip" install "vllm==0.20.0"\n'
)

LINES = [
    ("run.sh", "export MODEL%s=%sorg/m\nvllm serve $MODEL\n", (" ", " "), ("", ""), "command-doubtful", 1),
    ("run.sh", 'vllm serve org/m &\necho "key: %s"\n', "${VLLM_API_KEY}", "${VLLM_API_KEY:+set}", "secret-written", 2),
    ("run.sh", "vllm serve org/m\necho $HF_TOKEN%s\n", "", " | hf auth login", "secret-written", 2),
    ("supervisord.conf", PROGRAM, "", "stopwaitsecs=120\n", "stop-too-short", 1),
    ("a.service", UNIT, ("", "root", ""), ("", "llm", ""), "rights-wide", 3),
    (
        "a.service",
        UNIT,
        ("", "llm", "StartLimitIntervalSec=60\n"),
        ("After=network-online.target\nStartLimitIntervalSec=60\n", "llm", ""),
        "command-doubtful",
        4,
    ),
    (
        "run.sh",
        "vllm serve org/m &\nsleep 10\ncurl %s http://localhost:8000/v1/models\n",
        "",
        "--retry 90",
        "command-doubtful",
        2,
    ),
    ("runtime.yaml", RUNTIME, "", "    readinessProbe: {httpGet: {path: /health, port: 8080}}\n", "probe-missing", 1),
    ("pod.yaml", LIMITS, "", "        memory: 16Gi\n", "host-memory", 6),
    ("ask.sh", "docker start vllm\ncurl localhost:8000/%s\n", "v2/models/m/infer", "v1/completions", "probe-path", 2),
    (
        "run.sh",
        "MY_QUANTIZATION=%s\nvllm serve org/m --quantization $MY_QUANTIZATION\n",
        "q4_k_m",
        "awq",
        "flag-value",
        1,
    ),
    ("compose.yml", VOLUME + "# %s\n", "", "legroom: ignore-file path-missing", "path-missing", 5),
    ("compose.yml", ALL_GPUS, "${TP:-1}", "${TP:-2}", "gpus-idle", 5),
    ("compose.yml", ALL_GPUS + "# %s\n", ("1", ""), ("1", ""), "gpus-idle", 5),
    ("vllm.yaml", PROMETHEUS, "", "  volumes: [{persistentVolumeClaim: {claimName: a}}]\n", "cache-lost", 5),
    ("setup.sh", VENV, "", " gcc python3-dev", "command-doubtful", 3),
    (
        "run.sh",
        "export LITELLM_MASTER_KEY=${KEY:-%s}\nvllm serve org/m\n",
        "our-key-of-2026",
        "none",
        "secret-written",
        1,
    ),
    ("run.sh", "vllm serve org/m --api-key %s\n", "test_api_key", "$KEY", "api-open", 1),
]
"""(path, text, what makes the mistake, what does not, rule, line)."""


@pytest.mark.parametrize(("path", "text", "wrong", "right", "rule", "line"), LINES)
def test_a_line_is_named_where_it_is_a_mistake(path, text, wrong, right, rule, line):
    assert (rule, line) in {(each[0], each[2]) for each in found((path, text % wrong))}
    if wrong != right:
        assert (rule, line) not in {(each[0], each[2]) for each in found((path, text % right))}


def test_a_machine_of_one_gpu_holds_none_idle():
    assert "gpus-idle" not in rules(("compose.yml", ALL_GPUS % 1 + "    hostname: dgx-spark\n"))


@pytest.mark.parametrize(("name", "is_made"), [("llm", True), ("other", False)])
def test_kserve_makes_the_deployment_of_an_inference_service(name, is_made):
    service = f"apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata: {{name: {name}}}\n"
    service += (
        f"spec: {{predictor: {{containers: [{{name: kserve-container, image: '{IMAGE}', args: [--model=org/m]}}]}}}}\n"
    )
    scaler = "apiVersion: keda.sh/v1alpha1\nkind: ScaledObject\nmetadata: {name: s}\n# of vllm\n"
    scaler += "spec: {scaleTargetRef: {name: llm-predictor}}\n"
    assert ("port-unreachable" not in rules(("a.yaml", service), ("b.yaml", scaler))) == is_made


def test_a_part_of_a_deployment_without_labels_may_be_a_patch():
    whole, part = deployment(spec="replicas: 1"), deployment(spec="replicas: 1", meta="# patched")
    severities = [
        [each[1] for each in found(("a.yaml", text)) if each[0] == "manifest-refused"] for text in (whole, part)
    ]
    assert severities == [["error"], ["note"]]


@pytest.mark.parametrize(("gpus", "is_named"), [(2, True), (1, False)])
def test_ranks_of_other_nodes_do_not_share_the_memory_of_this_one(gpus, is_named):
    text = deployment(resources=f"{{limits: {{nvidia.com/gpu: {gpus}}}}}")
    flags = "[--model, org/m, --tensor-parallel-size=2, --distributed-executor-backend=ray]"
    severities = {each[:2] for each in found(("a.yaml", text.replace("[--model, org/m]", flags)))}
    assert (("shm-missing", "warning") in severities) == is_named


SERVICE = """---
apiVersion: v1
kind: Service
metadata: {name: llm, labels: {app: llm}, annotations: {prometheus.io/port: "%s"}}
spec:
  selector: {app: llm}
  ports:
  - {name: api, port: 80, targetPort: %s}
  - {name: more, port: 81, targetPort: %s}
"""


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        (("8000", 8000, 8000), []),
        (("9100", 8000, 8000), [("note", 17)]),
        (("8000", 8000, 8080), [("note", 22)]),
        (("8000", 9000, 9000), [("warning", 21), ("warning", 22)]),
    ],
)
def test_each_port_of_a_service_has_to_be_the_one_that_its_only_server_listens_on(ports, expected):
    findings = found(("a.yaml", deployment() + SERVICE % ports))
    assert [(severity, line) for rule, severity, line in findings if rule == "port-unreachable"] == expected


def test_a_variable_whose_absence_is_told_needs_no_value():
    text = f"services:\n  llm:\n    image: {IMAGE}\n    command: --model org/m %s\n"
    assert "env-meaning" in rules(("compose.yml", text % "--seed ${SEED}"))
    assert "env-meaning" not in rules(("compose.yml", text % "${SEED:+--seed ${SEED}}"))


def test_an_option_of_a_program_that_asks_the_server_is_its_own():
    call = "#!/bin/sh\n# for vllm\npython3 %s.py --label a --num-scheduler-steps 8\n"
    assert "flag-removed" in rules(("a.sh", call % "start"))
    assert "flag-removed" not in rules(("a.sh", call % "tests/test_speed"))


def test_deeper_lines_of_a_folded_text_are_read_at_their_own_place():
    args = (
        "command: [bash, -c]\n        args:\n        - >\n          ulimit -n 65536 &&\n          vllm serve org/m \\\n"
    )
    text = deployment().replace(
        "args: [--model, org/m]", f"{args}            --max-model-len 2048 \\\n            --nope\n"
    )
    assert {each for each in found(("a.yaml", text)) if each[0] == "flag-unknown"} == {("flag-unknown", "error", 18)}
    assert "not-understood" not in rules(("a.yaml", text))


@pytest.mark.parametrize("kept", ["ID=$(%s)", 'local ID="$(%s)"', "%s", "export ID=$(sudo %s) || exit 1"])
def test_a_container_whose_id_is_kept_is_read_as_any_other(kept):
    run = f"docker run -d \\\n  --gpus all -p 80:9000 {IMAGE} \\\n  --model org/m --nope"
    told = found(("run.sh", f"#!/bin/bash\n{kept % run}\necho $ID\n"))
    assert ("flag-unknown", "error", 4) in told and ("port-unreachable", "warning", 3) in told


def test_a_variable_of_flags_is_no_model():
    text = f"services:\n  llm:\n    image: {IMAGE}\n    command: %s\n    ports: ['80:9000']\n"
    assert "port-unreachable" in rules(("compose.yml", text % "${MODEL}"))
    assert "port-unreachable" not in rules(("compose.yml", text % "${VLLM_CMD_ARGS}"))


def test_a_share_that_only_a_variable_tells_is_not_counted():
    other = f"{{image: '{IMAGE}', command: --model org/m --gpu-memory-utilization 0.3, deploy: %s}}"
    device = "{resources: {reservations: {devices: [{count: 1, capabilities: [gpu]}]}}}"
    text = f"services:\n  a: {{image: '{IMAGE}', command: '%s', deploy: {device}}}\n  b: {other % device}\n"
    assert "does-not-fit" in rules(("compose.yml", text % "--model org/m"))
    assert "does-not-fit" not in rules(("compose.yml", text % "${ALL_ARGS}"))


@pytest.mark.parametrize(("key", "is_named"), [("servers", True), ("speed_test_configs", False)])
def test_shares_of_runs_that_follow_each_other_are_not_added(key, is_named):
    text = f"{key}:\n  - vllm: 1\n    gpu_memory_utilization: 0.5\n  - vllm: 2\n    gpu_memory_utilization: 0.6\n"
    assert ("does-not-fit" in rules(("vllm.yaml", text))) == is_named


def test_more_flags_of_a_mapping_are_flags_and_their_key_is_none():
    text = "model: {path: org/m}\nvllm:\n  max_model_len: 2048\n  dtype: auto\n  extra_args: [%s, '1']\n"
    assert ["flag-unknown" in rules(("a.yaml", text % flag)) for flag in ("--seed", "--sede")] == [False, True]
