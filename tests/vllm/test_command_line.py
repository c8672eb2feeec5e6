"""A command line taken apart keeps every word, and changed flags replace every spelling of the old ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.flags import flags_ever
from legroom.facts.releases import release
from legroom.vllm.command_line import any_release_words, changes_back, command_parts, flags_in, long_name, with_flags

WORDS = st.lists(
    st.sampled_from([*sorted(flags_ever()), "--nothing-like-it", "-O3", "--seed=1", "1", "True", "{}", "", "-1", "m"])
)


@given(WORDS, st.sampled_from([None, "0.4.0", "0.10.2", "0.32.0"]))
def test_put_together_again_they_are_the_command(words, version):
    parts = list(command_parts(words, release(version) if version else None))
    assert [word for part in parts for word in part.words] == words
    assert all(part.words for part in parts)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("-tp 4", "--tensor-parallel-size", "4"),
        ("--gpu_memory_utilization=0.8", "--gpu-memory-utilization", "0.8"),
        ("--max-model-le 2k", "--max-model-len", "2k"),
        ("--no-enable-prefix-caching", "--enable-prefix-caching", ""),
        ("--compilation-config.level 3", "--compilation-config", "3"),
        ("--cuda-graph-sizes 1 2 4", "--cuda-graph-sizes", "1 2 4"),
        ("--num-lookahead-slots 2", "--num-lookahead-slots", "2"),  # gone since 0.9
        ("--enforce-eager", "--enforce-eager", ""),
    ],
)
def test_a_flag_has_one_name_and_its_own_words(words, name, value):
    (part, rest) = command_parts([*words.split(), "--port"])
    assert (part.long_name, part.value, rest.words) == (name, value, ("--port",))
    assert long_name(part.name) == name
    (same, _) = command_parts([*words.split(), "--port"], release("0.32.0"))
    assert (same.long_name, same.value) == (name, value)


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


FLAGS = st.dictionaries(
    st.sampled_from(["--max-model-len", "--port", "--seed"]), st.integers(0, 9).map(str), max_size=3
)


@given(FLAGS, FLAGS)
def test_the_way_back_leads_back(now, before):
    words = [word for pair in now.items() for word in pair]
    changed = with_flags(
        ["vllm", "serve", "m", *words], changes_back(words, [w for pair in before.items() for w in pair])
    )
    assert flags_in(changed) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable_prefix_caching": False, "seed": None}, ["--no-enable-prefix-caching"]),
        ({"max_num_seqs": 8, "max_model_len": -1}, ["--max-num-seqs", "8", "--max-model-len", "-1"]),
        ({"served_model_name": "-x"}, ["--served-model-name=-x"]),
        ({"compilation_config": {"level": 3}}, ["--compilation-config", '{"level": 3}']),
        ({"cudagraph_capture_sizes": (1, 2, 4)}, ["--cudagraph-capture-sizes", "1", "2", "4"]),
        ({"cudagraph_capture_sizes": []}, ["--cudagraph-capture-sizes", "[]"]),
    ],
)
def test_settings_are_written_as_they_are_typed_where_no_release_is_named(settings, words):
    assert any_release_words(settings) == words
