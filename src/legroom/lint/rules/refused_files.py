"""Files that Kubernetes or Compose refuses, or rolls out in a way that GPUs do not allow."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

from legroom.deployments.compose_reader import ComposeFolder
from legroom.deployments.container_images import is_published_by_vllm
from legroom.deployments.kubernetes_reader import GPU_RESOURCE
from legroom.deployments.mounts_and_ports import mount_of
from legroom.deployments.yaml_nodes import Node, is_template
from legroom.drawing.text import plural
from legroom.facts import read_data
from legroom.lint.rule import Context, Findings, checks, finding

_Refusal = tuple[Node, str, str]  # The node, what is wrong with it, and what to write instead.
_NO_TEXT = re.compile(r"-?\d+(\.\d+)?|true|false|True|False")
_COMPOSE_FILE = re.compile(r"(^|/)(docker-)?compose[\w.-]*\.ya?ml$")
_BASE_FILE = re.compile(r"(^|/)(docker-)?compose\.ya?ml$")
_VOLUME_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_EMPTY_DEFAULT = re.compile(r"""(?<=\s)\$\{(\w+):?-(""|'')\}""")
_UNSET = re.compile(r"(?<!\$)\$\{?([A-Za-z_]\w*)(?:\}|(?![\w:?+-]))")
_GUARDED = re.compile(r"\$\{(\w+):?[-+?]")
_SHELL_ENTRY = re.compile(r"(/(usr/)?bin/)?(ba|da)?sh")


@checks(Node, "manifest-refused")
def refused_fields(document: Node, context: Context) -> Findings:
    """Fields with which Kubernetes refuses a manifest, or Compose its file; none in a template or one without vLLM."""
    named = " ".join(each.text("name") for node in document.walk() for each in node.list("containers"))
    if not (context.servers or "vllm" in named) or is_template(document.source.text):
        return
    by_kubernetes = _refused_by_kubernetes(document, context.platform_signs)
    for node, message, suggestion in (*by_kubernetes, *_refused_by_compose(document)):
        found = finding("manifest-refused", document.source.place(node.offset), message, suggestion)
        is_patch = document.get("spec", "template") is not None and document.get("spec", "template", "metadata") is None
        yield replace(found, severity="note") if is_patch else found


def _refused_by_kubernetes(document: Node, platform_signs: frozenset[str]) -> Iterator[_Refusal]:
    """(node, what is wrong, what to write) for what the API server refuses in a manifest's selector and pods;
    `platform_signs` of the linted files, as in `Context`: `kustomize` (it may be a part), `openshift`."""
    if document.get("apiVersion") is None:
        return
    wanted = dict(document.items("spec", "selector", "matchLabels"))
    labels = {key: value.scalar for key, value in document.items("spec", "template", "metadata", "labels")}
    template, path = document.get("spec", "template"), document.source.path
    is_part = "kustomize" in platform_signs or re.search(r"patch|overlay|kustom|\.(md|markdown|rst|py)$", path)
    is_whole = template is not None and all(each.get("image") for each in template.list("spec", "containers"))
    is_named = document.text("apiVersion") == "apps/v1" and bool(document.text("metadata", "name"))
    if template is not None and is_whole and is_named and not is_part and document.get("spec", "selector") is None:
        what = f"a {document.text('kind')} needs spec.selector, and its pods the labels that it selects"
        yield template, what, "write selector: {matchLabels: ...}, and the same labels in template.metadata"
    for key, value in wanted.items() if labels else ():
        if labels.get(key) != value.scalar and "$" not in f"{labels.get(key)}{value.scalar}":
            message = f"the selector asks for {key}: {value.scalar}, which the pods are not labelled with"
            yield value, message, "write the same label in spec.template.metadata.labels"
    for pod in document.walk():
        names = [volume for volume in pod.list("volumes") if volume.text("name")]
        for volume in names:
            if [each.text("name") for each in names].count(volume.text("name")) > 1 and volume is not names[0]:
                yield volume, f"two volumes are called {volume.text('name')}", "leave one of them"
                break
        # A patch may mount what its base declares.
        is_whole = bool(wanted) or document.text("kind") in ("Pod", "Job")
        claims = document.list("spec", "volumeClaimTemplates")
        declared = {volume.text("name") for volume in pod.list("volumes")}
        declared |= {claim.text("metadata", "name") for claim in claims}
        for container in (*pod.list("containers"), *pod.list("initContainers")):
            yield from _refused_container(container)
            if "openshift" not in platform_signs and (image_user := _refused_user(container, pod)):
                yield image_user, "runAsNonRoot refuses vLLM's image, which runs as root", "set runAsUser as well"
            for mount in container.list("volumeMounts") if is_whole else ():
                is_open = any("$" in key for key, _ in mount.items())
                if mount.get("mountPath") is None and mount.values and not is_open:
                    yield mount, f"the mount of {mount.text('name')} has no mountPath", "write mountPath"
                is_told = bool(mount.text("name")) and "$" not in "".join((mount.text("name"), *declared))
                if is_told and mount.text("name") not in declared:
                    yield mount, f"no volume is called {mount.text('name')}", "add it to the pod's volumes"


@checks(Node, "manifest-refused")
def misplaced_fields(document: Node, context: Context) -> Findings:
    """Fields that a Kubernetes kind does not have where they stand, as wrong indentation causes."""
    kind, known = document.text("kind"), read_data("kubernetes_fields.json")["fields"]
    is_known = document.text("apiVersion") in ("v1", "apps/v1") and bool(context.servers)
    if not is_known or is_template(document.source.text) or "$___" in document.source.text:  # stands for a template
        return
    pod = document.get("spec", "template", "spec") or (document.get("spec") if kind == "Pod" else None)
    containers = pod.list("containers") if pod is not None else []
    probes = [each.get(f"{name}Probe") for each in containers for name in ("startup", "readiness", "liveness")]
    named = [(kind, document.get("spec")), ("pod", pod), *(("container", each) for each in containers)]
    for name, node in (*named, *(("probe", probe) for probe in probes)):
        for key, value in node.items() if node is not None and name in known else ():
            if key not in known[name] and re.fullmatch(r"[a-z]\w*", key):
                message = f"{name} has no field {key}: kubectl refuses it, and other tools drop it"
                place = document.source.place(value.offset)
                yield finding("manifest-refused", place, message, "indent it as its owner's", is_certain=False)


def _refused_container(container: Node) -> Iterator[_Refusal]:
    """(node, what is wrong, what to write): numbers where strings are needed, GPU requests unlike the limit."""
    texts = [*container.list("command"), *container.list("args")]
    texts += [value for item in container.list("env") if (value := item.get("value")) is not None]
    for node in texts:
        if not node.style and node.scalar is not None and _NO_TEXT.fullmatch(node.scalar):
            yield node, f"{node.scalar} is no text here, and only texts are taken", f'write "{node.scalar}"'
    limits = {name: amount.scalar for name, amount in container.items("resources", "limits")}
    for name, amount in container.items("resources", "requests"):
        is_open = any("$" in (each or "") for each in (amount.scalar, limits.get(name)))
        if GPU_RESOURCE.fullmatch(name) and limits.get(name) != amount.scalar and not is_open:
            given = f"the limit is {limits[name]}" if name in limits else "there is no limit"
            yield amount, f"{name} is requested {amount.scalar} times and {given}", "write the same number in limits"


def _refused_user(container: Node, pod: Node) -> Node | None:
    """The `runAsNonRoot: true` by which a node refuses vLLM's image, whose user is root; None without one."""
    both = [node for owner in (container, pod) if (node := owner.get("securityContext")) is not None]
    has_user = any(node.get("runAsUser") is not None for node in both)
    image = container.text("image")
    is_root = is_published_by_vllm(image) and "nonroot" not in image and not has_user
    given = (node for each in both if (node := each.get("runAsNonRoot")) is not None and node.scalar == "true")
    return next(given, None) if is_root else None


