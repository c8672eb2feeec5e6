"""Mistakes that lint made in strangers' files, and mistakes in them that it did not see."""

import pytest

from legroom.deployments.container_images import image_release, latest_build_day
from legroom.lint.linter import LintOptions, lint_texts

SERVE = "vllm serve Qwen/Qwen3-8B"


def judged(text, path="start.sh", *more):
    report = lint_texts([(path, text), *more], LintOptions())
    assert not report.unread, report.unread
    return [(finding.rule, finding.severity) for finding in report.findings if finding.severity != "note"]


COPY = """\
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
engine_args = EngineArgs(model=model, swap_space=swap_space)
"""


def test_a_copy_of_a_module_of_vllm_is_not_a_start_of_it_and_one_of_its_examples_is():
    assert judged(COPY, "patches/llm.py") == []
    example = COPY.replace("from vllm.logger import init_logger", "# vllm==0.20.0")
    found = lint_texts([("app.py", example)], LintOptions()).findings
    assert [each.rule for each in found] == ["flag-removed"]


PINS = {
    "an argument": "FROM python:3.12\nARG VLLM_VERSION=0.8.5\nRUN pip install vllm==${VLLM_VERSION}\n",
    "an argument with a v": 'FROM python:3.12\nARG VLLM_TAG="v0.8.5"\nRUN pip install "vllm==$VLLM_TAG"\n',
    "a tag of git": "FROM cuda\nARG VLLM_REF=0.8.5\nRUN git clone -b v${VLLM_REF} https://github.com/vllm-project/vllm\n",
    "a wheel": "FROM cuda\nRUN pip install https://x/v0.8.5/vllm-0.8.5+cu118-cp38-abi3-manylinux1_x86_64.whl\n",
}


@pytest.mark.parametrize("how", PINS)
def test_a_release_that_a_file_pins_is_the_one_it_is_judged_by(how):
    command = f"CMD {SERVE} --swap-space 4"  # until 0.17.1
    assert judged(PINS[how] + command, "Dockerfile") == []
    assert judged(PINS[how].replace("0.8.5", "0.20.0") + command, "Dockerfile") == [("flag-removed", "error")]


def test_keys_of_a_chart_are_no_flags():
    values = "model: Qwen/Qwen3-8B\nmax_model_len: 4096\nport: 8000\nhost: 0.0.0.0\nreplicas: 3\nlabels: {a: b}\n"
    assert judged(values, "values.yaml") == []
    assert judged(values.replace("replicas: 3\n", ""), "config.yaml") == []
    assert judged(values, "config.yaml") == []  # maybe another program's


def pod(image, resource="nvidia.com/gpu", flags='"--max-model-len", "4096"'):
    return f"""\
apiVersion: v1
kind: Pod
metadata: {{name: x}}
spec:
  containers:
  - name: v
    image: {image}
    command: ["vllm", "serve", "Qwen/Qwen3-8B", "--tensor-parallel-size", "4", {flags}]
    resources: {{limits: {{{resource}: "4"}}}}
"""


def test_ranks_on_tpus_share_no_memory():
    wrapped = (
        "image: registry.local/vllm-tpu:1\nextraArgs: [--tensor-parallel-size, '4']\nlimits: {google.com/tpu: 4}\n"
    )
    assert "shm-missing" not in {each.rule for each in lint_texts([("values.yaml", wrapped)], LintOptions()).findings}
    assert judged(pod("registry.local/vllm:nightly", "google.com/tpu"), "pod.yaml") == []
    assert judged(pod("registry.local/vllm:nightly"), "pod.yaml") == [("shm-missing", "warning")]


def test_a_version_below_any_in_use_is_the_images_own_and_the_server_is_judged():
    found = judged(pod("ghcr.io/acme/vllm-server:0.1.0", flags='"--max-modle-len", "4096"'), "pod.yaml")
    assert ("shm-missing", "warning") in found
    assert ("flag-unknown", "warning") in found


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        (f"{SERVE} --totally-made-up", "error"),
        ("docker run vllm/vllm-openai:latest --model Qwen/Qwen3-8B --totally-made-up", "error"),
        ("docker run vllm/vllm-openai:nightly --model Qwen/Qwen3-8B --totally-made-up", "warning"),
        ("docker run acme/vllm-fork:prod --model Qwen/Qwen3-8B --totally-made-up", "warning"),
    ],
)
def test_a_flag_of_no_release_is_an_error_where_vllm_itself_reads_it(text, severity):
    assert judged(text) == [("flag-unknown", severity)]


