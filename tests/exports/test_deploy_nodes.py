"""A server over several nodes: every pod knows its place, and the objects are what their schemas say."""

import shlex
import subprocess

import pytest
import yaml
from cluster_schemas import check

from legroom import plan
from legroom.errors import LegroomError
from legroom.exports.deploy import kserve, kubernetes
from legroom.exports.export_request import ExportRequest
from legroom.gate.admission_review import startup_fields
from legroom.gate.verdict import plan_verdict
from legroom.planning.plan_document import plan_from_json

BIG = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2, "max_model_len": 16384}
WIDE = {"data_parallel_size": 16, "enable_expert_parallel": True, "max_model_len": 16384}


def asked(model, gpu, *words, flags=None, **options):
    made = plan(model, gpu, advice=False, **(flags or {})).json()
    made["command"] = [*made["command"], *words]
    document = plan_from_json(made)
    return ExportRequest(document.release, document, options)


def dense(*words, flags=BIG, **options):
    return asked("llama-3.1-405b", "h100", *words, flags=flags, **options)


def wide(*words, **options):
    return asked("deepseek-v3", "h200", *words, flags=WIDE, **options)


def documents(request_):
    return list(yaml.safe_load_all(kubernetes.files(request_)[-1].text))


def of_kind(request_, kind):
    return next(document for document in documents(request_) if document["kind"] == kind)


def group(request_):
    spec = of_kind(request_, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    return spec, spec["leaderTemplate"]["spec"], spec["workerTemplate"]["spec"]


def kserve_spec(request_):
    (file,) = kserve.files(request_)
    return yaml.safe_load(file.text)["spec"]


def words_of(pod):
    first = pod["containers"][0]
    return [*first["command"], *first["args"]]


def value_of(pod, flag):
    words = words_of(pod)
    return words[words.index(flag) + 1]


EVERY_KIND = {
    "ranks": lambda **options: dense("--nnodes", "2", **options),
    "split by itself": dense,
    "copies": wide,
    "ray": lambda **options: dense("--distributed-executor-backend", "ray", image="mine/vllm:1", **options),
    "hybrid": lambda **options: wide("--data-parallel-hybrid-lb", "--data-parallel-size-local", "8", **options),
}
EXTRAS = {
    "plain": {},
    "restricted": {"restricted": True, "network_policy": True, "namespace": "models"},
    "guarded": {"with_guard": True, "with_sidecar": True, "cache": "shared"},
}


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND)
def test_every_object_of_a_group_is_valid_by_its_schema(make, extras):
    for document in documents(make(**extras)):
        check(document)


@pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND)
def test_what_is_exported_passes_the_gate(make):
    verdicts = [plan_verdict(startup_fields(document)) for document in documents(make())]
    assert {verdict.outcome for verdict in verdicts} == {"fits", "no_server"}


@pytest.mark.parametrize("words", [("--nnodes", "2"), ()], ids=["said", "by itself"])
def test_nodes_that_share_ranks_are_told_their_rank_and_the_first_of_them(words):
    """One Deployment with --nnodes 2 would wait for its peer forever."""
    spec, leader, worker = group(dense(*words))
    assert spec["size"] == 2
    assert value_of(leader, "--nnodes") == value_of(worker, "--nnodes") == "2"
    assert value_of(leader, "--node-rank") == "0"
    assert value_of(worker, "--node-rank") == "$(LWS_WORKER_INDEX)"
    assert value_of(worker, "--master-addr") == "$(LWS_LEADER_ADDRESS)"
    assert "--headless" in words_of(worker) and "--headless" not in words_of(leader)


