"""The release, the host's limit and the sizes that a diagnosis rests on are said, and travel with its fix."""

import pytest

from legroom.diagnosis.diagnosis_json import readings_json
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import LogReading, read_log
from legroom.render.diagnosis_text import readings_text

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SHORT = """\
INFO 10-04 10:00:10 [gpu_model_runner.py:2653] Model loading took 14.9889 GiB and 5.1 seconds
INFO 10-04 10:00:30 [gpu_worker.py:298] Available KV cache memory: 1.91 GiB
ERROR 10-04 10:00:31 [core.py:708] ValueError: To serve at least one request with the models's max seq len (131072), \
(16.00 GiB KV cache is needed, which is larger than the available KV cache memory (1.91 GiB).{more}
"""
ESTIMATED = " Based on the available memory, the estimated maximum model length is 15616."
DOCKER = f"docker run --gpus all vllm/vllm-openai:v0.11.0 --model {MODEL}"
POD = f"""\
apiVersion: v1
kind: Pod
metadata: {{name: vllm}}
spec:
  containers:
  - name: vllm
    image: vllm/vllm-openai:v0.11.0
    args: ["--model", "{MODEL}"]
    resources:
      limits: {{nvidia.com/gpu: 1, memory: LIMIT}}
"""
DEPLOYMENT = f"""\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: vllm}}
spec:
  selector: {{matchLabels: {{app: vllm}}}}
  template:
    metadata: {{labels: {{app: vllm}}}}
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.11.0
        args: ["--model", "{MODEL}"]
"""
COMPOSE = f"""\
services:
  vllm:
    image: vllm/vllm-openai:v0.11.0
    command: --model {MODEL}
"""


def reading(command: str | None, log: str = SHORT.format(more=ESTIMATED), vllm: str | None = None) -> LogReading:
    return read_log([log.encode()], "the log", Hints(command, None, "l4", None, vllm, local_models=False))


def text(found: LogReading, language: str = "en") -> str:
    return " ".join(readings_text([found], language=language).split())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "vllm", "release", "source", "words"),
    [
        (DOCKER, None, "0.11.0", "command", "vLLM 0.11.0, from the command"),
        (f"vllm serve {MODEL}", "0.11.0", "0.11.0", "given", "vLLM 0.11.0, as given"),
        (f"vllm serve {MODEL}", None, "0.32.0", "assumed", "vLLM 0.32.0 assumed, as no release is named"),
    ],
)
def test_the_release_of_the_plans_is_said_with_who_named_it(command, vllm, release, source, words):
    found = reading(command, vllm=vllm)
    deployment = readings_json([found])["deployment"]
    assert (deployment["release"], deployment["release_from"]) == (release, source)
    assert words in text(found)
    assert words not in text(found, "zh") and f"vLLM {release}" in text(found, "zh")


def test_a_log_that_names_its_release_is_believed():
    found = reading(None, f"INFO [api_server.py:1] vLLM API server version 0.10.2\n{SHORT.format(more=ESTIMATED)}")
    deployment = readings_json([found])["deployment"]
    assert (deployment["release"], deployment["release_from"]) == ("0.10.2", "log")
    assert "vLLM 0.10.2" in text(found) and "assumed" not in text(found)


def test_the_plan_of_a_fix_is_asked_for_with_its_release_unless_it_is_the_newest():
    assert f"legroom plan --vllm 0.11.0 --gpu l4 -- vllm serve {MODEL} --max-model-len" in text(reading(DOCKER))
    assert "legroom plan --vllm" not in text(reading(f"vllm serve {MODEL}"))


@pytest.mark.parametrize("manifest", [POD.replace("LIMIT", "27Gi"), DEPLOYMENT, COMPOSE])
def test_a_pasted_manifest_is_read_like_its_file(manifest, tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text(manifest)
    pasted = readings_json([reading(manifest)])
    log = SHORT.format(more=ESTIMATED)
    from_file = read_log([log.encode()], "the log", Hints(str(file), None, "l4", None, None))
    assert pasted["findings"][0]["fixes"] == readings_json([from_file])["findings"][0]["fixes"]
    assert pasted["deployment"]["release"] == "0.11.0"


def test_a_containers_memory_limit_is_kept_and_one_that_is_too_small_is_said():
    small, large = (reading(POD.replace("LIMIT", size)) for size in ("6Gi", "27Gi"))
    assert readings_json([large])["deployment"]["host_limit_bytes"] == 27 << 30
    words = "The container's memory limit, 6.00 GiB, is too small: the server holds about 8.00 GiB; 13 GiB is enough."
    assert words in text(small) and "memory limit" not in text(large)
    assert "容器的内存上限 6.00 GiB 太小" in text(small, "zh").replace("\n", "")


def test_the_pool_is_shown_as_the_log_prints_it():
    fix = reading(DOCKER).runs[0].findings[0].fixes[0]
    assert fix.layout is not None and f"{fix.layout.kv_cache.bytes / 2**30:.2f}" == "1.91"
    assert "1.92 GiB" not in text(reading(DOCKER))


def test_a_length_from_rounded_sizes_is_the_least_that_fits():
    printed, rounded = text(reading(DOCKER)), text(reading(DOCKER, SHORT.format(more="")))
    assert "At 128.0 KiB a token, 15,616 tokens fit" in printed and "of at least" not in printed
    assert "at least 15,600 tokens fit" in rounded and "one request of at least 15,600 tokens" in rounded


@pytest.mark.parametrize(("share", "is_warned"), [("0.9", True), ("0.95", False), ("0.97", False)])
def test_nobody_is_warned_of_a_share_that_is_in_use(share, is_warned):
    found = reading(f"vllm serve {MODEL} --gpu-memory-utilization {share}", vllm="0.11.0").runs[0].findings[0]
    assert any("0.95 and more" in end.action for end in found.dead_ends) == is_warned
