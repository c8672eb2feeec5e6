"""Servers that cannot be reached where their file publishes them, or by everybody."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from legroom.deployments.source_text import Place
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node
from legroom.lint.rule import Context, Findings, checks, finding, flag_place, flag_word, has_open_words, known_port
from legroom.vllm.args import other_value

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ALL_ADDRESSES = ("0.0.0.0", "::")
_KEY = "VLLM_API_KEY"
_WORKLOADS, _SCRAPED = ("Deployment", "StatefulSet", "Pod"), "prometheus.io/port"


@checks(StartedServer, "port-unreachable")
def published_ports(server: StartedServer, context: Context) -> Findings:
    """A container that publishes a port other than its server's, or whose server listens on loopback only."""
    args = context.parsed_args(server).args
    if server.launcher or not server.words or not server.in_container or flag_word(server, "--config"):
        return
    host, port = other_value(args, "--host") or "", known_port(server, args)
    is_published = server.published or any(probe.port for probe in server.probes if probe.kind == "readiness")
    if host in _LOOPBACK and is_published:
        message = f"--host {host} listens inside the container alone: nothing outside reaches the server"
        yield finding("port-unreachable", flag_place(server, "--host"), message, "write --host 0.0.0.0")
    published = server.published if len(server.published) == 1 else ()
    for named in (*server.declared_ports, *published):
        if named.port.isdecimal() and port.isdecimal() and named.port != port:
            message = f"the file names port {named.port} of the container, and the server listens on {port}"
            found = finding("port-unreachable", named.place, message, f"write {port}, or add --port {named.port}")
            yield found if named in published else replace(found, severity="note")


@checks(Node, "port-unreachable")
def service_of_another_port(document: Node, context: Context) -> Findings:
    """A Service that forwards to a port other than the one on which its pods' single server listens."""
    selector = _labels(document, "spec", "selector")
    if document.text("kind") != "Service" or not selector:
        return
    pods = [each for each in context.manifests if _pod_of(each).list("spec", "containers")]
    chosen = [each for each in pods if selector.items() <= _labels(_pod_of(each), "metadata", "labels").items()]
    containers = _pod_of(chosen[0]).list("spec", "containers") if len(chosen) == 1 else []
    read_as = f"Kubernetes {chosen[0].text('kind')} {chosen[0].text('metadata', 'name')}".rstrip() if chosen else ""
    servers = [server for server in context.fleet if server.read_as == read_as]
    if len(servers) != 1 or len(containers) != 1 or flag_word(servers[0], "--config"):
        return
    named = [port for port in containers[0].list("ports") if port.text("name")]
    names = {port.text("name"): port.text("containerPort") for port in named}
    ports = [(port, port.text("targetPort") or port.text("port")) for port in document.list("spec", "ports")]
    told = [(port.source.place(port.offset), names.get(target, target)) for port, target in ports]
    served, targets = known_port(servers[0], context.parsed_args(servers[0]).args), {target for _, target in told}
    marked = [each for owner in (document, _pod_of(chosen[0])) for each in owner.items("metadata", "annotations")]
    scraped = [(each.source.place(each.offset), each.scalar or "") for key, each in marked if key == _SCRAPED]
    for place, target in (*told, *scraped) if served.isdecimal() else ():
        if target.isdecimal() and target != served:
            message = f"port {target} is named, and the only server of these pods listens on {served}"
            found = finding("port-unreachable", place, message, f"write {served}")
            yield replace(found, severity="note") if served in targets else found


