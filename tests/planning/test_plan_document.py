"""The plan document: written once, read back by everybody."""

import json
import subprocess
import sys

import pytest

from legroom import plan
from legroom.errors import LegroomError
from legroom.planning.plan_document import PlanDocument, plan_from_json, read_plan
from legroom.planning.plan_json import plan_document, replan


@pytest.fixture(scope="module")
def report():
    return plan("llama-3.1-8b", gpu="l4", vllm="0.32.0", pipeline_parallel_size=2, gpus=2, env={"VLLM_USE_V1": "1"})


def test_a_document_that_is_read_and_written_again_is_the_same(report):
    printed = json.loads(json.dumps(report.json(explain_math=True)))
    assert plan_from_json(printed).to_json() == printed
    assert "terms" not in report.json()


def test_reading_what_was_written_gives_the_same_record(report):
    written = plan_document(report.plan)
    assert plan_from_json(json.loads(json.dumps(written.to_json()))) == written


def test_a_document_is_made_a_plan_again(report):
    again = replan(plan_document(report.plan))
    assert again.layout == report.plan.layout


def test_what_a_reader_does_not_need_may_be_missing():
    document = plan_from_json({"kv": {"num_blocks": 7, "of_a_later_legroom": 1}}, needs=("kv.num_blocks",))
    assert (document.kv.num_blocks, document.layout.kv_cache_bytes, document.confidence) == (7, 0, {})


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        ([], "not a JSON object"),
        ({}, "no 'model'"),
        ({"kv": 3}, "kv is not a JSON object"),
        ({"kv": {"num_blocks": "many"}}, "kv.num_blocks is not a number"),
        ({"kv": {"num_blocks": True}}, "kv.num_blocks is not a number"),
        ({"kv": {"num_blocks": float("inf")}}, "kv.num_blocks is not a number"),
        ({"ranks": [{"weights_bytes": ""}]}, "ranks[0].weights_bytes is not a number"),
        ({"confidence": {"kv_cache_bytes": {"low": "x"}}}, "confidence.kv_cache_bytes.low is not a number"),
        ({"command": "vllm serve"}, "command is not a list"),
    ],
)
def test_what_is_wrong_with_a_document_is_said(document, wrong):
    with pytest.raises(LegroomError) as caught:
        plan_from_json(document, needs=("model",) if not document else ())
    assert wrong in caught.value.message


def test_a_file_that_is_missing_or_no_json_is_said(tmp_path):
    with pytest.raises(LegroomError, match="cannot be read"):
        read_plan(str(tmp_path / "none.json"))
    (tmp_path / "plan.json").write_text("[" * 100_000)
    with pytest.raises(LegroomError, match="not JSON"):
        read_plan(str(tmp_path / "plan.json"))


def test_reading_a_document_loads_neither_the_planner_nor_the_memory_model():
    code = "import sys, legroom.planning.plan_document\nprint([m for m in sys.modules if m.startswith('legroom.')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not any(room in loaded for room in ("legroom.memory", "legroom.vllm", "legroom.facts"))


def test_a_balancer_of_the_users_own_makes_every_copy_a_server():
    assert PlanDocument(args={"data_parallel_size": 4}).engines == 4
    assert PlanDocument(args={"data_parallel_size": 4}, command=("vllm", "--data-parallel-rank=1")).engines == 1
