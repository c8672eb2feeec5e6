"""`legroom export` from the outside: where files go, what a plan must be, and what it says when something is wrong."""

import json
from types import SimpleNamespace

import pytest

from legroom.cli import export
from legroom.cli.main import main
from legroom.exports.export_request import ExportedFile


class OneFile:
    NAME = "one"
    HELP = "a file"
    asked = None

    @classmethod
    def files(cls, request):
        cls.asked = request
        return (ExportedFile("run.sh", "echo hello\n", executable=True),)


class TwoFiles:
    NAME = "two"
    HELP = "two files"
    NEEDS_PLAN = True

    @staticmethod
    def files(request):
        return (ExportedFile("a.yaml", "a: 1\n"), ExportedFile("deep/b.yaml", f"model: {request.plan.model}\n"))


@pytest.fixture(autouse=True)
def _formats(monkeypatch, tmp_path):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    modules = {"one": OneFile, "two": TwoFiles}
    monkeypatch.setattr(export, "FORMATS", {name: name for name in modules})
    monkeypatch.setattr(export, "importlib", SimpleNamespace(import_module=modules.__getitem__))


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main(["export", *words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def plan_file(tmp_path, capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--vllm", "0.10.2", "--json"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    return path


def test_one_file_goes_to_stdout_as_it_is(run):
    assert run("one")[:2] == (0, "echo hello\n")


def test_one_file_goes_where_it_was_asked_for_and_can_be_run(run, tmp_path):
    assert run("one", "-o", str(tmp_path / "start"))[0] == 0
    assert (tmp_path / "start").stat().st_mode & 0o111


def test_one_file_goes_into_a_folder_under_its_own_name(run, tmp_path):
    run("one", "-o", str(tmp_path))
    assert (tmp_path / "run.sh").read_text() == "echo hello\n"


def test_several_files_are_told_apart_on_stdout(run, plan_file):
    code, out, _ = run("two", "--plan", str(plan_file))
    assert code == 0
    assert "# ==> a.yaml <==\na: 1\n" in out
    assert "# ==> deep/b.yaml <==\nmodel: meta-llama/Llama-3.1-8B\n" in out


def test_several_files_go_into_a_folder_that_is_made(run, plan_file, tmp_path):
    assert run("two", "--plan", str(plan_file), "-o", str(tmp_path / "new"))[0] == 0
    assert (tmp_path / "new/deep/b.yaml").exists()


def test_several_files_do_not_overwrite_a_file_that_was_named_as_folder(run, plan_file, tmp_path):
    (tmp_path / "taken").write_text("mine")
    code, _, message = run("two", "--plan", str(plan_file), "-o", str(tmp_path / "taken"))
    assert (code, (tmp_path / "taken").read_text()) == (2, "mine")
    assert "is a file" in message


def test_a_dash_is_stdout(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("one", "-o", "-")[:2] == (0, "echo hello\n")
    assert not (tmp_path / "-").exists()


def test_several_files_do_not_make_a_folder_of_what_looks_like_a_file(run, plan_file, tmp_path):
    code, _, message = run("two", "--plan", str(plan_file), "-o", str(tmp_path / "compose.yaml"))
    assert (code, (tmp_path / "compose.yaml").exists()) == (2, False)
    assert "like a file" in message
    assert run("two", "--plan", str(plan_file), "-o", f"{tmp_path}/deploy.d/")[0] == 0


def test_a_file_that_somebody_wrote_is_replaced_only_by_force(run, tmp_path):
    (tmp_path / "start.sh").write_text("mine")
    code, _, message = run("one", "-o", str(tmp_path / "start.sh"))
    assert (code, (tmp_path / "start.sh").read_text()) == (2, "mine")
    assert "--force" in message
    assert run("one", "--force", "-o", str(tmp_path / "start.sh"))[0] == 0
    assert (tmp_path / "start.sh").read_text() == "echo hello\n"


def test_nothing_is_written_where_one_of_several_would_be_lost(run, plan_file, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b.yaml").write_text("mine")
    assert run("two", "--plan", str(plan_file), "-o", str(tmp_path))[0] == 2
    assert not (tmp_path / "a.yaml").exists()


@pytest.mark.parametrize("there", ["", "echo hello\n", "# Written by legroom 0.0.9.\nold", '{"uid": "legroom-vllm"}'])
def test_a_file_of_legroom_is_replaced(run, tmp_path, there):
    (tmp_path / "start.sh").write_text(there)
    assert run("one", "-o", str(tmp_path / "start.sh"))[0] == 0
    assert (tmp_path / "start.sh").read_text() == "echo hello\n"


def test_json_holds_every_file(run, plan_file):
    document = json.loads(run("two", "--plan", str(plan_file), "--json")[1])
    assert [file["path"] for file in document["files"]] == ["a.yaml", "deep/b.yaml"]


def test_a_described_server_is_planned(run):
    assert "Llama-3.1-8B" in run("two", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "8192")[1]


def test_the_release_is_the_plans(run, plan_file):
    run("one", "--plan", str(plan_file))
    assert OneFile.asked.release.version == "0.10.2"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "export what"),
        (("onne",), "did you mean 'one'"),
        (("two",), "which server"),
        (("one", "--vllm", "banana"), "not a version number"),
        (("one", "--vllm", "any"), "written for one release"),
        (("one", "--plan", "/nowhere/plan.json"), "plan.json cannot be read"),
        (("one", "-o", "/nowhere/at/all"), "could not write"),
        (("two", "mixtral-8x7b", "--gpu", "l4"), "does not start"),
        (("one", "llama-3.1-8b"), "which GPU"),
    ],
    ids=str,
)
def test_a_wrong_call_says_what_is_wrong(run, words, expected):
    code, _, message = run(*words)
    assert code == 2
    assert expected in message


@pytest.mark.parametrize("text", ["", "{}", "[1]", "model: x", '{"model": "x", "vllm": "0.32.0"}', "[" * 100_000, "\0"])
def test_a_file_that_is_no_plan_is_refused_with_how_to_make_one(run, tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    code, _, message = run("one", "--plan", str(tmp_path / "p.json"))
    assert code == 2
    assert "no plan" in message
    assert "legroom plan" in message


def test_a_plan_and_another_release_do_not_go_together(run, plan_file):
    code, _, message = run("one", "--plan", str(plan_file), "--vllm", "0.32.0")
    assert code == 2
    assert "for 0.10.2" in message


def test_a_plan_and_a_described_server_do_not_go_together(run, plan_file):
    assert run("one", "llama-3.1-8b", "--plan", str(plan_file))[0] == 2


def test_json_is_printed_beside_the_files_that_are_written(tmp_path, capsys):
    assert main(["export", "one", "--json", "-o", str(tmp_path / "x")]) == 0
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert (tmp_path / "x").read_text() == file["text"]
