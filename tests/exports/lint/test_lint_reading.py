"""What lint must not pass over in silence: folders, standard input, and the rest of a file."""

import pytest

from legroom.cli.main import main
from legroom.exports.lint import shell_scan
from legroom.exports.lint.lint import Options, lint_files, lint_texts

WRONG = "vllm serve org/m --nope\n"


def rules_of(text, path="start.sh"):
    return [one.rule for one in lint_texts([(path, text)], Options()).findings]


def lines_of(text, path="start.sh"):
    return [one.place.line for one in lint_texts([(path, text)], Options()).findings]


# Folders


@pytest.mark.parametrize("folder", [".hidden", ".hidden/deploy"])
def test_a_folder_is_read_though_its_own_path_has_a_dot(folder, tmp_path):
    inner = tmp_path / folder
    inner.mkdir(parents=True)
    (inner / "start.sh").write_text(WRONG)
    assert [one.rule for one in lint_files([str(inner)], Options()).findings] == ["flag-unknown"]


def test_the_folder_above_is_read(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "start.sh").write_text(WRONG)
    monkeypatch.chdir(tmp_path / "sub")
    assert [one.rule for one in lint_files([".."], Options()).findings] == ["flag-unknown"]


def test_what_is_hidden_inside_a_folder_is_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "start.sh").write_text(WRONG)
    (tmp_path / "good.sh").write_text("vllm serve org/m\n")
    assert lint_files([str(tmp_path)], Options()).files == (str(tmp_path / "good.sh"),)


def test_a_folder_without_any_file_to_read_is_said(tmp_path, capsys):
    assert main(["lint", str(tmp_path)]) == 2
    assert "holds no file" in capsys.readouterr().out


# The rest of a script


@pytest.mark.parametrize(
    "before",
    [
        "(( mask << shift ))",
        "if (( 1 << n )); then :; fi",
        "cat <<NEVER_CLOSED",
        "cat <<EOF-1\nvllm serve org/m --in-the-document\nEOF-1",
        "cat > /etc/x <<\\EOF\nvllm serve org/m --in-the-document\nEOF",
        "cat <<-'END'\n\tvllm serve org/m --in-the-document\n\tEND",
    ],
)
def test_a_script_is_read_on_behind_shifts_and_here_documents(before):
    text = f"{before}\n{WRONG}"
    assert lines_of(text) == [text.count("\n")]


def test_a_script_with_too_many_words_is_said_to_be_cut(monkeypatch):
    monkeypatch.setattr(shell_scan, "_MOST_WORDS", 10)
    report = lint_texts([("start.sh", WRONG * 4)], Options())
    assert [one.place.line for one in report.findings] == [1, 2]
    assert [(one.place.line, "more than 10 words" in one.reason) for one in report.unread] == [(3, True)]


def test_the_same_finding_is_told_once():
    assert lines_of("for i in 1 2; do pkill -f vllm; done") == [1]
