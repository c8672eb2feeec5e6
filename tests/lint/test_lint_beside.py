"""What stands beside a server: other programs, other files, claims, autoscalers, and what only looks like vLLM's."""

import pytest

from legroom.lint.linter import LintOptions, lint_files, lint_texts

IMAGE = "vllm/vllm-openai:v0.20.0"


def found(*texts):
    """(rule, severity, line) of every finding in texts, each with its path."""
    findings = lint_texts(texts, LintOptions()).findings
    return [(each.rule, each.severity, each.place.line) for each in findings]


def rules(*texts):
    return {rule for rule, _, _ in found(*texts)}


def compose(service, name="vllm"):
    return f"services:\n  {name}:\n" + "".join(f"    {line}\n" for line in service.splitlines())


def deployment(name="llm", spec="", pod="", container="", image=IMAGE, args="[--model, org/m]"):
    return f"""apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}}}
spec:
  {spec or "selector: {matchLabels: {app: llm}}"}
  template:
    metadata: {{labels: {{app: llm}}}}
    spec:
      {pod or "restartPolicy: Always"}
      containers:
      - name: vllm
        image: {image}
        args: {args}
        {container or "tty: false"}
"""


# What other programs read


@pytest.mark.parametrize(
    ("command", "is_named"), [("python /app/launcher.py", False), ("vllm serve org/m --port 8000", True)]
)
def test_variables_of_a_program_that_is_not_linted_are_its_own(command, is_named):
    text = compose(f"image: acme/vllm:1\ncommand: {command}\nenvironment:\n  - VLLM_MAX_MODEL_LEN=2048")
    assert ("env-unknown" in rules(("compose.yml", text))) == is_named


@pytest.mark.parametrize(
    ("line", "is_named"), [('"VLLM_MAX_NUM_SEQS=$X"', False), ("export VLLM_MAX_NUM_SEQS=$X", True)]
)
def test_the_words_of_a_renderer_of_templates_are_no_variables(line, is_named):
    text = f"render vllm.template \\\n  a\n{line}\n"
    assert ("env-unknown" in rules(("generate.sh", text))) == is_named


HEALTH = "healthcheck:\n  test: [CMD, curl, -f, '{asked}']\n  retries: 3\n  start_period: 30s"


@pytest.mark.parametrize(
    ("image", "asked", "is_named"),
    [
        ("acme/vllm:1", "http://localhost:8000/health", True),
        ("prom/prometheus:v3", "http://localhost:8000/health", False),
        ("acme/vllm:1\ncommand: ray start --block", "ray status", False),
    ],
)
def test_only_a_check_that_asks_the_server_says_when_it_is_up(image, asked, is_named):
    service = f"image: {image}\ncontainer_name: vllm-{image[:4]}\n{HEALTH.format(asked=asked)}"
    beside = "  other: {image: acme/vllm, command: vllm serve org/m}\n"
    assert ("start-too-short" in rules(("compose.yml", compose(service, "front") + beside))) == is_named


@pytest.mark.parametrize(
    ("asked", "is_named"), [("curl localhost:8000/health", True), ("python -c 'import vllm'", False)]
)
def test_a_check_of_an_image_that_asks_nothing_has_no_start_to_wait_for(asked, is_named):
    text = f"FROM acme/vllm:1\nHEALTHCHECK --start-period=30s CMD {asked}\n"
    assert ("start-too-short" in rules(("Dockerfile", text))) == is_named


@pytest.mark.parametrize("line", ["VLLM_PORT=8080", "TRUST_REMOTE_CODE=true"])
@pytest.mark.parametrize("more", ["", "env_file: .env\n"])
def test_an_env_file_that_only_fills_a_compose_file_reaches_no_server(line, more):
    text = compose(f"image: {IMAGE}\n{more}ports: ['${{PORT}}:8000']")
    named = rules((".env", f"{line}\n# vllm\n"), ("compose.yml", text))
    assert bool({"env-meaning", "code-trusted"} & named) == bool(more)


def test_the_build_of_vllm_for_cpus_reads_variables_of_its_own():
    assert "env-unknown" not in rules(("Dockerfile.cpu", "FROM vllm-cpu:1\nENV VLLM_CPU_DISABLE_AVX512=1\n"))


def test_a_release_that_a_build_may_choose_is_not_judged(tmp_path):
    (tmp_path / "Dockerfile").write_text(
        "FROM cuda\nRUN if [ $T = a ]; then pip install vllm==0.8.5; \\\nelse pip install \\\n"
        'vllm "transformers>=4.35.0"; fi\nCMD ["vllm", "serve", "org/m"]\n'
    )
    (tmp_path / "compose.yml").write_text(compose("build: .\nports: ['8000:8000']"))
    at = [each for each in lint_files([str(tmp_path)], LintOptions()).findings if each.rule == "release-unsafe"]
    assert [each.place.path for each in at if each.place.path.endswith(".yml")] == []


