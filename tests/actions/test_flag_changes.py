"""Which commands can have their flags changed, and how a change reads."""

import pytest

from legroom.actions.platform import ActionFailed, FlagChange, require_server


def test_only_a_command_that_starts_vllm_can_have_its_flags_changed():
    require_server(["/usr/bin/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "here")
    require_server(["/opt/venv/bin/vllm", "serve", "m"], "here")
    with pytest.raises(ActionFailed, match="cannot see"):
        require_server(["/bin/bash", "/opt/start.sh"], "here")
    require_server(["--model", "m"], "an image", in_image=True)
    with pytest.raises(ActionFailed, match="cannot see"):
        require_server(["/bin/bash", "-c", "vllm serve m"], "an image", in_image=True)


def test_a_change_reads_as_a_sentence():
    change = FlagChange({"--max-model-len": "8192", "--enforce-eager": "", "--seed": None}, {"A": "1", "B": None})
    assert str(change) == "--max-model-len 8192, --enforce-eager, without --seed, A=1, without B"
