"""`legroom mcp` as a command: addresses, and a missing SDK."""

import socket
import sys

import pytest

from legroom.cli.main import main
from legroom.cli.mcp import address_of
from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import is_loopback_host


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", ("127.0.0.1", 8722)),
        (":9000", ("127.0.0.1", 9000)),
        ("localhost", ("localhost", 8722)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("[::1]:9000", ("::1", 9000)),
        ("[::1]", ("::1", 8722)),
    ],
)
def test_an_address_is_read_as_written(text, address):
    assert address_of(text) == address


@pytest.mark.parametrize("text", ["host:", "host:x", "host:0", "host:70000", "::1", "[::1", "[::1]9000", "h:١"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(LegroomError):
        address_of(text)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_only_this_machine_reaches_a_loopback_address(host, loopback):
    assert is_loopback_host(host) is loopback


def test_without_the_sdk_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    monkeypatch.delitem(sys.modules, "legroom.mcp.mcp_tools", raising=False)
    assert main(["mcp"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert "pip install 'legroom[mcp]'" in err


def test_a_busy_port_is_told(capsys):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert main(["mcp", "--http", f"127.0.0.1:{busy.getsockname()[1]}"]) == 3
    assert "cannot listen" in capsys.readouterr().err
