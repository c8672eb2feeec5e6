from __future__ import annotations

import re

import pytest

from legroom.facts import read_data
from legroom.render.translation import in_language

NAMES = [row["name"] for row in read_data("trainers.json")["launchers"]]


@pytest.mark.parametrize("name", NAMES)
def test_where_a_launcher_takes_its_settings_is_said_in_chinese(name: str) -> None:
    assert re.search("[\u4e00-\u9fff]", in_language(f"in {name}: --max-model-len 4096", "zh"))
