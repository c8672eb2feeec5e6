"""How an upgrade is told on a terminal."""

from dataclasses import replace

import pytest

from legroom.drawing.terminal import Style
from legroom.facts.releases import release
from legroom.planning.machine import Machine
from legroom.planning.upgrades.kv_changes import ByteChange
from legroom.planning.upgrades.release_upgrade import upgrade
from legroom.render.upgrade_text import upgrade_text, upgrade_words
from legroom.units import GIB, MIB
from legroom.vllm.args import ServeArgs


@pytest.fixture(scope="module")
def made():
    args = ServeArgs("llama-3.1-8b", max_model_len=32768)
    return upgrade(args, release("0.19.1"), release("0.20.0"), Machine("h100"))


def section(text, title):
    return text.partition(f"\n{title}\n")[2].partition("\n\n")[0]


def test_no_line_is_wider_than_the_terminal(made):
    assert all(len(line) <= 80 for line in upgrade_text(made, ("VllmKvPressure",), Style(width=80)).splitlines())


def test_changes_below_a_mebibyte_are_one_line(made):
    changes = (ByteChange("a", "why", GIB), ByteChange("b", "small", MIB // 2), ByteChange("c", "small", MIB // 4))
    told = section(upgrade_text(replace(made, changes=changes)), "Why the KV cache is not what it was")
    assert told.splitlines() == ["   +1.00 GiB  a: why", "    +0.8 MiB  smaller changes"]


def test_a_first_start_like_the_later_ones_is_not_told_twice(made):
    assert "first start" not in upgrade_text(made)


def test_nothing_that_changes_leaves_its_section_out(made):
    text = upgrade_text(replace(made, changes=(), outside=(), flags=(), metrics=()))
    assert "Why the KV cache" not in text
    assert "Beside the budget" not in text
    assert "Flags" not in text
    assert "Metrics and alerts" not in text


def test_alerts_that_fall_silent_come_with_how_to_export_them_anew(made):
    told = section(upgrade_text(made, ("VllmKvPressure",)), "Metrics and alerts")
    assert "VllmKvPressure" in told
    assert "legroom export prometheus" in told


def test_a_command_that_cannot_keep_the_capacity_says_so(made):
    text = upgrade_text(replace(made, kept=replace(made.kept, keeps_requests=False, gives_up=("8 bits",))))
    assert "No setting of this release that legroom knows holds as much" in text
    assert "It gives up: 8 bits." in text


def test_the_ascii_text_is_ascii(made):
    assert upgrade_text(made, (), Style(width=80, unicode=False)).isascii()


def test_a_tight_command_is_called_tight_before_it_can_be_copied(made):
    tight = replace(made.kept, plan=replace(made.kept.plan, verdict="tight", reason="why"), flags={"max_num_seqs": 8})
    changed = replace(made, kept=tight)
    last = section(upgrade_text(changed) + "\n\n", "The command that keeps today's capacity on 0.20.0")
    assert last.index("The unchanged command fits") < last.index("This one is tight: why.") < last.index("$ vllm serve")
    words = upgrade_words(changed)
    assert words["conclusion"].endswith("--max-num-seqs 8 keeps today's capacity, but tightly.")
    assert words["caveats"][-1] == "This one is tight: why."
    assert all(text in " ".join(upgrade_text(changed).split()) for text in (words["conclusion"], words["kept"]))


def test_an_unchanged_command_that_is_sure_to_hold_as_much_is_not_changed():
    args = ServeArgs("llama-3.1-8b", max_model_len=16384)
    made = upgrade(args, release("0.11.0"), release("0.32.0"), Machine("rtx4090"))
    assert made.new.verdict == "fits" and made.new.memory.kv.max_concurrency > made.old.memory.kv.max_concurrency
    assert made.kept.flags == {}
    assert upgrade_words(made)["conclusion"].startswith("The command need not change")


def test_ranges_and_what_else_changes_are_told():
    args = ServeArgs("qwen3-30b-a3b", max_model_len=8192)
    words = upgrade_words(upgrade(args, release("0.10.2"), release("0.32.0"), Machine("h100")))
    assert words["range"].endswith("they overlap, so the difference may be none.")
    assert words["metrics"]
    assert words["conclusion"].endswith("do change: see below.")
