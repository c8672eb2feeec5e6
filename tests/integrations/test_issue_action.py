"""The action that answers issues: its script, run against a stand-in of GitHub's API."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml
from metrics_server import Answering, answering

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integrations/github-issues"
FAILED = (ROOT / "docs/samples/kv-too-small.log").read_text("utf-8")
UNPLACED = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
BROKEN_CODE = "Traceback (most recent call last):\n  File \"a.py\", line 1, in <module>\nKeyError: 'architectures'"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("answer_issue", FOLDER / "answer_issue.py")
    module = sys.modules["answer_issue"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Forge:
    """Issues' comments as GitHub's API lists and takes them."""

    def __init__(self, *comments: dict[str, object], status: int = 200) -> None:
        self.comments, self.status = list(comments), status
        self.writes: list[tuple[str, str]] = []

    def handler(forge) -> type[Answering]:
        class Handler(Answering):
            def do_GET(self) -> None:
                self.answer(json.dumps(forge.comments).encode(), forge.status)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))["body"]
                forge.writes.append((f"{self.command} {self.path}", body))
                self.answer(b"{}", forge.status)

            do_PATCH = do_POST

        return Handler


def run(script, forge, monkeypatch, tmp_path, body, labels=("memory",), title="[Bug]: it does not start"):
    """The step of the action for an issue of ann; what was written."""
    issue = {"number": 7, "title": title, "body": body, "user": {"login": "ann"}}
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"issue": {**issue, "labels": [{"name": name} for name in labels]}}))
    with answering(forge.handler()) as url:
        settings = {"GITHUB_EVENT_PATH": str(event), "GITHUB_API_URL": url, "GITHUB_REPOSITORY": "o/r", "GH_TOKEN": "s"}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        assert script.main() == 0
    return forge.writes


def comment(number, body, login="ann", kind="User"):
    return {"id": number, "body": body, "user": {"login": login, "type": kind}}


def test_a_sure_diagnosis_is_written_once(script, monkeypatch, tmp_path):
    body = f"It fails, @team [x](http://e.example)\n```\n{FAILED}\n```"
    ((call, text),) = run(script, Forge(), monkeypatch, tmp_path, body)
    assert call == "POST /repos/o/r/issues/7/comments"
    assert text.startswith(script.MARKER)
    assert "`kv_too_small_for_max_len`" in text
    assert "--max-model-len" in text
    assert "[x](http" not in text


def test_what_is_not_sure_asks_for_two_facts(script, monkeypatch, tmp_path):
    ((_, text),) = run(script, Forge(), monkeypatch, tmp_path, UNPLACED)
    assert "Two facts would decide" in text
    assert [line[:2] for line in text.splitlines() if line[:2] in ("1.", "2.", "3.")] == ["1.", "2."]


def test_facts_in_a_comment_of_the_author_edit_the_own_comment(script, monkeypatch, tmp_path):
    asked = comment(3, f"{script.MARKER}\nTwo facts", "github-actions[bot]", "Bot")
    forge = Forge(comment(1, "me too: " + UNPLACED, "bob"), asked, comment(4, FAILED))
    ((call, text),) = run(script, forge, monkeypatch, tmp_path, "It does not start.")
    assert call == "PATCH /repos/o/r/issues/comments/3"
    assert "`kv_too_small_for_max_len`" in text


@pytest.mark.parametrize(
    ("body", "labels", "title"),
    [
        (BROKEN_CODE, ["memory"], "[Bug]: KeyError"),
        ("Please add a progress bar.", ["memory"], "[Feature]: progress"),
        (FAILED, ["memory"], "[Feature]: shorten the context by itself"),
        (FAILED, ["bug"], "[Bug]: without the label"),
    ],
    ids=["not memory", "no log", "a wish", "no label"],
)
def test_it_is_silent_otherwise(script, monkeypatch, tmp_path, body, labels, title):
    assert run(script, Forge(), monkeypatch, tmp_path, body, labels, title) == []


def test_a_marker_of_somebody_else_is_not_edited(script, monkeypatch, tmp_path):
    forge = Forge(comment(3, f"{script.MARKER}\nspoofed", "eve"))
    ((call, _),) = run(script, forge, monkeypatch, tmp_path, FAILED)
    assert call.startswith("POST")


def test_a_token_that_may_only_read_is_a_warning(script, monkeypatch, tmp_path, capsys):
    run(script, Forge(status=403), monkeypatch, tmp_path, FAILED)
    assert "::warning::the comment was not written" in capsys.readouterr().out


def test_the_action_runs_the_script_with_its_inputs():
    action = yaml.safe_load((FOLDER / "action.yml").read_text("utf-8"))
    (step,) = action["runs"]["steps"]
    assert step["run"].rstrip().endswith('answer_issue.py"')
    assert {"LEGROOM_LABEL", "GH_TOKEN"} <= set(step["env"])
