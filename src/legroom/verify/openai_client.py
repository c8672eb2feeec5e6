"""A client of an OpenAI-compatible server, and a smoke test with it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.metrics.endpoint import Endpoint, endpoint
from legroom.records import dataclass

if TYPE_CHECKING:
    import aiohttp

_MAX_ERROR_CHARACTERS = 300
_SMOKE_TIMEOUT_S = 120.0
_UNSUPPORTED = re.compile(r"does not support \w+ API")
_GUARD_CODES = frozenset({"prompt_too_long", "output_too_long"})


@dataclass(frozen=True)
class ServerRefusal:
    """A response with an error status."""

    status: int
    message: str
    code: str = ""
    """The error code in the body; empty where it only repeats the status, as vLLM's does."""

    @classmethod
    def read(cls, status: int, body: str) -> ServerRefusal:
        """The refusal of an HTTP status and response body, which need not be JSON."""
        try:
            document = json.loads(body)
            error = document.get("error", document)
        except (ValueError, AttributeError):
            return cls(status, body)
        if not isinstance(error, dict):
            return cls(status, str(error))
        code, message = error.get("code"), str(error.get("message", body))
        return cls(status, message, code if isinstance(code, str) and not code.isdecimal() else "")

    @property
    def is_unserved(self) -> bool:
        """Whether the server lacks this API; for a pooling model vLLM answers 404 or 501, older releases 400."""
        return self.status in (404, 501) or _UNSUPPORTED.search(self.message) is not None

    @property
    def is_by_guard(self) -> bool:
        """Whether legroom's guard refused the request before it reached the server."""
        return self.code in _GUARD_CODES

    def __str__(self) -> str:
        text = f"{self.message} ({self.code})" if self.code else self.message
        return f"{self.status}: {' '.join(text.split())[:_MAX_ERROR_CHARACTERS]}"


class RouteClosed(LegroomError):
    """The server has no such route, or needs an API key for it."""


_SAMPLE_TEXT = (
    "The pool of blocks holds the keys and values of every token that a request has seen so far, and no more."
)
_SAMPLE_WORDS = 64
POOLING_ENDPOINTS = {"embedding": "/v1/embeddings", "pooled input": "/pooling"}
"""Embedding models serve the first; classifiers, rerankers and reward models the second."""


@dataclass(frozen=True)
class ServedModel:
    """The model in the server's list of models."""

    model: str
    max_model_len: int | None


@dataclass(frozen=True)
class RequestOutcome:
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    error: str = ""
    refusal: ServerRefusal | None = None
    """The response, where its status is not 200."""

    @property
    def ok(self) -> bool:
        return not self.error