def test_the_cuda_image_has_no_other_device():
    line = "docker run --gpus all IMAGE --model Qwen/Qwen3-8B --device cpu"
    assert judged(line.replace("IMAGE", "vllm/vllm-openai:v0.8.5")) == [("flag-value", "error")]
    assert judged(line.replace("IMAGE", "vllm/vllm-openai:v0.8.5").replace("cpu", "cuda")) == []
    assert judged(line.replace("IMAGE", "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.8.5")) == []


def test_a_device_whose_flag_is_gone_is_one_finding():
    line = "docker run --gpus all --ipc=host vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B --device cpu"
    found = lint_texts([("start.sh", line)], LintOptions()).findings
    assert [each.rule for each in found if "--device" in each.message] == ["flag-removed"]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("python3 -m vllm.entrypoints.openai.api_sever --model Qwen/Qwen3-8B", "a.sh"),
        (
            "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai:v0.11.0\n"
            "    command: [python3, -m, vllm.entrypoints.openai.api_sever]\n    args: [--model, Qwen/Qwen3-8B]\n",
            "pod.yaml",
        ),
    ],
)
def test_a_module_of_vllm_that_is_misspelled_is_an_error(text, path):
    assert judged(text, path) == [("module-unknown", "error")]
    assert ("module-unknown", "error") not in judged(text.replace("openai.api_sever", "openai.run_batch"), path)


@pytest.mark.parametrize(
    ("backend", "found"),
    [("FLASHY", ["env-meaning"]), ("FLASH_ATTENTION", ["env-meaning"]), ("FLASH_ATTN_VLLM_V1", []), ("flashinfer", [])],
)
def test_an_attention_backend_that_no_release_has_is_a_warning(backend, found):
    line = f"docker run --gpus all -e VLLM_ATTENTION_BACKEND={backend} vllm/vllm-openai:v0.10.2 --model Qwen/Qwen3-8B"
    assert [rule for rule, _ in judged(line)] == found


@pytest.mark.parametrize("name", ["VLLM_LOG_LEVEL", "VLLM_MY_OWN_SWITCH"])
def test_a_variable_that_no_release_reads_is_reported_unless_the_files_read_it(name):
    assert judged(f"export {name}=1\n{SERVE}") == [("env-unknown", "warning")]
    assert judged(f"export {name}=1\n{SERVE} --port ${name}") == []
    assert judged(f"{name}=1 {SERVE}", "start.sh", ("entry.py", f'import os\nos.environ["{name}"]\n')) == []
    assert judged(f"docker run -e {name}=1 acme/vllm-fork:prod --model Qwen/Qwen3-8B") == []


GUARDED = """\
start() {{
  if supports_arg "{tested}"; then
    ARGS+=(--swap-space 4 --max-num-seqs 8)
  fi
  vllm serve Qwen/Qwen3-8B "${{ARGS[@]}}"
}}
start
"""


@pytest.mark.parametrize(("tested", "found"), [("--swap-space", []), ("--other", [("flag-removed", "error")])])
def test_a_flag_that_the_script_asks_vllm_for_first_is_no_mistake(tested, found):
    assert judged(f"pip install vllm==0.20.0\n{GUARDED.format(tested=tested)}") == found


def test_two_flags_of_a_feature_that_no_release_has_are_a_forks():
    assert judged(f"{SERVE} --tiered-moe-backend uva --tiered-moe-strict --my-profile x") == []
    assert judged(f"{SERVE} --kv-cache-size 4 --kv-cache-place x") != []  # vLLM has flags about the KV cache


def test_the_version_of_a_distribution_is_no_month():
    install = "RUN git clone https://github.com/vllm-project/vllm && pip install -e vllm\n"
    file = f"FROM nvidia/cuda:12.9.1-devel-ubuntu24.04\n{install}CMD {SERVE} --chat-template-content-format openai"
    assert judged(file, "Dockerfile") == []


