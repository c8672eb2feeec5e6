"""Documents: Markdown code blocks, and what stands in plain text as if it were one."""

from __future__ import annotations

import re
from collections.abc import Iterator

from legroom.deployments.kinds import Kind, kind_of_language, sniffed
from legroom.deployments.text import Text

_FENCE = re.compile(r"^(?P<indent>[ \t]*(?:>[ \t]*)?)(?P<fence>`{3,}|~{3,})[ \t]*\{?\.?(?P<language>[\w+-]*)")
_SHELL_WORD = re.compile(
    r"(sudo|export|set|source|exec|nohup|env|python3?|vllm|docker|podman|nerdctl|pip|uv|curl|wget|grep|watch|pkill|"
    r"killall|kill|pgrep|nvidia-smi|systemctl|kubectl|helm|echo|cd|mkdir|cat|tail|while|until|for|if|then|do|done|fi|"
    r"else|elif|case|esac|sleep|trap|exit|return|ulimit|numactl|taskset|time|true|false|tee|test|local|unset)(\s|;|$)"
    r"|[A-Za-z_]\w*=|#|[()|}{]|\.\.\.|-{1,2}[a-z]|\$ "
)
_LIKELY_SHELL = re.compile(
    r"^[ \t]*(\$ )?(sudo |exec |nohup |[A-Z_]+=\S* )*(vllm serve|python3? -m vll|docker run|podman run|pkill|killall|"
    r"nvidia-smi|export [A-Z_]+=|#!.*sh|python3? -c|.*\| *grep |.*\bvllm\b.*--)",
    re.MULTILINE | re.IGNORECASE,
)
START = re.compile(
    r"^[ \t]*(\$ )?(sudo |exec |nohup |\$\w+ |[A-Z_]+=\S* )*"
    r"(vllm serve|python3?( -u)? -m (vllm\.\S+|dynamo\.vllm)|(docker|podman) run)\s",
    re.IGNORECASE | re.MULTILINE,
)
"""A line that starts a server."""
FENCE = "```"
_LONGEST_PARAGRAPH = 400
"""A script between paragraphs of prose is shorter; a log is not."""


def blocks_of(document: Text) -> list[tuple[Kind, Text]]:
    """The code blocks and what looks like code between them, in the order in which they stand."""
    return sorted(_blocks(document), key=lambda block: block[1].place(0).line)


def _blocks(document: Text) -> Iterator[tuple[Kind, Text]]:
    lines = [line for _, line in document.lines()]
    free = [True] * len(lines)
    for first, last, language in _fences(lines):
        for i in range(max(first - 1, 0), min(last + 1, len(lines))):
            free[i] = False
        source = document.rows(first, last)
        if language.lower() in ("diff", "patch"):
            source = source.with_text("\n".join(_as_changed(line) for line in source.text.split("\n")))
        kind = kind_of_language(language) or sniffed(source.text) or _guess(source.text)
        if kind:
            yield kind, source
    yield from _plain_parts(document, lines, free)


def _as_changed(line: str) -> str:
    """A line of a diff as it is afterwards, at the same columns: what is taken out is not wrong any more."""
    is_header = line.startswith(("---", "+++", "@@", "diff ", "index "))
    return "" if is_header or line.startswith("-") else " " + line[1:]


def _guess(text: str) -> Kind | None:
    if _LIKELY_SHELL.search(text):
        return "shell"
    return "python" if re.search(r"^(import|from|def|class) ", text, re.MULTILINE) else None


def _fences(lines: list[str]) -> Iterator[tuple[int, int, str]]:
    i = 0
    while i < len(lines):
        opening = _FENCE.match(lines[i])
        i += 1
        if opening is None:
            continue
        first, fence = i, opening["fence"]
        closing = re.compile(rf"^[ \t]*(?:>[ \t]*)?{re.escape(fence[0])}{{{len(fence)},}}[ \t]*$")
        while i < len(lines) and not closing.match(lines[i]):
            i += 1
        yield first, i, opening["language"]
        i += 1


def _plain_parts(document: Text, lines: list[str], free: list[bool]) -> Iterator[tuple[Kind, Text]]:
    ends = _paragraph_ends(lines, free)
    i = 0
    while i < len(lines):
        if not free[i] or not lines[i].strip():
            i += 1
            continue
        taken = _shell(document, lines, ends, i) or _start(document, lines, ends, i)
        if taken is None:
            i += 1
            continue
        kind, source, end = taken
        for row in range(i, end):
            free[row] = False
        yield kind, source
        i = end
    # What is left is prose and code of other languages: only quoted names and sample lines are looked for.
    rest = "\n".join(line if is_free else "" for line, is_free in zip(lines, free, strict=True))
    yield "python", Text(document.path, rest, document.place(0).line)


def _paragraph_ends(lines: list[str], free: list[bool]) -> list[int]:
    """For each line the end of its paragraph; for a blank or taken line, itself."""
    ends = list(range(len(lines)))
    for i in range(len(lines) - 1, -1, -1):
        if free[i] and lines[i].strip():
            following = ends[i + 1] if i + 1 < len(lines) and free[i + 1] and lines[i + 1].strip() else i + 1
            ends[i] = following
    return ends


def _shell(document: Text, lines: list[str], ends: list[int], first: int) -> tuple[Kind, Text, int] | None:
    """Paragraphs that are shell from their first to their last line, joined as long as they follow each other."""
    end = last = first
    while last < len(lines) and _SHELL_WORD.match(lines[last].strip()):
        stop = ends[last]
        if not last < stop <= last + _LONGEST_PARAGRAPH or not _is_shell(lines[last:stop]):
            break
        end = last = stop
        while last < len(lines) and not lines[last].strip():
            last += 1
    if end == first or not _LIKELY_SHELL.search("\n".join(lines[first:end])):
        return None
    return "shell", document.rows(first, end), end


def _start(document: Text, lines: list[str], ends: list[int], first: int) -> tuple[Kind, Text, int] | None:
    """A command that starts a server, with its continued lines, in the middle of prose: text copied from a page."""
    if not START.match(lines[first]):
        return None
    end = first + 1
    while end < ends[first] and lines[end - 1].rstrip().endswith("\\"):
        end += 1
    return "shell", document.rows(first, end), end


def _is_shell(paragraph: list[str]) -> bool:
    continued = False
    for line in paragraph:
        if not continued and not _SHELL_WORD.match(line.strip()):
            return False
        continued = line.rstrip().endswith("\\")
    return True
