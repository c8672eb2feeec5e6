"""One file in, everything in it that rules look at out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from legroom.deployments.compose import is_compose, read_compose
from legroom.deployments.dockerfile import copied_files, read_dockerfile
from legroom.deployments.env_file import read_env_file
from legroom.deployments.kinds import Kind, kind_of
from legroom.deployments.kubernetes import is_config, is_kubernetes, read_config, read_kubernetes
from legroom.deployments.markdown import parts_of
from legroom.deployments.other_yaml import embedded_files, queries, read_other
from legroom.deployments.python_names import read_python
from legroom.deployments.rule_files import is_rules, read_rules
from legroom.deployments.shell.here_document import embedded_parts
from legroom.deployments.shell.script import read_shell
from legroom.deployments.subjects import Expression, Found, Started, Subject
from legroom.deployments.supervisord import is_supervisord, read_supervisord
from legroom.deployments.text import Shifted, Text, Unread
from legroom.deployments.unit import read_unit
from legroom.deployments.yaml_nodes import Node, load_nodes
from legroom.errors import LegroomError
from legroom.facts.releases import Release
from legroom.lint.dashboard import read_dashboard
from legroom.lint.finding import Skipped

_SAMPLE = re.compile(r"^(vllm[:_][a-z][a-z0-9_:]*)(?:\{[^}\n]*\})?[ \t]+[-+0-9.eEINaf]+[ \t]*$", re.MULTILINE)
_MEANT = re.compile(r"^\s*- (alert|record):|\"panels\"\s*:|^\[Service\]", re.MULTILINE)
"""What a broken part of a file was meant to be."""
_PINNED = re.compile(r"\bvllm(?:\[[\w,-]+\])?==(\d+(?:\.\d+)+(?:\.?post\d+)?)")
"""`pip install vllm==0.6.3`."""


def read_file(path: str, text: str, release: Release) -> Iterator[Found | Unread | Skipped]:
    """Everything in a file, part by part; what cannot be read is among it."""
    pinned = set(_PINNED.findall(text))
    for item in _parts(path, text, release):
        if isinstance(item, Found) and len(pinned) == 1:
            yield replace(item, subjects=tuple(_of_release(subject, *pinned) for subject in item.subjects))
        else:
            yield item


def _of_release(subject: Subject, version: str) -> Subject:
    """A server that no image tells the release of has the one that the file itself installs."""
    if not isinstance(subject, Started) or "vllm" in subject.image.lower():
        return subject
    return replace(subject, image=f"vllm:{version}")


def _parts(path: str, text: str, release: Release) -> Iterator[Found | Unread | Skipped]:
    source = Text(path, text)
    kind = kind_of(path, text)
    if kind != "document":
        yield from _read(kind, source, release)
        return
    empty = True
    for part in parts_of(source):
        for found in _worth_saying(_read(part.kind, part.source, release), part.source):
            empty = empty and isinstance(found, Found) and not found.subjects
            yield found
    samples = tuple(Expression(found[1], Shifted(source, found.start(1)), "sample") for found in _SAMPLE.finditer(text))
    yield Found(samples)
    if empty and not samples:
        yield Skipped(path, "nothing in it is about vLLM: no rules, dashboard, script, unit or manifest was found")


def _read(kind: Kind, source: Text, release: Release) -> Iterator[Found | Unread | Skipped]:
    try:
        if kind == "yaml":
            yield from _yaml(source, release)
        elif kind == "json":
            yield from _json(source, release)
        elif kind == "shell":
            yield from _shell(source, release)
        elif kind == "dockerfile":
            yield read_dockerfile(source)
            for inner_kind, part in copied_files(source):
                yield from _worth_saying(_read(inner_kind, part, release), part)
        elif kind == "unit":
            yield read_supervisord(source) if is_supervisord(source.text) else read_unit(source)
        elif kind == "promql":
            yield Found((Expression(source.text, source.place, "panel"),))
        else:
            found = read_env_file(source) if kind == "env" else read_python(source)
            yield found
            if found.nothing:
                yield Skipped(source.path, found.nothing)
    except LegroomError as error:
        yield Unread(source.place(0), error.message, error.hint)


def _shell(source: Text, release: Release) -> Iterator[Found | Unread | Skipped]:
    """A script, and what its here-documents hold."""
    script = read_shell(source)
    yield script
    if script.cut:
        yield script.cut
    for kind, part in embedded_parts(source):
        yield from _worth_saying(_read(kind, part, release), part)


def _worth_saying(items: Iterable[Found | Unread | Skipped], part: Text) -> Iterator[Found | Unread | Skipped]:
    """What a part of a file holds; that it is broken only where it is plain what it was meant to be."""
    for item in items:
        if isinstance(item, Found) or (isinstance(item, Unread) and _MEANT.search(part.text)):
            yield item


def _json(source: Text, release: Release) -> Iterator[Found | Unread | Skipped]:
    found = read_dashboard(source)
    if found.nothing and "vllm" in source.text.lower():
        # JSON is YAML, but for the tabs that it may be indented with.
        inner = list(_yaml(source.with_text(source.text.replace("\t", " ")), release))
        if any(isinstance(item, Found) for item in inner):
            yield from inner
            return
    if found.nothing:
        yield Skipped(source.path, found.nothing)
        return
    yield found
    if not any("vllm" in subject.text for subject in found.subjects if isinstance(subject, Expression)):
        yield Skipped(source.path, "a dashboard without any vLLM metric")


def _yaml(source: Text, release: Release) -> Iterator[Found | Unread | Skipped]:
    read = False
    for document in load_nodes(source):
        is_known, found = _document(document, release)
        read = read or is_known or bool(found.subjects)
        yield found
        for kind, part in embedded_files(document, scripts=is_known):
            for item in _worth_saying(_read(kind, part, release), part):
                read = True
                yield item
    if not read:
        yield Skipped(source.path, "YAML, but nothing in it starts vLLM or asks for its series")


def _document(document: Node, release: Release) -> tuple[bool, Found]:
    """Whether it is of a kind that is known, and what it holds."""
    if is_rules(document):
        return True, read_rules(document)
    if is_compose(document):
        return True, read_compose(document)
    if is_kubernetes(document):
        found = read_kubernetes(document)
        return True, Found((*found.subjects, *queries(document)))
    if is_config(document):
        return True, read_config(document, release)
    return False, read_other(document, release)
