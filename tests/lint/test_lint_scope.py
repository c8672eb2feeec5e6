"""What a rule is not about: other programs, other hardware, batch jobs, headless Services, cancelled consequences."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts

IMAGE = "vllm/vllm-openai:v0.20.0"


def findings(*texts, rule):
    return [each for each in lint_texts(list(texts), LintOptions()).findings if each.rule == rule]


@pytest.mark.parametrize(("image", "count"), [("mock-vllm:1", 0), ("vllm/vllm-openai:v0.20.0", 1)])
def test_a_mock_of_a_server_needs_no_memory_for_one(image, count):
    text = f"kind: Model\nspec:\n  image: {image}\n  resources:\n    limits:\n      memory: 256Mi\n"
    assert len(findings(("model.yaml", text), rule="host-memory")) == count


def test_a_part_of_a_charts_values_with_another_image_is_no_server():
    server = "server:\n  image:\n    repository: vllm/vllm-openai\n    tag: v0.20.0\n"
    bench = "bench:\n  image:\n    repository: org/load\n  securityContext:\n    readOnlyRootFilesystem: true\n"
    assert findings(("values.yaml", server + bench), rule="path-missing") == []
    assert findings(("values.yaml", server + bench.replace("org/load", "org/vllm")), rule="path-missing")


def test_a_server_on_cpus_has_no_graphs():
    def serve(image):
        return "run.sh", f"docker run {image} --model org/m --enforce-eager\n"

    assert findings(serve("vllm/vllm-openai-cpu:v0.20.0"), rule="eager") == []
    assert findings(serve(IMAGE), rule="eager")


def test_a_base_image_with_its_own_version_does_not_move():
    install = "RUN pip install vllm==0.20.0\n"
    own = ("Dockerfile", f"FROM hub.org/gaudi/1.20.0/torch-2.6.0:latest\n{install}")
    assert findings(own, rule="image-moving") == []
    assert findings(("Dockerfile", f"FROM hub.org/gaudi/torch:latest\n{install}"), rule="image-moving")


def test_a_script_that_unsets_the_port_of_a_service_does_not_use_it():
    use = "PORT=${VLLM_PORT:-8000}\nvllm serve org/m --port $PORT\n"
    assert findings(("start.sh", use), rule="env-meaning")
    assert findings(("start.sh", f"unset VLLM_PORT\n{use}"), rule="env-meaning") == []


@pytest.mark.parametrize(
    ("asks", "counts"), [("ray status", 1), ("until ray status | grep -q 16.0/16.0; do sleep 2; done", 0)]
)
def test_a_wait_after_ray_is_for_its_nodes(asks, counts):
    text = f"ray start --head --port=6379\nsleep 40\n{asks}\nvllm serve org/m\n"
    messages = [each.message for each in findings(("head.sh", text), rule="command-doubtful")]
    assert not any("whether the server is up" in each for each in messages)
    assert sum("joined the Ray cluster" in each for each in messages) == counts


def test_a_batch_job_signals_every_process_and_has_the_users_token():
    command = "vllm serve meta-llama/Llama-3.1-8B --port 8000\n"
    dockerfile = ("Dockerfile", 'CMD ["/run.sh"]\n')
    job = ("run.sh", f"#!/bin/sh\n#SBATCH --nodes=1\n{command}")
    assert findings(dockerfile, job, rule="stop-too-short") == []
    assert findings(job, rule="model-gated") == []
    assert findings(dockerfile, ("run.sh", f"#!/bin/sh\n{command}"), rule="stop-too-short")


@pytest.mark.parametrize(("address", "count"), [("None", 0), ("10.0.0.1", 1)])
def test_a_headless_service_sets_no_variables(address, count):
    text = f"apiVersion: v1\nkind: Service\nmetadata: {{name: vllm}}\nspec: {{clusterIP: {address}}}\n"
    assert len(findings(("service.yaml", text), rule="service-named-vllm")) == count


def test_without_compilation_its_cache_does_not_matter():
    def serve(flag):
        return "run.sh", f"export VLLM_DISABLE_COMPILE_CACHE=1\nvllm serve org/m {flag}\n"

    assert findings(serve(""), rule="env-meaning")
    assert findings(serve("--enforce-eager"), rule="env-meaning") == []


def test_a_word_beside_an_action_of_a_template_may_be_a_flags_value():
    text = f"kind: Pod\nspec:\n  containers:\n  - image: {IMAGE}\n    args:\n    - --model=org/m\n"
    text += "    {{- if .Values.mode }}\n    - {{ .Values.flag }}\n    {{- end }}\n    - special\n"
    assert findings(("templates/pod.yaml", text), rule="flag-unknown") == []


def test_an_action_that_trims_both_line_breaks_joins_lines():
    text = "args:\n- --port\n- '8000'\n{{- if .Values.mode DASH}}\n- --trust-remote-code\n{{- end }}\nimage: vllm\n"
    [joined] = findings(("templates/a.yaml", text.replace("DASH", "-")), rule="manifest-refused")
    assert (joined.severity, joined.place.line) == ("warning", 4)
    assert findings(("templates/a.yaml", text.replace("DASH", "")), rule="manifest-refused") == []


def test_series_are_judged_by_the_release_that_other_files_pin():
    query = "groups:\n- name: a\n  rules:\n  - alert: A\n    expr: vllm:num_requests_swapped > 0\n"
    [swapped] = findings(("Dockerfile", "FROM vllm/vllm-openai:v0.10.2\n"), ("r.yml", query), rule="metric-unknown")
    assert "not by 0.10.2" in swapped.message and "assumed" not in swapped.message
    values = ("values.yaml", "api:\n  containerImage: vllm/vllm-openai\n  version: v0.11.0\n")
    hidden = query.replace("num_requests_swapped", "gpu_cache_usage_perc")
    assert [each.severity for each in findings(values, ("r.yml", hidden), rule="metric-hidden")] == ["warning"]


def test_workloads_of_one_name_are_alternatives_for_a_claim():
    def using(name, pod):
        return f"apiVersion: apps/v1\nkind: Deployment\nmetadata:\n  name: {name}\nspec:\n  claimName: c\n", pod

    claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata:\n  name: c\nspec:\n  accessModes: [ReadWriteOnce]\n"

    def claims(second):
        files = [(f"{pod}/vllm.yaml", text) for text, pod in (using("vllm", "cpu"), using(second, "gpu"))]
        return findings(*files, ("pvc.yaml", claim), rule="rollout-stuck")

    assert (len(claims("vllm")), len(claims("other"))) == (0, 1)
