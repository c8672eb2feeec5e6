"""The names of vLLM's that the plugin reads, against what its releases have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from legroom.worker import stack
from legroom.worker.worker_memory import PROFILING

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "tests/fixtures/worker_names.json").read_text("utf-8"))
NAMES, RELEASES = RECORDED["names"], RECORDED["releases"]
SETTINGS = {name for names in stack._SETTINGS.values() for name in names}
STEP = ("scheduler_output", "num_scheduled_tokens", "scheduled_new_reqs", "scheduled_cached_reqs", "requests")
STATES = ("input_batch of runner V2", "req_id_to_index", "prompt_len", "prompt_logprobs_worker", "uses_prompt_logprobs")
NEEDED = {
    "every worker's gauges, a record of a refused request": (
        "load_general_plugins",
        "_WORLD",
        "determine_available_memory",
    ),
    "a record of an error that vLLM logs": ("logger.exception of a worker", "logger.exception of an engine"),
    "the settings that decide memory": tuple(SETTINGS - {"kv_cache_memory_bytes"}),
    "the step and its requests (model runner V1)": STEP,
    "the step while runner V2 samples, and its running requests": STATES,
    "how many log-probabilities those want": ("num_prompt_logprobs",),
    "the graphs' pool told from other private pools": ("_global_graph_pool",),
}


def documented() -> dict[str, str]:
    """What a record shows, and the first release that shows it."""
    text = (ROOT / "docs/black-box.md").read_text("utf-8")
    table = text.partition("## Which release shows what")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {what: first for first, shown in rows[2:] for what in shown.split("; ")}


@pytest.mark.parametrize("what", NEEDED)
def test_the_table_says_what_the_releases_have(what: str) -> None:
    has = [release for release in RELEASES if all(NAMES[name][release] for name in NEEDED[what])]
    assert has == RELEASES[RELEASES.index(documented()[what]) :]


def test_the_table_has_no_other_row() -> None:
    assert documented().keys() == NEEDED.keys()


def test_every_name_that_is_read_was_looked_up() -> None:
    assert {stack._STEP, *SETTINGS, *PROFILING} <= NAMES.keys()
