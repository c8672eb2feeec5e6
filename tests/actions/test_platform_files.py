"""Files that legroom rewrites for others stay theirs."""

import stat

import pytest

from legroom.actions.platform import ActionFailed, restore_file, write_atomically


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_file_keeps_its_mode_when_it_is_written_and_put_back(tmp_path, mode):
    path = tmp_path / "supervisord.conf"
    path.write_text("password=hush")
    path.chmod(mode)
    write_atomically(path, "other")
    restore_file(path, "password=hush")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("password=hush", mode)


def test_a_link_stays_one(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_what_a_killed_legroom_left_beside_it_is_no_hindrance(tmp_path):
    (tmp_path / ".a.legroom").write_text("half")
    write_atomically(tmp_path / "a", "whole", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ActionFailed, match="cannot be written"):
        write_atomically(tmp_path / "file" / "inside", "x")
