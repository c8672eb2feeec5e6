"""What the gate answers to an API server: AdmissionReview v1 over TLS."""

import copy
import json
import ssl

import pytest
import yaml
from running_gate import RunningGate, deployment, review

from legroom.exports import gate_manifests
from legroom.exports.export_request import ExportRequest

FITS = ("--model", "Qwen/Qwen3-8B", "--max-model-len", "8192")


def test_a_server_that_cannot_start_is_refused_with_the_flags_that_fix_it(gate):
    response = gate.ask(deployment())
    assert response["allowed"] is False
    message = response["status"]["message"]
    assert all(fact in message for fact in ("Qwen/Qwen3-8B", "1 x NVIDIA L4", "0.11.0"))
    assert "Fix: --max-model-len" in message


def test_a_server_that_fits_is_let_through_in_silence(gate):
    response = gate.ask(deployment(*FITS))
    assert response == {"uid": response["uid"], "allowed": True}


def test_in_warn_mode_the_same_is_said_in_warnings(gate):
    response = gate.ask(deployment(), path="/validate/warn")
    assert response["allowed"] is True
    assert any("will not start" in warning for warning in response["warnings"])
    assert all(len(warning) <= 256 for warning in response["warnings"])


@pytest.mark.parametrize("where", ["annotations", "labels"])
def test_an_object_can_opt_out(gate, where):
    thing = deployment()
    thing["metadata"][where] = {"legroom/gate": "off"}
    assert gate.ask(thing) == {"uid": gate.ask(thing)["uid"], "allowed": True}


def test_an_object_can_choose_its_mode(gate):
    thing = deployment()
    thing["metadata"]["labels"] = {"legroom/gate": "warn"}
    assert gate.ask(thing)["allowed"] is True


def test_a_namespace_can_be_left_alone(gate):
    assert gate.ask(deployment(), namespace="sandbox")["allowed"] is True
    assert gate.ask(deployment(), namespace="kube-system")["allowed"] is True


def test_an_update_that_leaves_the_server_as_it_is_passes(gate):
    old, new = deployment(), deployment()
    new["spec"]["replicas"] = 0
    new["metadata"]["labels"] = {"team": "a"}
    assert gate.ask(new, operation="UPDATE", old=old)["allowed"] is True


@pytest.mark.parametrize("where", ["annotations", "labels"])
@pytest.mark.parametrize("is_of_pods", [False, True])
def test_an_update_that_takes_the_switch_away_is_judged(gate, where, is_of_pods):
    old = deployment()
    switched = old["spec"]["template"] if is_of_pods else old
    switched["metadata"][where] = {"legroom/gate": "off"}
    assert gate.ask(deployment(), operation="UPDATE", old=old)["allowed"] is False


def test_every_server_of_a_pod_is_judged(gate):
    small = deployment(*FITS)["spec"]["template"]["spec"]["containers"][0]
    thing = deployment()
    large = thing["spec"]["template"]["spec"]["containers"]
    thing["spec"]["template"]["spec"]["containers"] = [*({**small, "name": f"s{n}"} for n in range(8)), *large]
    assert "Fix: --max-model-len" in gate.ask(thing)["status"]["message"]
    thing["spec"]["template"]["spec"]["containers"] = [{**small, "name": f"s{n}"} for n in range(17)]
    assert "17 vLLM servers" in gate.ask(thing)["status"]["message"]


def test_names_are_told_as_written(gate):
    told = [
        gate.ask(deployment(*FITS, "--no-such-flag")),
        gate.ask(deployment("--model Qwen/Qwen3-0.6B")),
        gate.ask(deployment(*FITS, "--device", "cpu", image="vllm/vllm-openai:v0.8.5")),
    ]
    for response, name in zip(
        told, ["--no-such-flag.", "--model Qwen/Qwen3-0.6B (", "vllm/vllm-openai:v0.8.5 is"], strict=True
    ):
        assert name in response["status"]["message"], response


def test_an_update_that_breaks_the_server_is_refused(gate):
    assert gate.ask(deployment(), operation="UPDATE", old=deployment(*FITS))["allowed"] is False


OWNERS = {
    ("apps/v1", "ReplicaSet"): True,
    ("apps/v1", "DaemonSet"): True,
    ("batch/v1", "CronJob"): True,
    ("v1", "ReplicationController"): True,
    ("batch.volcano.sh/v1alpha1", "Job"): False,
    ("argoproj.io/v1alpha1", "Rollout"): False,
    ("keda.sh/v1alpha1", "ScaledJob"): False,
    ("serving.kserve.io/v1beta1", "InferenceService"): False,
    ("serving.knative.dev/v1", "Revision"): False,
}
"""Owners, and whether their own review has seen the pod."""


