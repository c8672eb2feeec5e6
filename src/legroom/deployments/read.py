"""One file in, every server that it starts out: the one way in for whoever has a file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Literal

from legroom.deployments.compose import compose_subjects, is_compose
from legroom.deployments.containers import hides_release, image_release
from legroom.deployments.dockerfile import copied_files, dockerfile_subjects
from legroom.deployments.env_file import env_file_server
from legroom.deployments.installs import Installs, installs_in, pinned_anywhere
from legroom.deployments.kinds import Kind, kind_of, sniffed
from legroom.deployments.kubernetes import is_kubernetes, kubernetes_subjects
from legroom.deployments.markdown import START, blocks_of
from legroom.deployments.model_resources import model_resource
from legroom.deployments.other_yaml import embedded_files, other_subjects
from legroom.deployments.python import python_subjects
from legroom.deployments.server_words import basename
from legroom.deployments.shell.scan import HereDocument, here_documents
from legroom.deployments.shell.script import read_shell
from legroom.deployments.subjects import FilePart, StartedServer, Subject
from legroom.deployments.supervisord import is_supervisord, supervisord_subjects
from legroom.deployments.text import Text, Unread
from legroom.deployments.unit import unit_subjects
from legroom.deployments.vllm_config import config_server, is_config
from legroom.deployments.yaml_nodes import Node, is_template, load_nodes, without_actions
from legroom.errors import LegroomError
from legroom.facts.releases import Release

DocumentKind = Literal["rules", "compose", "kubernetes", "config", "other"]
"""What a YAML document is. Prometheus rules start nothing; what they are is for lint to read."""
_IMAGE = re.compile(r"(?<![\w./-])(?:[\w.-]+/)+[\w.-]*vllm[\w.-]*:[\w.-]+")
"""An image of vLLM that a document names anywhere."""
_SCRIPT_RUNNERS = ("bash", "sh", "zsh", "dash", "ash", "ssh", "sbatch")
_ESCAPED = re.compile(r"\\([\\$`])")
_DEEPEST = 5


def read_file(path: str, text: str, release: Release) -> Iterator[FilePart]:
    """A file and every text inside of it that could start a server, in order; what cannot be read is among them."""
    kind = kind_of(path, text)
    installs = installs_in(text)
    images = {image.rstrip(".") for image in _IMAGE.findall(text)} if kind == "document" else set()
    releases = {image_release(image) for image in images}
    # A document with several images, one of an unknown release, does not say which of them a command runs in.
    of_images = frozenset() if None in releases else frozenset(version for version in releases if version)
    hidden = next(iter(sorted(images)), "") if images and all(map(hides_release, images)) else ""
    is_hidden = bool(hidden) and not (installs.pinned or installs.quoted or of_images)
    for part in _parts(kind, Text(path, text), release):
        subjects = [_of_release(subject, installs, of_images, kind) for subject in part.subjects]
        if part.is_template:
            subjects = list(map(_unsure, subjects))
        yield replace(part, subjects=tuple(_of_image(each, hidden) if is_hidden else each for each in subjects))


def named_releases(text: str) -> frozenset[str]:
    """Every release of vLLM that a text pins, or that an image in it names."""
    images = filter(None, (image_release(image.rstrip(".")) for image in _IMAGE.findall(text)))
    return frozenset((*pinned_anywhere(text), *images))


def document_kind(document: Node) -> DocumentKind:
    if any(group.get("rules") is not None for group in rule_groups(document)):
        return "rules"
    if is_compose(document):
        return "compose"
    if is_kubernetes(document):
        return "kubernetes"
    return "config" if is_config(document) else "other"


def rule_groups(document: Node) -> list[Node]:
    """The groups of Prometheus rules, in a rule file or in the operator's PrometheusRule."""
    keys = ("spec", "groups") if document.text("kind") == "PrometheusRule" else ("groups",)
    groups = document.get(*keys)
    return groups.list() if groups is not None else []


def _of_release(subject: Subject, installs: Installs, of_images: frozenset[str], kind: Kind) -> Subject:
    """A server that no image tells the release of has the one that the file itself installs, or else names."""
    if not isinstance(subject, StartedServer):
        return subject
    if "vllm" in subject.image.lower():
        return _changed(subject, installs, kind) if kind not in ("document", "python") else subject
    named = installs.pinned | of_images or installs.quoted
    if len(named) != 1:
        return subject
    # What another command's image or a comment names is likely, what is installed is sure.
    is_sure = named == installs.pinned and not installs.is_open and (kind == "document" or not installs.asks_version)
    return replace(subject, installed=min(named), is_release_assumed=not is_sure)


def _unsure(subject: Subject) -> Subject:
    """A server in a template: what its values turn on and off is not known."""
    return replace(subject, is_release_assumed=True) if isinstance(subject, StartedServer) else subject


