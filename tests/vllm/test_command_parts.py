"""A command line taken apart keeps every word, and knows a flag by any of its spellings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.facts.flags import flags_ever
from legroom.facts.releases import release
from legroom.vllm.command_parts import command_parts, long_name

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
