from __future__ import annotations

from pathlib import Path

import pytest

from legroom.errors import LegroomError
from legroom.simulation.fast.fast_replay import FastReplay
from legroom.simulation.scheduler_settings import SchedulerSettings
from legroom.simulation.trace_replay import StepByStepReplay
from legroom.simulation.traces import mooncake, synthetic
from legroom.simulation.traces.trace_files import read_trace


def _file(folder: Path, text: str) -> str:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_jsonl_with_steps_is_exact_and_sorted_by_arrival(tmp_path: Path) -> None:
    text = '{"id":"b","arrival_step":5,"prompt_len":3,"output_len":2}\n{"id":"a","prompt_len":4,"output_len":1}\n'
    trace = read_trace(_file(tmp_path, text)).checked()
    assert not trace.in_seconds
    assert [(row.id, row.arrival, row.prompt_len) for row in trace.rows()] == [("a", 0, 4), ("b", 5, 3)]


def test_jsonl_with_arrivals_is_in_seconds(tmp_path: Path) -> None:
    assert read_trace(_file(tmp_path, '{"arrival":0.5,"prompt_len":3,"output_len":2}')).in_seconds


def test_azure_counts_seconds_from_the_first_request(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.4799600,7,2"
    )
    trace = read_trace(_file(tmp_path, text))
    assert list(trace.prompt_lens) == [4808, 7]
    assert trace.arrivals[1] == pytest.approx(0.5)


def test_burstgpt_leaves_failed_requests_out(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,m,472,18,490,x\n45,m,9,0,9,x\n"
    trace = read_trace(_file(tmp_path, text))
    assert (list(trace.prompt_lens), list(trace.output_lens), list(trace.arrivals)) == ([472], [18], [0.0])


def test_sharegpt_takes_the_first_question_and_answer(tmp_path: Path) -> None:
    text = '[{"id":"x","conversations":[{"from":"human","value":"12345678"},{"from":"gpt","value":"1234"}]}]'
    trace = read_trace(_file(tmp_path, text))
    assert (list(trace.prompt_lens), list(trace.output_lens)) == ([2], [1])


def test_a_turn_without_text_counts_as_one_token(tmp_path: Path) -> None:
    trace = read_trace(_file(tmp_path, '[{"conversations":[{"from":"human","value":null},{"from":"gpt"}]}]'))
    assert (list(trace.prompt_lens), list(trace.output_lens)) == ([1], [1])


def test_a_vllm_log_tells_ids_lengths_and_limits(tmp_path: Path) -> None:
    text = (
        "INFO 07-12 10:11:12 [logger.py:43] Received request cmpl-1: prompt: 'hello', params: SamplingParams(n=1, "
        "max_tokens=64), prompt_token_ids: [1, 2, 3], lora_request: None.\n"
        "INFO 07-12 10:11:14 [loggers.py:1] Engine 000: Avg prompt throughput\n"
        "INFO 07-12 10:11:15 [logger.py:43] Received request cmpl-2: prompt: 'hello world!', params: "
        "SamplingParams(n=1, max_tokens=9), prompt_token_ids: None.\n"
    )
    trace = read_trace(_file(tmp_path, text))
    assert trace.ids == ["cmpl-1", "cmpl-2"]
    assert (list(trace.prompt_lens), list(trace.output_lens), list(trace.arrivals)) == ([3, 3], [64, 9], [0.0, 3.0])


def test_mooncake_requests_share_the_blocks_whose_hashes_they_share() -> None:
    chains = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 7], [8], [1, 2, 3, 9]]
    lines = [
        f'{{"timestamp": {i}, "input_length": {512 * len(c) + 5}, "output_length": 3, "hash_ids": {c}}}'
        for i, c in enumerate(chains)
    ]
    trace = mooncake.read(lines, "m")
    prompts = [row.prefix for row in trace.rows()]

    def token_names(prefix: tuple[tuple[str, int, int], ...]) -> list[tuple[str, int]]:
        return [(name, place) for name, start, end in prefix for place in range(start, end, 512)]

    for i, chain in enumerate(chains):
        for j, other in enumerate(chains):
            if i == j:
                continue
            shared = 0
            while shared < min(len(chain), len(other)) and chain[shared] == other[shared]:
                shared += 1
            ours, theirs = token_names(prompts[i])[:shared], token_names(prompts[j])[:shared]
            assert ours == theirs, (chain, other)
            assert len(ours) == shared


