"""What the page asks for, by name: plain JSON in, the documents of the command line out. No HTTP, no files, no logic.

The server and the browser's own Python call the same functions; `legroom.web.schemas` says what each takes and gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from legroom.errors import BAD_INPUT, LegroomError
from legroom.isolation import isolated
from legroom.records import dataclass

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """One name, where its function is, and how it may be asked."""

    name: str
    module: str
    summary: str
    without_input: bool = False
    """An empty request means something: a plain GET is answered too."""
    asks_the_hub: bool = False
    in_browser: bool = True
    """Whether the static edition brings what it needs: every room more is a longer first visit."""

    @property
    def function(self) -> Callable[[Document], Document]:
        """Imported only when asked for: a browser waits for every module it loads."""
        answer: Callable[[Document], Document] = getattr(
            import_module(f"legroom.web.endpoints.{self.module}"), self.name
        )
        return answer


ENDPOINTS: Mapping[str, ApiEndpoint] = {
    endpoint.name: endpoint
    for endpoint in (
        ApiEndpoint("plan", "plans", "Whether vLLM starts, and where every byte of the card goes"),
        ApiEndpoint("math", "plans", "The working behind every figure of a plan"),
        ApiEndpoint("size", "plans", "Which GPUs, and how many, hold a model"),
        ApiEndpoint("read", "texts", "The servers that a script, a container line or a manifest starts"),
        ApiEndpoint("lint", "texts", "What is wrong in rules, dashboards, scripts and manifests", in_browser=False),
        ApiEndpoint("diagnose", "texts", "Why a server failed, from its log"),
        ApiEndpoint("fragments", "snapshots", "Where memory lies that is reserved and not used", in_browser=False),
        ApiEndpoint("simulate", "loads", "Whether settings hold a load, replayed through vLLM's scheduler"),
        ApiEndpoint("models", "facts", "The models that are known without a network", without_input=True),
        ApiEndpoint("gpus", "facts", "The GPUs that are known", without_input=True),
        ApiEndpoint("releases", "facts", "The vLLM releases that are known, the newest first", without_input=True),
        ApiEndpoint("flags", "facts", "The flags of a release, those that memory depends on first", without_input=True),
        ApiEndpoint("catalog", "entries", "The causes in the catalog, all or those that fit words", without_input=True),
        ApiEndpoint("entry", "entries", "The long story of one cause"),
        ApiEndpoint("hub", "hub", "A model's config.json from the Hugging Face Hub", asks_the_hub=True),
    )
}


class BadRequest(LegroomError):
    """A request that does not have the form that its schema says."""


def answer(name: str, request: Any) -> Document:
    """The document, or a `LegroomError`; a `BadRequest` where the request is not of the endpoint's form."""
    from legroom.web.schemas import check_request, with_whole_numbers

    endpoint = ENDPOINTS.get(name)
    if endpoint is None:
        raise BadRequest(f"there is no endpoint {name!r}", f"there are {', '.join(ENDPOINTS)}")
    problem = check_request(name, request)
    if problem:
        raise BadRequest(f"the request is not of the form that {name} takes: {problem[:300]}", "see /openapi.json")
    if endpoint.asks_the_hub:
        return endpoint.function(request)
    with isolated():
        return endpoint.function(with_whole_numbers(request))


def error_document(error: LegroomError) -> Document:
    """How every input error is told."""
    return {"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}}


def call(name: str, request_json: str) -> str:
    """`answer` for callers with text only, such as a worker in a browser; an input error is a document as well."""
    try:
        request = json.loads(request_json)
    except (ValueError, RecursionError):
        return json.dumps(error_document(LegroomError("the request is not JSON", exit_code=BAD_INPUT)))
    try:
        document = answer(name, request)
    except LegroomError as error:
        document = error_document(error)
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
