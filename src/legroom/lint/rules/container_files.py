"""Files that a server needs and its container does not have: weights, templates, adapters, a token for the Hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from legroom.deployments.container_images import is_published_by_vllm
from legroom.deployments.container_parts import Mount
from legroom.deployments.shell.lexer import Word
from legroom.deployments.subjects import StartedServer
from legroom.facts import read_data
from legroom.facts.model_sources import is_hub_id
from legroom.lint.rule import Context, Findings, checks, finding, flag_value, flag_word, has_open_words
from legroom.lint.rules.container_start import runs_plain_image
from legroom.vllm.args import ServeArgs, other_value

_CACHE_VARIABLES = ("HF_HUB_CACHE", "HF_HOME")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "VLLM_USE_MODELSCOPE", "HF_HUB_OFFLINE")
_PATH_FLAGS = ("--chat-template", "--tokenizer", "--ssl-keyfile", "--ssl-certfile", "--tool-parser-plugin", "--config")
_WITHOUT_CONTROLLER = ("Kubernetes Deployment", "Kubernetes StatefulSet", "compose service", "a docker", "a podman")
"""How files are read in which the mounts are all that a container gets: KServe adds its own."""
_IN_IMAGE = re.compile(r"/(vllm-workspace|usr|opt|etc|dev|proc)/|/dev/")


@checks(StartedServer, "cache-lost", "path-missing")
def weights_of_hub(server: StartedServer, context: Context) -> Findings:
    """A model of the Hub in vLLM's own image whose cache no volume holds."""
    args = context.parsed_args(server).args
    is_of_hub = is_hub_id(args.model) and not has_open_words(server, ("model",))
    if server.mounts is None or not is_of_hub or not is_published_by_vllm(server.image) or server.is_release_assumed:
        return
    folder = _cache_folder(server, args)
    mount = _mount_that_holds(server.mounts, folder)
    is_offline = server.may_have_variable("HF_HUB_OFFLINE")
    is_told = "$" not in "".join((folder, *(each.path for each in server.mounts)))
    if is_told and not is_offline and (mount is None or mount.holds == "empty"):
        what = f"no volume holds {folder}" if mount is None else f"the emptyDir at {mount.path} goes with its pod"
        message = f"{what}: every new {'container' if mount is None else 'pod'} downloads {args.model}"
        yield finding("cache-lost", server.place, message, f"mount a volume at {folder}")
    offline = server.env.get("HF_HUB_OFFLINE")
    if is_told and mount is None and offline is not None and offline.text.lower() in ("1", "true", "yes"):
        message = f"HF_HUB_OFFLINE forbids the download of {args.model}, and no volume holds {folder}"
        yield finding("path-missing", server.place_of(offline), message, f"mount the weights at {folder}")


@checks(StartedServer, "model-gated")
def gated_model_without_token(server: StartedServer, context: Context) -> Findings:
    """A gated model in a container or a unit that gets no token for the Hub."""
    args = context.parsed_args(server).args
    is_container = server.mounts is not None and is_published_by_vllm(server.image) and not server.is_release_assumed
    has_token = server.may_have_variable(*_TOKENS) or flag_word(server, "--hf-token")
    is_judged = (is_container or server.runs == "systemd") and not has_token and not has_open_words(server, ("model",))
    if not is_judged or not args.model or not _gated_models().match(args.model):
        return
    mount = _mount_that_holds(server.mounts or (), _cache_folder(server, args))
    # A cache of the host may hold the token of `hf auth login`, and the weights.
    is_cached = not is_container or (mount is not None and mount.holds == "host")
    word = next((word for word in server.words if word.text.endswith(args.model)), server.words[0])
    message = f"{args.model} is gated, and the server gets no token: the Hub answers 401"
    found = finding("model-gated", server.place_of(word), message, "set HF_TOKEN from a Secret", len(args.model))
    yield replace(found, severity="note") if is_cached else found


def _cache_folder(server: StartedServer, args: ServeArgs) -> str:
    """Where the server looks for the weights of a model of the Hub, and downloads them to."""
    named = next((server.env[name].text for name in _CACHE_VARIABLES if name in server.env), "")
    return other_value(args, "--download-dir") or named or "/root/.cache/huggingface"


def _mount_that_holds(mounts: tuple[Mount, ...], path: str) -> Mount | None:
    """The mount at the path, above it, or below it."""
    inside = f"{path}/".startswith
    return next(
        (mount for mount in mounts if inside(f"{mount.path.rstrip('/')}/") or mount.path.startswith(path)), None
    )


@cache
def _gated_models() -> re.Pattern[str]:
    return re.compile("|".join(read_data("model_access.json")["gated"]), re.IGNORECASE)


@checks(StartedServer, "path-missing")
def paths_outside_volumes(server: StartedServer, context: Context) -> Findings:
    """Absolute paths of a model or a file in vLLM's own image, which neither the image nor a volume holds."""
    mounts = server.mounts
    if mounts is None or not runs_plain_image(server) or not server.read_as.startswith(_WITHOUT_CONTROLLER):
        return
    if any("$" in mount.path for mount in mounts) or server.may_have_variable("VLLM_USE_MODELSCOPE"):
        return
    for word, path in _given_paths(server, context.parsed_args(server).args.model):
        is_path = path.startswith("/") and not re.search(r"[${<*]", path) and not _IN_IMAGE.match(path)
        if is_path and _mount_that_holds(mounts, path) is None:
            message = f"no volume holds {path}, and vLLM's image does not have it"
            yield finding("path-missing", server.place_of(word), message, f"mount it at {path}", len(word.text))


def _given_paths(server: StartedServer, model: str) -> Iterator[tuple[Word, str]]:
    """The paths that the command names, each with its word."""
    yield from ((word, model) for word in server.words if model and word.text.removeprefix("--model=") == model)
    for flag in _PATH_FLAGS:
        if (word := flag_word(server, flag)) is not None:
            yield word, flag_value(server, word)