@pytest.mark.parametrize("owner", OWNERS, ids=" ".join)
def test_what_an_owner_makes_is_checked_unless_the_owner_was(gate, owner):
    thing = deployment()
    version, kind = owner
    thing["metadata"]["ownerReferences"] = [{"apiVersion": version, "kind": kind, "controller": True, "name": "x"}]
    user = "system:serviceaccount:kube-system:replicaset-controller"
    assert gate.ask(thing, user=user)["allowed"] is OWNERS[owner]


HELM, ARGO_CD = "kube-system:helm-controller", "argocd:argocd-application-controller"
LWS, REPLICA_SET = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"), ("apps/v1", "ReplicaSet")


@pytest.mark.parametrize(
    ("owner", "user", "passes"),
    [
        (REPLICA_SET, "admin", False),
        (REPLICA_SET, f"system:serviceaccount:{ARGO_CD}", False),
        (REPLICA_SET, f"system:serviceaccount:{HELM}", False),
        (LWS, f"system:serviceaccount:{ARGO_CD}", False),
        (LWS, f"system:serviceaccount:{HELM}", False),
        (("ray.io/v1", "RayCluster"), f"system:serviceaccount:{ARGO_CD}", False),
        (("ray.io/v1", "RayCluster"), "system:serviceaccount:ray-system:kuberay-operator", True),
        (REPLICA_SET, "system:kube-controller-manager", True),
        (LWS, "system:serviceaccount:models:deployer", False),
        (LWS, "system:serviceaccount:lws-system:lws-controller-manager", True),
    ],
)
def test_an_owner_that_anybody_wrote_does_not_spare_the_check(gate, owner, user, passes):
    thing = deployment()
    version, kind = owner
    thing["metadata"]["ownerReferences"] = [{"apiVersion": version, "kind": kind, "controller": True, "name": "x"}]
    assert gate.ask(thing, user=user)["allowed"] is passes


def test_every_owner_whose_pods_pass_as_checked_is_in_the_webhooks_rules():
    _, webhook, _ = gate_manifests.files(ExportRequest(None))
    (hook, _) = yaml.safe_load(webhook.text)["webhooks"]
    received = {(group, name) for rule in hook["rules"] for group in rule["apiGroups"] for name in rule["resources"]}
    passed = {(version.rpartition("/")[0], f"{kind.lower()}s") for (version, kind), passes in OWNERS.items() if passes}
    assert passed <= received


