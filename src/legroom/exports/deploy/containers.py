"""The image, environment and volumes of a planned server for Docker, compose and Kubernetes."""

import math
from collections.abc import Iterator
from pathlib import Path

from legroom.errors import LegroomError
from legroom.exports.deploy.environment import EnvVariable
from legroom.exports.deploy.exported_server import ExportedServer, requested_server
from legroom.exports.deploy.flag_comments import WRITTEN, plan_headline
from legroom.exports.deploy.named_paths import check_paths, named_paths, unmounted_paths_remark
from legroom.exports.deploy.serve_command import check_reachable
from legroom.exports.export_request import ExportedFile, ExportRequest
from legroom.units import GIB
from legroom.version import __version__
from legroom.worker.plugin import SWITCH

CACHE = "/root/.cache/huggingface"
COMPILE_CACHE = "/root/.cache/vllm"
JOURNAL = "/root/.local/share/legroom"
"""The folder of the sidecar's journal."""
NO_KEY = "Without --api-key it answers everybody, so only this machine reaches it: set one before you open the port."
OPEN_FILES = 65536
_PICK_DEVICES = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK",),
)
_CACHES = (
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE", "VLLM_CACHE_ROOT"),
    "XDG_CACHE_HOME",
)
"""Cache folders of the host, which a container replaces by volumes."""
_DEVICE_FILES = {"amd": ("/dev/kfd", "/dev/dri"), "intel": ("/dev/dri",)}
_BUILT_IMAGE = "vllm-legroom"


def container_server(request: ExportRequest) -> ExportedServer:
    """The server to export as a container; LegroomError where it is not reachable or a path cannot be mounted."""
    server = requested_server(request)
    check_reachable(server.words)
    check_paths(server)
    return server


def vendor(server: ExportedServer) -> str:
    """The maker of the planned GPU: `nvidia`, `amd` or `intel`; LegroomError for the last two without --image."""
    name = server.plan.gpu.name
    maker = "amd" if name.startswith("AMD") else "intel" if name.startswith("Intel") else "nvidia"
    if maker != "nvidia" and server.options.image is None:
        hint = "name the image of yours with --image"
        raise LegroomError(f"vllm/vllm-openai is built for NVIDIA cards, not for {name}", hint)
    return maker


def gpu_resource(server: ExportedServer) -> str:
    """The Kubernetes resource of the GPUs, such as `nvidia.com/gpu`."""
    return {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu", "intel": "gpu.intel.com/xe"}[vendor(server)]


def image(server: ExportedServer) -> str:
    """The container image to run: the server's own, or the one built on it with legroom where that is needed."""
    return f"{_BUILT_IMAGE}:v{server.release.version}" if needs_legroom(server) else server.image


def needs_legroom(server: ExportedServer) -> bool:
    """Whether the image needs legroom: for the guard, the sidecar or worker telemetry."""
    return server.options.guard or server.options.sidecar or any(line.name == SWITCH for line in server.env)


def dockerfile(server: ExportedServer) -> ExportedFile:
    """A Dockerfile that installs legroom into vLLM's image."""
    text = f"# {image(server)}: vLLM's own image with legroom, which runs inside the server or beside it.\n"
    text += f"# docker build -t {image(server)} .\n# {WRITTEN}\nFROM {server.image}\n"
    text += f"RUN python3 -m pip install --no-cache-dir 'legroom[run]=={__version__}'\n"
    return ExportedFile("Dockerfile", text, beside=True)


def with_dockerfile_before(server: ExportedServer, file: ExportedFile) -> tuple[ExportedFile, ...]:
    """The file, preceded by its image's Dockerfile where the image needs legroom."""
    return (dockerfile(server), file) if needs_legroom(server) else (file,)


def entrypoint(server: ExportedServer) -> tuple[str, ...]:
    """The container's entry point: the program with its subcommand or module, and the model."""
    program = "vllm" if server.words.head[-1] == "serve" else "python3"
    return (program, *server.words.head[1:], *server.words.model_words)


def device_files(server: ExportedServer) -> tuple[str, ...]:
    """Device files of AMD and Intel GPUs; none for NVIDIA's."""
    return _DEVICE_FILES.get(vendor(server), ())


def container_env(server: ExportedServer, *, sees_all_gpus: bool = False) -> tuple[EnvVariable, ...]:
    """The environment without cache folders, and without CUDA_VISIBLE_DEVICES and the like unless `sees_all_gpus`."""
    left_out = _CACHES if sees_all_gpus else (*_CACHES, *_PICK_DEVICES)
    return tuple(line for line in server.env if line.name not in left_out)


def hf_home_volume(server: ExportedServer) -> str:
    """The source of the Hugging Face cache mount: this machine's HF_HOME if it exists, else a named volume."""
    home = next((line.value for line in server.env if line.name == "HF_HOME"), "")
    return home if home.startswith("/") and ":" not in home and Path(home).is_dir() else "huggingface"


def visible_gpu_indexes(server: ExportedServer) -> tuple[str, ...]:
    """The GPU indexes that CUDA_VISIBLE_DEVICES and the like select; empty where none is set."""
    for line in server.env:
        if line.name in _PICK_DEVICES and line.value not in ("", "all", "none", "void", "-1"):
            return tuple(part.strip() for part in line.value.split(",") if part.strip())
    return ()


def head_comment(server: ExportedServer) -> Iterator[str]:
    """The comment lines at the top of a container file: plan, start time, host memory and left-out paths."""
    yield from plan_headline(server.plan)
    yield from (f"Start: {server.times.sentence()}.", f"{server.host.sentence()}.")
    if caches := [line.name for line in server.env if line.name in _CACHES]:
        yield f"{', '.join(caches)}: given, but left out, because a container keeps downloads and code in its volumes."
    yield from unmounted_paths_remark(server)


def bind_mounts(server: ExportedServer) -> tuple[str, ...]:
    """The mounts, as `source:target[:ro]`, of the model's folder and the paths in flags."""
    model = (f"{server.model}:{server.model}:ro",) if server.local_model else ()
    return (*model, *(f"{named.path}:{named.path}{'' if named.writable else ':ro'}" for named in named_paths(server)))


def shm_gib(server: ExportedServer) -> int:
    """GiB of /dev/shm that the ranks need."""
    return server.host.shm_bytes // GIB


def cache_gib(server: ExportedServer) -> int:
    """GiB of a cache volume: the checkpoint, a fifth more for another revision's small files, and 10 for code."""
    return math.ceil(server.host.checkpoint_bytes * 1.2 / GIB) + 10


def published_port(server: ExportedServer) -> str:
    """The port for docker's `--publish`, with 127.0.0.1 where requests need no API key."""
    return f"{'' if server.requires_key else '127.0.0.1:'}{server.port}:{server.port}"