@pytest.mark.parametrize(("limit", "expected"), [("4Gi", "warning"), ("7Gi", "warning"), ("8Gi", "note")])
def test_the_worker_of_one_rank_is_the_engines_own_process(limit, expected):
    given = pod("vllm/vllm-openai:v0.9.0").replace('"--tensor-parallel-size", "4", ', "")
    limited = given.replace('nvidia.com/gpu: "4"', f'nvidia.com/gpu: "1", memory: {limit}')
    assert f"memory: {limit}" in limited
    findings = lint_texts([("pod.yaml", limited)], LintOptions()).findings
    told = [each.severity for each in findings if each.rule == "host-memory"]
    assert told == [expected]  # the processes, or at 8Gi the checkpoint, which one rank reads once, are larger


def test_a_patch_without_an_image_may_have_its_shared_memory_from_its_base():
    assert ("shm-missing", "warning") in judged(pod("vllm/vllm-openai:v0.9.0"), "pod.yaml")
    assert judged(pod("").replace("    image: \n", ""), "patch.yaml") == []


MAKEFILE = """\
MODEL ?= Qwen/Qwen3-8B   # a comment
stop:
\t@pkill -f "vllm serve $(MODEL)"
serve:
\t-CUDA_VISIBLE_DEVICES=0 vllm serve "$(MODEL)" \\
\t--max-model-len 4096 \\
\t--swap-space 4
"""


def test_recipes_of_a_makefile_are_read_with_its_variables():
    report = lint_texts([("Makefile", MAKEFILE)], LintOptions())
    assert [(each.place.line, each.rule) for each in report.findings] == [(3, "kill-by-pattern"), (7, "flag-removed")]


CUT_OFF = {
    "a comment": f"{SERVE} \\\n  # --enforce-eager \\\n  --port 8001\n",
    "no backslash": f"{SERVE}\n  --port 8001\n",
    "a folded block": 'services:\n  v:\n    command: >\n     sh -c "\n      vllm serve m\n       --port 8001\n     "\n',
}


@pytest.mark.parametrize("how", CUT_OFF)
def test_flags_behind_a_line_break_do_not_reach_vllm(how):
    path = "compose.yaml" if how == "a folded block" else "start.sh"
    assert judged(CUT_OFF[how], path) == [("flag-cut-off", "error")]


@pytest.mark.parametrize("top", ['{{- include "labels" . }}\n', ""])
def test_flags_behind_an_action_of_a_template_are_judged(top):
    script = f"{top}run:\n  script: |\n      {SERVE} \\\n      {{{{- if .Values.x }}}}\n      --swap-space 4\n"
    report = lint_texts([("templates/a.yaml", script)], LintOptions())
    assert [each.rule for each in report.findings] == ["flag-removed"]


def test_a_folded_command_has_the_lines_of_its_flags():
    report = lint_texts(
        [("values.yaml", f'cli: "{SERVE}\n      --max-model-len 4096\n      --swap-space 4"\n')], LintOptions()
    )
    assert [(each.place.line, each.place.column) for each in report.findings] == [(3, 7)]


@pytest.mark.parametrize(
    "command", ["fuser -k /dev/nvidia*", "kill -9 $(nvidia-smi --query-compute-apps=pid)", "pkill -f uvicorn"]
)
def test_every_process_on_the_gpus_is_a_pattern_too(command):
    assert judged(f"{SERVE} &\n{command}\n") == [("kill-by-pattern", "warning")]


def test_a_variable_that_is_only_passed_on_is_not_read():
    service = "image: vllm/vllm-openai:v0.19.0, command: --model m, environment: {VLLM_MINE: '${VLLM_MINE}'}"
    compose = f"services:\n  v: {{{service}}}\n"
    assert judged(compose, "compose.yaml") == [("env-unknown", "warning")]
    assert judged(compose.replace("--model m", "'--model ${VLLM_MINE}'"), "compose.yaml") == []


SERVICE = "apiVersion: v1\nkind: Service\nmetadata: {name: vllm}\nspec: {ports: [{port: 80}]}\n"


def test_a_service_called_vllm_sets_a_variable_that_vllm_refuses():
    assert judged(SERVICE, "s.yaml") == [("service-named-vllm", "warning")]
    assert judged(SERVICE.replace("{name: vllm}", "{name: vllm-server}"), "s.yaml") == []
    assert judged(SERVICE + "---\napiVersion: v1\nkind: Pod\nspec: {enableServiceLinks: false}\n", "s.yaml") == []
    assert judged(SERVICE + '---\napiVersion: v1\nkind: ConfigMap\ndata:\n  VLLM_PORT: "8000"\n', "s.yaml") == []


