"""docker, compose, Kubernetes and Helm: the files are valid, and say what the plan says."""

import http.server
import json
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import jsonschema
import pytest
import yaml
from cluster_schemas import check
from hypothesis import given
from hypothesis import strategies as st
from planned import SERVERS, planned, request

from legroom import plan
from legroom.cli.main import main
from legroom.deployments.deployment import deployment_from_command, deployment_from_file
from legroom.errors import LegroomError
from legroom.exports.deploy import compose, docker, helm_values, kubernetes
from legroom.exports.deploy.exported_server import guard_drain, metrics_drain, planned_server
from legroom.exports.deploy.yaml_text import Commented, without_comments, yaml_text
from legroom.exports.export_request import ExportRequest
from legroom.facts.releases import latest
from legroom.planning.plan_document import plan_from_json
from legroom.units import GIB

NAMES = sorted(SERVERS)
EXTRAS = [{}, {"with_guard": True, "with_sidecar": True}]


def main_file(module, which, /, **options):
    return module.files(request(which, **options))[-1].text


def deployment(which, /, **options):
    documents = list(yaml.safe_load_all(main_file(kubernetes, which, **options)))
    return next(document for document in documents if document["kind"] == "Deployment")


def container(which, /, **options):
    return deployment(which, **options)["spec"]["template"]["spec"]["containers"][0]


# YAML with comments


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(PLAIN)
def test_what_is_written_as_yaml_is_read_back(value):
    assert yaml.safe_load(yaml_text(value)) == value


def test_comments_do_not_change_the_value():
    value = {
        "a": Commented("why: a", [Commented("first", {"b": 1, "c": Commented("deep", [])}), "two"]),
        "d": Commented("x", {"e": None}),
    }
    assert yaml.safe_load(yaml_text(value, head=("top",))) == without_comments(value)
    assert "# deep" in yaml_text(value)


# Kubernetes


@pytest.mark.parametrize("extras", EXTRAS, ids=["plain", "guarded"])
@pytest.mark.parametrize("name", NAMES)
def test_every_manifest_is_valid_by_the_schema_of_kubernetes(name, extras):
    for document in yaml.safe_load_all(main_file(kubernetes, name, namespace="models", **extras)):
        check(document)


@pytest.mark.parametrize("name", NAMES)
def test_the_startup_probe_outlasts_the_load(name):
    probe = container(name)["startupProbe"]
    times = planned_server(planned(name)).times
    assert probe["periodSeconds"] * probe["failureThreshold"] >= times.expected_s
    spec = deployment(name)["spec"]
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


@pytest.mark.parametrize("name", NAMES)
def test_the_grace_period_outlasts_the_drain(name):
    for extras in EXTRAS:
        spec = deployment(name, **extras)["spec"]["template"]["spec"]
        assert spec["terminationGracePeriodSeconds"] > planned_server(planned(name)).times.drain_s


def test_a_faster_disk_shortens_the_startup_probe():
    slow, fast = container("70b-tp4"), container("70b-tp4", disk_speed="5GB/s", download_speed="5GB/s")
    assert slow["startupProbe"]["failureThreshold"] > 5 * fast["startupProbe"]["failureThreshold"]


def test_memory_covers_what_the_flags_put_on_the_host():
    offloaded, without = container("8b-offload")["resources"], container("8b-l4-fp8-kv")["resources"]
    assert amount(offloaded["requests"]["memory"]) - amount(without["requests"]["memory"]) >= 4 * GIB
    made = planned_server(planned("8b-offload"))
    assert made.host.checkpoint_bytes == planned("8b-offload").host.checkpoint_bytes > 14.9 * GIB
    assert made.host.held_bytes == planned("8b-offload").host.held_bytes
    swapping = planned_server(planned("v0-0.6.3")).host
    assert any("swap space (8 x 1)" in share.what and share.bytes == 8 * GIB for share in swapping.shares)


def amount(text):
    assert text.endswith("Gi")
    return int(text[:-2]) * GIB


def test_the_memory_limit_lets_the_checkpoint_stay_in_the_page_cache():
    limits = container("70b-tp4")["resources"]["limits"]
    assert amount(limits["memory"]) > planned_server(planned("70b-tp4")).host.checkpoint_bytes
    assert limits["nvidia.com/gpu"] == 4


