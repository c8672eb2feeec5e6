"""What a newcomer types first: no dependency, no network, a full disk, a wrong word."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from legroom.cli.completion import completion_script
from legroom.cli.main import _EXTRA_OF_COMMAND, _PACKAGES, COMMANDS, main, overview
from legroom.facts.gpus import all_gpus, gpu, gpu_names

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "docs" / "samples" / "kv-too-small.log"
WITHOUT_DEPENDENCIES = """
import sys
sys.modules.update(dict.fromkeys({packages}))
from legroom.cli.main import main
sys.exit(main())
"""
PACKAGES = {
    "re2",
    "_re2",
    "yaml",
    "huggingface_hub",
    "zstandard",
    "aiohttp",
    "prometheus_client",
    "psutil",
    "pynvml",
    "httptools",
    "numba",
    "numpy",
}


def without_dependencies(*words: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT_DEPENDENCIES.format(packages=PACKAGES)
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def shell(line: str, **options) -> subprocess.CompletedProcess[str]:
    line = line.replace("legroom ", f"{sys.executable} -m legroom ")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, **options)


def test_a_plan_needs_the_standard_library_alone():
    done = without_dependencies("plan", "llama-3.1-8b", "--gpu", "h100", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "fits"


def test_the_sample_log_is_diagnosed_without_any_dependency_as_with_them(capsys):
    words = ["diagnose", str(SAMPLE), "--gpu", "rtx4090", "--json"]
    done = without_dependencies(*words)
    assert done.stderr == ""
    assert main(words) == done.returncode == 1
    assert json.loads(done.stdout) == json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (("verify", "http://127.0.0.1:9"), "aiohttp", "run"),
        (("watch", "http://127.0.0.1:9", "--once"), "psutil", "watch"),
        (("guard", "--upstream", "http://127.0.0.1:9", "--port", "0"), "httptools", "guard"),
        (("doctor",), "psutil", "run"),
        (("recover",), "psutil", "run"),
    ],
)
def test_a_command_that_needs_a_missing_package_names_the_extra_that_has_it(words, package, extra):
    done = without_dependencies(*words)
    assert done.returncode == 3
    assert f"legroom {words[0]} needs the Python package {package}" in done.stderr
    assert f"pip install 'legroom[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_extra_that_a_sentence_names_is_in_the_project_file():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = set(_EXTRA_OF_COMMAND.values()) | {extra for _, extra in _PACKAGES.values() if extra}
    assert named <= set(extras)


def test_a_plain_install_asks_for_packages_of_pure_python_alone():
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    assert {re.split(r"[<>=;\[ ]", line)[0].lower() for line in needed} <= {"google-re2", "huggingface_hub", "pyyaml"}


@pytest.mark.parametrize(
    "words",
    [
        ("size", "llama-3.1-8b", "--gpu", "h100,l4", "--json"),
        ("simulate", "--synthetic", "poisson rate=8 requests=50", "--blocks", "20000", "--step-ms", "30", "--json"),
        ("explain", "--search", "cumem fragmentation", "--json"),
        ("models", "llama", "--json"),
    ],
)
def test_what_a_browser_runs_needs_the_standard_library_alone(words, capsys):
    done = without_dependencies(*words)
    assert done.returncode == main(list(words)) == 0
    assert json.loads(done.stdout) == json.loads(capsys.readouterr().out)


def test_output_that_cannot_be_written_is_one_line_and_code_3():
    done = shell("legroom plan llama-3.1-8b --gpu h100 > /dev/full")
    assert done.returncode == 3
    assert done.stderr == "error: the output could not be written: No space left on device\n"


def test_closed_streams_are_no_crash():
    assert shell("legroom plan llama-3.1-8b --gpu h100 >&-").returncode == 0
    done = shell("legroom diagnose <&-")
    assert done.returncode == 2
    assert "input is empty" in done.stderr


def test_the_help_is_in_sections_and_imports_no_command():
    code = (
        "import sys; from legroom.cli.main import main; main(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == overview()
    assert "\nwhen it fails:\n" in done.stdout
    assert not any(f"'{command.module}'" in done.stderr for command in COMMANDS)


def test_the_help_of_a_command_imports_nothing_that_only_its_run_needs():
    code = "import sys; from legroom.cli.main import main; main(['simulate', '--help']); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "usage: legroom simulate TRACE" in done.stdout
    assert not any(f"'legroom.{room}'" in done.stdout for room in ("simulation", "planning", "memory", "render"))


def test_models_are_found_by_words(capsys):
    assert main(["models", "qwen3", "FP8", "--json"]) == 0
    names = [model["name"] for model in json.loads(capsys.readouterr().out)["models"]]
    assert "qwen3-8b-fp8" in names
    assert all("fp8" in name for name in names)
    assert main(["models", "llama-3.1-8b"]) == 0
    assert "meta-llama/Llama-3.1-8B" in capsys.readouterr().out
    assert main(["models", "no-such-model"]) == 1


def test_gpus_are_found_by_words(capsys):
    assert main(["gpus", "A100-SXM4", "40gb", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["name"] == "NVIDIA A100-SXM4-40GB"
    assert main(["gpus"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(all_gpus()) + 1
    assert main(["gpus", "abacus"]) == 1


def test_every_name_that_gpus_lists_can_be_planned_with():
    for name, shorts in gpu_names().items():
        assert {gpu(short).name for short in shorts} <= {name}


@pytest.mark.parametrize("name", ["a100", "v100", "rtx3080", "h20"])
def test_a_gpu_that_comes_in_two_sizes_says_which_was_taken_and_how_to_get_the_other(name, capsys):
    # The last release that has kernels for Volta: later ones refuse a V100 whatever its size.
    assert main(["size", "qwen3-0.6b", "--gpu", name, "--vllm", "0.19.0", "--json"]) == 0
    err = capsys.readouterr().err
    assert "read as" in err
    assert "for the other" in err


def test_completion_knows_every_command_option_gpu_and_vllm_flag(tmp_path):
    pytest.importorskip("shtab")
    script = tmp_path / "legroom.bash"
    script.write_text(completion_script("bash"))
    ask = "source {}; COMP_WORDS=({}); COMP_CWORD={}; _shtab_legroom; echo ${{COMPREPLY[@]}}"

    def completed(*words: str) -> list[str]:
        line = ask.format(script, " ".join(words), len(words) - 1)
        return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout.split()

    assert set(completed("legroom", "''")) >= {command.name for command in COMMANDS}
    assert completed("legroom", "di") == ["diagnose"]
    assert completed("legroom", "plan", "--want-c") == ["--want-context", "--want-concurrency"]
    assert completed("legroom", "plan", "--max-num-b") == ["--max-num-batched-tokens"]
    assert "a100-80g" in completed("legroom", "plan", "--gpu", "a100-8")
    assert "llama-3.1-8b" in completed("legroom", "plan", "llama-3.1-8")


def test_a_wish_that_no_number_of_gpus_holds_says_what_would_fit(capsys):
    words = ["plan", "llama-3.1-8b", "--gpu", "l4", "--want-context", "128k", "--want-concurrency", "5000"]
    assert main(words) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "8 GPUs" in out
    assert re.search(r"it would hold about \d+ requests of that length", out)
    assert main([*words, "--max-num-seqs", "8000"]) == 1
    assert "--max-num-batched-tokens 2048 is below --max-num-seqs 8000" in " ".join(capsys.readouterr().out.split())


def test_a_trace_in_seconds_says_what_to_add(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival": 0.5, "prompt_len": 100, "output_len": 10}\n')
    assert main(["simulate", str(trace), "--blocks", "2000"]) == 2
    err = capsys.readouterr().err
    assert "add --step-ms 30" in err
    assert main(["simulate", str(trace), "--blocks", "2000", "--step-ms", "30"]) == 0
    assert main(["simulate", str(trace), "--blocks", "2000", "--model", "qwen3-0.6b", "--gpu", "l4"]) == 0


@pytest.mark.parametrize("words", [["--num-speculative-tokens", "-1"], ["--block-size", "9" * 20]])
def test_a_simulation_that_would_never_end_is_refused(words, capsys):
    mix = "poisson rate=2 requests=10"
    assert main(["simulate", "--synthetic", mix, "--step-ms", "30", "--blocks", "1000", *words]) == 2
    assert "must be at" in capsys.readouterr().err


def test_the_kv_bytes_of_a_token_are_derived(capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--explain-math"]) == 0
    out = capsys.readouterr().out
    assert "32 full-attention layers  131,072 bytes" in out
    assert "2 (keys and values) x 8 KV heads x 128 wide x 2 bytes" in out
    words = ["plan", "deepseek-v3", "--gpu", "b200", "--tensor-parallel-size", "8", "--explain-math", "--json"]
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    [term] = document["terms"]["bytes_per_token"]
    assert term["bytes"] == document["kv"]["bytes_per_token"] == 61 * 576 * 2
    assert main(["plan", "gpt-oss-20b", "--gpu", "h100", "--explain-math"]) == 0
    assert "last 128 tokens" in capsys.readouterr().out


def test_the_skill_file_has_the_front_matter_that_agents_read():
    head, name, description = (ROOT / "skills" / "legroom" / "SKILL.md").read_text().splitlines()[:3]
    assert head == "---"
    assert name == "name: legroom"
    assert description.startswith("description: ")
    assert len(description) < 1024


@pytest.mark.parametrize("journal", ["folder", "text"])
def test_a_journal_that_is_none_is_told(journal, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("hello")
    assert main(["incidents", "--journal", str(tmp_path / journal)]) in (2, 3)
    assert os.linesep in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["simulate", "--model", "llama-3.1-8b", "--gpu", "h100", "--rate", "8"], "--synthetic 'poisson rate=8"),
        (["size", "llama-3.1-8b", "--rate", "8", "--prompt", "500", "--output", "100"], "--answer"),
        (["upgrade", "0.19.0", "0.32.0", "--gpu", "h100", "--context", "8k", "--", "vllm", "serve", "a"], "--context"),
    ],
)
def test_an_option_of_another_command_is_answered_with_the_one_for_it(words, option, capsys):
    assert main(words) == 2
    assert option in capsys.readouterr().err


def test_a_name_that_no_model_has_is_not_called_too_large(capsys):
    assert main(["models", "--gpu", "rtx4090", "nonsuch"]) == 1
    out = capsys.readouterr().out
    assert "such a name" in out and "fits" not in out


def test_a_model_that_no_card_serves_at_this_length_comes_with_the_reason(capsys):
    assert main(["models", "--gpu", "rtx4090", "qwen3-30b-a3b-gptq-int4", "--context", "64k"]) == 1
    assert "65536 is above the 40960 tokens" in " ".join(capsys.readouterr().out.split())


def test_what_is_in_use_of_a_card_is_not_packed(capsys):
    def free(*used):
        words = ["pack", "--gpu", "rtx4090", *used, "--json", "--", "vllm", "serve", "llama-3.1-8b"]
        assert main([*words, "--max-model-len", "8192"]) == 0
        return json.loads(capsys.readouterr().out)["servers"][0]["kv"]["tokens"]

    assert free("--gpu-used", "3GiB") < free("--gpu-used", "1GiB")


def test_a_simulated_load_says_how_long_its_requests_are(capsys):
    assert main(["simulate", "--synthetic", "poisson rate=8 requests=50", "--blocks", "4000", "--step-ms", "30"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"load +50 requests; input tokens p50 [\d,]+, p99 [\d,]+; output tokens p50 [\d,]+, p99", out)


def test_a_pool_of_windowed_layers_is_counted_in_one_way(capsys):
    words = ["plan", "openai/gpt-oss-20b", "--gpu", "rtx4090", "--vllm", "0.10.2", "--max-model-len", "16384"]
    assert main(words) == 0
    out = capsys.readouterr().out
    requests = float(re.search(r"concurrency +([\d.]+) requests", out)[1])
    assert int(re.search(r"full-length requests hold ([\d,]+)", out)[1].replace(",", "")) == pytest.approx(
        16384 * requests, rel=0.001
    )


@pytest.mark.parametrize("words", [("exit", "code", "137"), ("137",), ("--search", "exit", "code", "137")])
def test_explain_takes_words_as_they_are_typed(capsys, words):
    assert main(["explain", *words]) == 0
    assert capsys.readouterr().out.startswith("LR501")


def test_words_that_are_no_model_id_are_no_command(capsys):
    assert main(["plan", "Qwen3-32B AWQ", "--gpu", "rtx4090"]) == 2
    said = capsys.readouterr()
    assert "vllm serve" not in said.out
    assert "qwen3-32b-awq" in said.err


def test_what_offloading_costs_is_said(capsys):
    assert main(["plan", "gpt-oss-20b", "--gpu", "rtx4090", "--cpu-offload-gb", "4"]) == 0
    assert "crosses the bus at every step" in " ".join(capsys.readouterr().out.split())


def test_a_flag_that_a_wish_keeps_is_named(capsys):
    wish = ("--want-context", "8k", "--want-concurrency", "20", "--gpus", "4", "--tensor-parallel-size", "2")
    assert main(["plan", "qwen2.5-72b-instruct", "--gpu", "a100-80gb", *wish]) == 0
    assert "Kept as given: --tensor-parallel-size 2." in " ".join(capsys.readouterr().out.split())


def test_a_word_names_the_checkpoint_that_has_it(capsys):
    assert main(["models", "coder", "14b", "--gpu", "rtx4090", "--context", "8k", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    assert rows
    assert all("coder" in row["ids"][0].lower() and "Coder" in " ".join(row["command"]) for row in rows)
    assert main(["models", "coder", "14b", "--gpu", "rtx4090", "--context", "8k"]) == 0
    assert "Qwen2.5-Coder-14B" in capsys.readouterr().out


def test_the_nearest_name_is_the_one_with_a_letter_more(capsys):
    assert main(["plan", "lama-3.3-70b", "--gpu", "h100"]) == 2
    assert "nearest bundled: llama-3.3-70b" in capsys.readouterr().err


def test_a_limit_may_be_written_with_its_unit(capsys):
    load = ("--rate", "1", "--prompt", "500", "--answer", "50", "--gpu", "h100", "--json")
    answers = []
    for limits in (("--ttft", "3s", "--tpot", "80ms"), ("--ttft", "3", "--tpot", "80")):
        assert main(["size", "llama-3.1-8b", *load, *limits]) == 0
        answers.append(json.loads(capsys.readouterr().out)["rows"])
    assert answers[0] == answers[1]
