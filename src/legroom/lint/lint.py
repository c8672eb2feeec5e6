"""Lint: files in, a report out. What cannot be read is said, and the rest goes on."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from legroom.deployments.kinds import kind_of
from legroom.deployments.subjects import StartedServer
from legroom.deployments.text import MAX_FILE_BYTES, Place, Unread, read_text
from legroom.errors import LegroomError
from legroom.facts.releases import latest
from legroom.facts.releases import release as known_release
from legroom.lint.counterexamples import is_counterexample, is_test_code
from legroom.lint.expressions import Expression, declared_series
from legroom.lint.read import LintedPart, read_linted
from legroom.lint.report import Report, Skipped
from legroom.lint.rule import Context, LintFinding
from legroom.lint.rules import modules
from legroom.lint.rules.metric_unknown import names_exporter
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.planning.plan_document import PlanDocument


_COMMENT = re.compile(r"legroom:\s*ignore(?P<file>-file)?(?P<rules>(?:[ \t]+[a-z][a-z-]*,?)*)")
_MIG = re.compile(r"nvidia-smi\b[^\n]*\s(-mig|--multi-instance-gpu)\b|mig-parted")
_RENAMES = re.compile(r"replacement:\s*[\"']?vllm_")
"""Prometheus is told to give series other names as it scrapes them."""
_ALONE = re.compile(r"\s*(#|//|<!--|;)")
_EVERY = "*"
_OWN_FILE = re.compile(r"Written by legroom \S+ for (?:vLLM (?P<release>[\d.]+\d)|any vLLM)")
_HEADER_CHARS = 4096
_OWN_DASHBOARD = "written by legroom export grafana"


class Ignores:
    """What the comments of one file silence: a line, the command below a comment that stands alone, or the file."""

    def __init__(self, text: str) -> None:
        self._lines: dict[int, set[str]] = {}
        self._file: set[str] = set()
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            comment = _COMMENT.search(line)
            if comment is None:
                continue
            rules = set(re.findall(r"[a-z][a-z-]*", comment["rules"])) or {_EVERY}
            if comment["file"]:
                self._file |= rules
                continue
            self._add(number, rules)
            if _ALONE.match(line):
                for below in _following(lines, number):
                    self._add(below, rules)

    def _add(self, number: int, rules: set[str]) -> None:
        self._lines.setdefault(number, set()).update(rules)

    def silences(self, finding: LintFinding) -> bool:
        """Whether a comment speaks of this finding."""
        named = self._file | self._lines.get(finding.place.line, set())
        return finding.rule in named or _EVERY in named


def _following(lines: list[str], number: int) -> Iterable[int]:
    """The next line that is no comment, and those that continue it."""
    row = number
    while row < len(lines) and (not lines[row].strip() or _ALONE.match(lines[row])):
        row += 1
    while row < len(lines):
        yield row + 1
        if not lines[row].rstrip().endswith("\\"):
            break
        row += 1


SEARCHED = (
    ".yaml",
    ".yml",
    ".rules",
    ".json",
    ".sh",
    ".bash",
    ".service",
    ".md",
    ".markdown",
    ".py",
    ".dockerfile",
    ".promql",
    ".env",
)
"""What a folder is searched for; a file that is named is read whatever it is called."""
_BY_NAME = re.compile(r"(Docker|Container)file(\.[\w-]+)?|supervisor[\w-]*\.(conf|ini)")
_EMPTY_HINT = "name the files themselves: a file that is named is read whatever it is called"


@dataclass(frozen=True)
class Options:
    release: Release | None = None
    plan: PlanDocument | None = None
    ignore: frozenset[str] = frozenset()
    only_vllm: bool = False
    """Leave files alone in which vLLM is not named."""
    any_release: bool = False
    """Series of any release are right; flags are read for the newest."""
    only: frozenset[str] = frozenset()
    """Rules that are looked at; empty: all."""


def lint_files(paths: Sequence[str], options: Options) -> Report:
    texts: list[tuple[str, str]] = []
    unread: list[Unread] = []
    for named in paths:
        files = list(_files_of(named))
        for path in files:
            try:
                texts.append((path, _standard_input() if path == "-" else read_text(Path(path))))
            except LegroomError as error:
                unread.append(Unread(Place(path, 1, 1), _without_path(error.message, path), error.hint))
        if not files:
            unread.append(Unread(Place(named, 1, 1), "holds no file of a kind that lint looks for", _EMPTY_HINT))
    return lint_texts(texts, options, unread)


def _standard_input() -> str:
    content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise LegroomError("- is too large", f"legroom reads files up to {MAX_FILE_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise LegroomError("- is not text", "pipe a script, a rule file, a unit or a manifest") from None


def _without_path(message: str, path: str) -> str:
    return message.removeprefix(path).strip() or message


def _files_of(path: str) -> Iterable[str]:
    """The file itself, or what a folder holds; only what is hidden inside the folder is left out."""
    folder = Path(path)
    if not folder.is_dir():
        yield path
        return
    for inner in sorted(folder.rglob("*")):
        named = inner.suffix.lower() in SEARCHED or _BY_NAME.fullmatch(inner.name)
        hidden = any(part.startswith(".") for part in inner.relative_to(folder).parts)
        if named and not hidden and inner.is_file():
            yield str(inner)


def lint_texts(texts: Sequence[tuple[str, str]], options: Options, unread: Iterable[Unread] = ()) -> Report:
    """Look at texts, each with the path it is reported under."""
    release = options.release or (options.plan.release if options.plan else latest())
    not_read, skipped = list(unread), []
    frame = Context(options.release, options.plan, {}, options.any_release)
    frames = {path: _frame_of(text, frame) for path, text in texts}
    parts: list[tuple[str, LintedPart]] = []
    for path, text in texts:
        if options.only_vllm and "vllm" not in text.lower():
            skipped.append(Skipped(path, "vLLM is not named in it"))
            continue
        for item in read_linted(path, text, frames[path].release):
            if isinstance(item, Unread):
                not_read.append(item)
            elif isinstance(item, Skipped):
                skipped.append(item)
            else:
                parts.append((path, item))
    records = {name: expression for _, part in parts for name, expression in part.records.items()}
    declared = frozenset(name for path, text in texts if path.endswith(".py") for name in declared_series(text))
    is_renamed = any(_RENAMES.search(text) for _, text in texts)
    of_exporters = {path for path, part in parts if is_renamed or any(map(_names_exporter, part.subjects))}
    of_mig = {path for path, text in texts if _MIG.search(text)}
    ignores = {path: Ignores(text) for path, text in texts}
    lines = {path: text.splitlines() if kind_of(path, text) == "document" else [] for path, text in texts}
    distinct: dict[LintFinding, None] = {}
    silenced: dict[LintFinding, None] = {}
    for path, part in parts:
        context = replace(
            frames[path],
            records=records,
            declared=declared,
            is_of_exporter=path in of_exporters,
            is_about_mig=path in of_mig,
        )
        for finding in _check(part, context, options.only):
            if isinstance(finding, Unread):
                not_read.append(finding)
            elif options.only and finding.rule not in options.only:
                continue
            elif finding.rule in options.ignore or ignores[path].silences(finding):
                silenced[finding] = None
            else:
                distinct[_as_told(finding, lines[path])] = None
    order = {path: i for i, (path, _) in enumerate(texts)}
    findings = sorted(distinct, key=lambda finding: (order.get(finding.place.path, 0), *finding.where))
    files = tuple(path for path, _ in texts)
    spoken_of = {finding.place.path for finding in findings}
    return Report(
        release.version,
        files,
        tuple(findings),
        tuple(dict.fromkeys(not_read)),
        tuple(file for file in skipped if file.path not in spoken_of),
        len(silenced),
    )


def _as_told(finding: LintFinding, document: Sequence[str]) -> LintFinding:
    """A document that says that a block is old or wrong knows what is wrong with it, and so does a test."""
    row = finding.place.line - 1
    is_shown = is_test_code(finding.place.path) or (row < len(document) and is_counterexample(document, row))
    return replace(finding, severity="warning") if finding.severity == "error" and is_shown else finding


def lint_servers(servers: Iterable[StartedServer], options: Options) -> list[LintFinding]:
    """What rules find in servers that somebody has read already; only `lint_texts` sees what stands beside them."""
    context = Context(options.release, options.plan, any_release=options.any_release)
    checked = _check(LintedPart(tuple(servers)), context, options.only)
    wanted = [each for each in checked if isinstance(each, LintFinding) and each.rule in (options.only or {each.rule})]
    return sorted(dict.fromkeys(wanted), key=lambda finding: finding.where)


def _names_exporter(subject: object) -> bool:
    return isinstance(subject, Expression) and names_exporter(subject)


def _frame_of(text: str, frame: Context) -> Context:
    """What legroom itself wrote is judged by the release that it says it was written for, unless one was asked for."""
    if frame.asked is not None or frame.any_release:
        return frame
    own = _OWN_FILE.search(text[:_HEADER_CHARS])
    if own and own["release"]:
        return replace(frame, asked=known_release(own["release"]))
    return replace(frame, any_release=bool(own) or _OWN_DASHBOARD in text)


def _check(part: LintedPart, context: Context, only: frozenset[str]) -> Iterable[LintFinding | Unread]:
    for subject in part.subjects:
        if isinstance(subject, StartedServer):
            try:
                context.release_of(subject)
            except LegroomError as error:
                yield Unread(subject.place, f"a server that was not judged: {error.message}", error.hint)
                continue
        for module in modules():
            if not only or any(rule.id in only for rule in module.RULES):
                yield from module.check(subject, context)