@pytest.mark.parametrize(
    ("line", "is_named"), [("echo 'M=meta-llama/Llama-2-7b-hf $0'", False), ("M=meta-llama/Llama-2-7b-hf", True)]
)
def test_a_line_of_usage_is_not_what_runs(line, is_named):
    assert ("model-gated" in rules(("run.sh", f"#!/bin/sh\n{line}\nvllm serve $M\n"))) == is_named


@pytest.mark.parametrize(("option", "is_named"), [("", False), ("--no-install-recommends ", True)])
def test_pip_of_ubuntu_brings_a_compiler(option, is_named):
    text = f"FROM nvidia/cuda:12.2.0-runtime-ubuntu22.04\nRUN apt-get install {option}python3-pip && pip install vllm\n"
    assert ("command-doubtful" in rules(("Dockerfile", text))) == is_named


def test_a_refused_flag_has_no_cost():
    assert rules(("a.yaml", deployment(args="[--model, org/m, --disable-log-stats=false]"))) >= {"flag-value"}
    assert "flag-costly" not in rules(("a.yaml", deployment(args="[--model, org/m, --disable-log-stats=false]")))


def test_the_lines_of_a_quoted_command_are_understood():
    text = compose('image: acme/vllm:1\ncommand: >\n  sh -c "true && vllm serve org/m\n  --max-model-len 4096"')
    assert "not-understood" not in rules(("compose.yml", text))


def test_the_organization_openai_is_no_prefix_of_litellm():
    text = compose(
        f"image: {IMAGE}\ncommand: --model openai/gpt-oss-20b\n{HEALTH.format(asked='http://localhost:8000/health')}"
    )
    assert "model-name" not in rules(("compose.yml", text))


# What Kubernetes refuses or does not find


def test_a_deployment_without_a_selector_is_refused_and_a_patch_is_none():
    bare = deployment(spec="replicas: 1")
    assert ("manifest-refused", "error", 7) in found(("a.yaml", bare))
    assert "manifest-refused" not in rules(("overlays/a.yaml", bare))
    assert "manifest-refused" not in rules(("a.yaml", bare), ("kustomization.yaml", "resources:\n- a.yaml\n"))


def test_a_whole_manifest_needs_no_ports_to_be_judged():
    assert {"probe-missing", "gpus-too-few", "model-missing"} <= rules(("a.yaml", deployment(args="[]")))


def test_a_refused_pod_is_named_whatever_its_image_is_called():
    pod = "volumes: [{name: a, emptyDir: {}}, {name: a, emptyDir: {}}]"
    assert ("manifest-refused", "error", 9) in found(("a.yaml", deployment(pod=pod, image="PLACEHOLDER")))


SCALER = (
    "apiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata: {{name: vllm}}\n"
    "spec:\n  scaleTargetRef:\n    kind: Deployment\n    name: {}\n"
)


@pytest.mark.parametrize(("target", "name", "is_named"), [("llm", "llm", False), ("vllm", "llm", True)])
def test_an_autoscaler_names_a_workload_that_is_there(target, name, is_named):
    texts = ("hpa.yaml", SCALER.format(target)), ("a.yaml", deployment(name))
    assert (("port-unreachable", "note", 7) in found(*texts)) == is_named


@pytest.mark.parametrize(("name", "is_named"), [("{{ .Release.Name }}-llm", True), ("{{ .Release.Name }}", False)])
def test_a_name_of_a_template_is_compared_as_far_as_it_is_known(name, is_named):
    template = "{{ if .Values.x }}\n{{ end }}\n" + deployment(f"'{name}'")
    texts = ("templates/hpa.yaml", SCALER.format("vllm")), ("templates/a.yaml", template)
    assert (("port-unreachable", "note", 7) in found(*texts)) == is_named


def test_the_port_of_an_ingress_is_one_of_its_service():
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: llm}\nspec: {ports: [{name: api, port: 80}]}\n"
    ingress = "apiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {name: vllm}\nspec:\n  rules:\n  - http:\n"
    ingress += (
        "      paths:\n      - backend:\n          service:\n            name: llm\n            port: {name: http}\n"
    )
    assert ("port-unreachable", "note", 11) in found(("a.yaml", deployment()), ("s.yaml", service), ("i.yaml", ingress))


ANNOTATED = "kind: Deployment\nmetadata:\n  name: llm\n  annotations:\n    prometheus.io/scrape: 'true'\n"


@pytest.mark.parametrize(
    ("more", "is_named"), [("", True), ("      annotations:\n        prometheus.io/scrape: 'true'\n", False)]
)
def test_annotations_of_an_owner_are_not_scraped(more, is_named):
    text = deployment().replace("kind: Deployment\nmetadata: {name: llm}\n", ANNOTATED) + more
    assert (("command-doubtful", "warning", 6) in found(("a.yaml", text))) == is_named


