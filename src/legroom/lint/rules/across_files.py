"""What one file says of the servers that another starts: addresses, names of models, cards, volumes for weights."""

import re
from dataclasses import replace

from legroom.deployments.container_images import kubernetes_bytes
from legroom.deployments.file_kinds import kind_of
from legroom.deployments.subjects import StartedServer
from legroom.deployments.yaml_nodes import Node
from legroom.facts.model_sources import is_hub_id
from legroom.lint.linted_parts import NamedAddress, NamedObject
from legroom.lint.rule import Context, Findings, checks, finding, flag_word, has_open_words, known_port, similarity
from legroom.lint.rules.server_start import NO_CARD_HELPS
from legroom.lint.server_plan import file_plan_of, plan_of_server
from legroom.units import human_bytes
from legroom.vllm.args import other_values

_COMPOSE = "compose service "
_LIKE = 0.7  # Of two names that mean one object, such as vllm-deploy and vllm-deployment.


@checks(NamedAddress, "port-unreachable")
def address_without_server(address: NamedAddress, context: Context) -> Findings:
    """A URL, scrape target or upstream with a port on which the named service does not listen."""
    services = [pair for each in context.manifests for pair in each.items("services")]
    servers, name = _servers_at(address.host, context), _service_at(address.host, context)
    ports = {known_port(each, context.parsed_args(each).args) for each in servers}
    is_told = all(map(str.isdecimal, ports)) and not any(flag_word(each, "--config") for each in servers)
    forwarding = [each for each in context.manifests if each.text("kind") == "Service"]
    forwarding = [each for each in forwarding if each.text("metadata", "name") == address.host]
    offered = {port.text("port") for each in forwarding for port in each.list("spec", "ports")}
    if address.port in ports | offered:
        return
    if servers and is_told and not address.is_open:
        message = f"{address.host} listens on {' or '.join(sorted(ports))} inside its network, not on {address.port}"
        yield finding("port-unreachable", address.place, message, f"write {address.host}:{min(ports)}")
    elif offered and all(map(str.isdecimal, offered)) and not servers:
        message = f"the Service {address.host} has port {' and '.join(sorted(offered))}, and not {address.port}"
        found = finding("port-unreachable", address.place, message, f"write {address.host}:{min(offered)}")
        yield replace(found, severity="note")
    is_named = "vllm" in name and not any("$" in service.text("container_name") for _, service in services)
    if services and not forwarding and name not in dict(services) and is_named and not address.is_open:
        message = f"no service of these files is called {address.host}"
        suggestion = "write the name of the server's service"
        yield replace(finding("port-unreachable", address.place, message, suggestion), severity="note")


@checks(NamedAddress, "model-name")
def model_of_another_name(address: NamedAddress, context: Context) -> Findings:
    """A client that asks for a model under a name that none of the servers has."""
    servers = list(context.fleet) if address.host == "localhost" else _servers_at(address.host, context)
    is_open = any(has_open_words(each, ("model", "served_model_name")) for each in servers)
    names = {name for each in servers for name in _served_names(each, context)}
    if address.model and names and "" not in names and not is_open and address.model not in names:
        message = f"a client asks for {address.model}, and the servers here are called {', '.join(sorted(names))}"
        found = finding("model-name", address.place, message, "write the name of --served-model-name")
        is_beside = any(each.place.path == address.place.path for each in servers)  # the answer is 404
        yield replace(found, severity="warning") if is_beside else found


@checks(NamedObject, "port-unreachable")
def object_without_manifest(named: NamedObject, context: Context) -> Findings:
    """A command for a Kubernetes object that no linted manifest makes, where one of its kind has a similar name."""
    made = {each.text("metadata", "name") for each in context.manifests if each.text("kind") == named.kind}
    is_like = any(similarity(name, named.name) >= _LIKE for name in made)
    is_open = "" in made or any("$" in name or "{{" in name for name in made)
    if not is_open and named.name not in made and is_like:
        message = f"no {named.kind} of these files is called {named.name}: there is {', '.join(sorted(made)[:3])}"
        found = finding("port-unreachable", named.place, message, f"write {min(made)}", len(named.name))
        yield replace(found, severity="note")


def _service_at(host: str, context: Context) -> str:
    """The name of the Compose service whose `container_name` is `host`; `host` itself where none has that."""
    services = [pair for each in context.manifests for pair in each.items("services")]
    return {service.text("container_name"): name for name, service in services}.get(host, host)


def _servers_at(host: str, context: Context) -> list[StartedServer]:
    """The servers that other containers of a Compose file reach at this host name."""
    return [each for each in context.fleet if each.read_as == f"{_COMPOSE}{_service_at(host, context)}"]


