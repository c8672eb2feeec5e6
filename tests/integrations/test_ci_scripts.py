"""The GitHub Action and the GitLab snippet: their scripts, run on a repository of their own."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import urllib.parse
from functools import partial
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2] / "integrations"
DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
metadata: {{name: qwen}}
spec:
  template:
    spec:
      nodeSelector: {{nvidia.com/gpu.product: NVIDIA-L4}}
      containers:
        - {{name: v, image: "vllm/vllm-openai:v0.11.0", args: [--model, Qwen/Qwen3-8B, --max-model-len, "{length}"]}}
"""

pytestmark = pytest.mark.skipif(shutil.which("git") is None or shutil.which("bash") is None, reason="git and bash")


ASKED_ONCE = """\
key=$(for word; do git show "$word" 2>/dev/null || echo "$word"; done | cksum | tr ' ' -)
if [ ! -e "{answers}/$key.code" ]; then
  code=0
  "{python}" -m legroom "$@" >"{answers}/$key.out" 2>"{answers}/$key.err" || code=$?
  echo "$code" >"{answers}/$key.code"
fi
cat "{answers}/$key.err" >&2
cat "{answers}/$key.out"
exit "$(cat "{answers}/$key.code")"
"""
"""legroom, which many tests ask about the same two versions of a file."""


class Repository:
    def __init__(self, folder: Path, bin_folder: Path, answers: Path) -> None:
        self.folder = folder
        bin_folder.mkdir()
        program(bin_folder / "legroom", ASKED_ONCE.format(answers=answers, python=sys.executable))
        self.env = {
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        }
        self.git("init", "-q", "-b", "main")

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.folder, env=self.env, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(self, **files: str | None) -> str:
        for name, text in files.items():
            path = self.folder / name.replace("__", ".")
            path.unlink() if text is None else path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", "a change")
        return self.git("rev-parse", "HEAD")

    def run(self, script: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROOT / script), *words],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
        )


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return tmp_path_factory.mktemp("answers")


@pytest.fixture
def repository(tmp_path, answers):
    (tmp_path / "repository").mkdir()
    return Repository(tmp_path / "repository", tmp_path / "bin", answers)


def test_a_change_that_breaks_a_server_is_told_and_fails(repository):
    base = repository.commit(deploy__yaml=DEPLOYMENT.format(length=8192), readme__md="x")
    repository.commit(deploy__yaml=DEPLOYMENT.format(length=40000), readme__md="y")
    done = repository.run("plan-changes.sh", base)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("<!-- legroom plan -->")
    assert "fits -> will not start" in done.stdout
    assert "| --max-model-len | 8192 | 40000 |" in done.stdout
    assert "readme" not in done.stdout


def test_new_removed_and_renamed_files_are_told(repository):
    base = repository.commit(gone__sh="vllm serve Qwen/Qwen3-8B\n", old__yaml=DEPLOYMENT.format(length=4096))
    repository.git("mv", "old.yaml", "renamed.yaml")
    repository.commit(gone__sh=None, new__yaml=DEPLOYMENT.format(length=2048))
    done = repository.run("plan-changes.sh", base)
    assert done.returncode == 0, done.stderr
    assert "new, fits" in done.stdout
    assert ": removed**" in done.stdout
    assert {"### new.yaml", "### renamed.yaml"} <= set(done.stdout.splitlines())


def test_files_that_start_nothing_are_not_mentioned(repository):
    base = repository.commit(a__yaml="vllm: 1\n")
    repository.commit(a__yaml="vllm: 2\n")
    done = repository.run("plan-changes.sh", base)
    assert (done.returncode, done.stdout) == (0, "No changed file starts a vLLM server.\n")


def test_a_file_that_cannot_be_read_is_said_and_does_not_fail(repository):
    base = repository.commit(deploy__yaml=DEPLOYMENT.format(length=8192))
    repository.commit(deploy__yaml="vllm: [broken\n")
    done = repository.run("plan-changes.sh", base)
    assert done.returncode == 0
    assert "Not understood:" in done.stdout


def test_a_variable_is_no_misspelled_model(repository):
    base = repository.commit(a__yaml="x: 1\n")
    repository.commit(start__sh="vllm serve $MODEL_NAME --max-model-len 8192\n")
    told = repository.run("plan-changes.sh", base, LEGROOM_GPU="l4").stdout
    assert "known only where it runs" in told
    assert "nearest bundled" not in told


def test_a_length_below_vllms_own_estimate_says_why(repository):
    base = repository.commit(deploy__yaml=DEPLOYMENT.format(length=8192))
    repository.commit(deploy__yaml=DEPLOYMENT.format(length=40000))
    assert "at the low end of the estimated range" in repository.run("plan-changes.sh", base).stdout


def test_what_a_file_says_is_no_markup(repository):
    base = repository.commit(a__yaml="x: 1\n")
    hostile = DEPLOYMENT.format(length=8192).replace("name: qwen", 'name: "@team [x](http://e.example) | <b>"')
    repository.commit(deploy__yaml=hostile)
    told = repository.run("plan-changes.sh", base).stdout
    assert "@team" not in told
    assert "[x](http" not in told
    assert "<b>" not in told