@checks(Node, "port-unreachable")
def references_of_manifest(document: Node, context: Context) -> Findings:
    """Services without pods, Ingresses and monitors without Services, autoscalers without workloads, unknown ports."""
    readers = {"Service": _broken_service, "Ingress": _missing_backend, "PodDisruptionBudget": _undrained}
    readers["ServiceMonitor"] = _blind_monitor
    readers |= dict.fromkeys(("NetworkPolicy", "CiliumNetworkPolicy", "PodMonitor"), _unmatched_pods)
    readers |= dict.fromkeys(("HorizontalPodAutoscaler", "ScaledObject"), _missing_target)
    read = readers.get(document.text("kind"))
    of_monitor = slice(document.offset, document.end) if document.text("kind") == "ServiceMonitor" else slice(None)
    wanted = _labels(document, "spec", "selector").items()
    chosen = [each for each in context.manifests if wanted <= _labels(_pod_of(each), "metadata", "labels").items()]
    told = (document.source.text[of_monitor], *(each.source.text for each in chosen if wanted))
    if read is None or "vllm" not in "".join(told).lower():
        return
    for node, message, suggestion in read(document, context.manifests):
        found = finding("port-unreachable", document.source.place(node.offset), message, suggestion)
        folder = Path(document.source.path).parent
        beside = {each.text("kind") for each in context.manifests if Path(each.source.path).parent == folder}
        is_open = "kustomize" in context.platform_signs or "{{" in document.source.text or beside.isdisjoint(_WORKLOADS)
        is_sure = message.startswith("none of these files has a Service") and not is_open
        yield replace(found, severity="warning" if is_sure else "note")


def _labels(manifest: Node, *keys: str) -> dict[str, str]:
    """The string mapping, such as labels, at the path of these keys in a manifest; empty where there is none."""
    return {key: value.scalar or "" for key, value in manifest.items(*keys)}


def _pod_of(workload: Node) -> Node:
    """The pod template of a workload; of a Pod the manifest itself."""
    return workload if workload.text("kind") == "Pod" else workload.get("spec", "template") or workload


def _broken_service(service: Node, manifests: tuple[Node, ...]) -> Iterator[tuple[Node, str, str]]:
    """(node, what is wrong, what to write) where a Service selects no linted pod or port of one; none if unsure."""
    selector, wanted = service.get("spec", "selector"), _labels(service, "spec", "selector")
    workloads = [each for each in manifests if each.text("kind") in _WORKLOADS]
    told = [_labels(_pod_of(each), "metadata", "labels") for each in workloads]
    values = [*wanted.values(), *(labels.get(key, "") for labels in told for key in (wanted if labels else ()))]
    is_open = not all(told) or any("$" in value or "{{" in value for value in values)
    if selector is None or not wanted or not workloads or is_open or any("/" in key for key in wanted):
        return
    chosen = [each for each, labels in zip(workloads, told, strict=True) if wanted.items() <= labels.items()]
    if not chosen:
        yield selector, "no pod of these files has the labels that the Service selects", "write the labels of the pods"
        return
    spaces = {each.text("metadata", "namespace") for each in (service, *chosen)}
    if len(spaces) == 2 and "" not in spaces:
        message = f"the Service and its pods are in two namespaces ({' and '.join(sorted(spaces))}): it finds none"
        yield selector, message, "write the same namespace"
    containers = [each for workload in chosen for each in _pod_of(workload).list("spec", "containers")]
    names = {port.text("name") for each in containers for port in each.list("ports")}
    for port in service.list("spec", "ports"):
        target = port.get("targetPort")
        if target is not None and re.fullmatch(r"[a-z][a-z-]*", target.scalar or "") and target.scalar not in names:
            yield target, f"no port of the pods is called {target.scalar}", "write the name or number of their port"


