"""The plan, as a person uses it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from waiting import wait_until

import legroom

EVERYWHERE = [(size, language) for size in ("desktop", "phone") for language in ("en", "zh")]
SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def verdict(page: Any) -> str:
    page.wait_for_selector(".verdict p")
    return str(page.inner_text(".verdict p"))


def kv_bytes_words(page: Any) -> str:
    return str(page.inner_text(".legend-row.part-kv .figure"))


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_a_plan_shows_the_card_its_parts_and_the_command(served, open_page, keep_screenshot, size, language):
    page = open_page(
        f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100", size=size, language=language, dark=language == "zh"
    )
    assert "NVIDIA H100" in verdict(page)
    planned = legroom.plan("llama-3.1-8b", "h100").json()
    assert kv_bytes_words(page) == f"{planned['layout']['kv_cache_bytes'] / 2**30:.2f} GiB"
    assert page.locator(".card-svg .segment").count() >= 7
    assert "vllm serve" in page.inner_text(".command pre")
    assert page.locator("h1:visible").count() == 1
    page.wait_for_selector(".big div:nth-child(5)")
    assert page.inner_text(".verdict .badge") == {"en": "Fits", "zh": "放得下"}[language]
    keep_screenshot(page)


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_nothing_is_wider_than_the_screen(served, open_page, size):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=l4&b.model=llama-3.1-8b&b.gpu=h100", size=size)
    page.wait_for_selector(".differences")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_page_can_be_read_at_360_pixels(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=l4", size="phone")
    page.set_viewport_size({"width": 360, "height": 740})
    verdict(page)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_slider_redraws_the_picture_and_is_kept_in_the_address(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    before = kv_bytes_words(page)
    slider = page.get_by_label("--gpu-memory-utilization").first
    slider.focus()
    for _ in range(20):
        page.keyboard.press("ArrowLeft")
    wait_until(page, "before => document.querySelector('.legend-row.part-kv .figure').innerText !== before", arg=before)
    wait_until(page, "location.hash.includes('gpu_memory_utilization=0.72')")
    planned = legroom.plan("llama-3.1-8b", "h100", gpu_memory_utilization=0.72).json()
    wait_until(
        page,
        "words => document.querySelector('.legend-row.part-kv .figure').innerText === words",
        arg=f"{planned['layout']['kv_cache_bytes'] / 2**30:.2f} GiB",
    )


def test_a_flag_goes_back_to_the_default_of_vllm(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&max_num_seqs=7")
    verdict(page)
    page.get_by_role("button", name="Back to vLLM's default: --max-num-seqs").click()
    wait_until(page, "!location.hash.includes('max_num_seqs')")


def test_a_failing_plan_shows_the_command_that_works_and_vllms_own_error(served, open_page, keep_screenshot):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=l4")
    assert "will not start" in verdict(page)
    assert "max seq len (131072)" in page.inner_text(".failure blockquote")
    page.wait_for_selector(".fix")
    keep_screenshot(page)
    works = legroom.plan("llama-3.1-8b", "l4").json()["advice"][0]["command"]
    assert page.locator(".command pre").all_inner_texts() == [" ".join(works)]
    assert "−" not in page.inner_text(".result")
    page.get_by_role("button", name="Apply").first.click()
    wait_until(page, "document.querySelector('.verdict .badge').innerText !== 'Does not fit'")
    assert page.locator(".failure").count() == 0
    assert "--max-model-len" in page.inner_text(".command pre")


def test_a_part_opened_with_the_keyboard_shows_its_formula_and_passing_by_changes_nothing(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.locator(".legend-row.part-weights").focus()
    page.keyboard.press("Tab")
    assert page.locator(".segment.dim").count() == 0
    page.locator(".legend-row.part-kv").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".working .lines li")
    assert "budget" in page.inner_text(".working .lines")


def test_a_click_on_the_picture_shows_the_formula_too(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.locator(".card-svg .segment.part-weights").click()
    page.wait_for_selector(".working.part-weights .lines li")
    page.mouse.move(5, 5)
    assert page.locator(".segment.dim").count() == 0


def test_tab_goes_from_the_model_to_the_next_field(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.get_by_role("combobox", name="Model").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "combobox"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.labels[0].innerText") == "How many"


def test_a_part_of_a_link_that_cannot_be_read_is_named(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&gpus=-3")
    verdict(page)
    assert "gpus=-3" in page.inner_text(".inputs .note")


def test_a_wish_finds_the_settings_and_says_what_they_give_up(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.get_by_role("button", name="Find the settings").click()
    page.wait_for_selector(".wishes .note.good")
    assert "holds 16 requests of 32,768 tokens" in page.inner_text(".wishes .note")
    assert "It gives up" in page.inner_text(".wishes .note")
    wait_until(page, "location.hash.includes('max_model_len=32768')")


def test_a_wish_that_takes_more_cards_than_anybody_named_is_no_plain_fit(served, open_page):
    page = open_page(f"{served.url}#/plan?model=Qwen/Qwen3-32B-AWQ&gpu=rtx4090&want_context=32768&want_users=3")
    page.get_by_role("button", name="Find the settings").click()
    page.wait_for_selector(".wishes .note.fair")
    wait_until(page, "document.querySelector('.verdict .badge')?.innerText === 'Needs 2 cards'")
    assert "One card is not enough" in page.inner_text(".wishes .note")
    page.reload()
    wait_until(page, "document.querySelector('.verdict .badge')?.innerText === 'Needs 2 cards'")


def test_a_way_that_does_not_hold_the_wish_is_not_said_to_hold(served, open_page):
    page = open_page(f"{served.url}#/plan?model=Qwen/Qwen3-32B-AWQ&gpu=rtx4090&gpus=1&want_context=8192&want_users=3")
    page.get_by_role("button", name="Find the settings").click()
    page.wait_for_selector(".wishes .note.fair")
    wait_until(page, "document.querySelector('.verdict')?.getAttribute('aria-busy') === 'false'")
    assert page.locator(".fixes").count() == 0


@pytest.mark.parametrize("written", ["--cpu-offload-gb", "cpu-offload-gb", "cpu_offload_gb", "cpu-offload"])
def test_a_flag_is_found_however_it_is_written(served, open_page, written):
    page = open_page(f"{served.url}#/plan?model=openai/gpt-oss-20b&gpu=rtx4090")
    verdict(page)
    page.locator(".more-flags summary").click()
    field = page.get_by_role("combobox", name="Another flag")
    field.fill("--no-such-flag")
    page.wait_for_selector("text=Nothing here has these letters")
    field.fill(written)
    field.press("Enter")
    page.get_by_label("--cpu-offload-gb").wait_for()


def test_words_with_a_space_are_a_search_for_a_model(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100", errors_are_fine=True)
    verdict(page)
    model = page.get_by_role("combobox", name="Model")
    model.fill("Qwen3-32B AWQ")
    page.locator("[role=option]", has_text="Qwen3-32B-AWQ").wait_for()
    model.press("Enter")
    wait_until(page, "location.hash.includes('Qwen3-32B-AWQ')")
    model.fill("qwen3 awq")
    model.press("Enter")
    page.wait_for_selector("text=is no model id: it has a space")
    assert page.locator(".command").count() == 0


def test_a_command_asks_for_its_card_where_only_the_example_names_one(served, open_page):
    page = open_page(f"{served.url}#/plan")
    verdict(page)
    page.get_by_role("button", name="Command").click()
    page.locator(".drop textarea").first.fill("vllm serve Qwen/Qwen3-8B --max-model-len 8192")
    page.get_by_role("button", name="Read it").click()
    page.wait_for_selector("text=Which GPU?")
    page.get_by_role("combobox", name="GPU").fill("l4")
    page.get_by_role("combobox", name="GPU").press("Enter")
    assert "NVIDIA L4" in verdict(page)


def test_a_wish_says_that_it_needs_more_cards_and_one_that_nothing_holds_leads_to_models(served, open_page):
    page = open_page(f"{served.url}#/plan?model=qwen3-32b&gpu=l4&want_context=32768&want_users=8")
    page.get_by_role("button", name="Find the settings").click()
    page.wait_for_selector(".wishes .note.good, .wishes .note.fair")
    count = page.get_by_label("How many").input_value()
    assert int(count) > 1
    assert f"; {count} x NVIDIA L4 do, with" in page.inner_text(".wishes .note")
    page.goto(f"{served.url}#/plan?model=qwen3-32b&gpu=l4&gpus=1&want_context=32768&want_users=64")
    page.get_by_role("button", name="Find the settings").click()
    page.wait_for_selector(".wishes .note.bad")
    page.get_by_role("link", name="Which models does this card hold for that?").click()
    fields = ["GPU", "How many", "Tokens for each user", "Users at once"]
    area = page.locator(".models-area")
    assert [area.get_by_label(name).first.input_value() for name in fields] == ["l4", "1", "32k", "64"]
    page.go_back()
    page.locator(".wishes").get_by_label("Users at once").fill("5")
    page.get_by_role("link", name="Models", exact=True).click()
    wait_until(page, "location.hash.includes('users=5')")
    assert area.get_by_label("Tokens for each user").input_value() == "32k"


def test_the_desktop_that_a_tight_plan_names_can_be_taken_out(served, open_page):
    page = open_page(
        f"{served.url}#/plan?model=llama-3.1-8b&gpu=rtx4090&max_model_len=8192&gpu_memory_utilization=0.95"
    )
    assert "“In use”: 0" in verdict(page)
    page.get_by_label("In use").fill("0")
    page.keyboard.press("Tab")
    wait_until(page, "document.querySelector('.verdict .badge').innerText === 'Fits'")
    wait_until(page, "location.hash.includes('gpu_used=0')")


def test_the_models_of_a_card_open_as_plans(served, open_page, keep_screenshot):
    page = open_page(f"{served.url}#/models?gpu=rtx4090&words=qwen3-32b")
    best = page.get_by_role("link", name="qwen3-32b-awq")
    best.wait_for()
    keep_screenshot(page)
    best.click()
    assert "Qwen3-32B-AWQ" in verdict(page)


def test_a_word_opens_the_checkpoint_that_has_it_on_the_cards_that_were_named(served, open_page):
    page = open_page(f"{served.url}#/models?gpu=rtx4090&words=coder 14b")
    row = page.locator("tbody tr", has_text="Qwen2.5-Coder-14B").first
    row.wait_for()
    row.get_by_role("link").click()
    assert "Coder-14B" in verdict(page)
    assert page.get_by_label("How many").first.input_value() == "1"


def test_models_follow_the_card_and_the_language(served, open_page):
    page = open_page(f"{served.url}#/models?gpu=rtx4090&words=qwen3-32b")
    page.get_by_role("link", name="qwen3-32b-awq").wait_for()
    page.get_by_role("combobox", name="GPU").fill("h200")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="qwen3-32b", exact=True).wait_for()
    page.get_by_role("combobox", name="GPU").fill("rtx3090")
    page.keyboard.press("Enter")
    page.get_by_text("no CUDA graphs").first.wait_for()
    page.get_by_role("button", name="中文").click()
    page.get_by_text("没有 CUDA graph").first.wait_for()


def first_models(page: Any) -> list[str]:
    return [str(name) for name in page.locator(".models-area tbody tr td:first-child a").all_inner_texts()]


def test_models_are_sorted_by_any_column_with_the_keyboard(served, open_page):
    page = open_page(f"{served.url}#/models?gpu=rtx4090&words=qwen3-&users=4")
    page.wait_for_selector("text=models fit.")
    names = first_models(page)
    for title, column in (("Weights", 3), ("Longest request", 5), ("Tokens a second, all 4 users", 7)):
        page.get_by_role("button", name=title).first.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("th[aria-sort=descending]")
        cells = page.locator(f".models-area table >> nth=0 >> tbody td:nth-child({column})").all_inner_texts()
        figures = [float(cell.replace(",", "").split()[0]) for cell in cells if cell[0].isdigit()]
        assert len(figures) > 3
        assert column == 7 or figures == sorted(figures, reverse=True)
    page.get_by_role("button", name="Model").first.press("Space")
    page.wait_for_selector("th[aria-sort=ascending]")
    shown = page.locator(".models-area table >> nth=0 >> tbody td:first-child a").all_inner_texts()
    assert shown == sorted(shown) and set(shown) <= set(names)


def test_what_a_desktop_uses_is_asked_beside_the_card_of_models_and_carried_to_the_plan(served, open_page):
    page = open_page(f"{served.url}#/models?gpu=rtx4090&words=qwen3-8b&users=2")
    page.get_by_role("link", name="qwen3-8b").first.wait_for()
    page.get_by_label("In use").last.fill("3")
    page.keyboard.press("Tab")
    wait_until(page, "location.hash.includes('gpu_used=3GiB')")
    page.wait_for_selector("text=models fit.")
    page.get_by_role("link", name="qwen3-8b").first.click()
    verdict(page)
    assert page.locator(".legend-row.part-others .figure").inner_text() == "3.00 GiB"


def test_a_field_that_cannot_be_read_has_no_models_and_is_not_kept_in_the_address(served, open_page):
    page = open_page(f"{served.url}#/models?gpu=rtx4090&words=qwen3-8b", errors_are_fine=True)
    page.wait_for_selector("text=models fit.")
    page.get_by_label("Users at once").last.fill("many")
    wait_until(page, "!document.querySelector('.models-area table')")
    assert "many" not in page.evaluate("location.hash")
    assert "whole number" in page.inner_text(".models-area .problem")
    page.get_by_label("Users at once").last.fill("1")
    page.get_by_role("combobox", name="GPU").fill("h1000x")
    page.keyboard.press("Enter")
    page.wait_for_selector(".models-area [role=alert]")
    assert first_models(page) == []


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_what_a_model_gives_up_stands_beside_its_name_in_sight(served, open_page, keep_screenshot, size):
    page = open_page(
        f"{served.url}#/models?gpu=rtx3090&words=gemma&context=32k&users=4", size=size, dark=size == "phone"
    )
    page.wait_for_selector("text=models fit.")
    assert page.get_by_text("gives up: smaller prefill steps (1,024 tokens)").first.is_visible()
    assert page.locator(".models-area .scroll-x").first.evaluate("box => box.scrollWidth <= box.clientWidth")
    keep_screenshot(page)


def test_models_after_going_back_from_a_plan_are_those_that_were_there(served, open_page):
    page = open_page(f"{served.url}#/models?gpu=rtx4090&words=qwen3-8b")
    page.wait_for_selector("text=models fit.")
    page.get_by_role("link", name="qwen3-8b").first.click()
    verdict(page)
    page.go_back()
    page.wait_for_selector("text=models fit.")
    assert page.locator(".models-area tr.soft").count() == 0


def test_what_was_found_for_a_model_does_not_stay_with_another(served, open_page):
    page = open_page(f"{served.url}#/plan?model=Qwen%2FQwen3-30B-A3B&gpu=rtx3090&want_context=32768&want_users=4")
    page.get_by_role("button", name="Find the settings").click()
    wait_until(page, "location.hash.includes('found=')")
    model = page.get_by_role("combobox", name="Model")
    model.fill("google/gemma-3-12b-it")
    model.press("Enter")
    wait_until(page, "location.hash.includes('gemma') && !location.hash.includes('found=')")
    assert not page.evaluate("/parallel_size|gpus=/.test(location.hash)")


def test_an_error_does_not_stay_with_a_field_that_was_emptied(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=banana", errors_are_fine=True)
    page.wait_for_selector(".machine .problem:has-text('banana')")
    page.get_by_role("combobox", name="GPU").fill("")
    wait_until(page, "!document.querySelector('.machine .problem')?.innerText.includes('banana')")
    page.keyboard.press("Tab")
    page.get_by_text("Which GPU").first.wait_for()
    assert "banana" not in page.inner_text("main")


def test_a_link_without_a_wish_leaves_none_of_another_in_the_form(served, open_page):
    page = open_page(f"{served.url}#/plan?model=qwen3-8b&gpu=h100&want_context=32768&want_users=4")
    wait_until(page, "[...document.querySelectorAll('input.wish')].some(field => field.value === '32k')")
    page.goto(f"{served.url}#/plan?model=qwen3-8b&gpu=l4")
    wait_until(page, "[...document.querySelectorAll('input.wish')].every(field => field.value === '')")


def test_a_link_to_the_hub_is_taken_as_the_id_in_it(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    model = page.get_by_role("combobox", name="Model")
    model.fill("https://huggingface.co/google/gemma-3-12b-it")
    model.press("Enter")
    wait_until(page, "document.querySelector('.verdict')?.innerText.includes('google/gemma-3-12b-it')")


def test_the_table_of_models_is_stacked_on_a_phone(served, open_page):
    page = open_page(f"{served.url}#/models?gpu=rtx4090&words=qwen3-32b", size="phone")
    page.wait_for_selector(".models-area tbody tr")
    assert page.locator(".models-area .scroll-x").first.evaluate("box => box.scrollWidth <= box.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert page.locator(".top nav").evaluate("menu => menu.scrollWidth <= menu.clientWidth")


def test_a_model_is_searched_for_and_picked_with_the_keyboard(served, open_page):
    page = open_page(f"{served.url}#/plan")
    verdict(page)
    field = page.get_by_role("combobox", name="Model")
    field.fill("qwen3 8b")
    page.wait_for_selector(".options li[role=option]")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_until(page, "/Qwen3/i.test(document.querySelector('.verdict p')?.innerText)")


def test_a_whole_command_is_read(served, open_page):
    page = open_page(f"{served.url}#/plan?gpu=l40s")
    page.get_by_role("button", name="Command", exact=True).click()
    line = "docker run vllm/vllm-openai:v0.19.0 --model Qwen/Qwen3-8B --max-model-len 8192"
    page.locator(".inputs textarea").fill(line)
    page.get_by_role("button", name="Read it").click()
    wait_until(page, "document.querySelector('.verdict p')?.innerText.includes('Qwen3-8B')")
    wait_until(page, "document.querySelector('.verdict p')?.innerText.includes('0.19.0')")
    assert "--max-model-len 8192" in page.inner_text(".command pre")


def test_a_command_that_was_pasted_or_typed_is_what_the_wish_is_about(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.get_by_role("button", name="Command", exact=True).click()
    page.locator(".inputs textarea").fill("vllm serve Qwen/Qwen3-8B")
    page.get_by_role("button", name="Find the settings").click()
    page.wait_for_selector(".wishes .note.good")
    assert "Qwen3-8B" in page.inner_text(".wishes .note")
    page.get_by_role("button", name="Command", exact=True).click()
    page.evaluate("navigator.clipboard.writeText('vllm serve Qwen/Qwen3-14B --max-model-len 4096')")
    page.locator(".inputs textarea").press("Control+v")
    wait_until(page, "document.querySelector('.verdict p')?.innerText.includes('Qwen3-14B')")
    assert page.locator(".wishes .note").count() == 0


def test_a_wish_that_the_first_start_misses_is_in_the_verdict(served, open_page):
    model = "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8"
    first = legroom.plan(model, "rtx4090", max_model_len=8192).json()["first_start"]["max_concurrency"]
    later = legroom.plan(model, "rtx4090", max_model_len=8192).json()["kv"]["max_concurrency"]
    assert int(first) < int(later)
    page = open_page(f"{served.url}#/plan?model={model}&gpu=rtx4090&max_model_len=8192&want_context=8192&want_users=1")
    verdict(page)
    assert page.inner_text(".verdict .badge") == "Fits"
    page.locator(".wishes").get_by_label("Users at once").fill(str(int(later)))
    wait_until(page, "document.querySelector('.verdict .badge').innerText.startsWith('Fits after the first start')")
    page.locator(".wishes").get_by_label("Users at once").fill("500")
    wait_until(page, "document.querySelector('.verdict .badge').innerText.includes('of the 500 users')")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_refused_flag_or_a_wrong_card_has_its_error_and_no_verdict(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100", errors_are_fine=True)
    verdict(page)
    page.get_by_role("button", name="Command", exact=True).click()
    page.locator(".inputs textarea").fill("vllm serve Qwen/Qwen3-14B-AWQ --max-modl-len 16384")
    page.get_by_role("button", name="Read it").click()
    page.wait_for_selector(".results [role=alert]")
    assert "no vLLM release has --max-modl-len" in page.inner_text(".results [role=alert]")
    assert "--max-model-len" in page.inner_text(".results [role=alert]")
    assert page.locator(".verdict, .card-svg, .strip").count() == 0
    card = page.get_by_role("combobox", name="GPU")
    card.fill("l4")
    page.keyboard.press("Enter")
    verdict(page)
    card.fill("h1000x")
    page.keyboard.press("Enter")
    wait_until(page, "document.querySelector('.results [role=alert]')?.innerText.includes('h1000x')")
    assert page.locator(".verdict, .card-svg, .strip").count() == 0


def test_a_pasted_config_is_planned(served, open_page):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    page = open_page(f"{served.url}#/plan")
    page.get_by_role("button", name="config.json").click()
    page.locator(".inputs textarea").fill(json.dumps(config))
    wait_until(page, "document.querySelector('.verdict p')?.innerText.includes('pasted-config')")
    page.reload()
    wait_until(page, "document.querySelector('.verdict p')?.innerText.includes('pasted-config')")


def test_a_broken_config_is_told_and_nothing_is_lost(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    before = verdict(page)
    page.get_by_role("button", name="config.json").click()
    page.locator(".inputs textarea").fill('{"hidden_size": ')
    assert "not a config.json" in page.inner_text("[role=alert]")
    assert page.locator(".inputs textarea").input_value() == '{"hidden_size": '
    assert verdict(page) == before


def test_two_settings_are_compared_side_by_side(served, open_page, keep_screenshot):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.get_by_role("button", name="Compare two settings").click()
    page.get_by_label("vLLM", exact=True).select_option("0.19.0")
    page.wait_for_selector(".differences")
    wait_until(page, "document.querySelectorAll('.verdict p')[1]?.innerText.includes('0.19.0')")
    assert "0.19.0" not in page.locator(".verdict p").nth(0).inner_text()
    wait_until(page, "location.hash.includes('b.vllm=0.19.0')")
    keep_screenshot(page)


def test_what_a_setting_costs_in_speed_is_compared_too(served, open_page):
    page = open_page(
        f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&b.model=llama-3.1-8b&b.gpu=h100&b.enforce_eager=true"
    )
    row = page.locator(".differences tr", has_text="Tokens a second, one user")
    row.wait_for()
    first, second, lost = (row.locator("td").nth(number).inner_text() for number in (1, 2, 3))
    assert lost == f"−{int(first) - int(second)}"


def test_which_gpus_hold_it_is_a_table_whose_rows_can_be_used(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&max_model_len=8192")
    verdict(page)
    page.get_by_text("Which GPUs hold it?").click()
    page.wait_for_selector(".holders tbody tr")
    page.get_by_role("button", name="Use: NVIDIA L4", exact=True).click()
    wait_until(page, "document.querySelector('.verdict p')?.innerText.includes('NVIDIA L4')")


def test_the_server_is_a_file_too_and_another_release_and_other_servers_are_a_click_away(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&max_model_len=8192")
    verdict(page)
    page.get_by_role("button", name="compose", exact=True).click()
    page.get_by_role("heading", name="compose.yaml").wait_for()
    assert "--max-model-len" in page.inner_text(".to-run pre")
    page.get_by_text("What does another vLLM release change?").click()
    page.get_by_label("From 0.32.0 to").select_option("0.19.0")
    page.locator("details:has-text('another vLLM release') > .row button").click()
    page.wait_for_selector("details:has-text('another vLLM release') table tr")
    page.get_by_label("From 0.32.0 to").select_option("0.20.0")
    assert page.locator("details:has-text('another vLLM release') table").count() == 0
    page.get_by_text("Do several servers fit on this machine?").click()
    page.get_by_role("button", name="Pack them").click()
    page.wait_for_selector("text=they start in any order")


def test_a_shared_link_opens_the_same_plan(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.get_by_label("--max-num-seqs").last.fill("48")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Copy a link").click()
    page.wait_for_selector("text=Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    other = open_page(link)
    assert "max_num_seqs=48" in link
    verdict(other)
    assert other.get_by_label("--max-num-seqs").last.input_value() == "48"


@pytest.mark.parametrize("kind", ["SVG", "PNG"])
def test_the_picture_is_a_file(served, open_page, tmp_path, kind):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    with page.expect_download() as download:
        page.get_by_role("button", name=kind, exact=True).click()
    file = tmp_path / "picture"
    download.value.save_as(file)
    head = {"SVG": b"<svg", "PNG": b"\x89PNG"}[kind]
    assert file.read_bytes().startswith(head)
    assert file.stat().st_size > 2_000


def test_a_script_in_a_models_name_is_text(served, open_page):
    page = open_page(f"{served.url}#/plan", errors_are_fine=True)
    page.on("dialog", lambda dialog: pytest.fail("a script from the name of a model ran"))
    page.get_by_role("button", name="config.json").click()
    config = {
        "_name_or_path": SCRIPT,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
    }
    page.locator(".inputs textarea").fill(json.dumps(config))
    wait_until(page, "document.body.innerText.includes('onerror=alert(1)')")
    assert page.locator("img[src=x]").count() == 0


def test_an_unknown_model_is_told_with_a_way_to_look_it_up(served, open_page):
    page = open_page(f"{served.url}#/plan?model=nobody/such-model-9b&gpu=h100", errors_are_fine=True)
    page.wait_for_selector("[role=alert]")
    assert "such-model-9b" in page.inner_text("[role=alert]")
    page.get_by_role("button", name="Look it up on the Hugging Face Hub").wait_for(timeout=10_000)


def test_two_tabs_keep_two_plans(served, open_page):
    first = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    second = first.context.new_page()
    second.goto(f"{served.url}#/plan?model=llama-3.1-8b&gpu=l4")
    assert "L4" in verdict(second)
    first.reload()
    assert "H100" in verdict(first)


def test_going_back_shows_what_was_there(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&max_num_seqs=9")
    verdict(page)
    page.get_by_role("link", name="Catalog").click()
    page.wait_for_selector(".entry-list a")
    page.go_back()
    assert page.get_by_label("--max-num-seqs").last.input_value() == "9"


def test_a_printed_plan_leaves_the_controls_out(served, open_page, tmp_path):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.emulate_media(media="print")
    assert not page.locator(".knobs").is_visible()
    assert page.locator(".card-svg").is_visible()
    printed = Path(tmp_path / "plan.pdf")
    page.pdf(path=printed)
    assert len(re.findall(rb"/Type\s*/Page\b", printed.read_bytes())) <= 2


def test_a_length_typed_with_k_is_read_as_the_command_line_reads_it(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    number = page.get_by_label("--max-model-len, tokens")
    for text, tokens in (("8k", 8000), ("32K", 32768)):
        number.fill(text)
        number.press("Enter")
        wait_until(page, f"location.hash.includes('max_model_len={tokens}')")
        says = page.get_by_text("vLLM reads 8k as 8,000; 8K is 8,192.")
        says.wait_for(state="visible" if text == "8k" else "hidden")


@pytest.mark.parametrize(
    ("query", "label", "says"),
    [
        ("max_model_len=8x", "--max-model-len, tokens", "got '8x'"),
        ("max_num_seqs=-1", "--max-num-seqs", "out of range"),
        ("tensor_parallel_size=3", "--tensor-parallel-size", "does not divide"),
        ("cpu_offload_gb=x", "--cpu-offload-gb", "takes a number"),
        ("gpu_memory=x", "GPU memory, GiB", "a size, like"),
        ("gpu=nope", "GPU", "not known"),
    ],
)
def test_what_is_wrong_with_a_value_stands_beside_its_field(served, open_page, query, label, says):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&{query}", errors_are_fine=True)
    field = page.locator(
        f"[aria-invalid=true]:is([aria-label='{label}'], "
        f".field:has(label:text-is('{label}'), label:has-text('{label} (')) *)"
    ).first
    field.wait_for()
    problem = page.locator(f"[id='{field.get_attribute('aria-describedby')}']")
    assert says in problem.inner_text()
    assert abs(problem.bounding_box()["y"] - field.bounding_box()["y"]) < 80


def test_back_undoes_a_fix_that_was_applied(served, open_page):
    page = open_page(f"{served.url}#/plan?model=Qwen%2FQwen3-32B&gpu=l40s")
    page.get_by_role("button", name="Apply").first.click()
    wait_until(page, "location.hash.includes('AWQ') || location.hash.includes('found=')")
    page.go_back()
    wait_until(page, "!location.hash.includes('found=')")
    assert page.get_by_role("combobox", name="Model").input_value() == "Qwen/Qwen3-32B"


def test_a_search_that_ends_after_another_model_was_picked_changes_nothing(served, open_page):
    page = open_page(f"{served.url}#/plan?model=Qwen%2FQwen3-32B&gpu=l40s")
    page.wait_for_selector(".verdict")
    page.get_by_role("button", name="Find the settings").click()
    model = page.get_by_role("combobox", name="Model")
    model.fill("Qwen/Qwen3-0.6B")
    model.press("Enter")
    page.wait_for_timeout(6000)
    assert model.input_value() == "Qwen/Qwen3-0.6B"
    assert "Qwen3-0.6B" in page.inner_text(".verdict")


def test_a_manifest_brings_the_card_that_it_names(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    page.get_by_role("button", name="Command", exact=True).click()
    page.locator(".inputs textarea").fill(
        "apiVersion: v1\nkind: Pod\nspec:\n  nodeSelector: {nvidia.com/gpu.product: NVIDIA-L40S}\n"
        "  containers:\n  - image: vllm/vllm-openai:v0.11.2\n    args: [--model=Qwen/Qwen3-8B]\n"
    )
    page.get_by_role("button", name="Read it").click()
    wait_until(page, "document.querySelector('.verdict')?.innerText.includes('L40S')")


def test_a_number_of_gpus_that_is_none_is_refused(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    page.wait_for_selector(".verdict")
    page.get_by_label("How many").fill("-2")
    wait_until(page, "document.querySelector('.result').innerText.includes('whole number')")
    assert page.locator(".verdict").count() == 0


def test_an_address_of_no_page_says_so(served, open_page):
    page = open_page(f"{served.url}#/lint")
    page.wait_for_selector("text=There is no page “lint” here")


def test_size_and_pack_are_places_whose_question_comes_first(served, open_page):
    page = open_page(
        f"{served.url}#/size?model=llama-3.1-8b&gpu=h100&tensor_parallel_size=4&want_context=8192&want_users=4"
    )
    page.wait_for_selector(".holders tbody tr")
    assert page.inner_text(".top nav [aria-current]") == "Size"
    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert page.evaluate(f"{top.format('.holders')} < {top.format('.sides')}")
    page.get_by_role("link", name="Pack", exact=True).click()
    page.get_by_role("button", name="Pack them").wait_for()
    assert page.evaluate(f"{top.format('.asked')} < {top.format('.sides')}")
    page.reload()
    page.get_by_role("button", name="Pack them").wait_for()


def test_the_first_packed_server_is_shown_alone_with_the_options_of_pack_left_out(served, open_page):
    lines = quote("vllm serve qwen3-4b --max-model-len 8192 --weight 2\nvllm serve bge-m3\n")
    page = open_page(f"{served.url}#/pack?model=llama-3.1-70b&gpu=h100&pack={lines}")
    page.get_by_role("button", name="Pack them").click()
    page.wait_for_selector(".asked .command")
    assert "weight" not in page.inner_text(".asked .command")
    assert "bge-m3: " in page.inner_text(".asked") and "keeps no KV cache" in page.inner_text(".asked")
    page.wait_for_selector(".sides .verdict:has-text('Qwen/Qwen3-4B')")
    assert "70B" not in page.inner_text(".sides")
    assert "--weight" not in page.inner_text(".sides .to-run")


def test_size_says_what_each_of_its_figures_is_and_which_rows_are_several_nodes(served, open_page):
    page = open_page(f"{served.url}#/size?model=deepseek-v3&gpu=h100&want_context=8192&want_users=4")
    page.wait_for_selector(".holders tbody tr")
    assert "Tok/s each of 4: all decoding at this length at once" in page.inner_text(".holders")
    page.wait_for_selector("text=more than 8 GPUs are several nodes")


def test_what_32k_means_is_said_once_of_lengths_and_once_of_flags(served, open_page):
    page = open_page(f"{served.url}#/plan?model=qwen3-0.6b&gpu=l4")
    verdict(page)
    text = page.inner_text("main")
    assert [text.count(said) for said in ("32k means 32,768", "In a flag 32k is 32,000", "as vLLM reads it")] == [
        1,
        1,
        1,
    ]


def test_the_suggested_wish_is_nobodys_until_it_is_typed_or_searched_for(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    field = page.get_by_label("Tokens for each user")
    assert (field.input_value(), field.get_attribute("placeholder")) == ("", "32k")
    page.get_by_role("button", name="Find the settings").click()
    page.wait_for_selector(".wishes .note.good")
    assert "holds 16 requests of 32,768 tokens" in page.inner_text(".wishes .note")


def test_no_more_requests_are_promised_than_the_server_runs(served, open_page):
    page = open_page(f"{served.url}#/plan?model=qwen2.5-0.5b&gpu=h100&max_model_len=4096&max_num_seqs=32")
    verdict(page)
    assert page.locator(".big dd").first.inner_text() == "32"
    assert "32 of them run" in page.inner_text(".result")


def test_a_budget_is_kept_and_a_row_can_be_taken_without_scrolling(served, open_page):
    page = open_page(f"{served.url}#/size?model=llama-3.1-8b&gpu=h100&want_context=8192&want_users=4")
    page.wait_for_selector(".holders tbody tr:nth-child(2)")
    page.get_by_label("Budget, $ an hour").fill("0.6")
    wait_until(page, "location.hash.includes('budget=0.6')")
    page.reload()
    page.wait_for_selector(".holders tbody tr:nth-child(1)")
    assert page.get_by_label("Budget, $ an hour").input_value() == "0.6"
    prices = page.locator(".holders tbody tr td:nth-child(4)").all_inner_texts()
    assert all(float(price.removeprefix("$")) <= 0.6 for price in prices)
    assert page.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.holders .scroll-x'))")


def test_the_models_of_a_card_are_planned_two_lists_at_a_time(served, open_page):
    page = open_page(f"{served.url}#/models")
    held = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/api/card", hold)
    page.get_by_role("combobox", name="GPU").fill("rtx4090")
    page.get_by_label("Only names with").fill("qwen2.5")
    deadline = 200
    while len(held) < 2 and (deadline := deadline - 1):
        page.wait_for_timeout(50)
    assert len(held) == 2
    for each in held:
        each.fulfill(json={"models": [], "too_large": []})


def test_a_list_of_cards_offers_the_smaller_one_twice(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=rtx4090, rtx3090", errors_are_fine=True)
    page.wait_for_selector(".note.bad")
    assert "“GPU”: rtx3090, “How many”: 2" in page.inner_text(".results .note.bad")
    page.get_by_role("button", name="Take 2 × rtx3090").click()
    assert "2 x NVIDIA GeForce RTX 3090" in verdict(page)


def test_what_was_typed_stays_beside_the_limits_of_its_field(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    for typed in ("1000000", "0", "-1", "2.5"):
        page.get_by_label("How many").fill(typed)
        wait_until(
            page,
            "document.querySelector('.results .note.bad')?.innerText === 'How many: A whole number from 1 to 4,096.'",
        )
        assert page.get_by_label("How many").input_value() == typed
    page.get_by_label("How many").fill("")
    verdict(page)
    page.get_by_label("Tokens for each user").fill("999999999999")
    assert "A length from 1 to 100,000,000 tokens" in page.inner_text(".wishes .problem")
    page.get_by_label("Model", exact=True).and_(page.get_by_role("combobox")).fill("m" * 300)
    page.keyboard.press("Tab")
    wait_until(page, "document.querySelector('.results .note.bad')?.innerText === 'Model: at most 200 characters.'")


def test_a_plain_number_of_a_size_is_gib_and_a_unit_stays_as_it_was_typed(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=24GiB&max_model_len=4096")
    verdict(page)
    for label, typed, shown in (
        ("GPU memory", "24", "24GiB"),
        ("In use", "2GiB", "2GiB"),
        ("Host memory limit", "64", "64GiB"),
    ):
        page.get_by_label(label).fill(typed)
        page.keyboard.press("Tab")
        assert page.get_by_label(label).input_value() == shown
    wait_until(page, "location.hash.includes('host_memory=64GiB')")
    page.get_by_label("In use").fill("abc")
    page.keyboard.press("Tab")
    wait_until(page, "document.querySelector('.results .note.bad')?.innerText.startsWith('In use: a size')")
    page.get_by_label("In use").fill("")
    page.keyboard.press("Tab")
    verdict(page)


def test_an_emptied_flag_has_its_default_again(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100", errors_are_fine=True)
    verdict(page)
    field = page.get_by_label("--max-num-seqs").last
    field.fill("abc")
    page.keyboard.press("Tab")
    page.wait_for_selector(".results .note.bad")
    field.fill("")
    page.keyboard.press("Tab")
    verdict(page)
    wait_until(page, "document.querySelector('.flags .number[aria-label=\"--max-num-seqs\"]').value === '1024'")
    assert "max_num_seqs" not in page.evaluate("location.hash")


def test_fewer_gpus_than_a_search_took_take_its_flags_back_and_one_card_has_a_wish_of_its_own(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=rtx4090")
    verdict(page)
    page.get_by_label("Tokens for each user").fill("32k")
    page.get_by_label("Users at once").fill("16")
    page.get_by_role("button", name="Find the settings").click()
    one = page.get_by_role("button", name="Search one card for")
    one.wait_for()
    wait_until(page, "location.hash.includes('tensor_parallel_size=2')")
    page.get_by_label("How many").fill("1")
    wait_until(page, "!location.hash.includes('tensor_parallel_size')")
    assert "1 x NVIDIA GeForce RTX 4090" in verdict(page)
    page.get_by_label("How many").fill("")
    page.get_by_role("button", name="Find the settings").click()
    one.wait_for()
    one.click()
    wait_until(page, "location.hash.includes('gpus=1&') && location.hash.includes('found=')")
    assert page.get_by_label("Tokens for each user").input_value() == "16k"
    assert "1 x NVIDIA GeForce RTX 4090" in verdict(page)


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_a_tight_plan_keeps_its_command_and_files_with_the_caveat(served, open_page, keep_screenshot, size, language):
    address = "#/plan?model=llama-3.1-8b&gpu=l4&max_model_len=16384&host_memory=6GiB"
    page = open_page(f"{served.url}{address}", size=size, language=language, dark=language == "zh")
    assert "8.00 GiB" in verdict(page) and "6.00 GiB" in verdict(page)
    told = {"en": "Tight: it may not start", "zh": "余量很小：可能无法启动"}[language]
    assert told in page.inner_text(".to-run .note.fair")
    page.get_by_role("button", name="Kubernetes").click()
    page.wait_for_selector(".to-run .file")
    limit = {
        "en": "a memory limit of 6.0 GiB is too small, 13 GiB is enough",
        "zh": "内存上限 6.0 GiB 太小，13 GiB 就够",
    }
    assert limit[language] in page.inner_text(".pool")
    keep_screenshot(page)


def test_no_two_buttons_of_the_plan_have_one_name_and_upgrade_is_in_the_navigation(served, open_page):
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100")
    verdict(page)
    page.get_by_role("link", name="Upgrade", exact=True).click()
    page.get_by_role("button", name="Compare the releases").wait_for()
    names = page.locator(".results button:visible").all_inner_texts()
    compare = [name for name in names if name.startswith("Compare")]
    assert sorted(compare) == ["Compare the releases", "Compare two settings"]


def test_another_command_keeps_the_budget_and_no_answered_wish(served, open_page):
    asked = "want_context=4096&want_users=2&budget=3&found=max_model_len&max_model_len=4096"
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&{asked}")
    verdict(page)
    page.get_by_role("button", name="Command", exact=True).click()
    page.locator(".inputs textarea").fill("vllm serve Qwen/Qwen3-8B")
    page.get_by_role("button", name="Read it").click()
    wait_until(page, "location.hash.includes('Qwen3-8B')")
    assert "budget=3" in page.url and "want_users" not in page.url


def test_cards_that_were_given_are_not_asked_for(served, open_page):
    found = "want_context=4096&want_users=2&found=tensor_parallel_size,gpus&tensor_parallel_size=2&gpus=2"
    page = open_page(f"{served.url}#/plan?model=llama-3.1-8b&gpu=h100&max_model_len=4096&{found}")
    wait_until(page, "document.querySelector('.verdict .badge')?.innerText === 'Needs 2 cards'")
    page.get_by_label("How many").fill("2")
    wait_until(page, "document.querySelector('.verdict .badge')?.innerText === 'Fits'")
    assert "tensor_parallel_size=2" in page.url
