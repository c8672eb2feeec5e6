"""Endpoints that look up models, GPUs, releases, flags and entries of the error catalog."""

from dataclasses import fields
from typing import Any

from legroom.errors import LegroomError
from legroom.facts.flags import Kind, choices, default, flags_of
from legroom.facts.releases import known_releases, latest
from legroom.facts.releases import release as known_release
from legroom.vllm.args import ServeArgs

_TYPES: dict[Kind, str] = {
    **dict.fromkeys(("switch", "bool", "optbool"), "boolean"),
    **dict.fromkeys(("int", "human"), "integer"),
    **dict.fromkeys(("str", "maybe"), "string"),
    **dict.fromkeys(("json", "pairs"), "object"),
    **dict.fromkeys(("list:str", "list:int", "list:float"), "array"),
    "float": "number",
}


def models(request: dict[str, Any]) -> dict[str, Any]:
    """{"models": the bundled models with id, name, other ids, parameters and `quantized_from`}; takes no keys."""
    from legroom.facts.bundled import all_bundled

    known, shown = [model.as_json() for model in all_bundled()], ("name", "ids", "parameters", "quantized_from")
    rows = [{"id": (row["ids"] or [row["name"]])[0], **{name: row[name] for name in shown}} for row in known]
    return {"models": rows}


def gpus(request: dict[str, Any]) -> dict[str, Any]:
    """{"gpus": known GPUs as `legroom gpus --json` prints them, "usual": those that `size` tries}; takes no keys."""
    from legroom.facts.gpus import all_gpus, gpu_names
    from legroom.planning.sizing import USUAL_GPUS

    names = gpu_names()
    return {"gpus": [card.as_json(names[card.name]) for card in all_gpus()], "usual": list(USUAL_GPUS)}


def releases(request: dict[str, Any]) -> dict[str, list[str]]:
    """{"releases": the vLLM releases that legroom knows, newest first}; takes no keys."""
    return {"releases": list(reversed(known_releases()))}


def flags(request: dict[str, Any]) -> dict[str, Any]:
    """The flags of the release `vllm` (default: the newest) but --model and --help; first those that change memory."""
    release = known_release(request["vllm"]) if request.get("vllm") else latest()
    order = [field.name for field in fields(ServeArgs) if field.name not in ("model", "usage", "env", "others")]
    known = {flag.name: flag for flag in flags_of(release).values() if flag.name not in ("--model", "--help")}
    listed: list[dict[str, Any]] = [
        {
            "name": flag.dest,
            "flag": flag.name,
            "type": _TYPES[flag.kind],
            "default": default(flag.name, release),
            "choices": list(choices(flag.name, release) or ()) or None,
            "memory": flag.dest in order,
        }
        for flag in known.values()
    ]
    listed.sort(key=lambda flag: (order.index(flag["name"]) if flag["memory"] else len(order), flag["name"]))
    return {"vllm": release.version, "flags": listed}


def catalog(request: dict[str, Any]) -> dict[str, Any]:
    """The catalog's entries in short, or those that match the request's `query`, best first, in its `language`."""
    from legroom.explain.catalog_entries import entries, search
    from legroom.explain.entry import summary_json

    language, query, known = request.get("language", "en"), request.get("query", "").strip(), entries()
    chosen = [hit.entry for hit in search(query, known, limit=len(known))] if query else list(known)
    return {"entries": [summary_json(entry, language) for entry in chosen]}


def entry(request: dict[str, Any]) -> dict[str, Any]:
    """The document of `legroom explain ID --json` for the request's `id`, in its `language`."""
    from legroom.explain.catalog_entries import entry as known_entry
    from legroom.render.explain_text import entry_document

    return entry_document(known_entry(request["id"]), request.get("language", "en"))


def hub(request: dict[str, Any]) -> dict[str, Any]:
    """The config.json and checkpoint size of the request's model (`id`: owner/name), from the Hugging Face Hub."""
    from legroom.facts.huggingface import fetch
    from legroom.facts.model_sources import is_hub_id

    name = request["id"].strip()
    if not is_hub_id(name):
        raise LegroomError(f"{name!r} is not a Hub id", "a Hub id is owner/name")
    answer = fetch(name)
    return {"id": name, "config": answer.config, "source": answer.source, "checkpoint_bytes": answer.checkpoint_bytes}
