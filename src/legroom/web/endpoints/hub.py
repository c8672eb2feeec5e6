"""The one look-up that leaves this machine, and only when it is asked for."""

from __future__ import annotations

from typing import Any, TypedDict

from legroom.errors import LegroomError


class HubDocument(TypedDict):
    id: str
    config: dict[str, Any]
    source: str
    checkpoint_bytes: int | None


def hub(request: dict[str, Any]) -> HubDocument:
    """A model's config.json and what its checkpoint weighs, to be planned with."""
    from legroom.facts.huggingface import fetch
    from legroom.facts.model_sources import is_hub_id

    name = request["id"].strip()
    if not is_hub_id(name):
        raise LegroomError(f"{name!r} is not a Hub id", "a Hub id is owner/name")
    answer = fetch(name)
    return {"id": name, "config": answer.config, "source": answer.source, "checkpoint_bytes": answer.checkpoint_bytes}
