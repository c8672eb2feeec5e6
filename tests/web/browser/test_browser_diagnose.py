"""A diagnosis, as a person asks for one."""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

SAMPLE = Path(__file__).parents[3] / "docs/samples/kv-too-small.log"
EVERYWHERE = [(size, language) for size in ("desktop", "phone") for language in ("en", "zh")]
DECISIVE = ".log-row.decisive[data-line='{}']"


def drop(page: Any, name: str, body: bytes) -> None:
    page.set_input_files(".log-input input[type=file]", {"name": name, "mimeType": "text/plain", "buffer": body})


def wait_for_finding(page: Any) -> None:
    page.wait_for_selector(".finding.first")


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_the_cause_is_told_and_its_line_is_marked_in_the_log(served, open_page, keep_screenshot, size, language):
    page = open_page(f"{served.url}#/diagnose", size=size, language=language)
    page.locator(".examples button").first.click()
    wait_for_finding(page)
    assert page.locator(DECISIVE.format(7)).is_visible()
    page.wait_for_selector(".before-after .card-svg")
    assert page.locator(".before-after .card-svg").count() == 2
    assert page.locator(".dead-ends li").count() >= 1
    assert "--max-model-len" in page.locator(".fix .command pre").first.inner_text()
    assert {"en": "stays on this machine", "zh": "日志留在本机"}[language] in page.inner_text(".private")
    keep_screenshot(page)


