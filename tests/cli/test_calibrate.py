"""`legroom calibrate` from the outside: learn, show, forget, and bad input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from legroom.cli.main import main
from legroom.units import GIB

LOG = """\
(APIServer pid=1) INFO [api_utils.py:1] non-default args: {{'model_tag': '{model}', 'model': '{model}', \
'max_model_len': 8192, 'max_num_seqs': 64}}
(EngineCore pid=2) INFO [core.py:1] Initializing a V1 LLM engine (v0.26.0) with config: model='{model}', \
dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, \
quantization=None, enforce_eager=False, kv_cache_dtype=auto
(EngineCore pid=2) INFO [model_runner.py:1] Model loading took 15.0 GiB and 2.1 seconds
(EngineCore pid=2) INFO [gpu_worker.py:1] Available KV cache memory: 56.0 GiB
(EngineCore pid=2) INFO [gpu_worker.py:1] Free memory on device (78.6/79.18 GiB) on startup. Desired GPU memory \
utilization is (0.92, 72.85 GiB). Actual usage is 15.0 GiB for weight, 1.25 GiB for peak activation, 0.3 GiB for \
non-torch memory, and 0.4 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `x`
INFO:     Application startup complete.
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text(LOG.format(model="meta-llama/Llama-3.1-8B-Instruct"))
    return path


def shown(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["calibrate", "--show", "--json"]) == 0
    observations = json.loads(capsys.readouterr().out)["observations"]
    assert isinstance(observations, list)
    return observations


def test_a_log_is_learnt_and_shown(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(log), "--gpu", "h100"]) == 0
    told = capsys.readouterr().out
    assert "activation peak" in told
    assert "1.25 GiB" in told
    (entry,) = shown(capsys)
    assert entry["release"] == "0.26.0"
    terms = entry["terms"]
    assert isinstance(terms, dict)
    assert terms["activation_bytes"] == round(1.25 * GIB)
    assert terms["non_torch_bytes"] == round(0.3 * GIB)


