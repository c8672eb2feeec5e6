"""Servers that cannot be reached where their file publishes them, or by everybody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from legroom.deployments.source_text import Place
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node
from legroom.lint.rule import Context, Findings, checks, finding, flag_place, flag_word, has_open_words
from legroom.vllm.args import other_value, served_port

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ALL_ADDRESSES = ("0.0.0.0", "::")
_PUBLISHING_KINDS = ("Ingress", "Route", "HTTPRoute")


@checks(StartedServer, "port-unreachable")
def published_ports(server: StartedServer, context: Context) -> Findings:
    """A container that publishes another port than the server's, or whose server listens for itself alone."""
    args = context.parsed_args(server).args
    if server.launcher or not server.words or not server.in_container or flag_word(server, "--config"):
        return
    declared = server.declared_port
    if declared is not None and declared.port.isdecimal() and served_port(args) not in ("", declared.port):
        message = f"containerPort is {declared.port}, and the server listens on {served_port(args)}"
        found = finding("port-unreachable", declared.place, message, f"write containerPort: {served_port(args)}")
        yield replace(found, severity="note")
    host = other_value(args, "--host") or ""
    is_published = server.published or any(probe.port for probe in server.probes if probe.kind == "readiness")
    if host in _LOOPBACK and is_published:
        message = f"--host {host} listens inside the container alone: nothing outside reaches the server"
        yield finding("port-unreachable", flag_place(server, "--host"), message, "write --host 0.0.0.0")
    port, ports = served_port(args), [published.port for published in server.published]
    if not ports or not port.isdecimal() or not all(map(str.isdecimal, ports)) or port in ports:
        return
    if not has_open_words(server, ("port",)) and len(ports) == 1:
        message = f"port {ports[0]} of the container is published, and the server listens on {port}"
        yield finding(
            "port-unreachable", server.published[0].place, message, f"publish {port}, or add --port {ports[0]}"
        )


@checks(Node, "port-unreachable")
def service_of_another_port(document: Node, context: Context) -> Findings:
    """A Service that forwards to another port than the one server of its pods listens on."""
    selector = {key: value.scalar for key, value in document.items("spec", "selector")}
    if document.text("kind") != "Service" or not selector:
        return
    for workload in context.documents:
        labels = {key: value.scalar for key, value in workload.items("spec", "template", "metadata", "labels")}
        containers = workload.list("spec", "template", "spec", "containers")
        if not selector.items() <= labels.items() or len(containers) != 1:
            continue
        read_as = f"Kubernetes {workload.text('kind')} {workload.text('metadata', 'name')}".rstrip()
        servers = [server for server in context.servers if server.read_as == read_as]
        names = {port.text("name"): port.text("containerPort") for port in containers[0].list("ports")}
        targets = [
            (port, names.get(port.text("targetPort"), port.text("targetPort") or port.text("port")))
            for port in document.list("spec", "ports")
        ]
        if len(servers) != 1 or servers[0].launcher or has_open_words(servers[0], ("port",)):
            continue
        served = served_port(context.parsed_args(servers[0]).args)
        if targets and served not in (target for _, target in targets) and flag_word(servers[0], "--config") is None:
            place, target = document.source.place(targets[0][0].offset), targets[0][1]
            if target.isdecimal() and served.isdecimal():
                message = f"the Service forwards to port {target}, and the server listens on {served}"
                yield finding("port-unreachable", place, message, f"write targetPort: {served}")


@checks(Node, "api-open")
def published_by_manifest(document: Node, context: Context) -> Findings:
    """A Service, an Ingress or a Route that publishes a server of the same file that has no key."""
    kind = document.get("kind")
    if not context.servers or context.names_api_key or kind is None:
        return
    service = document.get("spec", "type") if kind.scalar == "Service" else None
    shown = service if service is not None and service.scalar in ("LoadBalancer", "NodePort") else None
    shown = kind if kind.scalar in _PUBLISHING_KINDS else shown
    if shown is not None:
        message = f"a {shown.scalar} publishes the API, and the server asks for no key"
        yield finding("api-open", document.source.place(shown.offset), message, "set VLLM_API_KEY from a Secret")


@checks(StartedServer, "api-open")
def published_without_key(server: StartedServer, context: Context) -> Findings:
    """A server without a key on a port of the host that other machines reach."""
    if context.names_api_key or server.may_have_variable("VLLM_API_KEY") or flag_word(server, "--api-key", "--config"):
        return
    for place in _open_places(server, context):
        message = "other machines reach the API, and the server asks for no key"
        suggestion = "set VLLM_API_KEY from a secret store, or publish it on 127.0.0.1 alone"
        yield finding("api-open", place, message, suggestion)
        return


def _open_places(server: StartedServer, context: Context) -> Iterator[Place]:
    """Where a file opens the server's port to other machines."""
    yield from (published.place for published in server.published if published.is_open)
    is_on_host = server.runs in ("shell", "systemd") and not server.in_container
    if is_on_host and other_value(context.parsed_args(server).args, "--host") in _ALL_ADDRESSES:
        yield flag_place(server, "--host")
