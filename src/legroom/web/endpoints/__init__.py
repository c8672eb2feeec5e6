"""The endpoints of the HTTP API: a JSON request in, the JSON document of the command line out. The server and the
static edition in a browser call the same functions; `legroom.web.schemas` has their schemas."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from legroom.errors import BAD_INPUT, LegroomError
from legroom.isolation import isolated
from legroom.records import dataclass
from legroom.web.schemas import check_request, with_whole_numbers

Document = dict[str, Any]

_SENTENCES = (
    *("words", "gives_up", "reason", "why", "trades", "comment"),
    *("steps", "action", "why_fails", "notes", "needed"),
)
"""Keys below which a document has sentences of legroom."""


@dataclass(frozen=True, slots=True)
class ApiEndpoint:
    """The function `name` in the module `module` of this package."""

    name: str
    module: str
    summary: str
    without_input: bool = False
    """The request may be empty, so GET is answered too."""
    fetches_from_hub: bool = False
    in_browser: bool = True
    """Whether the static edition includes what it imports, which adds to its download."""

    @property
    def function(self) -> Callable[[Document], Document]:
        """The endpoint's function, imported on first use, as every module delays a browser's first answer."""
        module: Any = import_module(f"legroom.web.endpoints.{self.module}")
        return getattr(module, self.name)  # type: ignore[no-any-return]


ENDPOINTS: Mapping[str, ApiEndpoint] = {
    endpoint.name: endpoint
    for endpoint in (
        ApiEndpoint("plan", "plans", "Whether vLLM starts, and where every byte of the card goes"),
        ApiEndpoint("math", "plans", "The working behind every figure of a plan"),
        ApiEndpoint("speed", "plans", "Tokens a second of a planned server, and its price an hour"),
        ApiEndpoint("card", "plans", "Which of the named models a card serves, and how fast"),
        ApiEndpoint("size", "plans", "Which GPUs, and how many, hold a model"),
        ApiEndpoint("upgrade", "plans", "What another vLLM release changes for a server"),
        ApiEndpoint("pack", "plans", "Whether several servers fit on one machine, each with its flags"),
        ApiEndpoint("files", "plans", "A planned server as a Docker, compose, Kubernetes or systemd file"),
        ApiEndpoint("read", "uploads", "The servers that a script, a container line or a manifest starts"),
        ApiEndpoint("lint", "uploads", "What is wrong in rules, dashboards, scripts and manifests", in_browser=False),
        ApiEndpoint("diagnose", "uploads", "Why a server failed, from its log"),
        ApiEndpoint("fragments", "uploads", "Where memory lies that is reserved and not used"),
        ApiEndpoint("simulate", "plans", "Whether settings hold a load, replayed through vLLM's scheduler"),
        ApiEndpoint("models", "lookups", "The models that are known without a network", without_input=True),
        ApiEndpoint("gpus", "lookups", "The GPUs that are known", without_input=True),
        ApiEndpoint("releases", "lookups", "The vLLM releases that are known, the newest first", without_input=True),
        ApiEndpoint("flags", "lookups", "The flags of a release, those of memory first", without_input=True),
        ApiEndpoint("catalog", "lookups", "The causes in the catalog, all or those that fit words", without_input=True),
        ApiEndpoint("entry", "lookups", "The long story of one cause"),
        ApiEndpoint("hub", "lookups", "A model's config.json from the Hugging Face Hub", fetches_from_hub=True),
    )
}


class BadRequest(LegroomError):
    """A request that does not match its schema."""


def answer(name: str, request: Any) -> Document:
    """The document of the endpoint `name`; BadRequest if it is unknown or the request does not match its schema."""
    endpoint = ENDPOINTS.get(name)
    if endpoint is None:
        raise BadRequest(f"there is no endpoint {name!r}", f"there are {', '.join(ENDPOINTS)}")
    problem = check_request(name, request)
    if endpoint.fetches_from_hub and not problem:
        return endpoint.function(request)
    with isolated():
        try:
            if problem:
                why = f"the request is not of the form that {name} takes: {problem[:300]}"
                raise BadRequest(why, "see /openapi.json")
            document = endpoint.function(with_whole_numbers(request))
        except LegroomError as error:
            said = in_requested_language({"words": [error.message, error.hint]}, request)["words"]
            error.message, error.hint = said
            raise
        return document if endpoint.module == "lookups" else in_requested_language(document, request)


def in_requested_language(document: Document, request: Any) -> Document:
    """The document with legroom's sentences in the `language` of the request; texts of a log are not translated."""
    if not isinstance(request, dict) or request.get("language") != "zh":
        return document
    from legroom.render.translation import in_language

    return dict(in_language(document, request["language"], _SENTENCES))


def error_document(error: LegroomError) -> Document:
    """The JSON document of an error."""
    return {"error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}}


def call(name: str, request_json: str) -> str:
    """`answer` in and out as JSON text, for the static edition in a browser; an error is a document too."""
    try:
        request = json.loads(request_json)
    except (ValueError, RecursionError):
        return json.dumps(error_document(LegroomError("the request is not JSON", exit_code=BAD_INPUT)))
    try:
        document = answer(name, request)
    except LegroomError as error:
        document = error_document(error)
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
