"""`docker run` lines and image names."""

from __future__ import annotations

import re

from legroom.deployments.plain_shell import ASSIGNMENT, basename
from legroom.facts.releases import known_releases
from legroom.records import dataclass, field

_NO_VALUE = {
    "-d", "--detach", "-i", "--interactive", "-t", "--tty", "--rm", "--privileged", "--init", "--read-only", "-P",
    "--publish-all", "--no-healthcheck", "--oom-kill-disable", "--sig-proxy", "-q", "--quiet", "--replace",
    "--tls-verify",
}  # fmt: skip
_SHORT_SWITCHES = re.compile(r"-[dit]{2,3}")
_TAG_VERSION = re.compile(r"(?<![\d.])v?(0\.\d{1,3}(?:\.\d{1,3}){0,2}(?:\.?post\d+)?(?:rc\d+)?)(?![\d])")
_BESIDE = re.compile(r"(^|[-_])(router|gateway|proxy|operator|exporter|dashboard|sim|simulator|epp)([-_]|$)")
_OWN_NUMBERS = re.compile(r"lmcache|dynamo|production-stack", re.IGNORECASE)
"""Projects whose images hold vLLM and are numbered by the project's own releases."""
_IMAGE_ENTRYPOINT = ("vllm", "serve")


@dataclass(frozen=True)
class ContainerRun:
    """What a container is started with."""

    image: str
    words: tuple[str, ...]
    """The server's words; the vLLM image's own entry point is written out."""
    env: dict[str, str] = field(default_factory=dict)
    gpus: int | None = None
    shm_size: str | None = None


def container_run(words: tuple[str, ...]) -> ContainerRun | None:
    """Read `docker run [options] image [arguments]`; None where there is no image."""
    env: dict[str, str] = {}
    gpus: int | None = None
    shm_size = entrypoint = None
    i = 2 if words[1:2] != ("container",) else 3
    while i < len(words) and words[i].startswith("-"):
        name, has_value, value = words[i].partition("=")
        i += 1
        if name in _NO_VALUE or _SHORT_SWITCHES.fullmatch(name):
            continue
        if not has_value:
            value = words[i] if i < len(words) else ""
            i += 1
        if name in ("-e", "--env"):
            found = ASSIGNMENT.fullmatch(value)
            env |= {found[1]: found[2]} if found else {}
        elif name in ("--gpus", "--device"):
            gpus = gpu_count(value) if name == "--gpus" else gpus
        elif name == "--shm-size":
            shm_size = value
        elif name == "--entrypoint":
            entrypoint = value
    if i >= len(words):
        return None
    server = with_entrypoint(words[i], (entrypoint,) if entrypoint else (), words[i + 1 :])
    return ContainerRun(words[i], server, env, gpus if gpus is not None else visible_gpus(env), shm_size)


def with_entrypoint(image: str, entrypoint: tuple[str, ...], arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The words a container runs. vLLM's own images start the server themselves."""
    if entrypoint:
        return (*entrypoint, *arguments)
    names_program = (
        bool(arguments)
        and not arguments[0].startswith("-")
        and (basename(arguments[0]) in ("vllm", "python", "python3", "bash", "sh", "env", "uv") or " " in arguments[0])
    )
    if names_program or not serves_vllm(image):
        return arguments
    return (*_IMAGE_ENTRYPOINT, *(arguments[1:] if arguments[:1] == ("serve",) else arguments))


def serves_vllm(image: str) -> bool:
    """Whether an image starts vLLM's server: not what stands in front of it, or stands in for it."""
    name = image.rpartition("/")[2].partition(":")[0]
    return "vllm" in image.lower() and not _BESIDE.search(name)


def gpu_count(text: str) -> int | None:
    """`2`, `device=0,1`; None for `all`."""
    value = text.strip().strip("'\"")
    if value.isdecimal() and len(value) < 5:
        return int(value)
    found = re.search(r"(?:device|count)=\"?([^\"]+)", value)
    if not found or found[1] == "all":
        return None
    if value.startswith("count") or "count=" in value:
        return int(found[1]) if found[1].isdecimal() and len(found[1]) < 5 else None
    return len([part for part in found[1].split(",") if part and "=" not in part])


def visible_gpus(env: dict[str, str]) -> int | None:
    """How many GPUs the environment leaves visible; None where it does not say."""
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        value = env.get(name, "").strip()
        if value and value not in ("all", "none", "void", "-1") and "$" not in value:
            return len([part for part in value.split(",") if part.strip()])
    return None


def image_release(image: str) -> str | None:
    """The vLLM version an image's tag names, None where it names none (`latest`, a date)."""
    if "vllm" not in image.lower() or _OWN_NUMBERS.search(image):
        return None
    _, _, tag = image.rpartition("/")[2].partition(":")
    newest_minor = max(int(name.split(".")[1]) for name in known_releases())
    for found in _TAG_VERSION.finditer(tag.partition("@")[0]):
        if int(found[1].split(".")[1]) <= newest_minor + 50:
            return found[1]
    return None
