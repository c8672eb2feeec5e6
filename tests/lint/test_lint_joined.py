"""What only several files, or facts about images and tools, show."""

import pytest

from legroom.lint.linter import LintOptions, lint_files, lint_texts

IMAGE = "vllm/vllm-openai:v0.20.0"
RUN = "--model Qwen/Qwen3-8B"


def found(text, path="a.sh"):
    return {(finding.rule, finding.severity) for finding in lint_texts([(path, text)], LintOptions()).findings}


def compose(service):
    return f"services:\n  v: {service}\n"


def deployment(container, labels="{}"):
    return (
        f"apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: a, labels: {labels}}}\n"
        f"spec: {{template: {{spec: {{containers: [{container}]}}}}}}\n"
    )


MODAL = (
    'import modal\napp = modal.App("x")\n@app.function(gpu="H100:1"%s)\ndef f():\n    run(["vllm", "serve", "org/m"])\n'
)
CASES = {
    "no model": (
        "d.yaml",
        deployment(f"{{image: '{IMAGE}', args: [--port, '8000'], ports: [{{containerPort: 8000}}]}}"),
        ("model-missing", "warning"),
    ),
    "a model without its organization": (
        "d.yaml",
        deployment(f"{{image: '{IMAGE}', args: [--model, Llama-3.2-1B], ports: [{{containerPort: 8000}}]}}"),
        ("model-missing", "warning"),
    ),
    "no GPU at all": (
        "d.yaml",
        deployment(f"{{image: '{IMAGE}', args: [--model, org/m], ports: [{{containerPort: 8000}}]}}"),
        ("gpus-too-few", "warning"),
    ),
    "a root that is read-only": (
        "d.yaml",
        deployment(
            f"{{image: '{IMAGE}', args: [--model, org/m], ports: [{{containerPort: 8000}}], "
            "securityContext: {readOnlyRootFilesystem: true}}"
        ),
        ("path-missing", "warning"),
    ),
    "a cache that is read-only": (
        "compose.yaml",
        compose(f"{{image: '{IMAGE}', command: {RUN}, ports: ['1:8000'], volumes: ['~/a:/root/.cache:ro']}}"),
        ("cache-lost", "note"),
    ),
    "an empty key": (
        "compose.yaml",
        compose(f"{{image: '{IMAGE}', command: {RUN}, ports: ['1:8000'], environment: {{VLLM_API_KEY: '${{K:-}}'}}}}"),
        ("api-open", "note"),
    ),
    "a key that the file tells": (
        "compose.yaml",
        compose(f"{{image: '{IMAGE}', command: {RUN}, environment: {{VLLM_API_KEY: '${{K:-mine}}'}}}}"),
        ("api-open", "note"),
    ),
    "a token for the build": (
        "compose.yaml",
        compose(f"{{image: '{IMAGE}', command: {RUN}, build: {{args: {{HF_TOKEN: $T}}}}}}"),
        ("secret-written", "note"),
    ),
    "NVIDIA's image": (
        "compose.yaml",
        compose(f"{{image: 'nvcr.io/nvidia/vllm:26.01-py3', command: {RUN}}}"),
        ("container-command", "error"),
    ),
    "python in vLLM's image": ("Dockerfile", f"FROM {IMAGE}\nRUN python -c 1\n", ("container-command", "error")),
    "a comment in a folded text": (
        "compose.yaml",
        f"services:\n  v:\n    image: {IMAGE}\n    command: >\n      {RUN}\n      # more\n      --port 1\n",
        ("flag-cut-off", "warning"),
    ),
    "CUDA's devices": (
        "compose.yaml",
        compose(f"{{image: '{IMAGE}', command: {RUN}, environment: {{CUDA_VISIBLE_DEVICES: '${{D:-all}}'}}}}"),
        ("env-meaning", "warning"),
    ),
    "Modal without a volume": ("m.py", MODAL % "", ("cache-lost", "note")),
    "a redirected version": ("a.sh", "pip install a>=1.0\nvllm serve org/m\n", ("command-doubtful", "note")),
    "a deleted cache": ("a.sh", "rm -rf ~/.cache/flashinfer\nvllm serve org/m\n", ("command-doubtful", "note")),
    "an instance of no template": (
        "vllm.service",
        "[Service]\nUser=%i\nExecStart=/usr/bin/vllm serve org/m\n",
        ("unit-sandbox", "warning"),
    ),
    "a slower kernel": ("a.sh", "pip install vllm==0.20.0\nvllm serve org/m -q awq\n", ("flag-costly", "note")),
    "a worker of Ray": (
        "ray.yaml",
        "apiVersion: ray.io/v1\nkind: RayService\nspec:\n  serveConfigV2: vllm\n  workerGroupSpecs:\n"
        "  - groupName: g\n    template: {spec: {containers: [{image: a}]}}\n",
        ("cache-lost", "note"),
    ),
    "a readiness probe that waits": (
        "d.yaml",
        deployment(
            f"{{image: '{IMAGE}', args: [--model, org/m], ports: [{{containerPort: 8000}}], "
            "readinessProbe: {initialDelaySeconds: 600, httpGet: {path: /health, port: 8000}}}"
        ),
        ("probe-missing", "note"),
    ),
    "PowerShell": ("a.ps1", f"docker run `\n  -p 8000:8000 `\n  {IMAGE} `\n  {RUN}\n", ("api-open", "note")),
}


@pytest.mark.parametrize("what", CASES)
def test_a_mistake_around_the_server_is_told(what):
    path, text, expected = CASES[what]
    assert expected in found(text, path)


def test_what_keeps_the_weights_or_asks_for_a_key_is_not_told():
    kept = compose(f"{{image: '{IMAGE}', command: {RUN} --api-key $K, ports: ['1:8000'], volumes: ['a:/root/.cache']}}")
    rules = {rule for rule, _ in found(kept, "compose.yaml")}
    assert rules.isdisjoint({"cache-lost", "api-open", "model-missing"})
    assert ("cache-lost", "note") not in found(MODAL % ', volumes={"/root": v}', "m.py")
    assert ("flag-costly", "note") not in found("pip install vllm==0.24.0\nvllm serve org/m -q awq\n")


def test_a_service_is_judged_by_the_dockerfile_that_it_builds(tmp_path):
    (tmp_path / "Dockerfile").write_text(f'FROM {IMAGE}\nCOPY start.sh /start.sh\nENTRYPOINT ["/start.sh"]\n')
    (tmp_path / "start.sh").write_text("PORT=${LISTEN:-8000}\nexec vllm serve org/m --port $PORT\n")
    (tmp_path / "compose.yaml").write_text(
        compose("{build: ., ports: ['9000:9000'], environment: {LISTEN: 9000, VLLM_MAX_NUM_SEQS: 4}}")
    )
    report = lint_files([str(tmp_path / "compose.yaml")], LintOptions())
    rules = {finding.rule for finding in report.findings}
    assert {"api-open", "env-unknown"} <= rules and "port-unreachable" not in rules


@pytest.mark.parametrize(
    ("beside", "expected"), [("vllm==0.20.0\n", ["note"]), ("torch\n", ["note"]), ("vllm==0.9.0", [])]
)
def test_a_release_that_a_file_beside_pins_is_likely(beside, expected, tmp_path):
    (tmp_path / "requirements.txt").write_text(beside)
    (tmp_path / "start.sh").write_text("vllm serve org/m --disable-log-requests\n")
    report = lint_files([str(tmp_path / "start.sh")], LintOptions())
    assert [finding.severity for finding in report.findings if finding.rule == "flag-removed"] == expected
