"""What a signal asks for, how long a server may take, how often it may be restarted."""

from __future__ import annotations

import json
import os
import signal
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.run.health import has_clients, port_problem
from legroom.run.restart_policy import BUDGET_WINDOW_S, MAX_RESTART_DELAY_S, RestartBudget
from legroom.run.run_file import RunFile
from legroom.run.stopping import (
    ERROR_REPLY_S,
    EXIT_GRACE_S,
    KILL_GRACE_S,
    SHUTDOWN_GRACE_S,
    STARTING_GRACE_S,
    STOPPED_REPLY_S,
    Signals,
    Stopping,
)


class Recorder:
    """A server that only takes notes."""

    def __init__(self, has_engines: bool = False, api_servers: int = 1, is_stopped: bool = False) -> None:
        self.got: list[object] = []
        self._is_stopped = is_stopped
        self._has_engines, self._api_servers = has_engines, api_servers

    def send(self, number: int) -> None:
        self.got.append(signal.Signals(number).name)

    def kill(self) -> None:
        self.got.append("kill")

    def has_stopped_engine(self) -> bool:
        return self._is_stopped

    def has_several_api_servers(self) -> bool:
        return self._api_servers > 1

    def kill_engines(self) -> bool:
        if self._has_engines:
            self.got.append("kill engines")
        return self._has_engines


@pytest.fixture
def world():
    clock = [100.0]
    stopping = Stopping(60.0, lambda line: None, lambda: clock[0])
    stopping.is_up = True
    return stopping, Recorder(), clock


def test_sigterm_drains_with_a_deadline(world):
    stopping, server, clock = world
    stopping.on_signal(signal.SIGTERM, server)
    assert server.got == ["SIGTERM"]
    assert stopping.stop_requested
    assert stopping.left_s() == 60 + SHUTDOWN_GRACE_S
    clock[0] += 60 + SHUTDOWN_GRACE_S
    stopping.check(server)
    assert server.got == ["SIGTERM", "kill"]


def test_a_server_that_is_not_up_has_nothing_to_finish(world):
    stopping, server, _ = world
    stopping.is_up = False
    stopping.on_signal(signal.SIGTERM, server)
    assert stopping.left_s() == STARTING_GRACE_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_engine_is_not_waited_for(behind_a_guard, number):
    stopping, _, _, closed = behind_a_guard
    server = Recorder(has_engines=True, is_stopped=True)
    stopping.on_signal(number, server)
    assert (closed, server.got, stopping.left_s()) == ([], ["kill engines"], STOPPED_REPLY_S)


def test_an_engine_that_is_stopped_during_the_drain_ends_it(world):
    stopping, _, clock = world
    server = Recorder(has_engines=True)
    stopping.on_signal(signal.SIGTERM, server)
    assert stopping.next_check_s() <= 1.0
    server._is_stopped = True
    stopping.check(server)
    stopping.check(server)
    assert (server.got, stopping.left_s()) == (["SIGTERM", "kill engines"], STOPPED_REPLY_S)
    clock[0] += STOPPED_REPLY_S
    stopping.check(server)
    assert server.got[2:] == ["SIGINT"]


@pytest.fixture
def behind_a_guard():
    clock, closed = [100.0], []
    stopping = Stopping(60.0, lambda line: None, lambda: clock[0], closed.append)
    stopping.is_up = True
    return stopping, Recorder(), clock, closed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_with_a_guard_the_server_hears_of_it_when_it_is_empty(behind_a_guard, number):
    stopping, server, _, closed = behind_a_guard
    stopping.on_signal(number, server)
    assert (closed, server.got) == ([60.0], [])
    stopping.on_drained(server)
    stopping.on_drained(server)
    assert (server.got, stopping.left_s()) == (["SIGTERM"], 60 + SHUTDOWN_GRACE_S)


