"""What is recorded goes where it can be kept, and never over what is played."""

import pytest

from legroom.cli.main import main


@pytest.mark.parametrize("how", ["--daemon", "--rehearse=old.jsonl"])
def test_the_sidecar_records_nothing_and_says_so(tmp_path, capsys, how):
    assert main(["watch", "http://127.0.0.1:1", how, "--record", str(tmp_path / "new.jsonl")]) == 2
    assert "for the sidecar" in capsys.readouterr().err
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.parametrize("name", ["old.jsonl", "../{folder}/old.jsonl", "link.jsonl"])
def test_a_recording_is_not_overwritten_while_it_is_played(tmp_path, capsys, name):
    old = tmp_path / "old.jsonl"
    old.write_text('{"legroom": "recording"}\n')
    (tmp_path / "link.jsonl").symlink_to(old)
    same = tmp_path / name.format(folder=tmp_path.name)
    assert main(["watch", "--replay", str(old), "--record", str(same)]) == 2
    assert "would overwrite" in capsys.readouterr().err
    assert old.read_text() == '{"legroom": "recording"}\n'
