"""`legroom explain`: tells, lists, searches, and says what is nearest."""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import legroom
from legroom.cli.main import main
from legroom.diagnosis.log_diagnosis import read_log
from legroom.drawing.terminal import Style
from legroom.explain.catalog_entries import best_entry, bundled, search
from legroom.render.explain_text import explain_text
from legroom.units import GIB

ENTRY = Path(legroom.__file__).parent / "catalog/entries/LR103.json"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))


def told(capsys, *words, code=0):
    assert main(["explain", *words]) == code
    return capsys.readouterr().out


def test_a_story_has_all_its_parts(capsys):
    text = told(capsys, "LR203")
    for heading in (
        "What the log says",
        "Why vLLM does it",
        "The arithmetic",
        "For example",
        "What helps",
        "What not to try",
        "Releases",
        "How to verify",
        "When it is something else",
    ):
        assert f"\n{heading}\n" in text
    assert "16.00 GiB" in text
    assert "[tried in 6: worked 6, failed 0]" in " ".join(text.split())


def test_an_id_may_be_written_small(capsys):
    assert told(capsys, "lr203") == told(capsys, "LR203")


def test_chinese_headings_and_texts(capsys):
    text = told(capsys, "LR203", "--lang", "zh")
    assert "不要尝试" in text
    assert "KV 缓存放不下" in text


def test_json_is_one_document(capsys):
    document = json.loads(told(capsys, "LR203", "--json"))
    assert document["cause"] == "kv_too_small_for_max_len"
    assert document["workarounds"][0]["counted"] == {"tried": 6, "worked": 6, "failed": 0, "success_rate": 1.0}


def test_the_list_names_every_entry(capsys):
    lines = told(capsys).splitlines()
    assert len(lines) == len(bundled())
    assert len(json.loads(told(capsys, "--json"))["entries"]) == len(bundled())


def test_an_unknown_id_is_told_with_the_nearest(capsys):
    assert main(["explain", "LR207"]) == 2
    err = capsys.readouterr().err
    assert "LR206" in err
    assert "LR205" in err


def test_one_thing_is_asked_at_a_time(capsys):
    assert main(["explain", "LR203", "--search", "x"]) == 2
    assert "explain what?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("query", "entry_id"),
    [
        ("cumem", "LR407"),
        ("kv_too_small_for_max_len", "LR203"),
        ("LR302", "LR302"),
        ("capture_model", "LR302"),
        ("上下文太长", "LR203"),
        ("碎片", "LR406"),
        ("内存泄漏", "LR405"),
        ("抢占", "LR403"),
        ("OOMKilled", "LR501"),
        ("/dev/shm", "LR503"),
        ("illegal memory access", "LR901"),
        ("swap space", "LR411"),
        ("prompt_logprobs", "LR409"),
        ("WSL", "LR505"),
        ("orphan", "LR104"),
        ("unrecognized arguments", "LR903"),
        ("hybrid_state_cache_limit", "LR202"),
        ("GB10", "LR502"),
        ("EngineDeadError", "LR908"),
        ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "LR201"),
        (
            "Free memory on device (22.41/23.99 GiB) on startup is less than desired GPU memory utilization "
            "(0.95, 22.79 GiB).",
            "LR103",
        ),
        ("RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests.", "LR305"),
    ],
)
def test_a_search_puts_the_right_entry_first(query, entry_id):
    assert search(query, bundled())[0].entry.id == entry_id


def test_every_entry_is_found_by_its_title_and_its_example_line():
    for entry in bundled():
        assert entry in [hit.entry for hit in search(entry.title.en, bundled(), 3)]
        assert entry in [hit.entry for hit in search(entry.title.zh, bundled(), 3)]
        for signature in entry.signatures:
            assert entry in [hit.entry for hit in search(signature.example, bundled(), 5)], entry.id


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("outside", "outside: Used beside the budget: the CUDA context"),
        ("what is headroom", "headroom: Free at the peak"),
        ("余量", "余量: 峰值时空闲"),
    ],
)
def test_a_word_of_a_plan_is_explained_before_the_entries_that_have_it(capsys, words, says):
    assert told(capsys, words).lstrip().startswith(says)
    assert words in json.loads(told(capsys, words, "--json"))["query"]


def test_every_part_of_a_plan_is_a_word_that_explain_knows(capsys):
    for name in ("weights", "activations", "CUDA graphs", "non-torch", "KV cache", "outside", "others", "headroom"):
        assert told(capsys, name).lstrip().startswith(f"{name}: ")


def test_a_line_of_a_log_is_no_question_about_a_word_of_it(capsys):
    assert "pool that requests share" not in told(capsys, "No available memory for the KV cache blocks")


def test_a_search_that_finds_nothing_says_so(capsys):
    assert main(["explain", "--search", "xyzzy"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "legroom explain" in err
    assert main(["explain", "--search", "xyzzy", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["hits"] == []


@given(st.text(max_size=300))
def test_any_text_can_be_searched_for(query):
    scores = [hit.score for hit in search(query, bundled())]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_line_is_wider_than_the_terminal(language):
    def columns(line):
        return sum(2 if ord(char) > 0x2E7F else 1 for char in line)

    for entry in bundled():
        for line in explain_text(entry, Style(width=80), language).splitlines():
            assert columns(line) <= 84 or " " not in line.strip(), line


def test_of_entries_that_share_a_label_the_messages_choose():
    assert best_entry("profiling_activation_peak", frozenset({"sampler_warmup_oom"}), "LR301").id == "LR305"
    assert best_entry("profiling_activation_peak", frozenset({"torch_oom"}), "LR301").id == "LR301"
    assert best_entry("gpu_shared_or_not_free", frozenset({"profiling_error"}), "LR103").id == "LR205"
    assert best_entry("host_ram_oom", frozenset(), "LR501").id == "LR501"


def test_the_flag_beside_a_neighbour_follows_from_its_example_and_is_what_diagnose_says():
    entry = json.loads(ENTRY.read_text())
    figures = entry["example"]["figures"]
    free, total = figures["free_bytes"]["value"], int(figures["free_bytes"]["formula"].split()[0])
    ratio = f"{math.floor((free - GIB // 2) / total * 100) / 100:.2f}"
    beside = next(way for way in entry["workarounds"] if way["kind"] == "lower_util")
    for language, formula in (("en", "(free - 0.5 GiB) / total"), ("zh", "(空闲 - 0.5 GiB) / 总量")):
        assert re.search(r"--gpu-memory-utilization ([\d.]+)", beside["how"][language])[1] == ratio
        assert ratio in entry["example"]["text"][language]
        texts = (beside["action"], entry["story"]["arithmetic"], entry["dead_ends"][0]["why_fails"])
        assert all(formula in text[language] for text in texts)
    line = f"ValueError: Free memory on device cuda:0 ({free / GIB:.2f}/{total / GIB:.2f} GiB) on startup is less than "
    line += "desired GPU memory utilization (0.92, 22.07 GiB)."
    assert read_log([line.encode()]).runs[0].findings[0].fixes[0].flags == {"gpu_memory_utilization": float(ratio)}
