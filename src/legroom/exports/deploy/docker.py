"""`legroom export docker`: the planned server as a `docker run` line."""

import shlex
from collections.abc import Iterator
from functools import partial

from legroom.exports.deploy import containers
from legroom.exports.deploy.exported_server import ExportedServer, add_server_options
from legroom.exports.deploy.flag_comments import comment_lines
from legroom.exports.deploy.script import argument_lines, required_variable_line
from legroom.exports.export_request import ExportedFile, ExportRequest

NAME = "docker"
HELP = "a docker run line, as a script with its reasons"
NEEDS_PLAN = True
add_options = partial(add_server_options, image=True)


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """A script with `docker run`, preceded by a Dockerfile where the image needs legroom."""
    server = containers.container_server(request)
    script = ExportedFile(f"{server.name}-docker.sh", docker_run_script(server), executable=True)
    return containers.with_dockerfile_before(server, script)


def docker_run_script(server: ExportedServer) -> str:
    """A bash script that starts the server's container and, if asked for, one with `legroom watch`."""
    lines = [
        "#!/usr/bin/env bash",
        *comment_lines(*containers.head_comment(server), *server.remarks),
        "set -euo pipefail",
        *(line for name in server.secrets for line in required_variable_line(name)),
        "",
        "options=(",
        *(f"  {line}" for line in _docker_run_options(server)),
        ")",
        "",
        "arguments=(",
        *(f"  {line}" for line in argument_lines(server)),
        ")",
        "",
    ]
    program, *rest = containers.entrypoint(server)
    words = " ".join(shlex.quote(word) for word in (containers.image(server), *rest))
    lines.append(f'docker run "${{options[@]}}" --entrypoint {program} {words} "${{arguments[@]}}" "$@"')
    if server.options.sidecar:
        lines += ["", *comment_lines("legroom watch beside it, in the same network.")]
        lines.append(
            f"docker run --detach --init --name {server.name}-watch --restart unless-stopped --network "
            f"container:{server.name} --volume legroom:{containers.JOURNAL} --entrypoint legroom "
            f"{containers.image(server)} {shlex.join(server.address.watch_words())}"
        )
    return "\n".join(lines) + "\n"


def _docker_run_options(server: ExportedServer) -> Iterator[str]:
    """Lines of the script's `options` array, with comments: all options of `docker run` but --entrypoint."""
    yield f"--detach --init --name {server.name}"
    yield from comment_lines("It restarts after a crash and after a reboot.")
    yield "--restart unless-stopped"
    if files := containers.device_files(server):
        yield " ".join(f"--device {file}" for file in files) + " --group-add video"
    else:
        picked = containers.visible_gpu_indexes(server)
        yield "--gpus " + (shlex.quote(f'"device={",".join(picked)}"') if picked else str(server.gpus))
    yield from comment_lines("Ranks communicate through /dev/shm, which has only 64 MiB by default.")
    yield f"--shm-size {containers.shm_gib(server)}g"
    yield f"--ulimit memlock=-1 --ulimit nofile={containers.OPEN_FILES}:{containers.OPEN_FILES}"
    if not server.requires_key:
        yield from comment_lines(containers.NO_KEY)
    yield f"--publish {containers.published_port(server)}"
    yield from comment_lines("Weights and compiled code are kept when the container is replaced.")
    if not server.local_model:
        yield f"--volume {shlex.quote(f'{containers.hf_home_volume(server)}:{containers.CACHE}')}"
    yield f"--volume vllm-cache:{containers.COMPILE_CACHE}"
    if on_host := containers.bind_mounts(server):
        yield from comment_lines("What the command names on this machine, at the same paths.")
        yield from (f"--volume {shlex.quote(volume)}" for volume in on_host)
    for line in containers.container_env(server, sees_all_gpus=bool(containers.device_files(server))):
        yield from comment_lines(f"{line.name}: {line.why}.")
        yield f"--env {shlex.quote(f'{line.name}={line.value}')}"
    for name in server.secrets:
        yield from comment_lines(f"{name} is taken from the environment of this script; it is not written here.")
        yield f"--env {name}"
    yield from comment_lines(f"Loading is not unhealthy: {server.times.short_sentence()}.")
    yield f"--health-cmd {shlex.quote(server.address.curl('/health'))}"
    yield f"--health-start-period {server.times.limit_s}s --health-interval 10s --health-timeout 6s --health-retries 3"
    yield from comment_lines(server.stop_sentence())
    yield f"--stop-timeout {server.times.stop_s}"
