"""Answers a GitHub issue about vLLM memory: with the diagnosis where legroom is sure, with a question for the two facts
that are missing where it is not, and not at all where the text shows no memory problem.

Runs in the action beside it: reads the event from GITHUB_EVENT_PATH, needs GH_TOKEN and GITHUB_REPOSITORY, and writes
one comment an issue, which it edits when the issue or its author's comments change.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import legroom
from legroom.errors import LegroomError
from legroom.version import __version__

MARKER = "<!-- legroom diagnosis -->"
SURE = 0.85
"""From here on `legroom diagnose` prints `sure`; first-sight answers with this confidence were right 28 times of 28."""
NOT_MEMORY = {"not_memory", "wrong_flag", "driver_or_cuda_mismatch", "request_too_long"}
NEVER_SURE = {"kv_preemption_thrash", "leak_over_time", "prefix_cache_waste"}
"""Conditions that vLLM only warns of; the error that the issue is about may be another."""
NO_REPORT = re.compile(
    r"\s*\[(feature|rfc|doc|docs|roadmap|ci failure|ci|misc|new model|installation)\b", re.IGNORECASE
)
"""Titles, by vLLM's own templates, of issues that report no failure of a server."""
LONGEST_COMMENT = 60_000
"""GitHub takes 65,536 characters."""


class Answer(NamedTuple):
    """What to write under an issue; an empty text is silence."""

    kind: str
    """diagnosis | question | silence"""
    text: str = ""
    cause: str = ""


def answer(text: str) -> Answer:
    """The answer to the title, the body and the author's comments of an issue."""
    try:
        report = legroom.diagnose(text + "\n")
    except LegroomError:
        return Answer("silence")
    document = report.json()
    first = next(iter(document["findings"]), None)
    if NO_REPORT.match(text) or first is None or first["cause"] in NOT_MEMORY or not _shows_shortage(document):
        return Answer("silence")
    is_sure = first["confidence"] >= SURE and first["cause"] not in NEVER_SURE
    if document["verdict"] == "cause found" and is_sure:
        return Answer("diagnosis", _diagnosis(first, report.text()), first["cause"])
    return Answer("question", _question(_missing_facts(document)), first["cause"])


def _shows_shortage(document: dict[str, Any]) -> bool:
    """Whether the text itself shows that memory was short, not only a log that breaks off."""
    seen = {item["id"] for finding in document["findings"] for item in finding["evidence"]}
    return document["verdict"] == "cause found" or any("oom" in name for name in seen)


def _missing_facts(document: dict[str, Any]) -> list[str]:
    """The two facts that would decide, what the text lacks most first."""
    known = document["deployment"]
    has_command = bool(known.get("model") and known.get("args"))
    facts = {
        "the log from the first line of the start to the error, as text": document["phase"] is None,
        "the whole command that starts vLLM (or the arguments of `LLM(...)`) and its version": not has_command,
        "what `nvidia-smi` prints while it fails: the card, and which processes hold memory": True,
        "the output of `free -g; df -h /dev/shm` on that machine": True,
    }
    return [fact for fact, is_missing in facts.items() if is_missing][:2]


def _diagnosis(finding: dict[str, Any], whole: str) -> str:
    """The cause, its proof, the first fix, and all of it folded."""
    lines = [f"**`{finding['cause']}`** ({finding['entry']}): {_plain(finding['why'])}", ""]
    lines += [f"> `{_code(item['text'])}`" for item in finding["evidence"][:2]]
    if fix := next(iter(finding["fixes"]), None):
        command = shlex.join(fix["command"]) or "; ".join(fix["steps"])
        lines += ["", f"What should work: `{_code(command)}`", "", _plain(fix["why"])]
    fence = "~~~~~~"
    shown = whole.replace(fence, "")
    return "\n".join(
        [*lines, "", "<details><summary>the whole diagnosis</summary>", "", fence + "text", shown, fence, "</details>"]
    )


def _question(facts: list[str]) -> str:
    """A request for what is missing."""
    listed = "\n".join(f"{number}. {fact}" for number, fact in enumerate(facts, 1))
    return (
        f"This looks like a memory problem, and the text does not show which one. Two facts would decide:\n\n{listed}"
    )


def _plain(text: str) -> str:
    """A sentence without mentions, links or markup of its own."""
    return "".join(f"\\{letter}" if letter in "*_[]<>`#|~" else letter for letter in text).replace("@", "@\u200b")


def _code(text: str) -> str:
    """A line for a span of code."""
    return " ".join(text.replace("`", "'").split())[:600]


def comment_of(found: Answer, label: str) -> str:
    """The comment with its marker and how to be rid of it."""
    why = f"Written by legroom {__version__} because of the label `{_code(label)}`."
    foot = f"<sub>{why} It edits this comment when the issue changes, and is silent without the label.</sub>"
    return f"{MARKER}\n{found.text[:LONGEST_COMMENT]}\n\n{foot}"


def ask(method: str, path: str, document: dict[str, Any] | None = None) -> Any:
    """One call of the API; raises where it fails."""
    base = os.environ.get("GITHUB_API_URL", "https://api.github.com")
    request = urllib.request.Request(f"{base}/repos/{os.environ['GITHUB_REPOSITORY']}/issues{path}", method=method)
    request.add_header("Authorization", f"Bearer {os.environ.get('GH_TOKEN', '')}")
    request.add_header("Accept", "application/vnd.github+json")
    body = None if document is None else json.dumps(document).encode()
    with urllib.request.urlopen(request, body, timeout=30) as reply:
        return json.load(reply)


def comments_of(number: int) -> list[dict[str, Any]]:
    """All comments of an issue."""
    found: list[dict[str, Any]] = []
    while len(page := ask("GET", f"/{number}/comments?per_page=100&page={len(found) // 100 + 1}")) == 100:
        found += page
    return found + page


def main() -> int:
    """Answers the issue of the event; the job's log says what was done."""
    issue = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text("utf-8"))["issue"]
    label = os.environ.get("LEGROOM_LABEL") or "memory"
    if issue.get("pull_request") or label not in [each["name"] for each in issue["labels"]]:
        print(f"no issue with the label {label!r}: nothing is read")
        return 0
    try:
        comments = comments_of(issue["number"])
        said = [each["body"] or "" for each in comments if each["user"]["login"] == issue["user"]["login"]]
        found = answer("\n".join([issue["title"], issue["body"] or "", *said]))
        print(f"issue {issue['number']}: {found.kind} {found.cause}".rstrip())
        own = [each for each in comments if each["user"]["type"] == "Bot" and (each["body"] or "").startswith(MARKER)]
        if own:
            taken_back = Answer("silence", "The issue's text no longer shows a memory problem that legroom knows.")
            text = comment_of(found if found.text else taken_back, label)
            ask("PATCH", f"/comments/{own[0]['id']}", {"body": text})
        elif found.text:
            ask("POST", f"/{issue['number']}/comments", {"body": comment_of(found, label)})
    except OSError as error:
        print(f"::warning::the comment was not written: {error}. The token needs issues write.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
