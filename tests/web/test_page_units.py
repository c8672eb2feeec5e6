"""The page's own functions that need no browser, run by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "page" / "src"


def evaluated(module: str, expression: str) -> Any:
    if shutil.which("node") is None:
        pytest.skip("no Node")
    script = f"import * as page from {json.dumps(str(PAGE / module))}; console.log(JSON.stringify({expression}))"
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_part_of_an_address_that_cannot_be_read_is_named_and_not_dropped():
    query = "model=a/b&gpus=-3&max-model-len=8192&Foo!=1&config={broken&max_num_seqs="
    setup = evaluated("setup.js", f"page.fromParams(new URLSearchParams({json.dumps(query)}))")
    assert setup["unread"] == ["gpus=-3", "Foo!=1", "config={broken", "max_num_seqs="]
    assert (setup["gpus"], setup["flags"]) == (None, {"max_model_len": 8192})


def test_a_length_may_be_written_with_k():
    lengths = evaluated("setup.js", '["32k", "4096", "1M", "0", "-5", "x"].map(page.readLength)')
    assert lengths == [32768, 4096, 1048576, None, None, None]


def test_both_languages_have_the_same_words():
    names = '["en", "zh"].map((one) => Object.keys(page.DICTIONARIES[one]).sort())'
    english, chinese = evaluated("text/dictionaries.js", names)
    assert english == chinese
