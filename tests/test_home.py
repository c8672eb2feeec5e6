"""Where legroom keeps what it keeps."""

from pathlib import Path

import pytest

from legroom.files import home


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEGROOM_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_it_is_in_the_users_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert home() == Path("/home/somebody/.local/share/legroom")


def test_a_user_whom_the_machine_does_not_know_has_the_root_for_a_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 1_234_567)
    assert home() == Path("/.local/share/legroom")


def test_the_home_of_a_user_who_is_not_there_is_a_folder_of_that_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LEGROOM_HOME", "~nosuchuser/x")
    assert home() == Path("~nosuchuser/x")
