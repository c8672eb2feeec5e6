"""The subjects that rules check in a file: servers and commands that `deployments` reads, and PromQL."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any

from legroom.deployments.file_kinds import Kind
from legroom.deployments.file_reader import document_kind, read_file
from legroom.deployments.source_text import Place, Text, Unread
from legroom.deployments.subjects import FilePart, InvokedCommand, Subject
from legroom.deployments.yaml_nodes import Node
from legroom.errors import LegroomError
from legroom.facts import pattern, read_data
from legroom.facts.releases import Release
from legroom.lint import expressions as promql
from legroom.lint.lint_report import Skipped
from legroom.lint.names_in_text import SHOWN, Mistake, mistaken_names, own_options, without_other_services
from legroom.vllm.command_line import plain_name

_RECOGNIZED = pattern("linted_parts.recognized")
_VLLM_SOURCE = pattern("linted_parts.vllm_source")
_ABOUT_VLLM = re.compile(r"vllm|\bray start\b", re.IGNORECASE)
_OF_COMMIT = re.compile(r"nightly-[0-9a-f]{7}")
_EXAMPLE = re.compile(r"\.env\.[\w.-]*(example|sample|template)|\.(example|sample)$")
_NOWHERE, _LOST = r"(?!)", re.compile(r"VLLM_\w*ARGS[\"']?\s*\n\s*value:.")
_BUILT = (pattern("linted_parts.compose_build"), pattern("linted_parts.docker_build"))
_NUMBERS = ("times", "each_s", "more", "less")
_LONGEST_TEXT, _MOST_LINES = 2**18, 8
"""Longer files are data, and their lines are not judged one by one."""
_KINDS_WITH_FLAGS = ("yaml", "json", "dockerfile", "unit", "shell")
_VLLM_FLAG = pattern("linted_parts.vllm_flag")
_ADDRESS, _ASKED_MODEL = pattern("linted_parts.address"), pattern("linted_parts.asked_model")
_KUBECTL, _MAKES_OBJECTS = pattern("linted_parts.kubectl"), pattern("linted_parts.makes_objects")
_compiled = cache(partial(re.compile, flags=re.MULTILINE))  # the cache of `re` holds fewer than the rules have
_OBJECT_KINDS = {"deploy": "Deployment", "svc": "Service", "service": "Service", "sts": "StatefulSet"}
_OBJECT_KINDS |= {"stateful": "StatefulSet", "i": "InferenceService", "servingruntime": "ServingRuntime"}
_JINJA = re.compile(r"\{%-?\s*(?:block|extends|include|if|for)\b")
_ITEM = re.compile(r"\n *- ")
_DECLARES = re.compile(r"add_argument\(\s*[\"']$")
_LINES_INSIDE: Mapping[str, tuple[Kind, ...]] = {
    "document": ("shell", "yaml", "unit", "dockerfile"),
    **dict.fromkeys(("shell", "text", "dockerfile"), ("yaml", "unit")),
}
"""The kinds of texts inside a file of a kind whose single lines are judged as those of a file of their own."""
_NEAR, _MOST_ADDRESSES = 300, 200
"""Characters around an address in which the request to it is looked for, within one item of a list."""


@dataclass(frozen=True)
class UnclaimedFlags:
    """vLLM flags in a file that belong to no server that was read."""

    place: Place
    flag: str
    lines: int


@dataclass(frozen=True)
class DoubtfulLine:
    """A line that is a mistake wherever it stands in a file of its kind."""

    place: Place
    row: Mapping[str, Any]


@dataclass(frozen=True)
class NamedAddress:
    """A host with its port, as a client, a scraper or a proxy names it."""

    place: Place
    host: str
    port: str
    model: str = ""
    """The model that the client asks for, where it stands beside the address."""
    is_open: bool = False
    """Whether a template or another domain has the host."""


@dataclass(frozen=True)
class NamedObject:
    """A Kubernetes object that a command names."""

    place: Place
    kind: str
    name: str


@dataclass(frozen=True)
class LintedPart:
    """The subjects of one part of a file."""

    subjects: tuple[
        Subject | Node | promql.Expression | UnclaimedFlags | DoubtfulLine | NamedAddress | NamedObject, ...
    ] = ()
    records: Mapping[str, str] = field(default_factory=dict)
    """Series that the part records, each with its expression."""
    is_known: bool = False
    """Whether the file is of a kind that is linted, even if it has no subject."""
    nothing: str = ""
    """Why there is nothing to check, where it is not the reason of its kind."""
    is_monitoring: bool = False
    """Whether it is a dashboard or holds rules alone: flags in it stand in sentences."""


def linted_parts(path: str, text: str, release: Release, all_text: str = "") -> Iterator[LintedPart | Unread | Skipped]:
    """The parts of a file, also those unreadable or with nothing to check; `all_text`: of all linted files."""
    if path.endswith(".py") and _VLLM_SOURCE.search(text):
        yield Skipped(path, "a copy of a module of vLLM")
        return
    kind: Kind | None = None
    nothing, is_empty, is_monitoring = "", True, False
    read_lines: set[int] = set()
    flags: set[str] = set()
    inner: list[FilePart] = []
    for part in read_file(path, text, release):
        unread = part.unread
        try:
            linted = _linted_part(part)
        except LegroomError as error:
            linted, unread = None, Unread(part.source.place(0), error.message, error.hint)
        if part.is_whole:
            kind, nothing = part.kind, linted.nothing if linted else ""
            is_monitoring = linted is not None and linted.is_monitoring
        inner += () if part.is_whole else (part,)
        flags |= {plain_name(word.text) for server in part.servers for word in server.words}
        for server in part.servers:
            lines = {server.place_of(word).line for word in server.words}
            # Words of a quoted text stand where it begins, and each may have a line of its own.
            read_lines |= lines if len(lines) > 1 else set(range(min(lines), min(lines) + len(server.words)))
        for each in part.subjects:
            if isinstance(each, InvokedCommand) and "".join(each.texts()[:1]).startswith("--"):
                read_lines.add(each.locate(each.words[0].offset).line)
        if linted is not None:
            is_empty = is_empty and not linted.subjects and not linted.is_known
            yield linted
        # A part that cannot be parsed is reported only where its kind is clear.
        if unread is not None and (part.is_whole or _RECOGNIZED.search(part.source.text)):
            is_empty = False
            yield unread
    if kind in _KINDS_WITH_FLAGS and not is_monitoring:
        told = without_other_services(path, text) if kind == "yaml" else text
        unclaimed = _unclaimed_flags(path, told, read_lines, own_options(all_text or text))
        is_empty = is_empty and unclaimed is None
        yield LintedPart((unclaimed,) if unclaimed is not None else ())
    is_judged = len(text) < _LONGEST_TEXT and (bool(flags) or _ABOUT_VLLM.search(f"{path} {text}") is not None)
    around = f"{all_text}\n{text}" if kind == "document" or not all_text else all_text
    names = frozenset(flags) if kind != "document" and not is_monitoring else None
    judged_kinds = _LINES_INSIDE.get(kind or "", ()) if is_judged and not is_monitoring else ()
    sources = [("rules" if is_monitoring else kind or "", Text(path, text))] if is_judged else []
    inside = ((each.kind, each.source) for each in inner if each.kind in judged_kinds)
    sources += ((each, source) for each, source in inside if _ABOUT_VLLM.search(source.text))
    for line_kind, source in sources:
        doubtful = tuple(_doubtful_lines(source, line_kind, around, names if source is sources[0][1] else None))
        is_empty = is_empty and not doubtful
        yield LintedPart(doubtful)
    yield LintedPart((*_named_addresses(path, text, kind), *_named_objects(path, text, kind)))
    nothing = nothing or read_data("lint_rules.json")["nothing"].get(kind or "", "")
    if kind == "shell" and not flags and _JINJA.search(text):
        yield Skipped(path, "a template of Jinja, of which no server was understood: render it first")
    elif is_empty and nothing:
        yield Skipped(path, nothing)


def _named_objects(path: str, text: str, kind: Kind | None) -> Iterator[NamedObject]:
    """The Kubernetes objects that kubectl lines of a file name; none where the file also creates objects."""
    is_read = kind in ("shell", "document") and not _MAKES_OBJECTS.search(text)
    for found in islice(_KUBECTL.finditer(text), _MOST_ADDRESSES) if is_read else ():
        named = next(name for short, name in _OBJECT_KINDS.items() if found["kind"].startswith(short))
        yield NamedObject(Text(path, text).place(found.start("name")), named, found["name"])


def _named_addresses(path: str, text: str, kind: Kind | None) -> Iterator[NamedAddress]:
    """The addresses of servers in a file, each with the model asked for there; in a document those of requests only."""
    told, source, said = without_comments(text), Text(path, text), set[str]()
    if kind in (None, "document"):
        for request in islice(_ASKED_MODEL.finditer(text if kind else ""), _MOST_ADDRESSES):
            if request["json"]:
                yield NamedAddress(source.place(request.start("json")), "localhost", "", request["json"])
        return
    for found in islice(_ADDRESS.finditer(told), _MOST_ADDRESSES):
        before, after = told[max(found.start() - _NEAR, 0) : found.end()], told[found.end() : found.end() + _NEAR]
        item = _ITEM.split(before)[-1] + _ITEM.split(after)[0]
        asked = _ASKED_MODEL.search(item)
        if found[0] not in said:
            said.add(found[0])
            model = (asked["model"] or asked["json"] or "") if asked is not None else ""
            place = source.place(found.start("host"))
            is_open = "{{" in text or bool(found["domain"])
            yield NamedAddress(place, found["host"], found["port"], model, is_open)


def _unclaimed_flags(path: str, text: str, read_lines: set[int], own: frozenset[str]) -> UnclaimedFlags | None:
    """The first vLLM flag outside `read_lines`, those read as a server's command; None without. `own`: not counted."""
    lost = {text.count("\n", 0, each.end()) + 1 for each in _LOST.finditer(text)}  # lines that vLLM does not read
    unclaimed = [
        (number, flag)
        for number, line in enumerate(text.splitlines() if "vllm" in text.lower() else (), 1)
        if number not in read_lines | lost and not line.lstrip().startswith("#") and (flag := _VLLM_FLAG.search(line))
        if plain_name(flag[0]) not in own
    ]
    if not unclaimed:
        return None
    number, flag = unclaimed[0]
    return UnclaimedFlags(Place(path, number, flag.start() + 1), flag[0], len(unclaimed))