def test_what_is_inside_gets_no_more_time_by_a_guard(behind_a_guard):
    stopping, server, clock, _ = behind_a_guard
    stopping.on_signal(signal.SIGTERM, server)
    clock[0] += 60
    stopping.check(server)
    assert (server.got, stopping.left_s()) == (["SIGTERM"], SHUTDOWN_GRACE_S)
    clock[0] += SHUTDOWN_GRACE_S
    stopping.check(server)
    assert server.got == ["SIGTERM", "kill"]


def test_a_second_signal_does_not_wait_for_a_guard(behind_a_guard):
    stopping, server, _, _ = behind_a_guard
    stopping.on_signal(signal.SIGTERM, server)
    stopping.on_signal(signal.SIGTERM, server)
    assert (server.got, stopping.left_s()) == (["SIGINT"], KILL_GRACE_S)
    stopping.on_drained(server)
    assert server.got == ["SIGINT"]


def test_a_guard_that_drains_for_a_restart_does_not_drain_again_for_the_end(behind_a_guard):
    stopping, server, _, closed = behind_a_guard
    stopping.on_signal(signal.SIGHUP, server)
    stopping.on_signal(signal.SIGTERM, server)
    assert (len(closed), server.got) == (1, [])
    stopping.on_drained(server)
    assert server.got == ["SIGTERM"]


def test_a_guard_that_has_drained_needs_no_more_waiting(behind_a_guard):
    stopping, server, _, closed = behind_a_guard
    stopping.on_signal(signal.SIGHUP, server)
    stopping.on_drained(server)
    stopping.on_signal(signal.SIGTERM, server)
    assert (len(closed), server.got) == (1, ["SIGTERM", "SIGTERM"])


def test_the_guard_of_the_next_start_admits(behind_a_guard):
    stopping, server, _, closed = behind_a_guard
    stopping.on_signal(signal.SIGHUP, server)
    stopping.reset()
    stopping.on_signal(signal.SIGTERM, server)
    assert len(closed) == 2


def test_a_guard_drains_for_sigterm_alone(behind_a_guard):
    stopping, server, _, closed = behind_a_guard
    stopping.on_signal(signal.SIGINT, server)
    assert (closed, server.got) == ([], ["SIGINT"])


def test_a_server_whose_clients_have_all_gone_is_asked_to_go_before_the_deadline():
    clock, connected = [100.0], [True]
    stopping = Stopping(60.0, lambda line: None, lambda: clock[0], has_clients=lambda: connected[0])
    server, stopping.is_up = Recorder(has_engines=True), True
    stopping.on_signal(signal.SIGINT, server)
    stopping.check(server)
    assert server.got == ["kill engines"]
    assert stopping.next_check_s() < stopping.left_s()
    connected[0] = False
    stopping.check(server)
    assert server.got == ["kill engines", "SIGINT"]
    assert stopping.left_s() == EXIT_GRACE_S


def test_several_api_servers_whose_clients_have_all_gone_are_killed_at_once():
    connected = [True]
    stopping = Stopping(60.0, lambda line: None, has_clients=lambda: connected[0])
    server, stopping.is_up = Recorder(has_engines=True, api_servers=2), True
    stopping.on_signal(signal.SIGINT, server)
    stopping.check(server)
    assert server.got == ["kill engines"]
    connected[0] = False
    stopping.check(server)
    assert server.got == ["kill engines", "kill"]
    assert stopping.exit_code(137) == 130


def test_a_server_that_is_killed_is_not_asked_to_go_as_well():
    clock = [100.0]
    stopping = Stopping(60.0, lambda line: None, lambda: clock[0])
    server, stopping.is_up = Recorder(has_engines=True), True
    stopping.on_signal(signal.SIGINT, server)
    stopping.on_signal(signal.SIGINT, server)
    clock[0] += ERROR_REPLY_S
    stopping.check(server)
    assert server.got == ["kill engines", "kill"]


def test_a_client_is_seen_while_it_is_connected_and_no_longer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not has_clients(port)
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = server.accept()
            assert has_clients(port)
        accepted.close()
        assert not has_clients(port)


