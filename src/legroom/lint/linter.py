"""Lint files and texts against the rules."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.deployments.container_images import image_release, is_published_by_vllm
from legroom.deployments.file_kinds import kind_of, plain_path
from legroom.deployments.release_pins import IMAGE, installed_releases, named_releases
from legroom.deployments.source_text import MAX_FILE_BYTES, Place, Text, Unread, read_text
from legroom.deployments.subjects import StartedServer, Subject
from legroom.deployments.yaml_nodes import Node
from legroom.errors import LegroomError
from legroom.facts import pattern, read_data
from legroom.facts.gpus import gpu, gpu_of_instance_type, is_known_gpu
from legroom.facts.releases import Release, latest
from legroom.facts.releases import nearest_release as known_release
from legroom.lint.expressions import Expression, declared_series
from legroom.lint.lint_report import LintReport, Skipped
from legroom.lint.linted_parts import DoubtfulLine, LintedPart, linted_parts, unread_values, without_comments
from legroom.lint.names_in_text import PASSED_ON
from legroom.lint.rule import Context, LintFinding, NamedCard
from legroom.lint.rules import all_checks
from legroom.lint.rules.metric_names import is_series_of_exporter
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.planning.plan_document import PlanDocument

_COMMENT = re.compile(r"legroom:\s*ignore(?P<file>-file)?(?P<rules>(?:[ \t]+[a-z][a-z-]*,?)*)")
_MIG = re.compile(r"nvidia-smi\b[^\n]*\s(-mig|--multi-instance-gpu)\b|mig-parted")
_ENTRY_SCRIPT = re.compile(r"(?:ENTRYPOINT|CMD|entrypoint:|command:)[^\n]*?([\w.-]+\.sh)\b")
_RAY = re.compile(r"\bray\b|ray[-_]cluster|LeaderWorkerSet", re.IGNORECASE)
_SIGNS: Mapping[str, str] = read_data("lint_rules.json")["signs"]
_SLICES, _CARD = pattern("linter.slices"), pattern("linter.card")
_OTHER_CARD = re.compile(r"\b(?:GH200|GB[23]00|B300|H20|MI\d{3}[AX]?)\b")
_RELABELING = pattern("linter.relabeling")
_USED_VARIABLE = re.compile(r"""(?:\$[{(]?|\benv\.|(?:environ|environ\.get|getenv)[\[(]\s*["'])(VLLM_\w+)""")
_TEST_CODE = re.compile(r"(^|/)(tests?/.*|test_[^/]*|[^/]*_test|conftest)\.py$|(^|/)(fixtures|testdata)/")
_COMMENT_LINE = re.compile(r"\s*(#|//|<!--|;)")
_API_KEY = re.compile(r"api[-_]key|requires_proxy_auth ?= ?True", re.IGNORECASE)
_OF_TEMPLATE = re.compile(r"(^|/)templates/|(^|/)[\w.-]*values[\w.-]*\.ya?ml$|\.(j2|tpl|tmpl|template)$")
_ALL_RULES = "*"
_TAG_OF_VALUES = re.compile(r"vllm/vllm-[\w-]+[\"']?\s*\n\s*(?:tag|version):\s*[\"']?v?(0\.\d+\.\d+)")
_OWN_FILE = re.compile(r"Written by legroom \S+ for (?:vLLM (?P<release>[\d.]+\d)|any vLLM)")
_OWN_DASHBOARD = "written by legroom export grafana"


class IgnoreComments:
    """The findings that comments of a file silence: of a line, of the command below a comment line, or of the file."""

    def __init__(self, text: str) -> None:
        self._lines: dict[int, set[str]] = {}
        self._file: set[str] = set()
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            comment = _COMMENT.search(line)
            if comment is None:
                continue
            rules = set(re.findall(r"[a-z][a-z-]*", comment["rules"])) or {_ALL_RULES}
            if comment["file"]:
                self._file |= rules
                continue
            below = _lines_of_next_command(lines, number) if _COMMENT_LINE.match(line) else ()
            for silenced in (number, *below):
                self._lines.setdefault(silenced, set()).update(rules)

    def silences(self, finding: LintFinding) -> bool:
        """Whether a comment in the file or on its line switches the finding's rule off."""
        silenced = self._file | self._lines.get(finding.place.line, set())
        return finding.rule in silenced or _ALL_RULES in silenced


def _lines_of_next_command(lines: list[str], number: int) -> Iterable[int]:
    """The line numbers of the first command after line `number`, which is a comment, with its continued lines."""
    row = number
    while row < len(lines) and (not lines[row].strip() or _COMMENT_LINE.match(lines[row])):
        row += 1
    while row < len(lines):
        yield row + 1
        if not lines[row].rstrip().endswith("\\"):
            break
        row += 1


SEARCHED = frozenset(read_data("file_formats.json")["linted_suffixes"])
"""The suffixes of the files that are linted in a folder; a file that is named is linted whatever its suffix."""
_BY_NAME = pattern("linter.by_name")


@dataclass(frozen=True)
class LintOptions:
    release: Release | None = None
    plan: PlanDocument | None = None
    ignore: frozenset[str] = frozenset()
    any_release: bool = False
    """Series of any release are valid; flags are read for the newest."""
    only: frozenset[str] = frozenset()
    """The rules to check; empty: all."""
    only_vllm: bool = False
    """Skip files that do not name vLLM."""


def lint_files(paths: Sequence[str], options: LintOptions) -> LintReport:
    """The findings in files and folders (`-` is stdin), with a note for each that could not be read."""
    texts: list[tuple[str, str]] = []
    unread: list[Unread] = []
    for named in paths:
        files = list(_files_in(named))
        for path in files:
            try:
                texts.append((path, _read_stdin() if path == "-" else read_text(Path(path))))
            except LegroomError as error:
                reason = error.message.removeprefix(path).strip() or error.message
                unread.append(Unread(Place(path, 1, 1), reason, error.hint))
        if not files:
            hint = "name the files themselves: a file that is named is read whatever it is called"
            unread.append(Unread(Place(named, 1, 1), "holds no file of a kind that lint looks for", hint))
    return lint_texts(texts, options, unread)


def _read_stdin() -> str:
    """The text of stdin; an error where it is too large or not UTF-8."""
    content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise LegroomError("- is too large", f"legroom reads files up to {MAX_FILE_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise LegroomError("- is not text", "pipe a script, a rule file, a unit or a manifest") from None


def _files_in(path: str) -> Iterable[str]:
    """The file at the path, or a folder's files of the kinds that lint reads, without hidden ones."""
    folder = Path(path)
    if not folder.is_dir():
        yield path
        return
    for inner in sorted(folder.rglob("*")):
        name = plain_path(inner.name)
        suffixes = {Path(each).suffix.lower() for each in (name, inner.name)}
        is_searched = not SEARCHED.isdisjoint(suffixes) or _BY_NAME.fullmatch(name) or _is_script(inner)
        is_hidden = any(re.match(r"\.(?!env(\.|$)|github$)", part) for part in inner.relative_to(folder).parts)
        if is_searched and not is_hidden and inner.is_file():
            yield str(inner)


def _is_script(path: Path) -> bool:
    """Whether a file without an ending begins as a script of a shell."""
    with suppress(OSError), path.open("rb") as file:
        return not path.suffix and re.match(rb"#!.*\b(?:ba|da|z)?sh\b", file.read(64)) is not None
    return False


def lint_texts(texts: Sequence[tuple[str, str]], options: LintOptions, unread: Iterable[Unread] = ()) -> LintReport:
    """The findings in (path, text) pairs, and the `unread` files with them."""
    release = options.release or (options.plan.release if options.plan else latest())
    not_read, skipped = list(unread), []
    contexts = {path: _context_of(text, options) for path, text in texts}
    parts: list[tuple[str, LintedPart]] = []
    around = "\n".join(
        without_comments(text) for path, text in texts if kind_of(path, text) not in ("document", "json")
    )
    for path, text in texts:
        if options.only_vllm and "vllm" not in text.lower():
            skipped.append(Skipped(path, "vLLM is not named in it"))
            continue
        for item in linted_parts(path, text, contexts[path].release, around):
            if isinstance(item, Unread):
                not_read.append(item)
            elif isinstance(item, Skipped):
                skipped.append(item)
            else:
                parts.append((path, item))
    parts += ((path, LintedPart((line,))) for path, line in unread_values(texts))
    shared = _shared_by_all(texts, parts)
    is_relabeled = any(_RELABELING.search(text) for _, text in texts)
    with_exporter = {
        path
        for path, part in parts
        if is_relabeled or any(isinstance(each, Expression) and is_series_of_exporter(each) for each in part.subjects)
    }
    signs = frozenset(sign for sign, pattern in _SIGNS.items() if any(re.search(pattern, text) for _, text in texts))
    cards = {path: _cards_in(path, text) for path, text in texts}
    examples = {path for path, text in texts if kind_of(path, text) == "document" or _TEST_CODE.search(path)}
    # The card of a file that starts a server or containers is that of their machine.
    own = {path for path, part in parts if any(isinstance(each, StartedServer) for each in part.subjects)} - examples
    own |= {path for path, text in texts if re.search(r"^services:", text, re.MULTILINE)} - examples
    every_card = {name: card for path, named in cards.items() if path not in own for name, card in named.items()}
    only_card = every_card if len(every_card) == 1 else {}
    with_key, with_mig = ({path for path, text in texts if at.search(text)} for at in (_API_KEY, _MIG))
    of_user = {path for path, text in texts if "servingEngineSpec:" in text}  # values of the production stack's chart
    by_folder = {"gpu-slices": _SLICES, "own-port-here": re.compile(_SIGNS["own-port"])}
    folders = {sign: {Path(path).parent for path, text in texts if at.search(text)} for sign, at in by_folder.items()}
    comments = {path: IgnoreComments(text) for path, text in texts}
    distinct, silenced = dict[LintFinding, None](), dict[LintFinding, None]()
    for path, part in parts:
        context = replace(
            contexts[path],
            **shared,
            has_exporter_series=path in with_exporter,
            configures_mig=path in with_mig,
            platform_signs=signs | {sign for sign, found in folders.items() if Path(path).parent in found},
            names_api_key=path in with_key,
            named_cards=tuple(card for card in (cards[path] or only_card).values() if card is not None),
        )
        is_of_lines = bool(part.subjects) and isinstance(part.subjects[0], DoubtfulLine)
        said = {spot for each in (*distinct, *silenced) for spot in _spots(each)} if is_of_lines else set()
        for finding in _check_part(part, context, options.only):
            if isinstance(finding, Unread):
                not_read.append(finding)
            elif not said.isdisjoint(_spots(finding)):
                continue  # a rule that read the server says it already
            elif finding.rule in options.ignore or comments[path].silences(finding):
                silenced[finding] = None
            else:
                distinct[_with_file_severity(finding, path in examples, path in of_user)] = None
    named = {
        path: each.named_release for path, part in parts for each in part.subjects if isinstance(each, StartedServer)
    }
    if options.release is None and not not_read and len(named) == len(texts) and len(set(named.values())) == 1:
        release = known_release(next(iter(named.values())) or release.version)
    order = {path: i for i, (path, _) in enumerate(texts)}
    findings = sorted(distinct, key=lambda finding: (order.get(finding.place.path, 0), *finding.sort_key))
    files, findings = tuple(path for path, _ in texts), _said_once(findings)
    unread = tuple(dict.fromkeys(not_read))
    return LintReport(release.version, files, tuple(findings), unread, tuple(skipped), len(silenced))


def _shared_by_all(texts: Sequence[tuple[str, str]], parts: Sequence[tuple[str, LintedPart]]) -> dict[str, Any]:
    """Keyword arguments of a `Context` about all linted files: recorded series, pinned releases, servers ..."""
    subjects = [each for _, part in parts for each in part.subjects]
    used = (name for _, text in texts for name in _USED_VARIABLE.findall(PASSED_ON.sub("", text)))
    return {
        "records": {name: expression for _, part in parts for name, expression in part.records.items()},
        "declared": frozenset(name for path, text in texts if path.endswith(".py") for name in declared_series(text)),
        "used_variables": frozenset(used),
        "entry_scripts": frozenset(name for _, text in texts for name in _ENTRY_SCRIPT.findall(text)),
        "pinned_releases": frozenset(_pinned_releases(texts)),
        "mentioned_releases": frozenset(_known({version for each in texts for version in _mentioned(*each)})),
        "uses_ray": any(_RAY.search(text) for _, text in texts),
        "manifests": tuple(each for each in subjects if isinstance(each, Node)),
        "fleet": tuple(each for each in subjects if isinstance(each, StartedServer) and each.words),
    }


def _pinned_releases(texts: Sequence[tuple[str, str]]) -> Iterator[Release]:
    """The vLLM releases that the (path, text) files pin: by pip, by vLLM's own image, or by a chart's image tag."""
    for path, text in texts:
        if kind_of(path, text) in ("document", None) or _TEST_CODE.search(path):
            continue
        run = (image_release(image) for image in IMAGE.findall(text) if is_published_by_vllm(image))
        yield from _known({*installed_releases(text).pinned, *run, *_TAG_OF_VALUES.findall(text)} - {None})


def _mentioned(path: str, text: str) -> Iterable[str | None]:
    """The vLLM releases that a file names; for a document only if all of its vLLM images have the same one."""
    if kind_of(path, text) != "document":
        return named_releases(text)
    of_images = {*map(image_release, IMAGE.findall(text))}
    return of_images if len(of_images) == 1 else ()


def _known(versions: Iterable[str | None]) -> Iterator[Release]:
    """The releases of these versions as `Release`, without versions older than any that legroom knows."""
    for version in versions:
        with suppress(LegroomError):
            yield known_release(str(version))


def _cards_in(path: str, text: str) -> dict[str, NamedCard | None]:
    """{GPU's name: its first mention in a file's name or text, or None for a card that legroom does not know}; a name
    of two GPUs counts as the larger one."""
    found: dict[str, NamedCard | None] = dict.fromkeys(_OTHER_CARD.findall(text))
    title = re.sub(r"[_.-]", " ", Path(path).stem).upper()
    for word in (*_CARD.finditer(title), *_CARD.finditer(text)):
        size = "".join(re.findall(r"\d{2,3}(?= ?GB)", word["size"]))
        name = gpu_of_instance_type(word["type"]) if word["type"] else word["card"] or word["named"]
        name = f"{name} {size}GB" if size and is_known_gpu(f"{name} {size}GB") else name
        if name and is_known_gpu(name):
            name = gpu(name).larger or name
            place = Text(path, text).place(word.start() if word.string is text else 0)
            found.setdefault(gpu(name).name, NamedCard(name, place))
    return found


def _said_once(findings: Iterable[LintFinding]) -> list[LintFinding]:
    """The findings; in one file equal notes, or equal findings about commands, become one that names all lines."""
    firsts: dict[object, LintFinding] = {}
    others: dict[LintFinding, dict[str, None]] = {}
    for each in findings:
        is_repeated = each.severity == "note" or each.rule in ("command-doubtful", "container-command")
        key = (each.place.path, each.rule, each.message) if is_repeated else each
        first = firsts.setdefault(key, each)
        others.setdefault(first, {}).update({str(each.place.line): None} if each.place.line != first.place.line else {})
    also = {first: f" (also at line {', '.join(lines)})" if lines else "" for first, lines in others.items()}
    return [replace(each, message=each.message + also[each]) for each in firsts.values()]


def _with_file_severity(finding: LintFinding, is_example: bool, is_of_user: bool) -> LintFinding:
    """The finding; as a note in a template where its user decides (not `is_of_user`), an example's error as warning."""
    is_left = finding.rule in read_data("lint_rules.json")["left_to_user"] and not is_of_user
    if is_left and _OF_TEMPLATE.search(finding.place.path):
        return replace(finding, severity="note")
    return replace(finding, severity="warning") if finding.severity == "error" and is_example else finding


def _spots(finding: LintFinding) -> Iterable[tuple[str, str, int | str]]:
    """The keys by which findings of one place are duplicates: (path, rule id, line, variable, or 0 for once a file)."""
    yield finding.place.path, finding.rule, finding.place.line
    yield from ((finding.place.path, finding.rule, name) for name in re.findall(r"\bVLLM_\w+", finding.message)[:1])
    if finding.rule in read_data("lint_rules.json")["once_a_file"]:
        yield finding.place.path, finding.rule, 0


def lint_subjects(subjects: Iterable[Subject], options: LintOptions) -> list[LintFinding]:
    """The findings in servers and commands that were read before; rules that need the whole file are left out."""
    context = Context(options.release, options.plan, any_release=options.any_release)
    checked = _check_part(LintedPart(tuple(subjects)), context, options.only)
    findings = (each for each in checked if isinstance(each, LintFinding))
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.sort_key)


def _context_of(text: str, options: LintOptions) -> Context:
    """The context of a file: options and, where legroom wrote it, the release in its header."""
    context = Context(options.release, options.plan, {}, options.any_release)
    if options.release is not None or options.any_release:
        return context
    own = _OWN_FILE.search(text[:4096])
    if own and own["release"]:
        return replace(context, requested_release=known_release(own["release"]))
    return replace(context, any_release=bool(own) or _OWN_DASHBOARD in text)


def _check_part(part: LintedPart, context: Context, only: frozenset[str]) -> Iterable[LintFinding | Unread]:
    """The findings of every check, or of the rules in `only` if any; Unread for a server of unknown release."""
    servers = tuple(each for each in part.subjects if isinstance(each, StartedServer))
    documents = tuple(each for each in part.subjects if isinstance(each, Node))
    context = replace(context, servers=servers, documents=documents)
    for subject in part.subjects:
        if isinstance(subject, StartedServer):
            try:
                context.release_of(subject)
            except LegroomError as error:
                yield Unread(subject.place, f"a server that was not judged: {error.message}", error.hint)
                continue
        for check in all_checks():
            if isinstance(subject, check.subject_type) and (not only or not only.isdisjoint(check.rules)):
                yield from (finding for finding in check.find(subject, context) if not only or finding.rule in only)
