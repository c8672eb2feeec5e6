"""Variables and flags of vLLM in lines from which no server was read: templates, env files, values, other tools."""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from legroom.deployments.container_images import is_server_image
from legroom.deployments.release_pins import installed_releases, named_releases
from legroom.facts import pattern, read_data
from legroom.facts.flags import env_history, flag_name, flags_ever, flags_of, is_read_by_plugin
from legroom.facts.releases import Release, known_releases, latest
from legroom.facts.releases import release as known_release
from legroom.vllm.flag_problems import explain_unknown

_SETS_VARIABLE, SHOWN = pattern("names_in_text.sets_variable"), pattern("names_in_text.shown")
PASSED_ON = pattern("names_in_text.passed_on")
_CLIENTS_OWN = pattern("names_in_text.clients_own")
"""Names that a client of the server, its script or its build has for itself."""
_WITHOUT_PREFIX = ("MAX_MODEL_LEN", "GPU_MEMORY_UTILIZATION", "TENSOR_PARALLEL_SIZE", "MAX_NUM_SEQS", "QUANTIZATION")
_SETTING, _HANDED_ON = pattern("names_in_text.setting"), pattern("names_in_text.handed_on")
_OF_ENGINE = re.compile(r"VLLM_((EXTRA_|ADDITIONAL_)?ARGS|(USE|ENABLE|DISABLE|ROCM)_\w+)")
_FLAG = pattern("names_in_text.flag")

_OF_CLIENT, _LONGEST_COMMAND = pattern("names_in_text.of_client"), 400
_OWN_RELEASE, _WHOLE = pattern("names_in_text.own_release"), pattern("names_in_text.whole")
_TOKEN, _NEWEST = pattern("names_in_text.token"), pattern("names_in_text.newest")

_SERVICES = re.compile(r"^services:[^\n]*\n(?:[ \t#{].*\n|[ \t]*\n)*(?:[ \t].*)?", re.MULTILINE)
_OF_SERVER = pattern("names_in_text.of_server")
"""What only the container of a server has: clients name vLLM in their variables alone."""
_MOCK = pattern("names_in_text.mock")
_ENGINE, _LAUNCHER = re.compile(r"vllm[ _]serve|vllm\.entrypoints|/vllm-openai\b"), pattern("names_in_text.launcher")
_OF_CLUSTER = re.compile(r"(?m)^#SBATCH|\bsrun\b|\b(?:singularity|apptainer) ")
_KIND, _IMAGE = re.compile(r"(?m)^kind:"), re.compile(r"(?m)^ +(?:repository|image):[ \t]*[\"']?([\w./-]+)")
_WORKLOAD = pattern("names_in_text.workload")

Mistake = tuple[int, Mapping[str, str]]
"""An offset, and the rule, message and suggestion of what stands there."""


def without_other_services(path: str, text: str) -> str:
    """YAML whose Compose services, workloads and chart values for programs other than vLLM are blanked."""
    services, is_chart = _SERVICES.search(text), False
    first = re.search(r"\n( +)[^\s#{]", services[0]) if services is not None else None
    if services is not None and first is not None:
        keys = re.finditer(rf"(?m)^{first[1]}([^\s#{{:]+)", services[0])
        starts = [(services.start() + key.start(), is_server_image(key[1])) for key in keys]
        ends = [*(at for at, _ in starts[1:]), services.end()]
    elif is_chart := not _KIND.search(text) and any("vllm" in image for image in _IMAGE.findall(text)):
        tops = [key.start() for key in re.finditer(r"(?m)^[\w-]+:", text)]
        ends = [*tops[1:], *([len(text)] if tops else ())]
        images = (_IMAGE.findall(text[start:end]) for start, end in zip(tops, ends, strict=True))
        starts = [(start, not named or "vllm" in " ".join(named)) for start, named in zip(tops, images, strict=True)]
    else:
        starts = [(mark.start(), False) for mark in re.finditer(r"(?m)\A|^---", text)]
        ends = [*(at for at, _ in starts[1:]), len(text)]
    blocks = [(at, end, named) for (at, named), end in zip(starts, ends, strict=True)]
    is_listed = first is not None or is_chart
    blocks = [each for each in blocks if is_listed or _WORKLOAD.search(text[each[0] : each[1]])]
    bodies = [(at, end, named, text[at:end]) for at, end, named in blocks]
    beside = [(at, end) for at, end, _, body in bodies if _MOCK.search(body) or _is_companion(body)]
    is_explained = any(_is_companion(text[slice(*each)]) for each in beside)  # why the path names vLLM
    unnamed = [(at, end) for at, end, named, body in bodies if not (named or _OF_SERVER.search(body))]
    others, named = list(dict.fromkeys((*unnamed, *beside))), "/".join(path.lower().split("/")[-2:])
    if len(others) == len(blocks) and "vllm" in named and "mock" not in named and not is_explained:
        others = beside  # which of the rest is vLLM's is not told
    for at, end in others:
        text = text[:at] + re.sub(r"[^\n]", " ", text[at:end]) + text[end:]
    return text


def _is_companion(service: str) -> bool:
    """Whether a Compose service is named after vLLM although neither its name nor its image is a server's."""
    name = re.match(r"\s*([\w-]*vllm[\w-]*):", service)
    runs_vllm = _ENGINE.search(service) or any(map(is_server_image, _IMAGE.findall(service)))
    return name is not None and not is_server_image(name[1]) and not runs_vllm


@lru_cache(maxsize=64)
def own_options(text: str) -> frozenset[str]:
    """The `--options` that programs in a text declare themselves with argparse, spelt as vLLM's flags are."""
    return frozenset(map(flag_name, re.findall(r"add_argument\(\s*[\"'](--[\w-]+)", text)))