CLAIM = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: w}\nspec:\n  accessModes: [ReadWriteOnce]\n"
MOUNTED = "volumes: [{name: w, persistentVolumeClaim: {claimName: w\n        }}]"


def test_a_claim_of_one_node_is_not_for_several_workloads():
    one, two = (("a.yaml", deployment("a", pod=MOUNTED)), ("b.yaml", deployment("b", pod=MOUNTED)))
    assert ("rollout-stuck", "note", 5) in found(("pvc.yaml", CLAIM), one, two)
    assert ("rollout-stuck", "note", 5) not in found(("pvc.yaml", CLAIM), one)


def test_the_claims_of_the_production_stack_are_judged():
    spec = "servingEngineSpec:\n  modelSpec:\n  - name: m\n    repository: vllm/vllm-openai\n    tag: v0.20.0\n"
    spec += "    modelURL: Qwen/Qwen3-32B\n    requestGPU: 1\n    replicaCount: 2\n    pvcStorage: 50Gi\n"
    spec += "    pvcAccessMode: [ReadWriteOnce]\n"
    assert {("path-missing", "warning", 9), ("rollout-stuck", "note", 10)} <= {*found(("values-a.yaml", spec))}


# What does not start


@pytest.mark.parametrize(("tag", "is_named"), [("latest", True), ("v0.20.0", True), ("v0.17.1", False)])
def test_vllms_image_has_no_ray_any_more(tag, is_named):
    text = f"docker run --gpus all vllm/vllm-openai:{tag} -c 'x'\nray start --head\n"
    assert (("container-command", "warning", 2) in found(("head.sh", text))) == is_named
    assert "container-command" not in rules(("head.sh", f"pip install ray\n{text}"))


def test_a_switch_takes_no_value_whatever_the_variable_holds():
    args = '[--model, org/m, "--enable-lora=$(LORA)"]'
    image = "vllm/vllm-openai:v0.6.3"
    assert ("flag-value", "error") in {each[:2] for each in found(("a.yaml", deployment(args=args, image=image)))}
    assert "flag-value" not in rules(("a.py", 'from vllm import LLM\nLLM("m", enable_lora=args.lora)\n'))


def test_python_is_named_beside_variables_that_no_shell_expands():
    container = "command: [python, -m, vllm.entrypoints.openai.api_server]"
    assert ("container-command", "error") in {each[:2] for each in found(("a.yaml", deployment(container=container)))}


def test_a_liveness_probe_that_kills_most_first_starts_is_a_warning():
    probe = "ports: [{{containerPort: 8000}}]\n        livenessProbe:\n"
    probe += "          {{httpGet: {{path: /health, port: 8000}}, initialDelaySeconds: {}}}"
    severities = [
        [
            each[1]
            for each in found(("a.yaml", deployment(container=probe.format(delay))))
            if each[0] == "start-too-short"
        ]
        for delay in (60, 200)
    ]
    assert severities == [["warning"], ["note"]]


LINES = [
    ("compose.yml", f"version: '3.8'\nservices:\n  a:\n    image: {IMAGE}\n", "command-doubtful", 1),
    ("compose.yml", f"services:\n  a:\n    image: {IMAGE}\n    command: --model org/m\n", "flag-value", 4),
    ("compose.yml", "services:\n  ui:\n    environment:\n      - WEBUI_AUTH=False # vllm\n", "api-open", 4),
    ("a.yaml", "kind: Ingress # vllm\n    kubernetes.io/ingress.class: nginx\n", "command-doubtful", 2),
    ("a.yaml", "kind: ScaledObject # vllm\n      metricName: x\n", "command-doubtful", 2),
    ("a.yaml", f"kind: Pod\nimage: {IMAGE}\n- name: OTEL_EXPORTER_OTLP_ENDPOINT\n", "env-meaning", 3),
    ("a.yaml", "kind: ConfigMap # vllm\n  if ($request_body ~ 'm') { }\n", "command-doubtful", 2),
    (".env", "VLLM_MODEL=some-org/reasoning-model\n", "path-missing", 1),
    ("pod.yaml", f"kind: Pod\nimage: {IMAGE}\nlivenessProbe:\n  httpGet: {{path: /health}}\n", "probe-missing", 3),
    ("pod.yaml", f"image: {IMAGE}\nlimits:\n  memory: 4Gi\n  nvidia.com/gpu: 1\n", "host-memory", 3),
    ("pod.yaml", "- name: dshm # vllm\n  emptyDir:\n    medium: Memory\n", "shm-missing", 3),
    ("job.sh", "#!/bin/sh\n#SBATCH --nodes=$1\nvllm serve org/m\n", "command-doubtful", 2),
    ("job.sh", "srun start.py ~/images/vllm_latest.sif --port 80\n", "image-moving", 1),
    ("Dockerfile", "FROM vllm/vllm-openai:v0.20.0\nRUN pip install nixl\n", "image-moving", 2),
    ("d.yaml", f"apiVersion: apps/v1\nkind: Deployment\nlabels:\n  a: b\nimage: {IMAGE}\n", "manifest-refused", 3),
    ("isvc.yaml", "kind: InferenceService # vllm\nspec:\n  predictor:\n    model:\n", "manifest-refused", 4),
    (
        "isvc.yaml",
        "kind: InferenceService # vllm\nspec:\n  predictor:\n    model:\n      modelFormat: {name: vLLM}\n"
        "      nodeSelector: {a: b}\n",
        "manifest-refused",
        6,
    ),
    ("runtime.yaml", "image: vllm\nformats:\n- name: pytorch\n  autoSelect: true\n", "command-doubtful", 3),
    ("run.sh", "export VLLM_LOGGING_LEVEL=DEBUG\nvllm serve org/m\n", "env-meaning", 1),
    ("run.sh", "export VLLM_ENABLE_V1_MULTIPROCESSING=0\nvllm serve org/m\n", "env-meaning", 1),
]


