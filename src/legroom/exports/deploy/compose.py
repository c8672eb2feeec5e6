"""`legroom export compose`: the planned server as a compose file."""

from functools import partial
from typing import Any

from legroom.exports.deploy import containers
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options, commented_words
from legroom.exports.deploy.serve_command import API_KEY_NAME, WITHOUT_API_KEY
from legroom.exports.deploy.yaml_text import Commented, literal, yaml_text
from legroom.exports.export_request import ExportedFile, ExportRequest

NAME = "compose"
HELP = "a compose file"
NEEDS_PLAN = True
add_options = partial(add_server_options, image=True)


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """compose.yaml, preceded by a Dockerfile where the image needs legroom."""
    server = containers.container_server(request)
    text = yaml_text(compose_document(server), head=(*containers.head_comment(server), *server.remarks))
    return containers.with_dockerfile_before(server, ExportedFile("compose.yaml", text))


def compose_document(server: ExportedServer) -> dict[str, Any]:
    """The compose file as nested mappings with comments, before it is written as YAML."""
    services: dict[str, Any] = {server.name: _service(server)}
    if server.options.sidecar:
        url = f"{server.address.scheme}://{server.name}:{server.port}"
        services[f"{server.name}-watch"] = {
            "image": containers.image(server),
            "entrypoint": ["legroom", *server.address.watch_words(url)],
            "depends_on": [server.name],
            "volumes": [f"legroom:{containers.JOURNAL}"],
            "init": True,
            "restart": "unless-stopped",
        }
    volumes: dict[str, Any] = {"vllm-cache": {}}
    if not server.local_model and not containers.hf_home_volume(server).startswith("/"):
        volumes["huggingface"] = {}
    if server.options.sidecar:
        volumes["legroom"] = {}
    return {"services": services, "volumes": volumes}


def _service(server: ExportedServer) -> dict[str, Any]:
    """The compose service that runs vLLM."""
    service: dict[str, Any] = {"image": containers.image(server)}
    if containers.needs_legroom(server):
        service["build"] = "."
    port = containers.published_port(server)
    # Secrets come from the caller's environment, and a missing API key stops `up`.
    environment: dict[str, Any] = {
        line.name: Commented(f"{line.why}.", literal(line.value))
        for line in containers.container_env(server, sees_all_gpus=bool(containers.device_files(server)))
    }
    for name in server.secrets:
        required = f"${{{name}:?{WITHOUT_API_KEY}}}" if name == API_KEY_NAME else None
        why = "Taken from the environment of `docker compose up`, or from .env; not written here."
        environment[name] = Commented(why, required)
    service |= {
        "entrypoint": [literal(word) for word in containers.entrypoint(server)],
        "command": [*commented_words(server.phrases, literal)],
        **({"environment": environment} if environment else {}),
        "ports": [port if server.requires_key else Commented(containers.NO_KEY, port)],
        "volumes": _volumes(server),
        "shm_size": Commented(
            "Ranks communicate through /dev/shm, which has only 64 MiB by default.", f"{containers.shm_gib(server)}gb"
        ),
        "ulimits": {"memlock": -1, "nofile": containers.OPEN_FILES},
        "init": True,
        "restart": "unless-stopped",
    }
    loading = f"Loading is not unhealthy: {server.times.short_sentence()}."
    service["healthcheck"] = {
        "test": ["CMD", *server.address.curl_words("/health")],
        "start_period": Commented(loading, f"{server.times.limit_s}s"),
        "interval": "10s",
        "timeout": "6s",
        "retries": 3,
    }
    service["stop_grace_period"] = Commented(server.stop_sentence(), f"{server.times.stop_s}s")
    return service | _gpu_devices(server)


def _volumes(server: ExportedServer) -> list[str]:
    """The service's mounts: the Hugging Face cache, the model's folder and files that flags name."""
    kept = literal(containers.hf_home_volume(server))
    downloaded = [] if server.local_model else [f"{kept}:{containers.CACHE}"]
    on_host = [literal(volume) for volume in containers.bind_mounts(server)]
    return [*on_host, *downloaded, f"vllm-cache:{containers.COMPILE_CACHE}"]


def _gpu_devices(server: ExportedServer) -> dict[str, Any]:
    """The service's GPU keys: device files where the vendor needs them, else a reservation for NVIDIA's driver."""
    if files := containers.device_files(server):
        return {"devices": [f"{file}:{file}" for file in files], "group_add": ["video"]}
    picked = containers.visible_gpu_indexes(server)
    which: dict[str, Any] = {"device_ids": list(picked)} if picked else {"count": server.gpus}
    device = {"driver": "nvidia", **which, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}
