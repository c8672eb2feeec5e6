"""Containers whose command the image cannot run, and probes that ask in the wrong place."""

from __future__ import annotations

import re

from legroom.deployments.container_images import is_for_other_hardware, is_other_build, is_published_by_vllm
from legroom.deployments.subjects import StartedServer
from legroom.facts.model_sources import is_hub_id
from legroom.lint.rule import Context, Findings, Rule, checks, finding, has_open_words
from legroom.vllm.args import other_value, served_port

_WHY_COMMAND = (
    "vLLM's image runs `vllm serve` with its arguments, and takes a program among them for the model. It has python3, "
    "and no python. A list of words is run without a shell, which leaves ${VARIABLES} as they are."
)
COMMAND = Rule("container-command", "error", "A command that the image cannot run", _WHY_COMMAND)
_WHY_PORT = "The probe is never answered: the server is restarted or called unhealthy for ever."
PORT = Rule("probe-port", "error", "A probe of another port than the server's", _WHY_PORT)
_WHY_PROBE = "A Service sends requests to a pod without a readiness probe while the model is still loading."
PROBE = Rule("probe-missing", "note", "A server without any probe", _WHY_PROBE)
_SHELL_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_SERVED_KINDS = ("Kubernetes Deployment", "Kubernetes StatefulSet")


@checks(StartedServer, COMMAND)
def command_of_container(server: StartedServer, context: Context) -> Findings:
    """A program as an argument of an image that runs `vllm serve`, and `python` in an image that has none."""
    image, word = server.image, server.repeated_entry
    if word is not None:
        message = f"{image} runs `vllm serve` already, and {word.text} is its argument here"
        suggestion = "give the model and its flags alone, or set the entry point (command: in Kubernetes)"
        yield finding(COMMAND, server.place_of(word), message, suggestion, len(word.text))
    for word in server.words if server.is_exec_form else ():
        name = _SHELL_VARIABLE.search(word.raw)
        if name and (server.runs == "docker" or name[1] in server.env):  # else a tool fills the manifest in
            message = f"no shell expands {name[0]}: vLLM gets it as it is written"
            suggestion = "write $(NAME) in Kubernetes, or start it with sh -c"
            yield finding(COMMAND, server.place_of(word), message, suggestion, len(word.raw))
    if not is_published_by_vllm(image) or is_other_build(image) or is_for_other_hardware(image):
        return
    runs = [server.place_of(first) for first in server.words[:1] if first.text == "python"]
    for place in (*runs, *(probe.place for probe in server.probes if probe.program == "python")):
        yield finding(COMMAND, place, f"{image} has python3 and no python", "write python3, or ask with curl")


_WHY_CACHE = "Without a volume a new container downloads the weights again, also after every crash."
CACHE = Rule("cache-lost", "note", "Weights that every new container downloads", _WHY_CACHE)
_CACHE_VARIABLES = ("HF_HUB_CACHE", "HF_HOME")


@checks(StartedServer, CACHE)
def weights_outside_volumes(server: StartedServer, context: Context) -> Findings:
    """A model of the Hub in vLLM's own image whose cache no volume holds."""
    args = context.parsed_args(server).args
    is_of_hub = is_hub_id(args.model) and not has_open_words(server, ("model",))
    if server.mounts is None or not is_of_hub or not is_published_by_vllm(server.image) or server.is_release_assumed:
        return
    named = next((server.env[name].text for name in _CACHE_VARIABLES if name in server.env), "")
    folder = other_value(args, "--download-dir") or named or "/root/.cache/huggingface"
    inside = (f"{folder}/".startswith(f"{mount.rstrip('/')}/") or mount.startswith(folder) for mount in server.mounts)
    if not any(inside) and "HF_HUB_OFFLINE" not in server.env and "$" not in "".join((folder, *server.mounts)):
        message = f"no volume holds {folder}: every new container downloads {args.model}"
        yield finding(CACHE, server.place, message, f"mount a volume at {folder}")


@checks(StartedServer, PORT, PROBE)
def probes_of_server(server: StartedServer, context: Context) -> Findings:
    """Probes that ask another port, and a Deployment without any."""
    args = context.parsed_args(server).args
    port = served_port(args)
    for probe in server.probes:
        if probe.port.isdecimal() and port.isdecimal() and probe.port != port and not server.launcher:
            message = f"the {probe.kind} probe asks port {probe.port}, and the server listens on {port}"
            yield finding(PORT, probe.place, message, f"ask port {port}, or add --port {probe.port}")
        if probe.kind == "none" and args.model and server.read_as.startswith(_SERVED_KINDS):
            yield finding(PROBE, probe.place, "no probe: requests are sent to it while the model loads")