@pytest.mark.parametrize(("delay", "severity"), [(15, "warning"), (240, "note")])
def test_a_liveness_probe_in_values_that_kills_a_start_is_a_warning(delay, severity):
    text = "image:\n  repository: vllm/vllm-openai\nlivenessProbe:\n  # delay\n"
    text += f"  initialDelaySeconds: {delay}\n  failureThreshold: 3\n  periodSeconds: 10\n"
    assert ("start-too-short", severity, 3) in found(("values.yaml", text))


def test_a_server_that_sends_traces_is_given_their_collector():
    text = f"kind: Pod\nimage: {IMAGE}\n- name: OTEL_EXPORTER_OTLP_ENDPOINT\n- --otlp-traces-endpoint=http://c:4317\n"
    assert "env-meaning" not in rules(("a.yaml", text))


@pytest.mark.parametrize(("path", "text", "rule", "line"), LINES)
def test_a_line_beside_a_server_is_named(path, text, rule, line):
    assert (rule, line) in {(each[0], each[2]) for each in found((path, text))}


def test_a_tag_without_its_v_does_not_exist():
    chart = ("vllm/Chart.yaml", "name: vllm\nappVersion: 0.6.3\n")
    template = (
        "vllm/templates/a.yaml",
        'image: "{{ .Values.image.name }}:{{ .Values.image.tag | default .Chart.AppVersion }}"\n',
    )
    values = ("vllm/values.yaml", "image:\n  name: vllm/vllm-openai\n  tag: ''\n")
    assert ("container-command", "warning", 2) in found(chart, template, values)


@pytest.mark.parametrize(
    ("runs", "found"), [("python web.py", []), ("vllm serve m/m --port 9000", ["port-unreachable"])]
)
def test_the_dockerfile_of_a_service_tells_what_its_image_runs(tmp_path, runs, found):
    (tmp_path / "Dockerfile").write_text(f"FROM acme/base:1\nCMD {runs}\n")
    service = "services:\n  a: {build: ., image: 'acme/asks-vllm:1', ports: ['80:8000']}\n"
    (tmp_path / "compose.yml").write_text(service)
    findings = lint_files([str(tmp_path / "compose.yml")], LintOptions()).findings
    assert [each.rule for each in findings if each.rule != "api-open"] == found


def test_a_program_of_its_own_may_listen_on_any_port():
    health = "HEALTHCHECK --start-period=10m CMD curl http://localhost:8080/health\n"
    text = f"FROM vllm/vllm-openai:v0.32.0\nENV A=1\n{health}ENTRYPOINT %s\n"
    found = [rules(("Dockerfile", text % entry)) for entry in ('["/start.sh"]', '["vllm", "serve", "m/m"]')]
    assert ["probe-port" in each for each in found] == [False, True]


def test_a_batch_job_of_a_folder_is_linted_by_its_suffix(tmp_path):
    (tmp_path / "serve.job").write_text("#!/bin/sh\n#SBATCH --gres=gpu:4\nvllm serve m/m\n")
    assert "gpus-idle" in {each.rule for each in lint_files([str(tmp_path)], LintOptions()).findings}


@pytest.mark.parametrize(("release", "is_advised"), [("v0.7.0", False), ("v0.20.0", True)])
def test_a_parser_is_advised_where_the_release_has_one(release, is_advised):
    command = f"docker run --gpus all vllm/vllm-openai:{release} --model deepseek-ai/DeepSeek-R1-Distill-Qwen-7B\n"
    findings = lint_texts([("run.sh", command)], LintOptions()).findings
    assert any("thinks first" in each.message for each in findings) == is_advised
