"""The gate and lint judge a manifest by the same rules."""

import json

import pytest
from running_gate import deployment

from legroom.gate.verdict import plan_verdict
from legroom.lint.linter import LintOptions, lint_texts

H100, LLAMA = "NVIDIA-H100-80GB-HBM3", ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len", "8192")
PINNED = "vllm/vllm-openai:v0.20.0"


def made(*args, probe=None, env=None, annotation="", gpu=H100, image=PINNED, module="", **limits):
    thing = deployment(*(args or LLAMA), gpu=gpu, image=image, **limits)
    (container,) = thing["spec"]["template"]["spec"]["containers"]
    if probe:
        container["livenessProbe"] = {"httpGet": {"path": "/health", "port": 8000}, **probe}
    container["env"] = [{"name": "HF_TOKEN", "value": "$(TOKEN)"}, *([env] if env else [])]
    if module:
        container["command"] = ["vllm", module] if "." not in module else ["python3", "-m", f"vllm.{module}"]
    if annotation:
        thing["metadata"]["annotations"] = {"legroom/gpu": annotation}
    return thing


LARGE = ("--model", "meta-llama/Llama-3.1-70B-Instruct")
MANIFESTS = {
    "a server that fits": (made(), ""),
    "a liveness probe of 90 s before a start of 341 s": (made(probe={"initialDelaySeconds": 60}), "warning"),
    "a liveness probe that no disk can satisfy": (made(probe={"periodSeconds": 5}), "error"),
    "4 GiB of host memory for a rank": (made(memory="4Gi"), "warning"),
    "1 GiB of host memory for a rank": (made(memory="1Gi"), "error"),
    "a model larger than its card": (made(*LARGE, gpu="Tesla-T4"), "error"),
    "the same in an image of one's own": (
        made(*LARGE, gpu="Tesla-T4", image="registry.local/vllm-openai:prod"),
        "error",
    ),
    "a model larger than each of the cards it may get": (made(*LARGE, gpu=None, annotation="t4, l4"), "error"),
    "a model larger than one of the cards it may get": (made(gpu=None, annotation="t4, h100"), "warning"),
    "two ranks without shared memory": (made(*LLAMA, "-tp", "2", **{"nvidia.com/gpu": "2"}), "warning"),
    "more ranks than GPUs": (made(*LLAMA, "-tp", "4"), "error"),
    "more GPUs than ranks": (made(**{"nvidia.com/gpu": "2"}), "warning"),
    "serve for an image that serves": (made("serve", *LLAMA), "error"),
    "the CPU as the device of the CUDA image": (
        made(*LLAMA, "--device", "cpu", image="vllm/vllm-openai:v0.8.5"),
        "error",
    ),
    "a device where the flag is gone": (made(*LLAMA, "--device", "cpu"), "error"),
    "sleep mode with expandable segments": (
        made(
            *LLAMA,
            "--enable-sleep-mode",
            env={"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "expandable_segments:True"},
            image="vllm/vllm-openai:v0.11.0",
        ),
        "error",
    ),
    "more ranks than GPUs where the release looks for Ray": (
        made(*LLAMA, "-tp", "4", image="vllm/vllm-openai:v0.11.0"),
        "error",
    ),
    "a module that is misspelt": (made(module="entrypoints.openai.api_sever"), "error"),
    "a package that is misspelt": (made(module="entrypoint.openai.api_server"), "error"),
    "a module that may be a fork's": (made(module="entrypoints.openai.multi_model_api_server"), "warning"),
    "a command that is misspelt": (made(module="server"), "error"),
    "a probe of another port": (made(*LLAMA, "--port", "9000", probe={"initialDelaySeconds": 3600}), "error"),
    "a GPU beyond those of the container": (made(env={"name": "CUDA_VISIBLE_DEVICES", "value": "1"}), "error"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_what_the_gate_refuses_is_an_error_of_lint_and_what_it_warns_of_a_warning(name):
    manifest, expected = MANIFESTS[name]
    outcome = plan_verdict(manifest, search="single_change").outcome
    report = lint_texts([("manifest.json", json.dumps(manifest))], LintOptions())
    severities = {finding.severity for finding in report.findings} - {"note"}
    worst = "error" if "error" in severities else "warning" if severities else ""
    assert {"fits": "", "tight": "warning", "does_not_fit": "error"}[outcome] == worst == expected, report.findings
