"""The runbook: every cause of the catalog is in it, once, and its charts and its picture hold together."""

import re
from xml.etree import ElementTree

import pytest

from legroom.cli.main import main
from legroom.explain.catalog_entries import bundled
from legroom.exports import runbook
from legroom.exports.export_request import ExportRequest
from legroom.exports.runbook import branches_with_entries, mermaid_label
from legroom.facts.releases import latest

IDS = [entry.id for entry in bundled()]


def made(language="en"):
    return {file.path: file.text for file in runbook.files(ExportRequest(latest(), None, {"language": language}))}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_cause_has_its_section_and_its_row(language):
    files = made(language)
    sections = re.findall(r"^### (LR\d+): ", files["runbook.md"], re.MULTILINE)
    assert sorted(sections) == sorted(IDS)
    texts = [element.text for element in ElementTree.fromstring(files["runbook.svg"]).iter() if element.text]
    assert sorted(text for text in texts if re.fullmatch(r"LR\d+", text)) == sorted(IDS)


def test_the_branches_hold_the_whole_catalog():
    assert sorted(entry.id for branch in branches_with_entries(bundled()) for entry in branch.entries) == sorted(IDS)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_node_of_a_chart_is_defined_before_an_arrow_needs_it(language):
    charts = re.findall(r"```mermaid\n(.*?)```", made(language)["runbook.md"], re.DOTALL)
    assert len(charts) == 1 + len(branches_with_entries(bundled()))
    for chart in charts:
        defined = set(re.findall(r"^\s+(\w+)[\[({]", chart, re.MULTILINE))
        defined |= set(re.findall(r"(?:--> ?|\| )(\w+)[\[({]", chart))
        used = {name for line in re.findall(r"^\s+(\w+) -", chart, re.MULTILINE) for name in [line]}
        assert used <= defined


def test_labels_hold_whatever_the_catalog_says():
    assert mermaid_label('a "b" <c> [d] {e}') == '"a #quot;b#quot; #lt;c#gt; [d] {e}"'


def test_text_of_the_picture_stays_on_the_page():
    root = ElementTree.fromstring(made()["runbook.svg"])
    width = float(root.attrib["width"])
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        size = float(element.attrib.get("font-size", 13))
        # A letter of the sans font is a little over half its size wide.
        assert float(element.attrib["x"]) + len(element.text) * size * 0.56 < width, element.text


def test_the_command_writes_both_files(tmp_path):
    assert main(["export", "runbook", "-o", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runbook.md", "runbook.svg"]