def _doubtful_lines(
    source: Text, kind: str, all_text: str, server_flags: frozenset[str] | None
) -> Iterator[DoubtfulLine]:
    """Mistakes of single lines, each rule at most once a line. Names in `server_flags`, flags of servers already read,
    are skipped; None: no names are judged, as in a document, a dashboard or rules (kind `rules`)."""
    path, text, said = source.path, source.text, set[tuple[int, str]]()
    whole = without_comments(text)
    told = without_other_services(path, whole) if kind == "yaml" else whole
    texts = {"comments": text, "file": whole, "shown": told, "": told}
    names = mistaken_names(told, kind, all_text, server_flags) if server_flags is not None else ()
    for offset, row in (*names, *_lines_in_data(texts, kind, all_text)):
        place = source.place(offset)
        if (row["rule"] == "secret-written" and _EXAMPLE.search(path)) or _is_found(row.get("not_in", _NOWHERE), path):
            continue  # a value to be replaced
        if (place.line, row["rule"]) not in said:
            said.add((place.line, row["rule"]))
            yield DoubtfulLine(place, row)


def _lines_in_data(texts: Mapping[str, str], kind: str, all_text: str) -> Iterator[Mistake]:
    """(offset, row) of each mistake in `line_mistakes.json`. `texts`: the searched texts by `scope` of a row. Its
    `needs` must match in `all_text`, that of all linted files, its `lacks` must not; `keyless`: of an open API."""
    told, text, data = texts[""], texts["comments"], read_data("line_mistakes.json")
    has_key = _is_found(data["key"], all_text) and _is_found(f"{data['key']}|{data['key_elsewhere']}", told)
    for row in data["rows"]:
        if has_key and row.get("keyless"):
            continue
        matches = _compiled(row["pattern"]).finditer(texts[row.get("scope", "")]) if kind in row["kinds"] else ()
        found = [
            each
            for each in islice(matches, _MOST_LINES)
            if _has_wanted_numbers(each, row)
            and not _OF_COMMIT.search(each["at"])
            and not (row["rule"] == "image-moving" and _is_local(each["at"], all_text))
            and not _DECLARES.search(each.string, max(each.start("at") - 40, 0), each.start("at"))
            and (row.get("scope") == "shown" or not SHOWN.match(text, text.rfind("\n", 0, each.start("at")) + 1))
        ]
        if not found or ("unless" in row and _compiled(row["unless"]).search(told)):
            continue
        is_met = re.search(row.get("about", ""), told) and _is_found(row.get("needs", ""), all_text)
        if is_met and not ("lacks" in row and _is_found(row["lacks"], all_text)):
            yield from ((each.start("at"), row) for each in found)


