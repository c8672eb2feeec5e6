"""The vLLM releases that files install, run or mention."""

import re
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from legroom.deployments.container_images import image_release
from legroom.deployments.file_kinds import Kind
from legroom.deployments.source_text import read_text
from legroom.deployments.subjects import StartedServer
from legroom.errors import LegroomError
from legroom.facts import pattern
from legroom.records import dataclass

IMAGE = pattern("release_pins.image")
_MOST_FILES_BESIDE = 60
_SAYS_RELEASE = re.compile(r"\.(txt|toml|py|sh|ya?ml|env)$|[Dd]ockerfile|^\.env")
_LISTS_PACKAGES = re.compile(r"requirements.*\.txt|pyproject\.toml|Dockerfile")
_VERSION = r"(\d+(?:\.\d+)+(?:\.?post\d+)?)"
_PINNED = pattern("release_pins.pinned")
"""`pip install vllm==0.6.3`, a wheel or a tag of git, but not a quoted `vllm==0.6.3` in a sentence."""
_VERSION_VARIABLE = re.compile(rf"(?:^|\s)(\w*VLLM\w*)=[\"']?v?{_VERSION}[\"']?(?=\s|;|$)", re.MULTILINE)
"""`ARG VLLM_VERSION=0.8.5`."""
_COMMENT = re.compile(r"\s*(#|//|<!--)")
_MENTIONED = re.compile(rf"\bvllm[ :]+(?:version )?v?{_VERSION}(?![\d.]*\w)", re.IGNORECASE)
"""`# needs vLLM 0.19` in a comment."""
_INSTALLING, _UNPINNED = pattern("file_reader.installing"), pattern("file_reader.unpinned")
_PLUGIN = pattern("release_pins.plugin")
_ASKS_VERSION = re.compile(r"""vllm --version|vllm\.__version__|pip3? show vllm|version\(\s*["']vllm""")


@lru_cache(maxsize=64)
def named_releases(text: str) -> frozenset[str]:
    """The vLLM versions that a text names on any line, also as the default of a variable."""
    return frozenset(version for groups in pattern("release_pins.named").findall(text) for version in groups if version)


@dataclass(frozen=True, slots=True)
class InstalledReleases:
    """The vLLM releases that a file installs."""

    pinned: frozenset[str] = frozenset()
    quoted: frozenset[str] = frozenset()
    """Releases that only a comment or a sentence names."""
    is_unpinned: bool = False
    """Whether it also installs vLLM without a version, or a plugin with its own flags."""
    asks_version: bool = False
    """Whether it checks the running version: it may have a command for each."""


def installed_releases(text: str) -> InstalledReleases:
    """The vLLM versions that a text's install lines pin, and those that it only mentions; for any kind of file."""
    pinned: set[str] = set()
    quoted: set[str] = set()
    is_unpinned = False
    variables = {name: value for name, value in _VERSION_VARIABLE.findall(text) if text.count(f"{name}=") == 1}
    for raw_line in text.splitlines() if "vllm" in text else ():
        if "vllm" not in raw_line:
            continue
        line = re.sub(r"\$\{?(\w+)[^\s}/\"']*\}?", lambda used: variables.get(used[1], used[0]), raw_line)
        versions = {version for groups in _PINNED.findall(line) for version in groups if version}
        if _COMMENT.match(line) or (versions and not _INSTALLING.search(line)):
            quoted |= versions | set(_MENTIONED.findall(line))
            continue
        pinned |= versions
        is_unpinned = is_unpinned or bool(_PLUGIN.search(line)) or (not versions and bool(_UNPINNED.search(line)))
    return InstalledReleases(frozenset(pinned), frozenset(quoted), is_unpinned, bool(_ASKS_VERSION.search(text)))


def releases_beside(path: Path) -> frozenset[str]:
    """The vLLM versions that files of the same folder, and package lists of the folder above, pin, name or run."""
    if not path.is_file():
        return frozenset()
    named: set[str] = set()
    for folder in (path.parent, path.parent.parent):
        listed: list[Path] = []
        with suppress(OSError):  # a folder above it may be another user's
            listed = sorted(folder.iterdir())
        for other in listed[:_MOST_FILES_BESIDE]:
            is_read = _SAYS_RELEASE.search(other.name) and (folder == path.parent or _LISTS_PACKAGES.match(other.name))
            if not is_read or other == path or not other.is_file():
                continue
            try:
                text = read_text(other)
            except LegroomError:
                continue
            installs = installed_releases(text)
            named |= installs.pinned | installs.quoted | set(filter(None, map(image_release, IMAGE.findall(text))))
    return frozenset(named)


def with_release(
    server: StartedServer, installs: InstalledReleases, of_images: frozenset[str], kind: Kind
) -> StartedServer:
    """The server with the one vLLM release that its file's installs pin and its images have (`of_images`) or, without
    any, that its sentences mention; unchanged if there are several. If its own image is vLLM's, only installs count."""
    if "vllm" in server.image.lower():
        if kind in ("document", "python") or not (installs.pinned or installs.is_unpinned):
            return server
        if kind == "dockerfile" and len(installs.pinned) == 1 and not installs.is_unpinned:
            return replace(server, image="", installed=min(installs.pinned), is_release_assumed=True)
        return replace(server, is_release_assumed=True)
    named = installs.pinned | of_images or installs.quoted
    if len(named) != 1:
        return server
    # The image of another command or a comment makes a release likely, an install makes it certain.
    is_installed = named == installs.pinned and not installs.is_unpinned
    is_certain = is_installed and (kind == "document" or not installs.asks_version)
    return replace(server, installed=min(named), is_release_assumed=not is_certain)