def test_a_finding_leads_to_its_entry_in_the_catalog(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.locator(".drop textarea").fill(SAMPLE.read_text())
    page.get_by_role("button", name="Diagnose", exact=True).click()
    wait_for_finding(page)
    page.get_by_role("link", name="LR203: the long story").click()
    page.wait_for_selector("article.entry h2")
    page.get_by_role("link", name="Diagnose").click()
    wait_for_finding(page)


def test_a_chosen_file_is_read_again_with_what_is_filled_in_later(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    drop(page, "pod.log", SAMPLE.read_bytes())
    wait_for_finding(page)
    assert "pod.log" in page.locator(".drop textarea").get_attribute("placeholder")
    gpu = page.get_by_role("combobox", name="GPU")
    gpu.fill("l4")
    gpu.press("Enter")
    page.wait_for_selector(".diagnosis.stale")
    page.get_by_role("button", name="Diagnose", exact=True).click()
    page.wait_for_selector(".diagnosis:not(.stale) .finding.first")


def test_fields_can_be_emptied_and_two_models_are_refused(served, open_page):
    page = open_page(f"{served.url}#/diagnose", errors_are_fine=True)
    page.locator(".drop textarea").fill(SAMPLE.read_text())
    model = page.get_by_role("combobox", name="Model")
    model.fill("Qwen/Qwen3-32B")
    model.press("Enter")
    page.get_by_label("The command").fill("vllm serve openai/gpt-oss-20b")
    page.get_by_role("button", name="Diagnose", exact=True).click()
    page.wait_for_selector("text=the command serves openai/gpt-oss-20b, and the model is given as Qwen/Qwen3-32B")
    model.fill("")
    model.press("Tab")
    assert model.input_value() == ""


def test_a_kill_without_a_reason_is_named_as_on_the_command_line_and_can_be_sent_as_text(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.locator(".drop textarea").fill(
        "INFO 01-01 00:00:00 api_server.py:1] vLLM API server version 0.11.0\nExit code 137\n"
    )
    page.get_by_role("button", name="Diagnose", exact=True).click()
    wait_for_finding(page)
    assert "not proven" in page.inner_text(".cause")
    page.get_by_role("button", name="Copy as text").click()
    page.wait_for_selector("text=Copied")
    sent = page.evaluate("navigator.clipboard.readText()")
    assert "not proven" in sent
    assert "api_server.py" not in sent


def test_a_diagnosis_opens_in_plan_and_as_a_link_without_the_log(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.get_by_role("button", name="The context is too long").click()
    wait_for_finding(page)
    order = page.evaluate("""[".cause", ".fix .command", ".evidence", ".why"].map(
        (part) => document.querySelector(`.finding.first ${part}`).getBoundingClientRect().top)""")
    assert order == sorted(order)
    page.get_by_role("button", name="Copy a link to this diagnosis").click()
    page.wait_for_selector("text=Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    other = open_page(link)
    wait_for_finding(other)
    assert "--max-model-len 40960" in other.inner_text(".fix .command pre")
    assert "EngineCore" not in other.inner_text("main")
    page.get_by_role("link", name="Open the fixed server in Plan").click()
    wait_until(page, "location.hash.includes('max_model_len=40960')")


def test_what_the_command_line_says_beside_the_command_is_said_here_too(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    line = SAMPLE.read_text().splitlines()[6]
    page.locator(".drop textarea").fill(line)
    page.get_by_role("button", name="Diagnose", exact=True).click()
    wait_for_finding(page)
    assert "Keep your command and change only" in page.inner_text(".finding.first .fix .note")
    assert "Application startup complete" in page.inner_text(".finding.first")


def test_a_log_that_is_being_read_can_be_cancelled(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.route("**/api/diagnose*", lambda route: None)
    page.get_by_role("button", name="The weights do not fit").first.click()
    page.get_by_role("button", name="Cancel").click()
    page.wait_for_selector(".examples")


def test_a_packed_log_is_read(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    drop(page, "vllm.log.gz", gzip.compress(SAMPLE.read_bytes()))
    wait_for_finding(page)


def test_a_log_that_powershell_wrote_is_read(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    drop(page, "vllm.log", SAMPLE.read_text().encode("utf-16"))
    wait_for_finding(page)


@pytest.mark.parametrize(("body", "words"), [(bytes(range(256)) * 40, "is not a text log"), (b"", "is empty")])
def test_what_is_no_log_is_told(served, open_page, body, words):
    page = open_page(f"{served.url}#/diagnose")
    drop(page, "weights.bin", body)
    page.wait_for_selector("[role=alert]")
    assert words in page.inner_text("[role=alert]")


def test_a_script_in_a_line_is_text(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.on("dialog", lambda dialog: pytest.fail("a script from a log ran"))
    page.locator(".drop textarea").fill("<img src=x onerror=alert(1)>\n" + SAMPLE.read_text())
    page.get_by_role("button", name="Diagnose", exact=True).click()
    wait_for_finding(page)
    assert page.locator(DECISIVE.format(8)).is_visible()
    assert page.locator("img[src=x]").count() == 0
    assert "<img src=x onerror=alert(1)>" in page.inner_text(".log-row[data-line='1']")


def test_a_reload_keeps_what_was_pasted(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.locator(".drop textarea").fill(SAMPLE.read_text())
    page.get_by_role("button", name="Diagnose", exact=True).click()
    wait_for_finding(page)
    page.reload()
    wait_for_finding(page)
    assert "max seq len" in page.locator(".drop textarea").input_value()


def test_a_log_of_50_megabytes_does_not_freeze_the_page(served, open_page, tmp_path):
    log = tmp_path / "long.log"
    noise = (
        b"INFO 11-15 03:00:00 [loggers.py:248] Engine 000: generation throughput: 812.4 tokens/s, Running: 31 reqs\n"
    )
    log.write_bytes(SAMPLE.read_bytes() + noise * (50_000_000 // len(noise)))
    page = open_page(f"{served.url}#/diagnose")
    page.evaluate("""() => {
        window.longest = 0;
        let last = performance.now();
        const beat = () => {
            window.longest = Math.max(window.longest, performance.now() - last);
            last = performance.now();
            setTimeout(beat, 10);
        };
        beat();
    }""")
    page.set_input_files(".log-input input[type=file]", log)
    page.wait_for_selector(".log-row")
    page.locator(".log").evaluate("node => { node.scrollTop = node.scrollHeight; }")
    wait_until(page, "Number([...document.querySelectorAll('.log-row')].at(-1).dataset.line) > 400000")
    assert page.locator(".log-row").count() < 100
    assert page.evaluate("window.longest") < 1_000
    page.set_default_timeout(240_000)
    wait_for_finding(page)


def test_a_server_that_died_is_told_and_the_log_is_kept(served, open_page):
    page = open_page(f"{served.url}#/diagnose", errors_are_fine=True)
    page.locator(".drop textarea").fill(SAMPLE.read_text())
    page.route("**/api/diagnose*", lambda route: route.abort())
    page.get_by_role("button", name="Diagnose", exact=True).click()
    page.wait_for_selector("[role=alert]")
    assert "does not answer" in page.inner_text("[role=alert]")
    page.unroute("**/api/diagnose*")
    page.get_by_role("button", name="Diagnose", exact=True).click()
    wait_for_finding(page)


def test_a_refusal_of_the_server_is_shown_in_its_own_words(served, open_page):
    page = open_page(f"{served.url}#/diagnose", errors_are_fine=True)
    error = '{"error": {"message": "the log is over the limit", "hint": "cut it", "exit_code": 2}}'
    page.route("**/api/diagnose*", lambda route: route.fulfill(status=413, content_type="application/json", body=error))
    page.locator(".drop textarea").fill(SAMPLE.read_text())
    page.get_by_role("button", name="Diagnose", exact=True).click()
    page.wait_for_selector("[role=alert]")
    assert "the log is over the limit" in page.inner_text("[role=alert]")
    assert "cut it" in page.inner_text("[role=alert]")


def test_the_newest_log_wins(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    answers = iter([1.5, 0.0])

    def late(route: Any) -> None:
        time.sleep(next(answers, 0.0))
        route.continue_()

    page.route("**/api/diagnose*", late)
    drop(page, "old.log", b"nothing that is known\n")
    drop(page, "new.log", SAMPLE.read_bytes())
    wait_for_finding(page)
    assert "new.log" in page.inner_text(".log-panel h2")


def test_a_fixed_server_with_another_checkpoint_opens_as_an_estimate_at_its_verdict(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.get_by_role("button", name="torch.OutOfMemoryError").click()
    page.wait_for_selector(".before-after .card-svg")
    page.get_by_role("link", name="Open the fixed server in Plan").click()
    page.wait_for_selector(".legend .part-weights, .legend")
    assert page.evaluate("scrollY") == 0
    assert "estimated" in page.inner_text(".legend")
    assert "measured" not in page.url


def test_a_log_without_its_reason_has_the_headline_of_the_command_line(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.locator(".drop textarea").fill("INFO: vLLM API server version 0.11.2\nINFO: Shutting down\n")
    page.locator(".drop textarea").press("Control+Enter")
    page.wait_for_selector("h2.cause")
    assert page.inner_text("h2.cause") in ("The lines that say why are not in this text.", "No problem found.")


MANIFEST = """\
apiVersion: v1
kind: Pod
metadata: {name: vllm}
spec:
  containers:
  - name: vllm
    image: vllm/vllm-openai:v0.11.0
    args: ["--model", "meta-llama/Llama-3.1-8B"]
    resources:
      limits: {nvidia.com/gpu: 1, memory: 27Gi}
"""
NO_RELEASE = (
    "Model loading took 14.9888 GiB memory and 8.214 seconds\nAvailable KV cache memory: 1.91 GiB\n"
    "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (1.91 GiB). Based on the available memory, the estimated "
    "maximum model length is 15616.\n"
)


def diagnose(page: Any, command: str, vllm: str = "") -> None:
    page.locator(".drop textarea").fill(NO_RELEASE)
    page.locator(".hints textarea").fill(command)
    page.locator(".hints input").nth(1).fill("l4")
    page.get_by_label("vLLM", exact=True).select_option(vllm)
    page.locator(".log-input .button.primary").click()
    page.wait_for_selector(".before-after .card-svg")


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_the_release_of_a_manifest_travels_to_its_files_and_to_plan(served, open_page, keep_screenshot, size, language):
    page = open_page(f"{served.url}#/diagnose", size=size, language=language, dark=size == "phone")
    diagnose(page, MANIFEST)
    said = {"en": "vLLM 0.11.0, from the command", "zh": "vLLM 0.11.0（来自命令）"}[language]
    assert said in page.inner_text(".finding.first .verdict p")
    assert "KV 1.91 GiB" in page.inner_text(".before-after")
    page.get_by_role("button", name="Kubernetes").click()
    page.wait_for_selector(".to-run .file")
    assert "vllm-openai:v0.11.0" in page.inner_text(".to-run .file pre")
    keep_screenshot(page)
    page.locator(".actions a.button").first.click()
    page.wait_for_selector(".legend-row.part-kv")
    assert "vllm=0.11.0" in page.url and "host_memory=27GiB" in page.url
    assert page.inner_text(".legend-row.part-kv .figure") == "1.91 GiB"


def test_a_release_that_nobody_names_is_said_to_be_assumed_and_can_be_chosen(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    diagnose(page, "vllm serve meta-llama/Llama-3.1-8B")
    assert "assumed, as no release is named" in page.inner_text(".finding.first .verdict p")
    diagnose(page, "vllm serve meta-llama/Llama-3.1-8B", "0.10.2")
    wait_until(page, "document.querySelector('.finding.first .verdict p')?.innerText.includes('vLLM 0.10.2, as given')")


@pytest.mark.parametrize(("size", "language"), EVERYWHERE)
def test_another_release_says_that_the_measurement_is_lost_and_leads_back(
    served, open_page, keep_screenshot, size, language
):
    page = open_page(f"{served.url}#/diagnose", size=size, language=language, dark=language == "zh")
    diagnose(page, MANIFEST)
    page.locator(".actions a.button").first.click()
    page.wait_for_selector(".legend-row.part-kv")
    page.locator(".machine").get_by_label("vLLM", exact=True).select_option("0.32.0")
    wait_until(page, "document.querySelector('.verdict p')?.innerText.includes('0.32.0')")
    lost = page.locator(".result > .note.fair")
    lost.wait_for()
    assert "0.11.0" in lost.inner_text() and "0.32.0" in lost.inner_text()
    wait_until(page, "location.hash.includes('vllm=0.32.0') && location.hash.includes('measured=')")
    keep_screenshot(page)
    page.reload()
    lost.wait_for()
    lost.get_by_role("button").first.click()
    wait_until(page, "document.querySelector('.verdict p')?.innerText.includes('0.11.0')")
    wait_until(page, "document.querySelector('.legend-row.part-kv .figure').innerText === '1.91 GiB'")
    assert lost.count() == 0


def test_what_others_hold_of_the_card_travels_to_plan(served, open_page):
    page = open_page(f"{served.url}#/diagnose")
    page.locator(".drop textarea").fill(
        "vllm serve Qwen/Qwen3-14B --max-model-len 32768 --gpu-memory-utilization 0.95\nCapturing CUDA graphs\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has a total capacity of 23.57 "
        "GiB of which 288.31 MiB is free. Including non-PyTorch memory, this process has 21.90 GiB memory in use."
    )
    page.get_by_role("button", name="Diagnose", exact=True).click()
    wait_for_finding(page)
    page.get_by_role("link", name="Open this server in Plan").click()
    wait_until(page, "location.hash.includes('gpu_used=1.38')")
    assert page.get_by_label("In use").first.input_value().startswith("1.38")
    assert "a desktop takes about 1.2 GiB" in page.inner_text(".machine")
