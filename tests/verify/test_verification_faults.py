"""Verification of servers, plans, loads and calls that are not as they should be."""

from __future__ import annotations

import asyncio
import json

import pytest
from test_verification import StandIn, checked, serving

from legroom.cli.main import main
from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import is_loopback
from legroom.verify.load_run import KvPool, Load, LoadRequest, LoadRun, LoadSample, read_load
from legroom.verify.openai_client import ServedModel, ServerClient
from legroom.verify.verification_checks import PlannedPool, kv_use_check, planned_pool
from legroom.verify.verification_run import VerificationRequest, verify

PLAN = {
    "model": "Qwen/Qwen3-8B",
    "kv": {"num_blocks": 65, "block_size": 16},
    "layout": {"kv_cache_bytes": 65},
    "args": {"max_num_seqs": 4, "max_model_len": 512},
    "confidence": {},
}


class Answering(StandIn):
    """Gives these answers (a status and a document, or what makes them of the body) at these paths."""

    def __init__(self, answers, **faults):
        super().__init__(**faults)
        self.answers = answers

    async def handle(self, request):
        from aiohttp import web

        if request.path in self.answers:
            answer = self.answers[request.path]
            status, document = answer(await request.json()) if callable(answer) else answer
            return web.json_response(document, status=status)
        return await super().handle(request)


class Streaming(StandIn):
    """Answers every completion with these bytes."""

    async def complete(self, request, body):
        from aiohttp import web

        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(self.faults["stream"])
        return response


class Guarded(StandIn):
    """Behind a guard whose policy lets in no long prompt."""

    async def complete(self, request, body):
        from aiohttp import web

        if len(body["prompt"]) > 100:
            error = {"message": "The prompt has 496 tokens; at most 100 are served.", "code": "prompt_too_long"}
            return web.json_response({"error": error}, status=400)
        return await super().complete(request, body)


def texts(verification):
    return {check.name: check.text for check in verification.checks}


# What the plan says


def test_a_context_shorter_than_planned_is_not_verified():
    planned = PlannedPool(65, 16, 65, 65, max_model_len=32_768, model="org/tiny")
    checks, verification = checked(StandIn(), planned=planned)
    assert checks["pool"] is True and checks["context"] is False
    assert not verification.ok
    assert "32,768" in texts(verification)["context"]


def test_a_longer_context_holds_what_was_planned():
    checks, verification = checked(StandIn(), planned=PlannedPool(65, 16, 65, 65, max_model_len=256, model="org/tiny"))
    assert checks["context"] is True and verification.ok
    assert verification.notes == ()


def test_another_name_of_the_model_is_noted_and_not_judged():
    _, verification = checked(StandIn(), planned=PlannedPool(65, 16, 65, 65, model="Qwen/Qwen3-8B"))
    assert verification.ok
    assert any("Qwen/Qwen3-8B" in note and "tiny" in note for note in verification.notes)


