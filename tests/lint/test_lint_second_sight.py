"""Mistakes around a server that contradict, open or hide something: a wrong and a fine text of each."""

import pytest

from legroom.lint.linter import LintOptions, lint_files, lint_texts

SCRIPT = "#!/bin/bash\n"
COMPOSE = "services:\n  vllm:\n    image: acme/vllm:1\n"
ISVC = "# vllm\nkind: InferenceService\nspec:\n  predictor:\n    model:\n      %s\n"
WITH = "# vllm\n{{ with .Values.a }}\n{{ toYaml %s }}\n{{ end }}\n"
BOTH = "# vllm\n{{ if .Values.key }}\na: b\n{{ else }}\na: %s\n{{ end }}\n"
DEPLOYED = "kind: Deployment\nspec:\n  containers:\n  - image: vllm/vllm-openai:v0.20.0\n    %s: {a: b}\n"
LOCAL = "# vllm\nkind: Pod\nspec:\n  containers:\n  - image: localhost/vllm-a:latest\n    %s\n"
IMAGE = "FROM vllm/vllm-openai:v0.20.0\n"
LIMIT = "# vllm\nresources:\n  limits:\n    nvidia.com/gpu: 1\n    cpu: %d\n"
STRATEGY = "name: vllm\nstrategy:\n  type: RollingUpdate\n  rollingUpdate:\n    maxSurge: %d\n"
PAIRS = {
    "a fixed port": ("a.sh", f"{SCRIPT}#SBATCH -N1\nPORT=8000\nvllm serve m --port $PORT\n", "", "command-doubtful"),
    "an annotation that KServe writes": (
        "a.yaml",
        ISVC % "a: b\n  autoscaling.knative.dev/minScale: 0",
        ISVC % "modelFormat: {}\n  minReplicas: 0",
        "flag-ignored",
    ),
    "a key of another object": (
        "a.yaml",
        "# vllm\nautoscaling.knative.dev/scaleToZeroGracePeriod: 30s\n",
        "# vllm\nautoscaling.knative.dev/metric: rps\n",
        "flag-ignored",
    ),
    "quotes around a condition": (
        "a.yaml",
        "# vllm\n{{ if not (quote .Values.a | empty) }}\n{{ end }}\n",
        "# vllm\n{{ if .Values.a }}\n{{ end }}\n",
        "command-doubtful",
    ),
    "two equal branches": ("a.yaml", BOTH % "b", BOTH % "c", "command-doubtful"),
    "values inside with": ("a.yaml", WITH % ".Values.a", WITH % "$.Values.a", "command-doubtful"),
    "a rollout that waits": ("a.yaml", STRATEGY % 1, STRATEGY % 0, "rollout-stuck"),
    "one of two GPUs": (".env", "# vllm\nCUDA_VISIBLE_DEVICES=0,1\nTP_SIZE=1\n", "TP_SIZE=2\n", "gpus-idle"),
    "a pod without a GPU": ("a.yaml", DEPLOYED % "env", DEPLOYED % "resources", "gpus-too-few"),
    "a service without a GPU": (
        "compose.yml",
        f"{COMPOSE}    command: vllm serve m\n",
        f"{COMPOSE}    command: vllm serve m\n    gpus: all\n",
        "gpus-too-few",
    ),
    "ranks of docker run": (
        "a.sh",
        f"{SCRIPT}docker run -e TP=4 acme/vllm:1\n",
        f"{SCRIPT}docker run -e TP=4 --ipc=host acme/vllm:1\n",
        "shm-missing",
    ),
    "too many sequences": (".env", "VLLM_X=1\nMAX_NUM_SEQS=2048\n", "VLLM_X=1\nMAX_NUM_SEQS=256\n", "flag-costly"),
    "a small limit of cores": ("a.yaml", LIMIT % 2, LIMIT % 16, "flag-costly"),
    "a build of many jobs": (
        "Dockerfile",
        "FROM a\nENV MAX_JOBS=64\nRUN pip install vllm==0.20.0\n",
        "FROM a\nRUN apt-get install gcc && pip install vllm==0.20.0\n",
        "command-doubtful",
    ),
    "an image of this machine": ("a.yaml", LOCAL % "a: b", LOCAL % "imagePullPolicy: Never", "path-missing"),
    "a log that hides": (
        "a.sh",
        f"{SCRIPT}export VLLM_LOGGING_LEVEL=ERROR\nvllm serve m\n",
        f"{SCRIPT}export VLLM_LOGGING_LEVEL=INFO\nvllm serve m\n",
        "env-meaning",
    ),
    "a module of another program": (
        "a.yaml",
        "command: python -m vllm.entrypoints.worker\n",
        "command: python -m vllm.entrypoints.openai.api_server\n",
        "module-unknown",
    ),
    "a flag of another program": (
        "a.sh",
        'CMD="vllm serve m --enable-metrics"\n',
        'CMD="sglang serve m --enable-metrics" # or vllm serve\n',
        "flag-unknown",
    ),
    "no tokenizer": (".env", "VLLM_A=--skip-tokenizer-init\n", "VLLM_A=--tokenizer-mode auto\n", "command-doubtful"),
    "a volume without a source": (
        "compose.yml",
        f"{COMPOSE}    volumes:\n      - ${{WEIGHTS}}:/models\n",
        f"{COMPOSE}    volumes:\n      - ${{WEIGHTS:-./w}}:/models\n",
        "path-missing",
    ),
    "every GPU hidden": (
        "compose.yml",
        f"{COMPOSE}    environment:\n      - CUDA_VISIBLE_DEVICES=${{GPU:-}}\n",
        f"{COMPOSE}    environment:\n      - CUDA_VISIBLE_DEVICES=${{GPU:-0}}\n",
        "gpus-too-few",
    ),
    "a variable that is not exported": (
        "a.sh",
        "# vllm\nAPPTAINER_TMPDIR=/tmp/a\nvllm serve m\n",
        "export APPTAINER_TMPDIR=/tmp/a\nvllm serve m\n",
        "env-meaning",
    ),
    "an instruction as a variable": (
        "Dockerfile",
        f"{IMAGE}ENV A=$WORKDIR/a\n",
        f"{IMAGE}ARG WORKDIR=/a\nENV A=$WORKDIR/a\n",
        "env-meaning",
    ),
    "rights for everybody": (
        "Dockerfile",
        f"{IMAGE}USER me\nRUN chmod -R 777 /models\n",
        f"{IMAGE}USER me\nRUN chmod -R 755 /models\n",
        "rights-wide",
    ),
    "a user without a home": (
        "a.sh",
        f"{SCRIPT}docker run --user $(id -u) acme/vllm:1\n",
        f"{SCRIPT}docker run --user $(id -u) -e HOME=/tmp acme/vllm:1\n",
        "command-doubtful",
    ),
    "the socket of Docker": (
        "compose.yml",
        f"{COMPOSE}    volumes: ['/var/run/docker.sock:/var/run/docker.sock']\n",
        f"{COMPOSE}    volumes: ['/var/run/a.sock:/var/run/a.sock']\n",
        "rights-wide",
    ),
    "the source tree as working folder": (
        "Dockerfile",
        "FROM a\nRUN git clone https://x/vllm\nWORKDIR /o/vllm\nCMD python -m vllm.entrypoints.openai.api_server\n",
        'FROM a\nRUN git clone https://x/vllm\nWORKDIR /o\nCMD ["vllm", "serve", "m"]\n',
        "command-doubtful",
    ),
    "a folder of root": (
        "Dockerfile",
        f"{IMAGE}ENV HF_HOME=/root/hf\nUSER me\n",
        f"{IMAGE}ENV HF_HOME=/home/me/hf\nUSER me\n",
        "rights-wide",
    ),
    "everything pruned": (
        "a.sh",
        "# vllm\nVLLM=1\ndocker system prune -af\n",
        "docker image prune\n",
        "command-doubtful",
    ),
    "a volume of Prometheus": (
        "a.yaml",
        "job: vllm\nimage: prom/prometheus:v3\nvolumes:\n  - name: d\n    emptyDir: {}\n",
        "job: vllm\nimage: prom/prometheus:v3\nvolumes:\n  - name: d\n    persistentVolumeClaim: {}\n",
        "cache-lost",
    ),
    "a check that asks no server": (
        "Dockerfile",
        f"{IMAGE}HEALTHCHECK CMD python3 -c 'import vllm'\n",
        f"{IMAGE}HEALTHCHECK CMD curl -f http://localhost:8000/health\n",
        "probe-missing",
    ),
    "a check of a missing page": (
        "compose.yml",
        f"{COMPOSE}    healthcheck:\n      test: curl -f http://localhost:8000/ \n",
        f"{COMPOSE}    healthcheck:\n      test: curl -f http://localhost:8000/health \n",
        "probe-path",
    ),
    "a unit that stays down": (
        "a.service",
        "[Service]\nExecStart=/bin/vllm serve /m\nRestart=no\n",
        "[Service]\nExecStart=/bin/vllm serve /m\nRestart=always\n",
        "restart-missing",
    ),
    "a container that stays down": (
        "a.sh",
        f"{SCRIPT}docker run -d acme/vllm:1\n",
        f"{SCRIPT}docker run -d --restart always acme/vllm:1\n",
        "restart-missing",
    ),
    "a wait without an end": (
        "a.sh",
        "vllm serve m &\nPID=$!\nuntil curl -s localhost:8000/health; do sleep 5; done\nwait\n",
        "vllm serve m &\nPID=$!\nuntil curl -s localhost:8000/health; do kill -0 $PID; done\nwait\n",
        "probe-missing",
    ),
    "code of every model": ("a.sh", "vllm serve $MODEL --trust-remote-code\n", "vllm serve $MODEL\n", "code-trusted"),
    "GPUs that Slurm names": (
        "a.sh",
        "#SBATCH -n1\nexport CUDA_VISIBLE_DEVICES=$(seq -s, 0 3)\nvllm serve m\n",
        "#SBATCH -n1\nvllm serve m\n",
        "env-meaning",
    ),
}


