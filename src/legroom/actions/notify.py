"""Telling people and other systems: a plain webhook, Alertmanager, or a Slack-style message."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Mapping
from typing import Any, Literal

from legroom.actions.platform import ActionFailed
from legroom.live.journal.masking import masked
from legroom.records import dataclass, field

Format = Literal["json", "alertmanager", "slack"]
FORMATS: tuple[Format, ...] = ("json", "alertmanager", "slack")
_TIMEOUT_S = 10.0
_TRIES = 4
_FIRST_PAUSE_S = 1.0
_TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Message:
    """Something worth telling about one incident. `closed_s` says that it is over."""

    incident: int | None
    """Its number, for `legroom incident` and `/ack`; None where the journal could not be written."""
    server: str
    group: str
    kind: str
    title: str
    text: str
    opened_s: float
    closed_s: float | None = None
    severity: str = "warning"
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Webhook:
    """Where messages go. Its address may hold a secret and is never shown whole."""

    url: str = field(repr=False)
    format: Format = "json"
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def shown(self) -> str:
        """The address without what may be secret in it: its host."""
        return str(masked(self.url.split("?")[0])).partition("://")[2].partition("/")[0] or "the webhook"


def body_of(message: Message, style: Format) -> Any:
    """The JSON that is posted."""
    if style == "slack":
        state = "over" if message.closed_s is not None else message.severity
        number = f" (incident {message.incident})" if message.incident is not None else ""
        return {"text": masked(f"[{state}] {message.server}: {message.title}{number}\n{message.text}".strip())}
    if style == "alertmanager":
        alert: dict[str, Any] = {
            "labels": {
                "alertname": f"legroom_{message.kind}", "instance": message.server, "group": message.group,
                "severity": message.severity,
            },
            "annotations": {"summary": masked(message.title), "description": masked(message.text)},
            "startsAt": _iso(message.opened_s),
        }  # fmt: skip
        if message.incident is not None:
            alert["annotations"]["incident"] = str(message.incident)
        if message.closed_s is not None:
            alert["endsAt"] = _iso(message.closed_s)
        return [alert]
    return {
        "incident": message.incident, "server": message.server, "group": message.group, "kind": message.kind,
        "severity": message.severity, "title": masked(message.title), "text": masked(message.text),
        "opened_s": message.opened_s, "closed_s": message.closed_s, "detail": masked(dict(message.detail)),
    }  # fmt: skip


async def notify(hook: Webhook, message: Message, first_pause_s: float = _FIRST_PAUSE_S) -> None:
    """Posts a message, trying again a few times where that can help. Raises `ActionFailed` in the end."""
    import aiohttp  # noqa: PLC0415

    url = hook.url
    if hook.format == "alertmanager" and "/api/" not in url:
        url = url.rstrip("/") + "/api/v2/alerts"
    problem = ""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=True) as session:
        for number in range(_TRIES):
            if number:
                await asyncio.sleep(first_pause_s * 4 ** (number - 1))
            try:
                body = body_of(message, hook.format)
                async with session.post(url, json=body, headers=dict(hook.headers), allow_redirects=False) as answer:
                    if answer.status < 300:
                        return
                    problem = f"it answered {answer.status}"
                    if answer.status not in _TRY_AGAIN:
                        break
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                problem = f"it cannot be reached ({type(error).__name__})"
    raise ActionFailed(f"{hook.shown} did not take the message: {problem}")


def _iso(time_s: float) -> str:
    return (
        datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )
