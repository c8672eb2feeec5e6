"""Mistakes of a deployment around the command line: what is refused, what is not reached, what a container lacks."""

import json
from pathlib import Path

import pytest

from legroom.lint.linter import LintOptions, lint_texts
from legroom.lint.rule import rules_by_id
from legroom.lint.rules import all_checks

IMAGE = "vllm/vllm-openai:v0.20.0"
MODEL = "Qwen/Qwen3-8B"


def found(text, path="deployment.yaml"):
    return {(finding.rule, finding.severity) for finding in lint_texts([(path, text)], LintOptions()).findings}


def deployment(args=f"--model, {MODEL}", more="", gpu="limits: {nvidia.com/gpu: 1}", pod="", image=IMAGE, labels="a"):
    container = f"{{name: v, image: '{image}', args: [{args}], resources: {{{gpu}}}{more}}}"
    return (
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: m}\nspec:\n  strategy: {type: Recreate}\n"
        f"  selector: {{matchLabels: {{app: a}}}}\n  template:\n    metadata: {{labels: {{app: {labels}}}}}\n"
        f"    spec: {{containers: [{container}]{pod}}}\n"
    )


PORTS = ", ports: [{name: http, containerPort: 8000}]"
CACHE = ", volumeMounts: [{name: c, mountPath: /root/.cache}]"
CLAIM = ", volumes: [{name: c, persistentVolumeClaim: {claimName: c}}]"
READY = ", startupProbe: {httpGet: {path: PATH, port: 8000}, periodSeconds: 60, failureThreshold: 60}"


def service(more="", command=f"--model {MODEL}", top="", devices="[{driver: nvidia, count: 1, capabilities: [gpu]}]"):
    reserved = f"deploy: {{resources: {{reservations: {{devices: {devices}}}}}}}, " if devices else ""
    return f"services:\n  llm: {{image: '{IMAGE}', {reserved}command: {command}{more}}}\n{top}"


def secured(port="127.0.0.1:8000:8000", more=""):
    return f", ports: ['{port}'], volumes: ['./cache:/root/.cache/huggingface']{more}"


