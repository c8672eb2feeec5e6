"""What is remembered is what was computed, for the very objects it was computed from."""

from hypothesis import given
from hypothesis import strategies as st

from legroom.memo import Memo


def test_a_result_is_computed_once():
    memo, owner, calls = Memo[int](), object(), []
    for _ in range(3):
        assert memo.get((owner,), ("a",), lambda: len(calls) or calls.append(1) or 7) == 7
    assert len(calls) == 1


def test_equal_owners_that_are_not_the_same_have_results_of_their_own():
    memo = Memo[str]()
    first, second = ["x"], ["x"]
    assert memo.get((first,), (), lambda: "first") == "first"
    assert memo.get((second,), (), lambda: "second") == "second"


def test_an_owner_that_nobody_else_holds_is_not_taken_for_a_new_one():
    memo = Memo[int]()
    for number in range(100):
        assert memo.get(([number],), (), lambda number=number: number) == number


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 4))
def test_a_full_memo_still_answers_right(questions, most):
    memo, owner = Memo[int](most), object()
    for asked in questions:
        assert memo.get((owner,), (asked,), lambda asked=asked: asked * asked) == asked * asked


def test_a_memo_that_forgot_everything_computes_again():
    memo, owner = Memo[int](), object()
    memo.get((owner,), (), lambda: 1)
    Memo.forget_everything()
    assert memo.get((owner,), (), lambda: 2) == 2
