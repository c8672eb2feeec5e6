"""Which alerts lint calls wrong: each operand of `and`, `or` and `unless` is judged by what it really measures."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from legroom.lint.linter import LintOptions, lint_texts
from legroom.lint.promql_reader import operands

KV = "vllm:kv_cache_usage_perc"
WAITING = "vllm:num_requests_waiting"


def rules_of(expression, *records):
    rules = [{"record": name, "expr": text} for name, text in records] + [{"alert": "A", "expr": expression}]
    text = yaml.safe_dump({"groups": [{"name": "a", "rules": rules}]}, width=1000)
    return sorted(finding.rule for finding in lint_texts([("rules.yml", text)], LintOptions()).findings)


@pytest.mark.parametrize(
    "expression",
    [
        f"time() - timestamp({KV}) > 300",
        f"count({KV}) > 3",
        f"sum({KV}) > 3",
        f"changes({KV}[10m]) > 5",
        f"absent({KV}) > 0",
        f"predict_linear({KV}[1h], 3600) > 2",
        f"{KV} > bool 2 * scalar({WAITING})",
    ],
)
def test_what_is_not_on_the_scale_of_the_pool_is_left_alone(expression):
    assert rules_of(expression) == []


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (f"0.9 < {KV}", ["alert-full-pool"]),
        (f"sum by (instance) ({KV}) > 0.9", ["alert-full-pool"]),
        (f"{KV} > 95 and {WAITING} > 0", ["alert-never"]),
        (f"{KV} > bool 95 and {WAITING} > 0", ["alert-never"]),
        (f"({WAITING} > 0) and on (instance) (95 <= {KV})", ["alert-never"]),
        (f"100 * {KV} > 95 and {WAITING} > 0", []),
        (f"95 < {KV} * 100 and {WAITING} > 0", []),
        (f"{KV} > 0.9 and on (instance) up == 1", ["alert-full-pool"]),
    ],
)
def test_each_operand_is_judged_by_its_own_series_and_number(expression, expected):
    assert rules_of(expression) == expected


def test_a_recorded_series_counts_as_what_it_is_recorded_from():
    record = ("job:vllm_waiting:sum", f"sum by (instance) ({WAITING})")
    expression = f"{KV} > 0.95 and on (instance) job:vllm_waiting:sum > 0"
    assert rules_of(expression, record) == []
    assert rules_of(expression, ("job:vllm_waiting:sum", "up")) == ["alert-full-pool"]


def test_a_record_of_itself_ends():
    assert rules_of(f"{KV} > 0.95 and a:b > 0", ("a:b", "a:b + c:d"), ("c:d", "a:b")) == ["alert-full-pool"]


def test_silence_beside_other_progress_is_no_quiet_night():
    moving, still = "rate(vllm:prompt_tokens_total[5m]) > 0", "rate(vllm:generation_tokens_total[5m]) == 0"
    assert rules_of(f"{moving} and on (instance) {still}") == []
    assert rules_of(still) == ["alert-no-traffic"]
    assert rules_of("0 == rate(vllm:generation_tokens_total[5m])") == ["alert-no-traffic"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a > 1", ["a > 1"]),
        ("a and on (x) b or (c unless ignoring (y) (d > 1))", ["a", "b", "c", "d > 1"]),
        ("(a or b) > 1 and c", ["(a or b) > 1", "c"]),
        ('a{and="or"} and b', ['a{and="or"}', "b"]),
    ],
)
def test_operands(expression, expected):
    compared = list(operands(expression))
    assert [operand.text for operand in compared] == expected
    assert all(expression[operand.offset :].startswith(operand.text) for operand in compared)


@given(st.lists(st.sampled_from(["a", "and", "or", "(", ")", "{", "}", "on", "[", "]", ">", "1", "sum", "by"])))
def test_no_order_of_words_upsets_the_operands(words):
    for operand in operands(" ".join(words)):
        list(operand.comparisons())
