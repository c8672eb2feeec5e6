"""Kubernetes' question and its answer: AdmissionReview of admission.k8s.io/v1."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from legroom.errors import LegroomError
from legroom.records import dataclass

Mode = Literal["warn", "enforce"]
OWN_PREFIX = "legroom/"
SWITCH = "legroom/gate"
"""A label or an annotation: `off` leaves an object alone, `warn` and `enforce` choose the mode for it."""
_VERSION = "admission.k8s.io/v1"
_POD_OWNERS = frozenset(
    {
        "ReplicaSet",
        "StatefulSet",
        "Deployment",
        "DaemonSet",
        "Job",
        "CronJob",
        "LeaderWorkerSet",
        "RayCluster",
        "ReplicationController",
    }
)
"""What they make was looked at when they came."""
_DECIDES_NOTHING = (
    "replicas",
    "selector",
    "strategy",
    "updateStrategy",
    "revisionHistoryLimit",
    "minReadySeconds",
    "progressDeadlineSeconds",
    "paused",
    "minReplicas",
    "maxReplicas",
    "nodeName",
)
"""Of a spec: what changes while the server stays the same."""
_WARNING_CHARACTERS = 250
"""The API server may cut what is longer than 256."""
_MOST_WARNINGS = 12


@dataclass(frozen=True)
class AdmissionRequest:
    """What Kubernetes asks about."""

    uid: str
    operation: str
    kind: str
    namespace: str
    name: str
    new: Mapping[str, Any]
    old: Mapping[str, Any]

    @property
    def switch(self) -> str:
        """What the object says about the gate itself, if anything."""
        return next((value for owner in _described(self.new) if (value := owner.get(SWITCH))), "")

    @property
    def is_owned(self) -> bool:
        """Whether an object that was looked at already made this one."""
        owners = _mapping(self.new.get("metadata")).get("ownerReferences")
        return any(
            owner.get("controller") is True and owner.get("kind") in _POD_OWNERS
            for owner in (owners if isinstance(owners, list) else ())
            if isinstance(owner, Mapping)
        )

    @property
    def is_leaving(self) -> bool:
        return self.operation in ("DELETE", "CONNECT") or bool(
            _mapping(self.new.get("metadata")).get("deletionTimestamp")
        )

    @property
    def is_unchanged(self) -> bool:
        """An update that leaves the server as it is: a scaling, a label, a finalizer."""
        return self.operation == "UPDATE" and bool(self.old) and deciding_part(self.new) == deciding_part(self.old)


class NotAReview(LegroomError):
    """A body that no API server sends."""


def admission_request(document: Any) -> AdmissionRequest:
    """The request inside a review."""
    review = _mapping(document)
    request = _mapping(review.get("request"))
    if review.get("kind") != "AdmissionReview" or review.get("apiVersion") != _VERSION or not request:
        raise NotAReview(f"this is no AdmissionReview of {_VERSION} with a request", "only an API server asks here")
    uid = request.get("uid")
    if not isinstance(uid, str) or not 0 < len(uid) <= 128:
        raise NotAReview("the review's request has no uid", "only an API server asks here")
    kind = _mapping(request.get("kind"))
    return AdmissionRequest(
        uid,
        str(request.get("operation") or ""),
        str(kind.get("kind") or ""),
        str(request.get("namespace") or ""),
        str(request.get("name") or ""),
        _mapping(request.get("object")),
        _mapping(request.get("oldObject")),
    )


def deciding_part(thing: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an object that decides whether its server starts: what two replicas of it have in common."""
    spec = _mapping(thing.get("spec"))
    kept = {key: value for key, value in spec.items() if key not in _DECIDES_NOTHING}
    template = _mapping(kept.get("template"))
    if isinstance(template.get("metadata"), Mapping):
        kept["template"] = {**template, "metadata": _own_annotations(template)}
    return {
        "apiVersion": thing.get("apiVersion"),
        "kind": thing.get("kind"),
        "metadata": _own_annotations(thing),
        "spec": kept,
    }


def review_answer(uid: str, allowed: bool, message: str = "", warnings: Sequence[str] = ()) -> bytes:
    """The review that goes back."""
    response: dict[str, Any] = {"uid": uid, "allowed": allowed}
    if message and not allowed:
        response["status"] = {"status": "Failure", "code": 422, "reason": "Invalid", "message": message}
    if warnings:
        response["warnings"] = [part for text in warnings for part in _in_pieces(text)][:_MOST_WARNINGS]
    return json.dumps({"apiVersion": _VERSION, "kind": "AdmissionReview", "response": response}).encode()


def _in_pieces(text: str) -> Iterator[str]:
    rest = f"legroom: {text}"
    while len(rest) > _WARNING_CHARACTERS:
        cut = rest.rfind(" ", 0, _WARNING_CHARACTERS)
        cut = cut if cut > 0 else _WARNING_CHARACTERS
        yield rest[:cut]
        rest = rest[cut:].strip()
    yield rest


def _own_annotations(thing: Mapping[str, Any]) -> dict[str, Any]:
    annotations = _mapping(_mapping(thing.get("metadata")).get("annotations"))
    return {"annotations": {key: value for key, value in annotations.items() if str(key).startswith(OWN_PREFIX)}}


def _described(thing: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    template = _mapping(_mapping(thing.get("spec")).get("template"))
    for owner in (thing, template):
        metadata = _mapping(owner.get("metadata"))
        yield _mapping(metadata.get("annotations"))
        yield _mapping(metadata.get("labels"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