class ServerClient:
    """One session with one server, as an async context manager."""

    def __init__(self, address: str, api_key: str | None = None, verify_tls: bool = True) -> None:
        self.metrics: Endpoint = endpoint(address, api_key, verify_tls=verify_tls)
        self.url = self.metrics.server
        self.accepts_token_ids = True
        self.tokens_per_word = 1.0
        self.vocabulary = tuple(range(100, 1000))
        self._verify_tls = verify_tls
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ServerClient:
        import aiohttp  # slow to import

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=None if self._verify_tls else False),  # type: ignore[arg-type]
            headers=dict(self.metrics.headers),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=10),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP session, which is open inside `async with`."""
        assert self._session is not None
        return self._session

    async def served(self, timeout_s: float = 10.0) -> ServedModel:
        """The first model that the server lists; LegroomError if it is unreachable, unhealthy or lists none."""
        # Other OpenAI-compatible servers and gateways need not have /health.
        with suppress(RouteClosed):
            await self._request("GET", "/health", None, timeout_s, parse=False)
        document = await self._request("GET", "/v1/models", None, timeout_s)
        try:
            model = document["data"][0]
            length = model.get("max_model_len")
            is_length = isinstance(length, int | float) and 1 <= length < 2**53  # JSON has infinity as 1e400
            return ServedModel(str(model["id"]), int(length) if is_length else None)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise LegroomError(f"{self.url}/v1/models lists no model", "is this an OpenAI-compatible server?") from None

    async def learn_vocabulary(self, model: str) -> None:
        """Sets `vocabulary` to the token ids of a sample text; unchanged if the server returns fewer than eight."""
        try:
            answer = await self._request("POST", "/tokenize", {"model": model, "prompt": _SAMPLE_TEXT}, 10.0)
            ids = tuple(sorted({int(token) for token in answer["tokens"]}))
        except (LegroomError, KeyError, TypeError, ValueError):
            return
        if len(ids) >= 8:
            self.vocabulary = ids

    async def measure_tokens_per_word(self, model: str) -> RequestOutcome:
        """Switches to text prompts and measures `tokens_per_word` by one request; returns its outcome."""
        self.accepts_token_ids = False
        outcome = await self.complete(model, _filler_text(_SAMPLE_WORDS), 1)
        if outcome.ok and outcome.prompt_tokens:
            self.tokens_per_word = outcome.prompt_tokens / _SAMPLE_WORDS
        return outcome

    def text_of(self, tokens: int) -> str:
        """A filler text of about `tokens` tokens, 2 % fewer to be safe, by the measured `tokens_per_word`."""
        return _filler_text(max(1, int(tokens / self.tokens_per_word * 0.98)))

    async def complete(self, model: str, prompt: list[int] | str, output_len: int) -> RequestOutcome:
        """The outcome of one streamed completion of exactly `output_len` tokens."""
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        exact = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        body = {"model": model, "prompt": prompt, **exact, **stream}
        return await self.post("/v1/completions", body, is_stream=True)

    async def post(self, path: str, body: Mapping[str, Any], is_stream: bool = False) -> RequestOutcome:
        """The outcome of one POST request; for a stream alone, with time to first token and token counts."""
        import aiohttp

        started_s = time.monotonic()
        try:
            async with self.session.post(self.url + path, json=body) as response:
                if response.status != 200:
                    refusal = ServerRefusal.read(response.status, await response.text(errors="replace"))
                    return RequestOutcome(error=str(refusal), refusal=refusal)
                if is_stream:
                    return await _read_stream(response, started_s)
                await response.read()
        except (aiohttp.http_exceptions.LineTooLong, ValueError):  # ValueError: aiohttp before 3.13
            too_long = "a line of the stream is too long to be read"
            return RequestOutcome(error=too_long, total_s=time.monotonic() - started_s)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            broken = f"the connection broke: {type(error).__name__}"
            return RequestOutcome(error=broken, total_s=time.monotonic() - started_s)
        return RequestOutcome(total_s=time.monotonic() - started_s)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, parse: bool = True
    ) -> Any:
        """The JSON of the response, or its text if not `parse`; LegroomError for any status but 200."""
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.request(method, self.url + path, json=body, timeout=limit) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"{self.url}{path} did not answer: {_error_reason(error)}"
            raise LegroomError(problem, "is it up?", UNREACHABLE) from None
        if response.status in (401, 403):
            hint = "give --api-key or OPENAI_API_KEY"
            raise RouteClosed(f"{self.url} wants an API key ({response.status})", hint, UNREACHABLE)
        if response.status != 200:
            kind = RouteClosed if response.status in (404, 405, 501) else LegroomError
            raise kind(f"{self.url}{path} answered {ServerRefusal.read(response.status, text)}", "", UNREACHABLE)
        try:
            return json.loads(text) if parse else text
        except ValueError:
            hint = "is this an OpenAI-compatible server?"
            raise LegroomError(f"{self.url}{path} did not answer with JSON", hint) from None


def _error_reason(error: Exception) -> str:
    """Why a request got no answer, in words for the user."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return "nothing listens there"
    reasons: dict[type[Exception], str] = {
        TimeoutError: "it took too long",
        aiohttp.ClientConnectorDNSError: "the host name is not known",
        aiohttp.ClientConnectorCertificateError: "its certificate is not trusted (--insecure takes any)",
        aiohttp.ClientSSLError: "TLS failed: does it speak https?",
    }
    return next((why for kind, why in reasons.items() if isinstance(error, kind)), type(error).__name__)


