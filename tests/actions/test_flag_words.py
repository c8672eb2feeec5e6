"""Changed flags replace every spelling of the old ones and leave all other words alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.actions.flag_words import flags_in, require_server, way_back, with_flags
from legroom.actions.platform import ActionFailed, FlagChange

LINE = ["vllm", "serve", "org/model", "--max_model_len", "32768", "--enforce-eager", "--port", "8000"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"--max-model-len": "8192"}, "vllm serve org/model --enforce-eager --port 8000 --max-model-len 8192"),
        ({"--enforce-eager": None}, "vllm serve org/model --max_model_len 32768 --port 8000"),
        ({"--max-model-len": "-1"}, "vllm serve org/model --enforce-eager --port 8000 --max-model-len -1"),
        ({"--seed": "1"}, "vllm serve org/model --max_model_len 32768 --enforce-eager --port 8000 --seed 1"),
        ({}, "vllm serve org/model --max_model_len 32768 --enforce-eager --port 8000"),
    ],
)
def test_a_flag_is_replaced_removed_or_added(flags, expected):
    assert with_flags(LINE, flags) == expected.split()


def test_a_switch_takes_no_word_after_it_along():
    assert with_flags(["vllm", "serve", "--enforce-eager", "org/model"], {"--enforce-eager": None})[-1] == "org/model"


def test_the_negative_spelling_of_a_switch_goes_too():
    words = ["vllm", "serve", "m", "--no-enable-prefix-caching"]
    back = ["vllm", "serve", "m", "--enable-prefix-caching"]
    assert with_flags(words, {"--enable-prefix-caching": ""}) == back
    assert with_flags(back, {"--no-enable-prefix-caching": ""}) == words


@pytest.mark.parametrize("spelling", ["-tp 4", "--tensor_parallel_size=4", "--tensor-parallel-siz 4"])
def test_every_spelling_of_a_flag_is_the_flag(spelling):
    words = ["vllm", "serve", "m", *spelling.split(), "--port", "1"]
    assert with_flags(words, {"--tensor-parallel-size": "2"})[3:] == ["--port", "1", "--tensor-parallel-size", "2"]


def test_a_list_goes_with_all_its_values():
    words = ["vllm", "serve", "m", "--cuda-graph-sizes", "1", "2", "4", "--port", "1"]
    assert with_flags(words, {"--cuda-graph-sizes": None}) == ["vllm", "serve", "m", "--port", "1"]


@given(st.lists(st.sampled_from(LINE[3:])), st.sampled_from(["--max-model-len", "--port"]), st.integers(1, 10**6))
def test_a_flag_stands_once_with_its_new_value_whatever_was_there(words, flag, value):
    made = with_flags(words, {flag: str(value)})
    assert [word.replace("_", "-") for word in made].count(flag) == 1
    assert made[-2:] == [flag, str(value)]
    assert with_flags(made, {flag: str(value)}) == made


def test_only_a_command_that_starts_vllm_can_have_its_flags_changed():
    require_server(["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "here")
    require_server(["/opt/venv/bin/vllm", "serve", "m"], "here")
    with pytest.raises(ActionFailed, match="cannot see"):
        require_server(["/bin/bash", "/opt/start.sh"], "here")
    require_server(["--model", "m"], "an image", in_image=True)
    with pytest.raises(ActionFailed, match="cannot see"):
        require_server(["/bin/bash", "-c", "vllm serve m"], "an image", in_image=True)


def test_a_change_reads_as_a_sentence():
    change = FlagChange({"--max-model-len": "8192", "--enforce-eager": "", "--seed": None}, {"A": "1", "B": None})
    assert str(change) == "--max-model-len 8192, --enforce-eager, without --seed, A=1, without B"


FLAGS = st.dictionaries(
    st.sampled_from(["--max-model-len", "--port", "--seed"]), st.integers(0, 9).map(str), max_size=3
)  # fmt: skip


@given(FLAGS, FLAGS)
def test_the_way_back_leads_back(now, before):
    words = [word for pair in now.items() for word in pair]
    changed = with_flags(["vllm", "serve", "m", *words], way_back(words, [w for pair in before.items() for w in pair]))
    assert flags_in(changed) == before
