"""What another file, a template, an image's entry point or a platform decides: lint does not judge it."""

import pytest

from legroom.lint.linter import LintOptions, lint_files, lint_texts


def found(*texts):
    """(rule, severity) of every finding in texts, each with its path."""
    return [(finding.rule, finding.severity) for finding in lint_texts(texts, LintOptions()).findings]


def judged(*texts):
    """The rules of the errors and warnings."""
    return [rule for rule, severity in found(*texts) if severity != "note"]


def deployment(image="vllm/vllm-openai:v0.20.0", container="", pod="", args="[--model, org/m]"):
    return f"""apiVersion: apps/v1
kind: Deployment
metadata: {{name: llm}}
spec:
  selector: {{matchLabels: {{app: llm}}}}
  template:
    metadata: {{labels: {{app: llm}}}}
    spec:
      {pod or "restartPolicy: Always"}
      containers:
      - name: server
        image: {image}
        args: {args}
        ports: [{{containerPort: 9000}}]
        resources: {{limits: {{nvidia.com/gpu: 1}}}}
        {container}
"""


PROBED = "readinessProbe: {httpGet: {path: /health, port: 9000}}"


@pytest.mark.parametrize(
    ("image", "container", "args", "rules"),
    [
        ("vllm/vllm-openai:v0.20.0", PROBED, "[--model, org/m]", ["probe-port"]),
        ("acme/vllm:3", PROBED, "[--model, org/m]", ["probe-port"]),
        ("acme/vllm:3", f"env: [{{name: PORT, value: '9000'}}]\n        {PROBED}", "[--model, org/m]", []),
        ("acme/vllm:3", f"env: [{{name: MODEL, value: org/m}}]\n        {PROBED}", "[]", []),
    ],
)
def test_the_port_of_an_image_with_its_own_entry_point_is_not_known(image, container, args, rules):
    assert judged(("a.yaml", deployment(image, container, args=args))) == rules


ROUTE = "apiVersion: route.openshift.io/v1\nkind: Route\nmetadata: {name: llm}\n"


@pytest.mark.parametrize(("beside", "rules"), [("kind: ConfigMap\n", ["manifest-refused"]), (ROUTE, [])])
def test_openshift_gives_a_pod_its_user(beside, rules):
    pod = deployment(pod="securityContext: {runAsNonRoot: true}")
    assert judged(("a.yaml", pod), ("b.yaml", beside)) == rules


SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: vllm}\nspec: {selector: {app: llm}, ports: [{port: 8000}]}\n"


@pytest.mark.parametrize(
    ("container", "pod", "rules"),
    [
        ("tty: true", "", ["service-named-vllm"]),
        ("env:\n        - name: VLLM_PORT\n          value: '0'", "", []),
        ("tty: true", "enableServiceLinks: false", []),
    ],
)
def test_a_service_called_vllm_does_no_harm_to_pods_that_do_not_take_its_port(container, pod, rules):
    assert judged(("pod.yaml", deployment(container=container, pod=pod)), ("service.yaml", SERVICE)) == rules


def test_the_runtime_of_kserve_brings_the_shared_memory_of_its_ranks():
    model = "{modelFormat: {name: vllm}, runtime: own, args: [--model=org/m, --tensor-parallel-size=2]}"
    service = "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nmetadata: {name: a}\n"
    assert judged(("a.yaml", f"{service}spec: {{predictor: {{model: {model}}}}}\n")) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "a.service",
            "[Service]\nExecStart=/opt/vllm serve m --enable-prefix-caching{% if k is defined %} --x 1{% endif %}\n",
        ),
        ("a.sh", "vllm serve org/m \\\n  --max-model-len 4096{% if ranks > 1 %} --tensor-parallel-size 2{% endif %}\n"),
    ],
)
def test_a_statement_of_jinja_is_no_part_of_the_flag_before_it(path, text):
    assert all("{%" not in finding.message for finding in lint_texts([(path, text)], LintOptions()).findings)


CHART = {"Chart.yaml": "name: llm\nversion: 1.0.0\n", "values.yaml": "image: vllm/vllm-openai:v0.20.0\n"}


@pytest.mark.parametrize(
    ("container", "rules"),
    [
        ('args:\n          {{- include "of.another.chart" . | nindent 10 }}', []),
        ("args: [--model, org/m]\n        livenessProbe:\n          {{- toYaml .Values.probe | nindent 10 }}", []),
        (
            "args: [--model, org/m]\n        lifecycle:\n          {{- if .Capabilities.A }}\n          preStop: {}\n"
            "          {{- else }}\n          preStop: {}\n          {{- end }}",
            [],
        ),
    ],
)
def test_what_a_template_leaves_open_is_not_judged(tmp_path, container, rules):
    pod = deployment("{{ .Values.image }}", args="[]").replace("args: []", container)
    for name, text in {**CHART, "templates/deployment.yaml": pod}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    findings = lint_files([str(tmp_path)], LintOptions()).findings
    assert [finding.rule for finding in findings if finding.severity != "note"] == rules