def said(*texts):
    return {(each.rule, each.severity): each.message for each in lint_texts(texts, LintOptions()).findings}


def rules(*texts):
    return {rule for rule, _ in said(*texts)}


@pytest.mark.parametrize(("path", "wrong", "fine", "rule"), PAIRS.values(), ids=PAIRS)
def test_a_line_that_is_wrong_is_named_and_a_fine_one_is_not(path, wrong, fine, rule):
    assert rule in rules((path, wrong))
    assert rule not in rules((path, fine))


def test_an_image_that_is_built_here_does_not_move():
    pulled = "services:\n  vllm:\n    image: acme/vllm-a:latest\n"
    assert "image-moving" in rules(("compose.yml", pulled))
    assert "image-moving" not in rules(("compose.yml", f"{pulled}    build: .\n"))
    run = f"{SCRIPT}IMAGE=my-vllm:latest\ndocker run $IMAGE\n"
    assert "image-moving" not in rules(("a.sh", run))
    assert "image-moving" in rules(("a.sh", run.replace("my-", "acme/my-")))


def test_a_removed_flag_is_a_warning_where_the_newest_release_runs():
    command = "vllm serve m --swap-space 4\n"
    assert ("flag-removed", "note") in said(("a.sh", command))
    build = "FROM a\nRUN git clone https://github.com/vllm-project/vllm.git\n"
    assert ("flag-removed", "warning") in said(("a.sh", command), ("Dockerfile", build))


