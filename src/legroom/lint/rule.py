"""What a rule is, the context it is checked in, and the findings it yields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from legroom.deployments import container_images as images
from legroom.deployments.shell.lexer import Word
from legroom.deployments.source_text import Place
from legroom.facts import pattern, read_data
from legroom.facts.flags import flag_history, flags_ever
from legroom.facts.metrics import all_exposed_names, exposed_names
from legroom.facts.releases import Release, known_releases, latest, newest_on
from legroom.facts.releases import nearest_release as known_release
from legroom.records import dataclass, field
from legroom.vllm.args import ServeArgs, served_port
from legroom.vllm.command_line import plain_name
from legroom.vllm.parse import ParsedArgs, parse_flags

if TYPE_CHECKING:
    from legroom.deployments.subjects import StartedServer
    from legroom.deployments.yaml_nodes import Node
    from legroom.planning.plan_document import PlanDocument

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Most severe first: an error does not work, a warning does harm or has no effect, a note is information."""


@dataclass(frozen=True, slots=True)
class Rule:
    id: str
    severity: Severity
    title: str
    help: str
    """Why it matters, in one or two sentences."""
    problems: tuple[str, ...] = ()
    """The kinds of `FlagProblem` that it is about."""


@dataclass(frozen=True, slots=True)
class LintFinding:
    place: Place
    rule: str
    severity: Severity
    message: str
    suggestion: str = ""
    length: int = 0
    """Characters of the line it is about; 0: not known."""

    @property
    def sort_key(self) -> tuple[int, int, int, str]:
        """Line, severity, column and rule id, by which findings are sorted."""
        return self.place.line, SEVERITIES.index(self.severity), self.place.column, self.rule


Findings = Iterator[LintFinding]


@dataclass(frozen=True)
class NamedCard:
    """A GPU that files name outside of any server."""

    name: str
    place: Place


