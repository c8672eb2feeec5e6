"""What was probed is kept whole, and used only where it holds."""

import json
from pathlib import Path

import pytest

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu
from legroom.facts.releases import release
from legroom.planning.card_store import CardRecord, card_record, measured_card, read_cards, store_card

H200 = CardRecord(
    "NVIDIA H200",
    150_000_000_000,
    driver="580.1",
    vllm="0.32.0",
    context_bytes=550_000_000,
    vllm_non_torch_bytes=240_000_000,
)


def test_a_record_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    store_card(H200, tmp_path / "cards.json")
    assert read_cards(tmp_path / "cards.json") == (H200,)


def test_a_later_probe_of_the_same_card_driver_and_release_replaces_the_earlier(tmp_path: Path) -> None:
    path = tmp_path / "cards.json"
    other = card_record({**H200.to_json(), "driver": "590.2"})
    for record in (H200, other, card_record({**H200.to_json(), "context_bytes": 1})):
        store_card(record, path)
    assert [(card.driver, card.context_bytes) for card in read_cards(path)] == [("590.2", 550_000_000), ("580.1", 1)]


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cards.json"
    path.write_text('{"schema": 1, "cards": [{"name": 5}]}')
    with pytest.raises(LegroomError, match="cannot be read"):
        read_cards(path)


@pytest.mark.parametrize(
    "entry", [5, {}, {"name": "x"}, {"name": "x", "total_bytes": "y"}, {"name": "x", "total_bytes": True}]
)
def test_an_entry_that_is_no_record_is_refused(entry: object) -> None:
    with pytest.raises(ValueError):
        card_record(json.loads(json.dumps(entry)))


def test_a_probe_of_another_card_is_not_used() -> None:
    assert measured_card(gpu("h100"), [H200], release("0.32.0"), 1) is gpu("h100")


def test_what_vllm_takes_is_used_for_the_release_it_was_measured_with() -> None:
    measured = measured_card(gpu("h200"), [H200], release("0.30.0"), 1).measured
    assert measured is not None
    assert (measured.context_bytes, measured.modules_bytes) == (550_000_000, None)


def test_ranks_that_were_not_measured_keep_the_rule_for_what_connects_them() -> None:
    for ranks, with_communication in ((2, False), (4, True)):
        four = card_record({**H200.to_json(), "ranks": 4, "vllm_non_torch_bytes": 900_000_000})
        measured = measured_card(gpu("h200"), [H200, four], release("0.32.0"), ranks).measured
        assert measured is not None and measured.with_communication is with_communication
