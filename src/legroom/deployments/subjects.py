"""The servers, commands and units that are read from a file, with their time limits, probes, volumes and ports."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal

from legroom.deployments.file_kinds import Kind
from legroom.deployments.mounts_and_ports import Mount, PublishedPort
from legroom.deployments.server_words import visible_gpus
from legroom.deployments.shell.lexer import Word
from legroom.deployments.source_text import Place, Text, Unread
from legroom.deployments.yaml_nodes import Node
from legroom.records import dataclass, field

Runs = Literal["shell", "docker", "compose", "kubernetes", "systemd", "config", "python"]
"""How a server is started; `python`: an engine inside the program itself, without a command line."""
_OTHER_DEVICES = frozenset({"cpu", "hpu", "neuron", "npu", "openvino", "tpu", "xpu"})
"""Values of --device (until 0.10.0) and VLLM_TARGET_DEVICE for other hardware than GPUs."""


@dataclass(frozen=True)
class EngineCall:
    """`LLM(...)` or engine arguments in Python source."""

    name: str
    values: Mapping[str, Any]
    """The arguments that are literals, by name."""
    unread: tuple[str, ...] = ()
    """The names of those that are not."""


@dataclass(frozen=True)
class TimeLimit:
    seconds: float
    place: Place


@dataclass(frozen=True)
class Probe:
    """A check of a container's health."""

    kind: Literal["startup", "readiness", "liveness", "health", "none"]
    """`none`: a container that has ports and no probe."""
    place: Place
    port: str = ""
    """The port of the server that it asks; empty where it may ask another container."""
    program: str = ""
    """The program that it runs inside the container."""
    path: str = ""
    """What it asks for by HTTP, where an answer of 404 fails it."""
    sends_key: bool = False
    """Whether it sends a header, which may be the server's key."""


@dataclass(frozen=True)
class StartedServer:
    """One vLLM server that a file starts."""

    runs: Runs
    words: tuple[Word, ...]
    """`vllm serve` and its arguments; empty where only the environment is known."""
    env: Mapping[str, Word]
    locate: Callable[[int], Place]
    place: Place
    image: str = ""
    in_container: bool = False
    shm: str | None = None
    """The size of /dev/shm, `host`, `mounted`, or None where the file does not set it."""
    gpus: int | None = None
    """The number of GPUs that the file requests."""
    gpu_ids: tuple[int, ...] = ()
    """The GPUs of the machine that it may use, in its own order, where the file tells."""
    mounts: tuple[Mount, ...] | None = None
    """The volumes of its container; None where the file does not tell."""
    has_read_only_root: bool = False
    """Whether its container can write to volumes alone."""
    published: tuple[PublishedPort, ...] = ()
    declared_ports: tuple[PublishedPort, ...] = ()
    """The containerPorts of a pod's only container."""
    other_env: frozenset[str] = frozenset()
    """Variables whose values stand elsewhere; `*` where a file or a Secret may set any."""
    has_no_gpu: bool = False
    """Whether its container requests resources, and no GPU among them."""
    repeated_entry: Word | None = None
    """The program that is given as an argument to an image that runs `vllm serve` itself."""
    is_exec_form: bool = False
    """Whether no shell expands the variables in its command."""
    probes: tuple[Probe, ...] = ()
    not_exported: Mapping[str, Word] = field(default_factory=dict)
    """Variables that its script sets without `export`, and does not use itself."""
    profiles: tuple[str, ...] = ()
    """The Compose profiles that start it; empty: it always starts."""
    other_device: str = ""
    """A resource of other hardware that the file requests: `google.com/tpu`."""
    gpu_names: tuple[str, ...] = ()
    """The GPU models that it may be scheduled on, where the file names any."""
    memory_limit_bytes: int | None = None
    """The limit of host memory."""
    start_limit: TimeLimit | None = None
    """The time after which a start is considered failed; None where there is no limit."""
    read_as: str = "a command line"
    installed: str = ""
    """The release that the same file installs, where no image names one."""
    is_release_assumed: bool = False
    """Whether another release than the named one may run."""
    call: EngineCall | None = None
    """The Python call that starts it."""
    launcher: str = ""
    """Another program that starts the engine inside itself, such as Dynamo."""
    left_out: tuple[Word, ...] = ()
    """Flags that its template gives for other values."""
    remarks: tuple[str, ...] = ()
    """Sentences about settings that the resource's controller does not pass on to vLLM."""

    def place_of(self, word: Word) -> Place:
        """The word's place in the file: the one it carries, else that of its offset."""
        return word.place or self.locate(word.offset)

    def may_have_variable(self, *names: str) -> bool:
        """Whether one of these variables is set, or may be set by an env file or a Secret that is not read."""
        return bool(names) and ("*" in self.other_env or not {*self.env, *self.other_env}.isdisjoint(names))

    @property
    def gpu_count(self) -> int | None:
        """The GPUs that the file requests, else that its environment leaves visible; None where neither tells."""
        if self.gpus is not None:
            return self.gpus
        return visible_gpus({name: word.text for name, word in self.env.items()})

    @property
    def runs_on_gpus(self) -> bool:
        """Whether neither its image nor a setting names other hardware than NVIDIA's or AMD's GPUs."""
        if self.other_device:
            return False
        from legroom.deployments.container_images import is_for_other_hardware  # not for a plain command line

        return not self._devices & _OTHER_DEVICES and not is_for_other_hardware(self.image)

    @property
    def refused_device(self) -> str:
        """The other hardware that --device names although the image is vLLM's for CUDA, which refuses it; or empty."""
        from legroom.deployments.container_images import is_for_other_hardware, is_published_by_vllm

        is_given = any(word.text.partition("=")[0] == "--device" for word in self.words) and not self.other_device
        is_for_cuda = is_given and is_published_by_vllm(self.image) and not is_for_other_hardware(self.image)
        return next(iter(self._devices & _OTHER_DEVICES), "") if is_for_cuda else ""

    @property
    def _devices(self) -> set[str]:
        """The values of --device and VLLM_TARGET_DEVICE, such as `cpu` or `tpu`."""
        words = [word.text for word in self.words]
        devices = {value for flag, value in pairwise(words) if flag == "--device"}
        devices |= {word.removeprefix("--device=") for word in words if word.startswith("--device=")}
        target = self.env.get("VLLM_TARGET_DEVICE")
        return devices | ({target.text} if target is not None else set())

    @property
    def device_words(self) -> str:
        """The resource, the image and the devices that may name its hardware, as one text."""
        return " ".join((self.other_device, self.image, *self._devices))

    @property
    def named_release(self) -> str | None:
        """The vLLM release that its image or its file names; None where neither does."""
        if not self.image:
            return self.installed or None
        from legroom.deployments.container_images import image_release  # not for a plain command line

        return image_release(self.image) or self.installed or None