def test_shared_memory_grows_with_the_ranks_and_with_offloaded_kv():
    def size(document):
        return planned_server(document).host.shm_bytes

    made = plan("llama-3.1-8b", "h100").json()
    made["command"] += ["--kv-offloading-size", "10"]
    assert size(planned("8b-h100")) < size(planned("70b-tp4")) < size(planned("0.20.0-tp8"))
    assert size(plan_from_json(made)) >= 10 * GIB


def test_an_old_release_is_drained_by_its_metrics_and_a_new_one_drains_itself():
    def before_stop(which, **options):
        return container(which, **options)["lifecycle"]["preStop"]["exec"]["command"][-1]

    assert "vllm:num_requests_running" in before_stop("0.10.2")
    assert before_stop("8b-h100") == "sleep 10"
    assert "/-/legroom/drain" in before_stop("8b-h100", with_guard=True)


def test_secrets_are_references():
    text = main_file(kubernetes, "8b-h100", with_guard=True)
    env = {item["name"]: item for item in container("8b-h100", with_guard=True)["env"]}
    assert "secretKeyRef" in env["HF_TOKEN"]["valueFrom"]
    assert "secretKeyRef" in env["LEGROOM_GUARD_TOKEN"]["valueFrom"]
    assert "kubectl create secret" in text


@pytest.mark.parametrize("name", NAMES)
def test_legroom_reads_its_own_manifests_back(name, tmp_path):
    document = planned(name)
    for module, file in ((kubernetes, "server.yaml"), (compose, "compose.yaml")):
        (tmp_path / file).write_text(main_file(module, name))
        deployment = deployment_from_file(tmp_path / file)
        assert deployment.problems == () or not any(problem.stops_vllm for problem in deployment.problems)
        assert deployment.args.model == planned_server(document).model
        assert deployment.args.max_num_seqs == document.args["max_num_seqs"]
        assert deployment.gpu_count == planned_server(document).gpus
        assert deployment.release.version == document.release.version


def test_a_variable_in_a_value_is_not_expanded():
    made = plan("llama-3.1-8b", "h100", env={"VLLM_X": "$(HOME) $HOME"}).json()
    made["command"] += ["--served-model-name", "$(id)"]
    asked = ExportRequest(latest(), plan_from_json(made), {})
    pod = list(yaml.safe_load_all(kubernetes.files(asked)[0].text))[1]["spec"]["template"]["spec"]["containers"][0]
    assert "$$(id)" in pod["args"]
    service = next(iter(yaml.safe_load(compose.files(asked)[0].text)["services"].values()))
    assert "$$(id)" in service["command"]
    assert service["environment"]["VLLM_X"] == "$$(HOME) $$HOME"


def test_a_local_model_is_mounted_and_needs_no_claim():
    made = plan("llama-3.1-8b", "h100").json()
    made["command"][2] = "/data/models/llama"
    asked = ExportRequest(latest(), plan_from_json(made), {})
    documents = list(yaml.safe_load_all(kubernetes.files(asked)[0].text))
    assert [document["kind"] for document in documents] == ["Deployment", "Service"]
    pod = documents[0]["spec"]["template"]["spec"]
    assert {"name": "model", "hostPath": {"path": "/data/models/llama"}} in pod["volumes"]
    assert "downloaded" not in kubernetes.files(asked)[0].text


@pytest.mark.parametrize("model", ["", "/data/models/llama"])
def test_the_sidecar_of_a_pod_has_a_place_for_its_journal(model):
    made = dict(planned("8b-h100").to_json())
    made["command"] = [*made["command"][:2], model or made["command"][2], *made["command"][3:]]
    asked = ExportRequest(latest(), plan_from_json(made), {"with_sidecar": True})
    documents = list(yaml.safe_load_all(kubernetes.files(asked)[-1].text))
    pod = next(document for document in documents if document["kind"] == "Deployment")["spec"]["template"]["spec"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][1]["volumeMounts"]}
    assert mounts.keys() == {"/root/.local/share/legroom", "/etc/legroom"}
    assert set(mounts.values()) <= {volume["name"] for volume in pod["volumes"]}