async def _read_stream(response: aiohttp.ClientResponse, started_s: float) -> RequestOutcome:
    """The outcome of a stream of server-sent events, read to its end, with the token counts in its usage."""
    first: float | None = None
    usage: Mapping[str, Any] = {}
    ended = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            continue
        first = time.monotonic() - started_s if first is None else first
        if b'"error"' in data or b'"usage":{' in data.replace(b" ", b""):
            event = _parse_event(data)
            if "error" in event:
                return RequestOutcome(error=f"the stream ended with {str(event['error'])[:_MAX_ERROR_CHARACTERS]}")
            counted = event.get("usage")
            usage = counted if isinstance(counted, dict) else usage
    total = time.monotonic() - started_s
    if not ended:
        return RequestOutcome(error="the stream was cut short", total_s=total)
    return RequestOutcome(_token_count(usage, "prompt_tokens"), _token_count(usage, "completion_tokens"), first, total)


def _token_count(usage: Mapping[str, Any], name: str) -> int:
    """The count `name` (`prompt_tokens` ...) in an API's `usage` object; 0 where it is missing."""
    value = usage.get(name)
    return value if isinstance(value, int) else 0


def _parse_event(data: bytes) -> Mapping[str, Any]:
    """The JSON object of a server-sent event; empty where it is none."""
    try:
        event = json.loads(data)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _filler_text(count: int) -> str:
    """A text of `count` words."""
    return " ".join(("hello", "world")[number % 2] for number in range(count))


def smoke_test(url: str, api_key: str | None = None) -> tuple[bool | None, str]:
    """(Whether a short and a full-context request are served, a sentence); None where no known endpoint exists."""
    try:
        return asyncio.run(_run_smoke_test(url, api_key))
    except LegroomError as error:
        return False, f"the server is healthy but does not serve: {error.message}"


async def _run_smoke_test(url: str, api_key: str | None) -> tuple[bool | None, str]:
    """(Whether a short and a full-context request are served or None, a sentence); LegroomError without an answer."""
    async with ServerClient(url, api_key, verify_tls=False) as server:
        served = await server.served(_SMOKE_TIMEOUT_S)
        name, length = served.model, served.max_model_len or 0
        for what, path in ({"completion": "/v1/completions"} | POOLING_ENDPOINTS).items():
            outcome = await _send_tokens(server, path, name, 0)
            if outcome.refusal is not None and outcome.refusal.is_unserved:
                continue
            text = f"serves {name}: one {what}"
            if outcome.ok and length > 16:
                outcome = await _send_tokens(server, path, name, length)
                if outcome.refusal is not None and outcome.refusal.is_by_guard:
                    return True, f"{text} and none of {length:,} tokens, which the guard does not let in"
                text += f" and a request of {length:,} tokens"
            return (True, text) if outcome.ok else (False, f"the server is healthy but does not serve: {outcome.error}")
    return None, f"serves {name}, but no completions, and pools nothing, so no request was tried"


async def _send_tokens(server: ServerClient, path: str, model: str, length: int) -> RequestOutcome:
    """The outcome of a request of `length` tokens, prompt and output; for length 0, of a short text."""
    if path == "/v1/completions":
        answer = 4
        prompt = [3] * (length - answer) if length else "Hello"
        body = {"model": model, "prompt": prompt, "max_tokens": answer, "ignore_eos": True}
    else:
        body = {"model": model, "input": [3] * length if length else "Hello"}
    try:
        async with asyncio.timeout(_SMOKE_TIMEOUT_S + length / 1000):  # a slow prompt runs at 1,000 tokens/s
            return await server.post(path, body)
    except TimeoutError:
        return RequestOutcome(error="the request took too long")
