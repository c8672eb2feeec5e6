"""Who a request is of: the API key, a header that a gateway sets, or the address."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from legroom.guard.policy import ClientPolicy

LONGEST_NAME = 128


def client_of(headers: Iterable[tuple[bytes, bytes]], address: str, policy: ClientPolicy) -> str:
    """A name to tell clients apart by; a key never stands in it, only its hash. Header names are in lower case."""
    if policy.by == "none":
        return ""
    named = policy.header.lower().encode()
    key = b""
    for name, value in headers:
        if named and name == named:
            return f"header:{value[:LONGEST_NAME].decode('latin-1')}"
        if name == b"authorization" or (name in (b"x-api-key", b"api-key") and not key):
            key = value.rpartition(b" ")[2]
    if key and policy.by != "address":
        return key_name(key)
    return "" if policy.by == "key" else f"address:{address}"


def key_name(key: bytes) -> str:
    return f"key:{hashlib.sha256(key).hexdigest()[:16]}"


def weights_by_client(weights: Mapping[str, float]) -> dict[str, float]:
    """The policy's weights: it may name a key, a header's value or an address."""
    by_client: dict[str, float] = {}
    for name, weight in weights.items():
        for client in (key_name(name.encode()), f"header:{name}", f"address:{name}"):
            by_client[client] = weight
    return by_client
