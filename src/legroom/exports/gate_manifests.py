"""`legroom export gate`: the manifests of the admission webhook."""

from __future__ import annotations

import argparse
import base64
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.exports.deploy.cluster.pod import READ_ONLY_CONTAINER, one_pod_per_host
from legroom.exports.deploy.yaml_text import Commented, manifest, yaml_text
from legroom.exports.export_request import MARK, ExportedFile, ExportRequest
from legroom.facts.gpus import gpu
from legroom.version import __version__

if TYPE_CHECKING:
    from legroom.exports.gate_certificates import KeyPair

NAME = "gate"
HELP = "the admission webhook: Deployment, Service, webhook configuration, certificates"
NAME_IN_CLUSTER = "legroom-gate"
_SELECTOR = {"app.kubernetes.io/name": NAME_IN_CLUSTER}
"""The label of every object of the gate, by which its pods are found."""
_PORT = 9443
_USER = 65532  # `nonroot` of the usual minimal images.
_TIMEOUT_S = 5
_DEADLINE_S = _TIMEOUT_S - 1
WORKLOADS: Mapping[str, Mapping[str, str]] = {
    "": {"Pod": "pods", "ReplicationController": "replicationcontrollers"},
    "apps": {kind: f"{kind.lower()}s" for kind in ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet")},
    "batch": {"Job": "jobs", "CronJob": "cronjobs"},
    "leaderworkerset.x-k8s.io": {"LeaderWorkerSet": "leaderworkersets"},
    "ray.io": {"RayCluster": "rayclusters"},
}
"""By API group, the kinds whose review sees the whole pod, with their resources: what these create is not reviewed
again. What any other kind creates is reviewed itself."""
_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((group, tuple(kinds.values())) for group, kinds in WORKLOADS.items()),
    ("serving.kserve.io", ("inferenceservices", "llminferenceservices")),
    ("kubeai.org", ("models",)),
)
"""The resources of each API group that the webhook receives."""
_LABEL = "legroom/gate"
_SYSTEM = ("kube-system", "kube-public", "kube-node-lease")


