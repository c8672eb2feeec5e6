"""What the terminal shows of a diagnosis can be read at its width and pasted into a shell."""

from __future__ import annotations

import re
import subprocess

import pytest
from diagnosis_logs import CAUSES, TORCH

from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import LogReading, read_log
from legroom.drawing.terminal import Style
from legroom.errors import LegroomError
from legroom.render.diagnosis_text import readings_text
from legroom.web.endpoints import answer

LONG = (
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 65536 --max-num-seqs 64 --max-num-batched-tokens 4096 "
    "--served-model-name 'my model' --kv-cache-dtype auto --block-size 16 --api-key sk-0123456789abcdef"
)
SHORT_KV = CAUSES["a context longer than the pool"][1]


def reading(log: str, command: str | None = LONG) -> LogReading:
    return read_log([log.encode()], "the log", Hints(command=command, gpu="l4", vllm="0.11.0"))


def shown_command(text: str) -> list[str]:
    """The lines of the command: those that go on after the paragraph of the fix, and the one that does not."""
    lines = text[text.index("\nfix:") :].partition("\n\n")[2].splitlines()
    return lines[: next(number for number, line in enumerate(lines, 1) if not line.endswith("\\"))]


@pytest.mark.parametrize("width", [66, 80, 100])
def test_a_command_that_is_pasted_is_the_command_of_the_fix(width: int) -> None:
    answer = reading(SHORT_KV)
    lines = shown_command(readings_text([answer], Style(width=width)))
    assert len(lines) > 1
    assert max(map(len, lines)) <= width
    script = 'vllm() { printf "%s\\n" "$@"; }\n' + "\n".join(lines)
    pasted = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    computed = answer.runs[0].findings[0].fixes[0].command[1:]
    assert pasted == list(computed)
    assert not any(word.startswith("sk-") for word in pasted)
    assert "my model" in pasted


def test_variables_in_front_of_a_command_are_pasted_with_it() -> None:
    fragmented = TORCH.format(
        wanted="2.00 GiB", total="79.18 GiB", free="300.00 MiB", own="78.88 GiB", torch="71.00 GiB", unused="7.10 GiB"
    )
    lines = shown_command(readings_text([reading(fragmented)], Style(width=66)))
    script = 'vllm() { echo "$PYTORCH_CUDA_ALLOC_CONF"; }\n' + "\n".join(lines)
    pasted = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert pasted == "expandable_segments:True\n"


def test_a_short_command_stays_on_one_line() -> None:
    assert len(shown_command(readings_text([reading(SHORT_KV, "vllm serve llama-3.1-8b")], Style(width=80)))) == 1


@pytest.mark.parametrize("what", CAUSES)
def test_no_line_is_wider_than_the_terminal(what: str) -> None:
    text = readings_text([read_log([CAUSES[what][1].encode()])], Style(width=80))
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    "name",
    ["parameters that do not fit", "less free than asked for", "a budget below the weights", "repacking for a kernel"],
)
def test_a_diagnosis_is_chinese_where_it_is_asked_for_in_chinese(name):
    finding = answer("diagnose", {"log": CAUSES[name][1], "gpu": "h100", "language": "zh"})["findings"][0]
    told = [finding["why"], *(text for fix in finding["fixes"] for text in (fix["why"], fix["trades"]) if text)]
    assert [text for text in told if not re.search("[\u4e00-\u9fff]", text)] == []
    english = answer("diagnose", {"log": CAUSES[name][1], "gpu": "h100"})["findings"][0]
    assert sorted(re.findall(r"\d[\d.,]*\d", finding["why"])) == sorted(re.findall(r"\d[\d.,]*\d", english["why"]))
    assert finding["evidence"] == english["evidence"]


PROBE = 'Warning Unhealthy 2m kubelet Liveness probe failed: Get "http://10.0.3.7:8000/health": connection refused\n'


def test_an_end_by_a_probe_is_called_so_and_sends_nobody_to_the_story_of_another_failure() -> None:
    text = readings_text([read_log([PROBE.encode()])])
    assert text.startswith("error[LR901]: a probe ended the server, not a lack of memory\n")
    assert "legroom explain" not in text


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "services:\n  a:\n    image: vllm/vllm-openai\n    # 显存不足时调低\n    command: --model acme/m\n",
            "compose file",
        ),
        ("# out of memory? a lower share\nFROM vllm/vllm-openai\nRUN pip install \\\n  acme\nCMD []\n", "Dockerfile"),
    ],
)
def test_what_a_comment_of_a_container_file_speaks_of_has_not_failed(text: str, kind: str) -> None:
    with pytest.raises(LegroomError, match=f"a {kind}, not a log"):
        read_log([text.encode()])
    assert read_log([f"{text}{SHORT_KV}".encode()]).runs


def test_a_manifest_is_no_log_and_says_which_commands_read_it() -> None:
    manifest = "# ours\napiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - ports: [{containerPort: 8000}]\n"
    with pytest.raises(LegroomError, match="a Kubernetes manifest, not a log") as refused:
        read_log([manifest.encode()])
    assert "legroom lint FILE" in refused.value.hint
    for log in ("status:\n  reason: OOMKilled\n", SHORT_KV):
        assert read_log([(manifest + log).encode()]).runs
