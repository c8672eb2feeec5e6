"""Every mistake gets one clear message with what to do, exit code 2 or 3, nothing on stdout, never a traceback."""

import json

import pytest

from legroom.cli.main import main

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def complaint(capsys, *words, code=2):
    """The message a call ends with."""
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert "\nhint: " in err, err
    return err


def folder(tmp_path, **changes):
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_an_unknown_command_is_named_with_the_nearest(capsys):
    assert "did you mean 'plan'" in complaint(capsys, "plna")


def test_no_gpu_lists_common_names(capsys):
    assert "h100" in complaint(capsys, "plan", "llama-3.1-8b")


def test_no_model_asks_for_one(capsys):
    assert "which model?" in complaint(capsys, "plan", "--gpu", "h100")


def test_an_unknown_model_lists_the_nearest(capsys):
    assert "llama-3.1" in complaint(capsys, "plan", "llama-3.1-9b", "--gpu", "h100")


def test_an_unknown_gpu_lists_the_nearest(capsys):
    assert "H100" in complaint(capsys, "plan", "llama-3.1-8b", "--gpu", "h101")


def test_an_unknown_release_lists_what_is_known(capsys):
    assert "0.4.0" in complaint(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", "--vllm", "banana")
    assert "0.4.0" in complaint(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", "--vllm", "0.1.0")


def test_a_flag_that_never_existed_is_named(capsys):
    err = complaint(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", "--max-num-on-the-fly-batches", "4")
    assert "--max-num-on-the-fly-batches" in err


def test_a_removed_flag_says_when_it_went(capsys):
    assert "0.18.0" in complaint(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", "--swap-space", "8")


def test_a_misspelt_flag_gets_the_nearest(capsys):
    err = complaint(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", "--max-modle-len", "4096")
    assert "--max-model-len" in err


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", 2),
        ("", 2),
        ("[]", 2),
        ("null", 2),
        ("{}", 2),
        ("\x00\x01", 2),
        ('{"architectures": ["LlamaForCausalLM"]}', 2),
    ],
)
def test_a_config_that_is_no_config_is_refused(capsys, tmp_path, text, code):
    (tmp_path / "config.json").write_text(text)
    complaint(capsys, "plan", str(tmp_path), "--gpu", "h100", code=code)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -3},
        {"num_hidden_layers": 10**9},
        {"hidden_size": 0},
        {"hidden_size": 10**12},
        {"num_attention_heads": 0},
        {"vocab_size": -1},
        {"hidden_size": "big"},
        {"num_hidden_layers": None},
        {"hidden_size": None},
        {"num_attention_heads": 3.7},
        {"max_position_embeddings": -5},
    ],
    ids=str,
)
def test_absurd_sizes_are_refused(capsys, tmp_path, changes):
    complaint(capsys, "plan", folder(tmp_path, **changes), "--gpu", "h100")


def test_a_path_that_is_not_there_is_said_so(capsys, tmp_path):
    complaint(capsys, "plan", str(tmp_path / "nothing" / "config.json"), "--gpu", "h100")


def test_a_folder_without_a_config_is_said_so(capsys, tmp_path):
    complaint(capsys, "plan", str(tmp_path), "--gpu", "h100")


def test_a_huge_file_is_not_read(capsys, tmp_path):
    big = tmp_path / "config.json"
    with big.open("wb") as file:
        file.truncate(2**30)
    complaint(capsys, "plan", str(big), "--gpu", "h100")


def test_tensor_parallel_that_does_not_divide_the_heads_is_refused(capsys, tmp_path):
    complaint(capsys, "plan", folder(tmp_path), "--gpu", "h100", "--tensor-parallel-size", "3")