def test_a_mapping_of_flags_is_a_command_line():
    profile = (
        "image: vllm/vllm-openai:v0.21.0\nargs:\n  --model: m\n  --trust-remote-code: true\n  --chunked-size: 32\n"
    )
    assert judged(profile, "profile.yaml") == [("flag-unknown", "error")]


def test_a_key_that_a_config_class_does_not_have_is_refused_for_every_model():
    command = SERVE.replace("Qwen/Qwen3-8B", "/models/mine") + " --speculative-config '{\"n_predict\": 1}'"
    assert judged(command) == [("flag-value", "warning")]
    assert judged(command.replace("n_predict", "num_speculative_tokens")) == []
    # Releases before 0.32 have the key.
    assert judged(f"{SERVE} --kv-transfer-config '{{\"kv_rank\": 0}}'") == []


def test_what_an_unknown_release_may_refuse_is_a_note():
    exported = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    words = f"{exported}{SERVE} --kv-offloading-size 4"
    assert "allocator-breaks" not in dict(judged(words))
    assert ("allocator-breaks", "error") in judged(f"pip install vllm==0.22.0\n{words}")


def test_a_model_without_the_version_in_its_name_is_none():
    assert judged("vllm serve mistralai/Mistral-7B-Instruct\n") == [("flag-value", "warning")]
    assert judged("vllm serve mistralai/Mistral-7B-Instruct-v0.3\n") == []
    assert judged("vllm serve BAAI/bge-large-en\n") == []


def test_a_server_that_is_a_mock_is_not_judged():
    text = container(", livenessProbe: {periodSeconds: 20, httpGet: {path: /health}}", image="acme/mock-vllm:1")
    assert judged(text, "pod.yaml") == []


def test_a_user_that_changes_needs_folders_of_systemd():
    text = UNIT.replace("[Service]", "[Service]\nDynamicUser=yes")
    assert judged(text, "a.service") == [("unit-sandbox", "warning")]
    assert judged(text.replace("ExecStart", "CacheDirectory=vllm\nExecStart"), "a.service") == []


def test_a_probe_that_begins_after_days_kills_no_start():
    text = container(", livenessProbe: {initialDelaySeconds: 300000, httpGet: {path: /health, port: 8000}}")
    found = lint_texts([("a.yaml", text.replace("Qwen/Qwen3-8B", "org/m"))], LintOptions()).findings
    (message,) = (each.message for each in found if each.rule == "start-too-short")
    assert "hangs late" in message


def test_ranks_that_ray_may_have_on_several_nodes_share_no_ipc_handles():
    exported = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    pinned = f"pip install vllm==0.22.0\n{exported}"
    assert judged(f"{pinned}{SERVE} -tp 2") == [("allocator-breaks", "warning")]
    assert judged(f"{pinned}{SERVE} -tp 2 --enforce-eager") == []
    assert judged(f"{pinned}{SERVE} -tp 2 --distributed-executor-backend ray") == []
    assert judged(f"{pinned}RAY_ADDRESS=10.0.0.1:6379 {SERVE} -tp 2") == []


def test_variables_of_another_build_are_its_own():
    recipe = f"container: ghcr.io/a/vllm-rocm:commit-1\nenv: {{VLLM_MINE: '1'}}\ncommand: |\n  {SERVE}\n"
    assert judged(recipe, "recipe.yaml") == []
    assert judged(recipe.replace("container: ghcr.io/a/vllm-rocm:commit-1\n", ""), "recipe.yaml") == [
        ("env-unknown", "warning")
    ]


@pytest.mark.parametrize(("name", "found"), [("VLLM_DISABLE_CUSTOM_ALL_REDUCE", 1), ("VLLM_OF_THIS_BUILD", 0)])
def test_a_variable_that_is_called_like_a_flag_is_read_by_no_build(name, found):
    run = f"docker run --gpus all -e {name}=1 nvcr.io/nvidia/vllm:25.12-py3 {SERVE}"
    assert judged(run) == [("env-unknown", "warning")] * found


@pytest.mark.parametrize(("day", "found"), [("2025-05-27-v1", 0), ("20250527", 0), ("2026-05-27", 1)])
def test_the_day_in_a_tag_tells_the_release(day, found):
    run = f"docker run --gpus all lmcache/vllm-openai:{day} Qwen/Qwen3-8B --disable-log-requests"
    findings = lint_texts([("start.sh", run)], LintOptions()).findings
    assert sum(each.rule == "flag-removed" for each in findings) == found


