"""What lint must not pass over in silence: folders, standard input, and the rest of a file."""

import io
import os
import sys

import pytest

from legroom.cli.main import main
from legroom.deployments.shell import lexer
from legroom.lint.linter import LintOptions, lint_files, lint_texts

WRONG = "vllm serve org/m --nope\n"


def rules_of(text, path="start.sh"):
    return [finding.rule for finding in lint_texts([(path, text)], LintOptions()).findings]


def lines_of(text, path="start.sh"):
    return [finding.place.line for finding in lint_texts([(path, text)], LintOptions()).findings]


# Folders


@pytest.mark.parametrize("folder", [".hidden", ".hidden/deploy"])
def test_a_folder_is_read_though_its_own_path_has_a_dot(folder, tmp_path):
    inner = tmp_path / folder
    inner.mkdir(parents=True)
    (inner / "start.sh").write_text(WRONG)
    assert [finding.rule for finding in lint_files([str(inner)], LintOptions()).findings] == ["flag-unknown"]


def test_the_folder_above_is_read(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "start.sh").write_text(WRONG)
    monkeypatch.chdir(tmp_path / "sub")
    assert [finding.rule for finding in lint_files([".."], LintOptions()).findings] == ["flag-unknown"]


def test_what_is_hidden_inside_a_folder_is_left_out(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "start.sh").write_text(WRONG)
    (tmp_path / "good.sh").write_text("vllm serve org/m\n")
    assert lint_files([str(tmp_path)], LintOptions()).files == (str(tmp_path / "good.sh"),)


def test_a_folder_without_any_file_to_read_is_said(tmp_path, capsys):
    assert main(["lint", str(tmp_path)]) == 2
    assert "holds no file" in capsys.readouterr().out


def test_a_pipe_in_a_folder_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "start.sh").write_text(WRONG)
    assert lint_files([str(tmp_path)], LintOptions()).files == (str(tmp_path / "start.sh"),)


# Standard input


@pytest.mark.parametrize(("content", "code"), [(WRONG.encode(), 1), (b"vllm serve org/m\n", 0), (b"\xff\xfe\x00", 2)])
def test_a_dash_is_standard_input(content, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["lint", "-"]) == code
    assert ("-:1:" in capsys.readouterr().out) == (code > 0)


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
    monkeypatch.setattr(lexer, "_MAX_WORDS", 10)
    report = lint_texts([("start.sh", WRONG * 4)], LintOptions())
    assert [finding.place.line for finding in report.findings] == [1, 2]
    assert [(unread.place.line, "more than 10 words" in unread.reason) for unread in report.unread] == [(3, True)]


def test_the_same_finding_is_told_once():
    assert lines_of("for i in 1 2; do pkill -f vllm; done") == [1]


# Lines and values that belong together


DOCKERFILE = """\
ARG VLLM_VERSION=v0.10.2
FROM --platform=linux/amd64 vllm/vllm-openai:${VLLM_VERSION}
ENV VLLM_LOGGING_LEVEL=INFO \\
    # HF_TOKEN=hf_old0123456789
    VLLM_USE_V1=1
ENTRYPOINT ["vllm", "serve"]
CMD ["org/m", "--nope", "--swap-space", "4", "--attention-backend", "X"]
HEALTHCHECK --start-period=15m \\
    CMD curl -f http://localhost:8000/health || exit 1
"""


def test_the_continued_lines_of_a_health_check_are_not_the_command_of_the_image():
    findings = lint_texts([("Dockerfile", DOCKERFILE)], LintOptions()).findings
    assert [(finding.rule, finding.place.line) for finding in findings] == [("flag-unknown", 7), ("flag-not-yet", 7)]


def test_the_default_of_a_build_argument_names_the_release():
    findings = lint_texts([("Dockerfile", DOCKERFILE.replace("v0.10.2", "v0.18.0"))], LintOptions()).findings
    assert "flag-removed" in {finding.rule for finding in findings}


@pytest.mark.parametrize("mark", ["#", ";", "  # --in-a-comment \\"])
def test_a_comment_between_continued_lines_does_not_end_the_command_of_a_unit(mark):
    unit = f"[Service]\nExecStart=/x/vllm serve org/m \\\n{mark} a comment\n  --port 1 \\\n  --nope\nKillMode=process\n"
    assert lines_of(unit, "a.service") == [5, 6]


COMPOSE = """\
x-vllm: &vllm
  image: vllm/vllm-openai:v0.10.2
  environment: &env
    VLLM_USE_V1: 1
x-shared: &shared
  image: other
  shm_size: 16gb
services:
  a:
    <<: [*vllm, *shared]
    command: --model org/m -tp 2 --swap-space 8
  b:
    <<: *vllm
    image: vllm/vllm-openai:v0.18.0
    environment:
      <<: *env
    command: --model org/m -tp 2 --swap-space 8
"""


def test_merge_keys_are_resolved_and_own_keys_come_first():
    findings = lint_texts([("compose.yaml", COMPOSE)], LintOptions()).findings
    assert sorted({(finding.rule, finding.place.line) for finding in findings}) == [
        ("env-unknown", 4),
        ("flag-removed", 17),
        ("flag-value", 17),
        ("image-moving", 6),
        ("shm-missing", 13),
    ]


@pytest.mark.parametrize("text", ["a: &a [*a]\n", "a: &a\n  <<: *a\n"])
def test_a_value_that_contains_itself_is_said(text):
    assert "contains itself" in lint_texts([("a.yaml", text)], LintOptions()).unread[0].reason