def test_a_later_plan_of_the_same_deployment_says_measured(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", str(log), "--gpu", "h100"])
    capsys.readouterr()
    words = ["plan", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100", "--vllm", "0.26.0", "--json"]
    main([*words, "--max-model-len", "8192", "--max-num-seqs", "64"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["layout"]["activation_bytes"] == round(1.25 * GIB)
    assert answer["confidence"]["activation_bytes"]["kind"] == "measured"


def test_learning_the_same_log_twice_keeps_one_entry(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", str(log), "--gpu", "h100"])
    main(["calibrate", str(log), "--gpu", "h100"])
    assert len(shown(capsys)) == 1


def test_a_log_from_a_pipe_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    content = b"what is no UTF-8: \xff\n" + LOG.format(model="meta-llama/Llama-3.1-8B-Instruct").encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))
    assert main(["calibrate", "-", "--gpu", "h100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["learnt"][0]["terms"]["activation_bytes"]["predicted_bytes"] > 0


def test_a_model_that_nobody_knows_still_teaches_non_torch_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG.format(model="/srv/models/private-thing"))
    assert main(["calibrate", str(path), "--gpu", "h100"]) == 0
    (entry,) = shown(capsys)
    assert entry["terms"] == {"non_torch_bytes": round(0.3 * GIB)}


def test_a_dry_run_remembers_nothing(log: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(log), "--gpu", "h100", "--dry-run"]) == 0
    assert shown(capsys) == []


def test_one_entry_is_forgotten_by_its_key(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", str(log), "--gpu", "h100"])
    (entry,) = shown(capsys)
    assert main(["calibrate", "--forget", str(entry["key"])]) == 0
    assert shown(capsys) == []


def test_everything_is_forgotten_with_all(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", str(log), "--gpu", "h100"])
    assert main(["calibrate", "--forget", "all"]) == 0
    assert shown(capsys) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrate"], "no log given"),
        (["calibrate", "/nowhere/vllm.log"], "cannot be read"),
        (["calibrate", "--forget"], "forget what?"),
        (["calibrate", "--forget", "abc"], "nothing has been learnt yet"),
    ],
)
def test_a_wrong_call_is_a_message_and_code_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_key_that_is_not_stored_is_a_message_and_forgets_nothing(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["calibrate", str(log), "--gpu", "h100"])
    assert main(["calibrate", "--forget", "abc"]) == 2
    assert len(shown(capsys)) == 1


def test_a_log_without_a_gpu_asks_for_one(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(log)]) == 2
    assert "--gpu" in capsys.readouterr().err


def test_a_file_that_is_no_log_is_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "novel.txt"
    path.write_bytes(b"\xff\xfe once upon a time\n" * 10)
    assert main(["calibrate", str(path), "--gpu", "h100"]) == 2
    assert "holds no vLLM start-up" in capsys.readouterr().err


def test_a_damaged_store_is_moved_aside_and_the_lesson_kept(
    log: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home.mkdir()
    (home / "calibration.json").write_text("{ half")
    assert main(["calibrate", str(log), "--gpu", "h100"]) == 0
    assert "moved to" in capsys.readouterr().err
    assert (home / "calibration.json.damaged-1").read_text() == "{ half"
    assert len(shown(capsys)) == 1


def test_the_total_that_the_log_printed_is_used_unless_one_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.log"
    path.write_text(LOG.format(model="meta-llama/Llama-3.1-8B-Instruct").replace("79.18 GiB", "79.10 GiB"))
    words = ["plan", "llama-3.1-8b", "--gpu", "h100", "--json"]
    main(["calibrate", str(path), "--gpu", "h100"])
    capsys.readouterr()
    main(words)
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpu"]["total_bytes"] == round(79.10 * GIB)
    assert any("your own start-ups" in note for note in answer["notes"])
    main([*words, "--gpu-memory", "79.15GiB"])
    assert json.loads(capsys.readouterr().out)["gpu"]["total_bytes"] == pytest.approx(79.15 * GIB, abs=1)


def test_receipts_are_shared_without_paths_and_change_the_plan_of_another_machine(
    log: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret-host.log"
    secret.write_text(LOG.format(model="/mnt/host7/meta-llama/Llama-3.1-8B-Instruct"))
    assert main(["calibrate", str(log), "--gpu", "h100"]) == 0
    assert main(["calibrate", str(secret), "--gpu", "a100-80gb"]) == 0
    assert main(["calibrate", "export", str(tmp_path / "receipts")]) == 0
    receipts = sorted((tmp_path / "receipts").glob("*.json"))
    texts = "".join(path.read_text() for path in receipts)
    assert receipts
    assert "secret-host" not in texts
    assert "/mnt" not in texts
    document = json.loads(next(text for path in receipts if "H100" in (text := path.read_text())))
    assert (document["receipt"], document["model"], document["release"]) == (
        1,
        "meta-llama/Llama-3.1-8B-Instruct",
        "0.26.0",
    )
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "other machine"))
    assert main(["calibrate", "import", str(tmp_path / "receipts")]) == 0
    capsys.readouterr()
    words = ["--gpu", "h100", "--vllm", "0.26.0", "--max-model-len", "8192", "--max-num-seqs", "64", "--json"]
    assert main(["plan", "meta-llama/Llama-3.1-8B-Instruct", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["confidence"]["activation_bytes"]["kind"] == "measured"
    assert plan["layout"]["activation_bytes"] == round(1.25 * GIB)


def test_own_measurements_win_over_receipts(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["calibrate", str(log), "--gpu", "h100"])
    main(["calibrate", "export", str(tmp_path / "r")])
    (file,) = (tmp_path / "r").glob("*.json")
    document = json.loads(file.read_text())
    file.write_text(json.dumps({**document, "terms": {"activation_bytes": 9 * GIB}}))
    assert main(["calibrate", "import", str(file)]) == 0
    (entry,) = shown(capsys)
    assert entry["terms"]["activation_bytes"] == round(1.25 * GIB)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "not JSON", '{"receipt": 9}', '{"receipt": 1, "terms": {"activation_bytes": -5}}']
)
def test_what_is_no_receipt_is_refused_by_name(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text(text)
    assert main(["calibrate", "import", str(tmp_path)]) == 2
    assert "bad.json is no receipt" in capsys.readouterr().err