def _refused_by_compose(document: Node) -> Iterator[_Refusal]:
    """(node, what is wrong, what to write) for services without a key, incomplete reservations, unknown volumes."""
    path = document.source.path
    if document.get("services") is None:
        first = next((value for _, value in document.items() if value.get("image") is not None), None)
        if first is not None and _COMPOSE_FILE.search(path) and document.get("apiVersion") is None:
            yield document, "the services stand at the top of the file", "put them under services:"
        return
    declared = {name for name, _ in document.items("volumes")}
    yield from _same_names(document)
    for _, service in document.items("services"):
        for device in service.list("deploy", "resources", "reservations", "devices"):
            if device.get("capabilities") is None and device.values:
                yield device, "a reservation of devices names no capabilities", "add capabilities: [gpu]"
            elif device.get("count") is not None and device.get("device_ids") is not None:
                yield device, "count and device_ids exclude each other", "leave one of them"
        seen: set[str] = set()
        for item in service.list("volumes"):
            target = mount_of(item.scalar).path if item.scalar and ":" in item.scalar else item.text("target")
            if target in seen and "$" not in target:
                yield item, f"two volumes are mounted at {target}", "leave one of them"
            seen |= {target} - {""}
        is_merged = document.get("include") is not None or not _BASE_FILE.search(path)
        for key, named in (("depends_on", "services"), ("networks", "networks")) if not is_merged else ():
            known = {"default", *(name for name, _ in document.items(named))}
            given = [(item.scalar, item) for item in service.list(key)] or list(service.items(key))
            for name, item in given:
                if name and name not in known and "$" not in name:
                    yield item, f"no {named[:-1]} is called {name}", f"add it to {named}: at the top of the file"
        for item in service.list("volumes") if not is_merged else ():
            name, colon, rest = (item.scalar or "").partition(":")
            is_drive = len(name) == 1 and rest.startswith(("/", "\\")) and ":" in rest  # of Windows
            if colon and _VOLUME_NAME.fullmatch(name) and name not in declared and not is_drive:
                yield item, f"no volume is called {name}", "add it to volumes: at the top of the file"