# Documents and settings


def test_a_line_that_a_diff_takes_out_is_not_wrong():
    header = "# Notes\n\n```diff\n--- a/start.sh\n+++ b/start.sh\n@@ -1 +1 @@\n"
    text = header + "".join(f"{mark} vllm serve org/m --nope\n" for mark in "-+ ") + "```\n"
    findings = lint_texts([("notes.md", text)], LintOptions()).findings
    assert [(finding.place.line, finding.place.column) for finding in findings] == [(8, 20), (9, 20)]


def test_a_share_of_the_gpu_in_percent_is_found():
    (finding,) = lint_texts([("a.sh", "vllm serve org/m --gpu-memory-utilization 95")], LintOptions()).findings
    assert (finding.rule, finding.suggestion) == ("flag-value", "write --gpu-memory-utilization 0.95")
    assert rules_of("vllm serve org/m --gpu-memory-utilization 1.0") == ["share-high"]


def test_a_key_that_begins_with_no_is_named_as_it_stands():
    text = "model: org/m\nmax-model-len: 8192\ntensor-parallel-size: 1\nno-such-key: 5\n"
    (finding,) = lint_texts([("config.yaml", text)], LintOptions()).findings
    assert (finding.place.line, finding.message) == (4, "no vLLM release has --no-such-key")


# Files beside a compose file


def compose_findings(folder, text, **beside):
    (folder / "compose.yml").write_text(text)
    for name, content in beside.items():
        (folder / name.replace("_", ".")).write_text(content)
    report = lint_files([str(folder / "compose.yml")], LintOptions())
    return [(finding.rule, finding.place.line) for finding in report.findings]


@pytest.mark.parametrize("told", ["base", "{service: base}"])
def test_a_service_has_what_it_extends_and_its_own_settings_first(told, tmp_path):
    base = "services:\n  base: {image: 'vllm/vllm-openai:v0.8.5', ipc: host, environment: {VLLM_USE_V1: 1}}\n"
    child = f"  child:\n    extends: {told}\n    command: --model m -tp 2 --kv-cache-memory-bytes 1G\n"
    assert compose_findings(tmp_path, base + child) == [("flag-not-yet", 5)]
    newer = child + "    image: vllm/vllm-openai:v0.12.0\n"
    assert compose_findings(tmp_path, base + newer) == [("env-unknown", 2)]


def test_a_service_that_extends_itself_is_read_to_an_end(tmp_path):
    text = "services:\n  a: {extends: b, image: vllm/vllm-openai}\n  b: {extends: a, command: --model m --nope}\n"
    assert compose_findings(tmp_path, text) == [("image-moving", 2), ("flag-unknown", 3)]


def test_a_service_of_another_file_gives_its_image_and_its_variables(tmp_path):
    text = "services:\n  a:\n    extends: {file: base.yml, service: v}\n    command: --model m --async-scheduling\n"
    base = "services:\n  v: {image: 'vllm/vllm-openai:v0.9.0', environment: {VLLM_USE_V1: 1}}\n"
    assert compose_findings(tmp_path, text, base_yml=base) == [("flag-not-yet", 4)]
    assert compose_findings(tmp_path, text, base_yml="services: [") == []


def test_variables_beside_a_compose_file_are_put_in_and_its_secrets_are_where_they_belong(tmp_path):
    text = "services:\n  a:\n    image: vllm/vllm-openai:${TAG}\n    env_file: v.env\n    command: --model m ${MORE}\n"
    beside = {"_env": "TAG=v0.12.0\nMORE=--nope\n", "v_env": "VLLM_USE_V1=1  # old\nHF_TOKEN=hf_abcdefghijk\n"}
    assert compose_findings(tmp_path, text, **beside) == [("env-unknown", 4), ("flag-unknown", 5)]


def test_a_file_of_variables_is_read_by_itself(tmp_path):
    (tmp_path / "vllm.env").write_text('# of the unit\nexport VLLM_USE_V1="1"\nHF_TOKEN=hf_abcdefghijk\n')
    (tmp_path / "other.env").write_text("PORT=1\n")
    (tmp_path / "tokens.env").write_text("VLLM_MAX_TOKENS_PER_EXPERT_FP8_MOE=1\n")  # counted, and no secret
    report = lint_files([str(tmp_path)], LintOptions())
    assert [(finding.rule, finding.place.line) for finding in report.findings] == [
        ("env-unknown", 1),
        ("env-unknown", 2),
    ]
    assert [file.reason for file in report.skipped] == ["it sets no variable of vLLM"]


def test_what_a_file_holds_does_not_steer_the_terminal(tmp_path, capsys):
    (tmp_path / "s.sh").write_text("vllm serve m --\x1b[31mred --b\ael 'two\nlines'\n")
    assert main(["lint", str(tmp_path / "s.sh")]) == 1
    shown = capsys.readouterr().out
    assert r"--\x1b[31mred" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_names_and_words_that_are_no_text_are_reported_all_the_same(tmp_path, capsys):
    script = tmp_path / os.fsdecode(b"bad\xff.py")
    script.write_text('cmd = ["vllm", "serve", "m", "--no\\ud800pe"]\n')
    for words in ([], ["--json"], ["--sarif", "-"], ["--sarif", str(tmp_path / "report.sarif")]):
        assert main(["lint", str(script), *words]) == 1, capsys.readouterr().err
    assert "bad%FF.py" in (tmp_path / "report.sarif").read_text()
