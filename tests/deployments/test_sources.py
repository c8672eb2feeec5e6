"""What people have: command lines, container runs, manifests, unit files, Python source."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.deployments.deployment import (
    MAX_FILE_BYTES,
    Deployment,
    deployment_from_command,
    deployment_from_file,
    deployment_from_python,
)
from legroom.errors import LegroomError
from legroom.facts.releases import release


def read(tmp_path: Path, name: str, text: str, version: str | None = None) -> Deployment:
    path = tmp_path / name
    path.write_text(text)
    return deployment_from_file(path, release(version) if version else None)


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/model -tp 2 --max-model-len 8192",
        "vllm serve org/model \\\n  -tp 2 \\\n  --max-model-len 8192",
        "$ vllm serve org/model -tp 2 --max-model-len 8192",
        "nohup vllm serve org/model -tp 2 --max-model-len 8192 > server.log 2>&1 &",
        "sudo numactl --cpunodebind=0 --membind=0 vllm serve org/model -tp 2 --max-model-len 8192",
        "uv run --with vllm vllm serve org/model -tp 2 --max-model-len 8192",
        "exec /venv/bin/vllm serve 'org/model' -tp 2 --max-model-len=8192",
        "cd /srv && source env/bin/activate && vllm serve org/model -tp 2 --max-model-len 8192 | tee log",
        "MODEL=org/model\nvllm serve $MODEL -tp ${TP:-2} --max-model-len 8192",
        "bash -c 'vllm serve org/model -tp 2 --max-model-len 8192'",
        "python3 -m vllm.entrypoints.openai.api_server --model org/model -tp 2 --max-model-len 8192",
        "docker run --gpus all vllm/vllm-openai:latest --model org/model -tp 2 --max-model-len 8192",
        "docker run -it --entrypoint bash vllm/vllm-openai -c 'vllm serve org/model -tp 2 --max-model-len 8192'",
        "# start\nexport A=1\nvllm serve org/model -tp 2 --max-model-len 8192",
    ],
)
def test_a_server_is_found_behind_whatever_starts_it(text: str) -> None:
    deployment = deployment_from_command(text)
    assert (deployment.args.model, deployment.args.tensor_parallel_size, deployment.args.max_model_len) == (
        "org/model",
        2,
        8192,
    )
    assert deployment.problems == ()


def test_the_environment_that_bears_on_memory_is_kept_and_secrets_are_not() -> None:
    text = "HF_TOKEN=secret VLLM_API_KEY=x VLLM_USE_V1=0 CUDA_VISIBLE_DEVICES=2,3 vllm serve m"
    deployment = deployment_from_command(text, release("0.9.0"))
    assert deployment.args.env == {"VLLM_USE_V1": "0", "CUDA_VISIBLE_DEVICES": "2,3"}
    assert deployment.gpu_count == 2


def test_a_container_run_tells_release_gpus_and_shared_memory() -> None:
    text = (
        "docker run --runtime nvidia --gpus '\"device=0,1\"' -v ~/.cache:/root/.cache --env VLLM_USE_V1=1 -p 8000:8000 "
        "--ipc=host --shm-size 16g vllm/vllm-openai:v0.10.2 --model m --swap-space 4"
    )
    deployment = deployment_from_command(text)
    assert (deployment.release.version, deployment.release_hint, deployment.gpu_count, deployment.shm_size) == (
        "0.10.2",
        "0.10.2",
        2,
        "16g",
    )
    assert (deployment.args.model, deployment.args.swap_space, deployment.args.env) == ("m", 4.0, {"VLLM_USE_V1": "1"})
    assert deployment.read_as == "a docker run line"


@pytest.mark.parametrize(
    ("tag", "version"),
    [
        ("vllm/vllm-openai:v0.10.2", "0.10.2"),
        ("vllm/vllm-openai:v0.8.5.post1", "0.8.5.post1"),
        ("registry.example:5000/team/vllm-openai:v0.11.0-cu128", "0.11.0"),
        ("rocm/vllm:rocm6.3.1_instinct_vllm0.8.3_20250410", "0.8.3"),
        ("vllm/vllm-openai:latest", None),
        ("vllm/vllm-openai", None),
        ("example/vllm:25.09-py3", None),
        ("python:0.10.2", None),
    ],
)
def test_an_image_tag_names_the_release(tag: str, version: str | None) -> None:
    deployment = deployment_from_command(f"docker run {tag} vllm serve m")
    assert deployment.release_hint == version


KUBERNETES = """
apiVersion: v1
kind: Service
metadata: {name: front}
spec: {ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: llama}
spec:
  replicas: 3
  template:
    spec:
      containers:
      - name: sidecar
        image: busybox
        command: [sleep, "1"]
      - name: vllm
        image: vllm/vllm-openai:v0.9.2
        %s
        env:
        - {name: VLLM_USE_V1, value: "1"}
        - {name: MODEL, value: org/model}
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
        resources: {limits: {nvidia.com/gpu: "4"}}