def test_an_object_that_is_being_deleted_passes(gate):
    thing = deployment()
    thing["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert gate.ask(thing)["allowed"] is True


def test_a_model_that_is_not_known_is_let_through_and_said_to_be_not_understood(gate):
    response = gate.ask(deployment("--model", "acme/private-9b"))
    assert response["allowed"] is True
    assert "legroom: Not understood:" in response["warnings"][0]


def test_a_gpu_that_is_not_named_is_let_through_and_said_to_be_not_understood(gate):
    response = gate.ask(deployment(gpu=None))
    assert response["allowed"] is True
    assert "which GPU" in response["warnings"][0]


def test_a_pod_that_starts_no_vllm_is_none_of_its_business(gate):
    nginx = deployment("nginx", image="nginx:1.27")
    assert gate.ask(nginx) == {"uid": gate.ask(nginx)["uid"], "allowed": True}


def test_fewer_gpus_than_the_flags_ask_for_are_refused(gate):
    response = gate.ask(deployment(*FITS, "--tensor-parallel-size", "4"))
    assert response["allowed"] is False
    assert "4 GPUs" in response["status"]["message"]


def test_a_flag_that_the_named_release_does_not_have_is_refused(gate):
    response = gate.ask(deployment(*FITS, "--made-up-flag"))
    assert response["allowed"] is False
    assert "--made-up-flag" in response["status"]["message"]


def test_a_value_that_kubernetes_puts_in_later_is_no_reason_to_refuse(gate):
    assert gate.ask(deployment(*FITS, "--seed", "$(SEED)"))["allowed"] is True
    response = gate.ask(deployment(*FITS, "--max-num-seqs", "$(SEQS)"))
    assert response["allowed"] is True
    assert "--max-num-seqs is $(SEQS)" in response["warnings"][0]


def test_a_length_that_the_model_does_not_have_is_refused(gate):
    answer = gate.ask(deployment("--model", "meta-llama/Llama-2-7b-hf", "--max-model-len", "8192"))
    assert not answer["allowed"]
    assert "above the 4096 tokens" in answer["status"]["message"]


def test_a_flag_is_no_reason_to_refuse_where_no_release_is_named(gate):
    assert gate.ask(deployment(*FITS, "--made-up-flag", image="vllm/vllm-openai:latest"))["allowed"] is True


def test_a_limit_of_host_memory_that_is_too_small_is_refused(gate):
    response = gate.ask(deployment(*FITS, gpu="NVIDIA-H100-80GB-HBM3", memory="1Gi"))
    assert response["allowed"] is False


def test_a_pod_that_may_be_put_on_a_card_too_small_for_it_is_warned_of(gate):
    thing = deployment("--model", "Qwen/Qwen3-32B", "--max-model-len", "8192", gpu=None)
    thing["metadata"]["annotations"] = {"legroom/gpu": "l4, h100"}
    response = gate.ask(thing)
    assert response["allowed"] is True
    assert "NVIDIA L4" in response["warnings"][0]


KINDS = {
    "StatefulSet": ("apps/v1", lambda pod: {"template": {"spec": pod}}),
    "Job": ("batch/v1", lambda pod: {"template": {"spec": pod}}),
    "Pod": ("v1", lambda pod: pod),
    "DaemonSet": ("apps/v1", lambda pod: {"template": {"spec": pod}}),
    "CronJob": ("batch/v1", lambda pod: {"jobTemplate": {"spec": {"template": {"spec": pod}}}}),
    "ReplicationController": ("v1", lambda pod: {"template": {"spec": pod}}),
    "ServingRuntime": ("serving.kserve.io/v1alpha1", lambda pod: pod),
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        lambda pod: {"leaderWorkerTemplate": {"size": 1, "workerTemplate": {"spec": pod}}},
    ),
    "InferenceService": (
        "serving.kserve.io/v1beta1",
        lambda pod: {
            "predictor": {
                "nodeSelector": pod["nodeSelector"],
                "model": {
                    "modelFormat": {"name": "huggingface"},
                    "args": ["--model_id=Qwen/Qwen3-8B", "--max-model-len=40000"],
                    "resources": {"limits": {"nvidia.com/gpu": "1"}},
                },
            }
        },
    ),
    "LLMInferenceService": (
        "serving.kserve.io/v1alpha2",
        lambda pod: {
            "model": {"uri": "hf://Qwen/Qwen3-8B"},
            "template": {
                "nodeSelector": pod["nodeSelector"],
                "containers": [{"name": "main", "args": ["--max-model-len=40000"]}],
            },
        },
    ),
    "Model": (
        "kubeai.org/v1",
        lambda pod: {
            "url": "hf://Qwen/Qwen3-8B",
            "engine": "VLLM",
            "args": ["--max-model-len=40000"],
            "resourceProfile": "nvidia-gpu-l4:1",
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_starts_a_server_is_read(gate, kind):
    version, make = KINDS[kind]
    pod = copy.deepcopy(deployment()["spec"]["template"]["spec"])
    thing = {"apiVersion": version, "kind": kind, "metadata": {"name": "llm"}, "spec": make(pod)}
    response = gate.ask(thing)
    assert response["allowed"] is False, response
    assert "will not start" in response["status"]["message"]


def test_the_same_manifest_is_planned_once(gate):
    gate.ask(deployment(*FITS))
    misses = gate.figure('legroom_gate_cache_total{result="miss"}')
    other = deployment(*FITS)
    other["metadata"]["name"], other["spec"]["replicas"] = "another", 5
    gate.ask(other)
    assert gate.figure('legroom_gate_cache_total{result="miss"}') == misses


def test_every_answer_is_counted(gate):
    before = gate.figure('legroom_gate_reviews_total{outcome="refused"}')
    gate.ask(deployment())
    assert gate.figure('legroom_gate_reviews_total{outcome="refused"}') == before + 1
    assert gate.figure("legroom_gate_decision_seconds_count") > 0
    assert gate.figure("legroom_gate_certificate_expiry_timestamp_seconds") > 1.7e9


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"kind": "AdmissionReview"}', b"null", b"x" * (9 << 20)]
)
def test_what_no_api_server_sends_is_refused_and_does_no_harm(gate, body):
    status, _ = gate.raw("POST", "/validate", body)
    assert status in (400, 413)
    assert gate.ask(deployment(*FITS))["allowed"] is True


def test_an_object_of_ten_thousand_words_is_let_through_in_time(gate):
    wide = deployment(*(["--model", "x"] * 5_000))
    assert gate.ask(wide)["allowed"] is True


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_and_prometheus_are_answered(gate, path):
    assert gate.raw("GET", path)[0] == 200


def test_another_authority_is_not_trusted(gate):
    context = ssl.create_default_context()
    gate_context, gate.context = gate.context, context
    try:
        with pytest.raises(ssl.SSLCertVerificationError):
            gate.raw("GET", "/healthz")
    finally:
        gate.context = gate_context


def test_a_deadline_lets_the_object_through_and_is_counted(tmp_path):
    hasty = RunningGate(tmp_path, "--deadline", "0.1", "--mode", "enforce")
    try:
        responses = [hasty.ask(deployment("--model", "Qwen/Qwen3-8B", "--max-model-len", str(n))) for n in range(9, 12)]
        late = [response for response in responses if "warnings" in response]
        assert all(response["allowed"] for response in responses)
        assert late
        assert "was not checked" in late[0]["warnings"][0]
        assert hasty.figure('legroom_gate_failed_open_total{reason="timeout"}') == len(late)
    finally:
        hasty.end()


def test_ctrl_c_ends_it_without_a_word(tmp_path):
    running = RunningGate(tmp_path)
    assert running.ask(deployment(*FITS))["allowed"] is True
    assert running.end() == (0, "")


def test_a_review_says_its_uid_back_whatever_is_in_it(gate):
    thing = deployment(*FITS)
    thing["spec"]["template"]["spec"]["containers"] = "nonsense"
    assert json.loads(gate.raw("POST", "/validate", json.dumps(review(thing)).encode())[1])["response"]["allowed"]


def test_ranks_without_shared_memory_are_warned_of(gate):
    thing = deployment(*FITS, "--tensor-parallel-size", "2")
    thing["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "2"
    response = gate.ask(thing)
    assert response["allowed"] is True
    assert any("/dev/shm" in warning for warning in response["warnings"])


def test_a_probe_that_ends_a_first_start_is_warned_of(gate):
    thing = deployment(*FITS)
    probe = {"httpGet": {"path": "/health", "port": 8000}, "initialDelaySeconds": 60, "periodSeconds": 5}
    thing["spec"]["template"]["spec"]["containers"][0]["livenessProbe"] = probe
    response = gate.ask(thing)
    assert response["allowed"] is True
    assert "75 s" in response["warnings"][0]


def test_gpus_that_no_rank_uses_are_warned_of(gate):
    thing = deployment(*FITS)
    thing["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] = "2"
    response = gate.ask(thing)
    assert response["allowed"] is True
    assert "2 GPUs" in response["warnings"][0]


def test_what_kserve_does_not_pass_on_to_vllm_is_warned_of(gate):
    pod = {
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L40S"},
        "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2"}}}],
    }
    spec = {"model": {"uri": "hf://Qwen/Qwen3-8B"}, "parallelism": {"tensor": 2}, "template": pod}
    thing = {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": {"name": "q"},
        "spec": spec,
    }
    response = gate.ask(thing)
    assert response["allowed"] is True
    assert "spec.parallelism.tensor" in response["warnings"][0]


