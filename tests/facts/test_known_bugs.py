from __future__ import annotations

import pytest

from legroom.diagnosis.causes import causes
from legroom.facts.known_bugs import KnownBug, bugs_with, known_bugs
from legroom.facts.log_messages import message_patterns
from legroom.facts.releases import release
from legroom.vllm.args import ServeArgs


@pytest.mark.parametrize("bug", known_bugs(), ids=lambda bug: bug.id)
def test_a_bug_ends_before_the_release_that_fixes_it(bug: KnownBug) -> None:
    assert bug.is_in(release(bug.first))
    if bug.fixed_in is not None:
        assert bug.last is not None
        assert bug.is_in(release(bug.last))
        assert not bug.is_in(release(bug.fixed_in))


@pytest.mark.parametrize("bug", known_bugs(), ids=lambda bug: bug.id)
def test_a_bug_names_causes_messages_a_thread_and_a_way_out(bug: KnownBug) -> None:
    assert set(bug.causes) <= {cause.label for cause in causes()}
    assert set(bug.evidence) <= {message.id for message in message_patterns()}
    assert "#" in bug.source
    assert "commit" in bug.source or bug.fixed_in is None
    assert bug.flags or bug.env or bug.steps


def test_there_are_enough_to_be_of_use() -> None:
    assert len(known_bugs()) >= 15


def test_a_setting_decides_whether_a_bug_of_the_release_is_named() -> None:
    def ids(args: ServeArgs) -> set[str]:
        return {bug.id for bug in bugs_with(release("0.11.2"), args, "nvidia")}

    assert "eagle_embedding_copy" in ids(ServeArgs(speculative_config={"method": "eagle"}))
    assert "eagle_embedding_copy" not in ids(ServeArgs())
    assert "request_cycle" not in ids(ServeArgs(enable_prefix_caching=False))


def test_a_bug_of_one_platform_is_not_told_on_another() -> None:
    assert "cpu_pool_ignores_limit" not in {bug.id for bug in bugs_with(release("0.20.0"), ServeArgs(), "nvidia")}
    assert "cpu_pool_ignores_limit" in {bug.id for bug in bugs_with(release("0.20.0"), ServeArgs(), "cpu")}