def service(image="vllm/vllm-openai:v0.19.0", command="--model Qwen/Qwen3-8B", more="", name="vllm-a", gpus="count: 1"):
    devices = f"{{resources: {{reservations: {{devices: [{{driver: nvidia, capabilities: [gpu], {gpus}}}]}}}}}}"
    return f"  {name}: {{image: '{image}', command: {command}, deploy: {devices}{more}}}\n"


def container(more="", image="vllm/vllm-openai:v0.19.0", args='"--model", "Qwen/Qwen3-8B"', gpu="nvidia.com/gpu: 1"):
    pod = f'{{containers: [{{name: v, image: "{image}", args: [{args}], resources: {{limits: {{{gpu}}}}}{more}}}]}}'
    return f"apiVersion: v1\nkind: Pod\nmetadata: {{name: x}}\nspec: {pod}\n"


HEALTH = ', healthcheck: {{start_period: 30m, test: ["CMD", "{}", "http://localhost:{}/health"]}}'
UNIT = f"[Service]\nExecStart=/usr/bin/{SERVE}\n"
TOOLS = "vllm serve Qwen/Qwen3.5-9B --enable-auto-tool-choice --tool-call-parser qwen3_xml"
UNSEEN = {
    "a probe of the server's port": ("compose.yaml", service(more=HEALTH.format("curl", 8000)), []),
    "a health check that asks two programs": (
        "Dockerfile",
        "FROM vllm/vllm-openai:v0.20.0\n"
        "HEALTHCHECK CMD curl -f http://localhost:7860/ && curl -f http://localhost:8000/health\n"
        'CMD ["Qwen/Qwen3-8B"]\n',
        [],
    ),
    "a port that comes with the script's arguments": (
        "pod.yaml",
        container(
            ', command: [bash, -c, "vllm serve Qwen/Qwen3-8B $0 $@"]'
            ", readinessProbe: {httpGet: {path: /health, port: 8080}}",
            args='"--port=8080"',
        ),
        [],
    ),
    "a probe of another port": ("compose.yaml", service(more=HEALTH.format("curl", 8001)), [("probe-port", "error")]),
    "a probe of a port by its name": (
        "pod.yaml",
        container(", ports: [{name: h, containerPort: 9000}], readinessProbe: {httpGet: {path: /health, port: h}}"),
        [("probe-port", "error")],
    ),
    "python in a probe": (
        "compose.yaml",
        service(more=HEALTH.format("python", 8000)),
        [("container-command", "error")],
    ),
    "a program for an image that serves": (
        "compose.yaml",
        service(command="vllm serve Qwen/Qwen3-8B"),
        [("container-command", "error")],
    ),
    "the same with an entry point of its own": (
        "compose.yaml",
        service(command="vllm serve Qwen/Qwen3-8B", more=", entrypoint: []"),
        [],
    ),
    "serve for an image that serves": (
        "pod.yaml",
        container(args='"serve", "Qwen/Qwen3-8B"'),
        [("container-command", "error")],
    ),
    "a list of words with a variable of the shell": (
        "Dockerfile",
        'FROM vllm/vllm-openai:v0.19.0\nENV MODEL=Qwen/Qwen3-8B\nCMD ["--model", "${MODEL}"]\n',
        [("container-command", "error")],
    ),
    "a line with a variable of the shell": (
        "Dockerfile",
        "FROM cuda\nENV MODEL=Qwen/Qwen3-8B\nRUN pip install vllm==0.19.0\nCMD vllm serve $MODEL\n",
        [],
    ),
    "no GPU": ("pod.yaml", container(gpu="memory: 32Gi"), [("gpus-too-few", "warning")]),
    "a GPU of a claim": ("pod.yaml", container(gpu="memory: 32Gi}, claims: [{name: gpu}]").replace("]}}", "]}"), []),
    "a GPU beyond those of the container": (
        "compose.yaml",
        service(more=', environment: ["CUDA_VISIBLE_DEVICES=1"]'),
        [("gpus-too-few", "error")],
    ),
    "more GPUs than ranks": ("compose.yaml", service(gpus="device_ids: ['0', '1']"), [("gpus-idle", "warning")]),
    "two servers on one GPU": ("compose.yaml", service() + service(name="b"), []),
    "two servers on two GPUs": (
        "compose.yaml",
        service(gpus="device_ids: ['0']") + service(name="b", gpus="device_ids: ['1']"),
        [],
    ),
    "two servers of two profiles": (
        "compose.yaml",
        service(more=", profiles: [a]") + service(name="b", more=", profiles: [b]"),
        [],
    ),
    "a service that is built": (
        "compose.yaml",
        service(command="--model Qwen/Qwen3-8B --max-modl-len 4096").replace(
            "image: 'vllm/vllm-openai:v0.19.0'", "build: ."
        ),
        [("flag-unknown", "error")],
    ),
    "a config in JSON": ("a.sh", f"{SERVE} --config /etc/vllm.json", [("flag-value", "error")]),
    "a length beyond the model's": ("a.sh", f"{SERVE} --max-model-len 999999", [("does-not-fit", "warning")]),
    "the same, and a variable elsewhere": (
        "a.sh",
        f"{SERVE} --max-model-len 999999 --served-model-name $NAME",
        [("does-not-fit", "warning")],
    ),
    "a variable that may hold more": ("a.sh", f"{SERVE} --max-model-len 999999 $MORE", []),
    "a misspelled model": ("a.sh", "vllm serve Qwen/Qwen2.5-7B-Instrct", [("flag-value", "warning")]),
    "a share without room": ("a.sh", f"{SERVE} --gpu-memory-utilization 0.98", []),
    "a share beside a size": (
        "a.sh",
        f"{SERVE} --gpu-memory-utilization 0.9 --kv-cache-memory-bytes 4G",
        [("flag-ignored", "warning")],
    ),
    "LoRA without an adapter": ("a.service", UNIT.replace("-8B", "-8B --enable-lora"), [("flag-ignored", "warning")]),
    "LoRA of the API": (
        "a.service",
        UNIT.replace("-8B", "-8B --enable-lora") + "Environment=VLLM_ALLOW_RUNTIME_LORA_UPDATING=1\n",
        [],
    ),
    "a sandbox": ("a.service", f"{UNIT}PrivateDevices=yes\n", [("unit-sandbox", "error")]),
    "a tool parser": ("a.sh", TOOLS.replace("qwen3_xml", "hermes"), [("tool-parser", "warning")]),
    "its own tool parser": ("a.sh", TOOLS, []),
    "a port of vLLM's own": ("a.sh", f"VLLM_PORT=8000 {SERVE}", []),
    "a variable that is not exported": ("a.sh", f"OMP_NUM_THREADS=8\n{SERVE}", [("env-meaning", "warning")]),
    "a variable that the script uses": ("a.sh", f"HF_HOME=/x\nmkdir $HF_HOME\n{SERVE}", []),
    "a key twice": ("pod.yaml", container(", image: b"), [("key-repeated", "warning")]),
    "a task of SkyPilot": (
        "task.yaml",
        'run: |\n  pkill -f vllm\n  "$ENV/bin/python" \\\n    -m vllm.entrypoints.openai.api_server --model m\n',
        [("kill-by-pattern", "warning")],
    ),
    "a variable from a ConfigMap": (
        "pod.yaml",
        container(
            ", env: [{name: N, valueFrom: {configMapKeyRef: {name: c, key: n}}}]", args='"--max-num-seqs", "$(N)"'
        )
        + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\ndata: {n: many}\n",
        [("flag-value", "error")],
    ),
    "a parser that nothing asks for": (
        "a.sh",
        "vllm serve Qwen/Qwen3.5-9B --tool-call-parser qwen3_xml",
        [("flag-ignored", "warning")],
    ),
    "a method that the checkpoint does not have": (
        "a.service",
        UNIT.replace("-8B", "-8B --quantization awq"),
        [("does-not-fit", "warning")],
    ),
    "vLLM's demonstration": (
        "a.sh",
        "python3 -m vllm.entrypoints.api_server --model Qwen/Qwen3-8B",
        [("module-unknown", "warning")],
    ),
    "a variable of an image that is built": (
        "compose.yaml",
        service("mine:1", more=", build: ., environment: {VLLM_USE_V1: 1}"),
        [],
    ),
    "a variable of the script's own": ("a.sh", f"CUDA_FOUND=true\n{SERVE}", []),
    "a key on both sides of an if": (
        "d.yaml",
        "apiVersion: v1\nkind: Pod\nspec:\n{{- if .a }}\n  x: vllm\n{{- else }}\n  x: b\n{{- end }}\n",
        [],
    ),
    "a vendor's image of a month": (
        "a.sh",
        f"docker run --gpus all -e VLLM_USE_V1=1 nvcr.io/nvidia/vllm:25.11-py3 {SERVE}",  # it holds 0.11.0
        [],
    ),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_what_lint_did_not_see_in_the_files_of_a_blind_round(what):
    path, text, expected = UNSEEN[what]
    found = lint_texts([(path, f"services:\n{text}" if path == "compose.yaml" else text)], LintOptions()).findings
    assert [(each.rule, each.severity) for each in found if each.severity != "note"] == expected


def test_a_published_server_without_a_key_a_probe_or_a_volume_is_noted():
    more = ", env: [{name: VLLM_SERVER_DEV_MODE, value: '1'}], ports: [{containerPort: 8000}]"
    deployment = container(more).replace("kind: Pod", "kind: Deployment")
    public = "---\napiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {type: LoadBalancer}\n"
    found = lint_texts([("d.yaml", deployment + public)], LintOptions()).findings
    found = [each for each in found if each.rule != "manifest-refused"]  # a Deployment has a template
    assert {each.rule for each in found} == {*("probe-missing", "api-open", "cache-lost", "env-meaning")}
    assert {finding.severity for finding in found} == {"note"}
    kept = container(", volumeMounts: [{name: c, mountPath: /root/.cache}]").replace(
        "spec: {", "spec: {volumes: [{name: c}], "
    )
    assert {finding.rule for finding in lint_texts([("d.yaml", kept)], LintOptions()).findings} == {"probe-missing"}


TWO_GPUS = pod("vllm/vllm-openai:v0.9.0").replace('"--tensor-parallel-size", "4", ', "")


@pytest.mark.parametrize(
    ("beside", "is_told"),
    [
        ("# two machines of eight cards\n", True),
        ("# one card, time-sliced into eight\n", False),
        ("# a DGX Spark\n", False),
    ],
)
def test_slices_of_one_card_are_no_idle_gpus(beside, is_told):
    given = judged(TWO_GPUS, "a/pod.yaml", ("a/notes.yaml", f"{beside}kind: Namespace\n"))
    assert (("gpus-idle", "warning") in given) == is_told
    assert ("gpus-idle", "warning") in judged(TWO_GPUS, "a/pod.yaml", ("b/notes.yaml", f"{beside}kind: Namespace\n"))


def test_listed_cards_of_compose_are_no_slices():
    three = service(command="--model Qwen/Qwen3-8B -tp 2", gpus="device_ids: ['0', '1', '2']")
    assert ("gpus-idle", "warning") in judged(f"# a DGX Spark has one\nservices:\n{three}", "compose.yaml")


def test_gpus_are_not_idle_where_the_flag_that_uses_them_is_refused():
    one_item = pod("vllm/vllm-openai:v0.9.0").replace('"--tensor-parallel-size", "4"', '"--tensor-parallel-size 4"')
    assert [rule for rule, _ in judged(one_item, "pod.yaml")] == ["flag-unknown"]


@pytest.mark.parametrize(
    ("image", "release"),
    [
        ("acme/vllm:r36.4-cu129-24.04", None),
        ("acme/vllm:r36.4-0.9.1", None),
        ("acme/vllm:0.9.1-gpu", "0.9.1"),
        ("acme/vllm:cu129-v0.9.1", "0.9.1"),
        ("acme/server:r36-vllm0.9.1", "0.9.1"),
    ],
)
def test_the_tag_of_another_repository_is_a_release_only_where_it_is_spelled_whole(image, release):
    assert image_release(image) == release
    assert latest_build_day(image) == ""


def test_a_value_that_a_template_fills_in_is_one_word():
    assert judged(f"{SERVE} --max-model-len {{{{ max_len }}}} --dtype {{{{ dtype }}}}\n", "start.sh.j2") == []


COMPOSE = """\
services:
  vllm:
    image: vllm/vllm-openai:v0.20.0
    ports: ["127.0.0.1:8000:8000"]
    command: --model org/m SPARE
    volumes: ["VOLUME"]
"""


@pytest.mark.parametrize(
    ("volume", "count"), [("C:/models:/models", 0), ("C:\\\\models:/models", 0), ("data:/models", 1)]
)
def test_a_drive_of_windows_is_no_named_volume(volume, count):
    text = COMPOSE.replace("VOLUME", volume).replace(" SPARE", "")
    assert [rule for rule, _ in judged(text, "compose.yaml")].count("manifest-refused") == count


@pytest.mark.parametrize(("env", "count"), [("MORE=--seed 1\n", 0), ("OTHER=1\n", 1)])
def test_a_variable_that_the_env_file_beside_sets_is_not_empty(tmp_path, env, count):
    (tmp_path / ".env").write_text(env)
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE.replace("SPARE", '${MORE:-""}').replace("VOLUME", "/models:/models"))
    assert [rule for rule, _ in judged(file.read_text(), str(file))].count("container-command") == count


