"""Which release of vLLM a file installs, and whether another may run all the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from legroom.records import dataclass

_PINNED = re.compile(r"(?<![`\w])vllm(?:\[[\w,-]+\])?==(\d+(?:\.\d+)+(?:\.?post\d+)?)")
"""`pip install vllm==0.6.3`; what a sentence quotes (`vllm==0.6.3`) installs nothing."""
_COMMENT = re.compile(r"\s*(#|//|<!--)")
_INSTALLING = re.compile(
    r"""install|\b(pip3?|uv|conda|poetry)\b|--with\b|requirement|dependenc"""
    r"""|^[\s"'\\-]*vllm(\[[\w,-]+\])?==[\w.]+["'\s,;\\]*(\#.*)?$""",
    re.IGNORECASE,
)
"""A line that installs what it pins: a command, or an item of a list of requirements."""
_OPEN = re.compile(
    r"""\binstall\b.*?(?<![\w./@=-])["']?vllm(\[[\w,-]+\])?["']?(\s|$|[<>~!]=?|==[^\d])"""
    r"""|^[\s"'-]*vllm(\[[\w,-]+\])?\s*[<>~]=?"""
    r"""|git\+\S*vllm|\bvllm-\d[\w.+-]*\.whl|\bgit clone\s.*\bvllm"""
)
"""The newest, a range, a branch or a build: some release, and the line does not say which."""
_PLUGIN = re.compile(
    r"\binstall\b.*\bvllm[-_](ascend|gaudi|hpu|kunlun|metal|metax|mlx|musa|neuron|omni|openvino|rbln|spyre|tpu|tt|xpu)\b"
)
_ASKS_VERSION = re.compile(r"""vllm --version|vllm\.__version__|pip3? show vllm|version\(\s*["']vllm""")


@dataclass(frozen=True, slots=True)
class Installs:
    pinned: frozenset[str] = frozenset()
    """The releases that it installs by their number."""
    quoted: frozenset[str] = frozenset()
    """Those that only a comment or a sentence names."""
    is_open: bool = False
    """Whether it also installs vLLM without a number, or a plugin that brings flags of its own."""
    asks_version: bool = False
    """Whether it asks which release runs: then it may well have a command for each."""

    @property
    def is_any(self) -> bool:
        return bool(self.pinned) or self.is_open


def installs_in(text: str) -> Installs:
    pinned: set[str] = set()
    quoted: set[str] = set()
    is_open = False
    for line in text.splitlines() if "vllm" in text else ():
        if "vllm" not in line:
            continue
        versions = set(_PINNED.findall(line))
        if _COMMENT.match(line) or (versions and not _INSTALLING.search(line)):
            quoted |= versions
            continue
        pinned |= versions
        is_open = is_open or bool(_PLUGIN.search(line)) or (not versions and bool(_OPEN.search(line)))
    return Installs(frozenset(pinned), frozenset(quoted), is_open, bool(_ASKS_VERSION.search(text)))


def pinned_anywhere(text: str) -> Iterator[str]:
    """Every release that is named like a requirement, whoever names it."""
    yield from _PINNED.findall(text)