def mistaken_names(text: str, kind: str, all_text: str, server_flags: frozenset[str]) -> Iterator[Mistake]:
    """Mistaken variables, flags (not `server_flags`), releases and gated models in a file; `all_text`: of all files."""
    is_read = kind in ("yaml", "env", "dockerfile", "shell")
    is_read = is_read and not (kind == "env" and re.search(r"\bcompose\b[^\n]*--env-file", all_text))  # of Compose
    unread = list(_unread_variables(text, all_text, is_built=kind == "dockerfile") if is_read else ())
    yield from unread
    if kind == "env":
        yield from _lost_variables(text, all_text)
    releases = [known_release(version) for version in named_releases(all_text) & {*known_releases()}]
    own = own_options(all_text)
    for word in _FLAG.finditer(text):
        name = flag_name(word[0])
        is_read = any(name in flags_of(each) for each in (latest(), *releases))
        is_lost = any(at < word.start() and text.count("\n", at, word.start()) < 2 for at, _ in unread)
        is_lost = is_lost or _OF_CLIENT.search(text, max(word.start() - _LONGEST_COMMAND, 0), word.start()) is not None
        if name in flags_ever() and name not in server_flags | own and not (is_read or is_lost):
            problem = explain_unknown(name, latest())
            if problem.kind in ("removed", "renamed"):
                suggestion = f"write {problem.instead}" if problem.instead else "leave it out"
                row = {"rule": "flag-removed", "message": problem.message, "suggestion": suggestion}
                is_newest = not releases and "{{" not in text and _NEWEST.search(text) is not None
                yield word.start(), row | ({"severity": "warning"} if is_newest else {})
    for row in read_data("release_holes.json")["rows"][:1]:
        fixed = Release(row["fixed_in"], row["fixed_in"])
        pin = next((each for each in _OWN_RELEASE.finditer(text) if fixed.after(each[1])), None)
        is_whole = kind in ("dockerfile", "python") or _WHOLE.search(text)
        if pin is not None and is_whole and not (kind == "dockerfile" and installed_releases(text).is_unpinned):
            message = f"{row['message']} before {row['fixed_in']} ({row['id']})"
            yield pin.start(1), {"rule": "release-unsafe", "message": message, "suggestion": f"use {fixed} or later"}
    gated = "|".join(f"(?:{name})" for name in read_data("model_access.json")["gated"])
    told = SHOWN.sub(lambda line: " " * len(line[0]), text)
    model = re.search(rf"(?i)(?<![\w./])(?<!\w-)(?<!served-model-name[ =])(?:{gated})[\w.-]*", told)
    is_at_home = _OF_CLUSTER.search(text) is not None  # such containers have the home folder, with its token
    is_alone = _SERVICES.search(text) is not None and not re.search(r"\b(?:extends|include|secrets|build):", text)
    given = text if is_alone else all_text  # a container gets what its Compose file passes on
    if model is not None and _WHOLE.search(text) and not is_at_home and not _TOKEN.search(given):
        message = f"{model[0]} is gated, and no file here gives a token: the Hub answers 401"
        yield model.start(), {"rule": "model-gated", "message": message, "suggestion": "set HF_TOKEN from a Secret"}


def _unread_variables(text: str, all_text: str, is_built: bool) -> Iterator[Mistake]:
    """Variables named like vLLM's that no linted file and no vLLM reads; an older vLLM may where `is_built`."""
    all_text, is_compose = PASSED_ON.sub("", all_text), _SERVICES.search(text) is not None
    has_launcher = _LAUNCHER.search(all_text) is not None and _ENGINE.search(text) is None
    for found in _SETS_VARIABLE.finditer(text):
        is_given, name = found[1] is not None or is_compose, found[2]
        flag, history = flag_name(name.removeprefix("VLLM_").lower()), env_history(name)
        is_setting = is_given or flag in flags_of(latest()) or _OF_ENGINE.fullmatch(name)
        is_meant = name.startswith("VLLM_") and is_setting
        is_meant = is_meant or (name in _WITHOUT_PREFIX and "vllm/vllm-openai" in all_text)
        used = rf"\$[{{(]?{name}\b|[\[(.]\s*[\"']?{name}\b[\"']?\s*[\]),]|\benv\.{name}\b"
        is_ours = _CLIENTS_OWN.fullmatch(name) or is_read_by_plugin(name) or (has_launcher and not history)
        is_read = history is not None and (not latest().after(history[-1][1]) or is_built or named_releases(all_text))
        if is_ours or is_read or not (is_meant or history) or re.search(used, all_text):
            continue
        span = f" from {history[0][0]} to {history[-1][1]} alone" if history else ""
        message = f"vLLM reads {name}{span}" if history else f"vLLM does not read {name}"
        instead = f"write the flag {flag}" if not history and flag in flags_of(latest()) else "leave it out"
        row = {"rule": "env-unknown", "message": message, "suggestion": instead}
        yield found.start(2), row


def _lost_variables(text: str, all_text: str) -> Iterator[Mistake]:
    """Variables of an env file that no linted file reads; none where some line passes on the whole env file."""
    if _SERVICES.search(all_text) is None or _HANDED_ON.search(all_text):
        return
    for found in _SETS_VARIABLE.finditer(text):
        name = found[2]
        if _SETTING.fullmatch(name) and not re.search(rf"\$[{{(]?{name}\b|[\"']{name}[\"']", all_text):
            message = f"no file here reads {name}: it has no effect"
            yield found.start(2), {"rule": "env-unknown", "message": message, "suggestion": "use the name that is read"}
