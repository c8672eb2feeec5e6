"""Kubernetes' AdmissionReview (admission.k8s.io/v1): the request and the response."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any, Literal

from legroom.errors import LegroomError
from legroom.exports.gate_manifests import WORKLOADS
from legroom.records import dataclass

Mode = Literal["warn", "enforce"]
OWN_PREFIX = "legroom/"
SWITCH = "legroom/gate"
"""Label or annotation: `off` skips the object, `warn` and `enforce` choose the mode for it."""
_ACCOUNT = "system:serviceaccount:"
_OWN = "(deployment|replicaset|statefulset|daemon-set|replication|job|cronjob)-controller"
_CONTROLLERS = re.compile(f"system:kube-controller-manager|{_ACCOUNT}kube-system:{_OWN}")
_OPERATORS = {"leaderworkerset.x-k8s.io": "lws", "ray.io": "ray"}
"""What the service account of an API group's controller has in its name."""
_VERSION = "admission.k8s.io/v1"
_IRRELEVANT_FIELDS = frozenset(
    {"replicas", "selector", "strategy", "updateStrategy", "revisionHistoryLimit", "minReadySeconds", "paused"}
    | {"progressDeadlineSeconds", "minReplicas", "maxReplicas", "nodeName"}
)
"""Fields of a spec that do not change how its server starts."""
_WARNING_CHARACTERS = 250  # The API server truncates warnings above 256 characters.
_MAX_WARNINGS = 12  # The API server drops warnings beyond 4,096 characters in total, which 16 of 250 reach.


@dataclass(frozen=True)
class AdmissionRequest:
    """What Kubernetes asks: an operation on one object, as it will be (`new`) and as it was (`old`)."""

    uid: str
    operation: str
    kind: str
    namespace: str
    new: Mapping[str, Any]
    old: Mapping[str, Any]
    creator: str
    """The user or service account that sends the object, as the API server has authenticated it."""

    @property
    def switch(self) -> str:
        """The value of the object's label or annotation `legroom/gate`, which switches its review; empty if none."""
        return next((value for owner in _annotations_and_labels(self.new) if (value := owner.get(SWITCH))), "")

    @property
    def is_owned(self) -> bool:
        """Whether a controller made this object for an owner that was reviewed; as anybody can write ownerReferences,
        its sender must be that controller."""
        owners = _mapping_or_empty(self.new.get("metadata")).get("ownerReferences")
        return any(
            owner.get("controller") is True
            and owner.get("kind") in WORKLOADS.get(group := str(owner.get("apiVersion")).rpartition("/")[0], ())
            and self._is_by_controller(group)
            for owner in (owners if isinstance(owners, list) else ())
            if isinstance(owner, Mapping)
        )

    def _is_by_controller(self, group: str) -> bool:
        """Whether the sender is a controller for owners of API `group`: one of Kubernetes' own, or an operator's
        service account, by name, of another namespace. Argo CD and Helm are not: they send what people wrote."""
        namespace, _, account = self.creator.removeprefix(_ACCOUNT).partition(":")
        is_operator = group in _OPERATORS and _OPERATORS[group] in account and namespace != self.namespace
        return is_operator or _CONTROLLERS.fullmatch(self.creator) is not None

    @property
    def is_deleted(self) -> bool:
        """Whether nothing will run: DELETE, CONNECT, or an object already being deleted."""
        ends = _mapping_or_empty(self.new.get("metadata")).get("deletionTimestamp")
        return self.operation in ("DELETE", "CONNECT") or bool(ends)


class NotAReview(LegroomError):
    """The body is not an AdmissionReview with a request."""


def parse_review(document: Any) -> AdmissionRequest:
    """The request of an AdmissionReview document; NotAReview for any other JSON value."""
    review = _mapping_or_empty(document)
    request = _mapping_or_empty(review.get("request"))
    if review.get("kind") != "AdmissionReview" or review.get("apiVersion") != _VERSION or not request:
        raise NotAReview(f"this is no AdmissionReview of {_VERSION} with a request", "only an API server asks here")
    uid = request.get("uid")
    if not isinstance(uid, str) or not 0 < len(uid) <= 128:
        raise NotAReview("the review's request has no uid", "only an API server asks here")
    kind = _mapping_or_empty(request.get("kind"))
    operation, namespace = (str(request.get(name) or "") for name in ("operation", "namespace"))
    new, old = (_mapping_or_empty(request.get(name)) for name in ("object", "oldObject"))
    creator = str(_mapping_or_empty(request.get("userInfo")).get("username") or "")
    return AdmissionRequest(uid, operation, str(kind.get("kind") or ""), namespace, new, old, creator)


def startup_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest that decide whether its server starts; without names, labels and replica counts."""
    spec = _mapping_or_empty(manifest.get("spec"))
    kept = {key: value for key, value in spec.items() if key not in _IRRELEVANT_FIELDS}
    template = _mapping_or_empty(kept.get("template"))
    if isinstance(template.get("metadata"), Mapping):
        kept["template"] = {**template, "metadata": _own_metadata(template)}
    named = {name: manifest.get(name) for name in ("apiVersion", "kind")}
    return named | {"metadata": _own_metadata(manifest), "spec": kept}


def review_response(uid: str, allowed: bool, message: str = "", warnings: Sequence[str] = ()) -> bytes:
    """The AdmissionReview answer as JSON, with `message` if refused; long warnings are split, into at most 12."""
    response: dict[str, Any] = {"uid": uid, "allowed": allowed}
    if message and not allowed:
        response["status"] = {"status": "Failure", "code": 422, "reason": "Invalid", "message": message}
    if warnings:
        split = [wrap(f"legroom: {text}", _WARNING_CHARACTERS, break_on_hyphens=False) for text in warnings]
        response["warnings"] = [part for parts in split for part in parts][:_MAX_WARNINGS]
    return json.dumps({"apiVersion": _VERSION, "kind": "AdmissionReview", "response": response}).encode()


def _own_metadata(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The `metadata` of an object, reduced to the annotations and labels that begin with `legroom/`."""
    metadata = _mapping_or_empty(manifest.get("metadata"))
    both = ((name, _mapping_or_empty(metadata.get(name))) for name in ("annotations", "labels"))
    return {name: {key: own[key] for key in own if str(key).startswith(OWN_PREFIX)} for name, own in both}


def _annotations_and_labels(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The annotations and labels of the object, its pod template, its job template, and that template's pods."""
    spec = _mapping_or_empty(manifest.get("spec"))
    job = _mapping_or_empty(spec.get("jobTemplate"))
    pods_of_job = _mapping_or_empty(job.get("spec")).get("template")
    for owner in (manifest, spec.get("template"), job, pods_of_job):
        metadata = _mapping_or_empty(_mapping_or_empty(owner).get("metadata"))
        yield _mapping_or_empty(metadata.get("annotations"))
        yield _mapping_or_empty(metadata.get("labels"))


def _mapping_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