def test_more_gpus_than_given_is_refused(capsys):
    words = ("plan", "llama-3.1-8b", "--gpu", "h100", "--gpus", "1", "--tensor-parallel-size", "2")
    assert "--gpus 2" in complaint(capsys, *words)


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "0"),
        ("--gpus", "-1"),
        ("--gpus", "two"),
        ("--gpu-memory", "lots"),
        ("--gpu-memory", "0GiB"),
        ("--gpu-memory", "-3GiB"),
        ("--gpu-used", "900GiB"),
        ("--gpu-memory-utilization", "1.5"),
        ("--gpu-memory-utilization", "-0.1"),
        ("--gpu-memory-utilization", "nine"),
        ("--max-model-len", "-5"),
        ("--max-model-len", "0"),
        ("--max-model-len", "x"),
        ("--max-num-seqs", "0"),
        ("--max-num-seqs", "-1"),
        ("--max-num-batched-tokens", "0"),
        ("--tensor-parallel-size", "0"),
        ("--pipeline-parallel-size", "-2"),
        ("--block-size", "7"),
        ("--kv-cache-dtype", "fp3"),
        ("--max-model-len", "999999999999"),
        ("--vllm",),
        ("--compilation-config", "{"),
        ("--cpu-offload-gb", "-4"),
        ("--dtype", "float7"),
        ("--want-context", "long"),
        ("--want-concurrency", "0"),
        ("--want-context", "8k", "--gpus", "0"),
        ("--policy", "brave"),
        ("--kv-cache-memory-bytes", "-1"),
        ("--pipeline-parallel-size", "999"),
    ],
    ids=" ".join,
)
def test_a_bad_value_is_refused(capsys, words):
    complaint(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", *words)


@pytest.mark.parametrize(
    "words",
    [
        ("--file", "no-such-file.yaml"),
        ("--command", "ls -l"),
        ("--command", "'"),
        ("--python", "LLM("),
        ("--python", "1 + 1"),
        ("--", "echo", "hello"),
        ("--command", "vllm serve x", "--file", "y"),
    ],
    ids=" ".join,
)
def test_a_source_that_says_nothing_is_refused(capsys, words):
    complaint(capsys, "plan", "--gpu", "h100", *words)


def test_a_picture_that_cannot_be_written_is_said_so(capsys, tmp_path):
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--svg", str(tmp_path / "no" / "x.svg")]) == 2
    assert "could not write" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_code_3(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    complaint(capsys, "plan", "nobody/has-this-model", "--gpu", "h100", code=3)


def test_an_unknown_architecture_is_said_to_be_unknown(capsys, tmp_path):
    assert (
        main(["plan", folder(tmp_path, architectures=["NobodyForCausalLM"], model_type="nobody"), "--gpu", "h100"]) == 0
    )
    out, _ = capsys.readouterr()
    assert "NobodyForCausalLM" in out
    assert "not know" in out


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("llama-3.1-8b", "--context", "x"),
        ("llama-3.1-8b", "--concurrency", "-1"),
        ("llama-3.1-8b", "--gpu", ","),
        ("llama-3.1-8b", "--gpu", "h101"),
        ("llama-3.1-8b", "--gpus", "0"),
        ("nothing-like-it", "--gpu", "l4"),
    ],
    ids=" ".join,
)
def test_size_refuses_the_same_way(capsys, words):
    complaint(capsys, "size", *words)


@pytest.mark.parametrize("option", ["--gpu-memory", "--max-model-len", "--want-context"])
def test_a_number_of_hundreds_of_digits_is_refused(capsys, option):
    complaint(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", option, "9" * 400)


def test_zeros_in_front_do_not_lift_an_options_limit(capsys):
    assert "from 1 to" in complaint(capsys, "size", "llama-3.1-8b", "--concurrency", "0" * 9 + "1" + "0" * 8)


@pytest.mark.parametrize("log", ["~nobody-of-this-name/vllm.log", "/" + "a" * 300])
def test_a_log_whose_path_no_machine_has_is_refused(capsys, log):
    complaint(capsys, "diagnose", log)


def test_a_digit_of_another_script_is_no_entrys_number(capsys):
    complaint(capsys, "explain", "LR²")