def test_equal_notes_of_a_file_are_one_that_names_the_other_lines():
    notes = lint_texts([("a.sh", f"{SERVE} --trust-remote-code\n" * 3)], LintOptions()).findings
    told = [each for each in notes if each.rule == "code-trusted"]
    assert len(told) == 1
    assert told[0].message.endswith("(also at line 2, 3)")


LINES = {
    "env-meaning": (
        "a.yaml",
        "kind: Pod\nimage: vllm\nenv:\n- name: LD_LIBRARY_PATH\n  value: ${LD_LIBRARY_PATH}:/lib\n",
    ),
    "cache-lost": ("stop.sh", "# vllm\ndocker compose down --volumes\n"),
    "host-memory": (".env", "VLLM_IMAGE=a\nHF_CACHE_DIR=/dev/shm/hub\n"),
    "container-command": ("Dockerfile", 'FROM vllm/vllm-openai:v0.20.0\nENTRYPOINT ["python", "-m", "x"]\n'),
    "shm-missing": ("a.yaml", "kind: Pod\nimage: vllm/vllm-openai:v0.20.0\nemptyDir: {medium: Memory}\n"),
    "flag-value": ("a.sh", "vllm serve org/m --limit-mm-per-prompt '{\"images\": 4}'\n"),
    "secret-written": ("a.sh", "docker build --build-arg HF_TOKEN=$HF_TOKEN -t vllm .\n"),
}