GATED = "meta-llama/Llama-3.1-8B-Instruct"
TOKEN = ", env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: h, key: t}}}]"
CASES = {
    "a whole deployment": (deployment(more=PORTS + CACHE + READY.replace("PATH", "/health"), pod=CLAIM), set()),
    "a number among the arguments": (deployment(args=f"--model, {MODEL}, --port, 8000"), {"manifest-refused"}),
    "a number as a text": (deployment(args=f"--model, {MODEL}, --port, '8000'"), set()),
    "a number as a variable": (deployment(more=", env: [{name: A, value: 1}]"), {"manifest-refused"}),
    "a selector of other pods": (deployment(labels="b"), {"manifest-refused"}),
    "GPUs without a limit": (deployment(gpu="requests: {nvidia.com/gpu: 1}"), {"manifest-refused"}),
    "a mount of no volume": (deployment(more=CACHE), {"manifest-refused"}),
    "a path that vLLM does not have": (deployment(more=READY.replace("PATH", "/healthz")), {"probe-path"}),
    "a path behind the key": (
        deployment(f"--model, {MODEL}, --api-key, $(KEY)", READY.replace("PATH", "/v1/models")),
        {"probe-path"},
    ),
    "a gated model without a token": (
        deployment(f"--model, {GATED}, --max-model-len, '4096'", PORTS + READY.replace("PATH", "/health")),
        {"model-gated"},
    ),
    "a gated model with a token": (
        deployment(f"--model, {GATED}", PORTS + CACHE + READY.replace("PATH", "/health") + TOKEN, pod=CLAIM),
        set(),
    ),
    "the model without its flag in an image whose entry point is a module": (
        deployment(MODEL, image="vllm/vllm-openai:v0.10.2"),
        {"container-command"},
    ),
    "the same in an image whose entry point is vllm serve": (
        deployment(MODEL, image="vllm/vllm-openai:v0.11.1"),
        set(),
    ),
    "a tool choice without a parser": (deployment(f"--model, {MODEL}, --enable-auto-tool-choice"), {"flag-value"}),
    "adapters without LoRA": (deployment(f"--model, {MODEL}, --lora-modules, a=org/b"), {"flag-value"}),
    "an image of root for another user": (
        deployment(pod=", securityContext: {runAsNonRoot: true}"),
        {"manifest-refused"},
    ),
    "the same with a user": (deployment(pod=", securityContext: {runAsNonRoot: true, runAsUser: 1000}"), set()),
    "a model of a later release": (deployment(f"--model, {MODEL}", image="vllm/vllm-openai:v0.6.6"), {"does-not-fit"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_of_a_manifest_is_named(case):
    text, expected = CASES[case]
    assert {rule for rule, severity in found(text) if severity != "note"} == expected


COMPOSE = {
    "a whole service": (service(secured()), set()),
    "another port": (service(secured("127.0.0.1:9000:9000")), {"port-unreachable"}),
    "a server for itself": (service(secured(), f"--model {MODEL} --host 127.0.0.1"), {"port-unreachable"}),
    "no GPU": (service(secured(), devices=""), set()),  # another file of the folder may reserve it
    "a reservation without capabilities": (service(devices="[{driver: nvidia, count: 1}]"), {"manifest-refused"}),
    "a reservation by number and by name": (
        service(devices="[{capabilities: [gpu], count: 1, device_ids: ['0']}]"),
        {"manifest-refused"},
    ),
    "an unknown volume": (service(", volumes: ['weights:/root/.cache']"), {"manifest-refused"}),
    "a known volume": (service(", volumes: ['weights:/root/.cache']", top="volumes: {weights: }\n"), set()),
    "no key of services": (f"llm: {{image: '{IMAGE}', command: --model {MODEL}}}\n", {"manifest-refused"}),
    "a shell that gets one word": (
        service(", entrypoint: [/bin/bash, -c]", f"vllm serve {MODEL}"),
        {"container-command"},
    ),
    "a shell that gets one text": (service(", entrypoint: [/bin/bash, -c]", f"[vllm serve {MODEL}]"), set()),
    "quotes in a list": (service(""", environment: ['HF_TOKEN="${HF_TOKEN}"']"""), set()),
    "quotes in a mapping": (service(', environment: {HF_HOME: "/cache"}'), set()),
    "an offline Hub without weights": (
        service(", ports: ['127.0.0.1:8000:8000'], environment: {HF_HUB_OFFLINE: '1'}"),
        {"path-missing"},
    ),
}


@pytest.mark.parametrize("case", COMPOSE)
def test_a_mistake_of_a_compose_file_is_named(case):
    text, expected = COMPOSE[case]
    assert {rule for rule, severity in found(text, "compose.yaml") if severity != "note"} == expected


def test_backslashes_in_a_folded_command_become_spaces():
    lines = f"services:\n  llm:\n    image: {IMAGE}\n    command: >\n      {MODEL} \\\n      --port 8000\n"
    assert ("container-command", "error") in found(lines, "compose.yaml")
    assert found(lines.replace(" \\", ""), "compose.yaml") == set()


@pytest.mark.parametrize(("default", "is_empty"), [('""', True), ("", False)])
def test_a_default_of_two_quotes_is_an_empty_argument(default, is_empty):
    text = f"services:\n  llm:\n    image: {IMAGE}\n    command: --model {MODEL} ${{MORE:-{default}}}\n"
    assert (("container-command", "error") in found(text, "compose.yaml")) == is_empty


def test_a_service_without_a_gpu_is_named_where_no_other_file_can_reserve_one(tmp_path):
    path = tmp_path / "compose.yaml"
    path.write_text(service(secured(), devices=""))
    assert ("gpus-too-few", "note") in found(path.read_text(), str(path))
    (tmp_path / "compose.gpu.yaml").write_text("services: {}\n")
    assert ("gpus-too-few", "note") not in found(path.read_text(), str(path))


UNITS = {
    "Type=notify": "error",
    "Type=forking": "error",
    "DevicePolicy=closed": "error",
    "ProtectHome=yes": "note",
    "ProtectSystem=strict": "warning",
    "Type=exec": "",
    "ProtectSystem=full": "",
    "ProtectHome=yes\nEnvironment=VLLM_CACHE_ROOT=/var/cache/vllm": "",
}


@pytest.mark.parametrize("setting", UNITS)
def test_a_unit_in_which_vllm_cannot_start_is_named(setting):
    text = f"[Service]\n{setting}\nTimeoutStartSec=infinity\nExecStart=/usr/bin/vllm serve {MODEL}\n"
    assert {severity for rule, severity in found(text, "a.service") if rule == "unit-sandbox"} == {UNITS[setting]} - {
        ""
    }


@pytest.mark.parametrize("start", ["source /v/bin/activate && vllm", "/usr/bin/vllm"])
def test_a_unit_has_no_shell(start):
    unit = f"[Service]\nExecStart={start} serve {MODEL}\n"
    assert (("unit-sandbox", "error") in found(unit, "a.service")) == ("&&" in start)
    assert ("unit-sandbox", "error") not in found(
        f"[Service]\nExecStart=/bin/bash -c '{start} serve {MODEL}'\n", "a.service"
    )


def test_a_gated_model_in_a_unit_is_noted_unless_a_file_may_hold_the_token():
    unit = f"[Service]\nExecStart=/usr/bin/vllm serve {GATED}\n"
    assert ("model-gated", "note") in found(unit, "a.service")
    assert ("model-gated", "note") not in found(unit + "EnvironmentFile=/etc/vllm.env\n", "a.service")


def test_a_unit_does_not_expand_variables_of_its_environment():
    unit = f"[Service]\nEnvironment=PATH=VALUE:/opt/bin\nExecStart=/usr/bin/vllm serve {MODEL}\n"
    assert ("env-meaning", "warning") in found(unit.replace("VALUE", "$PATH"), "a.service")
    assert found(unit.replace("VALUE", "/usr/bin"), "a.service") == set()


NOTES = {
    "an image that moves": (deployment(more=PORTS, image="vllm/vllm-openai:latest"), "image-moving"),
    "a release with a hole": (deployment(more=PORTS, image="vllm/vllm-openai:v0.10.1"), "release-unsafe"),
    "an update that needs a GPU more": (deployment().replace("{type: Recreate}", "{}"), "rollout-stuck"),
    "code of the Hub": (deployment(f"--model, {MODEL}, --trust-remote-code"), "code-trusted"),
    "a liveness probe alone": (
        deployment(more=READY.replace("PATH", "/health").replace("startup", "liveness")),
        "start-too-short",
    ),
    "a connection as a probe": (deployment(more=", livenessProbe: {tcpSocket: {port: 8000}}"), "probe-missing"),
    "another port than the server's": (deployment(more=PORTS.replace("8000", "9000")), "port-unreachable"),
    "a token that is to be filled in": (deployment(more=", env: [{name: HF_TOKEN, value: <token>}]"), "secret-written"),
    "weights that few cards hold": (deployment("--model, Qwen/Qwen2.5-32B-Instruct, --dtype, float32"), "does-not-fit"),
    "a cache that goes with its pod": (
        deployment(more=PORTS + CACHE, pod=", volumes: [{name: c, emptyDir: {}}]"),
        "cache-lost",
    ),
    "a cache that vLLM does not read": (
        deployment(more=", env: [{name: TRANSFORMERS_CACHE, value: /c}]"),
        "env-meaning",
    ),
}


@pytest.mark.parametrize("case", NOTES)
def test_what_a_reviewer_would_ask_about_is_a_note(case):
    text, rule = NOTES[case]
    assert (rule, "note") in found(text)
    assert not [each for each in found(text) if each[1] == "error"]


def test_weights_that_hardly_any_card_holds_are_a_warning_where_one_gpu_is_asked_for():
    assert ("does-not-fit", "warning") in found(deployment("--model, Qwen/Qwen2.5-72B-Instruct"))


def test_a_service_forwards_to_the_port_of_the_server():
    forwards = "---\napiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {selector: {app: a}, ports: [PORT]}\n"
    for port, is_wrong in (("{port: 80, targetPort: 8080}", True), ("{port: 80, targetPort: http}", False)):
        rules = {rule for rule, _ in found(deployment(more=PORTS) + forwards.replace("PORT", port))}
        assert ("port-unreachable" in rules) == is_wrong


def test_a_server_of_the_host_is_open_where_it_listens_on_all_addresses_without_a_key():
    assert ("api-open", "note") in found(f"vllm serve {MODEL} --host 0.0.0.0", "a.sh")
    assert found(f"vllm serve {MODEL} --host 0.0.0.0 --api-key $KEY", "a.sh") == set()
    assert ("api-open", "note") in found(service(secured("8000:8000")), "compose.yaml")


def test_an_autoscaler_by_the_processor_is_noted():
    metric = "{type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 70}}}"
    scaler = f"---\napiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nspec: {{metrics: [{metric}]}}\n"
    assert ("rollout-stuck", "note") in found(deployment() + scaler)
    assert ("rollout-stuck", "note") not in found(deployment())


def test_a_script_that_names_its_port_vllm_port_is_noted():
    assert ("env-meaning", "note") in found(f"vllm serve {MODEL} --port ${{VLLM_PORT:-8000}}", "a.sh")
    assert found(f"vllm serve {MODEL} --port ${{PORT:-8000}}", "a.sh") == set()


def test_the_health_check_of_a_dockerfile_asks_the_server():
    check = (
        "FROM cuda\nRUN pip install vllm==0.20.0\nHEALTHCHECK --start-period=10m "
        "CMD curl -f http://localhost:8080/health\n"
    )
    assert ("probe-port", "error") in found(check + f"CMD vllm serve {MODEL}\n", "Dockerfile")
    assert found(check + f"CMD vllm serve {MODEL} --port 8080\n", "Dockerfile") == set()


def test_a_file_of_akash_tells_the_card_and_who_reaches_it():
    text = service(", expose: [{port: 8000, to: [{global: true}]}]", "[--model, Qwen/Qwen2.5-32B-Instruct]", devices="")
    card = "{gpu: {units: 1, attributes: {vendor: {nvidia: [{model: rtx4090}]}}}, memory: {size: 32Gi}}"
    text += f"profiles: {{compute: {{c: {{resources: {card}}}}}}}\n"
    text += "deployment: {llm: {west: {profile: c, count: 1}}}\n"
    text = text.replace("command:", "args:")
    assert {("does-not-fit", "error"), ("api-open", "note")} <= found(text, "deploy.yaml")
    own = text.replace("args:", "command: [vllm, serve], params: {storage: {shm: {mount: /dev/shm}}}, args:")
    own = own.replace("--model, Qwen/Qwen2.5-32B-Instruct", f"{MODEL}, --tensor-parallel-size, '2'").replace("1,", "2,")
    assert not {rule for rule, _ in found(own, "deploy.yaml")} & {"container-command", "shm-missing", "does-not-fit"}


def test_values_of_a_chart_have_the_probes_and_the_card_that_stand_beside_the_arguments():
    values = f"image: {{repository: vllm/vllm-openai, tag: v0.20.0}}\nvllm: {{args: [--model, {MODEL}]}}\n"
    probe = "startupProbe: {periodSeconds: 5, failureThreshold: 5}\n"
    assert ("start-too-short", "error") in found(values + probe, "values.yaml")
    task = f"resources: {{accelerators: 'T4:1'}}\nrun: |\n  vllm serve {MODEL}\n"
    assert ("does-not-fit", "error") in found(task, "sky.yaml")


def test_every_rule_has_a_check_and_every_check_a_rule():
    assert {rule for check in all_checks() for rule in check.rules} == set(rules_by_id())


def test_every_table_of_facts_names_its_source():
    folder = Path(__file__).parents[2] / "src/legroom/facts/data"
    for name in (
        "server_image",
        "model_access",
        "flag_companions",
        "variable_meanings",
        "unit_settings",
        "release_holes",
    ):
        assert json.loads((folder / f"{name}.json").read_text("utf-8"))["source"]
