import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.facts import gpus, read_data
from legroom.facts.gpus import Gpu, all_gpus, gpu, nearest_gpus, with_total
from legroom.units import GIB


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("H100-80GB", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA-H100-80GB-HBM3", "NVIDIA H100 80GB HBM3"),
        ("A100-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100 80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A100 40GB", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100 80GB PCIe"),
        ("rtx 4090", "NVIDIA GeForce RTX 4090"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 4090 24GB", "NVIDIA GeForce RTX 4090"),
        ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 4060", "NVIDIA GeForce RTX 4060"),
        ("RTX A6000 48GB", "NVIDIA RTX A6000"),
        ("NVIDIA GB10 (DGX Spark)", "NVIDIA GB10 (DGX Spark)"),
        ("NVIDIA A100 40GB MIG 1g.5gb", "NVIDIA A100 40GB MIG 1g.5gb"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A100 80GB MIG 1g.10gb"),
        ("Tesla T4", "Tesla T4"),
        ("nvidia-tesla-t4", "Tesla T4"),
        ("NVIDIA Jetson AGX Thor 128GB", "NVIDIA Jetson AGX Thor 128GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("AMD Radeon RX 7800 XT", "AMD Radeon RX 7800 XT"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA H20", "NVIDIA H20"),
    ],
)
def test_a_gpu_is_found_however_its_name_is_written(spelling: str, name: str) -> None:
    assert gpu(spelling).name == name


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        ("tpu-v6e", "Google TPUs"),
        ("v5litepod-8", "Google TPUs"),
        ("Gaudi 3", "Intel Gaudi"),
        ("ascend910b", "Huawei Ascend"),
        ("trainium2", "AWS Neuron"),
    ],
)
def test_accelerators_with_other_accounting_are_refused_with_a_sentence(name: str, platform: str) -> None:
    with pytest.raises(LegroomError, match=f"vLLM runs on {platform} with other memory accounting"):
        gpu(name)


def test_every_name_and_alias_finds_a_card() -> None:
    for card in all_gpus():
        assert gpu(card.name).name == card.name


def test_there_are_gpus_of_every_kind() -> None:
    cards = all_gpus()
    assert len(cards) >= 55
    assert len({card.name for card in cards}) == len(cards)
    assert {card.vendor for card in cards} == {"nvidia", "amd", "intel"}
    assert any(card.unified for card in cards)


def test_every_gpu_has_a_source_a_bandwidth_and_a_band_around_its_total() -> None:
    for card in all_gpus():
        assert card.source, card.name
        assert card.total_source in {"logged", "nvidia-smi", "derived"}
        assert card.bandwidth_bytes_s > 100e9, card.name
        assert card.total_low_bytes <= card.total_bytes <= card.total_high_bytes, card.name
        assert card.compute_capability >= (5, 0) or card.vendor == "intel", card.name
        assert min(card.bf16_flops, card.clock_hz, card.pcie_bytes_s) > 0, card.name


def test_rates_are_those_of_sums_in_32_bits() -> None:
    # GeForce cards halve them, professional ones do not; a T4 has no BF16.
    rates = {"rtx 3090": 71, "rtx 4070": 58.5, "rtx 4090": 165, "rtx a6000": 155, "rtx pro 4500": 220, "t4": 65}
    assert {name: gpu(name).bf16_flops / 1e12 for name in rates} == rates


def test_totals_are_what_cuda_reports_and_not_the_figure_on_the_box() -> None:
    assert gpu("H200").total_bytes == 150_109_880_320
    assert 79.0 < gpu("h100").total_bytes / GIB < 79.3
    assert 23.5 < gpu("rtx 4090").total_bytes / GIB < 23.7
    assert 14.5 < gpu("T4").total_bytes / GIB < 14.8


def test_a_name_that_several_cards_share_says_how_it_was_read() -> None:
    assert gpu("NVIDIA A100").name == "NVIDIA A100-SXM4-40GB"
    assert gpu("NVIDIA A100").larger == "NVIDIA A100-SXM4-80GB"
    assert "40 and 80 GB" in gpu("a100").note
    assert gpu("A100-40GB").note == ""
    assert "10 and 12 GB" in gpu("rtx 3080").note


def test_a_size_is_an_anonymous_card_of_that_size() -> None:
    card = gpu("24GiB")
    assert card.total_bytes == 24 * GIB
    assert card.compute_capability == (0, 0)
    assert card.note == ""
    assert gpu("79.1GiB").total_bytes == int(79.1 * GIB)


def test_a_size_that_only_one_card_reports_means_that_card() -> None:
    card = gpu("79.25GiB")
    assert (card.compute_capability, card.total_bytes) == ((8, 0), int(79.25 * GIB))
    assert "A100" in card.note
    assert gpu("79.18GiB").compute_capability == (9, 0)


def test_every_logged_total_names_a_known_card() -> None:
    for name in set(read_data("gpus.json")["logged_totals"].values()):
        assert gpu(name).name == name


def test_a_size_in_gb_says_how_many_gib_were_read() -> None:
    assert gpu("80GB").total_bytes == 80 * 10**9
    assert "74.51 GiB" in gpu("80GB").note


@pytest.mark.parametrize("text", ["0GiB", "1KB", "9000TiB"])
def test_an_absurd_size_is_refused(text: str) -> None:
    with pytest.raises(LegroomError, match="plausible"):
        gpu(text)


def test_an_unknown_gpu_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(LegroomError) as error:
        gpu("RTX 4095")
    assert error.value.exit_code == 2
    assert "4090" in error.value.hint
    assert nearest_gpus("zzz")


def test_a_size_that_contradicts_the_card_is_not_that_card() -> None:
    with pytest.raises(LegroomError):
        gpu("RTX 4090 48GB")


def test_a_count_in_the_name_is_pointed_out() -> None:
    with pytest.raises(LegroomError, match="2 GPUs"):
        gpu("2x H100")


def test_the_users_own_total_replaces_the_fact() -> None:
    card = with_total(gpu("h100"), 79 * GIB)
    assert (card.total_bytes, card.total_low_bytes, card.total_high_bytes) == (79 * GIB,) * 3
    assert card.total_source == "given"
    assert with_total(gpu("a100"), 79 * GIB).note == ""
    assert card.compute_capability == (9, 0)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_a_gpu_or_a_clear_error(text: str) -> None:
    try:
        assert isinstance(gpu(text), Gpu)
    except LegroomError as error:
        assert error.exit_code == 2
        assert error.hint


def test_a_name_as_written_and_the_same_name_squeezed_mean_one_card():
    data = read_data("gpus.json")
    names = [name for entry in data["gpus"] for name in (entry["name"], *entry["aliases"])] + list(data["ambiguous"])
    for name in names:
        squeezed = gpus._gpu_of_entry(*gpus._cards_by_name()[gpus._normalized_name(name)])
        assert gpus.gpu(name) == squeezed, name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("24", "24GiB"),
        ("5090ti", "RTX 5090"),
        ("rtx4090,rtx3090", "--gpu rtx3090 --gpus 2, the smaller card"),
        ("rtx4090+rtx3090", "--gpu rtx3090 --gpus 2, the smaller card"),
        ("1x h100, 2 x l40s", "--gpu l40s --gpus 3, the smaller card"),
        ("h100 and l4", "for a server on each, ask of one at a time"),
        ("h100, h100", "--gpu h100 --gpus 2"),
    ],
)
def test_a_name_that_is_no_card_says_what_to_write(name: str, says: str) -> None:
    with pytest.raises(LegroomError) as refused:
        gpu(name)
    assert says in f"{refused.value.message} {refused.value.hint}"
