"""Certificates that change, processes that die, and judgements that come late."""

import asyncio
import json
import os
import ssl
import time
from types import SimpleNamespace

import pytest
from running_gate import RunningGate, deployment, review

from legroom.errors import LegroomError
from legroom.exports.gate.certificates import new_authority, new_certificate
from legroom.gate.app import GateApp, GatePolicy
from legroom.gate.judgement import Judgement
from legroom.gate.judges import JudgeOptions, Judges, Undecided
from legroom.gate.meters import GateMeters
from legroom.gate.server import CertificateFiles, server_context, watch_certificates
from legroom.gate.shared_judgements import SharedJudgements

FITS = ("--model", "Qwen/Qwen3-8B", "--max-model-len", "8192")


def serial(gate):
    import socket

    with (
        socket.create_connection(("localhost", gate.port)) as plain,
        gate.context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return secure.getpeercert()["serialNumber"]


def waited_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return False


def test_a_new_certificate_is_used_without_a_restart(tmp_path):
    gate = RunningGate(tmp_path)
    try:
        before = serial(gate)
        gate.write(new_certificate(gate.authority, ["localhost"]))
        assert waited_for(lambda: serial(gate) != before)
        assert gate.ask(deployment(*FITS))["allowed"] is True
        assert gate.figure("legroom_gate_certificate_reloads_total") == 1
    finally:
        gate.end()


def test_a_process_that_dies_is_replaced(tmp_path):
    psutil = pytest.importorskip("psutil")
    gate = RunningGate(tmp_path)
    try:
        assert gate.ask(deployment(*FITS))["allowed"] is True
        child = next(each for each in psutil.Process(gate.process.pid).children() if "gate" in each.cmdline())
        os.kill(child.pid, 9)
        assert waited_for(
            lambda: [each for each in psutil.Process(gate.process.pid).children() if each.pid != child.pid]
        )
        assert waited_for(lambda: gate.raw("GET", "/readyz")[0] == 200)
        assert gate.ask(deployment(*FITS))["allowed"] is True
        assert gate.figure('legroom_gate_reviews_total{outcome="allowed"}') == 2
    finally:
        gate.end()


@pytest.fixture
def watched(tmp_path):
    """Certificate files that are looked at every few milliseconds: what may be done with them, and what came of it."""
    authority, files = new_authority(), CertificateFiles.in_folder(str(tmp_path))

    def write():
        pair = new_certificate(authority, ["localhost"])
        files.certificate.write_bytes(pair.certificate)
        files.key.write_bytes(pair.key)

    write()
    trust = ssl.create_default_context(cadata=authority.certificate.decode())
    return SimpleNamespace(files=files, write=write, meters=GateMeters(1), served=server_context(files), context=trust)


def test_the_files_are_looked_at_again_and_again(watched):
    async def go():
        task = asyncio.create_task(watch_certificates(watched.served, watched.files, watched.meters, look_s=0.02))
        for _ in range(2):
            await asyncio.sleep(0.1)
            watched.write()
        await asyncio.sleep(0.2)
        task.cancel()

    asyncio.run(go())
    assert watched.meters.total("certificate_reloads") >= 2
    assert watched.served.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_certificate_that_cannot_be_loaded_leaves_the_old_one_in_use(watched):
    async def go():
        server = await asyncio.start_server(lambda _, writer: writer.close(), "localhost", 0, ssl=watched.served)
        watched.port = server.sockets[0].getsockname()[1]
        before = await asyncio.to_thread(serial, watched)
        task = asyncio.create_task(watch_certificates(watched.served, watched.files, watched.meters, look_s=0.02))
        await asyncio.sleep(0)
        watched.files.certificate.write_text("broken")
        while not watched.meters.total("certificate_reload_failures"):
            await asyncio.sleep(0.01)
        after = await asyncio.to_thread(serial, watched)
        task.cancel()
        server.close()
        return before, after

    before, after = asyncio.run(asyncio.wait_for(go(), 20))
    assert before == after


class SlowPool:
    """Stands for the worker processes: what is asked takes its time, or fails."""

    def __init__(self, seconds, answer=b'{"outcome": "fits", "sentences": []}'):
        self.seconds, self.answer, self.asked = seconds, answer, []

    async def call(self, name, body, query=None):
        self.asked.append(body)
        await asyncio.sleep(self.seconds)
        from legroom.web.pool import WorkerAnswer

        return WorkerAnswer(200, self.answer)

    async def close(self):
        pass


def judges(seconds, **options):
    made = Judges(JudgeOptions(**options))
    made._pool = SlowPool(seconds)
    return made


def test_a_judgement_that_came_too_late_is_there_the_next_time():
    async def asked():
        slow = judges(0.2, deadline_s=0.05)
        key, _ = slow.known({"kind": "Pod"})
        with pytest.raises(Undecided, match="timeout"):
            await slow.decide(key, {"kind": "Pod"})
        await asyncio.sleep(0.3)
        return slow.known({"kind": "Pod"})[1]

    assert asyncio.run(asked()) == Judgement("fits")


def test_a_verdict_is_there_while_the_flags_that_fix_it_are_looked_for():
    refusal = {"outcome": "does_not_fit", "sentences": ["No."]}

    async def asked():
        made = judges(0, deadline_s=0.1)
        made._pool.answer = json.dumps(refusal | {"is_searched": False}).encode()
        made._search_pool = SlowPool(0.3, json.dumps(refusal | {"sentences": ["No.", "Fix."]}).encode())
        key, _ = made.known({"kind": "Pod"})
        first = await made.decide(key, {"kind": "Pod"})
        await asyncio.sleep(0.4)
        return first.sentences, made.known({"kind": "Pod"})[1].sentences

    assert asyncio.run(asked()) == (("No.",), ("No.", "Fix."))


def test_a_search_that_fails_leaves_the_verdict():
    class FailingPool(SlowPool):
        async def call(self, name, body, query=None):
            raise LegroomError("it takes too long")

    async def asked():
        made = judges(0)
        made._pool.answer = b'{"outcome": "does_not_fit", "sentences": ["No."], "is_searched": false}'
        made._search_pool = FailingPool(0)
        return await made.decide(made.known({"kind": "Pod"})[0], {"kind": "Pod"})

    assert asyncio.run(asked()).outcome == "does_not_fit"


def test_who_asks_for_the_same_at_the_same_time_waits_for_one_answer():
    async def asked():
        slow = judges(0.05)
        key, _ = slow.known({"kind": "Pod"})
        answers = await asyncio.gather(*(slow.decide(key, {"kind": "Pod"}) for _ in range(20)))
        return len(slow._pool.asked), set(answers)

    assert asyncio.run(asked()) == (1, {Judgement("fits")})


def test_more_objects_at_once_than_may_wait_are_let_through():
    async def asked():
        slow = judges(0.2, waiting=2)
        parts = [{"kind": "Pod", "n": number} for number in range(3)]
        keys = [slow.known(part)[0] for part in parts]
        first = [asyncio.create_task(slow.decide(key, part)) for key, part in zip(keys[:2], parts[:2], strict=True)]
        await asyncio.sleep(0.02)
        with pytest.raises(Undecided, match="overload"):
            await slow.decide(keys[2], parts[2])
        await asyncio.gather(*first)

    asyncio.run(asked())


def test_only_so_many_judgements_are_remembered():
    async def asked():
        quick = judges(0)
        for number in range(5_000):
            quick._remember(str(number).encode(), Judgement("fits"))
        return len(quick._known)

    assert asyncio.run(asked()) == 4_096


def test_figures_are_summed_over_the_processes():
    meters = GateMeters(2)
    meters.choose_row(0)
    meters.count("ending:refused")
    meters.took(0.004)
    meters.choose_row(1)
    meters.count("ending:refused")
    meters.took(9.0)
    page = meters.page()
    assert 'legroom_gate_reviews_total{outcome="refused"} 2' in page
    assert 'legroom_gate_decision_seconds_bucket{le="0.005"} 1' in page
    assert 'legroom_gate_decision_seconds_bucket{le="+Inf"} 2' in page


def test_a_folder_without_a_certificate_ends_the_start(capsys, tmp_path):
    from legroom.cli.main import main

    assert main(["gate", "--tls-dir", str(tmp_path), "--port", "0"]) == 2
    assert "no certificate" in capsys.readouterr().err


REFUSAL = {"outcome": "does_not_fit", "sentences": ["No."]}
UNSEARCHED = json.dumps(REFUSAL | {"is_searched": False}).encode()
SEARCHED = json.dumps(REFUSAL | {"sentences": ["No.", "Fix."]}).encode()


def searching(seconds, shared=None, count=lambda name: None, **options):
    """Judges whose verdicts come at once, and whose searches take so many seconds."""
    made = Judges(JudgeOptions(**options), shared, count)
    made._pool, made._search_pool = SlowPool(0, UNSEARCHED), SlowPool(seconds, SEARCHED)
    return made


def test_an_answer_does_not_wait_for_a_search():
    async def asked():
        made = searching(0.5)
        began_s = time.monotonic()
        judgement = await made.decide(made.known({"kind": "Pod"})[0], {"kind": "Pod"})
        return judgement.is_searched, time.monotonic() - began_s

    is_searched, took_s = asyncio.run(asked())
    assert not is_searched
    assert took_s < 0.3


def test_an_answer_waits_for_a_search_as_long_as_was_chosen():
    async def asked():
        made = searching(0.1, wait_s=2.0)
        return await made.decide(made.known({"kind": "Pod"})[0], {"kind": "Pod"})

    assert asyncio.run(asked()).sentences == ("No.", "Fix.")


def test_a_first_fix_is_answered_at_once_while_the_search_goes_on():
    async def asked():
        made = searching(0.05)
        made._pool.answer = json.dumps(REFUSAL | {"is_searched": False, "has_fixes": True}).encode()
        judgement = await made.decide(made.known({"kind": "Pod"})[0], {"kind": "Pod"})
        await asyncio.sleep(0.1)
        return judgement, made.known({"kind": "Pod"})[1]

    first, next_try = asyncio.run(asked())
    assert (first.is_searched, first.has_fixes, next_try.sentences) == (False, True, ("No.", "Fix."))


def test_who_asks_again_does_not_start_a_second_search():
    async def asked():
        made = searching(0.2)
        key, _ = made.known({"kind": "Pod"})
        for _ in range(3):
            await made.decide(key, {"kind": "Pod"})
        return len(made._search_pool.asked)

    assert asyncio.run(asked()) == 1


def test_the_oldest_search_is_dropped_where_too_many_wait_and_begins_anew_with_the_next_try():
    async def asked():
        dropped = []
        made = searching(0.15, searches=1, count=dropped.append)
        parts = [{"kind": "Pod", "n": number} for number in range(3)]
        for part in parts:  # the first is under way, the second waits and is pushed out by the third
            await made.decide(made.known(part)[0], part)
        await asyncio.sleep(0.4)
        searched = [made.known(part)[1].is_searched for part in parts]
        await made.decide(made.known(parts[1])[0], parts[1])
        await asyncio.sleep(0.2)
        return dropped, searched, made.known(parts[1])[1].is_searched

    assert asyncio.run(asked()) == (["searches_dropped"], [True, False, True], True)


def test_a_search_that_another_process_has_begun_is_not_begun_twice():
    async def asked():
        shared = SharedJudgements()
        one_process, another = searching(0.1, shared), searching(0.1, shared, wait_s=2.0)
        key, _ = one_process.known({"kind": "Pod"})
        await one_process.decide(key, {"kind": "Pod"})
        another.known({"kind": "Pod"})
        judgement = await another.decide(key, {"kind": "Pod"})
        return judgement.sentences, len(another._pool.asked), len(another._search_pool.asked)

    assert asyncio.run(asked()) == (("No.", "Fix."), 0, 0)


def test_a_record_that_is_half_written_counts_as_not_there():
    shared, key = SharedJudgements(), bytes(range(32))
    shared.put(key, Judgement("does_not_fit", ("No.",), False, True), 7.0)
    assert shared.get(key).judgement == Judgement("does_not_fit", ("No.",), False, True)
    assert shared.get(key).searched_until_s == 7.0
    place = shared._memory.find(b"No.")
    shared._memory[place : place + 2] = b"Ye"
    assert shared.get(key) is None


def test_a_judgement_too_long_to_share_stays_with_its_process():
    shared, key = SharedJudgements(), bytes(32)
    shared.put(key, Judgement("does_not_fit", ("x" * 3_000,)))
    assert shared.get(key) is None


@pytest.mark.parametrize("mode", ["warn", "enforce"])
def test_an_answer_before_the_search_is_done_says_so_and_is_counted(mode):
    async def asked():
        meters, replies = GateMeters(1), []
        app = GateApp(GatePolicy(mode), searching(0.5), meters)

        async def receive():
            return {"type": "http.request", "body": json.dumps(review(deployment())).encode()}

        async def send(message):
            replies.append(message)

        await app({"type": "http", "path": "/validate", "method": "POST"}, receive, send)
        return replies[-1]["body"].decode(), meters.page()

    body, page = asyncio.run(asked())
    assert "Flags that fix it are being searched for: the answer to the next try has them." in body
    assert "legroom_gate_answered_before_search_total 1" in page


def test_waiting_for_flags_longer_than_the_deadline_is_refused(capsys):
    from legroom.cli.main import main

    assert main(["gate", "--deadline", "2", "--wait-for-flags", "3"]) == 2
    assert "--wait-for-flags" in capsys.readouterr().err
