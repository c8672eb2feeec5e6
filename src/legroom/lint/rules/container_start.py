"""Containers whose command the image cannot run, and probes that the server does not answer."""

import re

from legroom.deployments import container_images as images
from legroom.deployments.server_words import API_SERVERS
from legroom.deployments.subjects import InvokedCommand, Probe, StartedServer
from legroom.facts import read_data
from legroom.lint.rule import Context, Findings, checks, finding, flag_word, has_open_words, known_port
from legroom.vllm.args import other_values

_SHELL_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
_SERVED_KINDS = ("Kubernetes Deployment", "Kubernetes StatefulSet")
_KEY_VARIABLE = "VLLM_API_KEY"
_OF_IMAGE = (*_SERVED_KINDS, "Kubernetes Pod", "Kubernetes Job", "compose service", "a docker", "a podman")


def runs_plain_image(server: StartedServer) -> bool:
    """Whether the container is of vLLM's own CUDA image, with nothing added."""
    image = server.image
    is_changed = images.is_other_build(image) or images.is_for_other_hardware(image) or server.is_release_assumed
    return images.is_published_by_vllm(image) and not is_changed and not server.launcher


@checks(StartedServer, "container-command")
def command_of_container(server: StartedServer, context: Context) -> Findings:
    """Words that the image cannot run: a second program, none at all, an unexpanded variable, `python` for python3."""
    image, word = server.image, server.repeated_entry
    if word is not None:
        is_old = context.release_of(server).before(_image_facts("serve_is_entry_point_from"))
        entry = f"python3 -m {API_SERVERS[0]}" if is_old and server.named_release else "vllm serve"
        message = f"{image} runs `{entry}` already, and {word.text} is its argument here"
        suggestion = "give the model and its flags alone, or set the entry point (command: in Kubernetes)"
        yield finding("container-command", server.place_of(word), message, suggestion, len(word.text))
    is_script = server.read_as == "a Dockerfile" and server.place.path.endswith(".sh")  # which the image runs
    is_added = len({word.offset for word in server.words[:2]}) == 1 and not is_script  # `vllm serve` is the image's
    if is_added and re.fullmatch(_image_facts("without_entry_point"), image) and not server.launcher:
        first = server.words[2:3] or server.words[:1]
        message = f"{image} runs its arguments as a program, and {first[0].text} is none"
        yield finding("container-command", server.place_of(first[0]), message, "begin them with vllm serve")
    for each in server.words if server.is_exec_form else ():
        name = _SHELL_VARIABLE.search(each.raw)
        if name and (server.runs == "docker" or name[1] in server.env):  # else a tool fills the manifest in
            message = f"no shell expands {name[0]}: vLLM gets it as it is written"
            suggestion = "write $(NAME) in Kubernetes, or start it with sh -c"
            yield finding("container-command", server.place_of(each), message, suggestion, len(each.raw))
    is_built = server.runs == "compose" and server.is_release_assumed  # `image` is then the name of what is built
    is_changed = images.is_other_build(image) or images.is_for_other_hardware(image) or is_built
    if not images.is_published_by_vllm(image) or is_changed:
        return
    missing = {"python": "python3"}
    if context.is_release_certain(server) and context.release_of(server).at_least(_image_facts("no_wget_from")):
        missing["wget"] = "curl"
    runs = [(server.place_of(first), first.text) for first in server.words[:1] if word is None]
    for place, program in (*runs, *((probe.place, probe.program) for probe in server.probes)):
        if program in missing:
            message = f"{image} has {missing[program]} and no {program}"
            yield finding("container-command", place, message, f"write {missing[program]}")
    yield from _positional_model(server, context)


@checks(InvokedCommand, "container-command")
def python_in_image(command: InvokedCommand, context: Context) -> Findings:
    """`python` in a step of an image that is built on vLLM's."""
    is_vllms = images.is_published_by_vllm(command.image) and not images.is_other_build(command.image)
    if command.texts()[:1] == ("python",) and is_vllms and not images.is_for_other_hardware(command.image):
        message = f"{command.image} has python3 and no python"
        yield finding("container-command", command.locate(command.words[0].offset), message, "write python3")


