"""How every command ends."""

import os
import subprocess
import sys

import pytest

from legroom import __version__
from legroom.cli import main as main_module
from legroom.cli.main import COMMANDS, main


def legroom(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "legroom", *words], capture_output=True, text=True, check=False, **options
    )


def test_no_words_show_the_overview_and_are_a_mistake(capsys):
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {command.name}" in out for command in COMMANDS)


def test_the_version_is_the_packages(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"legroom {__version__}\n"


def test_a_bug_shows_its_traceback_and_asks_for_a_report(capsys, monkeypatch):
    def broken(_words):
        raise ZeroDivisionError("oh no")

    monkeypatch.setattr(main_module, "_run_command", broken)
    assert main(["plan", "x y"]) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oh no" in err
    assert "bug in legroom" in err
    assert "legroom plan 'x y'" in err


def test_an_interrupt_is_quiet(capsys, monkeypatch):
    def interrupted(_words):
        raise KeyboardInterrupt

    monkeypatch.setattr(main_module, "_run_command", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_is_no_error():
    command = f"{sys.executable} -m legroom plan llama-3.1-8b --gpu h100 --json | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout == "{"
    assert done.stderr == ""


def test_a_terminal_that_cannot_show_blocks_gets_ascii():
    done = legroom("plan", "llama-3.1-8b", "--gpu", "h100", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "WWWW" in done.stdout


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_a_pipe_gets_no_colour(variable):
    done = legroom("plan", "llama-3.1-8b", "--gpu", "h100", env={**os.environ, variable: "dumb"})
    assert "\x1b[" not in done.stdout


def test_colour_can_be_forced():
    done = legroom("plan", "llama-3.1-8b", "--gpu", "h100", env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"})
    assert "\x1b[" in done.stdout