def test_the_model_and_context_of_a_plan_are_read(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(PLAN))
    planned = planned_pool(str(tmp_path / "p.json"))
    assert (planned.model, planned.max_model_len) == ("Qwen/Qwen3-8B", 512)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(PLAN | {"confidence": []}),
        json.dumps(PLAN | {"args": []}),
        "[" * 100_000,
        "[]",
        json.dumps(PLAN).replace("65", "1e400"),
        json.dumps(PLAN | {"kv": {"num_blocks": 65, "block_size": 0}}),
    ],
    ids=["no map of certainties", "no map of arguments", "too deep", "a list", "an infinite number", "blocks of 0"],
)
def test_a_plan_that_is_none_is_said_to_be_in_plain_words(tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(LegroomError) as caught:
        planned_pool(str(path))
    assert "indices" not in caught.value.message


# What the server answers


@pytest.mark.parametrize("status", [404, 501])
def test_a_server_of_embeddings_is_verified_with_those(status):
    answers = {"/v1/completions": (status, {"error": {"message": "no"}}), "/v1/embeddings": (200, {"data": []})}
    checks, verification = checked(Answering(answers))
    assert verification.ok
    assert checks["completion"] is None and checks["load"] is None
    assert checks["embedding"] is True and checks["full context"] is True
    assert "no completions" in texts(verification)["completion"]


MISSING = (404, {"detail": "Not Found"})


def test_a_reranker_is_verified_with_what_it_pools():
    answers = {"/v1/completions": MISSING, "/v1/embeddings": MISSING, "/pooling": (200, {"data": []})}
    checks, verification = checked(Answering(answers))
    assert verification.ok
    assert checks["pooled input"] is True and checks["full context"] is True


def test_the_guard_may_refuse_an_embedding_of_the_full_context():
    def embed(body):
        error = {"message": "at most 100", "code": "prompt_too_long"}
        return (400, {"error": error}) if len(body["input"]) > 8 else (200, {})

    checks, verification = checked(Answering({"/v1/completions": MISSING, "/v1/embeddings": embed}))
    assert verification.ok
    assert checks["embedding"] is True and checks["full context"] is None


def test_a_server_of_neither_completions_nor_pooling_is_not_verified():
    checks, verification = checked(Answering(dict.fromkeys(("/v1/completions", "/v1/embeddings", "/pooling"), MISSING)))
    assert not verification.ok
    assert checks["pooled input"] is False


@pytest.mark.parametrize("models", [{"data": ["x"]}, {"data": [None]}, {"data": {}}, []])
def test_a_list_of_models_that_is_none_is_said_to_be(models):
    with pytest.raises(LegroomError, match="lists no model"):
        checked(Answering({"/v1/models": (200, models)}))


@pytest.mark.parametrize(
    "stream",
    [
        b'data: {"usage":{"prompt_tokens":null,"completion_tokens":null}}\n\ndata: [DONE]\n\n',
        b'data: {"usage":{"prompt_tokens":"x"}}\n\ndata: [DONE]\n\n',
        b"data: " + b"x" * 700_000 + b"\n\ndata: [DONE]\n\n",
    ],
    ids=["no counts", "counts that are none", "an endless line"],
)
def test_a_stream_that_cannot_be_read_is_not_verified(stream):
    _, verification = checked(Streaming(stream=stream))
    assert not verification.ok


def test_a_server_that_speaks_no_tls_is_not_said_to_be_away():
    with serving(StandIn()) as url, pytest.raises(LegroomError) as caught:
        verify(VerificationRequest(url.replace("http:", "https:")))
    assert "TLS" in caught.value.message
    assert "nothing listens" not in caught.value.message


def test_a_host_that_is_not_known_is_said_to_be():
    with pytest.raises(LegroomError, match="host name"):
        verify(VerificationRequest("http://no-such-host.invalid:8000", load_remote=True))


# The call


@pytest.mark.parametrize("option", ["--svg", "--report"])
def test_a_file_that_cannot_be_written_is_said_before_the_server_is_asked(option, tmp_path, capsys):
    stand_in = StandIn()
    with serving(stand_in) as url:
        assert main(["verify", url, option, str(tmp_path / "none" / "x")]) == 2
    assert option in capsys.readouterr().err
    assert stand_in.keys == set()


@pytest.mark.parametrize("load", ["nonsense", "prompt={x} output=3", "prompt=5 output={"])
def test_a_load_that_is_none_is_said_before_the_server_is_asked(load, capsys):
    stand_in = StandIn()
    with serving(stand_in) as url:
        assert main(["verify", url, "--load", load]) == 2
    assert stand_in.keys == set()


def test_the_result_is_printed_even_if_its_file_cannot_be_written(tmp_path, capsys, monkeypatch):
    def full(*_: object) -> None:
        raise LegroomError("could not write the report: No space left on device")

    monkeypatch.setattr("legroom.cli.verify.write_file", full)
    with serving(StandIn()) as url:
        words = ["verify", url, "--load", "64/16", "--requests", "4", "--json", "--report", str(tmp_path / "x")]
        assert main(words) == 2
    assert json.loads(capsys.readouterr().out)["verified"] is True


def test_credentials_in_the_address_go_before_a_key_of_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "ambient")
    stand_in = StandIn()
    with serving(stand_in) as url:
        main(["verify", url.replace("://", "://user:pw@"), "--load", "64/16", "--requests", "2"])
    assert {key.partition(" ")[0] for key in stand_in.keys} == {"Basic"}