def _served_names(server: StartedServer, context: Context) -> tuple[str, ...]:
    """The names that requests may give as the server's model, with its adapters; empty text if the file has none."""
    args = context.parsed_args(server).args
    adapters = [each.partition("=")[0] for each in other_values(args, "--lora-modules") or ()]
    return (*(other_values(args, "--served-model-name") or (args.model,)), *adapters)


@checks(StartedServer, "does-not-fit")
def server_on_card_named_elsewhere(server: StartedServer, context: Context) -> Findings:
    """A server without a GPU of its own that fits none of those its file names, or not the one all files name."""
    is_example = kind_of(server.place.path, "") == "document"  # it may name a card of another example
    if not context.named_cards or server.gpu_names or not server.runs_on_gpus or is_example:
        return
    named = replace(server, gpu_names=tuple(card.name for card in context.named_cards), memory_limit_bytes=None)
    own = file_plan_of(named, context.release_of(server))
    card, plan = context.named_cards[0], own.plans[0] if own is not None and own.plans else None
    failure = plan.memory.failure if plan is not None else None
    is_of_card = failure is None or failure.id not in NO_CARD_HELPS or "capab" in failure.message
    if plan is not None and own is not None and own.verdict == "does_not_fit" and is_of_card:
        reason = failure.message if failure else plan.reason
        message = f"it does not fit {card.name}, which {card.place.path}:{card.place.line} names: {reason}"
        found = finding("does-not-fit", server.place, message, "legroom plan --file FILE --gpu NAME shows what does")
        yield replace(found, severity="warning" if card.place.path == server.place.path else "note")


@checks(Node, "path-missing")
def claim_below_weights(document: Node, context: Context) -> Findings:
    """A PersistentVolumeClaim that is smaller than the checkpoint of the server whose pods mount it."""
    name, storage = document.text("metadata", "name"), document.get("spec", "resources", "requests", "storage")
    if document.text("kind") != "PersistentVolumeClaim" or storage is None or not name:
        return
    for workload in context.manifests:
        read_as = f"Kubernetes {workload.text('kind')} {workload.text('metadata', 'name')}"
        claims = re.findall(r"claimName:\s*[\"']?([\w.-]+)", workload.source.text[workload.offset : workload.end])
        servers = [each for each in context.fleet if each.read_as == read_as and claims == [name]]
        yield from _below_weights(storage, servers, context)


def _below_weights(storage: Node, servers: list[StartedServer], context: Context) -> Findings:
    """A finding if the claim's size (`storage`) is below the largest Hub checkpoint of these servers."""
    plans = [plan_of_server(each, context.release_of(each)) for each in servers]
    of_hub = [plan for plan in plans if plan is not None and is_hub_id(plan.plan.settings.given.model)]
    size, needed = kubernetes_bytes(storage.scalar or ""), max((plan.checkpoint_bytes for plan in of_hub), default=0)
    if size and needed > size:
        message = f"the volume holds {human_bytes(size)}, and the checkpoint has {human_bytes(needed)}"
        place = storage.source.place(storage.offset)
        yield finding("path-missing", place, message, "ask for more than the weights take")


@checks(Node, "path-missing", "rollout-stuck")
def claims_of_several_pods(document: Node, context: Context) -> Findings:
    """A production-stack volume below its model's size; a ReadWriteOnce claim that several workloads mount."""
    for spec in document.list("servingEngineSpec", "modelSpec"):
        storage, url = spec.get("pvcStorage"), spec.get("modelURL")
        if storage is not None and url is not None:
            place = document.source.place(url.offset)
            yield from _below_weights(storage, [each for each in context.fleet if each.place == place], context)
    modes = document.get("spec", "accessModes") if document.text("kind") == "PersistentVolumeClaim" else None
    mounted = re.compile(rf"(?m)claimName:\s*[\"']?{re.escape(document.text('metadata', 'name'))}[\"']?\s*$")
    workloads = [each for each in context.manifests if modes and each.text("kind") in ("Deployment", "StatefulSet")]
    mounting = [each for each in workloads if mounted.search(each.source.text[each.offset : each.end])]
    users = len({each.text("metadata", "name") for each in mounting})  # of one name: alternatives
    if modes is not None and [each.scalar for each in modes.list()] == ["ReadWriteOnce"] and users > 1:
        message = f"{users} workloads mount it, and one node at a time does: pods on other nodes wait"
        found = finding("rollout-stuck", document.source.place(modes.offset), message, "write ReadWriteMany")
        yield replace(found, severity="note")