@dataclass(frozen=True)
class InvokedCommand:
    """A simple command of a script, a unit or a container."""

    words: tuple[Word, ...]
    line: str
    locate: Callable[[int], Place]
    is_cut_off: bool = False
    """Whether it begins with an option right after a server, to which a line break did not let it belong."""
    image: str = ""
    """The image in which a Dockerfile runs it, where nothing adds programs to it."""

    def texts(self) -> tuple[str, ...]:
        return tuple(word.text for word in self.words)

    def values_of(self, *options: str) -> Iterator[Word]:
        """For each occurrence of one of these options, the word after it."""
        return (word for before, word in pairwise(self.words) if before.text in options)


@dataclass(frozen=True)
class Unit:
    settings: Mapping[str, Word]
    locate: Callable[[int], Place]
    variables: Mapping[str, Word] = field(default_factory=dict)


Subject = StartedServer | InvokedCommand | Unit


def change_servers(subjects: Iterable[Subject], change: Callable[[StartedServer], StartedServer]) -> Iterator[Subject]:
    """The subjects with `change` applied to every server; commands stay as they are."""
    for subject in subjects:
        yield change(subject) if isinstance(subject, StartedServer) else subject


@dataclass(frozen=True)
class FilePart:
    """A file or a text inside of it, with its subjects."""

    kind: Kind
    source: Text
    subjects: tuple[Subject, ...] = ()
    documents: tuple[Node, ...] = ()
    """The documents of YAML and JSON."""
    is_whole: bool = True
    """Whether it is the whole file."""
    unread: Unread | None = None
    """Why it was not read, or not to its end."""
    is_template: bool = False
    """Whether it is a template of YAML, which was read without its values."""

    @property
    def servers(self) -> tuple[StartedServer, ...]:
        """The servers found whose command is known."""
        return tuple(subject for subject in self.subjects if isinstance(subject, StartedServer) and subject.words)
