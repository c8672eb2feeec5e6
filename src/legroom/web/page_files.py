"""The installed files of the page; a meta tag in its head names the edition."""

import hashlib
import mimetypes
import re
from functools import lru_cache
from pathlib import Path
from typing import Literal

from legroom.records import dataclass
from legroom.version import __version__

Edition = Literal["served", "static"]
PAGE_FOLDER = Path(__file__).with_name("page")
_META = re.compile(rb'(<meta name="legroom-(edition|version)" content=")[^"]*(")')
_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)*")
"""Excludes names that begin with a dot: parent folders and hidden files."""
_MEDIA_TYPES = dict.fromkeys((".js", ".mjs"), "text/javascript")
_MEDIA_TYPES |= {".wasm": "application/wasm", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    media_type: str
    etag: str


def page_file(path: str) -> PageFile | None:
    """The served page's file at a URL path, `index.html` for an empty one; None where there is none."""
    name = path or "index.html"
    file = PAGE_FOLDER / name
    if not _NAME.fullmatch(name) or not file.is_file():
        return None
    return _load_page_file(file, file.stat().st_mtime_ns)


def page_names() -> list[str]:
    """Every file of the page, relative to its folder."""
    return [file.relative_to(PAGE_FOLDER).as_posix() for file in sorted(PAGE_FOLDER.rglob("*")) if file.is_file()]


@lru_cache(maxsize=64)
def _load_page_file(file: Path, changed_ns: int) -> PageFile:
    """Content, media type and ETag; HTML is marked as served. `changed_ns` only keys the cache."""
    body = file.read_bytes()
    if file.suffix == ".html":
        body = with_edition(body, "served")
    kind = _MEDIA_TYPES.get(file.suffix) or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return PageFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:24]}"')


def with_edition(html: bytes, edition: Edition) -> bytes:
    """The page with its edition and version in its meta tags."""
    values = {b"edition": edition.encode(), b"version": __version__.encode()}
    return _META.sub(lambda tag: tag[1] + values[tag[2]] + tag[3], html)