@pytest.mark.parametrize("address", ["http://0.0.0.0:8000", "0.0.0.0:8000", "http://[::]:8000"])
def test_the_address_that_a_server_listens_on_is_this_machine(address):
    assert is_loopback(address)


def test_presets_alone_take_the_lengths_of_the_context():
    assert read_load("full", 512, 1).requests[0].tokens == 512


def test_a_mix_too_long_for_a_path_is_still_a_mix():
    assert len(read_load(f"prompt=lognormal({' ' * 5000}800,0.5) output=100", 2048, 3).requests) == 3


def test_only_what_does_not_fit_the_context_is_cut():
    (fits,) = read_load("100/1500", 2048, 1).requests
    assert (fits.prompt_len, fits.output_len, fits.was_cut) == (100, 1500, False)
    (long,) = read_load("1000/1500", 2048, 1).requests
    assert (long.prompt_len, long.output_len, long.was_cut) == (1000, 1024, True)


# KV use


def test_what_always_fits_is_not_called_more_than_the_pool_has():
    load, pool = Load("x", (LoadRequest(500, 12),) * 4), KvPool(65, 16)
    run = LoadRun("x", 4, 2, (), (LoadSample(0.0, 1.0, 2, 0, 0, own_requests=2),), 1.0, 0)
    check = kv_use_check(run, load, pool, 512)
    assert check.ok is True
    assert check.text.endswith("2 of these requests can take 64")
    assert kv_use_check(LoadRun("x", 4, 3, (), run.samples, 1.0, 0), load, pool, 512).text.endswith("more than it has")


def test_a_full_context_that_the_guard_does_not_let_in_is_not_judged():
    checks, verification = checked(Guarded(), load="32/8")
    assert checks["full context"] is None
    assert "(prompt_too_long)" in texts(verification)["full context"]
    assert checks["load"] is True


@pytest.mark.parametrize("length", [float("inf"), 10**400, -5, "many", None])
def test_a_context_that_is_no_length_is_unknown(length):
    models = {"data": [{"id": "tiny", "max_model_len": length}]}

    async def served(address):
        async with ServerClient(address) as client:
            return await client.served()

    with serving(Answering({"/v1/models": (200, models)})) as address:
        assert asyncio.run(served(address)) == ServedModel("tiny", None)


BARE = {"/v1/models": (200, {"data": [{"id": "tiny"}]}), "/metrics": (404, {})}
"""A server of OpenAI's kind that is no vLLM: it says neither its context nor how it is."""


@pytest.mark.parametrize("status", [401, 403, 404, 405, 501])
def test_a_server_that_keeps_its_health_to_itself_is_verified_by_what_it_serves(status):
    passed, verification = checked(
        Answering(BARE | {"/health": (status, {})}, longest=4096), load="1600/600", requests=4
    )
    assert verification.ok and (passed["health"], passed["load"], passed["memory"]) == (True, True, None)
    assert "cut to 2,048 tokens" in " ".join(verification.notes)
    assert sum("metrics" in note for note in verification.notes) == 1


def test_a_key_that_is_wanted_for_the_models_is_asked_for():
    with pytest.raises(LegroomError, match="an API key"):
        checked(Answering({"/health": (401, {}), "/v1/models": (401, {})}))
