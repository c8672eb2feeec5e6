"""A client of the server that is verified, over its OpenAI-compatible API."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.live.metrics.endpoint import endpoint
from legroom.records import dataclass

if TYPE_CHECKING:
    import aiohttp

    from legroom.live.metrics.endpoint import Endpoint


_ERROR_LENGTH = 300
_UNSUPPORTED = re.compile(r"does not support \w+ API")
_GUARD_CODES = frozenset({"prompt_too_long", "output_too_long"})


@dataclass(frozen=True)
class ServerRefusal:
    """Why a request was not served."""

    status: int
    message: str
    code: str = ""
    """The name that the body gives the error; vLLM repeats the status there, which is not kept."""

    @classmethod
    def read(cls, status: int, body: str) -> ServerRefusal:
        """From a response's body, whatever it is."""
        try:
            document = json.loads(body)
            error = document.get("error", document)
        except (ValueError, AttributeError):
            return cls(status, body)
        if not isinstance(error, dict):
            return cls(status, str(error))
        code = error.get("code")
        return cls(
            status, str(error.get("message", body)), code if isinstance(code, str) and not code.isdecimal() else ""
        )

    @property
    def is_unserved(self) -> bool:
        """Whether this kind of request is not served at all.

        vLLM has no such route for a pooling model (404), or says that the model does not support it (501; 400 in older
        releases).
        """
        return self.status in (404, 501) or _UNSUPPORTED.search(self.message) is not None

    @property
    def is_by_guard(self) -> bool:
        """Whether it is the guard's policy that refuses: the server was never asked."""
        return self.code in _GUARD_CODES

    def __str__(self) -> str:
        text = f"{self.message} ({self.code})" if self.code else self.message
        return f"{self.status}: {' '.join(text.split())[:_ERROR_LENGTH]}"


class RouteMissing(LegroomError):
    """The server answers, and has no such route."""


class KeyWanted(LegroomError):
    """The server answers, and not to everybody."""


_NO_ROUTE = (404, 405, 501)
_SAMPLE_TEXT = (
    "The pool of blocks holds the keys and values of every token that a request has seen so far, and no more."
)
_PROBE_WORDS = 64
_DEFAULT_VOCABULARY = tuple(range(100, 1000))


@dataclass(frozen=True)
class ServedModel:
    """What the server says it serves."""

    model: str
    max_model_len: int | None