def test_after_sigterm_a_second_signal_ends_it_at_once_and_a_third_kills(world):
    stopping, server, _ = world
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        stopping.on_signal(number, server)
    assert server.got == ["SIGTERM", "SIGINT", "kill"]
    assert stopping.left_s() == KILL_GRACE_S


def test_a_second_sigint_kills(world):
    stopping, server, _ = world
    for number in (signal.SIGINT, signal.SIGINT):
        stopping.on_signal(number, server)
    assert server.got == ["SIGINT", "kill"]


@pytest.fixture
def ending(world):
    stopping, _, clock = world
    server = Recorder(has_engines=True)
    stopping.on_signal(signal.SIGINT, server)
    return stopping, server, clock


def test_sigint_takes_the_engines_away_so_that_the_api_server_answers_its_clients(ending):
    stopping, server, _ = ending
    assert (server.got, stopping.left_s()) == (["kill engines"], ERROR_REPLY_S)


def test_an_api_server_that_has_not_noticed_is_asked_to_go_and_killed_at_last(ending):
    stopping, server, clock = ending
    for patience_s in (ERROR_REPLY_S, EXIT_GRACE_S):
        clock[0] += patience_s
        stopping.check(server)
    assert server.got == ["kill engines", "SIGINT", "kill"]


def test_a_server_that_is_still_starting_has_nobody_to_answer():
    stopping, server = Stopping(60.0, lambda line: None), Recorder(has_engines=True)
    stopping.on_signal(signal.SIGINT, server)
    assert server.got == ["SIGINT"]


def test_a_server_that_a_ctrl_c_had_to_kill_ended_by_ctrl_c(ending):
    stopping, server, clock = ending
    assert stopping.exit_code(137) == 137  # somebody else's kill
    for patience_s in (ERROR_REPLY_S, EXIT_GRACE_S):
        clock[0] += patience_s
        stopping.check(server)
    assert [stopping.exit_code(code) for code in (137, 0, 1)] == [130, 0, 1]


def test_a_server_that_did_not_drain_in_time_was_killed(world):
    stopping, server, clock = world
    stopping.on_signal(signal.SIGTERM, server)
    clock[0] += 60 + SHUTDOWN_GRACE_S
    stopping.check(server)
    assert stopping.exit_code(137) == 137


def test_sighup_drains_and_starts_anew(world):
    stopping, server, _ = world
    stopping.on_signal(signal.SIGHUP, server)
    assert server.got == ["SIGTERM"]
    assert stopping.restart_requested
    assert not stopping.stop_requested
    stopping.reset()
    assert not stopping.is_stopping
    assert stopping.left_s() is None


def test_sighup_without_a_server_is_kept_for_the_next(world):
    stopping, _, _ = world
    stopping.on_signal(signal.SIGHUP, None)
    assert stopping.restart_requested
    assert stopping.left_s() is None


def test_sigquit_is_not_said_to_drain():
    lines: list[str] = []
    stopping, server = Stopping(60.0, lines.append), Recorder()
    stopping.is_up = True
    stopping.on_signal(signal.SIGQUIT, server)
    assert server.got == ["SIGQUIT"]
    assert lines[0].startswith("SIGQUIT: ending at once")


def test_sigterm_after_sighup_is_for_good(world):
    stopping, server, _ = world
    stopping.on_signal(signal.SIGHUP, server)
    stopping.on_signal(signal.SIGTERM, server)
    assert stopping.stop_requested
    assert not stopping.restart_requested


def test_other_signals_are_passed_on(world):
    stopping, server, _ = world
    stopping.on_signal(signal.SIGUSR1, server)
    assert server.got == ["SIGUSR1"]
    assert not stopping.is_stopping


