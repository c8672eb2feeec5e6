"""The GitHub Action and the GitLab snippet: their scripts, run on a repository of their own."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
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


class Repository:
    def __init__(self, folder: Path, bin_folder: Path) -> None:
        self.folder = folder
        bin_folder.mkdir()
        program(bin_folder / "legroom", f'exec "{sys.executable}" -m legroom "$@"')
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


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "repository").mkdir()
    return Repository(tmp_path / "repository", tmp_path / "bin")


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


def test_what_a_file_says_is_no_markup(repository):
    base = repository.commit(a__yaml="x: 1\n")
    hostile = DEPLOYMENT.format(length=8192).replace("name: qwen", 'name: "@team [x](http://e.example) | <b>"')
    repository.commit(deploy__yaml=hostile)
    told = repository.run("plan-changes.sh", base).stdout
    assert "@team" not in told
    assert "[x](http" not in told
    assert "<b>" not in told


def test_a_base_that_is_not_there_is_said(repository):
    repository.commit(a__yaml="x: 1\n")
    assert repository.run("plan-changes.sh", "nowhere").returncode == 2


@pytest.fixture
def changed(repository):
    base = repository.commit(deploy__yaml=DEPLOYMENT.format(length=8192))
    return repository, base, repository.commit(deploy__yaml=DEPLOYMENT.format(length=40000))


def github(repository, base, head, known="", **env):
    calls = repository.folder.parent / "calls"
    script = f'''echo "$@" >>"{calls}"
case "$*" in
  *--paginate*) echo "{known}" ;;
  *body=@*) for last; do :; done; cat "${{last#body=@}}" >>"{calls}" ;;
esac'''
    program(repository.folder.parent / "bin" / "gh", script)
    variables = {
        "BASE_SHA": base,
        "HEAD_SHA": head,
        "PR_NUMBER": "7",
        "GITHUB_REPOSITORY": "o/r",
        "GH_TOKEN": "t",
        **env,
    }
    done = repository.run("github-action/comment.sh", **variables)
    return done, calls.read_text() if calls.exists() else ""


def test_the_github_action_comments_and_fails(changed, tmp_path):
    summary = tmp_path / "summary.md"
    done, calls = github(*changed, GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == 1, done.stderr
    assert "--method POST repos/o/r/issues/7/comments" in calls
    assert "will not start" in calls
    assert "will not start" in summary.read_text()


def test_the_github_action_writes_over_its_own_comment(changed):
    done, calls = github(*changed, known="4711", LEGROOM_FAIL="false")
    assert done.returncode == 0, done.stderr
    assert "--method PATCH repos/o/r/issues/comments/4711" in calls


def test_the_github_action_takes_back_what_no_longer_holds(repository):
    base = repository.commit(readme__md="x")
    done, calls = github(repository, base, repository.commit(readme__md="y"), known="4711")
    assert done.returncode == 0, done.stderr
    assert "--method PATCH repos/o/r/issues/comments/4711" in calls
    assert "<!-- legroom plan -->\nNo changed file starts a vLLM server." in calls


def test_a_token_that_may_only_read_does_not_fail_the_github_action(changed):
    repository, base, head = changed
    program(repository.folder.parent / "bin" / "gh", "exit 1")
    variables = {"BASE_SHA": base, "HEAD_SHA": head, "PR_NUMBER": "7", "GITHUB_REPOSITORY": "o/r"}
    done = repository.run("github-action/comment.sh", LEGROOM_FAIL="false", **variables)
    assert done.returncode == 0, done.stderr
    assert "::warning::the comment was not written" in done.stdout


def test_the_github_action_is_valid_and_names_its_script():
    action = yaml.safe_load((ROOT / "github-action" / "action.yml").read_text())
    assert action["runs"]["using"] == "composite"
    steps = action["runs"]["steps"]
    assert all(step["shell"] == "bash" for step in steps)
    assert "comment.sh" in steps[-1]["run"]
    assert not any("${{" in step["run"] for step in steps)


def gitlab(repository, base, head, notes="[]"):
    calls = repository.folder.parent / "calls"
    script = f'echo "$@" >>"{calls}"\ncase "$*" in *per_page*) echo \'{notes}\' ;; esac'
    program(repository.folder.parent / "bin" / "curl", script)
    variables = {
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": base,
        "CI_COMMIT_SHA": head,
        "CI_API_V4_URL": "https://gitlab.example/api/v4",
        "CI_PROJECT_ID": "5",
        "CI_MERGE_REQUEST_IID": "9",
        "LEGROOM_TOKEN": "secret",
    }
    return repository.run("gitlab/comment.sh", **variables), calls.read_text()


def test_the_gitlab_snippet_comments_and_fails(changed):
    done, calls = gitlab(*changed)
    assert done.returncode == 1, done.stderr
    assert "--request POST" in calls
    assert "https://gitlab.example/api/v4/projects/5/merge_requests/9/notes" in calls


def test_the_gitlab_snippet_says_nothing_where_no_server_changes(repository):
    base = repository.commit(readme__md="x")
    done, calls = gitlab(repository, base, repository.commit(readme__md="y"))
    assert done.returncode == 0, done.stderr
    assert "--request" not in calls


def test_the_gitlab_snippet_writes_over_its_own_note(changed):
    _, calls = gitlab(*changed, notes='[{"id": 3, "body": "<!-- legroom plan -->x"}]')
    assert "--request PUT" in calls
    assert "/notes/3" in calls


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