@pytest.mark.parametrize("rule", LINES)
def test_a_line_that_is_a_mistake_wherever_it_stands_is_noted(rule):
    beside = ("b.yaml", "services: {}\nvolumes:\n  cache: {}\n")
    findings = lint_texts([LINES[rule], beside], LintOptions()).findings
    severity = "warning" if rule == "container-command" else "note"
    assert (rule, severity) in {(each.rule, each.severity) for each in findings}


DOCKERFILE = "FROM nvidia/cuda:12.4.1-devel-ubuntu22.04\nRUN pip install vllm==0.20.0\nCMD %s\n"
ENTERED = "services:\n  a:\n    image: vllm/vllm-openai:v0.20.0\n    entrypoint: [vllm]\n    command: %s\n"
MISTYPED = {
    "a letter too few": ("vllm serv Qwen/Qwen3-8B\n", "a.sh"),
    "a letter too many": ("exec uv run vllm server --model Qwen/Qwen3-8B\n", "a.sh"),
    "the word of another program": ("vllm run Qwen/Qwen3-8B\n", "a.sh"),
    "a model alone": ("nohup vllm Qwen/Qwen3-8B --port 80 &\n", "a.sh"),
    "flags alone": ("sudo vllm --model Qwen/Qwen3-8B\n", "a.sh"),
    "an image that is built": (DOCKERFILE % '["vllm", "server", "Qwen/Qwen3-8B"]', "Dockerfile"),
    "a service": (ENTERED % "[server, Qwen/Qwen3-8B]", "compose.yaml"),
}


@pytest.mark.parametrize("where", MISTYPED)
def test_a_command_that_vllm_does_not_have_is_an_error(where):
    assert judged(*MISTYPED[where]) == [("module-unknown", "error")]


@pytest.mark.parametrize(
    "text",
    [
        "vllm bench serve --model Qwen/Qwen3-8B",
        "vllm --version",
        "docker logs vllm --follow",
        "docker run --gpus all --name vllm --shm-size 4g vllm/vllm-openai:v0.20.0 Qwen/Qwen3-8B",
        "kubectl run vllm --port=8000 --image=vllm/vllm-openai:v0.20.0",
        "./vllm start",
    ],
)
def test_what_is_called_vllm_beside_its_program_is_no_mistyped_command(text):
    assert judged(text) == []