"""


@pytest.mark.parametrize(
    "started",
    [
        'args: ["--model", "$(MODEL)", "--tensor-parallel-size", "4", "--max-model-len=8192"]',
        'command: ["vllm", "serve", "org/model"]\n        args: ["-tp", "4", "--max-model-len", "8192"]',
        'command: ["/bin/sh", "-c", "vllm serve $(MODEL) -tp 4 --max-model-len 8192"]',
        'command: ["/bin/sh", "-c"]\n        args: ["sleep 1; exec vllm serve $MODEL -tp 4 --max-model-len 8192"]',
        'command: ["python3", "-m", "vllm.entrypoints.openai.api_server"]\n'
        "        args: [--model, org/model, -tp, 4, --max-model-len, 8192]",
    ],
)
def test_a_kubernetes_deployment_is_read(tmp_path: Path, started: str) -> None:
    deployment = read(tmp_path, "deploy.yaml", KUBERNETES % started)
    assert (deployment.args.model, deployment.args.tensor_parallel_size, deployment.args.max_model_len) == (
        "org/model",
        4,
        8192,
    )
    assert (deployment.release.version, deployment.gpu_count, deployment.args.env) == ("0.9.2", 4, {"VLLM_USE_V1": "1"})
    assert deployment.read_as == "Kubernetes Deployment llama"


def test_a_kserve_service_is_read(tmp_path: Path) -> None:
    text = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: llama}
spec:
  predictor:
    model:
      modelFormat: {name: huggingface}
      args: ["--model_name=llama", "--model_id=org/model", "--max-model-len=4096"]
      resources: {limits: {nvidia.com/gpu: 1}}
"""
    deployment = read(tmp_path, "isvc.yaml", text)
    assert (deployment.args.model, deployment.args.max_model_len, deployment.gpu_count) == ("org/model", 4096, 1)


def test_a_leader_worker_set_counts_the_gpus_of_its_group(tmp_path: Path) -> None:
    text = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: big}
spec:
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
        - name: leader
          image: vllm/vllm-openai:v0.11.0
          command: [sh, -c, "ray start --head; vllm serve org/model -tp 8 -pp 2"]
          resources: {limits: {nvidia.com/gpu: 8}}
"""
    deployment = read(tmp_path, "lws.yaml", text)
    assert (deployment.gpu_count, deployment.args.pipeline_parallel_size) == (16, 2)


def test_a_compose_file_is_read(tmp_path: Path) -> None:
    text = """
services:
  web: {image: nginx}
  llm:
    image: vllm/vllm-openai:v0.10.0
    command: --model org/model --max-model-len ${LEN:-8192} --gpu-memory-utilization 0.85
    environment: [VLLM_USE_V1=1, HF_TOKEN=x]
    deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 2, capabilities: [gpu]}]}}}
"""
    deployment = read(tmp_path, "compose.yml", text)
    assert (deployment.args.model, deployment.args.max_model_len, deployment.args.gpu_memory_utilization) == (
        "org/model",
        8192,
        0.85,
    )
    assert (deployment.release.version, deployment.gpu_count, deployment.read_as) == (
        "0.10.0",
        2,
        "compose service llm",
    )


def test_a_vllm_config_file_is_read(tmp_path: Path) -> None:
    text = """
model: org/model
max-model-len: 8192
tensor_parallel_size: 2
enable-prefix-caching: false
trust-remote-code: true
compilation-config: {cudagraph_mode: NONE}
served-model-name: [a, b]
"""
    deployment = read(tmp_path, "config.yaml", text, "0.32.0")
    args = deployment.args
    assert (args.model, args.max_model_len, args.tensor_parallel_size) == ("org/model", 8192, 2)
    assert (args.enable_prefix_caching, args.compilation_config) == (False, {"cudagraph_mode": "NONE"})
    assert args.others == ("--trust-remote-code", "--served-model-name", "a", "b")


def test_a_config_file_named_on_the_command_line_is_overridden_by_it(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("max-model-len: 8192\nmax-num-seqs: 4\n")
    deployment = deployment_from_command(f"vllm serve m --config {tmp_path / 'c.yaml'} --max-num-seqs 8")
    assert (deployment.args.model, deployment.args.max_model_len, deployment.args.max_num_seqs) == ("m", 8192, 8)
    missing = deployment_from_command("vllm serve m --config nowhere.yaml")
    assert [problem.kind for problem in missing.problems] == ["ignored"]


def test_a_systemd_unit_is_read(tmp_path: Path) -> None:
    text = """
[Unit]
Description=vLLM
[Service]
Environment="VLLM_USE_V1=1" CUDA_VISIBLE_DEVICES=0
ExecStart=/opt/venv/bin/vllm serve org/model \\
    --max-model-len 8192