def _same_names(document: Node) -> Iterator[_Refusal]:
    """(node, what is wrong, what to write) for services that start together with the same container name."""
    seen: set[str] = set()
    for _, service in document.items("services"):
        name = service.get("container_name")
        if name is None or not name.scalar or service.get("profiles") is not None or "$" in name.scalar:
            continue
        if name.scalar in seen:
            yield name, f"two services are called {name.scalar}, and start together", "give each its own, or profiles"
            return
        seen.add(name.scalar)


@checks(Node, "manifest-refused")
def port_published_twice(document: Node, context: Context) -> Findings:
    """Services that start together and publish the same port of the host."""
    seen: dict[str, tuple[str, bool]] = {}
    for name, service in document.items("services") if context.servers else ():
        has_profile = service.get("profiles") is not None
        for item in service.list("ports"):
            written = re.fullmatch(r"(?:[\d.]+:)?(\d+):\d+(?:/tcp)?", item.scalar or "")
            port = written[1] if written else item.text("published")
            other, other_has = seen.setdefault(port, (name, has_profile)) if port.isdecimal() else (name, False)
            if other != name and not (has_profile and other_has):
                message = f"{other} publishes port {port} too: the one that starts later fails"
                found = finding("manifest-refused", document.source.place(item.offset), message, "write another port")
                yield replace(found, severity="note" if has_profile or other_has else "warning")


@checks(Node, "manifest-refused")
def external_with_settings(document: Node, context: Context) -> Findings:
    """Networks and volumes declared as external, hence existing already, that have settings all the same."""
    is_of_vllm = document.get("services") is not None and "vllm" in document.source.text.lower()
    for kind in ("volumes", "networks") if is_of_vllm else ():
        for name, item in document.items(kind):
            others = [key for key, _ in item.items() if key not in ("name", "external") and not key.startswith("x-")]
            if item.text("external") == "true" and others:
                refuses = "Compose refuses" if kind == "volumes" else "the specification of Compose refuses"
                message = f"{name} is external, and {refuses} {', '.join(others)} beside it"
                place = document.source.place(item.offset)
                found = finding("manifest-refused", place, message, "leave one of them out")
                yield found if kind == "volumes" else replace(found, severity="note")  # which Compose ignores so far