def test_a_ctrl_c_is_heard_even_where_a_script_started_the_run_in_its_background():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell without job control does for `command &`
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received() == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture
def terminal(monkeypatch):
    """A terminal that can be closed."""
    there = [True]
    monkeypatch.setattr("legroom.run.stopping._has_terminal", lambda: bool(there))
    before = signal.getsignal(signal.SIGHUP)
    yield there
    signal.signal(signal.SIGHUP, before)


def hung_up(signals, times):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGHUP)
    return signals.received()


def test_a_terminal_that_closes_asks_to_stop(terminal):
    with Signals() as signals:
        assert hung_up(signals, 1) == [signal.SIGHUP]
        terminal.clear()
        assert hung_up(signals, 2) == [signal.SIGTERM]
        assert hung_up(signals, 1) == []


def test_under_nohup_a_terminal_that_closes_asks_for_nothing(terminal, monkeypatch):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals() as signals:
        terminal.clear()
        assert hung_up(signals, 1) == []
        assert hung_up(signals, 1) == []
        monkeypatch.setattr("legroom.run.stopping._TERMINAL_CLOSE_S", 0.0)
        assert hung_up(signals, 1) == [signal.SIGHUP]


@given(st.integers(0, 20), st.lists(st.floats(0, 3000), max_size=60))
def test_no_hour_has_more_restarts_than_its_budget(per_hour, gaps):
    budget, now, taken = RestartBudget(per_hour, 1.0), 0.0, []
    for gap in gaps:
        now += gap
        if budget.consume(now) is not None:
            taken.append(now)
        assert sum(now - BUDGET_WINDOW_S < at for at in taken) <= per_hour


@given(st.floats(0.01, 100))
def test_every_restart_of_an_hour_waits_longer_up_to_a_limit(first):
    budget = RestartBudget(12, first)
    delays = [budget.consume(0.0) for _ in range(12)]
    assert delays == sorted(delays)
    assert delays[0] == first
    assert max(delays) <= MAX_RESTART_DELAY_S
    assert budget.consume(0.0) is None


def test_a_budget_may_be_large():
    budget = RestartBudget(2000, 0.0)
    assert [budget.consume(0.0) for _ in range(2000)] == [0.0] * 2000


def test_a_port_that_is_bound_but_does_not_listen_is_in_use():
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        assert "in use" in port_problem("127.0.0.1", port)
    assert port_problem("127.0.0.1", port) == ""


def test_a_port_that_only_old_connections_hold_is_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()  # who closes first keeps the port for a minute
    assert port_problem("127.0.0.1", port) == ""


def test_a_run_without_a_folder_to_write_to_is_held_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "file"))
    lines: list[str] = []
    with RunFile(8000).lock(lines.append):
        assert "a second run" in lines[0]


@pytest.mark.parametrize("flag", ["--port", "host", "--ssl_certfile"])
def test_changes_that_would_move_the_server_are_refused_once(tmp_path, monkeypatch, flag):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    file = RunFile(8000)
    file.write({"pid": 1})
    (tmp_path / "runs/8000.flags.json").write_text(json.dumps({"flags": {flag: "1", "--seed": "1"}}))
    changes, problem = file.pop_changes()
    assert changes is None
    assert flag in problem
    assert file.pop_changes() == (None, "")


def test_changes_for_the_next_restart_are_taken_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    file = RunFile(8000)
    file.write({"pid": 1})
    (tmp_path / "runs/8000.flags.json").write_text(json.dumps({"flags": {"--seed": "1"}}))
    assert file.pop_changes() == ({"flags": {"--seed": "1"}}, "")
    assert file.pop_changes() == (None, "")


def test_changes_that_cannot_be_read_are_said_and_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    file = RunFile(8000)
    file.write({"pid": 1})
    (tmp_path / "runs/8000.flags.json").write_text("[]")
    changes, problem = file.pop_changes()
    assert changes is None
    assert "nothing is changed" in problem


def test_another_runs_file_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path))
    file = RunFile(8000)
    file.write({"pid": 1})
    file.remove()
    assert file.path.exists()