BAD_BASES = ("nowhere", "", "0" * 40, "--all")


@pytest.mark.parametrize("base", BAD_BASES)
def test_a_base_that_is_not_there_is_said_in_one_line(repository, base):
    repository.commit(a__yaml="x: 1\n")
    done = repository.run("plan-changes.sh", base)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: '{base}' is no commit here") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("base", BAD_BASES)
@pytest.mark.parametrize(("fail", "code"), [("true", 2), ("false", 0)])
def test_a_base_that_is_not_there_writes_no_comment_and_fails_only_where_it_may(changed, base, fail, code):
    repository, _, head = changed
    for job in (github, gitlab):
        forge = Forge()
        done = job(repository, base, head, forge, LEGROOM_FAIL=fail)
        assert (done.returncode, forge.writes) == (code, []), done.stderr
        assert "is no commit here" in done.stderr


@pytest.fixture
def changed(repository):
    base = repository.commit(deploy__yaml=DEPLOYMENT.format(length=8192))
    return repository, base, repository.commit(deploy__yaml=DEPLOYMENT.format(length=40000))


class Forge:
    """A stand-in of GitHub's and GitLab's API for comments, asked by the scripts' own curl."""

    def __init__(self, *bodies: str | None, status: int = 200, answer: bytes | None = None) -> None:
        self.comments = dict(enumerate(bodies, 1))
        self.status, self.answer = status, answer
        self.requests: list[tuple[str, str]] = []
        forge = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                forge.requests.append((self.command, url.path))
                given = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
                token = self.headers.get("authorization") or self.headers.get("private-token")
                code = forge.status if token in ("Bearer secret", "secret") else 401
                listed = forge.listed(url.query) if code == 200 and self.command == "GET" else []
                if code == 200 and self.command != "GET":
                    forge.write(self.command, url.path, given)
                answer = json.dumps(listed).encode() if forge.answer is None else forge.answer
                self.send_response(code)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PATCH = do_PUT = answer

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def listed(self, query: str) -> list[dict[str, object]]:
        asked = dict(urllib.parse.parse_qsl(query))
        size, page = int(asked["per_page"]), int(asked.get("page", 1))
        return [{"id": number, "body": body} for number, body in self.comments.items()][(page - 1) * size : page * size]

    def write(self, method: str, path: str, given: str) -> None:
        """GitHub takes JSON, GitLab a form."""
        body = json.loads(given) if given.startswith("{") else dict(urllib.parse.parse_qsl(given))
        number = len(self.comments) + 1 if method == "POST" else int(path.rpartition("/")[2])
        self.comments[number] = body["body"]

    @property
    def writes(self) -> list[tuple[str, str]]:
        return [request for request in self.requests if request[0] != "GET"]


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")


