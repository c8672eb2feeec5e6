"""Prices: dated list prices in the facts, and the file that a user owns."""

import pytest

from legroom.errors import LegroomError
from legroom.facts.gpus import gpu, list_prices
from legroom.planning.sizing import prices_with_file, read_price_file


def written(tmp_path, text):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return str(path)


def test_every_list_price_is_of_a_known_card_and_has_a_date_and_a_source():
    for name, price in list_prices().items():
        assert gpu(name).name == name
        assert price.usd_per_hour > 0
        assert len(price.date) == len("2026-08-22")
        assert price.source


def test_a_price_file_takes_the_usual_spellings_of_a_card(tmp_path):
    prices = read_price_file(written(tmp_path, '[h100]\nusd_per_hour = 2\n["A100 80GB"]\nusd_per_hour = 1.5\n'))
    assert {name: price.usd_per_hour for name, price in prices.items()} == {
        "NVIDIA H100 80GB HBM3": 2.0,
        "NVIDIA A100-SXM4-80GB": 1.5,
    }


def test_a_price_file_leaves_the_list_price_of_cards_that_it_does_not_name(tmp_path):
    prices = prices_with_file(written(tmp_path, "[h100]\nusd_per_hour = 2\n"))
    changed = {name for name, price in prices.items() if price != list_prices().get(name)}
    assert changed == {"NVIDIA H100 80GB HBM3"}
    assert prices.keys() == list_prices().keys()


def test_an_unknown_card_in_the_prices_is_named_with_its_nearest(tmp_path):
    with pytest.raises(LegroomError, match=r"h1000.*no such GPU") as caught:
        read_price_file(written(tmp_path, "[h1000]\nusd_per_hour = 2\n"))
    assert "H100" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[h100]\nusd_per_hour = -1\n", "line 2: h100.usd_per_hour"),
        ("[h100]\nusd_per_hour = true\n", "line 2: h100.usd_per_hour"),
        ("[h100]\nusd_per_hour = nan\n", "line 2: h100.usd_per_hour"),
        ("[h100]\nusd_per_hour = inf\n", "line 2: h100.usd_per_hour"),
        ("[h100]\n", "line 1: h100.usd_per_hour"),
        ("[h100]\nusd_per_hour = 1\nusd = 2\n", "line 3: h100.usd"),
        ("h100 = 2\n", "line 1: h100"),
        ("[h100\n", "line 1"),
        ("", "gives no price"),
        ('[h100]\nusd_per_hour = 2\n["h100 sxm"]\nusd_per_hour = 3\n', "line 3: h100 sxm"),
    ],
)
def test_a_mistake_in_the_prices_names_its_line_and_its_key(tmp_path, text, place):
    with pytest.raises(LegroomError, match=place):
        read_price_file(written(tmp_path, text))


def test_a_price_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(LegroomError, match="cannot be read"):
        read_price_file(str(tmp_path / "none.toml"))
