"""A second tier of KV cache: every decision of vLLM's own offloading connector, replayed, and what is said of it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tier_oracle import first_difference, replay

from legroom.cli.main import main
from legroom.cli.simulate_tier import tier_settings
from legroom.errors import LegroomError
from legroom.simulation.scheduler_settings import LayerGroup, SchedulerSettings
from legroom.simulation.step_time import fixed_cost
from legroom.simulation.tiers.host_tier import ArcPolicy, LruPolicy, TierSettings
from legroom.simulation.tiers.tier_report import CurvePoint, chunks_for_hit_share, hit_curve
from legroom.simulation.tiers.tiered_replay import TieredTimeline, simulate_with_tier
from legroom.simulation.trace import Trace
from legroom.simulation.traces import jsonl
from legroom.units import GIB

_RECORDINGS = Path(__file__).parent / "recordings" / "vllm-0.32.0-tier.jsonl.gz"


_LINES = gzip.decompress(_RECORDINGS.read_bytes()).splitlines()
"""One recording a line; only a test that reads one parses it, not every process that collects the tests."""


@pytest.mark.parametrize("number", range(len(_LINES)))
def test_every_store_load_and_eviction_is_the_one_that_vllm_decided(number: int) -> None:
    recording = json.loads(_LINES[number])
    assert first_difference(replay(recording), recording["steps"]) == ""


def test_the_recordings_have_every_kind_of_decision_in_them() -> None:
    recordings = [json.loads(line) for line in _LINES]
    transfers = [step[2] for recording in recordings for step in recording["steps"]]
    assert all(sum(bool(transfer[kind]) for transfer in transfers) > 10 for kind in range(4))
    assert {recording["tier"]["policy"] for recording in recordings} == {"lru", "arc"}


def _twice(between: int = 40) -> list[dict[str, Any]]:
    """One prompt, others that push it out of the GPU, and the same prompt again."""
    others = [{"id": f"o{i}", "arrival_step": 4 + i, "prompt_len": 150, "output_len": 2} for i in range(between)]
    same = {"prompt_len": 129, "output_len": 2, "prefix_id": "p", "prefix_len": 129}
    return [{"id": "a", "arrival_step": 0, **same}, *others, {"id": "b", "arrival_step": 400, **same}]


def _trace(rows: list[dict[str, Any]]) -> Trace:
    return jsonl.read((json.dumps(row) for row in rows), "made up").checked()


def _replayed(rows: list[dict[str, Any]], num_chunks: int = 10_000, **options: Any) -> TieredTimeline:
    settings = SchedulerSettings(num_blocks=24, max_num_seqs=2, max_model_len=256, max_num_batched_tokens=256)
    cost = fixed_cost(1.0) if "load_s_per_block" in options else None
    return simulate_with_tier(_trace(rows), settings, TierSettings(num_chunks, **options), cost=cost)


def test_what_the_gpu_has_forgotten_is_loaded_from_the_tier() -> None:
    outcome = _replayed(_twice())
    assert outcome.timeline.tally.cached_tokens == 0
    assert outcome.tally.hit_tokens == 128


def test_a_tier_that_is_too_small_evicts_and_gives_no_hit() -> None:
    outcome = _replayed(_twice(), num_chunks=20)
    assert outcome.tally.hit_tokens == 0
    assert outcome.tally.evicted_chunks > 0


def test_generated_tokens_are_stored_only_when_asked_for() -> None:
    rows = [{"id": "a", "arrival_step": 0, "prompt_len": 16, "output_len": 64}]
    assert _replayed(rows).tally.stored_blocks == 1
    assert _replayed(rows, prompt_only=False).tally.stored_blocks == 4


def test_a_chunk_below_the_threshold_of_offers_is_not_stored() -> None:
    rows = [{"id": "a", "arrival_step": 0, "prompt_len": 64, "output_len": 2}]
    assert _replayed(rows, store_threshold=2).tally.stored_blocks == 0


def test_a_slow_copy_delays_the_request_that_waits_for_it() -> None:
    fast = _replayed(_twice(), load_s_per_block=0.0)
    slow = _replayed(_twice(), load_s_per_block=5.0)
    assert slow.timeline.finish_steps[-1] > fast.timeline.finish_steps[-1]
    assert slow.load_busy_s == 40.0


def test_a_request_that_can_never_run_ends_the_replay_of_either_scheduler() -> None:
    rows = [{"id": "a", "arrival_step": 0, "prompt_len": 300, "output_len": 2}]
    for is_async in (False, True):
        settings = SchedulerSettings(num_blocks=24, max_model_len=512, watermark=0.9, async_scheduling=is_async)
        outcome = simulate_with_tier(_trace([*rows, {**rows[0], "id": "b"}]), settings, TierSettings(10))
        assert outcome.timeline.tally.finished + len(outcome.timeline.rejections) == 2


def test_least_recently_used_chunks_leave_first_and_pinned_ones_stay() -> None:
    policy = LruPolicy(4)
    for key in (1, 2, 3, 4):
        policy.insert(key)
    policy.use([1], (), [1])
    assert policy.evict(2, lambda key: key != 2) == [3, 4]
    assert policy.evict(3, lambda key: True) is None


def test_arc_keeps_what_was_used_again() -> None:
    policy = ArcPolicy(4)
    for key in (1, 2, 3):
        policy.insert(key)
    policy.use([1], (), [1])
    assert policy.evict(2, lambda key: True) == [2, 3]


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_speculative_tokens": 2}, "speculative tokens"),
        ({"groups": (LayerGroup(), LayerGroup(64))}, "groups of layers"),
    ],
)
def test_what_is_not_simulated_together_with_a_tier_is_refused(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(LegroomError, match=what):
        simulate_with_tier(_trace(_twice()), SchedulerSettings(num_blocks=64, **settings), TierSettings(10))


def test_a_tier_is_read_as_it_is_written() -> None:
    tier = tier_settings("cpu=2GiB@50GB/s,policy=arc,blocks_per_chunk=4", 1 << 20)
    assert tier.num_chunks == 2 * GIB // (4 << 20)
    assert tier.load_s_per_block == (1 << 20) / 50e9
    assert (tier.policy, tier.blocks_per_chunk) == ("arc", 4)


def test_a_chunk_is_rounded_up_to_whole_pages() -> None:
    assert tier_settings("cpu=1GiB", 5000).num_chunks == GIB // 8192


@pytest.mark.parametrize(
    "text",
    [
        *("200GiB", "disk=1TiB", "cpu=much", "cpu=1GiB,colour=red", "cpu=1KiB", "cpu=1GiB,policy=x"),
        *("cpu=1GiB,disk=fast", "cpu=40blocks,blocks_per_chunk=0"),
    ],
)
def test_a_tier_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(LegroomError):
        tier_settings(text, 1 << 20)


def test_bytes_without_a_model_are_refused_and_blocks_are_not() -> None:
    with pytest.raises(LegroomError, match="depends on the model"):
        tier_settings("cpu=1GiB", 0)
    assert tier_settings("cpu=400blocks", 0).num_chunks == 400


def test_the_size_for_most_of_the_hits_lies_between_two_replays() -> None:
    curve = (CurvePoint(10, 0.1), CurvePoint(20, 0.3), CurvePoint(40, 0.4))
    assert chunks_for_hit_share(curve, 0.5) == 15
    assert chunks_for_hit_share((CurvePoint(10, 0.0),), 0.95) is None


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _twice()), encoding="utf-8")
    return str(path)


_POOL = ["--blocks", "24", "--max-num-seqs", "2", "--max-model-len", "256", "--max-num-batched-tokens", "256"]


def test_json_has_the_tier_beside_the_documented_keys(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", trace_file, *_POOL, "--tier", "cpu=9000blocks", "--tier-curve", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["finished"] == 42
    assert document["tier"]["hit_tokens"] == 128
    assert [point["hit_ratio"] for point in document["tier"]["curve"]] == sorted(
        point["hit_ratio"] for point in document["tier"]["curve"]
    )


def test_a_trace_without_times_says_that_copies_take_none(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "qwen3-8b", "--gpu", "l4", "--max-model-len", "4096", "--tier", "cpu=4GiB@25GB/s"]
    assert main(["simulate", trace_file, *flags]) == 0
    shown = capsys.readouterr()
    assert "counts steps, not seconds" in shown.err
    assert "computing again" not in shown.out


def test_loading_is_compared_with_computing_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"arrival": row.pop("arrival_step") / 10, **row} for row in _twice()]
    path = tmp_path / "seconds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    deployment = ["--model", "qwen3-8b", "--gpu", "l4", "--max-model-len", "4096", "--blocks", "257"]
    for rate, is_slower in (("100GB", False), ("10MB", True)):
        assert main(["simulate", str(path), *deployment, "--tier", f"cpu=4GiB@{rate}/s", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tier"]["slower_than_recomputing"] is is_slower


@pytest.mark.parametrize(("release", "allocated"), [("0.32.0", 3 * GIB), ("0.20.0", 4 * GIB)])
def test_host_memory_is_what_the_release_allocates(
    trace_file: str, capsys: pytest.CaptureFixture[str], release: str, allocated: int
) -> None:
    """One shared region since 0.27, to the byte; before, pinned tensors, which come in powers of two."""
    flags = ["--model", "qwen3-8b", "--gpu", "l4", "--max-model-len", "4096", "--vllm", release, "--json"]
    assert main(["simulate", trace_file, *flags, "--tier", "cpu=3GiB"]) == 0
    assert json.loads(capsys.readouterr().out)["tier"]["host_bytes"] == allocated


def test_a_curve_says_how_much_room_most_of_the_hits_need(trace_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", trace_file, *_POOL, "--tier", "cpu=9000blocks", "--tier-curve", "--json"]) == 0
    tier = json.loads(capsys.readouterr().out)["tier"]
    most = tier["most_hits"]
    assert most["share_of_hits"] == 0.95
    assert 0 < most["chunks"] <= tier["curve"][-1]["chunks"]


def test_a_curve_is_the_same_from_a_tier_that_evicts_and_from_one_that_does_not() -> None:
    trace, settings = _trace(_twice()), SchedulerSettings(num_blocks=24, max_model_len=256, max_num_seqs=2)
    curves = [
        hit_curve(trace, settings, simulate_with_tier(trace, settings, TierSettings(chunks)), None)
        for chunks in (10, 9000)
    ]
    assert curves[0] == curves[1]


def test_files_have_a_rate_and_no_size() -> None:
    assert tier_settings("cpu=2GiB@50GB/s,disk=5GB/s,blocks_per_chunk=4", 1 << 20).disk_s_per_chunk == (4 << 20) / 5e9
    with pytest.raises(LegroomError, match="have no size"):
        tier_settings("disk=1TiB", 1 << 20)


def test_a_threshold_together_with_files_is_refused_as_vllm_does() -> None:
    with pytest.raises(LegroomError, match="store_threshold"):
        tier_settings("cpu=400blocks,disk=yes,store_threshold=2", 0)


def test_what_left_the_host_is_read_back_from_files() -> None:
    trace, settings = _trace(_twice()), SchedulerSettings(num_blocks=24, max_model_len=256, max_num_seqs=2)
    alone = simulate_with_tier(trace, settings, TierSettings(20))
    backed = simulate_with_tier(trace, settings, TierSettings(20, disk_s_per_chunk=0.0))
    assert backed.files is not None
    assert backed.files.loaded_chunks > 0
    assert backed.tally.hit_tokens > alone.tally.hit_tokens
    assert backed.timeline.tally.finished == len(trace)


def test_a_prompt_whose_chunks_evict_each_other_is_given_up_on() -> None:
    rows = [
        {"id": name, "arrival_step": at, "prompt_len": 224, "output_len": 2, "prefix_id": "p", "prefix_len": 224}
        for name, at in (("a", 0), ("c", 400))
    ]
    rows.insert(1, {"id": "b", "arrival_step": 200, "prompt_len": 240, "output_len": 2})
    settings = SchedulerSettings(num_blocks=24, max_model_len=256, max_num_seqs=1, max_num_batched_tokens=32)
    outcome = simulate_with_tier(_trace(rows), settings, TierSettings(5, disk_s_per_chunk=0.0))
    assert [rejection.id for rejection in outcome.timeline.rejections] == ["c"]


def test_an_offloading_flag_without_a_tier_is_not_ignored_in_silence(
    trace_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "qwen3-8b", "--gpu", "l4", "--max-model-len", "4096", "--kv-offloading-size", "10"]
    assert main(["simulate", trace_file, *flags]) == 0
    assert "--kv-offloading-size is not replayed" in capsys.readouterr().err