@checks(Node, "env-meaning")
def unset_variables(document: Node, context: Context) -> Findings:
    """Variables in the command of a server that no file beside the Compose file sets."""
    folder = ComposeFolder(document) if document.get("services") is not None else None
    servers = {each.read_as.removeprefix("compose service ") for each in context.servers}
    for name, service in document.items("services") if folder is not None else ():
        command = service.get("command")
        text = document.source.text[command.offset : command.end] if command is not None and name in servers else ""
        used = {found[1] for found in _UNSET.finditer(text)} - (folder.named_variables if folder else set())
        used -= set(_GUARDED.findall(text))
        if command is not None and used:
            message = f"no file here sets {', '.join(sorted(used))}: Compose puts nothing in its place"
            found = finding("env-meaning", document.source.place(command.offset), message, "write a default")
            yield replace(found, severity="note")


@checks(Node, "container-command")
def command_of_service(document: Node, context: Context) -> Findings:
    """Commands that Compose splits into other words than their author meant."""
    for _, service in document.items("services") if context.servers else ():
        entry = [item.scalar or "" for item in service.list("entrypoint")]
        command = service.get("command")
        if command is None or command.scalar is None or "vllm" not in f"{service.text('image')} {command.scalar}":
            continue
        place = document.source.place(command.offset)
        try:
            words = shlex.split(command.scalar)
        except ValueError:
            continue
        if entry[-1:] == ["-c"] and _SHELL_ENTRY.fullmatch(entry[0]) and len(words) > 1:
            message = f"Compose splits the command, and {entry[0]} -c runs its first word alone: {words[0]}"
            yield finding("container-command", place, message, "write the command as a list of one text")
        elif (empty := _EMPTY_DEFAULT.search(command.scalar)) and empty[1] not in ComposeFolder(document).variables:
            message = f"without its variable {empty[0]} is an empty argument, which vLLM takes for the model or refuses"
            yield finding("container-command", place, message, "leave the quotes of the default out")
        elif words[:2] and words[0] not in ("sh", "bash") and any(word.startswith(" ") for word in words):
            message = "a backslash before a line break of a folded text is an escaped space: flags begin with one"
            yield finding("container-command", place, message, "leave the backslashes out")


@checks(Node, "flag-cut-off")
def comments_in_folded_text(document: Node, context: Context) -> Findings:
    """A `#` line in a folded YAML command, where it is an argument and no comment."""
    for node in document.walk() if context.servers else ():
        raw = document.source.text[node.offset : node.end] if node.style == ">" else ""
        comment = re.search(r"\n[ \t]*(#)", raw)
        if comment is not None and " --" in (node.scalar or ""):
            message = "a folded text has no comments: a shell drops all that follows, and Compose passes the words on"
            place = document.source.place(node.offset + comment.start(1))
            yield finding("flag-cut-off", place, message, "move it out of the command", is_certain=False)


@checks(Node, "rollout-stuck")
def rollout_needs_more_gpus(document: Node, context: Context) -> Findings:
    """A Deployment that starts a new pod before it ends the old one, which holds the GPU."""
    strategy = document.get("spec", "strategy")
    surge = document.text("spec", "strategy", "rollingUpdate", "maxSurge")
    is_replaced = document.text("spec", "strategy", "type") == "Recreate" or surge in ("0", "0%")
    read_as = f"Kubernetes Deployment {document.text('metadata', 'name')}".rstrip()
    gpus = sum(server.gpus or 0 for server in context.servers if server.read_as == read_as)
    variable = re.search(r"\.com/gpu[\"']?:\s*[\"']?\$", document.source.text[document.offset : document.end])
    is_rolled = document.text("kind") == "Deployment" and (gpus or variable) and not is_replaced
    if is_rolled and document.get("spec", "selector"):
        place = document.source.place((strategy or document.get("spec") or document).offset)
        message = f"an update starts the new pod first, which waits for {plural(gpus, 'more GPU') if gpus else 'a GPU'}"
        yield finding("rollout-stuck", place, message, "write strategy: {type: Recreate}, or maxSurge: 0")
