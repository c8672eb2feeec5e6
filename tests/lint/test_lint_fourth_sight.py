"""What another round of files that nobody had seen before showed: mistakes, and what only looks like one."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts

IMAGE = "vllm/vllm-openai:v0.20.0"


def found(*texts):
    """(rule, severity, line) of every finding in texts, each with its path."""
    findings = lint_texts(texts, LintOptions()).findings
    return [(each.rule, each.severity, each.place.line) for each in findings]


def rules(*texts):
    return {rule for rule, _, _ in found(*texts)}


RUN = f"#!/bin/sh\ndocker run -d %s --network host \\\n  -v /srv/hf:/root/.cache/%s {IMAGE} --model org/m\n"
OWN = "#!/bin/sh\nIMAGE_NAME=registry.example/our-vllm:3\ndocker run -d %s -p 80:8000 $IMAGE_NAME\n"
PROGRAM = "[program:llm]\ncommand=/opt/bin/vllm serve org/m %s\nstopwaitsecs=90\nkillasgroup=%s\n"
UNIT = "[Unit]\nAfter=network-online.target\n[Service]\nUser=%s\nWorkingDirectory=%s\nRestart=always\n"
UNIT += "ExecStart=/opt/vllm/bin/vllm serve org/m --port 8000\n[Install]\nWantedBy=multi-user.target\n"
START = "import subprocess\nimport sys\n\nlog = open('vllm.log', 'w')\n%s = subprocess.Popen(\n"
START += "    ['vllm', 'serve', 'org/m'],\n    stdout=%s,\n)\nsys.exit(%s)\n"
SCALER = "kind: ScaledObject\nspec:\n  triggers:\n  - type: prometheus\n    metricType: %s\n    metadata:\n"
SCALER += "      query: %s(vllm:num_requests_waiting)%s\n"
SCRAPED = "scrape_configs:\n  - job_name: %s\n    static_configs:\n      - targets: ['vllm:8000']\n"
CLAIMED = f"kind: Deployment\nspec:\n  template:\n    spec:\n%s      containers:\n      - image: {IMAGE}\n"
CLAIMED += "        securityContext: {runAsNonRoot: true}\n      securityContext:\n        runAsUser: %s\n"
CLAIMED += "      volumes: [{name: hub, persistentVolumeClaim: {claimName: hub}}]\n"
CONTAINER = (
    f"- name: server\n  community.docker.docker_container:\n    name: llm\n    image: {IMAGE}\n%s    command: org/m\n"
)
INGRESS = "kind: Ingress\nmetadata:\n  annotations:\n    alb.ingress.kubernetes.io/target-type: ip\n%s"
INGRESS += f"---\nkind: Pod\nspec: {{containers: [{{image: '{IMAGE}'}}]}}\n"
JOB = "#!/bin/bash\n#SBATCH --gres=gpu:2 %s\n%sCUDA_VISIBLE_DEVICES=%s\nvllm serve org/m\n"
READY = f"kind: Pod\nspec:\n  containers:\n  - image: {IMAGE}\n    readinessProbe:\n      httpGet:\n        path: %s\n"
TOKEN = f"kind: Pod\nspec:\n  containers:\n  - image: {IMAGE}\n    env:\n    - name: HF_TOKEN\n      value: %s\n"

LINES = [
    (
        "Makefile",
        f"up:\n\tdocker run --gpus all -v %s/m:/m {IMAGE} --model /m\n",
        "$(pwd)",
        "$(CURDIR)",
        "path-missing",
        2,
    ),
    ("run.sh", OWN, "--restart always", "--gpus all", "gpus-too-few", 3),
    ("run.sh", "%s/bin/sh\nvllm serve org/m\n", "!", "#!", "command-doubtful", 1),
    ("run.sh", "%s#!/bin/sh\nvllm serve org/m\n", "# Starts the server.\n\n", "", "command-doubtful", 3),
    (
        "run.sh",
        "#!/bin/bash\n%s\nexec vllm serve org/m \\\n  --port 80 2>&1 | tee a.log\n",
        "",
        "set -o pipefail",
        "stop-too-short",
        3,
    ),
    (
        "run.sh",
        "vllm -v\ncurl -s https://raw.githubusercontent.com/o/t/%s/get.sh | bash\n",
        "main",
        "v1.2",
        "image-moving",
        2,
    ),
    ("run.sh", "export GIT_SSL_NO_VERIFY=%s\nvllm serve org/m\n", "1", "0", "rights-wide", 1),
    ("supervisord.conf", PROGRAM, ("", "false"), ("", "true"), "unit-orphans", 4),
    (
        "start.py",
        START,
        ("server", "subprocess.PIPE", "server.wait()"),
        ("server", "log", "server.wait()"),
        "command-doubtful",
        7,
    ),
    (
        "start.py",
        START,
        ("server", "subprocess.PIPE", "1"),
        ("server", "subprocess.PIPE", "server.stdout.read()"),
        "command-doubtful",
        7,
    ),
    ("run.sh", "%s\nHUGGINGFACE_HUB_TOKEN=$HF_TOKEN vllm serve org/m\n", "", "export HF_TOKEN", "env-meaning", 2),
    ("scaler.yaml", SCALER, ("Value", "sum", " or vector(0)"), ("Value", "sum", ""), "rollout-stuck", 7),
    ("scaler.yaml", SCALER, ("AverageValue", "avg", ""), ("Value", "avg", ""), "rollout-stuck", 7),
    ("vllm.yaml", CLAIMED, ("", 1000), ("      # fsGroup: by the chart\n", 0), "path-missing", 9),
    ("pod.yaml", TOKEN, "''", "from-the-vault", "env-meaning", 7),
    ("prometheus.yml", SCRAPED, "'${JOB:-vllm}'", "vllm", "env-meaning", 2),
    ("a.service", UNIT, ("llm", "/root/llm"), ("llm", "/opt/llm"), "unit-sandbox", 5),
    ("a.service", UNIT, ("llm", "/root/llm"), ("root", "/root/llm"), "unit-sandbox", 5),
    ("tasks.yml", CONTAINER, "", "    restart_policy: always\n", "restart-missing", 2),
    ("ingress.yaml", INGRESS, "", "    alb.ingress.kubernetes.io/healthcheck-path: /health\n", "probe-path", 4),
    ("job.sh", JOB, ("", "export ", "0,1"), ("", "export ", "$SLURM_JOB_GPUS"), "env-meaning", 3),
    ("job.sh", JOB, ("--cpus-per-task=1", "A", 0), ("--cpus-per-task=8", "A", 0), "flag-costly", 2),
    (
        "run.sh",
        "export %s=/scratch/c\nvllm serve org/m\n",
        "VLLM_COMPILE_CACHE_DIR",
        "VLLM_CACHE_ROOT",
        "env-unknown",
        1,
    ),
    (
        "supervisord.conf",
        PROGRAM,
        ('--limit-mm-per-prompt {"images":4}', "1"),
        ('--limit-mm-per-prompt {"image":4}', "1"),
        "flag-ignored",
        2,
    ),
    ("run.sh", "vllm serve org/m --revision %s\n", "main", "4f2c9a1", "image-moving", 1),
    ("pod.yaml", READY, "/docs", "/health", "probe-path", 7),
    ("Makefile", "down:\n\tdocker %s vllm\n", "kill", "stop", "stop-too-short", 2),
    ("run.sh", RUN, ("--gpus all", "hf"), ("--gpus all", "huggingface"), "cache-lost", 3),
    (".env.example", "VLLM_API_KEY=%s\n", "change-me-please", "", "api-open", 1),
]
"""(path, text, what makes the mistake, what does not, rule, line)."""


@pytest.mark.parametrize(("path", "text", "wrong", "right", "rule", "line"), LINES)
def test_a_line_is_named_where_it_is_a_mistake(path, text, wrong, right, rule, line):
    assert (rule, line) in {(each[0], each[2]) for each in found((path, text % wrong))}
    assert (rule, line) not in {(each[0], each[2]) for each in found((path, text % right))}


def test_several_arrays_of_one_line_are_no_command():
    script = '#!/bin/bash\nMORE=(--seed 1) ENVS=() MODS=(--nope)\nvllm serve org/m "${MORE[@]}" "${MODS[@]}"\n'
    assert {each for each in found(("run.sh", script)) if each[0] == "flag-unknown"} == {("flag-unknown", "error", 2)}


@pytest.mark.parametrize(("host", "is_open"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_a_server_on_loopback_is_not_open_on_the_network_of_its_host(host, is_open):
    run = f"#!/bin/sh\nexec docker run --network host --gpus all {IMAGE} --model org/m --host {host}\n"
    assert ("api-open" in rules(("run.sh", run))) == is_open


@pytest.mark.parametrize(("chart", "is_named"), [("./charts/vllm", True), ("keda", False)])
def test_the_timeout_of_another_release_is_not_that_of_a_server(chart, is_named):
    releases = f'resource "helm_release" "one" {{\n  chart = "{chart}"\n  timeout = 300\n}}\n# beside vllm\n'
    assert ("start-too-short" in rules(("main.tf", releases))) == is_named


MODAL = "import modal\nimport subprocess\n\nFAST = %s\napp = modal.App('vllm')\n\n\n"
MODAL += "@app.function(gpu='H100')\n%sdef serve():\n    cmd = ['vllm', 'serve', 'org/m', '--host', '0.0.0.0']\n"
MODAL += "    cmd += ['--enforce-eager' if FAST else '--no-enforce-eager']\n"
MODAL += "    if FAST:\n        cmd += ['--nope']\n    subprocess.Popen(cmd)\n"


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_constant_of_the_program_decides_which_flags_it_gives(is_fast):
    told = rules(("app.py", MODAL % (is_fast, "")))
    assert ("eager" in told, "flag-unknown" in told) == (is_fast, is_fast)


@pytest.mark.parametrize(("decorator", "is_open"), [("@modal.web_server(8000)\n", True), ("", False)])
def test_a_function_of_modal_is_reached_through_its_endpoint_alone(decorator, is_open):
    assert ("api-open" in rules(("app.py", MODAL % (False, decorator)))) == is_open


@pytest.mark.parametrize("volume", ["image:\n          reference: registry.example/m:1", "emptyDir: {}"])
def test_a_volume_of_an_image_holds_the_model(volume):
    pod = f"kind: Deployment\nspec:\n  template:\n    spec:\n      containers:\n      - image: {IMAGE}\n"
    pod += f"        ports: [{{containerPort: 8000}}]\n      volumes:\n      - name: model\n        {volume}\n"
    assert ("cache-lost" in rules(("a.yaml", pod))) == volume.startswith("emptyDir")


@pytest.mark.parametrize("beside", ["docker compose --env-file site.env -f more.yml up", "docker compose up"])
def test_a_variable_that_compose_fills_in_is_not_for_the_server(beside):
    told = rules(("site.env", "VLLM_GPU_MEMORY_UTILIZATION=0.9\n"), ("Makefile", f"up:\n\t{beside}\n# vllm\n"))
    assert ("env-unknown" in told) == ("--env-file" not in beside)


@pytest.mark.parametrize("build", ["    build: ../fork\n", ""])
def test_a_build_of_ones_own_may_have_flags_that_no_release_has(build):
    text = f"services:\n  llm:\n{build}    image: our-vllm:1\n    command: vllm serve org/m --own-switch 1\n"
    told = rules(("compose.yml", text))
    assert ("flag-unknown" in told, "flag-of-another" in told) == (not build, bool(build))


def test_the_card_of_a_script_is_not_that_of_the_script_beside_it():
    server = "#!/bin/sh\n%sexec vllm serve meta-llama/Llama-3.1-70B-Instruct --tensor-parallel-size %s\n"
    of_card = ("t4.sh", server % ("# of the Tesla T4\n", 16))
    assert "does-not-fit" in rules(("run.sh", server % ("# of the Tesla T4\n", 1)))
    beside = lint_texts((of_card, ("run.sh", server % ("", 1))), LintOptions()).findings
    assert not [each for each in beside if each.place.path == "run.sh" and "T4" in each.message]


def test_a_script_that_an_image_starts_is_a_program(tmp_path):
    (tmp_path / "start.sh").write_text("#!/bin/sh\nCMD='vllm serve org/m --port 9000'\nexec $CMD\n")
    text = "FROM nvcr.io/nvidia/vllm:25.11-py3\nCOPY start.sh .\nHEALTHCHECK CMD curl -f http://localhost:9000/health\n"
    text += 'CMD ["./start.sh"]\n'
    (tmp_path / "Dockerfile").write_text(text)
    told = rules((str(tmp_path / "Dockerfile"), text))
    assert not {"container-command", "probe-port"} & told
    other = text.replace("9000", "9001")
    assert "probe-port" in rules((str(tmp_path / "Dockerfile"), other))


def test_a_service_gets_no_token_that_its_compose_file_does_not_pass_on():
    text = f"services:\n  llm:\n    image: {IMAGE}\n    ports: ['80:8000']\n    environment: [%s]\n"
    text += "    command: --model meta-llama/Llama-3.1-8B-Instruct\n    volumes: ['hub:/root/.cache/huggingface']\n"
    other = ("other.yml", "services:\n  b:\n    environment: [HF_TOKEN=$HF_TOKEN]\n")
    assert "model-gated" in rules(("compose.yml", text % "A=1"), other)
    assert "model-gated" not in rules(("compose.yml", text % "HF_TOKEN"), other)


POLICY = (
    "apiVersion: networking.k8s.io/v1\nkind: %s\nmetadata: {name: vllm}\nspec:\n  %s:\n    matchLabels: {%s: llm}\n"
)


@pytest.mark.parametrize(("kind", "selector"), [("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")])
@pytest.mark.parametrize("key", ["app", "app.kubernetes.io/name"])
def test_a_policy_selects_pods_by_the_key_of_their_label(kind, selector, key):
    pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: a, labels: {app: llm}}\n"
    pod += f"spec: {{containers: [{{image: '{IMAGE}'}}]}}\n"
    told = rules(("policy.yaml", POLICY % (kind, selector, key)), ("pod.yaml", pod))
    assert ("port-unreachable" in told) == (key != "app")