def test_a_flag_in_a_variable_that_nothing_reads_is_not_judged():
    pod = "# vllm\nkind: Pod\nspec:\n  containers:\n  - image: acme/vllm:1\n    env:\n    - name: %s\n"
    pod += "      value: --max-model-len 9 --disable-log-requests\n"
    assert {"flag-removed", "not-understood"} <= rules(("a.yaml", pod % "OWN_WORDS"))
    assert rules(("a.yaml", pod % "VLLM_ARGS")).isdisjoint({"flag-removed", "not-understood"})


def test_a_key_that_is_handed_to_nothing_is_not_asked_for_in_its_file():
    assert "api-open" in rules((".env", "VLLM_API_KEY=\n"), ("compose.yml", f"{COMPOSE}    env_file: .env\n"))
    assert "api-open" not in rules((".env", "VLLM_API_KEY=\n"), ("compose.yml", COMPOSE))


def test_a_placeholder_of_an_example_is_meant_to_be_replaced():
    assert "path-missing" in rules(("a.sh", "vllm serve /path/to/model\n"))
    assert "path-missing" not in rules(("a.sh.example", "vllm serve /path/to/model\n"))


def test_an_ingress_to_no_service_of_its_folder_is_a_warning():
    pod = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: vllm}\nspec: {template: {spec: {containers: []}}}\n"
    backend = "{service: {name: vllm-api, port: {number: 80}}}"
    ingress = (
        f"kind: Ingress\nmetadata: {{name: vllm}}\nspec: {{rules: [{{http: {{paths: [{{backend: {backend}}}]}}}}]}}\n"
    )
    ingress = f"apiVersion: networking.k8s.io/v1\n{ingress}"
    assert ("port-unreachable", "warning") in said(("k/a.yaml", pod), ("k/i.yaml", ingress))
    assert ("port-unreachable", "note") in said(("b/a.yaml", pod), ("k/i.yaml", ingress))