def test_shared_prefixes_of_prefixes_hit_alike_in_both_engines() -> None:
    chains = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 7], [8], [1, 2, 3, 9]] * 3
    lines = [
        f'{{"timestamp": 0, "input_length": {512 * len(c) + 5}, "output_length": 40, "hash_ids": {c}}}' for c in chains
    ]
    trace = mooncake.read(lines, "m")
    trace.in_seconds = False
    settings = SchedulerSettings(300, max_num_seqs=4, max_num_batched_tokens=512)
    fast, slow = FastReplay(trace, settings).run(), StepByStepReplay(trace, settings).run()
    assert fast.tally == slow.tally
    assert fast.tally.cached_tokens > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no requests"),
        ("\n\n", "holds no requests"),
        ('{"prompt_len": 3}', "line 1: no output_len"),
        ('{"prompt_len": -3, "output_len": 2}', "prompt_len -3"),
        ('{"prompt_len": 3, "output_len": 0}', "output_len 0"),
        ('{"prompt_len": 3, "output_len": 1.5}', "1.5 is not a whole number"),
        ('{"prompt_len": 3, "output_len": 2, "arrival": -1}', "arrival -1"),
        ('{"prompt_len": 3, "output_len": 2, "arrival": NaN}', "arrival nan"),
        ('{"prompt_len": 3, "output_len": 2, "id": "x"}\n{"prompt_len": 3, "output_len": 2, "id": "x"}', "twice"),
        (
            '{"prompt_len": 3, "output_len": 2, "arrival": 1}\n{"prompt_len": 1, "output_len": 2, "arrival_step": 1}',
            "mixes",
        ),
        ('{"input_length": 1e30, "output_length": 2, "timestamp": 0}', "a number is too large"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1e30,2", "a number is too large"),
        ('{"prompt_len": 3, "output_len"', "not a JSON object"),
        ("what is this", "none of the known traces"),
    ],
)
def test_a_bad_trace_is_told_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(LegroomError, match=says):
        read_trace(_file(tmp_path, text)).checked()


def test_a_mix_is_the_same_for_the_same_seed() -> None:
    mix = "bursts rate=4 burst=5 prompt=lognormal(100,0.5) output=uniform(1,9) requests=50 long=0.1,5000 prefix=3,40"
    first, other, third = synthetic.read(mix, 1), synthetic.read(mix, 1), synthetic.read(mix, 2)
    assert list(first.prompt_lens) == list(other.prompt_lens) != list(third.prompt_lens)
    assert 5000 in list(first.prompt_lens)
    assert len(first.prefix_names) == 3


def test_a_wide_distribution_draws_lengths_that_a_request_can_have() -> None:
    assert max(synthetic.read("poisson prompt=lognormal(500,1000) requests=50").prompt_lens) == 10_000_000


@pytest.mark.parametrize(
    "mix", ["", "weekly rate=2", "poisson rate=0", "poisson prompt=often(3)", "poisson x=1", "bursts burst=0"]
)
def test_a_bad_mix_is_told_in_a_sentence(mix: str) -> None:
    with pytest.raises(LegroomError):
        synthetic.read(mix)


@pytest.mark.parametrize("arrival", ["NaN", "Infinity", "1e400", "-1"])
def test_an_arrival_that_is_no_time_is_refused_wherever_it_stands(arrival: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"arrival": 0, "prompt_len": 5, "output_len": 3}\n'
    path.write_text(good + good.replace("0,", f"{arrival},", 1) + good, encoding="utf-8")
    with pytest.raises(LegroomError, match="request 2"):
        read_trace(str(path)).checked()


def test_a_missing_length_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_step": 0, "output_len": 3}\n', encoding="utf-8")
    with pytest.raises(LegroomError, match="line 1: no prompt_len"):
        read_trace(str(path))


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as out:
        out.write('{"arrival_step": 0, "prompt_len": 5')
        out.truncate(5_000_000_000)
    with pytest.raises(LegroomError, match="longer than"):
        read_trace(str(path))


def test_a_file_of_too_many_lines_is_refused_at_once_and_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with path.open("w", encoding="utf-8") as out:
        out.write('{"arrival_step": 0, "prompt_len": 5, "output_len": 3}\n' * 500)
        out.truncate(5_000_000_000)
    with pytest.raises(LegroomError, match=r"million lines \(4.7 GiB\)"):
        read_trace(str(path))
    assert len(read_trace(str(path), limit=400)) == 400


def test_one_large_document_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    with path.open("w", encoding="utf-8") as out:
        out.write('[{"conversations": []},')
        out.truncate(5_000_000_000)
    with pytest.raises(LegroomError, match="one JSON document of"):
        read_trace(str(path))
