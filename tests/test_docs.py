"""What the documents say is what legroom does: examples run, commands print what is shown, links lead somewhere."""

import ast
import contextlib
import doctest
import importlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from legroom.cli.main import COMMANDS, command_parser, main

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


WITH_EXAMPLES = [page for page in PAGES if ">>> " in page.read_text("utf-8")]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_the_examples_of_a_page_give_what_it_prints(page):
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def recorder():
    """docs/record_output.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("record_output", ROOT / "docs/record_output.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECORDER = recorder()
SHOWN = [
    (name, command, shown)
    for page, name in zip(PAGES, NAMES, strict=True)
    for command, shown in RECORDER.commands(page.read_text("utf-8"))
]


def output_in_this_process(words, monkeypatch, folder):
    """Standard output and standard error of a command, as `record_output.py` has them, without starting Python."""
    settings = {"LEGROOM_HOME": str(folder / "home"), "COLUMNS": "80", "HF_HUB_OFFLINE": "1", "TZ": "UTC"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    out, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        main(words)
    return out.buffer.getvalue(), errors.buffer.getvalue()


@pytest.mark.parametrize(("page", "command", "shown"), SHOWN, ids=[f"{name}: {line}"[:80] for name, line, _ in SHOWN])
def test_a_command_prints_what_its_page_shows(page, command, shown, monkeypatch, tmp_path):
    line, pipe, filters = command.replace("\\\n", " ").partition("|")
    line, hides_errors = re.subn(r"\s2>/dev/null", "", line.strip())
    if line.startswith("legroom ") and not re.search(r"[;<>&$*`\n]", line):
        out, errors = output_in_this_process(shlex.split(line)[1:], monkeypatch, tmp_path)
        if pipe:
            out = subprocess.run(["bash", "-c", filters], input=out, stdout=subprocess.PIPE, check=False).stdout
        text = (b"" if hides_errors else errors) + out
        printed = "".join(line.rstrip() + "\n" for line in text.decode().splitlines())
    else:
        printed = RECORDER.output(command)
    assert printed == shown, f"{page}: run bin/docs record, and look at what changed"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="the site needs legroom[docs]")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_every_page(site):
    pages = [page for page in PAGES if page.parent != ROOT]
    expected = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in pages]
    expected = [path.with_name("index.html") if path.stem == "README" else path for path in expected]
    assert [str(path) for path in expected if not (site / path).exists()] == []
    assert (site / "changelog.html").exists()
    assert (site / "contributing.html").exists()


def test_reading_the_site_fetches_nothing_from_another_host(site):
    fetched = re.compile(r"<(?:script|img|iframe|link)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    elsewhere = {page.name: hits for page in site.rglob("*.html") if (hits := fetched.findall(page.read_text("utf-8")))}
    assert elsewhere == {}
    styles = [style.name for style in site.rglob("*.css") if re.search(r"url\([\"']?(?:https?:)?//", style.read_text())]
    assert styles == []


def links_of(page):
    """Every link that stays in the repository: the file and what stands behind its `#`."""
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            yield ((page.parent / target).resolve() if target else page), anchor


def anchors_of(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_the_links_of_every_page_lead_somewhere():
    for page in PAGES:
        for target, anchor in links_of(page):
            assert target.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors_of(target), f"{page.name} links to {target.name}#{anchor}"


def test_every_page_is_reached_from_the_first_one():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page.suffix == ".md" and page not in seen:
            seen.add(page)
            waiting += [target for target, _ in links_of(page)]
    assert [name for page, name in zip(PAGES, NAMES, strict=True) if page not in seen] == []


def test_the_memory_model_page_checks_its_formulas():
    text = (ROOT / "docs" / "memory-model.md").read_text("utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    with_formula = [section for section in sections if "\n    " in section and "=" in section]
    assert len(with_formula) >= 6
    assert all(">>>" in section for section in with_formula)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help_with_examples_and_exit_codes_and_a_page_names_it(command, capsys):
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "\nexamples:" in shown
    assert "\nexit codes:" in shown
    assert any(f"legroom {command}" in page.read_text("utf-8") for page in PAGES)


def without_recorded(page):
    """A page's text, its recorded blocks left out: those are run as they stand."""
    return RECORDER.BLOCK.sub("", page.read_text("utf-8"))


def bundled_examples():
    """Commands in the pages that need nothing but what is bundled."""
    examples = set()
    for page in PAGES:
        for line in re.findall(r"^\s+(?:\$ )?(legroom plan [^#\n|>]*)", without_recorded(page), re.MULTILINE):
            words = shlex.split(line)[1:]
            # What `--want-context` finds is shown in recorded blocks, and a search takes seconds.
            if words[1].startswith("llama-3.1") and "--gpu" in words and "--want-context" not in words:
                examples.add(tuple(words))
    return sorted(examples)


@pytest.mark.parametrize("words", bundled_examples(), ids=" ".join)
def test_the_commands_of_the_pages_are_understood(words, capsys):
    code = main(list(words))
    expected = (2,) if "--swap-space" in words else (0, 1)
    assert code in expected, capsys.readouterr().err


def shown_commands():
    """Every `legroom ...` line of the pages, continued lines joined, comments and what it is piped into taken off."""
    commands = set()
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", without_recorded(page))
        for line in re.findall(r"^(?: {4}|\$ )(?:[^\n|#]*\| )?(legroom [a-z][^\n]*)", text, re.MULTILINE):
            command = re.split(r"\s+#|\s+\| |\s+> |\s{2,}(?=[a-z`])", line)[0]
            commands.add((page.name, command.strip()))
    return sorted(commands)


def read_words(command, words):
    """What the command's own parser makes of some words, without doing it."""
    module = importlib.import_module(command.module)
    parser = command_parser(command.name, module)
    parse = getattr(module, "parse", None)
    return parse(parser, words[1:]) if parse else parser.parse_args(words[1:])


def help_examples():
    """Every `legroom ...` line among the examples of a command's help."""
    for command in COMMANDS:
        epilog = importlib.import_module(command.module).EPILOG
        text = re.sub(r"\s*\\\n\s*", " ", epilog.partition("examples:\n")[2].partition("\n\n")[0])
        yield from re.findall(r"(?:^  |\| |; |&& )(legroom [a-z].*?)(?=$|;| > | \| | && |  )", text, re.MULTILINE)


def test_the_examples_of_every_help_are_understood():
    for line in sorted(set(help_examples())):
        words = shlex.split(line)[1:]
        read_words(next(command for command in COMMANDS if command.name == words[0]), words)


@pytest.mark.parametrize(("page", "line"), shown_commands())
def test_the_options_of_a_shown_command_exist(page, line, capsys):
    words = shlex.split(line)[1:]
    command = next(command for command in COMMANDS if command.name == words[0])
    if re.search(r"\[|\.\.\.| \| |\(", line):  # a synopsis
        assert main([command.name, "--help"]) == 0
        shown = capsys.readouterr().out
        own = line.partition(" -- ")[0]
        assert [option for option in re.findall(r"--[a-z][a-z-]*", own) if option not in shown] == []
    else:
        read_words(command, words)


def test_no_message_names_a_page_that_a_wheel_does_not_have():
    for source in (ROOT / "src/legroom").rglob("*.py"):
        if "docs/" in (text := source.read_text("utf-8")):
            docstrings = {node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)}
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and re.search(r"docs/[\w-]+\.md", str(node.value)):
                    named = [each for each in docstrings if isinstance(each, ast.Constant) and each.value == node.value]
                    assert named, f"{source}:{node.lineno} names a page"
