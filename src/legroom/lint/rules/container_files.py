"""Files that a server needs and its container does not have: weights, templates, adapters, a token for the Hub."""

import re
from dataclasses import replace

from legroom.deployments.container_images import is_published_by_vllm, is_server_image
from legroom.deployments.mounts_and_ports import Mount
from legroom.deployments.subjects import StartedServer
from legroom.facts import pattern, read_data
from legroom.facts.model_sources import is_hub_id
from legroom.lint.rule import Context, Findings, checks, finding, flag_place, flag_value, flag_word, has_open_words
from legroom.lint.rules.container_start import runs_plain_image
from legroom.vllm.args import ServeArgs, other_value

_CACHE_VARIABLES = ("HF_HUB_CACHE", "HF_HOME")
_OLD_MODEL = pattern("container_files.old_model")
_DEFAULT_CACHE = "/root/.cache/huggingface"
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "VLLM_USE_MODELSCOPE", "HF_HUB_OFFLINE")
_PATH_FLAGS = ("--chat-template", "--tokenizer", "--ssl-keyfile", "--ssl-certfile", "--tool-parser-plugin", "--config")
_WITHOUT_CONTROLLER = ("Kubernetes Deployment", "Kubernetes StatefulSet", "compose service", "a docker", "a podman")
"""How files are read in which the mounts are all that a container gets: KServe adds its own."""
_IN_IMAGE = re.compile(r"/(vllm-workspace|usr|opt|etc|dev|proc)/|/dev/")


@checks(StartedServer, "cache-lost", "path-missing")
def weights_of_hub(server: StartedServer, context: Context) -> Findings:
    """A container that cannot download its model, or does at each start as no volume holds the Hugging Face cache."""
    args = context.parsed_args(server).args
    # A name without an organization is no folder of vLLM's image, and without a model vLLM serves its default one.
    is_plain = server.read_as.startswith(_WITHOUT_CONTROLLER) and "/" not in args.model
    is_of_hub = is_hub_id(args.model) or is_plain
    if server.mounts is None or not is_of_hub or has_open_words(server, ("model",)) or not server.words:
        return
    folder = _cache_folder(server, args)
    is_told = is_server_image(server.image) or not server.in_container or folder != _DEFAULT_CACHE
    if not is_told or (server.is_release_assumed and folder == _DEFAULT_CACHE):
        return
    mount = _mount_that_holds(server.mounts, folder)
    is_offline = server.may_have_variable("HF_HUB_OFFLINE")
    is_told = "$" not in "".join((folder, *(each.path for each in server.mounts)))
    if is_told and not is_offline and (mount is None or mount.holds == "empty"):
        what = f"no volume holds {folder}" if mount is None else f"the emptyDir at {mount.path} goes with its pod"
        lost = "container" if mount is None else "pod"
        message = f"{what}: every new {lost} downloads {args.model or 'the model'}"
        yield finding("cache-lost", server.place, message, f"mount a volume at {folder}")
    if is_told and not is_offline and mount is not None and mount.is_read_only:
        message = f"{mount.path} is read-only: {args.model} is not downloaded where a file of it is missing"
        yield finding("cache-lost", server.place, message, "mount it for writing, or set HF_HUB_OFFLINE")
    has_tmp = "TMPDIR" in server.env or _mount_that_holds(server.mounts, "/tmp/vllm") is not None
    if server.has_read_only_root and not has_tmp:
        message = "the container's root is read-only, and vLLM writes its sockets to /tmp: it does not start"
        yield finding("path-missing", server.place, message, "mount an emptyDir at /tmp, and one for the caches")
    offline = server.env.get("HF_HUB_OFFLINE")
    if is_told and mount is None and offline is not None and offline.text.lower() in ("1", "true", "yes"):
        message = f"HF_HUB_OFFLINE forbids the download of {args.model}, and no volume holds {folder}"
        yield finding("path-missing", server.place_of(offline), message, f"mount the weights at {folder}")


