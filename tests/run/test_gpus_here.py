"""Which GPUs a server will see, and what others hold of those it takes."""

from __future__ import annotations

import pytest

from legroom.errors import LegroomError
from legroom.live.gpu_memory import GpuMemory
from legroom.run.expectation import Gpus, visible_gpus
from legroom.units import GIB

H100 = "NVIDIA H100 80GB HBM3"


def card(index: int, *held: int, used: int = 0, name: str = H100) -> GpuMemory:
    pids = tuple((100 + number, size) for number, size in enumerate(held))
    return GpuMemory(index, name, f"GPU-{index}abc", 80 * GIB, used or sum(held), pids)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch):
    def show(*seen: GpuMemory) -> None:
        monkeypatch.setattr("legroom.live.gpu_memory.nvml_devices", lambda: seen)

    return show


def test_without_a_driver_there_is_none_unless_the_user_names_one(cards):
    cards()
    assert visible_gpus({}) == Gpus()
    assert visible_gpus({}, "h100") == Gpus("h100", 1)


@pytest.mark.parametrize(
    ("visible", "count", "used"),
    [
        (None, 3, 1),
        ("0", 1, 1),
        ("2,1", 2, 4),
        ("GPU-1", 1, 2),
        ("GPU-2abc, 0", 2, 4),
        ("1,9,2", 1, 2),
        ("", 0, 0),
        ("-1", 0, 0),
    ],
)
def test_cuda_shows_a_server_the_cards_of_its_variable_in_that_order(cards, visible, count, used):
    cards(card(0, GIB), card(1, 2 * GIB), card(2, 4 * GIB))
    seen = visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert (seen.count, seen.used_bytes) == (count, used * GIB)


def test_what_others_hold_of_cards_that_the_server_does_not_take_does_not_count(cards):
    cards(card(0, GIB), card(1, 70 * GIB))
    assert visible_gpus({}, gpus_needed=1).used_bytes == GIB
    assert visible_gpus({}, gpus_needed=2).used_bytes == 70 * GIB


@pytest.mark.parametrize("held", [(), (0,), (0, 0)])
def test_where_the_driver_does_not_say_who_holds_what_all_that_is_in_use_counts(cards, held):
    cards(card(0, *held, used=60 * GIB))
    assert visible_gpus({}).used_bytes == 60 * GIB


def test_what_the_driver_itself_takes_is_nobodys(cards):
    cards(card(0, used=GIB // 2))
    assert visible_gpus({}).used_bytes == 0


def test_a_card_without_a_known_name_is_its_size(cards):
    cards(card(0, name="Some Board"))
    assert visible_gpus({}).name == "80.00GiB"


def test_a_name_that_means_nothing_is_said(cards):
    cards(card(0))
    with pytest.raises(LegroomError, match="nosuchcard"):
        visible_gpus({}, "nosuchcard")
