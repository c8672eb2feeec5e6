"""Files that name another file's server: its address, its model's name, its card, the volume of its weights."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts


def found(*texts, rule):
    findings = lint_texts(list(texts), LintOptions()).findings
    return [(each.place.path, each.severity) for each in findings if each.rule == rule]


COMPOSE = (
    "compose.yaml",
    "services:\n  llm:\n    image: vllm/vllm-openai:v0.20.0\n    container_name: brain\n"
    "    ports: ['127.0.0.1:8001:8000']\n    command: --model Qwen/Qwen3-8B --served-model-name qwen\n",
)


@pytest.mark.parametrize(
    ("address", "severities"),
    [("http://llm:8000/v1", []), ("http://llm:8001/v1", ["warning"]), ("http://brain:8001", ["warning"])],
)
def test_inside_a_network_a_service_listens_on_the_port_of_its_server(address, severities):
    client = ("litellm.yaml", f"model_list:\n- litellm_params:\n    api_base: {address}\n")
    assert [severity for _, severity in found(COMPOSE, client, rule="port-unreachable")] == severities


def test_a_target_of_prometheus_is_an_address_too_and_a_missing_service_is_a_note():
    def scrape(target):
        return "prometheus.yml", f"scrape_configs:\n- job_name: vllm\n  static_configs:\n  - targets: ['{target}']\n"

    assert found(COMPOSE, scrape("llm:8000"), rule="port-unreachable") == []
    assert found(COMPOSE, scrape("llm:9000"), rule="port-unreachable") == [("prometheus.yml", "warning")]
    assert found(COMPOSE, scrape("vllm:8000"), rule="port-unreachable") == [("prometheus.yml", "note")]


@pytest.mark.parametrize(("model", "count"), [("hosted_vllm/qwen", 0), ("hosted_vllm/Qwen/Qwen3-8B", 1)])
def test_a_client_asks_for_the_name_that_the_server_has(model, count):
    client = ("litellm.yaml", f"- litellm_params:\n    model: {model}\n    api_base: http://llm:8000/v1\n")
    assert len(found(COMPOSE, client, rule="model-name")) == count


def test_a_model_of_another_server_is_not_the_servers():
    others = "- litellm_params:\n    model: openai/gpt-4o\n- litellm_params:\n    api_base: http://llm:8000/v1\n"
    assert found(COMPOSE, ("litellm.yaml", others), rule="model-name") == []
    ollama = "- litellm_params:\n    model: openai/llama3\n    api_base: http://ollama:11434/v1\n"
    assert found(COMPOSE, ("litellm.yaml", ollama), rule="model-name") == []


def test_a_request_in_a_script_names_the_model_too():
    script = 'curl http://localhost:8001/v1/chat/completions -d \'{"model": "%s"}\'\n'
    assert found(COMPOSE, ("ask.sh", script % "qwen"), rule="model-name") == []
    assert found(COMPOSE, ("ask.sh", script % "gpt-4"), rule="model-name") == [("ask.sh", "note")]


SCRIPT = ("start.sh", "#!/bin/sh\npip install vllm==0.20.0\nvllm serve Qwen/Qwen3-32B --max-model-len 4096\n")


@pytest.mark.parametrize(
    ("named", "count"),
    [("instance_type = g4dn.xlarge", 1), ("on an H100", 0), ("g4dn.xlarge or an H100", 0), ("an L4/L7 balancer", 0)],
)
def test_a_model_does_not_fit_the_only_card_that_the_files_name(named, count):
    assert len(found(SCRIPT, ("main.tf", f"# vllm\n# {named}\n"), rule="does-not-fit")) == count


def claims(size):
    pod = (
        "{containers: [{name: v, image: 'vllm/vllm-openai:v0.20.0', args: [--model, Qwen/Qwen3-8B]}],\n"
        "    volumes: [{name: w, persistentVolumeClaim: {\n      claimName: weights\n    }}]}"
    )
    return (
        "a.yaml",
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec:\n  selector: {matchLabels: {a: b}}\n"
        f"  template: {{metadata: {{labels: {{a: b}}}}, spec: {pod}}}\n---\napiVersion: v1\n"
        "kind: PersistentVolumeClaim\nmetadata: {name: weights}\n"
        f"spec: {{resources: {{requests: {{storage: {size}}}}}}}\n",
    )


@pytest.mark.parametrize(("size", "severities"), [("10Gi", ["warning"]), ("50Gi", []), ("'{{ x }}'", [])])
def test_a_volume_for_the_weights_holds_them(size, severities):
    assert [severity for _, severity in found(claims(size), rule="path-missing")] == severities


def workload(spec):
    return (
        "a.yaml",
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec:\n"
        f"{spec}  template:\n    metadata: {{labels: {{a: b}}}}\n    spec:\n      containers:\n"
        "      - {name: v, image: 'vllm/vllm-openai:v0.20.0', args: [--model, Qwen/Qwen3-8B]}\n",
    )


SELECTOR = "  selector: {matchLabels: {a: b}}\n"


@pytest.mark.parametrize(
    ("spec", "severities"),
    [
        (SELECTOR, []),
        (f"{SELECTOR}  strategy: {{type: Recreate}}\n", []),
        (f"{SELECTOR}  strategy:\n  type: Recreate\n", ["warning"]),
    ],
)
def test_a_field_in_the_wrong_place_is_refused(spec, severities):
    assert [severity for _, severity in found(workload(spec), rule="manifest-refused")] == severities


@pytest.mark.parametrize(
    ("profiles", "severities"), [("", ["warning"]), (", profiles: [b]", ["note"]), (", profiles: [b, c]", ["note"])]
)
def test_two_services_do_not_publish_one_port(profiles, severities):
    service = "{image: 'vllm/vllm-openai:v0.20.0', command: --model m/m, ports: ['8000:8000']%s}"
    text = f"services:\n  a: {service % ''}\n  b: {service % profiles}\n"
    assert [severity for _, severity in found(("compose.yaml", text), rule="manifest-refused")] == severities


def test_a_variable_that_no_env_file_names_is_empty(tmp_path):
    text = "services:\n  a: {image: 'vllm/vllm-openai:v0.20.0', command: '--model ${MODEL} --port ${PORT:-8000}'}\n"
    (tmp_path / "compose.yaml").write_text(text)
    path = str(tmp_path / "compose.yaml")
    assert found((path, text), rule="env-meaning") == [(path, "note")]
    (tmp_path / ".env.example").write_text("MODEL=Qwen/Qwen3-8B\n")
    assert found((path, text), rule="env-meaning") == []


def flag_values(flags, release="0.20.0"):
    text = f"#!/bin/sh\npip install vllm=={release}\nvllm serve {flags}\n"
    return [severity for _, severity in found(("start.sh", text), rule="flag-value")]


def test_a_step_holds_a_token_of_every_request_and_a_prompt_that_is_not_chunked():
    assert flag_values("/m --max-num-seqs 256 --max-num-batched-tokens 128") == ["error"]
    assert flag_values("/m --max-model-len 8192 --max-num-batched-tokens 2048") == []
    assert flag_values("/m --max-model-len 8192 --max-num-batched-tokens 2048", "0.6.3") == ["error"]
    assert flag_values("/m --max-model-len 8192 --max-num-batched-tokens 2048 --enable-chunked-prefill", "0.6.3") == []


def test_a_checkpoint_is_of_the_method_that_its_name_tells():
    assert flag_values("org/x-7B-GPTQ --quantization awq_marlin") == ["warning"]
    assert flag_values("org/x-7B-AWQ --quantization awq_marlin") == []


def limited(limit, shm):
    return (
        "pod.yaml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n"
        f"  volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {shm}}}}}]\n  containers:\n"
        "  - name: v\n    image: vllm/vllm-openai:v0.20.0\n    args: [--model, Qwen/Qwen3-32B, -tp, '2']\n"
        f"    resources: {{limits: {{nvidia.com/gpu: 2, memory: {limit}}}}}\n"
        "    volumeMounts: [{name: shm, mountPath: /dev/shm}]\n",
    )


@pytest.mark.parametrize(("limit", "shm", "count"), [("128Gi", "4Gi", 0), ("32Gi", "4Gi", 1), ("128Gi", "100Gi", 0)])
def test_a_limit_of_host_memory_holds_the_pages_of_the_checkpoint(limit, shm, count):
    findings = found(limited(limit, shm), rule="host-memory")
    assert [severity for _, severity in findings] == ["warning"] * count


LINES = {
    "ranks over MIG slices": ("a.yaml", "# vllm\nargs: [--tensor-parallel-size, 2]\nnvidia.com/mig-3g.40gb: 2\n"),
    "a model that vLLM does not have": ("start.sh", "vllm serve google/flan-t5-large\n"),
    "wheels that are not there": ("Dockerfile", "RUN pip install vllm --index-url download.pytorch.org/whl/cu122\n"),
    "keys of the host": ("compose.yaml", "services:\n  vllm:\n    volumes:\n    - ~/.ssh:/root/.ssh\n"),
    "flags in a program": ("deploy.py", "import vllm\nargs = ['--enforce-eager']\n"),
    "all GPUs for one rank": ("compose.yaml", "services:\n  vllm:\n    devices:\n    - count: all\n"),
    "another number of GPUs": ("a.sbatch", "#SBATCH --gres=gpu:2\nvllm serve m/m --tensor-parallel-size 4\n"),
    "another port": ("m.py", "import vllm\n@modal.web_server(8000)\ndef f():\n    run('vllm serve m/m --port 8001')\n"),
}
RULES = ["gpus-too-few", "flag-value", "command-doubtful", "rights-wide", "eager", "gpus-idle"]
RULES += ["gpus-too-few", "port-unreachable"]


@pytest.mark.parametrize(("what", "rule"), list(zip(LINES, RULES, strict=True)))
def test_a_line_that_is_a_mistake_is_a_note(what, rule):
    assert {severity for _, severity in found(LINES[what], rule=rule)} == {"note"}


def test_a_service_in_another_file_forwards_to_the_port_of_the_server():
    service = (
        "apiVersion: v1\nkind: Service\nmetadata: {name: s}\n"
        "spec: {selector: {a: b}, ports: [{port: 80, targetPort: %s}]}\n"
    )
    assert found(workload(SELECTOR), ("service.yaml", service % 8000), rule="port-unreachable") == []
    wrong = found(workload(SELECTOR), ("service.yaml", service % 9000), rule="port-unreachable")
    assert wrong == [("service.yaml", "warning")]


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ("depends_on: [b]", 0),
        ("depends_on: [c]", 1),
        ("depends_on: {c: {}}", 1),
        ("networks: [n]", 0),
        ("networks: [m]", 1),
    ],
)
def test_a_service_depends_on_services_and_networks_that_are_there(more, count):
    text = (
        f"services:\n  a: {{image: 'vllm/vllm-openai:v0.20.0', command: --model m/m, {more}}}\n  b: {{image: 'x:1'}}\n"
        "networks: {n: {}}\n"
    )
    assert found(("compose.yaml", text), rule="manifest-refused") == [("compose.yaml", "error")] * count


@pytest.mark.parametrize(
    ("volume", "severities"),
    [("./m:/models", []), ("./m:/other", ["note"]), ("./m:/models/m/a", []), ("./m:/models/m-old", ["note"])],
)
def test_a_path_of_the_command_is_in_a_volume(volume, severities):
    text = (
        "services:\n  a:\n    image: vllm/vllm-openai:v0.20.0\n    ports: ['127.0.0.1:8000:8000']\n"
        f"    command: --model /models/m\n    volumes: ['{volume}']\n"
    )
    assert [severity for _, severity in found(("compose.yaml", text), rule="path-missing")] == severities


def test_a_series_of_the_release_that_a_server_here_runs_is_no_mistake():
    panel = ("p.json", '{"panels": [{"targets": [{"expr": "max(vllm:gpu_cache_usage_perc)"}]}]}')
    assert found(panel, COMPOSE, rule="metric-unknown") == [("p.json", "warning")]
    old = COMPOSE[0], COMPOSE[1].replace("v0.20.0", "v0.8.5")
    assert found(panel, old, rule="metric-unknown") == []


def test_a_container_name_of_any_compose_file_is_a_host():
    other = ("b/compose.yaml", COMPOSE[1].replace("brain", "vllm-brain"))
    client = ("litellm.yaml", "api_base: http://vllm-brain:8000/v1\n")
    assert found(other, COMPOSE, client, rule="port-unreachable") == []


def test_the_user_data_of_an_instance_is_a_script():
    run = "docker run --gpus all vllm/vllm-openai:v0.20.0 --model Qwen/Qwen3-32B --max-model-len 4096"
    text = f'instance_type = "g5.xlarge"\nuser_data = <<-EOF\n#!/bin/bash\n{run}\nEOF\n'
    assert found(("main.tf", text), rule="does-not-fit") == [("main.tf", "warning")]


VALUES = "vllm:\n  image: {tag: a}\n  args: [--model, m/m]\n  port: 1\nservice: {}\n"
TEMPLATE = "kind: Deployment\nimage: 'a/vllm:{{ .Values.vllm.image.tag }}'\nport: {{ .Values.vllm.port }}\n"


@pytest.mark.parametrize(
    ("more", "paths"),
    [("", ["chart/values.yaml"]), ("args: {{ .Values.vllm.args }}\n", []), ("all: {{ toYaml .Values }}\n", [])],
)
def test_a_value_that_no_template_reads_is_noted(more, paths):
    chart = [("chart/values.yaml", VALUES), ("chart/templates/a.yaml", TEMPLATE + more)]
    assert [path for path, _ in found(*chart, rule="flag-ignored")] == paths


def test_values_of_a_workload_whose_template_is_not_there_are_left_alone():
    values = VALUES + "router:\n  image: {tag: b}\n  args: []\n"
    chart = [("values.yaml", values), ("templates/a.yaml", TEMPLATE + "args: {{ .Values.vllm.args }}\n")]
    assert found(*chart, rule="flag-ignored") == []


def test_a_variable_of_an_env_file_that_no_file_reads_has_no_effect():
    compose = "services:\n  llm:\n    image: vllm/vllm-openai:v0.20.0\n    command: --model m/m\n"
    read = ("compose.yaml", compose + "    environment: ['HF_TOKEN=${HF_TOKEN}']\n")
    env = (".env", "# vllm\nHUGGING_FACE_HUB_TOKEN=x\nHF_TOKEN=y\nSMALL_MAX_MODEL_LEN=1\n")
    lines = [each.place.line for each in lint_texts([read, env], LintOptions()).findings if each.rule == "env-unknown"]
    assert lines == [2, 4]
    handed = ("compose.yaml", compose + "    env_file: .env\n")
    assert found(handed, env, rule="env-unknown") == []


@pytest.mark.parametrize(
    ("served", "count"), [("Qwen3.6-27B", 0), ("qwen3.5-27b", 1), ("qwen3.6-8b", 1), ("chat", 0), ("llama-3-8b", 0)]
)
def test_a_model_under_the_name_of_another_version_is_noted(served, count):
    script = ("a.sh", f"vllm serve Qwen/Qwen3.6-27B-FP8 --served-model-name {served}\n")
    assert len(found(script, rule="model-name")) == count


def test_a_stand_in_of_vllm_downloads_no_model():
    service = "services:\n  mock-vllm:\n    build: ./mock-vllm\n    image: acme/%s:1\n    ports: ['8000:8000']\n"
    assert found(("compose.yaml", service % "mock-vllm"), rule="cache-lost") == []
    assert found(("compose.yaml", service.replace("mock-", "") % "vllm"), rule="cache-lost")


def test_an_address_is_a_clients_variable_and_a_reference_is_no_written_key():
    client = "env: [{name: VLLM_URL, value: 'http://a:8000'}]"
    pod = f"apiVersion: v1\nkind: Pod\nspec: {{containers: [{{image: 'vllm/vllm-openai:v0.20.0', {client}}}]}}\n"
    assert found(("pod.yaml", pod), rule="env-unknown") == []
    script = 'vllm serve m/m --api-key "$(cat key)"\n'
    assert found(("a.sh", f"KEY={'k1' * 8}\nvllm serve m/m --api-key $KEY\n"), rule="secret-written") == []
    assert found(("a.sh", script), rule="secret-written") == []