def github(repository, base, head, forge, **env):
    """The last step of the action, as a runner runs it: its words, its environment."""
    action = yaml.safe_load((ROOT / "github-action" / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    values = {
        "inputs.gpu": "",
        "inputs.paths": "",
        "inputs.fail": action["inputs"]["fail"]["default"],
        "inputs.token": "secret",
        "github.event.pull_request.base.sha": base,
        "github.event.pull_request.head.sha": head,
        "github.event.pull_request.number": "7",
    }
    given = {name: values[text.strip("${} ")] for name, text in step["env"].items()}
    runner = {"GITHUB_REPOSITORY": "o/r", "GITHUB_API_URL": forge.url, "GITHUB_ACTION_PATH": f"{ROOT}/github-action"}
    return bash(repository, step["run"], {**runner, **given, **env})


def bash(repository, script, env):
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=repository.folder,
        env={**repository.env, **env},
        capture_output=True,
        text=True,
        check=False,
    )


@needs_curl
def test_the_github_action_comments_and_fails(changed, tmp_path):
    forge, summary = Forge("a reviewer's words"), tmp_path / "summary.md"
    done = github(*changed, forge, GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1, done.stderr
    assert forge.writes == [("POST", "/repos/o/r/issues/7/comments")]
    assert forge.comments[2].startswith("<!-- legroom plan -->")
    assert "will not start" in forge.comments[2]
    assert "will not start" in summary.read_text()


@needs_curl
def test_the_github_action_writes_over_its_own_comment_among_many(changed):
    forge = Forge(*["a reviewer's words"] * 120, "<!-- legroom plan -->\nold")
    done = github(*changed, forge, LEGROOM_FAIL="false")
    assert done.returncode == 0, done.stderr
    assert forge.writes == [("PATCH", "/repos/o/r/issues/comments/121")]
    assert "will not start" in forge.comments[121]


@needs_curl
def test_the_github_action_takes_back_what_no_longer_holds(repository):
    base, forge = repository.commit(readme__md="x"), Forge("<!-- legroom plan -->\nold")
    done = github(repository, base, repository.commit(readme__md="y"), forge)
    assert done.returncode == 0, done.stderr
    assert forge.comments == {1: "<!-- legroom plan -->\nNo changed file starts a vLLM server.\n"}


@needs_curl
@pytest.mark.parametrize("before", ["", "x", "xx"])
def test_a_report_that_is_too_long_is_cut_between_two_characters(changed, tmp_path, before):
    program(tmp_path / "bin" / "legroom", f"python3 -c \"print('{before}' + chr(0x20AC) * 30000)\"")
    forge = Forge()
    done = github(*changed, forge)
    assert "::warning::" not in done.stdout, done.stdout + done.stderr
    assert forge.comments[1].endswith("\u20ac") and 59_990 < len(forge.comments[1].encode()) <= 60_000


@needs_curl
@pytest.mark.parametrize("status", [403, 500])
def test_a_token_that_may_only_read_does_not_fail_the_github_action(changed, status):
    done = github(*changed, Forge(status=status), LEGROOM_FAIL="false")
    assert done.returncode == 0, done.stderr
    assert "::warning::the comment was not written" in done.stdout


def test_the_github_action_is_valid_and_names_its_script():
    action = yaml.safe_load((ROOT / "github-action" / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    steps = action["runs"]["steps"]
    assert all(step["shell"] == "bash" for step in steps)
    assert "comment.sh" in steps[-1]["run"]
    assert not any("${{" in step["run"] for step in steps)


def gitlab(repository, base, head, forge, **env):
    """The job's script in a repository that holds copies, as the page says."""
    job = yaml.safe_load((ROOT / "gitlab" / "legroom-plan.yml").read_text())["legroom-plan"]
    folder = repository.folder / "ci" / "legroom"
    folder.mkdir(parents=True)
    for script in ("plan-changes.sh", "gitlab/comment.sh"):
        shutil.copy(ROOT / script, folder)
    variables = {
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": base,
        "CI_COMMIT_SHA": head,
        "CI_API_V4_URL": f"{forge.url}/api/v4",
        "CI_PROJECT_ID": "5",
        "CI_MERGE_REQUEST_IID": "9",
        "LEGROOM_TOKEN": "secret",
        **job["variables"],
        **env,
    }
    return bash(repository, "\n".join(job["script"]), variables)


@needs_curl
def test_the_gitlab_job_comments_and_fails(changed):
    forge = Forge("a reviewer's words")
    done = gitlab(*changed, forge)
    assert done.returncode == 1, done.stderr
    assert forge.writes == [("POST", "/api/v4/projects/5/merge_requests/9/notes")]
    assert "will not start" in forge.comments[2]


@needs_curl
def test_the_gitlab_job_says_nothing_where_no_server_changes(repository):
    base, forge = repository.commit(readme__md="x"), Forge()
    done = gitlab(repository, base, repository.commit(readme__md="y"), forge)
    assert done.returncode == 0, done.stderr
    assert not forge.writes


@needs_curl
def test_the_gitlab_job_writes_over_its_own_note(changed):
    forge = Forge("a reviewer's words", "<!-- legroom plan -->\nold")
    gitlab(*changed, forge)
    assert forge.writes == [("PUT", "/api/v4/projects/5/merge_requests/9/notes/2")]
    assert "will not start" in forge.comments[2]


@needs_curl
@pytest.mark.parametrize(
    ("forge", "token"),
    [
        (Forge, "wrong"),
        (partial(Forge, status=403), "secret"),
        (partial(Forge, answer=b""), "secret"),
        (partial(Forge, answer=b"null"), "secret"),
    ],
)
def test_an_api_that_takes_no_note_is_one_sentence_of_the_gitlab_job(changed, forge, token):
    done = gitlab(*changed, forge(), LEGROOM_FAIL="false", LEGROOM_TOKEN=token)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "The note was not written" in done.stderr
    assert "will not start" in done.stdout


@needs_curl
def test_a_note_without_text_is_none_of_the_gitlab_jobs_own(changed):
    forge = Forge(None)
    assert gitlab(*changed, forge, LEGROOM_FAIL="false").returncode == 0
    assert "will not start" in forge.comments[2]


@needs_curl
def test_an_answer_that_is_no_list_ends_the_github_action(changed):
    done = github(*changed, Forge(answer=b"null"), LEGROOM_FAIL="false")
    assert done.returncode == 0, done.stderr
    assert "::warning::the comment was not written" in done.stdout


def test_the_gitlab_snippet_is_valid():
    job = yaml.safe_load((ROOT / "gitlab" / "legroom-plan.yml").read_text())["legroom-plan"]
    assert job["script"] == ["ci/legroom/comment.sh"]


@pytest.mark.parametrize("script", ["plan-changes.sh", "github-action/comment.sh", "gitlab/comment.sh"])
def test_the_scripts_pass_shellcheck(script):
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=Path(sys.executable).parent)
    if shellcheck is None:
        pytest.skip("no shellcheck here: run bin/setup-tools")
    done = subprocess.run([shellcheck, str(ROOT / script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