def _has_wanted_numbers(found: re.Match[str], row: Mapping[str, Any]) -> bool:
    """Whether the match's named groups fulfil `times` * `each_s` < the row's `below_s`, and `more` > `less`."""
    counts = {name: int(number) for name, number in found.groupdict().items() if name in _NUMBERS and number}
    is_short = counts.get("times", 0) * counts.get("each_s", 1) < row.get("below_s", math.inf)
    return is_short and counts.get("more", 1) > counts.get("less", 0)


@lru_cache(maxsize=256)
def _is_local(image: str, all_text: str) -> bool:
    """Whether an image is built by a linted file, or named like vLLM without registry and account; nothing pulls it."""
    built = {name for way in _BUILT for found in way.finditer(all_text) for name in found.groups() if name}
    return image in built or re.fullmatch(r"(?=[\w.-]*vllm)[\w.-]+:[\w.-]+", image) is not None


@lru_cache(maxsize=256)
def _is_found(regex: str, text: str) -> bool:
    """Whether the regular expression matches anywhere in the text."""
    return _compiled(regex).search(text) is not None


def without_comments(text: str) -> str:
    """The text with its comment lines blanked by spaces, so that offsets stay; `#!` and `#SBATCH` lines are kept."""
    return re.sub(r"(?m)^[ 	]*(?:#(?!!|SBATCH)|//).*$", lambda line: " " * len(line[0]), text)


