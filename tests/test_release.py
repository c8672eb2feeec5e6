"""The version, the changelog and the tag of a release agree, and `bin/release` says where they do not."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from legroom.version import __version__

ROOT = Path(__file__).parents[1]
HEADING = f"## {__version__}, 2026-12-01\n"


def released(folder, changelog, tag=""):
    """What `bin/release --check` says of a commit with legroom's version, this changelog and this tag."""
    for name in ("bin", "src/legroom"):
        (folder / name).mkdir(parents=True)
    shutil.copy(ROOT / "bin/release", folder / "bin")
    shutil.copy(ROOT / "src/legroom/version.py", folder / "src/legroom")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}", "utf-8")
    git = ("git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "x"), *([("tag", tag)] if tag else [])):
        subprocess.run([*git, *words], check=True)
    return subprocess.run([folder / "bin/release", "--check"], capture_output=True, text=True, check=False)


def test_version_and_changelog_of_this_tree_agree():
    answer = subprocess.run([ROOT / "bin/release", "--check"], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"version {__version__}, changelog '{__version__},")


def test_a_tagged_release_with_its_date_passes(tmp_path):
    assert released(tmp_path, HEADING, f"v{__version__}").returncode == 0


@pytest.mark.parametrize(
    ("changelog", "tag", "said"),
    [
        ("## 9.9.9, 2026-12-01\n", "", "the newest version in CHANGELOG.md is '9.9.9, 2026-12-01'"),
        (HEADING, "v9.9.9", "the commit has the tag v9.9.9"),
        (HEADING.replace("2026-12-01", "unreleased"), f"v{__version__}", "unreleased"),
        (f"## Unreleased\n\n- more\n\n{HEADING}", f"v{__version__}", "still has a section 'Unreleased'"),
    ],
    ids=["changelog", "tag", "undated", "unreleased entries"],
)
def test_what_does_not_agree_is_named(tmp_path, changelog, tag, said):
    answer = released(tmp_path, changelog, tag)
    assert (answer.returncode, said in answer.stderr) == (1, True), answer.stderr


def test_the_pythons_that_are_tried_are_those_of_the_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language")]
    script = (ROOT / "bin/release").read_text("utf-8")
    assert f"pythons=({' '.join(named)})" in script