@pytest.mark.parametrize("image", ["aibrix/vllm-openai:v0.11.0-edb07092-20250118", "vllm/vllm-omni:v0.11.0"])
def test_a_flag_of_another_build_is_no_reason_to_refuse(gate, image):
    assert gate.ask(deployment(*FITS, "--made-up-flag", image=image))["allowed"] is True


@pytest.mark.parametrize("image", ["vllm/vllm-openai-cpu:v0.11.0", "vllm/vllm-tpu:latest", "opea/vllm-gaudi:1.22.0"])
def test_a_server_on_other_hardware_is_none_of_its_business(gate, image):
    response = gate.ask(deployment(image=image, gpu=None))
    assert response == {"uid": response["uid"], "allowed": True}


def test_a_model_over_several_nodes_of_kserve_is_not_refused_for_the_gpus_of_one(gate):
    pod = {
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
        "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}],
    }
    spec = {
        "model": {"uri": "hf://deepseek-ai/DeepSeek-V2-Lite"},
        "template": pod,
        "worker": pod,
        "parallelism": {"data": 16, "dataLocal": 8, "expert": True, "tensor": 1},
    }
    thing = {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": {"name": "d"},
        "spec": spec,
    }
    response = gate.ask(thing)
    assert response == {"uid": response["uid"], "allowed": True}
