"""Read a file of any kind into the servers that it starts."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from legroom.deployments.compose_reader import compose_subjects, env_file_server, is_compose
from legroom.deployments.container_images import has_unnamed_release, image_release
from legroom.deployments.dockerfile import copied_files, dockerfile_subjects
from legroom.deployments.file_kinds import Kind, as_shell, kind_by_first_line, kind_of
from legroom.deployments.helm_chart import RenderedText, render_chart_template
from legroom.deployments.kubernetes_reader import is_kubernetes, kubernetes_subjects
from legroom.deployments.markdown import START, blocks_of
from legroom.deployments.model_resources import model_resource_servers
from legroom.deployments.other_yaml import custom_resource_servers, embedded_files, other_subjects
from legroom.deployments.python_reader import python_subjects
from legroom.deployments.release_pins import IMAGE, installed_releases, releases_beside, with_release
from legroom.deployments.server_words import basename
from legroom.deployments.shell.lexer import HereDocument, Word, here_documents
from legroom.deployments.shell.shell_script import read_shell
from legroom.deployments.source_text import Text, Unread
from legroom.deployments.subjects import FilePart, StartedServer, Subject, change_servers
from legroom.deployments.supervisord import is_supervisord, supervisord_subjects
from legroom.deployments.systemd_unit import unit_subjects
from legroom.deployments.vllm_config import config_server, is_config
from legroom.deployments.yaml_nodes import TEMPLATE_HINT, Node, is_template, load_nodes, template_as_yaml
from legroom.errors import LegroomError
from legroom.facts import pattern
from legroom.facts.releases import Release

DocumentKind = Literal["rules", "compose", "kubernetes", "config", "other"]
"""The kind of a YAML document. Prometheus rules start no server; lint reads them."""
_SCRIPT_RUNNERS = ("bash", "sh", "zsh", "dash", "ash", "ssh", "sbatch")
_VALUES_FILE = pattern("file_reader.values_file")
_ESCAPED = re.compile(r"\\([\\$`])")


def read_file(path: str, text: str, release: Release) -> Iterator[FilePart]:
    """A part for the file and for every text inside it that could start a server, in order, also unreadable ones."""
    kind = kind_of(path, text)
    installs = installed_releases(text)
    images = {image.rstrip(".") for image in IMAGE.findall(text)}
    releases = {image_release(image) for image in images}
    # With several images, one of an unknown release, a document does not say in which of them a command runs.
    of_images = frozenset() if None in releases else frozenset(version for version in releases if version)
    is_named = bool(installs.pinned or installs.quoted or of_images or installs.is_unpinned)
    is_hidden = kind == "document" and bool(images) and all(map(has_unnamed_release, images)) and not is_named
    hidden = min(images) if is_hidden else ""
    if not is_named and not images and kind != "document" and "vllm" in text:
        of_images = releases_beside(Path(path))
    for part in _parts_of_text(kind, Text(path, as_shell(path, text)), release):
        subjects = change_servers(part.subjects, lambda server: with_release(server, installs, of_images, kind))
        if part.is_template:
            subjects = change_servers(subjects, lambda server: replace(server, is_release_assumed=True))
        if is_hidden:
            subjects = change_servers(subjects, lambda server: replace(server, image=server.image or hidden))
        yield replace(part, subjects=tuple(subjects))


def document_kind(document: Node) -> DocumentKind:
    """What a YAML document is: Prometheus rules, a Compose file, a Kubernetes object, a vLLM config file or other."""
    if any(group.get("rules") is not None for group in rule_groups(document)):
        return "rules"
    if is_compose(document):
        return "compose"
    if is_kubernetes(document):
        return "kubernetes"
    is_of_chart = _VALUES_FILE.search(document.source.path) and document.source.place(0).line == 1
    return "config" if is_config(document) and not is_of_chart else "other"


def rule_groups(document: Node) -> list[Node]:
    """The groups of Prometheus rules, in a rule file or in the operator's PrometheusRule."""
    keys = ("spec", "groups") if document.text("kind") == "PrometheusRule" else ("groups",)
    return document.list(*keys)


def _parts_of_text(kind: Kind, source: Text, release: Release, depth: int = 0) -> Iterator[FilePart]:
    """A text and the texts embedded in it, as parts of one file; `depth`: how deep the text itself is embedded."""
    try:
        part, inner = _read_text(kind, source, release)
    except LegroomError as error:
        part, inner = FilePart(kind, source, unread=Unread(source.place(0), error.message, error.hint)), ()
    yield replace(part, is_whole=depth == 0)
    if depth < 5:
        for inner_kind, inner_source in inner:
            yield from _parts_of_text(inner_kind, inner_source, release, depth + 1)


def _read_text(kind: Kind, source: Text, release: Release) -> tuple[FilePart, Iterable[tuple[Kind, Text]]]:
    """(a text as a part with its servers and commands, the texts of other kinds embedded in it)."""
    if kind in ("shell", "unit"):  # a variable for a statement of Jinja: what it encloses may be left out
        source = source.with_text(re.sub(r"\{%(.*?)%\}", lambda found: f" ${'_' * len(found[1])}_ ", source.text))
    if kind == "shell":
        return read_shell(source), _embedded_here_documents(source)
    if kind in ("yaml", "json"):
        return _read_yaml(kind, source, release)
    if kind == "dockerfile":
        return FilePart(kind, source, tuple(dockerfile_subjects(source))), copied_files(source)
    if kind == "document":
        return FilePart(kind, source), blocks_of(source)
    readers: dict[Kind, Callable[[Text], Iterable[Subject]]] = {
        "unit": supervisord_subjects if is_supervisord(source.text) else unit_subjects,
        "env": env_file_server,
        "python": python_subjects,
    }
    inner = _embedded_here_documents(source) if kind == "text" else ()  # user_data of Terraform
    return FilePart(kind, source, tuple(readers[kind](source)) if kind in readers else ()), inner


