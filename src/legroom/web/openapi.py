"""The OpenAPI 3.1 document of the API, from the endpoints and their schemas."""

from functools import cache
from typing import Any

from legroom.version import __version__
from legroom.web.endpoints import ENDPOINTS, ApiEndpoint, Document
from legroom.web.schemas import request_name, response_name, schemas

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
    """The OpenAPI document of the HTTP API; `live` includes the live feed, which the API alone does not have."""
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
            **{f"/api/{endpoint.name}": _path_item(endpoint) for endpoint in ENDPOINTS.values()},
            **({"/api/live": {"get": _live_path()}} if live else {}),
            **_probe_paths(),
        },
        "components": {"schemas": schemas()},
    }


def _path_item(endpoint: ApiEndpoint) -> dict[str, Any]:
    """The endpoint's OpenAPI path item: POST, and GET too where the request may be empty."""
    document = _json_content(response_name(endpoint.name))
    post = _operation(endpoint.name, endpoint.summary, "The document", document, _error_responses(*_ERRORS))
    post["requestBody"] = {"required": True, "content": _json_content(request_name(endpoint.name))}
    if endpoint.name == "diagnose":
        # text/plain is accepted as well; client generators support bytes, but not text that is no JSON.
        description = "Or the log itself, streamed (or as text/plain); what it does not say goes into the query."
        log = {"type": "string", "format": "binary", "description": description}
        post["requestBody"]["content"]["application/octet-stream"] = {"schema": log}
        post["parameters"] = [_query_parameter(name) for name in ("command", "model", "gpu", "vllm")]
    if not endpoint.without_input:
        return {"post": post}
    errors = _error_responses("401", "403", "421", "429")
    return {"get": _operation(f"{endpoint.name}_get", endpoint.summary, "The document", document, errors), "post": post}


def _operation(name: str, summary: str, description: str, content: Document, errors: Document) -> Document:
    """An OpenAPI operation with the id `name`: `description` and `content` of its 200 response; `errors` by status."""
    responses = {"200": {"description": description, "content": content}, **errors}
    return {"operationId": name, "summary": summary, "responses": responses}


def _error_responses(*codes: str, **others: str) -> dict[str, Any]:
    """The error responses of these statuses; `others` are statuses (as `_404`) with descriptions of their own."""
    texts = {code: _ERRORS[code] for code in codes} | {code.removeprefix("_"): text for code, text in others.items()}
    return {code: {"description": text, "content": _json_content("Error")} for code, text in texts.items()}


def _query_parameter(name: str) -> dict[str, Any]:
    """The OpenAPI query parameter of /api/diagnose for the field `name` of its JSON request."""
    schema = schemas()["DiagnoseRequest"]["properties"][name]
    text = {"type": "string", "maxLength": schema["maxLength"]}
    return {"name": name, "in": "query", "required": False, "description": schema["description"], "schema": text}


def _json_content(name: str) -> dict[str, Any]:
    """The OpenAPI content of a JSON body with the schema of this name."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _live_path() -> dict[str, Any]:
    """The OpenAPI operation of the server-sent events."""
    description = (
        "Server-sent events. `history` once: {server: [points]}; `incidents` at each change; unnamed ones: a look at a "
        "server, what `legroom watch --json` prints."
    )
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    errors = _error_responses("401", "403", "421", _404="No servers are watched")
    return _operation("live", "What is watched, as it happens", description, stream, errors)


def _probe_paths() -> dict[str, Any]:
    """The OpenAPI path items of /healthz, /readyz and /metrics."""
    schema = {"type": "object", "properties": {"status": {"type": "string"}}, "required": ["status"]}
    status, text = {"application/json": {"schema": schema}}, {"text/plain": {"schema": {"type": "string"}}}
    denied = _error_responses("403", "421")
    late = _error_responses("403", "421", _503="It has just started, or is about to end")
    return {
        "/healthz": {"get": _operation("healthz", "Whether it serves", "It serves", status, denied)},
        "/readyz": {"get": _operation("readyz", "Whether requests are answered at once", "It answers", status, late)},
        "/metrics": {"get": _operation("metrics", "Its own figures", "Prometheus' text format", text, denied)},
    }
