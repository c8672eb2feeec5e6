"""What mkdocs is told in code: CHANGELOG.md and CONTRIBUTING.md, which stand above docs/, are pages of the site too."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ABOVE = {"CHANGELOG.md": "docs/changelog.md", "CONTRIBUTING.md": "docs/contributing.md"}
"""A file at the root of the repository, and where it would stand as a page of the site."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in ABOVE.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, page.removeprefix("docs/"), content=seen_from("docs", "", text)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    folder = posixpath.dirname("docs/" + page.file.src_uri)
    return markdown if page.file.generated_by else seen_from(folder, folder, markdown)


def seen_from(folder: str, written_in: str, text: str) -> str:
    """A text's links, as a page in another folder has them; what is no part of the site is named without a link."""

    def link(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        if target.startswith("http"):
            return found[0]
        path = posixpath.normpath(posixpath.join(written_in, target))
        path = ABOVE.get(path, path)
        if not path.startswith("docs/"):
            return label
        return f"[{label}]({posixpath.relpath(path, folder)}{anchor})"

    return LINK.sub(link, text)
