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