@dataclass(frozen=True)
class RequestOutcome:
    """What became of one request."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    error: str = ""
    refusal: ServerRefusal | None = None
    """Where the server answered, but not with 200."""

    @property
    def ok(self) -> bool:
        """Whether it was answered to the end."""
        return not self.error


class ServerClient:
    """One session with one server; use as an asynchronous context."""

    def __init__(self, address: str, api_key: str | None = None, verify_tls: bool = True) -> None:
        self.metrics: Endpoint = endpoint(address, api_key, verify_tls=verify_tls)
        self.url = self.metrics.server
        self.takes_ids = True
        self.tokens_per_word = 1.0
        self.vocabulary = _DEFAULT_VOCABULARY
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
        """Of this context."""
        assert self._session is not None
        return self._session

    async def served(self, timeout_s: float = 10.0) -> ServedModel:
        """Its model and context; raises where nothing answers, or not as a server of this kind would."""
        await self._check_health(timeout_s)
        document = await self._get("/v1/models", timeout_s)
        try:
            model = document["data"][0]
            length = model.get("max_model_len")
            return ServedModel(str(model["id"]), int(length) if length else None)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise LegroomError(f"{self.url}/v1/models lists no model", "is this an OpenAI-compatible server?") from None

    async def learn_vocabulary(self, model: str) -> None:
        """Token ids that the model certainly has: those of a sentence."""
        try:
            answer = await self._post("/tokenize", {"model": model, "prompt": _SAMPLE_TEXT}, 10.0)
            ids = tuple(sorted({int(token) for token in answer["tokens"]}))
        except (LegroomError, KeyError, TypeError, ValueError):
            return
        if len(ids) >= 8:
            self.vocabulary = ids

    async def learn_text(self, model: str) -> RequestOutcome:
        """For servers that take no ids: how many tokens a word is."""
        self.takes_ids = False
        outcome = await self.complete(model, _words(_PROBE_WORDS), 1)
        if outcome.ok and outcome.prompt_tokens:
            self.tokens_per_word = outcome.prompt_tokens / _PROBE_WORDS
        return outcome

    def text_of(self, tokens: int) -> str:
        """A text of about so many tokens, and not more."""
        return _words(max(1, int(tokens / self.tokens_per_word * 0.98)))

    async def complete(self, model: str, prompt: list[int] | str, output_len: int) -> RequestOutcome:
        """One streamed completion of exactly `output_len` tokens."""
        import aiohttp

        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.monotonic()
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    return _refused(response.status, await response.text(errors="replace"))
                return await _streamed(response, began)
        except (aiohttp.http_exceptions.LineTooLong, ValueError):  # ValueError: aiohttp before 3.13
            return RequestOutcome(error="a line of the stream is too long to be read", total_s=time.monotonic() - began)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return RequestOutcome(
                error=f"the connection broke: {type(error).__name__}", total_s=time.monotonic() - began
            )

    async def pooled(self, path: str, model: str, prompt: list[int]) -> RequestOutcome:
        """One input to a pooling model, at one of its endpoints."""
        import aiohttp

        began = time.monotonic()
        try:
            async with self.session.post(self.url + path, json={"model": model, "input": prompt}) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return RequestOutcome(
                error=f"the connection broke: {type(error).__name__}", total_s=time.monotonic() - began
            )
        if response.status != 200:
            return _refused(response.status, text)
        return RequestOutcome(len(prompt), total_s=time.monotonic() - began)

    async def _check_health(self, timeout_s: float) -> None:
        """Where there is such a route: vLLM has it, other OpenAI-compatible servers need not, and a gateway may keep it
        to itself. Whether a key is wanted, the list of models tells."""
        with suppress(RouteMissing, KeyWanted):
            await self._get("/health", timeout_s, parsed=False)

    async def _get(self, path: str, timeout_s: float, parsed: bool = True) -> Any:
        return await self._ask("GET", path, None, timeout_s, parsed)

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        return await self._ask("POST", path, body, timeout_s, True)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, parsed: bool) -> Any:
        import aiohttp

        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self.session.request(method, self.url + path, json=body, timeout=limit) as response:
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LegroomError(f"{self.url}{path} did not answer: {_reason(error)}", "is it up?", UNREACHABLE) from None
        if response.status in (401, 403):
            raise KeyWanted(
                f"{self.url} wants an API key ({response.status})", "give --api-key or OPENAI_API_KEY", UNREACHABLE
            )
        if response.status != 200:
            kind = RouteMissing if response.status in _NO_ROUTE else LegroomError
            raise kind(f"{self.url}{path} answered {ServerRefusal.read(response.status, text)}", "", UNREACHABLE)
        try:
            return json.loads(text) if parsed else text
        except ValueError:
            raise LegroomError(
                f"{self.url}{path} did not answer with JSON", "is this an OpenAI-compatible server?"
            ) from None


def _reason(error: Exception) -> str:
    import aiohttp

    if isinstance(error, TimeoutError):
        return "it took too long"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "the host name is not known"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted (--insecure takes any)"
    if isinstance(error, aiohttp.ClientSSLError):
        return "TLS failed: does it speak https?"
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return "nothing listens there"
    return type(error).__name__


async def _streamed(response: aiohttp.ClientResponse, began: float) -> RequestOutcome:
    """Read server-sent events up to the last, which carries the usage."""
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
        first = time.monotonic() - began if first is None else first
        if b'"error"' in data or b'"usage":{' in data.replace(b" ", b""):
            event = _event(data)
            if "error" in event:
                return RequestOutcome(error=f"the stream ended with {str(event['error'])[:_ERROR_LENGTH]}")
            counted = event.get("usage")
            usage = counted if isinstance(counted, dict) else usage
    total = time.monotonic() - began
    if not ended:
        return RequestOutcome(error="the stream was cut short", total_s=total)
    return RequestOutcome(_counted(usage, "prompt_tokens"), _counted(usage, "completion_tokens"), first, total)


def _counted(usage: Mapping[str, Any], name: str) -> int:
    """0 where the server does not count."""
    value = usage.get(name)
    return value if isinstance(value, int) else 0


def _event(data: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}


def _refused(status: int, body: str) -> RequestOutcome:
    refusal = ServerRefusal.read(status, body)
    return RequestOutcome(error=str(refusal), refusal=refusal)


def _words(count: int) -> str:
    return " ".join(("hello", "world")[number % 2] for number in range(count))