@pytest.mark.parametrize("image", ["kserve/vllmserver:v0.12.1", "ghcr.io/kserve/vllm:v0.15.0"])
def test_the_number_of_another_product_is_no_release_of_vllm(image):
    assert judged(("a.yaml", deployment(image, args="[--model, org/m, --swap-space, '4']"))) == []


def test_a_command_that_is_filled_in_later_is_not_judged():
    values = deployment(args="[__MODEL_AND_FLAGS__]").replace("nvidia.com/gpu: 1", "cpu: 1")
    assert judged(("a.yaml", values)) == []


@pytest.mark.parametrize(
    ("flags", "is_too_short", "part"), [("", True, "capturing graphs"), (", --enforce-eager", False, "profiling")]
)
def test_an_eager_start_compiles_and_captures_nothing(flags, is_too_short, part):
    probe = "startupProbe: {httpGet: {path: /health, port: 8000}, periodSeconds: 10, failureThreshold: 22}"
    text = deployment(container=probe, args=f"[--model, /models/Qwen3-14B{flags}]")
    findings = [
        each for each in lint_texts([("a.yaml", text)], LintOptions()).findings if each.rule == "start-too-short"
    ]
    assert bool(findings) is is_too_short
    assert all(part in each.message and "the limit is" not in each.message for each in findings)


LINES = [
    ("Dockerfile", "FROM vllm/vllm-openai:nightly\nRUN echo\n", "image-moving"),
    ("Dockerfile", "FROM vllm/vllm-openai:v0.20.0\nRUN echo\n", ""),
    (".env", "SERVER_IMAGE=vllm/vllm-openai:latest\n", "image-moving"),
    ("a.sh", 'IMAGE="${IMAGE:-vllm/vllm-openai:latest}"\n', "image-moving"),
    ("a.py", 'image = base.pip_install(\n    "vllm",\n    pre=True,\n)\n', "image-moving"),
    ("a.py", 'image = base.pip_install("vllm==0.20.0")\n', ""),
    ("a.yml", "- name: install\n  pip:\n    name: vllm\n    state: present\n", "image-moving"),
    ("a.yml", "- name: install\n  pip:\n    name: vllm\n    version: 0.20.0\n", ""),
    ("a.sh", 'pip install -U "vllm" --extra-index-url https://wheels.example\n', "image-moving"),
    ("a.sh", 'OPTIONS=("start" "--head" "--dashboard-host" "0.0.0.0")  # vllm\n', "command-doubtful"),
    ("a.sh", "ray start --head \\\n  --dashboard-host=0.0.0.0\n", "command-doubtful"),
    ("a.sh", "ray start --head --dashboard-host=127.0.0.1\n", ""),
    ("Dockerfile", f"# vllm hf_{'aBcDeFgHiJ' * 3}abcd\nFROM scratch\n", "secret-written"),
    ("Dockerfile", f"# vllm hf_{'x' * 34}\nFROM scratch\n", ""),
    ("Dockerfile", "FROM acme/vllm:1\nCOPY .env /app/.env\n", "secret-written"),
    ("a.sh", "export VLLM_PORT=8000\n", "env-meaning"),
    ("values.yaml", "vllm:\n  storageUri: hf://org/m\n", "cache-lost"),
    ("compose.yml", "services: {a: {image: vllm/vllm-openai-rocm:v0.20.0}}\n", ""),
    ("compose.yml", "services:\n  a:\n    image: rocm/vllm:1\n    devices: [/dev/kfd]\n", ""),
]


@pytest.mark.parametrize(("path", "text", "rule"), LINES)
def test_a_line_that_is_a_mistake_wherever_it_stands_is_a_note(path, text, rule):
    rules = [each for each, severity in found((path, text)) if severity == "note"]
    assert (rule in rules) if rule else not {"image-moving", "secret-written", "gpus-too-few"} & {*rules}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("fp4", [("flag-value", "error")]),
        ("nvfp4", [("flag-value", "note")]),  # 0.8 alone
        ("fp8", []),
        ("bitsandbytes", []),  # a plugin brings it
        ("$METHOD", []),
    ],
)
def test_a_quantization_method_that_no_release_has_needs_no_release_to_be_wrong(method, expected):
    text = f"vllm serve org/m --host 127.0.0.1 --quantization {method}\n"
    assert [each for each in found(("a.sh", text)) if each[0] == "flag-value"] == expected


def test_a_value_that_a_template_fills_in_is_a_value(tmp_path):
    file = tmp_path / "pod.yaml.j2"
    file.write_text(
        deployment(args="\n        - --model\n        - {{ model }}\n        - --dtype\n        - {{ dtype }}")
    )
    assert "flag-value" not in [each.rule for each in lint_files([str(file)], LintOptions()).findings]