def add_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--namespace", metavar="NAME", default="legroom", help="where it goes (default: %(default)s)")
    about = "an image with legroom[gate] in it (default: %(default)s)"
    group.add_argument("--image", metavar="NAME", default=f"legroom:{__version__}", help=about)
    about = "of namespaces that do not choose one (default: warn)"
    group.add_argument("--mode", choices=("warn", "enforce"), default="warn", help=about)
    about = f"only namespaces with the label {_LABEL}; else all but {_LABEL}=off"
    group.add_argument("--opt-in", action="store_true", help=about)
    group.add_argument("--default-gpu", metavar="NAME", default="", help="the GPU of a pod that names none")
    about = "who makes them: cert-manager, or this command (default: cert-manager)"
    group.add_argument("--certificates", choices=("cert-manager", "self"), default="cert-manager", help=about)
    group.add_argument("--ca-file", metavar="FILE", help="for --certificates self: where the authority is kept")
    group.add_argument("--replicas", metavar="N", type=int, default=2, help="how many (default: %(default)s)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """The manifests of the admission webhook `legroom gate`, and a Dockerfile for its image."""
    parser = argparse.ArgumentParser()
    add_options(parser.add_argument_group())
    options = {**vars(parser.parse_args([])), **request.options}
    namespace = str(options["namespace"])
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        raise LegroomError(f"--namespace {namespace!r} is not a name", "use lowercase letters, digits and dashes")
    if not 1 <= options["replicas"] <= 50:
        raise LegroomError("--replicas is 1 to 50", "two are enough: one answers while the other is replaced")
    if options["default_gpu"]:
        gpu(options["default_gpu"])
    own, about = _self_signed_certificates(options, namespace), _metadata(namespace)
    no_token = Commented("It asks the API server for nothing, and has no rights.", False)
    ports = [{"name": "https", "port": 443, "targetPort": "https"}]
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": _SELECTOR}}
    documents = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace, "labels": {_LABEL: "off"}}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": about, "automountServiceAccountToken": no_token},
        *(_tls_secret(namespace, own[1]) if own else _cert_manager_objects(namespace)),
        _deployment(options, namespace),
        manifest("v1", "Service", about, {"selector": _SELECTOR, "ports": ports}),
        manifest("policy/v1", "PodDisruptionBudget", about, budget),
        _network_policy(namespace),
    ]
    head = (
        f"{MARK} {__version__} export gate. Apply this first, and the webhook once the pods are ready.",
        "Everything fails open: a gate that is not there lets every manifest through.",
    )
    webhook = yaml_text(_webhook_config(options, namespace, own[0] if own else None), head=(f"{MARK} {__version__}.",))
    return (
        ExportedFile("gate.yaml", yaml_text(*documents, head=head)),
        ExportedFile("webhook.yaml", webhook),
        ExportedFile("Dockerfile", _DOCKERFILE, beside=True),
    )


_DOCKERFILE = f"""\
# {MARK} {__version__}: an image for the gate. docker build -t legroom:{__version__} .
FROM python:3.12-slim
RUN pip install --no-cache-dir 'legroom[gate]=={__version__}'
USER {_USER}:{_USER}
ENTRYPOINT ["legroom"]
"""


def _self_signed_certificates(options: Mapping[str, Any], namespace: str) -> tuple[KeyPair, KeyPair] | None:
    """(CA: a new one or that of --ca-file; the webhook's certificate); None if cert-manager issues them."""
    if options["certificates"] != "self":
        if options.get("ca_file"):
            raise LegroomError("--ca-file belongs to --certificates self", "cert-manager keeps its own authority")
        return None
    from legroom.exports.gate_certificates import new_authority, new_certificate, stored_authority

    authority = stored_authority(options["ca_file"]) if options.get("ca_file") else new_authority()
    return authority, new_certificate(authority, gate_dns_names(namespace))


def gate_dns_names(namespace: str) -> tuple[str, ...]:
    """The in-cluster DNS names of the webhook's Service, for its certificate."""
    name = f"{NAME_IN_CLUSTER}.{namespace}"
    return f"{name}.svc", name, f"{name}.svc.cluster.local"


def _metadata(namespace: str, name: str = NAME_IN_CLUSTER) -> dict[str, Any]:
    """Name, namespace and labels of one of the gate's objects."""
    return {"name": name, "namespace": namespace, "labels": _SELECTOR}


def _tls_secret(namespace: str, pair: KeyPair) -> list[dict[str, Any]]:
    """The Secret with the webhook's certificate and key, as a list of one object."""
    parts = {"tls.crt": pair.certificate, "tls.key": pair.key}
    data = {name: base64.b64encode(pem).decode() for name, pem in parts.items()}
    metadata = _metadata(namespace, f"{NAME_IN_CLUSTER}-tls")
    return [{"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}]


def _cert_manager_objects(namespace: str) -> list[dict[str, Any]]:
    """The Issuer and Certificate of cert-manager, which makes and renews the Secret."""
    about = _metadata(namespace)
    spec = {
        "secretName": f"{NAME_IN_CLUSTER}-tls",
        "dnsNames": list(gate_dns_names(namespace)),
        "issuerRef": {"name": NAME_IN_CLUSTER, "kind": "Issuer"},
        "duration": "2160h",
        "renewBefore": "720h",
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
    }
    specs = {"Issuer": {"selfSigned": {}}, "Certificate": spec}
    return [manifest("cert-manager.io/v1", kind, about, each) for kind, each in specs.items()]


def _deployment(options: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """The Deployment of the webhook, with its certificate mounted."""
    user = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), _USER)
    certificate = {"name": "tls", "secret": {"secretName": f"{NAME_IN_CLUSTER}-tls"}}
    pod = {
        "serviceAccountName": NAME_IN_CLUSTER,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "topologySpreadConstraints": [one_pod_per_host(_SELECTOR)],
        "securityContext": {"runAsNonRoot": True, **user, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(options)],
        "volumes": [certificate, {"name": "scratch", "emptyDir": {"sizeLimit": "64Mi"}}],
    }
    scrape = {"prometheus.io/scrape": "true", "prometheus.io/port": str(_PORT), "prometheus.io/scheme": "https"}
    spec = {
        "replicas": options["replicas"],
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": _SELECTOR},
        "template": {"metadata": {"labels": _SELECTOR, "annotations": scrape}, "spec": pod},
    }
    return manifest("apps/v1", "Deployment", _metadata(namespace), spec)


def _container(options: Mapping[str, Any]) -> dict[str, Any]:
    """The webhook's container: its command, port, probes and certificate mount."""
    words = ["gate", "--port", str(_PORT), "--mode", options["mode"], "--deadline", str(_DEADLINE_S)]
    if options["default_gpu"]:
        words += ["--default-gpu", options["default_gpu"]]
    check = {"port": "https", "scheme": "HTTPS"}
    leaving = "The API server learns that the pod is leaving; then what is under way is answered."
    wait = {"exec": {"command": ["python", "-c", "import time; time.sleep(5)"]}}
    certificate = {"name": "tls", "mountPath": "/etc/legroom/tls", "readOnly": True}
    return {
        "name": "gate",
        "image": options["image"],
        "command": ["legroom"],
        "args": words,
        "env": [{"name": "HOME", "value": "/scratch"}, {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}],
        "ports": [{"name": "https", "containerPort": _PORT}],
        "startupProbe": {"httpGet": {"path": "/readyz", **check}, "periodSeconds": 2, "failureThreshold": 30},
        "livenessProbe": {"httpGet": {"path": "/healthz", **check}, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": {"httpGet": {"path": "/readyz", **check}, "periodSeconds": 5, "failureThreshold": 2},
        "lifecycle": {"preStop": Commented(leaving, wait)},
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "1536Mi"}},
        "securityContext": READ_ONLY_CONTAINER,
        "volumeMounts": [certificate, {"name": "scratch", "mountPath": "/scratch"}],
    }


def _network_policy(namespace: str) -> dict[str, Any]:
    """A NetworkPolicy that allows ingress to the webhook's port from anywhere, and no egress."""
    anybody = "API servers have no labels to name them by; what they send is all that is answered."
    spec = {
        "podSelector": {"matchLabels": _SELECTOR},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": Commented(anybody, [{"ports": [{"protocol": "TCP", "port": _PORT}]}]),
        "egress": Commented("It asks nobody for anything. With --hub, allow DNS and port 443.", []),
    }
    return manifest("networking.k8s.io/v1", "NetworkPolicy", _metadata(namespace), spec)


def _webhook_config(options: Mapping[str, Any], namespace: str, authority: KeyPair | None) -> dict[str, Any]:
    """The ValidatingWebhookConfiguration; namespace labels choose between enforcing and warning."""
    metadata: dict[str, Any] = {"name": NAME_IN_CLUSTER, "labels": _SELECTOR}
    if authority is None:
        metadata["annotations"] = {"cert-manager.io/inject-ca-from": f"{namespace}/{NAME_IN_CLUSTER}"}
    other = "warn" if options["mode"] == "enforce" else "enforce"
    usual = {"key": _LABEL, "operator": "NotIn", "values": ["off", other]}
    if options["opt_in"]:
        usual = {"key": _LABEL, "operator": "In", "values": ["on", options["mode"]]}
    chosen = {"key": _LABEL, "operator": "In", "values": [other]}
    hooks = [_webhook(options["mode"], [usual], namespace, authority), _webhook(other, [chosen], namespace, authority)]
    about = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration"}
    return {**about, "metadata": metadata, "webhooks": hooks}


def _webhook(mode: str, namespaces: list[dict[str, Any]], namespace: str, authority: KeyPair | None) -> dict[str, Any]:
    """One webhook of `mode` `warn` or `enforce`; `namespaces`: label expressions of those that it reviews."""
    service = {"name": NAME_IN_CLUSTER, "namespace": namespace, "path": f"/validate/{mode}", "port": 443}
    client: dict[str, Any] = {"service": service}
    if authority is not None:
        client["caBundle"] = base64.b64encode(authority.certificate).decode()
    left_alone = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [*_SYSTEM, namespace]}
    any_version = {"apiVersions": ["*"], "operations": ["CREATE", "UPDATE"]}
    return {
        "name": f"{mode}.gate.legroom.internal",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": Commented("A gate that does not answer lets everything through.", "Ignore"),
        "timeoutSeconds": _TIMEOUT_S,
        "matchPolicy": "Equivalent",
        "namespaceSelector": {"matchExpressions": [left_alone, *namespaces]},
        "objectSelector": {"matchExpressions": [{"key": _LABEL, "operator": "NotIn", "values": ["off"]}]},
        "rules": [
            {"apiGroups": [group], **any_version, "resources": list(resources), "scope": "Namespaced"}
            for group, resources in _KINDS
        ],
        "clientConfig": client,
    }
