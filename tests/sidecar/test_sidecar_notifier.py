"""Messages reach a webhook, an Alertmanager or a chat in their own shape, without secrets, and not for ever."""

import asyncio
import json
from functools import partial

import pytest
from aiohttp import web
from loopback import listening

from legroom.actions.platform import ActionFailed
from legroom.sidecar.notifier import FORMATS, Notifier, Webhook, body_of, message_of, post_with_retries
from legroom.sidecar.open_incidents import OpenIncident
from legroom.sidecar.sidecar_http import SidecarMetrics


def message(title="no tokens for 30 s", text="restart it", closed_s=None, **numbers):
    incident = OpenIncident("key", "http://a:8000", "llama", "stuck_engine", title, 1_700_000_000.0, "warning", None)
    incident.number = 17
    return {**message_of(incident, text, closed_s), "detail": numbers}


MESSAGE = message(api_key="s3cret", running=3)


def posted(statuses, hook_format="json", path="/hook"):
    """What a receiver heard that answers with these statuses in turn."""
    heard = []

    async def take(request):
        heard.append((request.path, await request.json()))
        return web.Response(status=statuses[min(len(heard), len(statuses)) - 1])

    async def go():
        async with listening(web.post("/{any:.*}", take)) as port:
            await post_with_retries(
                Webhook(f"http://127.0.0.1:{port}{path}", hook_format), MESSAGE, first_pause_s=0.001
            )

    return heard, go


def test_a_message_is_posted_once_when_it_is_taken():
    heard, go = posted([200])
    asyncio.run(go())
    assert len(heard) == 1
    assert (heard[0][1]["kind"], heard[0][1]["incident"]) == ("stuck_engine", 17)


def test_a_server_in_trouble_is_asked_again():
    heard, go = posted([503, 500, 204])
    asyncio.run(go())
    assert len(heard) == 3


@pytest.mark.parametrize(("statuses", "tries"), [([500], 4), ([400], 1), ([302], 1)])
def test_it_gives_up_in_the_end(statuses, tries):
    heard, go = posted(statuses)
    with pytest.raises(ActionFailed, match=f"answered {statuses[0]}"):
        asyncio.run(go())
    assert len(heard) == tries


def test_nobody_there_is_a_sentence_without_the_address_secret():
    hook = Webhook("http://user:pa55word@127.0.0.1:1/services/T0/s3cret")
    with pytest.raises(ActionFailed, match="cannot be reached") as failure:
        asyncio.run(post_with_retries(hook, MESSAGE, first_pause_s=0.001))
    assert not {"pa55word", "s3cret"} & set(failure.value.message.replace("/", " ").replace("@", " ").split())


def test_alertmanager_gets_labels_and_times():
    heard, go = posted([200], "alertmanager", "")
    asyncio.run(go())
    path, (alert,) = heard[0]
    assert path == "/api/v2/alerts"
    assert alert["labels"] == {
        "alertname": "legroom_stuck_engine",
        "instance": "http://a:8000",
        "group": "llama",
        "severity": "warning",
    }
    assert alert["startsAt"] == "2023-11-14T22:13:20.000Z"
    assert "endsAt" not in alert
    closed = body_of(message(closed_s=60.0), "alertmanager")[0]
    assert closed["endsAt"] == "1970-01-01T00:01:00.000Z"


@pytest.mark.parametrize("style", FORMATS)
def test_no_format_shows_a_secret(style):
    secret = message("https://u:s3cret@host is down", "Bearer s3cret-s3cret", **MESSAGE["detail"])
    assert "s3cret" not in json.dumps(body_of(secret, style))


def test_the_end_of_an_incident_is_sent_again_until_it_is_taken(monkeypatch):
    monkeypatch.setattr("legroom.sidecar.notifier.REPEAT_S", 0.05)
    monkeypatch.setattr("legroom.sidecar.notifier.post_with_retries", partial(post_with_retries, first_pause_s=0.001))
    heard, metrics = [], SidecarMetrics()
    incident = OpenIncident("key", "http://a:8000", "llama", "stuck_engine", "no tokens", 0.0, "critical", None)
    incident.number = 17

    async def take(request):
        heard.append((await request.json())["closed_s"])
        return web.Response(status=500 if len(heard) < 6 else 200)

    async def go():
        async with listening(web.post("/", take)) as port:
            notifier = Notifier([Webhook(f"http://127.0.0.1:{port}/")], metrics, lambda line: None)
            sending = asyncio.create_task(notifier.run(lambda: ()))
            notifier.notify(incident, "over", 60.0)
            while len(heard) < 6:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            sending.cancel()

    asyncio.run(asyncio.wait_for(go(), 90.0))
    assert heard == [60.0] * 6


def test_every_message_names_the_incident_by_its_number():
    assert body_of(MESSAGE, "json")["incident"] == 17
    assert "(incident 17)" in body_of(MESSAGE, "slack")["text"]
    assert body_of(MESSAGE, "alertmanager")[0]["annotations"]["incident"] == "17"
    assert "incident" not in body_of({**MESSAGE, "incident": None}, "slack")["text"]
