"""A policy file is read strictly: each mistake names its line and its key, and a broken one leaves the old policy."""

import os
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.guard.policy import ClientPolicy, Policy, PolicyFile, parse_policy, policy_toml, read_policy


def complaint(text):
    with pytest.raises(LegroomError) as caught:
        parse_policy(text, "guard.toml")
    return caught.value


def test_an_empty_file_is_the_default_policy():
    assert parse_policy("") == Policy()


def test_the_printed_policy_reads_back_as_itself():
    assert parse_policy(policy_toml()) == Policy()


def test_a_printed_text_with_quotes_reads_back_as_itself():
    policy = Policy(clients=ClientPolicy(header='x-"client"'))
    assert parse_policy(policy_toml(policy)) == policy


def test_sizes_may_be_written_with_units():
    assert parse_policy('[requests]\nbody_bytes = "2MiB"').requests.body_bytes == 2 << 20


def test_open_ended_takes_a_word_or_a_number():
    assert parse_policy("[pool]\nopen_ended = 512").pool.open_ended == 512
    assert parse_policy('[pool]\nopen_ended = "worst"').pool.open_ended == "worst"


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ("[pool]\n\novercommit = 'much'", 3, "pool.overcommit"),
        ("[queue]\nwait_s = 1\n[pool]\novercomit = 2", 4, "overcomit"),
        ("[requests]\nmax_images = true", 2, "requests.max_images"),
        ("[requests]\nmax_output_tokens = 1.5", 2, "requests.max_output_tokens"),
        ("[requests]\nmax_output_tokens = -1", 2, "requests.max_output_tokens"),
        ('[requests]\noutput_over = "drop"', 2, "requests.output_over"),
        ("[pools]\ntokens = 1", 1, "pools"),
        ("pool = 3", 1, "pool"),
        ("[requests]\nbody_bytes = 'heavy'", 2, "requests.body_bytes"),
        ("[pool]\nwhen_unknown = 3", 2, "pool.when_unknown"),
        ("pool.tokens = 'x'", 1, "pool.tokens"),
        ("[pool]\ntokens = \n", 2, "tokens"),
        ("[pool]\ntokens = 1\ntokens = 2", 3, "tokens"),
    ],
)
def test_a_mistake_names_its_line_and_its_key(text, line, named):
    error = complaint(text)
    assert error.message.startswith(f"guard.toml, line {line}")
    assert named in error.message


def test_a_number_of_thousands_of_digits_is_complained_about_where_it_stands():
    error = complaint("[pool]\ntokens = " + "9" * 5000 + "\nmax_running = 4\n")
    assert "line 2, key 'tokens'" in error.message


def test_a_misspelt_key_gets_its_likely_spelling():
    assert "overcommit" in complaint("[pool]\novercomit = 2").hint


@given(st.text(max_size=200))
def test_any_text_is_a_policy_or_a_complaint(text):
    try:
        assert isinstance(parse_policy(text), Policy)
    except LegroomError as error:
        assert "line" in error.message


@given(st.recursive(st.booleans() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=2)))
def test_any_value_is_taken_or_complained_about(value):
    import json

    try:
        text = f"[pool]\ntokens = {json.dumps(value)}"
        tomllib.loads(text)
        assert parse_policy(text).pool.tokens >= 0
    except (LegroomError, tomllib.TOMLDecodeError):
        pass


def test_a_missing_file_is_complained_about(tmp_path):
    with pytest.raises(LegroomError, match="cannot be read"):
        read_policy(tmp_path / "none.toml")


def test_a_file_that_is_no_text_is_complained_about(tmp_path):
    (tmp_path / "policy.toml").write_bytes(b"[pool]\n\xff\xfe")
    with pytest.raises(LegroomError, match="line 2: not UTF-8"):
        read_policy(tmp_path / "policy.toml")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("[pool]\ntokens = 100")
    return PolicyFile(path, 0.0)


def rewrite(file, text):
    file.path.write_text(text)
    stamp = file.path.stat()
    os.utime(file.path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))


def test_a_changed_file_is_taken_over(file):
    rewrite(file, "[pool]\ntokens = 200")
    assert file.reload(2.0) is None
    assert (file.policy.pool.tokens, file.reloads) == (200, 1)


def test_the_file_is_looked_at_once_a_second_at_most(file):
    assert not file.is_due(0.5)
    assert file.is_due(1.5)
    file.reload(1.5)
    assert not file.is_due(2.0)


def test_a_broken_file_leaves_the_old_policy_and_is_told_once(file):
    rewrite(file, "[pool]\ntokens = 'x'")
    assert "line 2" in file.reload(2.0)
    assert file.reload(4.0) is None
    assert (file.policy.pool.tokens, file.errors) == (100, 1)


def test_a_file_that_is_gone_leaves_the_old_policy(file):
    file.path.unlink()
    assert "cannot be read" in file.reload(2.0)
    assert file.policy.pool.tokens == 100


@pytest.mark.parametrize("left", ["", " \n", "# legroom guard policy\n", "[requests]\n", "[pool]\n[weights]\n"])
def test_a_file_that_sets_nothing_leaves_the_old_policy(file, left):
    rewrite(file, left)
    assert "is empty" in file.reload(2.0)
    assert file.policy.pool.tokens == 100
