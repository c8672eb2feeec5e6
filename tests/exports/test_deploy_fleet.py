"""Several replicas: caches, budgets, scaling and security of the exported manifests, and the monitoring objects."""

import json
import shlex
import subprocess

import pytest
import yaml
from cluster_schemas import check
from planned import NAMES_OF_FLEETS, planned, request

from legroom.cli.watch_fleet import fleet_queries
from legroom.errors import LegroomError
from legroom.exports.deploy import kserve, kubernetes, llm_d_values
from legroom.exports.deploy.exported_server import planned_server
from legroom.exports.export_request import ExportRequest
from legroom.exports.prometheus import rules
from legroom.facts.releases import release
from legroom.planning.plan_document import plan_from_json
from legroom.sidecar.watch_config import read_config

FLEETS = [
    {"replicas": "3"},
    {"replicas": "3", "cache": "shared", "with_sidecar": True},
    {"autoscale": "6", "namespace": "models"},
    {"autoscale": "6", "scaler": "hpa", "replicas": "2"},
    {"restricted": True, "network_policy": True, "with_guard": True, "with_sidecar": True},
]


def documents(which, **options):
    return list(yaml.safe_load_all(kubernetes.files(request(which, **options))[-1].text))


def of_kind(which, kind, **options):
    return next(document for document in documents(which, **options) if document["kind"] == kind)


def pod(which, **options):
    return of_kind(which, "Deployment", **options)["spec"]["template"]["spec"]


@pytest.mark.parametrize("options", FLEETS, ids=" ".join)
@pytest.mark.parametrize("name", NAMES_OF_FLEETS)
def test_every_object_of_a_fleet_is_valid_by_its_schema(name, options):
    for document in documents(name, **options):
        check(document)