@pytest.mark.parametrize(("make", "flag"), [(dense, "--master-addr"), (wide, "--data-parallel-address")])
def test_the_first_pod_listens_at_its_own_address(make, flag):
    """libzmq gives up at once on a name that the cluster's DNS does not have yet."""
    _, leader, _ = group(make())
    address = next(item for item in leader["containers"][0]["env"] if f"$({item['name']})" == value_of(leader, flag))
    assert address["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_a_group_has_the_cards_of_one_node_in_each_pod():
    for make in (dense, wide):
        _, leader, worker = group(make())
        for pod in (leader, worker):
            assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_each_node_of_wide_expert_parallelism_starts_its_own_copies():
    spec, leader, worker = group(wide())
    assert spec["size"] == 2
    assert value_of(leader, "--data-parallel-size-local") == "8"
    assert value_of(worker, "--data-parallel-address") == "$(LWS_LEADER_ADDRESS)"
    assert "--data-parallel-start-rank" not in words_of(leader)
    # Kubernetes makes one dollar of two; then the shell computes the first copy of the node.
    command = [word.replace("$$", "$") for word in worker["containers"][0]["command"]]
    script = ["sh", "-c", command[2].replace('exec "$@"', 'echo "$@"'), *command[3:]]
    done = subprocess.run(
        script, env={"LWS_WORKER_INDEX": "1", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert shlex.split(done.stdout)[-2:] == ["--data-parallel-start-rank", "8"]
    assert shlex.split(done.stdout)[:2] == ["vllm", "serve"]


def test_only_the_first_pod_of_a_group_takes_requests():
    made = wide()
    _, leader, worker = group(made)
    assert of_kind(made, "Service")["spec"]["selector"]["app.kubernetes.io/component"] == "leader"
    assert "readinessProbe" in leader["containers"][0]
    assert not {"readinessProbe", "livenessProbe", "ports"} & set(worker["containers"][0])


def test_with_a_hybrid_load_balancer_every_pod_takes_requests():
    made = EVERY_KIND["hybrid"]()
    _, leader, worker = group(made)
    assert "app.kubernetes.io/component" not in of_kind(made, "Service")["spec"]["selector"]
    assert "readinessProbe" in worker["containers"][0] and "--headless" not in words_of(worker)
    assert value_of(leader, "--data-parallel-start-rank") == "0"


def test_a_worker_outlives_the_drain_of_the_first_pod():
    _, leader, worker = group(dense("--nnodes", "2"))
    wait = worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert int(wait.removeprefix("sleep ")) >= 70
    assert worker["terminationGracePeriodSeconds"] > int(wait.removeprefix("sleep "))
    assert leader["terminationGracePeriodSeconds"] == worker["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(("release", "first_s"), [("0.17.1", 70), ("0.32.0", 10)])
def test_a_worker_waits_for_the_one_drain_of_the_first_pod_and_its_comment_says_so(release, first_s):
    """vLLM drains at SIGTERM from 0.18.0 on; before, the first pod's preStop hook waits for the requests."""
    made = dense("--nnodes", "2", flags=BIG | {"vllm": release})
    _, _, worker = group(made)
    assert worker["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == "sleep 70"
    said = [line for line in kubernetes.files(made)[-1].text.splitlines() if "# preStop" in line]
    assert [int(line.split()[4]) for line in said] == [first_s, 70]


def test_the_pods_start_together_and_end_together():
    spec = of_kind(dense(), "LeaderWorkerSet")["spec"]
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_a_worker_has_no_flag_that_headless_refuses():
    """vLLM 0.32 (entrypoints/cli/serve.py): --api-server-count cannot be used with --headless."""
    _, first, other = group(wide("--api-server-count", "4"))
    assert value_of(first, "--api-server-count") == "4"
    assert "--headless" in words_of(other) and "--api-server-count" not in words_of(other)


def test_nodes_wait_for_each_other_as_long_as_a_load_takes_and_no_step_hangs_that_long():
    """A node that downloaded faster waits in a collective, which PyTorch ends after ten minutes by itself. vLLM's
    multiprocessing executor ends a step after 300 s (v1/executor/multiproc_executor.py, 0.18.0 to 0.32.0)."""
    _, first, other = group(wide())
    limit_s = first["containers"][0]["startupProbe"]["failureThreshold"] * 10
    load_s = 689e9 / 100e6 + 689e9 / 200e6
    for pod in (first, other):
        for flag in ("--distributed-timeout-seconds", "--cpu-distributed-timeout-seconds"):
            assert 0.95 * load_s <= int(value_of(pod, flag)) <= 1.05 * load_s < 0.6 * limit_s
        assert value_of(pod, "--distributed-executor-backend") == "mp"


def test_a_wait_that_was_chosen_stays():
    _, first, _ = group(wide("--distributed-timeout-seconds", "900"))
    assert words_of(first).count("--distributed-timeout-seconds") == 1
    assert value_of(first, "--distributed-timeout-seconds") == "900"


def test_a_group_that_starts_anew_finds_its_downloads():
    spec, first, other = group(wide())
    (claim,) = spec["volumeClaimTemplates"]
    for pod in (first, other):
        assert claim["metadata"]["name"] in {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert claim["metadata"]["name"] not in {volume["name"] for volume in pod["volumes"]}


def test_a_volume_has_room_for_the_checkpoint_once():
    """689 GB of files (deepseek-ai/DeepSeek-V3 on the Hub); the sixteen cards together hold 992 GB of them."""
    spec, _, _ = group(wide())
    gib = int(spec["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    assert 689e9 / 2**30 < gib < 800


def test_the_name_of_a_set_leaves_room_for_what_its_pods_are_labelled_with():
    """A StatefulSet's name, a dash and ten letters of its revision make a label of at most 63."""
    longest = "vllm-" + "a" * 46
    first, second = (of_kind(wide(name=name), "LeaderWorkerSet") for name in (f"{longest}b", f"{longest}c"))
    names = {made["metadata"]["name"] for made in (first, second)}
    assert len(names) == 2 and max(map(len, names)) + len("-9999") <= 63 - 11


def test_the_set_does_not_take_the_name_of_the_service():
    """The set makes a headless Service of its own name."""
    made = dense()
    assert of_kind(made, "LeaderWorkerSet")["metadata"]["name"] != of_kind(made, "Service")["metadata"]["name"]


def test_ray_is_a_ray_cluster_whose_head_waits_for_all_cards():
    made = EVERY_KIND["ray"]()
    spec = of_kind(made, "RayCluster")["spec"]
    head = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert spec["workerGroupSpecs"][0]["replicas"] == 1
    assert "< 16" in head["command"][2] and head["command"][3:5] == ["vllm", "serve"]
    assert head["args"][-2:] != []
    done = subprocess.run(["bash", "-n", "-c", head["command"][2]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_ray_worker_is_not_probed_by_what_its_image_lacks():
    """KubeRay gives pods without probes its own, which need wget and Ray's dashboard agent."""
    made = of_kind(EVERY_KIND["ray"](), "RayCluster")
    worker = made["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    for probe in ("livenessProbe", "readinessProbe"):
        assert worker[probe]["exec"]["command"] == ["/bin/true"]


def test_an_image_without_ray_is_said_to_need_one():
    text = kubernetes.files(dense("--distributed-executor-backend", "ray"))[-1].text
    assert "no Ray from 0.18.0" in " ".join(text.replace("#", "").split())


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: dense("--distributed-executor-backend", "ray", replicas="2"), "RayCluster is one server"),
        (lambda: dense("--nnodes", "3"), "do not divide into 3 nodes"),
        (lambda: wide("--data-parallel-size-local", "5"), "do not make whole nodes of 5"),
        (lambda: asked("llama-3.1-405b", "h100", flags={**BIG, "vllm": "0.10.2"}), "only with Ray"),
        (lambda: dense(gpus_per_node="0"), "--gpus-per-node"),
        (lambda: wide("--data-parallel-multi-port-external-lb"), "a port for every copy"),
    ],
    ids=["ray replicas", "nnodes", "copies", "old release", "cards", "many ports"],
)
def test_what_no_group_can_be_is_refused(made, expected):
    with pytest.raises(LegroomError, match=expected):
        kubernetes.files(made())


def test_a_worker_of_kserve_has_no_flag_that_headless_refuses():
    """KServe 0.20.0 starts all nodes but the first with --headless, and puts the container's args behind it."""
    spec = kserve_spec(wide("--api-server-count", "4"))
    first, other = (spec[part]["containers"][0]["args"] for part in ("template", "worker"))
    assert first[first.index("--api-server-count") + 1] == "4"
    assert "--api-server-count" not in other
    assert [word for word in first if word not in {"--api-server-count", "4"}] == other


@pytest.mark.parametrize("words", [("--data-parallel-hybrid-lb",), ("--data-parallel-external-lb",)])
def test_nodes_of_kserve_that_all_take_requests_are_refused(words):
    with pytest.raises(LegroomError, match="only the first"):
        kserve.files(wide(*words, "--data-parallel-size-local", "8"))