Restart=always
"""
    deployment = read(tmp_path, "vllm.service", text)
    assert (deployment.args.model, deployment.args.max_model_len, deployment.read_as) == (
        "org/model",
        8192,
        "a systemd unit",
    )
    assert (deployment.args.env["VLLM_USE_V1"], deployment.gpu_count) == ("1", 1)


def test_python_source_is_read_without_running_it(tmp_path: Path) -> None:
    text = """
import os
from vllm import LLM
MODEL = "org/model"
llm = LLM(MODEL, tensor_parallel_size=2, max_model_len=8192, enforce_eager=True, dtype=os.environ["X"],
          compilation_config={"level": 0}, swap_space=4, no_such=1)
"""
    deployment = read(tmp_path, "run.py", text, "0.10.2")
    args = deployment.args
    assert (args.model, args.usage, args.tensor_parallel_size, args.max_model_len) == ("org/model", "llm", 2, 8192)
    assert (args.enforce_eager, args.compilation_config, args.swap_space) == (True, {"level": 0}, 4)
    assert [problem.flag for problem in deployment.problems] == ["--no-such"]
    assert any("dtype" in note for note in deployment.notes)


def test_engine_arguments_of_an_async_engine_are_a_servers() -> None:
    deployment = deployment_from_python("AsyncEngineArgs(model='m', max_num_seqs=8)", release("0.32.0"))
    assert (deployment.args.usage, deployment.args.max_num_seqs) == ("serve", 8)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("chart.yaml", "apiVersion: v1\nargs: [{{ .Values.model }}]\n", "template"),
        ("broken.yaml", "a: [1, 2\nb: }", "not valid YAML at line"),
        ("empty.yaml", "", "no vLLM server"),
        ("other.yaml", "apiVersion: v1\nkind: Pod\nspec: {containers: [{image: nginx, args: [a]}]}", "no vLLM server"),
        ("x.py", "print(1)", "no LLM"),
        ("x.py", "def (", "could not be read"),
        ("run.sh", "echo hello", "no vLLM server"),
        ("run.sh", "vllm serve 'm --port 1", "never closed"),
    ],
)
def test_a_file_without_a_server_is_a_clear_message(tmp_path: Path, name: str, text: str, word: str) -> None:
    with pytest.raises(LegroomError) as caught:
        read(tmp_path, name, text)
    assert word in caught.value.message


def test_a_huge_binary_or_missing_file_is_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.yaml"
    with huge.open("wb") as file:
        file.truncate(MAX_FILE_BYTES * 100)
    binary = tmp_path / "model.safetensors"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path, word in (
        (huge, "too large"),
        (binary, "not a text file"),
        (tmp_path / "no", "cannot"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(LegroomError) as caught:
            deployment_from_file(path)
        assert word in caught.value.message


WORDS = "vllm serve docker run -e A=1 sh -c ' \" ; | > vllm/vllm-openai:v0.9 --config ${X:- $ {{ python LLM( ) : -"
PIECES = st.one_of(st.sampled_from([*WORDS.split(), "\\\n", "\n"]), st.text(max_size=8))


@given(st.lists(PIECES, max_size=14).map(" ".join), st.sampled_from(["a.yaml", "a.py", "a.service", "a.sh", "a"]))
def test_any_text_is_read_or_refused_clearly(tmp_path_factory: pytest.TempPathFactory, text: str, name: str) -> None:
    path = tmp_path_factory.mktemp("any") / name
    path.write_text(text, "utf-8", errors="replace")
    for attempt in (lambda: deployment_from_command(text), lambda: deployment_from_file(path)):
        try:
            assert isinstance(attempt(), Deployment)
        except LegroomError as refusal:
            assert refusal.message


def test_keyword_arguments_alone_are_those_of_llm():
    deployment = deployment_from_python('model="Qwen/Qwen3-8B", max_model_len=8192', None, "--python")
    assert deployment.args.model == "Qwen/Qwen3-8B"
    assert deployment.args.max_model_len == 8192
    assert deployment.args.usage == "llm"


@pytest.mark.parametrize("text", ["[" * 60_000, "- " * 60_000 + "x", "a: " + "{b: " * 60_000], ids=["[", "-", "{"])
def test_a_file_of_nothing_but_nesting_is_refused(tmp_path, text):
    path = tmp_path / "deep.yaml"
    path.write_text(text)
    with pytest.raises(LegroomError, match="nested too deeply"):
        deployment_from_file(str(path), None)


def test_ray_serve_is_told_apart_from_a_command_without_vllm():
    with pytest.raises(LegroomError) as raised:
        deployment_from_command("ray start --head && serve run app:build_app")
    assert "this is Ray Serve" in raised.value.hint
    with pytest.raises(LegroomError) as raised:
        deployment_from_command("serve -s build")
    assert "Ray Serve" not in raised.value.hint