def _missing_backend(ingress: Node, manifests: tuple[Node, ...]) -> Iterator[tuple[Node, str, str]]:
    """(node, what is wrong, what to write) for a Service or port of an Ingress that the linted manifests lack."""
    services = {each.text("metadata", "name"): each for each in manifests if each.text("kind") == "Service"}
    workloads = any(each.text("kind") in _WORKLOADS for each in manifests)
    for path in (path for rule in ingress.list("spec", "rules") for path in rule.list("http", "paths")):
        name = path.get("backend", "service", "name")
        if name is not None and workloads and not any(_may_equal(name.scalar or "", each) for each in services):
            yield name, f"none of these files has a Service called {name.scalar}", "write the name of the server's"
        port, service = path.get("backend", "service", "port", "name"), services.get((name and name.scalar) or "")
        names = [each.text("name") for each in (service.list("spec", "ports") if service is not None else ())]
        if port is not None and names and not any(_may_equal(port.scalar or "", each) for each in names):
            yield port, f"no port of that Service is called {port.scalar}", "write the name of its port"


def _missing_target(scaler: Node, manifests: tuple[Node, ...]) -> Iterator[tuple[Node, str, str]]:
    """(node, what is wrong, what to write) for an autoscaler's workload that the linted manifests lack."""
    target, kind = scaler.get("spec", "scaleTargetRef", "name"), scaler.text("spec", "scaleTargetRef", "kind")
    made = {kind or "Deployment": "", "InferenceService": "-predictor"}  # the Deployment that KServe makes
    names = [
        f"{each.text('metadata', 'name')}{made[each.text('kind')]}" for each in manifests if each.text("kind") in made
    ]
    if target is not None and names and not any(_may_equal(target.scalar or "", name) for name in names):
        yield target, f"none of these files has a {kind or 'Deployment'} called {target.scalar}", "write its name"


def _undrained(budget: Node, manifests: tuple[Node, ...]) -> Iterator[tuple[Node, str, str]]:
    """(node, what is wrong, what to write) where a PodDisruptionBudget never lets a pod of its workload go."""
    yield from _unmatched_pods(budget, manifests)
    least, wanted = budget.get("spec", "minAvailable"), _labels(budget, "spec", "selector", "matchLabels")
    pods = [each for each in manifests if each.text("kind") in _WORKLOADS[:2]]
    chosen = [each for each in pods if wanted.items() <= _labels(_pod_of(each), "metadata", "labels").items()]
    count = chosen[0].text("spec", "replicas") or "1" if wanted and len(chosen) == 1 else ""
    is_scaled = any(each.text("kind") in ("HorizontalPodAutoscaler", "ScaledObject") for each in manifests)
    given = least.scalar or "" if least is not None and count.isdecimal() and not is_scaled else ""
    if least is not None and (given == "100%" or (given.isdecimal() and int(given) >= int(count))):
        yield least, f"of {count} pods it forbids every eviction: no node is drained", "write maxUnavailable: 1"


def _unmatched_pods(policy: Node, manifests: tuple[Node, ...]) -> Iterator[tuple[Node, str, str]]:
    """(node, what is wrong, what to write) where pods have what a policy selects under other keys alone."""
    keys = (key for key in ("podSelector", "endpointSelector", "selector") if policy.get("spec", key, "matchLabels"))
    selector = policy.get("spec", next(keys, ""), "matchLabels")
    wanted = _labels(selector) if selector is not None else {}
    told = [_labels(_pod_of(each), "metadata", "labels") for each in manifests if each.text("kind") in _WORKLOADS]
    is_meant = any({*wanted.values()} <= {*labels.values()} for labels in told)
    if selector is not None and wanted and is_meant and not any(wanted.items() <= each.items() for each in told):
        yield selector, "pods have these values under other keys: it selects none of them", "write their labels"


