"""What is known of the world: models, GPUs, releases and their flags."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypedDict

from legroom.facts.flags import Kind

_TYPES: dict[Kind, str] = {
    "switch": "boolean",
    "bool": "boolean",
    "optbool": "boolean",
    "int": "integer",
    "human": "integer",
    "float": "number",
    "str": "string",
    "maybe": "string",
    "json": "object",
    "pairs": "object",
    "list:str": "array",
    "list:int": "array",
    "list:float": "array",
}


class ListedModel(TypedDict):
    id: str
    name: str
    ids: list[str]
    parameters: int | None
    quantized_from: str | None


class ListedFlag(TypedDict):
    name: str
    flag: str
    type: str
    default: Any
    choices: list[Any] | None
    memory: bool


def models(request: dict[str, Any]) -> dict[str, list[ListedModel]]:
    from legroom.facts.bundled import bundled_names, find

    known = [model.as_json() for name in bundled_names() if (model := find(name))]
    return {
        "models": [
            {
                "id": model["ids"][0] if model["ids"] else model["name"],
                "name": model["name"],
                "ids": model["ids"],
                "parameters": model["parameters"],
                "quantized_from": model["quantized_from"],
            }
            for model in known
        ]
    }


def gpus(request: dict[str, Any]) -> dict[str, Any]:
    """As `legroom gpus --json`."""
    from legroom.facts.gpus import all_gpus, gpu_names

    names = gpu_names()
    return {"gpus": [card.as_json(names[card.name]) for card in all_gpus()]}


def releases(request: dict[str, Any]) -> dict[str, list[str]]:
    from legroom.facts.releases import known_releases

    return {"releases": list(reversed(known_releases()))}


def flags(request: dict[str, Any]) -> dict[str, Any]:
    """Every flag of a release by its Python name; those that a plan reads come first, in the plan's own order."""
    from legroom.facts.flags import choices, default, flags_of
    from legroom.facts.releases import latest
    from legroom.facts.releases import release as known_release
    from legroom.vllm.args import ServeArgs

    release = known_release(request["vllm"]) if request.get("vllm") else latest()
    order = [field.name for field in fields(ServeArgs) if field.name not in ("model", "usage", "env", "others")]
    known = {flag.name: flag for flag in flags_of(release).values() if flag.name not in ("--model", "--help")}
    listed: list[ListedFlag] = []
    for flag in known.values():
        allowed = choices(flag.name, release)
        listed.append(
            {
                "name": flag.dest,
                "flag": flag.name,
                "type": _TYPES[flag.kind],
                "default": default(flag.name, release),
                "choices": list(allowed) if allowed else None,
                "memory": flag.dest in order,
            }
        )
    listed.sort(key=lambda flag: (order.index(flag["name"]) if flag["memory"] else len(order), flag["name"]))
    return {"vllm": release.version, "flags": listed}