# compose


@pytest.fixture(scope="module")
def compose_schema():
    package = pytest.importorskip("check_jsonschema")
    schema = Path(package.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    return jsonschema.Draft7Validator(json.loads(schema.read_text("utf-8")))


@pytest.mark.parametrize("extras", EXTRAS, ids=["plain", "guarded"])
@pytest.mark.parametrize("name", NAMES)
def test_every_compose_file_is_valid_by_the_compose_specification(compose_schema, name, extras):
    compose_schema.validate(yaml.safe_load(main_file(compose, name, **extras)))


def test_a_compose_service_waits_for_the_load_and_the_drain():
    service = yaml.safe_load(main_file(compose, "70b-tp4"))["services"]["vllm-llama-3-1-70b"]
    assert service["healthcheck"]["start_period"] == "4440s"
    assert service["stop_grace_period"] == "90s"
    assert service["shm_size"] == "4gb"


def test_named_cards_are_reserved_by_name():
    made = plan("llama-3.1-8b", "h100", env={"CUDA_VISIBLE_DEVICES": "2,3"}, tensor_parallel_size=2).json()
    asked = ExportRequest(latest(), plan_from_json(made), {})
    service = next(iter(yaml.safe_load(compose.files(asked)[0].text)["services"].values()))
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["2", "3"]
    assert "CUDA_VISIBLE_DEVICES" not in service["environment"]
    assert '"device=2,3"' in docker.files(asked)[0].text


# docker


@pytest.mark.parametrize("extras", EXTRAS, ids=["plain", "guarded"])
def test_shellcheck_finds_nothing_in_any_docker_script(shellcheck, tmp_path, extras):
    for name in NAMES:
        (tmp_path / f"{name}.sh").write_text(main_file(docker, name, **extras))
    done = subprocess.run(
        [shellcheck, *map(str, sorted(tmp_path.glob("*.sh")))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_docker_line_starts_the_planned_server(name, tmp_path):
    program = tmp_path / "docker"
    program.write_text('#!/bin/bash\nprintf "%q " docker "$@"\n')
    program.chmod(0o755)
    text = main_file(docker, name)
    done = subprocess.run(
        ["bash", "-c", text], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    deployment = deployment_from_command(shlex.join(shlex.split(done.stdout)))
    document = planned(name)
    assert deployment.release.version == document.release.version
    assert deployment.args.max_model_len == document.args["max_model_len"]
    assert deployment.gpu_count == planned_server(document).gpus
    assert deployment.shm_size == f"{planned_server(document).host.shm_bytes // GIB}g"


def test_the_guard_brings_an_image_that_has_legroom():
    files = {file.path: file.text for file in docker.files(request("8b-h100", with_guard=True))}
    assert "FROM vllm/vllm-openai:v0.32.0" in files["Dockerfile"]
    assert "vllm-legroom:v0.32.0" in files["vllm-llama-3-1-8b-docker.sh"]


def test_a_card_of_another_maker_needs_its_image_named():
    made = plan("llama-3.1-8b", "mi300x").json()
    asked = ExportRequest(latest(), plan_from_json(made), {})
    with pytest.raises(LegroomError, match="NVIDIA"):
        docker.files(asked)
    named = ExportRequest(latest(), plan_from_json(made), {"image": "rocm/vllm:latest"})
    assert "--device /dev/kfd" in docker.files(named)[0].text


# Helm


def test_values_say_what_the_chart_would_otherwise_change():
    values = yaml.safe_load(main_file(helm_values, "70b-tp4"))
    model = values["servingEngineSpec"]["modelSpec"][0]
    assert model["vllmConfig"]["enablePrefixCaching"] is True
    assert model["vllmConfig"]["tensorParallelSize"] == 4
    assert model["vllmConfig"]["maxModelLen"] == 32768
    assert model["resources"]["limits"]["nvidia.com/gpu"] == 4
    token = {"name": "vllm-llama-3-1-70b", "key": "hf-token", "optional": True}
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}} in model["env"]


def test_the_drain_stays_within_the_grace_period_that_the_chart_leaves():
    extra = yaml.safe_load(main_file(helm_values, "8b-h100"))["servingEngineSpec"]["modelSpec"][0]["vllmConfig"][
        "extraArgs"
    ]
    assert int(extra[extra.index("--shutdown-timeout") + 1]) < 30


@pytest.mark.parametrize("name", ["v0-0.6.3", "0.4.2"])
def test_a_release_that_the_chart_cannot_start_is_refused(name):
    with pytest.raises(LegroomError, match="no-enable-prefix-caching"):
        helm_values.files(request(name))


# Draining


class _Server:
    """Answers with one text after another."""

    def __init__(self, *texts):
        self.texts = list(texts)
        self.seen = []

    def __enter__(self):
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self):
                outer.seen.append(self.path)
                text = outer.texts.pop(0) if len(outer.texts) > 1 else outer.texts[0]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST = _answer

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def run(self, line):
        port = self.http.server_address[1]
        line = f"sleep() {{ :; }}\n{line.replace(':8000/', f':{port}/')}"
        return subprocess.run(["sh", "-c", line], env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=False)


needs_curl = pytest.mark.skipif(shutil.which("curl", path="/usr/bin:/bin") is None, reason="curl is not installed")


@needs_curl
def test_the_drain_by_metrics_waits_while_requests_run():
    busy = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
    idle = busy.replace("2.0", "0.0")
    with _Server(busy, busy, idle) as server:
        server.run(metrics_drain(planned_server(planned("0.10.2"))))
    assert server.seen == ["/metrics"] * 3


@needs_curl
def test_the_drain_of_the_guard_waits_until_nothing_runs():
    with _Server("{}", '{"running": 10, "waiting": 0}', '{"running": 0, "waiting": 0}') as server:
        server.run(guard_drain(planned_server(planned("8b-h100"))))
    assert server.seen == ["/-/legroom/drain", "/-/legroom/status", "/-/legroom/status"]


def test_more_cards_than_a_machine_usually_has_are_said_on_stderr(capsys):
    words = ["deepseek-v3", "--gpu", "h200", "--gpus", "16", "--tensor-parallel-size", "16", "--max-model-len", "16384"]
    assert main(["export", "docker", *words]) == 0
    assert "16 GPUs" in capsys.readouterr().err
    assert main(["export", "kubernetes", *words]) == 0
    assert "one machine" not in capsys.readouterr().err


def test_a_server_that_may_not_start_is_said_on_stderr(capsys):
    words = ["Qwen/Qwen2.5-32B-Instruct-AWQ", "--gpu", "l4", "--vllm", "0.11.0", "--gpu-memory-utilization", "0.95"]
    assert main(["export", "kubernetes", *words, "--max-model-len", "7168"]) == 0
    assert "tight and may not start" in capsys.readouterr().err
    assert main(["export", "kubernetes", *words, "--max-model-len", "2048", "--max-num-seqs", "8"]) == 0
    assert "may not start" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["docker", "compose"])
def test_without_a_key_the_port_is_published_on_this_machine_alone(kind, capsys):
    assert main(["export", kind, "llama-3.1-8b", "--gpu", "h100"]) == 0
    assert "127.0.0.1:8000:8000" in capsys.readouterr().out
    assert main(["export", kind, "llama-3.1-8b", "--gpu", "h100", "--api-key", "hush"]) == 0
    out = capsys.readouterr().out
    assert "127.0.0.1:8000:8000" not in out and "8000:8000" in out


@pytest.mark.parametrize("kind", ["systemd", "script", "env"])
def test_a_server_on_the_host_that_answers_everybody_is_said_on_stderr(kind, capsys):
    for host in ((), ("--host", "0.0.0.0")):
        assert main(["export", kind, "llama-3.1-8b", "--gpu", "h100", *host]) == 0
        assert "answers everybody" in capsys.readouterr().err
    for closed in (("--api-key", "hush"), ("--host", "127.0.0.1")):
        assert main(["export", kind, "llama-3.1-8b", "--gpu", "h100", *closed]) == 0
        assert "answers everybody" not in capsys.readouterr().err
