"""What was measured is used again only where nothing it depends on has changed, and is never lost."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import LegroomError
from legroom.facts.gpus import Gpu, gpu, with_total
from legroom.facts.model import Attention, Dense, Layer, Model
from legroom.facts.releases import release
from legroom.figures import estimated, exact
from legroom.files import store_path
from legroom.json_records import is_number
from legroom.planning import calibration_store as store
from legroom.planning.calibration import observe
from legroom.planning.calibration_store import (
    TERM_SETTINGS,
    Observation,
    from_json,
    measurements_for,
    model_fingerprint,
    observed_total_bytes,
    same_model,
    to_json,
    with_observation,
)
from legroom.units import GIB
from legroom.vllm_logs.startup_log import Startup

H100 = gpu("NVIDIA H100 80GB HBM3")
SETTINGS = {
    name: 1 if "parallel" in name else None for name in sorted({n for names in TERM_SETTINGS.values() for n in names})
}


def settings(**changed: Any) -> Any:
    values = {**SETTINGS, "release": "0.26.0", **changed}
    return SimpleNamespace(given=SimpleNamespace(), **values)


def model(name: str = "org/some-7b", layers: int = 2) -> Model:
    block = Layer(Attention(8, 8, 64, 64), Dense(512, 1024))
    return Model(name, "LlamaForCausalLM", "llama", "bfloat16", 512, 32000, 4096, (block,) * layers)


def target(asked: Model | None = None, card: Gpu = H100, version: str = "0.26.0") -> Any:
    return SimpleNamespace(model=asked or model(), gpu=card, release=release(version))


def seen(**changed: Any) -> Observation:
    base = Observation(
        H100.name,
        None,
        "org/some-7b",
        "0.26.0",
        SETTINGS,
        {"weights_bytes": 7 * GIB, "activation_bytes": 2 * GIB, "non_torch_bytes": GIB},
        "vllm.log",
        shape=model_fingerprint(model()),
    )
    return replace(base, **changed)


def test_the_same_deployment_gets_every_term_back() -> None:
    found = measurements_for([seen()], target(), settings())
    assert found is not None
    assert (found.weights_bytes, found.activation_bytes, found.non_torch_bytes) == (7 * GIB, 2 * GIB, GIB)
    assert found.source == "vllm.log"


def test_non_torch_memory_carries_over_to_another_model_and_the_rest_does_not() -> None:
    found = measurements_for([seen()], target(model("org/other-3b", layers=3)), settings())
    assert found is not None
    assert found.non_torch_bytes == GIB
    assert found.weights_bytes is None
    assert found.activation_bytes is None


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs", "enforce_eager", "runner"])
def test_an_activation_peak_is_not_used_where_a_setting_it_depends_on_differs(name: str) -> None:
    found = measurements_for([seen()], target(), settings(**{name: "other"}))
    assert found is not None
    assert found.activation_bytes is None
    assert found.weights_bytes == 7 * GIB


def test_nothing_applies_under_another_parallel_size() -> None:
    assert measurements_for([seen()], target(), settings(tensor_parallel_size=2)) is None


def test_nothing_applies_under_another_release() -> None:
    assert measurements_for([seen()], target(version="0.25.0"), settings()) is None


def test_nothing_applies_to_another_card() -> None:
    assert measurements_for([seen()], target(card=gpu("NVIDIA H200")), settings()) is None


def test_a_card_of_the_same_name_and_another_size_is_another_card() -> None:
    smaller = with_total(H100, 40 * GIB)
    assert measurements_for([seen(gpu_total_bytes=H100.total_bytes)], target(card=smaller), settings()) is None


def test_the_newest_of_two_observations_counts() -> None:
    newer = seen(terms={"weights_bytes": 8 * GIB}, source="later.log")
    found = measurements_for(with_observation([seen()], newer), target(), settings())
    assert found is not None
    assert found.weights_bytes == 8 * GIB
    assert found.activation_bytes == 2 * GIB, "a term that only the older log printed is kept"


def test_a_folder_and_a_fine_tune_of_one_checkpoint_are_one_model() -> None:
    assert same_model(seen(model="/models/v7"), model("else/some-7b-chat"))
    assert not same_model(seen(model="/models/v7"), model("/models/v7", layers=3))


def test_a_hub_id_is_the_same_model_even_if_legroom_reads_it_otherwise_now() -> None:
    assert same_model(seen(shape="read-by-an-older-legroom"), model("Org/Some-7B"))


def test_a_total_is_reported_only_where_it_differs_from_the_facts() -> None:
    other = round(H100.total_bytes * 0.995)
    assert observed_total_bytes([seen(gpu_total_bytes=other)], H100) == other
    assert observed_total_bytes([seen(gpu_total_bytes=H100.total_bytes + 1000)], H100) is None
    assert observed_total_bytes([], H100) is None


def test_without_a_known_model_only_what_any_model_shares_is_kept() -> None:
    startup = Startup(vllm="0.26.0", weights_bytes=GIB, non_torch_bytes=GIB // 4)
    observation = observe(startup, H100, None, "nobody/knows")
    assert dict(observation.terms) == {"non_torch_bytes": GIB // 4}
    found = measurements_for([observation], target(), settings())
    assert found is not None
    assert found.non_torch_bytes == GIB // 4


def planned(weights: int = 7 * GIB, activation: int = GIB, pp: int = 1) -> Any:
    layout = SimpleNamespace(weights=exact(weights), activation=estimated(activation, 0, 2 * GIB))
    return SimpleNamespace(layout=layout, settings=settings(pipeline_parallel_size=pp), target=target())


def test_weights_that_agree_with_the_exact_figure_are_not_worth_keeping() -> None:
    startup = Startup(vllm="0.26.0", weights_bytes=7 * GIB + GIB // 300, activation_bytes=GIB)
    assert dict(observe(startup, H100, planned(), "org/some-7b").terms) == {"activation_bytes": GIB}


def test_a_log_without_weights_is_kept_where_the_model_has_hardly_any() -> None:
    startup = Startup(vllm="0.26.0", activation_bytes=GIB)
    assert dict(observe(startup, H100, planned(weights=4 << 20), "org/tiny").terms) == {"activation_bytes": GIB}


def test_weights_that_differ_from_the_exact_figure_are_kept() -> None:
    startup = Startup(vllm="0.26.0", weights_bytes=8 * GIB)
    assert dict(observe(startup, H100, planned(), "org/some-7b").terms) == {"weights_bytes": 8 * GIB}


def test_the_larger_peak_of_a_first_start_is_not_kept() -> None:
    startup = Startup(vllm="0.26.0", activation_bytes=2 * GIB, compiled=True)
    assert observe(startup, H100, planned(), "org/some-7b").terms == {}
    assert observe(replace(startup, compiled=False), H100, planned(), "org/some-7b").terms


def test_of_pipeline_stages_only_what_they_share_is_kept() -> None:
    startup = Startup(vllm="0.26.0", activation_bytes=GIB, non_torch_bytes=GIB)
    assert dict(observe(startup, H100, planned(pp=2), "org/some-7b").terms) == {"non_torch_bytes": GIB}


def test_a_log_without_a_gpu_name_asks_for_one() -> None:
    with pytest.raises(LegroomError, match="does not name its GPU"):
        observe(Startup(vllm="0.26.0"), None, None, "org/some-7b")


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "calibration.json"
    store.write_store((seen(),), path)
    assert store.read_store(path).observations == (seen(),)


@given(st.dictionaries(st.sampled_from(sorted(TERM_SETTINGS)), st.integers(0, 2**45), min_size=1))
def test_any_observation_survives_json(terms: dict[str, int]) -> None:
    observation = seen(terms=terms)
    again = from_json(json.loads(json.dumps(to_json(observation))))
    assert again == observation
    assert again.key == observation.key


def test_a_missing_store_is_empty_and_no_problem(tmp_path: Path) -> None:
    assert store.read_store(tmp_path / "calibration.json") == store.StoredCalibration()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}', '{"schema": 1, "observations": [3]}', "\x00"])
def test_a_damaged_store_is_told_and_left_alone_by_a_reader(tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    assert "damaged" in store.read_store(path).problem
    assert path.read_text() == content


def test_a_damaged_store_is_moved_aside_by_a_writer_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text("{ half")
    (tmp_path / "calibration.json.damaged-1").write_text("older")
    observations, note = store.open_for_change(path)
    assert observations == ()
    assert "moved to" in note
    assert (tmp_path / "calibration.json.damaged-2").read_text() == "{ half"
    assert (tmp_path / "calibration.json.damaged-1").read_text() == "older"


def test_a_store_of_a_newer_legroom_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text('{"schema": 99, "observations": []}')
    with pytest.raises(LegroomError, match="newer legroom"):
        store.open_for_change(path)
    assert path.exists()


def test_a_folder_that_cannot_be_written_is_a_clear_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LegroomError, match="cannot be written"):
        store.write_store((), tmp_path / "file" / "calibration.json")


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"

    def learn(number: int) -> None:
        with store.locked(path):
            observations, _ = store.open_for_change(path)
            store.write_store(with_observation(observations, seen(model=f"org/model-{number}")), path)

    writers = [threading.Thread(target=learn, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(store.read_store(path).observations) == 8


def test_the_store_follows_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("LEGROOM_HOME", raising=False)
    assert store_path() == tmp_path / "data" / "legroom" / "calibration.json"
    monkeypatch.setenv("LEGROOM_HOME", str(tmp_path / "home"))
    assert store_path() == tmp_path / "home" / "calibration.json"


def test_a_number_that_no_float_holds_is_none():
    assert not is_number(10**400)
