"""The API as an OpenAPI 3.1 document, from the table of endpoints and their schemas."""

from __future__ import annotations

from functools import cache
from typing import Any

from legroom.version import __version__
from legroom.web.endpoints import ENDPOINTS, ApiEndpoint
from legroom.web.schemas import REQUESTS, response_name, schemas

_ERRORS = {
    "400": "The request does not have the form that the schema says, or is no JSON",
    "401": "A token is needed",
    "403": "A page of another site asked",
    "408": "The body stopped coming",
    "413": "The body is too large",
    "415": "The body is of another type",
    "421": "The address is not one of this machine's own",
    "422": "The form is right, but it cannot be answered: an unknown model or flag, or too much work",
    "424": "Something that is needed could not be reached",
    "429": "Too many requests wait",
}


@cache
def openapi_document(live: bool = True) -> dict[str, Any]:
    """`live`: with what is watched as it happens, which the API without a page has not."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "legroom",
            "version": __version__,
            "description": "GPU memory in vLLM serving. Sizes are bytes, ratios 0..1, times seconds. Nothing is "
            "changed on any machine, and nothing that a request names is opened, but for the look-up of `hub`.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": {
            **{f"/api/{endpoint.name}": _path(endpoint) for endpoint in ENDPOINTS.values()},
            **({"/api/live": {"get": _live()}} if live else {}),
            "/healthz": {"get": _health()},
            "/readyz": {"get": _readiness()},
            "/metrics": {"get": _metrics()},
        },
        "components": {"schemas": schemas()},
    }


def _path(endpoint: ApiEndpoint) -> dict[str, Any]:
    post: dict[str, Any] = {
        "operationId": endpoint.name,
        "summary": endpoint.summary,
        "requestBody": {"required": True, "content": _json(REQUESTS[endpoint.name])},
        "responses": _responses(response_name(endpoint.name), _ERRORS),
    }
    if endpoint.name == "diagnose":
        # text/plain is taken as well; generators of clients know bytes, and not a text that is no JSON.
        description = "Or the log itself, streamed (or as text/plain); what it does not say goes into the query."
        log = {"type": "string", "format": "binary", "description": description}
        post["requestBody"]["content"]["application/octet-stream"] = {"schema": log}
        post["parameters"] = [_log_hint(name) for name in ("command", "model", "gpu", "vllm")]
    if not endpoint.without_input:
        return {"post": post}
    get = {
        "operationId": f"{endpoint.name}_get",
        "summary": endpoint.summary,
        "responses": _responses(
            response_name(endpoint.name), {code: _ERRORS[code] for code in ("401", "403", "421", "429")}
        ),
    }
    return {"get": get, "post": post}


def _log_hint(name: str) -> dict[str, Any]:
    schema = schemas()["DiagnoseRequest"]["properties"][name]
    return {
        "name": name,
        "in": "query",
        "required": False,
        "description": schema["description"],
        "schema": {"type": "string", "maxLength": schema["maxLength"]},
    }


def _responses(name: str, errors: dict[str, str]) -> dict[str, Any]:
    fine = {"200": {"description": "The document", "content": _json(name)}}
    return fine | {code: {"description": text, "content": _json("Error")} for code, text in errors.items()}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _live() -> dict[str, Any]:
    description = (
        "Server-sent events. `history` once: {server: [points]}; `incidents` at each change; unnamed ones: a look at a "
        "server, what `legroom watch --json` prints."
    )
    errors = {code: _ERRORS[code] for code in ("401", "403", "421")} | {"404": "No servers are watched"}
    stream = {"description": description, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    return {
        "operationId": "live",
        "summary": "What is watched, as it happens",
        "responses": {
            "200": stream,
            **{code: {"description": text, "content": _json("Error")} for code, text in errors.items()},
        },
    }


def _health() -> dict[str, Any]:
    fine = {"description": "It serves", "content": _status()}
    return {"operationId": "healthz", "summary": "Whether it serves", "responses": {"200": fine, **_denials()}}


def _readiness() -> dict[str, Any]:
    fine = {"description": "It answers", "content": _status()}
    late = {"description": "It has just started, or is about to end", "content": _json("Error")}
    responses = {"200": fine, "503": late, **_denials()}
    return {"operationId": "readyz", "summary": "Whether requests are answered at once", "responses": responses}


def _metrics() -> dict[str, Any]:
    text = {"description": "Prometheus' text format", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {"operationId": "metrics", "summary": "Its own figures", "responses": {"200": text, **_denials()}}


def _status() -> dict[str, Any]:
    schema = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
    return {"application/json": {"schema": schema}}


def _denials() -> dict[str, Any]:
    return {code: {"description": _ERRORS[code], "content": _json("Error")} for code in ("403", "421")}