def _positional_model(server: StartedServer, context: Context) -> Findings:
    """A model given by position to an old image whose entry point takes it only by --model."""
    # `vllm serve` is the image's own, and not of a chart or a controller.
    is_entry_point = server.read_as.startswith(_OF_IMAGE) and len({word.offset for word in server.words[:2]}) == 1
    model, release = server.words[2] if len(server.words) > 2 else None, context.release_of(server)
    is_old = release.before(_image_facts("serve_is_entry_point_from")) and bool(server.named_release)
    if model is None or not is_entry_point or not is_old or model.text.startswith("-") or flag_word(server, "--model"):
        return
    is_refused = release.before(_image_facts("positional_model_from"))
    effect = "does not start" if is_refused else "serves its default model"
    message = f"the image of {release} takes the model by --model alone: with {model.text} as an argument it {effect}"
    yield finding(
        "container-command", server.place_of(model), message, f"write --model {model.text}", is_certain=is_refused
    )


def _image_facts(key: str) -> str:
    """The text at `key` in `server_image.json`, the facts about vLLM's own container image."""
    return str(read_data("server_image.json")[key])


@checks(StartedServer, "probe-port", "probe-path", "probe-missing")
def probes_of_server(server: StartedServer, context: Context) -> Findings:
    """Probes that ask another port or for what vLLM does not have, and a Deployment without a readiness probe."""
    port = known_port(server, context.parsed_args(server).args)
    for probe in server.probes:
        if probe.port.isdecimal() and port.isdecimal() and probe.port != port:
            message = f"the {probe.kind} probe asks port {probe.port}, and the server listens on {port}"
            yield finding("probe-port", probe.place, message, f"ask port {port}, or add --port {probe.port}")
        if probe.kind == "none" and server.words and server.read_as.startswith(_SERVED_KINDS):
            message = "no readiness probe: requests are sent to it while the model loads"
            yield finding("probe-missing", probe.place, message)
        if why := _not_answered(server, context, probe):
            is_restarted = server.runs == "kubernetes"
            yield finding("probe-path", probe.place, why, "ask /health", is_certain=is_restarted)


def _not_answered(server: StartedServer, context: Context, probe: Probe) -> str:
    """Why the server does not answer a probe's path with 200; empty where it does or may."""
    facts, path = read_data("server_image.json"), probe.path.partition("?")[0].rstrip("/") or probe.path
    if not path or "$" in path or not runs_plain_image(server) or has_open_words(server) or not server.words:
        return ""
    if path not in facts["routes"]:
        may_add = flag_word(server, "--root-path", "--middleware", "--config")
        return "" if may_add or path.startswith("/v1/") else f"vLLM answers {path} with 404: the probe never succeeds"
    has_key = other_values(context.parsed_args(server).args, "--api-key") or _KEY_VARIABLE in server.env
    if path.startswith(facts["guarded_prefix"]) and has_key and not probe.sends_key:
        return f"vLLM answers {path} with 401 without its key: the probe never succeeds"
    return ""


@checks(StartedServer, "release-unsafe")
def release_with_known_holes(server: StartedServer, context: Context) -> Findings:
    """A pinned release with a known vulnerability that anyone who reaches the port can exploit."""
    is_open = server.is_release_assumed and not images.image_release(server.image)  # a build may choose another
    is_excerpt = server.mounts is None and not server.probes and server.start_limit is None
    if not server.named_release or is_open or context.is_release_given or is_excerpt:
        return
    has_key = flag_word(server, "--api-key") is not None or _KEY_VARIABLE in {*server.env, *server.other_env}
    for row in read_data("release_holes.json")["rows"]:
        if context.release_of(server).before(row["fixed_in"]) and (has_key or not row.get("needs_key")):
            message = f"{row['message']} before {row['fixed_in']} ({row['id']})"
            yield finding("release-unsafe", server.place, message, f"use {row['fixed_in']} or later")
            return