@dataclass(frozen=True)
class Context:
    """What a check knows besides its subject."""

    requested_release: Release | None = None
    """None: what an image names, else the plan's, else the newest known."""
    plan: PlanDocument | None = None
    records: Mapping[str, str] = field(default_factory=dict)
    """Series that the linted rule files record, each with its expression."""
    any_release: bool = False
    """Whether a series of any release is valid."""
    declared: frozenset[str] = frozenset()
    """Series that Python programs among the linted files expose themselves."""
    has_exporter_series: bool = False
    """Whether the file also queries `vllm_` series that vLLM has under no spelling: some exporter exposes them, and may
    expose those that resemble vLLM's as well."""
    used_variables: frozenset[str] = frozenset()
    """Variables that the linted files read themselves: `$VLLM_PORT` is its author's own."""
    configures_mig: bool = False
    """Whether the file switches MIG on or off."""
    platform_signs: frozenset[str] = frozenset()
    """`openshift`, which gives every pod a user, `kustomize`, `own-port`, which no Service called `vllm` sets,
    `own-port-here` in the file's folder, `gpu-slices` and `cpu-build`."""
    entry_scripts: frozenset[str] = frozenset()
    """Scripts that a linted file starts a container with."""
    uses_ray: bool = False
    """Whether a linted file names Ray or a LeaderWorkerSet."""
    servers: tuple[StartedServer, ...] = ()
    """The servers that the same part of the file starts."""
    documents: tuple[Node, ...] = ()
    """The manifests of the same part."""
    manifests: tuple[Node, ...] = ()
    """The manifests of all linted files."""
    fleet: tuple[StartedServer, ...] = ()
    """The servers of all linted files."""
    named_cards: tuple[NamedCard, ...] = ()
    pinned_releases: frozenset[Release] = frozenset()
    """The releases that lines of the linted files install or run, also where no server was read."""
    mentioned_releases: frozenset[Release] = frozenset()
    """The releases that any line of the linted files names."""
    names_api_key: bool = False
    """Whether the file names a key of the API anywhere."""

    @property
    def named_releases(self) -> frozenset[Release]:
        """The releases that any of the linted files names; none where --vllm or the plan gives one for all."""
        named = {server.named_release for server in self.fleet} - {None}
        own = frozenset(known_release(each) for each in named if each) | self.pinned_releases
        return frozenset() if self.is_release_given else own

    @property
    def release(self) -> Release:
        """The vLLM release by which servers and queries that name no release are judged."""
        return self.requested_release or (self.plan.release if self.plan else latest())

    @property
    def release_of_series(self) -> Release:
        """The release by which queries are judged: the newest that the linted files name, else `release`."""
        return max(self.named_releases, key=lambda release: release.index, default=self.release)

    @property
    def series(self) -> frozenset[str]:
        """The names of vLLM's series: with `any_release` those of all releases, else of the one that judges queries."""
        return all_exposed_names() if self.any_release else exposed_names(self.release_of_series)

    def has_series_with_prefix(self, prefix: str) -> bool:
        """Whether one of the series in `series` has a name that begins with this prefix."""
        return any(series.startswith(prefix) for series in self.series)

    def release_of(self, server: StartedServer) -> Release:
        """The release that a server runs: the requested one, else that of its files or image's day, else `release`."""
        named = server.named_release if self.requested_release is None else None
        if named is None and not self.is_release_given and server.image:
            named = newest_on(day) if (day := images.latest_build_day(server.image)) else None
        return known_release(named) if named else self.release

    @property
    def is_release_given(self) -> bool:
        """Whether `--vllm` or the plan names the release of all servers; otherwise each server's own is looked for."""
        return self.requested_release is not None or self.plan is not None

    def is_release_certain(self, server: StartedServer) -> bool:
        """Whether the server's release is given by an option, pinned exactly, or of vLLM's own moving tag."""
        if self.is_release_given:
            return True
        if server.is_release_assumed or _is_other_hardware(server) or images.is_other_build(server.image):
            return False
        if images.image_release(server.image) and not images.is_published_by_vllm(server.image):
            return False  # the number may be the image's own, or vLLM in it may be changed
        if server.named_release:
            return _FULL_VERSION.fullmatch(server.named_release) is not None
        return images.has_moving_tag(server.image) and not server.launcher

    def is_release_told(self, server: StartedServer) -> bool:
        """Whether an option, the file or the image names the server's release; otherwise the newest is assumed."""
        told = server.named_release or images.latest_build_day(server.image) or images.has_moving_tag(server.image)
        return self.is_release_given or bool(told)

    def runs_published_build(self, server: StartedServer) -> bool:
        """Whether the server runs vLLM's own build of a known release, so that all of its flags are known."""
        if self.is_release_given:
            return True
        if not server.named_release or server.launcher or known_release(server.named_release).note:
            return False
        return self.is_release_certain(server) and (not server.image or images.is_published_by_vllm(server.image))

    def runs_vllms_own(self, server: StartedServer) -> bool:
        """Whether an unchanged release of vLLM reads the command line: no fork, launcher, plugin or nightly build."""
        if server.launcher or server.is_release_assumed or _is_other_hardware(server) or not server.runs_on_gpus:
            return False
        if server.place.path.endswith(".py"):
            return False  # a program puts its command together
        is_changed = images.is_other_build(server.image) or "nightly" in server.image
        return not server.image or (images.is_published_by_vllm(server.image) and not is_changed)

    def is_always_refused(self, server: StartedServer, flag: str, kind: str) -> bool:
        """Whether each release that has `flag` reports a `FlagProblem` of this kind with it; True where none has it."""
        history = flag_history(flag)
        texts = tuple(word.text for word in server.words)
        releases = map(known_release, known_releases()) if history else ()
        spans = history.spans if history else ()
        having = (release for release in releases if any(release.within(first, last) for first, last in spans))
        problems = (_parse_server_args(texts, release).problems for release in having)
        return all(any((problem.flag, problem.kind) == (flag, kind) for problem in found) for found in problems)

    def may_run(self, server: StartedServer) -> frozenset[Release]:
        """The releases that a server with no named release may run: those that the linted files name, else none."""
        return frozenset() if self.is_release_told(server) else self.mentioned_releases

    def is_accepted_by_named(self, server: StartedServer, flag: str, kind: str) -> bool:
        """Whether a release that the server may run reads the flag without a FlagProblem of this kind."""
        texts = tuple(word.text for word in server.words)
        found = (_parse_server_args(texts, release).problems for release in self.may_run(server))
        return any(all((each.flag, each.kind) != (flag, kind) for each in problems) for problems in found)

    def has_unknown_release(self, server: StartedServer) -> bool:
        """Whether the server runs an unnamed release: a fork's image, a private tag, another launcher."""
        if self.is_release_given or server.named_release:
            return False
        return bool(server.launcher) or images.has_unnamed_release(server.image) or _is_other_hardware(server)

    def plan_of(self, server: StartedServer) -> PlanDocument | None:
        """The plan given with --plan; None without one, or where the server serves another model."""
        model = self.parsed_args(server).args.model
        last, words = model.rstrip("/").rpartition("/")[2].lower(), self.plan.command if self.plan else ()
        is_named = (
            not last or "$" in model or any(f"/{each}".lower().rstrip("/").endswith(f"/{last}") for each in words)
        )
        return self.plan if is_named else None

    def parsed_args(self, server: StartedServer) -> ParsedArgs:
        """The server's flags as its vLLM release parses them, with the problems found."""
        return _parse_server_args(tuple(word.text for word in server.words), self.release_of(server))


_FULL_VERSION = pattern("rule.full_version")
_COMMON_DEVICES = frozenset({"auto", "cuda", "cpu"})
"""Other values of --device (until 0.10.0) name a build of vLLM for other hardware, with its own releases."""


def _is_other_hardware(server: StartedServer) -> bool:
    """Whether --device has a value other than the usual ones, which are for GPUs."""
    word = flag_word(server, "--device")
    value = flag_value(server, word) if word is not None else ""
    return bool(value) and "$" not in value and value not in _COMMON_DEVICES