def test_several_pods_have_a_volume_each_or_share_one_that_all_may_write():
    kinds = [document["kind"] for document in documents("8b-h100", replicas="3")]
    assert "PersistentVolumeClaim" not in kinds
    own = next(volume for volume in pod("8b-h100", replicas="3")["volumes"] if volume["name"] == "cache")
    assert own["ephemeral"]["volumeClaimTemplate"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    shared = of_kind("8b-h100", "PersistentVolumeClaim", replicas="3", cache="shared")
    assert shared["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_pod_that_is_scaled_up_finds_the_download_of_the_others():
    claim = of_kind("8b-h100", "PersistentVolumeClaim", autoscale="4")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    kinds = [document["kind"] for document in documents("8b-h100", autoscale="4", cache="pod")]
    assert "PersistentVolumeClaim" not in kinds


@pytest.mark.parametrize(
    ("which", "product"),
    [("8b-h100", "NVIDIA-H100-80GB-HBM3"), ("0.8.5-tp2", "NVIDIA-A10G"), ("8b-l4-fp8-kv", "NVIDIA-L4")],
)
def test_a_pod_asks_for_a_node_with_the_planned_card(which, product):
    assert pod(which)["nodeSelector"] == {"nvidia.com/gpu.product": product}


def test_only_a_fleet_has_a_disruption_budget():
    """With one replica it would block every drain, or protect nothing."""
    assert "PodDisruptionBudget" not in [document["kind"] for document in documents("8b-h100")]
    assert of_kind("8b-h100", "PodDisruptionBudget", replicas="2")["spec"]["maxUnavailable"] == 1


def test_replicas_are_spread_over_nodes_where_there_are_enough():
    (constraint,) = pod("8b-h100", replicas="2")["topologySpreadConstraints"]
    labels = of_kind("8b-h100", "Deployment", replicas="2")["spec"]["template"]["metadata"]["labels"]
    assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert "topologySpreadConstraints" not in pod("8b-h100")


def test_an_empty_answer_of_prometheus_does_not_scale_down():
    """KEDA takes a query without series for 0 unless it is told otherwise."""
    assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in scaled("8b-h100")["triggers"])


def test_a_restricted_pod_writes_only_to_its_volumes():
    spec = pod("8b-h100", restricted=True)
    first = spec["containers"][0]
    assert spec["securityContext"]["runAsNonRoot"] and first["securityContext"]["readOnlyRootFilesystem"]
    home = next(item["value"] for item in first["env"] if item["name"] == "HOME")
    assert {home, "/tmp", "/dev/shm"} <= {mount["mountPath"] for mount in first["volumeMounts"]}


def test_a_restricted_pod_mounts_nothing_of_its_node():
    made = dict(planned("8b-h100").to_json())
    made["command"] = [*made["command"][:2], "/data/llama", *made["command"][3:]]
    with pytest.raises(LegroomError, match="from the node"):
        kubernetes.files(ExportRequest(release("0.32.0"), plan_from_json(made), {"restricted": True}))


def scaled(which, **options):
    return of_kind(which, "ScaledObject", autoscale="6", **options)["spec"]


def test_a_slower_start_keeps_the_pools_emptier_and_the_replicas_longer():
    slow, fast = scaled("70b-tp4"), scaled("70b-tp4", disk_speed="5GB/s", download_speed="5GB/s")

    def target(spec):
        return float(spec["triggers"][1]["metadata"]["threshold"])

    def window(spec):
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        return behavior["scaleDown"]["stabilizationWindowSeconds"]

    assert target(slow) < target(fast) < 0.95
    assert window(slow) > window(fast) >= 2 * planned_server(planned("70b-tp4")).times.checkpoint_bytes / 5e9


def test_a_burst_scales_nothing_up():
    for disk_speed, least_s in (("2GB/s", 30), ("100MB/s", 60)):
        behavior = scaled("70b-tp4", disk_speed=disk_speed)["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleUp"]["stabilizationWindowSeconds"] >= least_s


def test_the_scaler_owns_the_number_of_replicas():
    assert "replicas" not in of_kind("8b-h100", "Deployment", autoscale="6")["spec"]


def test_the_queries_are_in_the_names_of_the_release():
    for name, expected in (("8b-h100", "vllm:kv_cache_usage_perc"), ("0.8.5-tp2", "vllm:gpu_cache_usage_perc")):
        queries = [trigger["metadata"]["query"] for trigger in scaled(name)["triggers"]]
        assert expected in queries[1]


def test_prometheus_takes_the_queries_of_scalers_and_of_the_fleet_view(promtool, tmp_path):
    asked = [trigger["metadata"]["query"] for name in NAMES_OF_FLEETS for trigger in scaled(name)["triggers"]]
    asked += fleet_queries('job="vllm"', 3600).values()
    made = [{"record": f"r{number}", "expr": query} for number, query in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": made}]}))
    done = subprocess.run([promtool, "check", "rules", "rules.yml"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout


def test_an_autoscaler_of_kubernetes_comes_with_the_rules_of_its_adapter():
    files = {file.path: file.text for file in kubernetes.files(request("8b-h100", autoscale="4", scaler="hpa"))}
    (values,) = [text for path, text in files.items() if path.endswith("adapter-values.yaml")]
    names = {rule["name"]["as"] for rule in yaml.safe_load(values)["rules"]["external"]}
    spec = of_kind("8b-h100", "HorizontalPodAutoscaler", autoscale="4", scaler="hpa")["spec"]
    assert {metric["external"]["metric"]["name"] for metric in spec["metrics"]} == names


@pytest.mark.parametrize("options", [{"autoscale": "1"}, {"autoscale": "2", "replicas": "2"}, {"replicas": "x"}])
def test_numbers_that_leave_nothing_to_scale_are_refused(options):
    with pytest.raises(LegroomError):
        documents("8b-h100", **options)


@pytest.mark.parametrize("which", [None, "8b-h100"])
def test_the_rules_are_objects_of_the_operator_where_asked(which):
    plan = planned(which) if which else None
    options = {"operator": True, "namespace": "monitoring", "operator_label": ["release=prom"]}
    (file,) = rules.files(ExportRequest(plan.release if plan else None, plan, options))
    made = list(yaml.safe_load_all(file.text))
    assert [document["kind"] for document in made] == ["PrometheusRule", "PodMonitor"]
    for document in made:
        check(document)
        assert document["metadata"]["labels"]["release"] == "prom"


def test_the_pod_monitor_selects_what_the_manifests_label():
    (file,) = rules.files(ExportRequest(None, None, {"operator": True}))
    monitor = list(yaml.safe_load_all(file.text))[1]["spec"]
    labels = of_kind("8b-h100", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    ports = pod("8b-h100")["containers"][0]["ports"]
    assert monitor["podMetricsEndpoints"][0]["port"] in [port["name"] for port in ports]


def test_the_pod_monitor_scrapes_the_sidecar_under_a_job_of_its_own(tmp_path):
    """Under the servers' job it would count as a server that lacks vLLM's series."""
    text = rules.files(ExportRequest(release("0.32.0"), None, {"operator": True}))[0].text
    monitor = next(document for document in yaml.safe_load_all(text) if document["kind"] == "PodMonitor")
    endpoint = monitor["spec"]["podMetricsEndpoints"][1]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "legroom-watch"}]
    sidecar = pod("8b-h100", with_sidecar=True)["containers"][1]
    assert endpoint["port"] in [port["name"] for port in sidecar["ports"]]
    written = of_kind("8b-h100", "ConfigMap", with_sidecar=True)["data"]["watch.toml"]
    (tmp_path / "watch.toml").write_text(written)
    config = read_config(tmp_path / "watch.toml")
    assert (config.host, config.port) == ("0.0.0.0", sidecar["ports"][0]["containerPort"])


def test_a_service_monitor_is_written_in_place_of_the_pod_monitor_where_asked():
    (file,) = rules.files(ExportRequest(None, None, {"operator": True, "monitor": "service"}))
    made = list(yaml.safe_load_all(file.text))
    assert [document["kind"] for document in made] == ["PrometheusRule", "ServiceMonitor"]
    for document in made:
        check(document)


def test_the_service_monitor_selects_the_service_of_the_manifests():
    (file,) = rules.files(ExportRequest(None, None, {"operator": True, "monitor": "service"}))
    monitor = list(yaml.safe_load_all(file.text))[1]["spec"]
    service = of_kind("8b-h100", "Service")
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]


def shell_words(document):
    """What vLLM gets: KServe's template reads the args by a shell once more."""
    return shlex.split(" ".join(document["spec"]["template"]["containers"][0]["args"]))


@pytest.mark.parametrize("name", NAMES_OF_FLEETS)
def test_an_llm_inference_service_is_valid_and_leaves_to_kserve_what_it_writes(name):
    (file,) = kserve.files(request(name, namespace="models", replicas="2"))
    document = yaml.safe_load(file.text)
    check(document)
    assert not {"--port", "--tensor-parallel-size", "--served-model-name"} & set(shell_words(document))
    assert document["spec"]["parallelism"]["tensor"] == planned(name).args["tensor_parallel_size"]


def kserve_pod(which, **options):
    (file,) = kserve.files(request(which, **options))
    return yaml.safe_load(file.text)["spec"]["template"]


def test_kserve_downloads_with_the_token():
    """Its own init container fetches the model; vLLM gets a folder."""
    made = kserve_pod("8b-h100")
    (downloader,) = made["initContainers"]
    assert downloader["name"] == "storage-initializer"
    assert [item["name"] for item in downloader["env"]] == ["HF_TOKEN"]
    assert "HF_TOKEN" not in [item["name"] for item in made["containers"][0]["env"]]


def test_vllms_image_does_not_run_as_root_where_kserve_refuses_it():
    made = kserve_pod("8b-h100")["containers"][0]
    assert made["securityContext"]["runAsUser"] and "USER" in [item["name"] for item in made["env"]]
    assert "securityContext" not in kserve_pod("8b-h100", image="mine/vllm:1")["containers"][0]


def test_kserve_gives_several_ranks_their_shared_memory():
    (volume,) = kserve_pod("70b-tp4")["volumes"]
    assert volume["name"] == "dshm" and int(volume["emptyDir"]["sizeLimit"].removesuffix("Gi")) > 1


def test_kserve_drains_as_long_as_was_asked_for():
    """Its template tells vLLM the grace period less 20 s."""
    assert kserve_pod("8b-h100", drain="120")["terminationGracePeriodSeconds"] == 140


def test_json_in_a_flag_survives_the_shell_of_kserve():
    (file,) = kserve.files(request("speculative"))
    words = shell_words(yaml.safe_load(file.text))
    assert json.loads(words[words.index("--speculative-config") + 1])["method"] == "ngram"


@pytest.mark.parametrize("name", NAMES_OF_FLEETS)
def test_the_values_of_llm_d_have_a_valid_container_with_the_planned_command(name):
    values = yaml.safe_load(llm_d_values.files(request(name, replicas="2"))[0].text)
    decode = values["decode"]
    (first,) = decode["containers"]
    assert (decode["replicas"], values["prefill"]) == (2, {"create": False})
    assert first["modelCommand"] == "custom" and first["command"][:2] in (["vllm", "serve"], ["python3", "-m"])
    own = {key: value for key, value in first.items() if key not in ("modelCommand", "mountModelVolume")}
    pod_ = {"containers": [own], "volumes": decode["volumes"]}
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod_})


@pytest.mark.parametrize("module", [kserve, llm_d_values])
def test_a_guard_has_no_place_in_other_peoples_templates(module):
    with pytest.raises(LegroomError, match="no place"):
        module.files(request("8b-h100", with_guard=True))
