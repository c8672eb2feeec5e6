"""The signatures know what every release writes, whatever stands around it, in linear time."""

import re

import pytest
import re2
from release_messages import all_messages, family

from legroom.explain.catalog_entries import entry

SAID_BY = {
    "LR103": [*family("free_lt_util")],
    "LR201": [*family("no_blocks")],
    "LR203": [*family("seq_gt_kv"), *family("needed_kv")],
    "LR205": [*family("profiling_error")],
    "LR403": [*family("preempt_v0")],
}
BEGINNINGS = {
    "LR103": "Free memory on device {init_snapshot.device_}",
    "LR202": "max_num_seqs ({max_num_reqs}) exceeds",
    "LR201": "Cannot auto-fit max_model_len: not enough GPU memory",
    "LR305": "CUDA out of memory occurred when warming up",
    "LR402": "The {prompt_type} prompt contains a(n) {modality} item with",
    "LR408": "Input prompt (",
    "LR411": "Aborted due to the lack of CPU swap space",
    "LR906": "Expandable segments are not compatible",
    "LR908": "No available shared memory broadcast block",
}


def messages():
    for entry_id, known in SAID_BY.items():
        yield from ((entry_id, message) for message in known)
    for entry_id, beginning in BEGINNINGS.items():
        written_so = [message for message in all_messages() if message.template.startswith(beginning)]
        assert written_so, beginning
        yield from ((entry_id, message) for message in written_so)


def written(template):
    """The message as a log shows it."""
    return re.sub(r"\{[^{}]*\}", "7", template.replace("{preemption_mode:%s}", "PreemptionMode.RECOMPUTE"))


@pytest.mark.parametrize(("entry_id", "message"), list(messages()), ids=lambda value: getattr(value, "id", value))
def test_a_signature_knows_the_message_of_its_releases(entry_id, message):
    line = "(EngineCore pid=7) ERROR 11-01 10:00:00 [core.py:1] ValueError: " + written(message.template)
    assert any(re2.search(signature.pattern, line) for signature in entry(entry_id).signatures), line


@pytest.mark.parametrize("size", [10_000, 1_000_000])
def test_hostile_lines_are_read_to_their_end(size):
    from legroom.explain.catalog_entries import bundled

    for line in ("max seq len (" * (size // 13), "9" * size, "cudaHostRegister" * (size // 16), "(" * size):
        for known in bundled():
            for signature in known.signatures:
                re2.search(signature.pattern, line)
