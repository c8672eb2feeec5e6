"""`docker run` lines, and what the name of an image says about its vLLM."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from legroom.deployments.mounts_and_ports import Mount, mount_of
from legroom.deployments.server_words import ASSIGNMENT, basename
from legroom.deployments.shell.lexer import Word, serve_words
from legroom.errors import LegroomError
from legroom.facts import pattern, read_data
from legroom.facts.flags import flag_name, flags_of
from legroom.facts.releases import known_releases, latest
from legroom.records import dataclass
from legroom.units import parse_bytes

_SWITCHES = frozenset(read_data("file_formats.json")["container_switches"])
_SHORT_SWITCHES = "ditqP"
_TAG_VERSION = re.compile(r"(?<![\d.])v?(0\.\d{1,3}(?:\.\d{1,3}){0,2}(?:\.?post\d+)?(?:rc\d+)?)(?![\d])")
_NAMED_VERSION, _COMPANION = pattern("container_images.named_version"), pattern("container_images.companion")
_PROJECT = "vllm-project/"  # An organization with many images besides vLLM's.
_OWN_VERSIONS = pattern("container_images.own_versions")
_PROGRAMS = ("vllm", "python", "python3", "bash", "sh", "env", "uv")
_VLLM_FLAGS = ("--max-model-len", "--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens")
"""Flags that identify an image with another name as a vLLM server."""


@dataclass(frozen=True)
class ContainerRun:
    """The options of `docker run`."""

    image: str
    words: tuple[Word, ...]
    """The command, including the entry point of a vLLM image."""
    env: Mapping[str, Word]
    inherited: tuple[str, ...]
    """Variables that `-e NAME` takes from the environment."""
    published: tuple[Word, ...]
    reads_env_file: bool
    of_server: Mapping[str, Any]
    """The fields of `StartedServer` that the options tell."""


def container_run(words: tuple[Word, ...]) -> ContainerRun | None:
    """The parsed `docker run [options] image [arguments]`; None where there is no image."""
    env: dict[str, Word] = {}
    inherited: list[str] = []
    options: dict[str, Word] = {}
    mounts: list[Mount] = []
    published: list[Word] = []
    i = 3 if words[1].text == "container" else 2
    while i < len(words) and words[i].text.startswith("-"):
        name, value, i = _parse_option(words, i)
        if value is None:
            continue
        mounts += [mount_of(value.text)] if name in ("-v", "--volume", "--mount") else []
        mounts += [mount_of(value.text.partition(":")[0])] if name == "--tmpfs" else []  # its options follow
        published += [value] if name in ("-p", "--publish") else []
        if name not in ("-e", "--env"):
            options[name] = value
        elif pair := ASSIGNMENT.fullmatch(value.text):
            env[pair[1]] = value.with_text(pair[2])
        else:
            inherited.append(value.text)
    if i >= len(words):
        return None
    image, entry = words[i], options.get("--entrypoint")
    ipc, shm, gpus = options.get("--ipc"), options.get("--shm-size"), options.get("--gpus")
    mounts_shm = any("/dev/shm" in mount.path for mount in mounts)
    memory, entries = options.get("--memory") or options.get("-m"), (entry,) if entry else ()
    of_server = {
        "image": image.text,
        "gpus": gpu_count(gpus.text) if gpus else None,
        "has_no_gpu": options.keys().isdisjoint(_GIVES_GPUS) and all(word.text != "--privileged" for word in words[:i]),
        "shm": shm.text if shm else "host" if ipc and ipc.text == "host" else "mounted" if mounts_shm else None,
        "memory_limit_bytes": docker_bytes(memory.text) if memory else None,
        "repeated_entry": repeated_entry(image.text, entries, words[i + 1 :]),
        "mounts": tuple(mounts) if published else None,  # else it may be an excerpt
    }
    command = container_command(image.text, entries, words[i + 1 :], words[0].offset)
    reads_file = "--env-file" in options
    return ContainerRun(image.text, command, env, tuple(inherited), tuple(published), reads_file, of_server)


_GIVES_GPUS = ("--gpus", "--runtime", "--device", "--security-opt", "--volumes-from")


def kubernetes_bytes(text: str) -> int | None:
    """Bytes of a Kubernetes quantity like `16Gi` or `16G`; None for other texts, such as templates."""
    try:
        return parse_bytes(text)
    except LegroomError:
        return None


def docker_bytes(text: str) -> int | None:
    """Bytes of a Docker or Compose size; `16g` is a power of 1024. None for other texts."""
    word = text.strip().lower().removesuffix("b").removesuffix("i")
    return kubernetes_bytes(f"{word}i" if word[-1:] in ("k", "m", "g", "t") else word)


def _parse_option(words: tuple[Word, ...], i: int) -> tuple[str, Word | None, int]:
    """(name, value or None, index of the next word) of the option at `i`: `--a b`, `--a=b`, `-e A=1`, `-itp 1`."""
    word = words[i]
    following = words[i + 1] if i + 1 < len(words) else None
    if word.text.startswith("--"):
        name, equals, value = word.text.partition("=")
        if equals or name in _SWITCHES:
            return name, word.with_text(value) if equals else None, i + 1
        return name, following, i + 2
    for at, letter in enumerate(word.text[1:], 1):
        if letter not in _SHORT_SWITCHES:
            attached = word.text[at + 1 :].removeprefix("=")
            return f"-{letter}", word.with_text(attached) if attached else following, i + 1 + (not attached)
    return word.text, None, i + 1


def container_command(image: str, entry: tuple[Word, ...], args: tuple[Word, ...], offset: int) -> tuple[Word, ...]:
    """A container's whole command: `entry` and `args`; without an `entry`, `vllm serve` and `args` if that is what the
    image starts, else `args`. `offset`: the place in the file that the added words get."""
    if entry:
        return (*entry, *args)
    arguments = args[1:] if args and args[0].text == "serve" else args
    first = arguments[0].text if arguments else "-"
    is_program = basename(first) in _PROGRAMS or " " in first or first.endswith((".sh", ".py"))
    names_program = first == "-m" or (not first.startswith("-") and is_program)
    can_be_model = re.match(r"[-/.~$]|.*[/\d]", first, re.DOTALL)  # `bench` or `ls` is another program
    # An image with another name is a server where its arguments begin with a flag and have one of vLLM's own.
    may_serve = bool(args) and args[0].text.startswith("--") and bool(image) and not _is_companion(image)
    is_server = is_server_image(image) or (may_serve and not flag_names(args).isdisjoint(_VLLM_FLAGS))
    if names_program or not can_be_model or not is_server:
        return args
    names = flag_names(arguments)
    if not is_published_by_vllm(image) and names and names.isdisjoint(flags_of(latest())):
        return args  # the flags of another program
    return (*serve_words(offset), *arguments)


def repeated_entry(image: str, entry: tuple[Word, ...], args: tuple[Word, ...]) -> Word | None:
    """The argument that names a program again although vLLM's own image starts `vllm serve` itself; else None."""
    name = image.rpartition("/")[2].partition(":")[0]
    is_served = is_published_by_vllm(image) and name.startswith("vllm-openai")
    is_program = bool(args) and (args[0].text == "serve" or basename(args[0].text) in _PROGRAMS)
    return args[0] if is_served and is_program and not entry else None


