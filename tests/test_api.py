import doctest
import json

import pytest

import legroom
from legroom.errors import LegroomError


def test_the_docstring_tells_the_truth():
    assert doctest.testmod(legroom).failed == 0


def test_a_plan_shows_itself_as_text_json_and_picture():
    answer = legroom.plan("llama-3.1-8b", gpu="h100", max_model_len=8192)
    assert "weights" in str(answer)
    assert answer.svg().startswith("<svg")
    assert json.loads(json.dumps(answer.json()))["verdict"] == answer.verdict
    assert answer.command[:3] == ["vllm", "serve", answer.plan.target.model.name]


def test_a_layout_is_that_of_the_plan():
    assert legroom.layout("llama-3.1-8b", gpu="l4") == legroom.plan("llama-3.1-8b", gpu="l4", advice=False).layout


def test_an_unknown_argument_is_refused_with_the_nearest():
    with pytest.raises(LegroomError, match="max_model_length") as refused:
        legroom.plan("llama-3.1-8b", gpu="h100", max_model_length=8192)
    assert "max_model_len" in refused.value.hint


def test_importing_legroom_is_cheap_until_it_is_used():
    import subprocess
    import sys

    code = "import sys, legroom; sys.exit('legroom.memory.deployment_memory' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_there_is_nothing_else():
    with pytest.raises(AttributeError):
        _ = legroom.nonsense
    assert "plan" in dir(legroom)


def test_an_argument_that_the_release_lacks_is_refused_as_its_flag_would_be():
    with pytest.raises(LegroomError, match=r"came with vLLM 0\.10\.2"):
        legroom.plan("llama-3.1-8b", gpu="h100", vllm="0.8.5", kv_cache_memory_bytes=8 << 30)
    assert legroom.plan("llama-3.1-8b", gpu="h100", vllm="0.8.5", kv_cache_memory_bytes=None).verdict == "fits"


def test_a_release_older_than_the_model_is_said():
    old = legroom.plan("gpt-oss-20b", gpu="h100", vllm="0.8.5", advice=False)
    assert any("does not list GptOssForCausalLM" in note for note in old.plan.notes)
    new = legroom.plan("gpt-oss-20b", gpu="h100", vllm="0.11.0", advice=False)
    assert not any("does not list" in note for note in new.plan.notes)


def test_prediction_layers_that_a_model_lacks_are_refused():
    spec = {"method": "mtp", "num_speculative_tokens": 1}
    with pytest.raises(LegroomError, match="Unsupported speculative method"):
        legroom.plan("llama-3.1-8b", gpu="h200", advice=False, speculative_config=spec)
    older = legroom.plan("llama-3.1-8b", gpu="h200", vllm="0.20.0", advice=False, speculative_config=spec).plan.notes
    assert any("no prediction layers" in note for note in older)
    notes = legroom.plan("deepseek-v3", gpu="h200", advice=False, speculative_config=spec).plan.notes
    assert not any("no prediction layers" in note for note in notes)


def test_size_says_which_gpus_hold_a_model_and_shows_itself():
    report = legroom.size("llama-3.1-8b", context="8k", concurrency=16, gpus=["h100", "l4"])
    assert report.fits
    counts = {row["gpu"]: row["count"] for row in report.json()["rows"]}
    assert counts == {"NVIDIA L4": 2, "NVIDIA H100 80GB HBM3": 1}
    assert "16 requests of 8,192 tokens" in str(report)
    with pytest.raises(LegroomError, match="not an engine argument"):
        legroom.size("llama-3.1-8b", max_modle_len=8192)
    with pytest.raises(LegroomError, match="at least 1"):
        legroom.size("llama-3.1-8b", context=0)


@pytest.mark.parametrize("concurrency", [float("nan"), float("inf"), 0])
def test_a_concurrency_that_is_no_number_of_requests_is_refused(concurrency):
    with pytest.raises(LegroomError, match="at least 1"):
        legroom.size("llama-3.1-8b", concurrency=concurrency)


def test_a_log_may_be_named_by_its_path_as_a_string(tmp_path):
    log = tmp_path / "c.log"
    log.write_text("ERROR ... ValueError: No available memory for the cache blocks.\n")
    assert legroom.diagnose(str(log)).findings == legroom.diagnose(log).findings != ()
    with pytest.raises(LegroomError, match=r"d\.log"):
        legroom.diagnose(str(tmp_path / "d.log"))
