"""Lint on shell scripts: the words that a shell would make of them, secrets, and processes that are ended."""

import pytest

from legroom.exports.lint.lint import Options, lint_texts


def findings(text, path="start.sh"):
    return [(one.rule, one.place.line) for one in lint_texts([(path, text)], Options()).findings]


# Words


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('BASE=(--port 1 --nope)\nARGS=("${BASE[@]}" --port 2)\nvllm serve org/m "${ARGS[@]}"', 1),
        ('OPTS="--port 1"\nOPTS+=" --nope"\nvllm serve org/m $OPTS', 2),
        ('OPTS="--port 1 --no"\nOPTS+="pe --seed 1"\nvllm serve org/m $OPTS', 1),
        ('CMD="vllm serve org/m --nope"\neval "$CMD"', 2),
        ('su - vllm -c "vllm serve org/m --nope"', 1),
        ("ssh gpu1 'vllm serve org/m --nope'", 1),
        ('tmux new-session -d -s v "vllm serve org/m --nope"', 1),
        ("vllm serve org/m ${EXTRA:+--nope}", 1),
        ('vllm serve org/m ${KEY:+--nope "$KEY"} --port 1', 1),
        ('more=(\n --nope\n)\nvllm serve org/m ${more[@]+"${more[@]}"}', 2),
    ],
)
def test_a_flag_is_found_however_the_script_puts_it_there(text, line):
    assert findings(text) == [("flag-unknown", line)]


@pytest.mark.parametrize(
    "text",
    [
        "echo vllm serve org/m --nope",
        "printf '%s\\n' vllm serve org/m --nope",
        'EXTRA=""\nvllm serve org/m ${EXTRA:+--nope}',
        'A=("$A"); vllm serve org/m "${A[@]}"',
    ],
)
def test_what_is_only_said_or_left_out_is_no_server_flag(text):
    assert findings(text) == []


def test_values_that_grow_for_ever_are_read_to_an_end():
    text = 'A=(x y)\nB="x y"\n' + 'A=("${A[@]}" "${A[@]}")\nB="$B $B"\nB+=" $B"\n' * 80
    assert findings(text + "vllm serve org/m --nope") == [("flag-unknown", text.count("\n") + 1)]
    assert findings("vllm serve org/m " + "${A:+" * 5000 + "}" * 5000) == []


# Secrets


@pytest.mark.parametrize(
    "option", ["-e HF_TOKEN=VALUE", "-eHF_TOKEN=VALUE", "--env HF_TOKEN=VALUE", "--env=HF_TOKEN=VALUE"]
)
@pytest.mark.parametrize(("value", "expected"), [("hf_abcdefghijk", ["secret-written"]), ("$HF_TOKEN", [])])
def test_a_secret_is_found_however_a_container_is_given_it(option, value, expected):
    text = f"docker run {option.replace('VALUE', value)} vllm/vllm-openai:v0.32.0 --model org/m"
    assert [rule for rule, _ in findings(text)] == expected


@pytest.mark.parametrize("value", ["mysecretempty1", "hf_yourself12345", "sk-examplesare9", "abcxxxdef"])
def test_a_secret_may_hold_a_word_that_stands_for_one(value):
    assert findings(f"vllm serve org/m --api-key {value}") == [("secret-written", 1)]


@pytest.mark.parametrize(
    "value", ["EMPTY", "your-api-key", "hf_your_token", "YOUR_KEY", "token-abc123", "hf_xxxxxxxx", "changeme", "<key>"]
)
def test_what_plainly_stands_for_a_secret_is_none(value):
    assert findings(f"vllm serve org/m --api-key '{value}'") == []


# Ending processes


@pytest.mark.parametrize(
    "text",
    [
        "ps aux | grep vllm | awk '{print $2}' | xargs kill -9",
        "ps -ef | grep '[v]llm' | awk '{print $2}' | xargs -r kill",
        "ps aux | awk '/vllm/ {print $2}' | xargs kill",
        "kill -9 $(ps aux | grep vllm | awk '{print $2}')",
    ],
)
def test_ending_what_ps_and_grep_find_is_ending_by_a_pattern(text):
    assert findings(text) == [("kill-by-pattern", 1)]


@pytest.mark.parametrize(
    "text", ["ps aux | grep nginx | awk '{print $2}' | xargs kill -9", "ps -o pid= --ppid 12 | xargs kill"]
)
def test_other_programs_are_nobodys_business(text):
    assert findings(text) == []