def flag_names(words: Iterable[Word]) -> set[str]:
    """The names of the flags (`--name` of `--name=value`) among these words."""
    return {flag_name(word.text.partition("=")[0]) for word in words if word.text.startswith("--")}


def is_published_by_vllm(image: str) -> bool:
    """Whether an image is vLLM's own or a mirror of it."""
    name = image.lower().removeprefix("docker.io/").partition("@")[0].partition(":")[0]
    return name == "vllm" or name.startswith("vllm/") or name.rpartition("/")[2] == "vllm-openai"


def is_server_image(image: str) -> bool:
    """Whether an image is a vLLM server, not a router, exporter or simulator for one."""
    name = image.lower().replace(_PROJECT, "")
    return "vllm" in name and "dynamo" not in name and not _is_companion(image)


def _is_companion(image: str) -> bool:
    """Whether the image's name is of a router, exporter, UI or the like rather than of a server."""
    return bool(_COMPANION.search(re.sub(r"[${}]", "", image.rpartition("/")[2].partition(":")[0].lower())))


def gpu_count(text: str) -> int | None:
    """The number of GPUs in docker's `--gpus`: of `2`, `count=2` or `device=0,1`; None for `all` and other texts."""
    value = text.strip().strip("'\"")
    if value.isdecimal() and len(value) < 5:
        return int(value)
    named = re.search(r"(?:device|count)=\"?([^\"]+)", value)
    if not named or named[1] == "all":
        return None
    if value.startswith("count") or "count=" in value:
        return int(named[1]) if named[1].isdecimal() and len(named[1]) < 5 else None
    return len([part for part in named[1].split(",") if part and "=" not in part])