def _read_yaml(kind: Kind, source: Text, release: Release) -> tuple[FilePart, list[tuple[Kind, Text]]]:
    """(a YAML or JSON file as a part, the files embedded in it); LegroomError where it is neither."""
    if kind == "json":
        try:
            json.loads(source.text)
        except (ValueError, RecursionError) as error:
            line = f" at line {source.place(error.pos).line}" if isinstance(error, json.JSONDecodeError) else ""
            raise LegroomError(f"is not valid JSON{line}", "check its commas and quotes") from None
        if "vllm" not in source.text.lower() or '"panels"' in source.text:
            return FilePart(kind, source), []
        source = source.with_text(source.text.replace("\t", " "))  # YAML allows no tabs
    documents, template = _yaml_documents(source)
    for node in (node for document in documents if template for node in document.walk()):
        node.repeated_keys.clear()  # both sides of an `if` stay
    values = [one.source.values for one in documents[:1] if isinstance(one.source, RenderedText)]
    subjects: list[Subject] = []
    inner: list[tuple[Kind, Text]] = []
    config_maps = {map_.text("metadata", "name"): map_ for map_ in documents if map_.text("kind") == "ConfigMap"}
    for document in documents:
        what = document_kind(document)
        subjects += _document_subjects(what, document, release, config_maps)
        inner += embedded_files(document, scripts=what != "other")
    if values:
        subjects = list(change_servers(subjects, lambda server: _with_left_out(server, source, documents[0].source)))
    unread = Unread(source.place(0), template.message, template.hint) if template else None
    documents = (*documents, *values)
    return FilePart(kind, source, tuple(subjects), documents, unread=unread, is_template=template is not None), inner


def _with_left_out(server: StartedServer, template: Text, rendered: Text) -> StartedServer:
    """The server with `left_out`: flags in its chart template that are missing in the text rendered from it."""
    flags = re.finditer(r"(?<![\w-])--[a-z][\w-]+", template.text)
    words = (Word(flag[0], flag.start(), flag[0], template.place(flag.start())) for flag in flags)
    return replace(server, left_out=tuple(word for word in words if word.text not in rendered.text))


def _yaml_documents(source: Text) -> tuple[tuple[Node, ...], LegroomError | None]:
    """(the documents of a YAML text, the error of a template whose values are not all known, or None)."""
    rendered = render_chart_template(source) if is_template(source.text) else None
    if rendered is not None:
        try:
            documents = tuple(load_nodes(rendered))
        except LegroomError:
            documents = ()
        if documents:
            return documents, None if rendered.is_complete else LegroomError("partly", TEMPLATE_HINT)
    try:
        return tuple(load_nodes(source)), None
    except LegroomError as error:
        if not is_template(source.text):
            raise
        try:
            documents = tuple(load_nodes(source.with_text(template_as_yaml(source.text))))
        except LegroomError:
            raise error from None
        return documents, error


def _document_subjects(
    kind: DocumentKind, document: Node, release: Release, config_maps: Mapping[str, Node]
) -> Iterable[Subject]:
    """The servers and commands of a YAML document; none for rules. `config_maps`: the file's ConfigMaps by name."""
    if kind == "compose":
        return compose_subjects(document)
    if kind == "kubernetes":
        subjects: list[Subject] = [*model_resource_servers(document)]
        subjects = subjects or list(kubernetes_subjects(document, config_maps))
        is_read = any(isinstance(each, StartedServer) for each in subjects)
        return subjects if is_read else [*subjects, *custom_resource_servers(document, release)]
    if kind == "config":
        return [config_server(document, release)]
    return other_subjects(document, release) if kind == "other" else ()


def _embedded_here_documents(script: Text) -> Iterator[tuple[Kind, Text]]:
    """(kind, text) of the script's here-documents whose kind is clear by command, file name or first line."""
    for document in here_documents(script.text):
        first, last = script.row_of(document.start), script.row_of(document.end)
        part = script.dedented_rows(first, last + 1)
        if not document.is_quoted:
            # The shell removes one backslash; a space in its place keeps the columns.
            part = part.with_text(_ESCAPED.sub(r" \1", part.text))
        kind = _here_document_kind(document, part.text)
        if kind is not None:
            yield kind, part


def _here_document_kind(document: HereDocument, text: str) -> Kind | None:
    """The kind of a here-document by the file it is written to or the program that reads it; None where unknown."""
    words = [word.text for word in document.words]
    names = [basename(word) for word in words]
    target = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in (">", ">>", "tee")), "")
    if target:
        kind = kind_of(target, text)
        if kind == "document":  # a temporary file (`$(mktemp)`)
            return "shell" if target.startswith("$") and START.match(text) else None
        return kind
    if any(name in _SCRIPT_RUNNERS for name in names):
        return "shell"
    return "python" if any(re.fullmatch(r"python[\d.]*", name) for name in names) else kind_by_first_line(text)