@lru_cache(maxsize=256)
def _parse_server_args(words: tuple[str, ...], release: Release) -> ParsedArgs:
    """The command line's words parsed for the release; results are cached."""
    return parse_flags(words, release)


def flag_word(server: StartedServer, *names: str) -> Word | None:
    """The last word of the command line that gives one of these flags, under its long or short name."""
    table = flags_ever()
    for word in reversed(server.words):
        name = plain_name(word.text)
        if name in names or (name in table and table[name].name in names):
            return word
    return None


def flag_place(server: StartedServer, *names: str) -> Place:
    """The place of the last of these flags in the command, or the command's own where none is given."""
    word = flag_word(server, *names)
    return server.place_of(word) if word else server.place


def flag_value(server: StartedServer, word: Word) -> str:
    """The value of a flag, after `=` or in the next word; empty where there is none."""
    following = server.words[server.words.index(word) + 1 :][:1]
    _, equals, value = word.text.partition("=")
    return value if equals else following[0].text if following else ""


def known_port(server: StartedServer, args: ServeArgs) -> str:
    """The port that the server listens on; empty where a template, a launcher or a program of its own decides it."""
    is_written = flag_word(server, "--port") is not None or len({word.offset for word in server.words[:2]}) == 2
    takes_port = len(server.words) < 3 or any(name.endswith("PORT") for name in server.env)
    is_told = is_written or not takes_port or images.is_published_by_vllm(server.image)
    is_told = is_told and bool(server.words) and not server.launcher
    return served_port(args) if is_told and not has_open_words(server, ("port",)) else ""


def runs_on_rocm(server: StartedServer) -> bool:
    """Whether its image or a variable names AMD's GPUs."""
    return "rocm" in server.image or any(name.startswith(("VLLM_ROCM_", "HIP_", "ROCR_")) for name in server.env)


def has_open_words(server: StartedServer, besides: Iterable[str] = ()) -> bool:
    """Whether a variable or template in the command may add flags, or is the value of a flag (dest) in `besides`."""
    table, fields = flags_ever(), frozenset(besides)
    for before, word in zip((None, *server.words), server.words, strict=False):
        is_model = before is not None and before.text == "serve" and "model" not in fields
        # A whole command may be filled in.
        is_model = is_model and word.text != "$@" and not word.text.startswith("__") and not _FLAGS.search(word.text)
        if is_model or not _OPEN.search(word.text):
            continue
        head = word if word.text.startswith("--") and "=" in word.text else before
        is_head = head is not None and head.text.startswith("-") and (head is word or "=" not in head.text)
        flag = table.get(plain_name(head.text)) if head is not None and is_head else None
        takes_value = flag is not None and flag.kind not in ("switch", "bool", "optbool", "maybe")
        if flag is None or not takes_value or flag.dest in fields:
            return True
    return False


_FLAGS = re.compile(r"(?i)args|flags|opt(?:ion)?s\b|cmd|command")
_OPEN = re.compile(r"\$|\{\{|\{%|<[\w -]+>|__\w+__")


def has_same_words(name: str, candidate: str, separator: str) -> bool:
    """Whether two names may differ by a typo alone: as many words, split at `separator`, short ones alike (`cpu`)."""
    words, candidate_words = name.split(separator), candidate.split(separator)
    return len(words) == len(candidate_words) and all(
        len(word) != len(right) or word == right or len(word) >= 5
        for word, right in zip(words, candidate_words, strict=True)
    )


def similarity(first: str, second: str) -> float:
    """How alike two strings are, from 0 to 1 (difflib's ratio)."""
    import difflib  # only where a name is wrong

    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()


@cache
def rules_by_id() -> dict[str, Rule]:
    """Every rule of `lint_rules.json`, by its id."""
    return {row["id"]: Rule(**row) for row in read_data("lint_rules.json")["rules"]}


def finding(
    rule_id: str, place: Place, message: str, suggestion: str = "", length: int = 0, *, is_certain: bool = True
) -> LintFinding:
    """A finding of the rule; severity `warning` if not `is_certain`; `length`: characters to mark from `place` on."""
    severity = rules_by_id()[rule_id].severity if is_certain else "warning"
    return LintFinding(place, rule_id, severity, message, suggestion, length)


@dataclass(frozen=True, slots=True)
class Check:
    subject_type: type[Any]
    rules: tuple[str, ...]
    """The ids of the rules whose findings it yields."""
    find: Callable[[Any, Context], Findings]


CHECKS: list[Check] = []
_Subject = TypeVar("_Subject")
_Find = Callable[[_Subject, Context], Findings]


def checks(subject_type: type[_Subject], *rules: str) -> Callable[[_Find[_Subject]], _Find[_Subject]]:
    """Decorator: adds a function, which yields findings of these rules in a subject of the type, to CHECKS."""

    def register(find: _Find[_Subject]) -> _Find[_Subject]:
        """Add the function to CHECKS; returns it as it is."""
        CHECKS.append(Check(subject_type, rules, find))
        return find

    return register
