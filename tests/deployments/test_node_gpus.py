"""Manifests name the GPU that a server runs on, and resources of controllers name the server."""

import textwrap

import pytest

from legroom.deployments.file_reader import read_file
from legroom.facts.releases import latest


def server(text):
    parts = list(read_file("manifest.yaml", textwrap.dedent(text), latest()))
    (only,) = [server for part in parts for server in part.servers]
    return only


def pod(inside, resources="nvidia.com/gpu: 1"):
    return server(f"""\
        apiVersion: v1
        kind: Pod
        metadata: {{name: p}}
        spec:
          {inside}
          containers:
            - name: v
              image: vllm/vllm-openai:v0.11.0
              args: [--model, Qwen/Qwen3-8B]
              resources: {{limits: {{{resources}}}}}
        """)


def test_a_node_selector_names_the_gpu():
    assert pod("nodeSelector: {nvidia.com/gpu.product: NVIDIA-L4}").gpu_names == ("NVIDIA-L4",)


def test_a_required_affinity_names_every_gpu_it_allows():
    term = "{key: nvidia.com/gpu.product, operator: In, values: [NVIDIA-L4, NVIDIA-A10G]}"
    affinity = (
        f"requiredDuringSchedulingIgnoredDuringExecution: {{nodeSelectorTerms: [{{matchExpressions: [{term}]}}]}}"
    )
    assert pod(f"affinity: {{nodeAffinity: {{{affinity}}}}}").gpu_names == ("NVIDIA-L4", "NVIDIA-A10G")


def test_a_preferred_affinity_decides_nothing():
    term = "{key: nvidia.com/gpu.product, operator: In, values: [NVIDIA-L4]}"
    preference = f"{{weight: 1, preference: {{matchExpressions: [{term}]}}}}"
    affinity = f"preferredDuringSchedulingIgnoredDuringExecution: [{preference}]"
    assert pod(f"affinity: {{nodeAffinity: {{{affinity}}}}}").gpu_names == ()


def test_a_mig_resource_is_a_slice_of_the_card_that_the_selector_names():
    slice_ = pod("nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}", "nvidia.com/mig-3g.40gb: 1")
    assert slice_.gpu_names == ("NVIDIA-H100-80GB-HBM3 mig 3g.40gb",)


def test_a_mig_resource_alone_is_the_smallest_slice_of_that_name():
    assert pod("restartPolicy: Never", "nvidia.com/mig-3g.40gb: 1").gpu_names == ("a100 80gb mig 3g.40gb",)


def test_an_annotation_names_the_gpu_where_no_label_does():
    annotated = server("""\
        apiVersion: apps/v1
        kind: Deployment
        metadata: {name: d, annotations: {legroom/gpu: "l40s, h100"}}
        spec:
          template:
            spec:
              containers: [{name: v, image: "vllm/vllm-openai:v0.11.0", args: [--model, Qwen/Qwen3-8B]}]
        """)
    assert annotated.gpu_names == ("l40s", "h100")


LLM_INFERENCE_SERVICE = """\
    apiVersion: serving.kserve.io/v1alpha2
    kind: LLMInferenceService
    metadata: {name: llama}
    spec:
      model: {uri: "hf://meta-llama/Llama-3.1-70B-Instruct", name: llama}
      parallelism: {tensor: 4, expert: true}
      template:
        nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S}
        containers:
          - name: main
            env: [{name: VLLM_ADDITIONAL_ARGS, value: "--max-model-len 8192"}]
            resources: {limits: {nvidia.com/gpu: "4", memory: 64Gi}}
    """


SEVERAL_NODES = LLM_INFERENCE_SERVICE + "  worker: {containers: [{name: main}]}\n"


@pytest.mark.parametrize(
    ("service", "passed_on"),
    [
        (LLM_INFERENCE_SERVICE, ["--tensor-parallel-size=4"]),
        (SEVERAL_NODES, ["--tensor-parallel-size=4", "--enable-expert-parallel"]),
    ],
)
def test_an_llm_inference_service_is_read_as_the_command_kserve_makes_of_it(service, passed_on):
    service = server(service)
    assert [word.text for word in service.words] == [
        "vllm",
        "serve",
        "meta-llama/Llama-3.1-70B-Instruct",
        *passed_on,
        "--max-model-len",
        "8192",
    ]
    assert (service.gpus, service.gpu_names, service.memory_limit_bytes) == (4, ("NVIDIA-L40S",), 64 << 30)


def test_parallel_sizes_that_kserve_keeps_from_a_vllm_on_one_node_are_remarked_on():
    assert [remark.partition(":")[0] for remark in server(LLM_INFERENCE_SERVICE).remarks] == [
        "KServe before 0.20 does not pass spec.parallelism.tensor on to a vLLM on one node",
        "KServe up to 0.20 does not pass spec.parallelism.expert on to a vLLM on one node",
    ]
    told = LLM_INFERENCE_SERVICE.replace("8192", "8192 --tensor-parallel-size 4 --enable-expert-parallel")
    own_templates = LLM_INFERENCE_SERVICE.replace("spec:", "spec:\n      baseRefs: [{name: ours}]")
    assert not server(told).remarks + server(SEVERAL_NODES).remarks + server(own_templates).remarks


def test_an_llm_inference_service_with_its_own_command_is_read_as_that():
    own = LLM_INFERENCE_SERVICE.replace(
        "- name: main", "- name: main\n            command: [vllm, serve, Qwen/Qwen3-8B]"
    )
    assert [word.text for word in server(own).words][:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]


@pytest.mark.parametrize(("profile", "count", "names"), [("nvidia-gpu-l4:2", 2, ("l4",)), ("mine", 1, ())])
def test_a_kubeai_model_is_read_with_its_resource_profile(profile, count, names):
    model = server(f"""\
        apiVersion: kubeai.org/v1
        kind: Model
        metadata: {{name: q}}
        spec:
          url: hf://Qwen/Qwen3-8B
          engine: VLLM
          args: [--max-model-len=32768]
          adapters: [{{name: a, url: "hf://org/adapter"}}]
          resourceProfile: {profile}
        """)
    words = [word.text for word in model.words]
    assert words == ["vllm", "serve", "Qwen/Qwen3-8B", "--max-model-len=32768", "--enable-lora"]
    assert (model.gpus, model.gpu_names) == (count, names)


def test_a_kubeai_model_of_another_engine_starts_no_vllm():
    text = (
        "apiVersion: kubeai.org/v1\nkind: Model\nmetadata: {name: q}\nspec: {url: 'ollama://gemma2', engine: OLlama}\n"
    )
    assert not [server for part in read_file("m.yaml", text, latest()) for server in part.servers]


def test_the_gpus_of_an_llm_inference_service_are_those_of_all_its_nodes():
    wide = SEVERAL_NODES.replace("tensor: 4, expert: true", "tensor: 1, data: 16, dataLocal: 4, expert: true")
    assert server(wide).gpus == 16


def test_a_ray_cluster_whose_containers_only_start_ray_starts_no_server():
    cluster = textwrap.dedent("""\
        apiVersion: ray.io/v1
        kind: RayCluster
        metadata: {name: r}
        spec:
          headGroupSpec:
            template:
              spec:
                containers: [{name: ray-head, image: "vllm/vllm-openai:v0.11.0"}]
        """)
    assert not [server for part in read_file("manifest.yaml", cluster, latest()) for server in part.servers]