def image_release(image: str) -> str | None:
    """The vLLM version in an image's name; None for `latest`, a date or an image whose name lacks `vllm`."""
    if "vllm" not in image.lower():
        return None
    name, _, tag = image.rpartition("/")[2].partition("@")[0].partition(":")
    minors = [int(number.split(".")[1]) for number in known_releases()]
    numbered = [] if _OWN_VERSIONS.search(image) else list(_TAG_VERSION.finditer(tag))
    if not is_published_by_vllm(image):  # `acme/vllm-server:0.1.0` is the image's own, `r36.4-0.9` part of another
        numbered = [each for each in numbered if each[0][0] == "v" or not each.start()]
        numbered = [version for version in numbered if int(version[1].split(".")[1]) >= min(minors)]
    versions = (version[1] for version in (*_NAMED_VERSION.finditer(f"{name}:{tag}".lower()), *numbered))
    return next((version for version in versions if int(version.split(".")[1]) <= max(minors) + 50), None)


_MOVING_TAGS = re.compile(r"|latest|nightly|main|v?latest-[\w.-]*|nightly-[\w.-]*")
_FORKS, _OWN_BUILD = pattern("container_images.forks"), pattern("container_images.own_build")


def is_other_build(image: str) -> bool:
    """Whether an image is a fork or a private build, whose vLLM may differ from the release in its name."""
    return bool(_FORKS.search(image)) or bool(_OWN_BUILD.search(_image_tag(image)))


def _image_tag(image: str) -> str:
    """The tag in an image's name; empty where it has none."""
    return image.rpartition("/")[2].partition("@")[0].partition(":")[2]


_OTHER_HARDWARE = re.compile(r"(?<![a-z])(?:gaudi\d?|habana|hpu|neuronx?|ascend|npu|xpu|tpu|cpu)(?![a-z])")


def is_for_other_hardware(image: str) -> bool:
    """Whether an image's name says that it is for other hardware than NVIDIA's or AMD's GPUs."""
    return bool(_OTHER_HARDWARE.search(image.lower()))


def has_moving_tag(image: str) -> bool:
    """Whether an image is vLLM's own with a tag that moves with its releases: `vllm/vllm-openai:latest`."""
    name, colon, tag = image.removeprefix("docker.io/").partition(":")
    is_moving = bool(_MOVING_TAGS.fullmatch(tag)) and bool(tag) == bool(colon)
    return name.startswith("vllm/") and not _FORKS.search(image) and not is_other_build(image) and is_moving


_MONTH = pattern("container_images.month")
_DAY = re.compile(r"(?<!\d)(20\d\d)-?(0[1-9]|1[0-2])-?([0-3]\d)(?!\d)")


def latest_build_day(image: str) -> str:
    """The date (`2025-09-01`) in an image's tag, before which its vLLM was released; empty for a tag without one."""
    tag = _image_tag(image)
    if day := _DAY.search(tag):
        return "-".join(day.groups())
    month = _MONTH.match(tag)
    return f"20{month[1]}-{month[2]}-01" if month else ""  # 25.09 holds 0.10.1.1, 25.11 holds 0.11.0


def has_unnamed_release(image: str) -> bool:
    """Whether an image may hold a vLLM release that its name does not tell; False for `latest` and for no name."""
    if not image or image_release(image):
        return False
    if "vllm" not in image.lower():
        return True
    is_template = "@" in image or "$" in image or "{{" in image
    return is_template or bool(_FORKS.search(image)) or not _MOVING_TAGS.fullmatch(_image_tag(image))
