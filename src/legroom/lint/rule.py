"""What a rule is: what it looks for, what it may ask, and the findings it gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from legroom.facts.flags import flag_history
from legroom.facts.metrics import all_exposed_names, exposed_names
from legroom.facts.releases import Release, known_releases, latest, newest_on
from legroom.facts.releases import release as known_release
from legroom.records import dataclass, field
from legroom.vllm.command_line import plain_name
from legroom.vllm.parse import ParsedArgs, parse_flags

if TYPE_CHECKING:
    from legroom.deployments.shell.scan import Word
    from legroom.deployments.subjects import StartedServer
    from legroom.deployments.text import Place
    from legroom.planning.plan_document import PlanDocument

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The gravest first: an error does not do what it says, a warning does harm or nothing, a note is worth knowing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that lint looks for."""

    id: str
    severity: Severity
    title: str
    help: str
    """Why, in a sentence or two."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    place: Place
    rule: str
    severity: Severity
    message: str
    suggestion: str = ""
    length: int = 0
    """How many characters of the line it is about; 0: not known."""

    @property
    def where(self) -> tuple[int, int, str]:
        """What findings of one file are sorted by."""
        return self.place.line, self.place.column, self.rule


@dataclass(frozen=True)
class Context:
    """The frame of one run of lint."""

    asked: Release | None = None
    """The release that was asked for; None: what an image names, else the plan's, else the newest known."""
    plan: PlanDocument | None = None
    records: Mapping[str, str] = field(default_factory=dict)
    """Series that the linted rule files record, each with its expression."""
    any_release: bool = False
    """Whether a series of any release is right."""
    declared: frozenset[str] = frozenset()
    """Series that programs among the linted files show themselves."""
    is_of_exporter: bool = False
    """Whether the file also asks for `vllm_` series that vLLM has under no spelling: some exporter shows them, and may
    show those that resemble vLLM's as well."""

    is_about_mig: bool = False
    """Whether the file switches MIG on or off."""

    @property
    def release(self) -> Release:
        """Of what names no release itself."""
        return self.asked or (self.plan.release if self.plan else latest())

    @property
    def series(self) -> frozenset[str]:
        """Every series that may be asked for."""
        return all_exposed_names() if self.any_release else exposed_names(self.release)

    def begins_series(self, start: str) -> bool:
        return any(series.startswith(start) for series in self.series)

    def release_of(self, server: StartedServer) -> Release:
        """Of one server."""
        named = server.named_release if self.asked is None else None
        if named is None and not self.is_told_release and server.image:
            from legroom.deployments.containers import built_by  # not for a plain command line

            named = newest_on(day) if (day := built_by(server.image)) else None
        return known_release(named) if named else self.release

    @property
    def is_told_release(self) -> bool:
        """Whether somebody said for which release to judge; else the newest is only assumed."""
        return self.asked is not None or self.plan is not None

    def knows_release(self, server: StartedServer) -> bool:
        """Whether it is sure which release a server runs: one was asked for or pinned, or the tag is the newest's."""
        if self.is_told_release:
            return True
        from legroom.deployments.containers import (  # not for a plain command line
            follows_newest,
            image_release,
            is_other_build,
            is_published_by_vllm,
        )

        if server.is_release_assumed or _is_other_hardware(server) or is_other_build(server.image):
            return False
        if image_release(server.image) and not is_published_by_vllm(server.image):
            return False  # the number may be the image's own, or what is in it may be changed
        if server.named_release:
            return _WHOLE_NUMBER.fullmatch(server.named_release) is not None
        return follows_newest(server.image) and not server.launcher

    def runs_known_build(self, server: StartedServer) -> bool:
        """Whether every flag that a server takes is on record: vLLM's own build of a release that legroom knows."""
        if self.is_told_release:
            return True
        from legroom.deployments.containers import is_published_by_vllm  # not for a plain command line

        if not server.named_release or server.launcher or known_release(server.named_release).note:
            return False
        return self.knows_release(server) and (not server.image or is_published_by_vllm(server.image))

    def is_refused_by_all(self, server: StartedServer, flag: str, kind: str) -> bool:
        """Whether every release that has a flag sees the same problem with it."""
        history = flag_history(flag)
        texts = tuple(word.text for word in server.words)
        releases = map(known_release, known_releases()) if history else ()
        return all(
            any(problem.flag == flag and problem.kind == kind for problem in _parsed(texts, release).problems)
            for release in releases
            if history and any(not release.before(first) and not release.after(last) for first, last in history.spans)
        )

    def hides_release(self, server: StartedServer) -> bool:
        """Whether it runs a release that nobody names: a fork's image, a tag of somebody's own, another launcher."""
        if self.is_told_release or server.named_release:
            return False
        from legroom.deployments.containers import hides_release  # not for a plain command line

        return bool(server.launcher) or hides_release(server.image) or _is_other_hardware(server)

    def plan_of(self, server: StartedServer) -> PlanDocument | None:
        """The plan, unless the server serves another model than the planned one."""
        model = self.parsed(server).args.model
        return self.plan if self.plan and (not model or _names(model, self.plan.command)) else None

    def parsed(self, server: StartedServer) -> ParsedArgs:
        """Its flags as its release reads them."""
        return _parsed(tuple(word.text for word in server.words), self.release_of(server))


_WHOLE_NUMBER = re.compile(r"\d+\.\d+\.\d+(\.?post\d+)?")
"""`0.9` may be any of its patch releases, and a candidate has some of the flags of what it is a candidate for."""
_COMMON_DEVICES = frozenset({"auto", "cuda", "cpu"})
"""Other values of --device (until 0.10.0) name a build of vLLM for other hardware, with releases of its own."""


def _is_other_hardware(server: StartedServer) -> bool:
    word = flag_word(server, "--device")
    if word is None:
        return False
    _, equals, value = word.text.partition("=")
    following = server.words[server.words.index(word) + 1 :][:1]
    device = value if equals else following[0].text if following else "auto"
    return device not in _COMMON_DEVICES


def _names(model: str, command: tuple[str, ...]) -> bool:
    last = model.rstrip("/").rpartition("/")[2].lower()
    return "$" in model or any(word.rstrip("/").rpartition("/")[2].lower() == last for word in command)


@lru_cache(maxsize=256)
def _parsed(words: tuple[str, ...], release: Release) -> ParsedArgs:
    return parse_flags(words, release)


def flag_word(server: StartedServer, *names: str) -> Word | None:
    """The last word that gives one of some flags, however it is written."""
    given = None
    for word in server.words:
        if plain_name(word.text) in names:
            given = word
    return given


_LONG_WORD = 5
"""In a shorter word one other letter makes another word: `cpu` and `npu`, `reqs` and `seqs`."""


def has_same_words(name: str, meant: str, separator: str) -> bool:
    """Whether two names have the same words but for a slip of the pen."""
    words, meant_words = name.split(separator), meant.split(separator)
    return len(words) == len(meant_words) and all(
        len(word) != len(right) or word == right or len(word) >= _LONG_WORD
        for word, right in zip(words, meant_words, strict=True)
    )


def finding(
    rule: Rule, place: Place, message: str, suggestion: str = "", length: int = 0, severity: Severity | None = None
) -> LintFinding:
    """What a rule says of a place; with a severity of its own where it is surer or less sure than usual."""
    return LintFinding(place, rule.id, severity or rule.severity, message, suggestion, length)