@checks(StartedServer, "model-missing")
def model_left_out(server: StartedServer, context: Context) -> Findings:
    """A vLLM container without a model, or with a Hub id without its organization (`Qwen3-8B`)."""
    model = context.parsed_args(server).args.model
    is_passed_on = is_published_by_vllm(server.image) or (is_server_image(server.image) and len(server.words) > 2)
    is_plain = server.read_as.startswith(_WITHOUT_CONTROLLER) and is_passed_on and not server.launcher
    is_told = is_plain and bool(server.words) and not has_open_words(server, ("model",)) and server.mounts is not None
    is_misread = server.repeated_entry is not None  # its first words are not the flags
    if not is_told or is_misread or flag_word(server, "--config", "--headless", "--help") or "/" in model:
        return
    if not model and not server.may_have_variable("VLLM_MODEL", "MODEL", "MODEL_NAME", "MODEL_ID"):
        message = "no model is given: vLLM serves the small one that is its default"
        yield finding("model-missing", server.place, message, "write the model after `vllm serve`, or --model")
    elif (
        model and not _OLD_MODEL.match(model) and not _mount_that_holds(server.mounts or (), f"/vllm-workspace/{model}")
    ):
        message = f"{model} has no organization, and the Hub finds no such model"
        place = flag_place(server, "--model")
        yield finding("model-missing", place, message, f"write ORGANIZATION/{model}")


@checks(StartedServer, "model-gated")
def gated_model_without_token(server: StartedServer, context: Context) -> Findings:
    """A gated model in a container or a unit that gets no token for the Hub."""
    args = context.parsed_args(server).args
    is_container = server.mounts is not None and is_published_by_vllm(server.image) and not server.is_release_assumed
    has_token = server.may_have_variable(*_TOKENS) or flag_word(server, "--hf-token")
    is_judged = (is_container or server.runs == "systemd") and not has_token and not has_open_words(server, ("model",))
    gated = "|".join(read_data("model_access.json")["gated"])
    if not is_judged or not args.model or not re.match(gated, args.model, re.IGNORECASE):
        return
    mount = _mount_that_holds(server.mounts or (), _cache_folder(server, args))
    # A volume may hold the token of `hf auth login`, and the weights.
    is_cached = not is_container or (mount is not None and mount.holds != "empty")
    word = next((word for word in server.words if word.text.endswith(args.model)), server.words[0])
    message = f"{args.model} is gated, and the server gets no token: the Hub answers 401"
    found = finding("model-gated", server.place_of(word), message, "set HF_TOKEN from a Secret", len(args.model))
    yield replace(found, severity="note") if is_cached else found


@checks(StartedServer, "path-missing")
def paths_outside_volumes(server: StartedServer, context: Context) -> Findings:
    """Absolute paths of a model or a file in vLLM's own image, which neither the image nor a volume holds."""
    mounts, model = server.mounts, context.parsed_args(server).args.model
    is_told = runs_plain_image(server) and server.read_as.startswith(_WITHOUT_CONTROLLER)
    if mounts is None or not is_told or any("$" in mount.path for mount in mounts):
        return
    flags = [(word, flag_value(server, word)) for name in _PATH_FLAGS if (word := flag_word(server, name))]
    for word, path in (*((word, model) for word in server.words if model and word.text.endswith(model)), *flags):
        is_path = path.startswith("/") and not re.search(r"[${<*]", path) and not _IN_IMAGE.match(path)
        if is_path and _mount_that_holds(mounts, path) is None:
            message = f"no volume holds {path}, and vLLM's image does not have it"
            found = finding("path-missing", server.place_of(word), message, f"mount it at {path}", len(word.text))
            yield replace(found, severity="note")  # another file may add the volume


def _cache_folder(server: StartedServer, args: ServeArgs) -> str:
    """Where the server looks for the weights of a model of the Hub, and downloads them to."""
    named = next((server.env[name].text for name in _CACHE_VARIABLES if name in server.env), "")
    return other_value(args, "--download-dir") or named or _DEFAULT_CACHE


def _mount_that_holds(mounts: tuple[Mount, ...], path: str) -> Mount | None:
    """The mount whose path is this one, a parent or a child of it; None without one."""
    folder = f"{path.rstrip('/')}/"
    paths = ((mount, f"{mount.path.rstrip('/')}/") for mount in mounts)
    return next((mount for mount, at in paths if folder.startswith(at) or at.startswith(folder)), None)
