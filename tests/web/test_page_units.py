"""The page's own functions that need no browser, run by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from legroom.errors import LegroomError
from legroom.units import parse_count, parse_length
from legroom.web.endpoints import answer
from legroom.web.schemas import schemas

PAGE = Path(__file__).parents[2] / "page" / "src"


def evaluated(module: str, expression: str) -> Any:
    if shutil.which("node") is None:
        pytest.skip("no Node")
    script = f"import * as page from {json.dumps(str(PAGE / module))}; console.log(JSON.stringify({expression}))"
    done = subprocess.run(
        ["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_part_of_an_address_that_cannot_be_read_is_named_and_not_dropped():
    query = "model=a/b&gpus=-3&max-model-len=8192&Foo!=1&config={broken&max_num_seqs="
    setup = evaluated("setup.js", f"page.fromParams(new URLSearchParams({json.dumps(query)}))")
    assert setup["unread"] == ["gpus=-3", "Foo!=1", "config={broken", "max_num_seqs="]
    assert (setup["gpus"], setup["flags"]) == (None, {"max_model_len": 8192})


def test_a_length_may_be_written_with_k():
    lengths = evaluated("setup.js", '["32k", "4096", "1M", "0", "-5", "x"].map(page.readLength)')
    assert lengths == [32768, 4096, 1048576, None, None, None]


def limits(expression: str, language: str = "en") -> Any:
    """An expression of limits.js, with `t` for the texts of a language."""
    texts = json.dumps(str(PAGE / "text/dictionaries.js"))
    fill = "(texts[key] ?? key).replace(/\\{(\\w+)\\}/g, (_, name) => String(values[name] ?? ''))"
    made = f"const texts = DICTIONARIES.{language}; const t = (key, values = {{}}) => {fill};"
    return evaluated(
        "limits.js",
        f"await (async () => {{ const {{ DICTIONARIES }} = await import({texts}); {made} return {expression}; }})()",
    )


def test_the_fields_have_the_limits_of_the_engines_requests():
    known = schemas()
    mix, plan, simulate = (known[name]["properties"] for name in ("Mix", "PlanRequest", "SimulateRequest"))
    want = known["Wish"]["properties"]
    size, pack = known["SizeRequest"]["properties"], known["PackRequest"]["properties"]
    places = {**mix, **simulate, "gpus": plan["gpus"], "want_context": want["context"], "want_users": want["users"]}
    places |= {
        "packed_gpus": pack["gpus"],
        **{name: size[name] for name in ("first_token_s", "time_per_token_ms", "budget")},
    }
    for name, (least, most) in limits("page.LIMITS").items():
        schema = places[name]
        low = schema.get("minimum", schema.get("exclusiveMinimum"))
        assert low <= least and most <= schema.get("maximum", most), name
        assert "maximum" not in schema or (least, most) == (schema["minimum"], schema["maximum"]), name
    longest = limits("page.LONGEST")
    assert (longest["model"], longest["gpu"]) == (plan["model"]["maxLength"], plan["gpu"]["maxLength"])
    assert longest["words"] == known["CardRequest"]["properties"]["words"]["maxLength"]


def test_a_field_names_its_limits_in_both_languages():
    texts = limits(
        '["2.5", "0", "", "50001", "50000"].map((text) => page.faultOf(t, "whole", text, page.LIMITS.requests))'
    )
    assert texts == ["A whole number from 1 to 50,000."] * 4 + [""]
    fault = limits('page.faultOf(t, "length", "999999999999", page.LIMITS.want_context)', "zh")
    assert fault == "请填 1 到 100,000,000 的 token 长度，如 4096 或 32k（32,768）。"


def test_what_no_plan_can_be_asked_of_is_said_by_the_name_of_its_field():
    def fault(change: str, language: str = "en") -> Any:
        setup = f"{{ model: 'a/b', gpu: 'h100', {change} }}"
        return limits(f"page.faultIn(t, {setup})", language)

    assert fault("gpu_used: '2 GiB', gpus: 4096, host_memory: '64'") is None
    assert fault("gpus: '1000000'") == {"field": "gpus", "message": "How many: A whole number from 1 to 4,096."}
    assert fault("gpu_used: 'abc'")["message"] == "In use: a size, like 24 (that is GiB), 24GiB or 512MiB."
    assert fault("model: 'm'.repeat(300)", "zh")["message"] == "模型：最多 200 个字符。"
    assert (fault("model: ''")["field"], fault("gpu: ''")["field"]) == ("model", "gpu")


def test_a_plain_number_in_a_field_of_sizes_is_gib():
    setup = "{ ...page.EMPTY, gpu_memory: '24', gpu_used: '2GiB', host_memory: '64' }"
    request = evaluated("setup.js", f"page.requestOf({setup})")
    assert [request[name] for name in ("gpu_memory", "gpu_used", "host_memory")] == ["24GiB", "2GiB", "64GiB"]


def test_sentences_name_the_pages_fields_in_place_of_options():
    said = "write --gpu rtx3090 --gpus 2, the smaller card; without one, say so (--gpu-used 0)"
    told = limits(f"page.inFieldNames(t, {{ hint: [{json.dumps(said)}] }})")["hint"][0]
    assert told == "write “GPU”: rtx3090, “How many”: 2, the smaller card; without one, say so (“In use”: 0)"
    kept = "--gpu-memory-utilization 0.9 on --gpu-memory"
    assert limits(f"page.inFieldNames(t, {json.dumps(kept)})", "zh") == "--gpu-memory-utilization 0.9 on “单卡显存”"
    offered = limits(f"page.cardsOffered({{ source: {json.dumps(said)} }})")
    assert offered == {"gpu": "rtx3090", "gpus": 2}


def test_another_number_of_gpus_takes_back_what_a_search_chose():
    setup = evaluated("setup.js", f"page.withGpus({FOUND}, 1)")
    assert (setup["gpus"], setup["flags"], setup["found"]) == (1, {"max_model_len": 4096}, [])
    typed = "{ ...page.EMPTY, gpus: 2, flags: { tensor_parallel_size: 2 } }"
    assert evaluated("setup.js", f"page.withGpus({typed}, 4).flags") == {"tensor_parallel_size": 2}


def test_what_one_card_holds_is_read_from_its_sentence_in_both_languages():
    request = {"model": "llama-3.1-8b", "gpu": "rtx4090", "want": {"context": 32768, "users": 16}}
    for language in ("en", "zh"):
        sentence = answer("plan", {**request, "language": language})["words"]["one_gpu"]
        held = evaluated("units.js", f"page.heldByOne({json.dumps(sentence)})")
        assert held["users"] <= 16 and 1024 <= held["context"] <= 32768
    assert evaluated("units.js", "page.heldByOne('')") is None


def test_both_languages_have_the_same_words():
    names = '["en", "zh"].map((one) => Object.keys(page.DICTIONARIES[one]).sort())'
    english, chinese = evaluated("text/dictionaries.js", names)
    assert english == chinese


FOUND = """(() => {
  const asked = { ...page.EMPTY, gpus: 2, flags: { max_model_len: 4096 } };
  const flags = { max_model_len: 4096, pipeline_parallel_size: 8, kv_cache_dtype: "fp8" };
  return page.withFound(asked, { model: "x/fp8", gpu: "NVIDIA L4", gpus: 8, flags });
})()"""


def test_what_a_search_chose_is_known_and_undone_with_the_number_of_gpus_and_the_model():
    found = evaluated("setup.js", FOUND)
    assert found["found"] == ["pipeline_parallel_size", "kv_cache_dtype", "gpus"]
    undone = evaluated("setup.js", f"page.undone({FOUND})")
    assert (undone["gpus"], undone["model"], undone["flags"]) == (2, "meta-llama/Llama-3.1-8B-Instruct", {})


def test_the_gpu_table_is_asked_for_the_wish_and_not_with_flags_that_a_search_chose():
    plan = "{ args: { max_model_len: 4096 } }"
    request = evaluated("setup.js", f"page.sizeRequestOf({FOUND}, {plan})")
    assert (request["context"], request["flags"]) == (4096, {"max_model_len": 4096})
    wish = f"{{ ...{FOUND}, want_context: 8192, want_users: 50 }}"
    request = evaluated("setup.js", f"page.sizeRequestOf({wish}, {plan})")
    assert (request["context"], request["concurrency"], request["flags"]) == (8192, 50, {})


def test_models_is_asked_for_the_card_and_the_wish_of_the_plan():
    wish = f"{{ ...{FOUND}, gpu: 'l4', want_context: 8192, want_users: 50 }}"
    asked = {"gpu": "l4", "gpus": "2", "context": "8k", "users": "50"}
    assert evaluated("setup.js", f"page.cardQuestionOf({wish})") == asked
    assert evaluated("setup.js", "page.cardQuestionOf(page.EMPTY)") == {"gpu": "h100"}


def test_a_wish_and_what_was_found_are_in_the_address():
    wish = f"{{ ...{FOUND}, want_context: 8192, want_users: 50 }}"
    setup = evaluated("setup.js", f"page.fromParams(page.toParams({wish}))")
    assert (setup["want_context"], setup["want_users"]) == (8192, 50)
    assert setup["found"] == ["pipeline_parallel_size", "kv_cache_dtype", "gpus"]


def test_the_end_of_the_card_is_never_written_over_its_name():
    places = "[[120, 900], [800, 900], [120, 340]].map(([at, width]) => page.labelAt('x'.repeat(30), 'end', at, width))"
    beside, before, none = evaluated("parts/layout.js", places)
    assert beside["anchor"] == "start" and beside["x"] > 30 * 7
    assert before == {"x": 800, "anchor": "end"}
    assert evaluated("parts/layout.js", "page.labelAt('x'.repeat(30), 'end of the card', 120, 300)") is None
    assert none["x"] > 30 * 7


def test_models_of_one_task_are_a_group_of_their_own():
    names = (
        "llama-3.1-8b",
        "whisper-large-v3",
        "qwen3-asr-1.7b",
        "glm-ocr",
        "mistral-nemo-12b",
        "orpheus-3b",
        "gte-qwen2-1.5b",
    )
    special = evaluated(
        "models/special.js", f"{list(names)}.filter((name) => page.isSpecial({{ name, longest_len: 9 }}))"
    )
    assert special == ["whisper-large-v3", "qwen3-asr-1.7b", "glm-ocr", "orpheus-3b", "gte-qwen2-1.5b"]
    assert evaluated("models/special.js", "page.isSpecial({ name: 'bge-m3', longest_len: 9, pooling: true })")
    rows = '[{ name: "qwen3-reranker-8b" }, { name: "bge-m3", pooling: true }, { name: "qwen3-asr-1.7b" }]'
    assert evaluated("models/special.js", f"{rows}.map(page.generates)") == [False, False, True]


def test_the_limit_of_host_memory_is_part_of_a_plan_and_of_its_address():
    setup = "page.fromParams(page.toParams({ ...page.EMPTY, host_memory: '24GiB' }))"
    assert evaluated("setup.js", f"page.requestOf({setup}).host_memory") == "24GiB"
    assert "host_memory" not in evaluated("setup.js", f"page.modelRequestOf({setup})")


def test_a_line_that_several_processes_print_is_shown_once():
    rows = [
        {"line": 3, "text": "(EngineCore pid=7) ERROR 11-15 03:04:05 [core.py:842] ValueError: no memory"},
        {"line": 9, "text": "ValueError: no memory"},
        {"line": 11, "text": "RuntimeError: see above"},
        {"line": 12},
    ]
    lines = evaluated("diagnose/evidence.js", f"page.distinctLines({json.dumps(rows)}).map(({{ line }}) => line)")
    assert lines == [3, 11, 12]


def test_a_diagnosis_as_text_says_what_failed_and_every_way_out_or_what_is_missing():
    fixes = [{"command": ["vllm", "serve", name], "env": {}, "why": f"{name} fits."} for name in ("a", "b")]
    found = {"title": "too large", "entry": "LR101", "confidence": 0.78, "why": "Because.", "fixes": fixes}
    found["evidence"] = [{"line": 7}, {"line": 7}]
    answer = {"verdict": "cause found", "phase": "serving", "findings": [found]}
    answer["deployment"] = {"model": "org/m", "gpu": None, "gpu_total_bytes": 44 << 30, "vllm": "0.11.2"}

    def text(document):
        say = "(key, gaps) => [key, ...Object.values(gaps ?? {})].join(' ')"
        return evaluated("diagnose/report_link.js", f"page.reportText({say}, {json.dumps(document)})")

    shown = text(answer)
    assert "org/m · 44.00 GiB · vLLM 0.11.2 — phase.serving" in shown
    assert shown.count("vllm serve ") == 2
    assert shown.endswith("finding.lines: finding.line 7")
    unknown = text({**answer, "verdict": "cause above", "headline": "Not in this text.", "needed": ["its exit code"]})
    assert unknown.startswith("## Not in this text.")
    assert "- its exit code" in unknown
    assert "vllm serve" not in unknown


def test_the_memory_field_shows_that_of_the_chosen_card():
    cards = json.dumps([{"name": "NVIDIA L4", "write": ["l4"], "total_bytes": 23794089984}])
    assert evaluated("units.js", f"['l4', 'NVIDIA L4', '24GiB', 'x'].map((name) => page.memoryOf({cards}, name))") == [
        "22.16GiB",
        "22.16GiB",
        "24GiB",
        "",
    ]


def test_a_flag_is_read_as_the_command_line_reads_it():
    texts = ["8k", "8K", "0.9", "-1", " 2m ", "8x", "", "k"]
    counts = evaluated("setup.js", f"{json.dumps(texts)}.map(page.readCount)")
    assert counts[:5] == [parse_count("8k"), parse_count("8K"), 0.9, -1, 2_000_000]
    assert counts[5:] == [None, None, None]


def test_more_gpus_than_anybody_named_are_told_from_those_that_were():
    more = "{ ...page.EMPTY, gpus: 2, found: ['tensor_parallel_size', 'gpus'], flags: { tensor_parallel_size: 2 } }"
    assert evaluated("setup.js", f"page.takesMoreGpus({more}, 2)")
    named = "{ ...page.EMPTY, gpus: 2, found: ['tensor_parallel_size'], flags: { tensor_parallel_size: 2 } }"
    assert not evaluated("setup.js", f"page.takesMoreGpus({named}, 2)")
    assert evaluated("setup.js", f"page.typed({named}).gpus") == 2


def test_a_length_with_a_point_and_no_unit_is_no_length():
    assert evaluated("setup.js", '["32.000", "1.5k", "32,000"].map(page.readLength)') == [None, 1536, None]
    with pytest.raises(LegroomError):
        parse_length("32.000")


def test_which_gpus_hold_a_model_is_not_bound_by_how_the_plan_splits_it():
    query = "model=a/b&gpu=h100&tensor_parallel_size=4&kv_cache_dtype=fp8&want_context=8192&want_users=4"
    asked = evaluated("setup.js", f"page.sizeRequestOf(page.fromParams(new URLSearchParams({json.dumps(query)})))")
    assert (asked["flags"], asked["concurrency"]) == ({"kv_cache_dtype": "fp8"}, 4)


def test_a_plan_holds_the_requests_of_all_its_engines():
    plan = {"kv": {"max_concurrency": 2.5}, "args": {"data_parallel_size": 4}}
    assert evaluated("units.js", f"page.atOnce({json.dumps(plan)})") == 10


def test_the_budget_and_the_servers_to_pack_are_in_the_address():
    asked = {"budget": "2.5", "pack": "vllm serve a/b --max-num-seqs 8\nvllm serve c/d"}
    again = f"page.fromParams(new URLSearchParams(page.toParams({{...page.EMPTY, ...{json.dumps(asked)}}}).toString()))"
    setup = evaluated("setup.js", again)
    assert {name: setup[name] for name in asked} == asked
    assert setup["flags"] == {} and "unread" not in setup


def test_only_a_load_that_is_held_without_a_but_has_the_tone_of_one_that_is_held():
    request = {"plan": {"model": "llama-3.1-8b", "gpu": "h100", "flags": {"max_model_len": 32768}}}
    tones = {}
    for rate in (1, 8, 16):
        found = answer("simulate", {**request, "mix": {"requests": 200, "rate_per_s": rate}})
        assert found["verdict"] == "holds"
        assert not found["rejected"]
        but = "none" if found["sustained"] is not False else "not if it goes on"
        but = "not with the slowest steps" if found["slowest"] and not found["slowest"]["holds"] else but
        shown = {key: found.get(key) for key in ("verdict", "rejected", "slowest", "sustained")}
        tones[but] = evaluated("simulate/tone.js", f"page.toneOf({json.dumps(shown)})")
    assert tones == {"none": "good", "not with the slowest steps": "fair", "not if it goes on": "fair"}
    assert evaluated("simulate/tone.js", 'page.toneOf({verdict: "holds", rejected: 2, slowest: null})') == "fair"
    assert evaluated("simulate/tone.js", 'page.toneOf({verdict: "falls_behind", slowest: {holds: false}})') == "bad"
