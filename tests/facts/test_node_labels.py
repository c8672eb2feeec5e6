"""The labels of a node name its GPU."""

import pytest

from legroom.facts import read_data
from legroom.facts.gpus import gpu, gpu_of_labels, gpu_of_profile, gpu_of_resource


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, "NVIDIA H100 80GB HBM3"),
        ({"nvidia.com/gpu.product": "Tesla-T4-SHARED"}, "Tesla T4"),
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb"}, "NVIDIA A100 80GB MIG 3g.40gb"),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, "NVIDIA L4"),
        (
            {
                "cloud.google.com/gke-accelerator": "nvidia-tesla-a100",
                "cloud.google.com/gke-gpu-partition-size": "1g.5gb",
            },
            "NVIDIA A100 40GB MIG 1g.5gb",
        ),
        ({"karpenter.k8s.aws/instance-gpu-name": "l40s"}, "NVIDIA L40S"),
        ({"gpu.nvidia.com/class": "H100_NVLINK_80GB"}, "NVIDIA H100 80GB HBM3"),
        ({"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}, "AMD Instinct MI300X"),
        ({"node.kubernetes.io/instance-type": "Standard_NC24ads_A100_v4"}, "NVIDIA A100-SXM4-80GB"),
        ({"node.kubernetes.io/instance-type": "g5.12xlarge"}, "NVIDIA A10G"),
        ({"nvidia.com/gpu.memory": "24576"}, "24.00 GiB GPU"),
    ],
)
def test_a_label_names_a_card(labels, name):
    assert gpu(gpu_of_labels(labels)).name == name


@pytest.mark.parametrize("labels", [{}, {"nvidia.com/gpu.product": "Quantum-9"}, {"nvidia.com/gpu.memory": "lots"}])
def test_labels_that_name_no_known_card_name_none(labels):
    assert gpu_of_labels(labels) == ""


def test_every_card_in_the_data_is_known():
    names = [row["gpu"] for row in read_data("node_labels.json")["instances"]]
    for name in (
        *names,
        *read_data("node_labels.json")["mig_resource_cards"].values(),
        *read_data("node_labels.json")["products"].values(),
    ):
        gpu(name)


def test_every_row_has_a_source():
    rows = [
        row
        for key in read_data("node_labels.json")
        for row in read_data("node_labels.json")[key]
        if isinstance(row, dict)
    ]
    assert rows
    assert all(row["source"] for row in rows)


def test_a_mig_resource_is_a_slice_and_a_gpu_is_none():
    assert gpu(gpu_of_resource("nvidia.com/mig-1g.5gb")).name == "NVIDIA A100 40GB MIG 1g.5gb"
    assert gpu_of_resource("nvidia.com/gpu") == ""


def test_a_resource_profile_of_kubeai_names_a_card():
    assert gpu(gpu_of_profile("nvidia-gpu-l4")).name == "NVIDIA L4"
    assert gpu_of_profile("cpu") == ""