@pytest.mark.parametrize(("model", "is_wrong"), [("other", True), ("org/m", False)])
def test_a_request_for_a_model_that_the_file_does_not_serve_is_a_warning(model, is_wrong):
    call = f"""curl localhost:8000/v1/completions -d '{{"model": "{model}"}}'"""
    text = f"```bash\nvllm serve org/m\n```\n```bash\n{call}\n```\n"
    assert (("model-name", "warning") in said(("a.md", text))) == is_wrong


def test_a_script_without_an_ending_is_read_and_a_template_is_not_passed_in_silence(tmp_path):
    (tmp_path / "start").write_text("#!/usr/bin/env bash\nvllm serve m --worker-use-ray\n")
    (tmp_path / "notes").write_text("vllm serve m --worker-use-ray\n")
    report = lint_files([str(tmp_path)], LintOptions())
    assert [path.rpartition("/")[2] for path in report.files] == ["start"]
    assert "flag-removed" in {each.rule for each in report.findings}
    template = "#!/bin/bash\n{% block run %}\nrun {{ image }} --model {{ model }}\n{% endblock %}\n"
    assert [each.path for each in lint_texts([("a.sh", template)], LintOptions()).skipped] == ["a.sh"]
    assert not lint_texts([("a.sh", "#!/bin/bash\nrun image --model m\n")], LintOptions()).skipped


def test_the_helpers_of_a_chart_tell_what_its_templates_include():
    route = "# vllm\nkind: Route\nmetadata: {name: a}\n"
    helpers = '{{ define "a" }}\nsecurity.opendatahub.io/enable-auth: "true"\n{{ end }}\n'
    assert "api-open" in rules(("templates/route.yaml", route))
    assert "api-open" not in rules(("templates/route.yaml", route), ("templates/_helpers.tpl", helpers))


def test_a_service_of_another_namespace_than_its_pods_is_named_also_where_it_does_not_name_vllm():
    pod = "# vllm\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: m, namespace: llm}\n"
    pod += "spec: {template: {metadata: {labels: {a: b}}}}\n"
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: m, namespace: %s}\nspec: {selector: {a: b}}\n"
    assert "port-unreachable" in rules(("a.yaml", pod), ("s.yaml", service % "default"))
    assert "port-unreachable" not in rules(("a.yaml", pod), ("s.yaml", service % "llm"))
