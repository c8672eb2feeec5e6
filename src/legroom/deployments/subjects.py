"""What a file that starts servers holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from legroom.deployments.server_words import visible_gpus
from legroom.deployments.shell.scan import Word
from legroom.deployments.text import Place, Text, Unread
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.deployments.kinds import Kind
    from legroom.deployments.yaml_nodes import Node

Runs = Literal["shell", "docker", "compose", "kubernetes", "systemd", "config", "python"]
"""`python`: an engine inside the program itself, without a command line."""


_OTHER_DEVICES = frozenset({"cpu", "hpu", "neuron", "npu", "openvino", "tpu", "xpu"})
"""Of --device (until 0.10.0) and VLLM_TARGET_DEVICE."""


@dataclass(frozen=True)
class At:
    """A value and its place."""

    value: float
    place: Place


@dataclass(frozen=True)
class EngineCall:
    """`LLM(...)` or engine arguments in Python source."""

    name: str
    values: Mapping[str, Any]
    """The arguments that are literals."""
    unread: tuple[str, ...] = ()
    """The names of those that are not."""


@dataclass(frozen=True)
class StartedServer:
    """One vLLM server that a file starts."""

    runs: Runs
    words: tuple[Word, ...]
    """`vllm serve ...` and everything after it; none where only its environment is known."""
    env: Mapping[str, Word]
    locate: Callable[[int], Place]
    place: Place
    image: str = ""
    in_container: bool = False
    shm: str | None = None
    """What the file says about /dev/shm: a size, `host`, or None where it says nothing."""
    gpus: int | None = None
    """How many GPUs the file gives it."""
    gpu_names: tuple[str, ...] = ()
    """The GPUs that it may be put on, where the file names any; it runs on one kind of them."""
    memory_limit_bytes: int | None = None
    """How much of the host's memory the file lets it use."""
    start_limit: At | None = None
    """Seconds after which the file calls a start dead; None where nothing limits it or it is not known."""
    stop_limit: At | None = None
    """Seconds between the request to stop and the kill."""
    read_as: str = "a command line"
    installed: str = ""
    """The release that the same file installs, where no image names one."""
    is_release_assumed: bool = False
    """Whether the release that is named is only likely to be the one that runs."""
    call: EngineCall | None = None
    """How Python source starts it."""
    launcher: str = ""
    """The program that starts the engine inside itself, where that is not vLLM."""
    remarks: tuple[str, ...] = ()
    """Settings of its resource that its controller does not pass on to vLLM, a sentence each."""

    def place_of(self, word: Word) -> Place:
        """Where one of its words or variables stands."""
        return word.place or self.locate(word.offset)

    @property
    def gpu_count(self) -> int | None:
        """The GPUs that the file gives it, or that its environment leaves visible."""
        if self.gpus is not None:
            return self.gpus
        return visible_gpus({name: word.text for name, word in self.env.items()})

    @property
    def runs_on_gpus(self) -> bool:
        """Whether neither its image nor a setting names other hardware than NVIDIA's or AMD's GPUs."""
        from legroom.deployments.containers import is_for_other_hardware  # not for a plain command line

        words = [word.text for word in self.words]
        devices = {value for flag, value in pairwise(words) if flag == "--device"}
        devices |= {word.removeprefix("--device=") for word in words if word.startswith("--device=")}
        target = self.env.get("VLLM_TARGET_DEVICE")
        devices |= {target.text} if target is not None else set()
        return not devices & _OTHER_DEVICES and not is_for_other_hardware(self.image)

    @property
    def named_release(self) -> str | None:
        """The release that its image or its file names."""
        if not self.image:
            return self.installed or None
        from legroom.deployments.containers import image_release  # not for a plain command line

        return image_release(self.image) or self.installed or None


@dataclass(frozen=True)
class Invoked:
    """Any simple command of a script, a unit or a container."""

    words: tuple[Word, ...]
    line: str
    locate: Callable[[int], Place]

    def texts(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.words)

    def values_of(self, *options: str) -> Iterator[Word]:
        """The words that follow an option."""
        return (word for before, word in pairwise(self.words) if before.text in options)


@dataclass(frozen=True)
class Unit:
    settings: Mapping[str, Word]
    locate: Callable[[int], Place]


Subject = StartedServer | Invoked | Unit
_Other = TypeVar("_Other", Invoked, Invoked | Unit)


def with_servers(
    subjects: Iterable[StartedServer | _Other], change: Callable[[StartedServer], StartedServer]
) -> Iterator[StartedServer | _Other]:
    """The same subjects, each server with what the file says around it."""
    for subject in subjects:
        yield change(subject) if isinstance(subject, StartedServer) else subject


@dataclass(frozen=True)
class FilePart:
    """A file, or a text of another kind inside of it, and what it starts."""

    kind: Kind
    source: Text
    subjects: tuple[Subject, ...] = ()
    documents: tuple[Node, ...] = ()
    """Of YAML and JSON."""
    is_whole: bool = True
    """Whether it is the file itself."""
    unread: Unread | None = None
    """Why it was not read, or from where on."""
    is_template: bool = False
    """Whether it is YAML only once values are put in: `unread` says so, and the rest was read without them."""

    @property
    def servers(self) -> tuple[StartedServer, ...]:
        return tuple(subject for subject in self.subjects if isinstance(subject, StartedServer) and subject.words)