def _linted_part(part: FilePart) -> LintedPart | None:
    """A file part with the PromQL that it holds, or why it has nothing to lint; None where it could not be read."""
    if part.unread is not None and not part.subjects and not part.documents:
        return None
    if part.kind == "json":
        expressions = promql.dashboard_expressions(part.source)
        if expressions is None and part.documents:
            return _linted_yaml(part)
        if expressions is None:
            return LintedPart(nothing="JSON, but no Grafana dashboard: it has no panels")
        if not any("vllm" in expression.text for expression in expressions):
            return LintedPart(nothing="a dashboard without any vLLM metric")
        return LintedPart((*part.subjects, *expressions), is_monitoring=True)
    if part.kind == "yaml":
        return _linted_yaml(part)
    if part.kind == "promql":
        return LintedPart((promql.Expression(part.source.text, part.source.place, "panel"),))
    if part.kind == "python":
        return LintedPart((*part.subjects, *promql.program_series(part.source)))
    if part.kind == "document":
        return LintedPart(part.subjects)
    if part.kind == "text":
        return LintedPart((*part.subjects, *promql.terraform_rules(part.source)))
    return LintedPart(part.subjects, is_known=part.kind not in ("env", "text") and part.is_whole)


def _linted_yaml(part: FilePart) -> LintedPart:
    """The servers, PromQL expressions and recording rules of YAML documents."""
    expressions: list[promql.Expression] = []
    records: dict[str, str] = {}
    documents = [(document_kind(document), document) for document in part.documents]
    for kind, document in documents:
        if kind == "rules":
            rules, recorded = promql.rule_expressions(document)
            expressions += rules
            records |= recorded
        elif kind in ("kubernetes", "other"):
            expressions += promql.manifest_queries(document)
    served = ("kubernetes", "compose", "other") if part.subjects else ("kubernetes", "compose")
    manifests = [document for kind, document in documents if kind in served]
    is_known = part.is_whole and any(kind != "other" for kind, _ in documents)
    versions = [document.text("apiVersion") for kind, document in documents if kind != "rules"]
    is_monitoring = bool(documents) and all(each.startswith("monitoring.coreos.com/") for each in versions)
    return LintedPart(
        (*part.subjects, *manifests, *expressions),
        records,
        is_known,
        read_data("lint_rules.json")["nothing"]["yaml"],
        is_monitoring,
    )


_READ_VALUE = re.compile(r"\.Values\.([\w.]+)")
_READ_WHOLE = pattern("linted_parts.read_whole")
_VALUES_OF_SERVER = frozenset({"args", "extraArgs", "env", "envVars", "extraEnv", "resources", "command", "shmSize"})
_YAML_KEY = re.compile(r"^( *)([A-Za-z][\w-]*):(?=\s|$)")


def unread_values(texts: Sequence[tuple[str, str]]) -> Iterator[tuple[str, DoubtfulLine]]:
    """(path, line) of each server setting in a values.yaml that no template reads; `texts`: (path, text) of a chart."""
    for path, text in texts:
        folder = path.removesuffix("values.yaml")
        templates = [body for name, body in texts if name.startswith(f"{folder}templates/")]
        if folder == path or not templates or any(map(_READ_WHOLE.search, templates)):
            continue
        read = {name.rstrip(".") for body in templates for name in _READ_VALUE.findall(body)}
        for key, line in _dotted_keys(text):
            is_read = any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in read)
            parent, dot, last = key.rpartition(".")
            has_template = any(f"{name}.".startswith(f"{parent}{dot}image.") for name in read)  # of its container
            if last in _VALUES_OF_SERVER and has_template and not is_read:
                row = {"rule": "flag-ignored", "message": f"no template of the chart reads {key}"}
                yield path, DoubtfulLine(Place(path, line, 1), row | {"suggestion": "read it, or leave it out"})


def _dotted_keys(text: str) -> Iterator[tuple[str, int]]:
    """(key, line) of each key in a block of YAML, the key with those above it as `a.b.c`; lists add no level."""
    above: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if (found := _YAML_KEY.match(line)) is not None:
            above = [*(each for each in above if each[0] < found.end(1)), (found.end(1), found[2])]
            yield ".".join(name for _, name in above), number
