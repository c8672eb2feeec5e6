"""Questions of the supervisor to a task of its own process."""

from __future__ import annotations

import errno
import select
import subprocess
import sys
import tempfile

import pytest

from legroom.errors import LegroomError
from legroom.run.task_process import TaskProcess, run_task


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    """As in a container whose disk is full, or only to be read."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")


def test_a_question_is_answered_without_a_disk():
    assert run_task("compare_pool", {"log": "/nowhere/log", "expected": {"text": ""}}) == {"line": ""}


def test_flags_to_keep_are_named_as_vllm_names_them():
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    given = {"words": words, "vllm": "0.32.0", "gpu": None, "drain_s": 1.0, "keep": ["max-model-len"]}
    assert run_task("prepare", given)["keep"] == ["max_model_len"]


def test_a_question_that_cannot_be_answered_is_told_without_a_disk():
    with pytest.raises(LegroomError, match="KeyError"):
        run_task("compare_pool", {})


def test_where_no_process_can_be_started_the_question_is_told_to_have_failed(monkeypatch):
    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    task = TaskProcess("compare_pool", {})
    assert select.select([task], [], [], 60)[0] == [task]
    with pytest.raises(LegroomError, match=r"Resource temporarily unavailable"):
        task.output()
