"""What the documents say is what legroom does: their Python examples run, their links and commands lead somewhere."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from legroom.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_examples_of_a_page_give_what_it_prints(page):
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_memory_model_page_checks_its_formulas():
    text = (ROOT / "docs" / "memory-model.md").read_text("utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    with_formula = [section for section in sections if "\n    " in section and "=" in section]
    assert len(with_formula) >= 6
    assert all(">>>" in section for section in with_formula)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help_with_examples_and_a_page_names_it(command, capsys):
    assert main([command, "--help"]) == 0
    assert "examples:" in capsys.readouterr().out
    assert any(f"legroom {command}" in page.read_text("utf-8") for page in PAGES)


def bundled_examples():
    """Commands in the pages that need nothing but what is bundled."""
    found = set()
    for page in PAGES:
        for line in re.findall(r"^\s+(?:\$ )?(legroom plan [^#\n|]*)", page.read_text("utf-8"), re.MULTILINE):
            words = shlex.split(line)[1:]
            if words[1].startswith("llama-3.1") and "--gpu" in words:
                found.add(tuple(words))
    return sorted(found)


@pytest.mark.parametrize("words", bundled_examples(), ids=" ".join)
def test_the_commands_of_the_pages_are_understood(words, capsys):
    code = main(list(words))
    expected = (2,) if "--swap-space" in words else (0, 1)
    assert code in expected, capsys.readouterr().err