def _changed(server: StartedServer, installs: Installs, kind: Kind) -> StartedServer:
    """A server in an image of vLLM's, in a file that installs another vLLM: over it, most likely."""
    if not installs.is_any:
        return server
    if kind == "dockerfile" and len(installs.pinned) == 1 and not installs.is_open:
        return replace(server, image="", installed=min(installs.pinned), is_release_assumed=True)
    return replace(server, is_release_assumed=True)


def _of_image(subject: Subject, image: str) -> Subject:
    """A command in a document about one image runs in that image."""
    return replace(subject, image=image) if isinstance(subject, StartedServer) and not subject.image else subject


def _parts(kind: Kind, source: Text, release: Release, depth: int = 0) -> Iterator[FilePart]:
    try:
        part, inner = _read(kind, source, release)
    except LegroomError as error:
        part, inner = FilePart(kind, source, unread=Unread(source.place(0), error.message, error.hint)), ()
    yield replace(part, is_whole=depth == 0)
    if depth < _DEEPEST:
        for inner_kind, inner_source in inner:
            yield from _parts(inner_kind, inner_source, release, depth + 1)


def _read(kind: Kind, source: Text, release: Release) -> tuple[FilePart, Iterable[tuple[Kind, Text]]]:
    """One text, and the texts inside of it."""
    if kind == "shell":
        return read_shell(source), _here_documents_of(source)
    if kind in ("yaml", "json"):
        return _yaml(kind, source, release)
    if kind == "dockerfile":
        return FilePart(kind, source, tuple(dockerfile_subjects(source))), copied_files(source)
    if kind == "document":
        return FilePart(kind, source), blocks_of(source)
    readers: dict[Kind, Callable[[Text], Iterable[Subject]]] = {
        "unit": supervisord_subjects if is_supervisord(source.text) else unit_subjects,
        "env": env_file_server,
        "python": python_subjects,
    }
    return FilePart(kind, source, tuple(readers[kind](source)) if kind in readers else ()), ()


def _yaml(kind: Kind, source: Text, release: Release) -> tuple[FilePart, list[tuple[Kind, Text]]]:
    if kind == "json":
        _check_json(source)
        if "vllm" not in source.text.lower() or '"panels"' in source.text:
            return FilePart(kind, source), []
        source = source.with_text(source.text.replace("\t", " "))  # all that JSON allows and YAML does not
    documents, template = _documents(source)
    subjects: list[Subject] = []
    inner: list[tuple[Kind, Text]] = []
    for document in documents:
        what = document_kind(document)
        subjects += _document(what, document, release)
        inner += embedded_files(document, scripts=what != "other")
    unread = Unread(source.place(0), template.message, template.hint) if template else None
    return FilePart(kind, source, tuple(subjects), documents, unread=unread, is_template=template is not None), inner


def _documents(source: Text) -> tuple[tuple[Node, ...], LegroomError | None]:
    """The documents of a YAML text; with what to say where it is a template, and was read without its values."""
    try:
        return tuple(load_nodes(source)), None
    except LegroomError as error:
        if not is_template(source.text):
            raise
        try:
            return tuple(load_nodes(source.with_text(without_actions(source.text)))), error
        except LegroomError:
            raise error from None


def _check_json(source: Text) -> None:
    try:
        json.loads(source.text)
    except (ValueError, RecursionError) as error:
        line = f" at line {source.place(error.pos).line}" if isinstance(error, json.JSONDecodeError) else ""
        raise LegroomError(f"is not valid JSON{line}", "check its commas and quotes") from None


def _document(kind: DocumentKind, document: Node, release: Release) -> Iterable[Subject]:
    if kind == "compose":
        return compose_subjects(document)
    if kind == "kubernetes":
        return list(model_resource(document)) or kubernetes_subjects(document)
    if kind == "config":
        return [config_server(document, release)]
    return other_subjects(document, release) if kind == "other" else ()


def _here_documents_of(script: Text) -> Iterator[tuple[Kind, Text]]:
    """Here-documents whose kind is plain: from the command that reads it, its file's name, or its first line."""
    for document in here_documents(script.text):
        first, last = script.row_of(document.start), script.row_of(document.end)
        part = script.rows(first, last + 1)
        if not document.is_quoted:
            # The shell takes one backslash off; a space in its place keeps every column.
            part = part.with_text(_ESCAPED.sub(r" \1", part.text))
        kind = _here_document_kind(document, part.text)
        if kind is not None:
            yield kind, part


def _here_document_kind(document: HereDocument, text: str) -> Kind | None:
    words = [word.text for word in document.words]
    names = [basename(word) for word in words]
    target = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in (">", ">>", "tee")), "")
    if target:
        kind = kind_of(target, text)
        if kind == "document":  # a temporary file's name (`$(mktemp)`) says nothing, its first line may
            return "shell" if target.startswith("$") and START.match(text) else None
        return kind
    if any(name in _SCRIPT_RUNNERS for name in names):
        return "shell"
    if any(re.fullmatch(r"python[\d.]*", name) for name in names):
        return "python"
    return sniffed(text)