def _blind_monitor(monitor: Node, manifests: tuple[Node, ...]) -> Iterator[tuple[Node, str, str]]:
    """(node, what is wrong, what to write) where a ServiceMonitor matches no Service of the linted manifests."""
    services = [each for each in manifests if each.text("kind") == "Service"]
    written = [each.source.text[each.offset : each.end] for each in services]
    selector, wanted = monitor.get("spec", "selector"), _labels(monitor, "spec", "selector", "matchLabels")
    if selector is None or not services or re.search(r"include|toYaml|template", "".join(written)):
        return
    told = [_labels(each, "metadata", "labels") for each in services]
    if not any(all(key in each and _may_equal(value, each[key]) for key, value in wanted.items()) for each in told):
        yield selector, "no Service of these files has the labels that are selected: nothing is scraped", "label it"
    matched = [each for each, labels in zip(services, told, strict=True) if wanted and wanted.items() <= labels.items()]
    of_pods = [sorted(_labels(each, "spec", "selector").items()) for each in matched]
    if len(of_pods) > 1 and of_pods[0] in of_pods[1:]:
        yield selector, "it matches several Services of the same pods: each is scraped as often", "select one of them"
    names = [port.text("name") for each in services for port in each.list("spec", "ports")]
    for endpoint in monitor.list("spec", "endpoints"):
        port = endpoint.get("port")
        if port is not None and not any(_may_equal(port.scalar or "", name) for name in names):
            yield port, f"no port of a Service here is called {port.scalar}", "give the Service's port this name"


def _may_equal(first: str, second: str) -> bool:
    """Whether two texts are equal, or may become equal when a template or variable in them is filled in."""
    is_open = [re.search(r"\{\{|\$", each) is not None for each in (first, second)]
    filled = (re.sub(r"\\\$(_template_|__+|\S*)|\\\{.*\\\}", ".*", re.escape(each)) for each in (first, second))
    matches = re.fullmatch(next(filled), second) or re.fullmatch(next(filled), first)
    return first == second or (bool(first and second) and (all(is_open) or matches is not None))


_DEFAULT = re.compile(r"\$\{\w+:?-([^}]*)\}")


def _asks_for_key(server: StartedServer, context: Context) -> bool:
    """Whether the server requires an API key, or may; a variable with an empty default gives none."""
    given = server.env.get(_KEY)
    default = _DEFAULT.fullmatch(given.text) if given is not None else None
    is_empty = given is not None and (not given.text or (default is not None and not default[1]))
    is_elsewhere = server.may_have_variable(_KEY) and not is_empty
    is_read = server.runs in ("compose", "kubernetes", "docker") and len(server.words) > 2
    is_hidden = context.names_api_key and not (is_read and not has_open_words(server))
    asks_clients = other_value(context.parsed_args(server).args, "--ssl-cert-reqs") == "2"
    return is_elsewhere or asks_clients or is_hidden or bool(flag_word(server, "--api-key", "--config"))


@checks(StartedServer, "api-open")
def published_without_key(server: StartedServer, context: Context) -> Findings:
    """A server reachable from other machines by a host port, without an API key or with a publicly known one."""
    given = server.env.get(_KEY)
    default = _DEFAULT.fullmatch(given.text) if given is not None else None
    if given is not None and default is not None and default[1]:
        message = f"without {_KEY} the key is {default[1]}, which whoever reads this file knows"
        yield finding("api-open", server.place_of(given), message, "leave its default out: ${VLLM_API_KEY:?}")
    for place in _open_places(server, context) if not _asks_for_key(server, context) else ():
        message = "other machines reach the API, and the server asks for no key"
        suggestion = "set VLLM_API_KEY from a secret store, or publish it on 127.0.0.1 alone"
        yield finding("api-open", place, message, suggestion)
        return


def _open_places(server: StartedServer, context: Context) -> Iterator[Place]:
    """Where a file makes the server's port reachable from other machines: published ports, or --host."""
    yield from (published.place for published in server.published if published.is_open)
    is_on_host = server.runs in ("shell", "systemd") and not server.in_container
    is_on_modal = "modal" in context.platform_signs and server.place.path.endswith(".py")  # another rule is about it
    is_on_host = (
        is_on_host and not is_on_modal and not re.search(r"values[\w.-]*\.ya?ml$|/templates/", server.place.path)
    )  # of a chart
    if is_on_host and other_value(context.parsed_args(server).args, "--host") in _ALL_ADDRESSES:
        yield flag_place(server, "--host")
