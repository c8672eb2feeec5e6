"""The black box inside a worker: stand-ins for torch and vLLM, real frames, real files, a real full disk."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from types import SimpleNamespace

import pytest
from worker_stand_in import CACHED, CACHED_BEFORE_0_10, GIB, MIB, ModelRunner, fail_in_a_step, segment, step, written

from legroom import black_box
from legroom.black_box import SegmentBlock, read_record
from legroom.worker import recorder, telemetry
from legroom.worker.recorder import BlackBoxRecorder
from legroom.worker.telemetry import TelemetryFolder
from legroom.worker.worker_memory import WorkerMemory


@pytest.mark.parametrize("cached", [CACHED, CACHED_BEFORE_0_10])
def test_a_refused_request_leaves_what_was_asked_where_and_in_which_step(worker, cached):
    fail_in_a_step(BlackBoxRecorder(), cached)
    (record,) = written(worker)
    assert (record.trigger, record.request.wanted_bytes) == ("out_of_memory", 2 * GIB)
    assert record.request.frames[-2].function == "execute_model"
    assert any(frame.file == "vllm/a.py" for frame in record.request.frames)
    assert (record.step.requests, record.step.tokens, record.step.new_requests) == (2, 2001, 1)
    largest = record.step.largest[0]
    assert (largest.id, largest.scheduled_tokens, largest.prompt_tokens, largest.prompt_logprobs) == (
        "new",
        2000,
        2000,
        5,
    )
    assert record.step.largest[1].computed_tokens == 55
    assert record.step.prompt_logprobs == 1


class SecondModelRunner:
    """As vLLM's runner V2: requests are indices into arrays, and sampling knows of a batch alone."""

    def __init__(self, counts):
        lengths = [0, 50, 9000]
        self.req_states = SimpleNamespace(req_id_to_index={"old": 1, "long": 2}, prompt_len=lengths)
        self.prompt_logprobs_worker = SimpleNamespace(uses_prompt_logprobs=[False, False, True])
        if counts:  # 0.20 on
            self.req_states.prompt_len = SimpleNamespace(np=lengths)
            self.prompt_logprobs_worker.num_prompt_logprobs = [0, 0, 3]

    def sample_tokens(self, fail):
        input_batch = SimpleNamespace(req_ids=["old", "long"], num_scheduled_tokens=[1, 2048])
        fail(input_batch)


@pytest.mark.parametrize("asked", [1, 3], ids=["0.16", "0.20 on"])
def test_the_step_of_runner_v2_is_told_while_it_samples(worker, asked):
    box = BlackBoxRecorder()
    SecondModelRunner(asked == 3).sample_tokens(lambda _: box.out_of_memory(0, 2 * GIB, 80 * GIB, GIB // 2))
    (record,) = written(worker)
    assert (record.step.requests, record.step.tokens, record.step.prompt_logprobs) == (2, 2049, 1)
    largest = record.step.largest[0]
    assert (largest.id, largest.prompt_tokens, largest.prompt_logprobs) == ("long", 9000, asked)


def test_the_batch_is_believed_where_the_engine_is_a_step_ahead(worker):
    box, runner = BlackBoxRecorder(), SecondModelRunner(True)

    def engine_step(scheduler_output):
        runner.sample_tokens(lambda _: box.out_of_memory(0, 2 * GIB, 80 * GIB, GIB // 2))
        return scheduler_output

    engine_step(step(ModelRunner()))
    assert written(worker)[0].step.tokens == 2049


def test_the_allocators_pieces_and_the_drivers_view_are_in_the_record(worker):
    fail_in_a_step(BlackBoxRecorder())
    (record,) = written(worker)
    torch, card = record.allocator, record.card
    assert (torch.allocated_bytes, torch.reserved_bytes, torch.largest_free_bytes) == (4 * GIB, 7 * GIB, GIB)
    assert (torch.graph_pool_bytes, torch.private_free_bytes, torch.alloc_retries) == (GIB, 3 * GIB // 4, 3)
    assert [segment.pool for segment in torch.segments] == ["", "", "graph"]
    assert torch.segments[1].blocks[1] == SegmentBlock(GIB // 2, "pending")
    assert (card.name, card.total_bytes, card.free_bytes) == ("NVIDIA H200", 80 * GIB, GIB // 2)
    assert (card.own_bytes, record.non_torch_bytes) == (8 * GIB, GIB)
    assert card.others_bytes == 80 * GIB - GIB // 2 - 8 * GIB


def test_the_settings_that_decide_memory_are_in_the_record_and_no_prompt_is(worker):
    box = BlackBoxRecorder()
    source = "def step(self, fail):\n fail()"
    names: dict[str, object] = {}
    exec(compile(source, "/x/site-packages/vllm/v1/worker/gpu_worker.py", "exec"), names)
    names["step"](ModelRunner(), lambda: fail_in_a_step(box))
    (record,) = written(worker)
    assert record.settings == {
        "model": "org/model",
        "max_model_len": 4096,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.9,
        "block_size": 16,
        "num_gpu_blocks": 1000,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "tensor_parallel_size": 2,
    }
    text = next(worker.records.glob("*.json")).read_text()
    assert "7,7,7" not in text.replace(" ", "") and "prompt_token_ids" not in text


def test_the_last_readings_are_kept_and_those_before_thinned(worker, monkeypatch):
    box, now = BlackBoxRecorder(), [1000.0]
    monkeypatch.setattr(recorder.time, "time", lambda: now[0])
    for number in range(200):
        now[0] += 5
        box.add_reading((WorkerMemory(0, "0", allocated_bytes=number),))
    box.record_now()
    (record,) = written(worker)
    times = [reading.time_s for reading in record.history]
    assert times == sorted(times) and len(times) == 60 + 12
    assert record.history[-1].allocated_bytes == 199


def test_the_text_of_the_error_joins_the_record_of_its_failure(worker):
    box = BlackBoxRecorder()
    fail_in_a_step(box)
    box.exception(OutOfMemoryError("CUDA out of memory. api_key=verysecret"))
    (record,) = written(worker)
    assert record.request.error == "OutOfMemoryError"
    assert record.request.message.startswith("CUDA out of memory") and "verysecret" not in record.request.message
    assert record.request.wanted_bytes == 2 * GIB


def test_a_failure_soon_after_a_record_that_was_asked_for_has_one_of_its_own(worker):
    box = BlackBoxRecorder()
    box.record_now()
    box.exception(MemoryError("tried to allocate 77 bytes"))
    asked, failed = written(worker)
    assert (asked.trigger, failed.trigger, failed.request.wanted_bytes) == ("asked", "out_of_memory", 77)


def test_a_process_that_is_no_worker_leaves_its_workers_errors_to_them(worker, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", SimpleNamespace(_WORLD=None))
    BlackBoxRecorder().exception(MemoryError("Worker failed with error: out of memory"))
    assert written(worker) == []


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's."""


def test_an_error_that_vllm_logs_makes_a_record_where_the_allocator_said_nothing(worker, caplog):
    logger = logging.getLogger("vllm")
    telemetry.observe_log(BlackBoxRecorder())
    try:
        try:
            raise RuntimeError("CUDA error: out of memory")
        except RuntimeError:
            logging.getLogger("vllm.v1.engine.core").exception("EngineCore encountered a fatal error.")
    finally:
        logger.handlers = [handler for handler in logger.handlers if not isinstance(handler, telemetry._ErrorLog)]
    (record,) = written(worker)
    assert record.request.message == "CUDA error: out of memory"
    assert (
        record.request.frames[-1].function
        == "test_an_error_that_vllm_logs_makes_a_record_where_the_allocator_said_nothing"
    )


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (OutOfMemoryError("any"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes."), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("the prompt says: out of memory"), False),
    ],
)
def test_errors_about_memory_are_told_from_others(error, is_memory):
    assert telemetry.is_out_of_memory(error) is is_memory


def test_the_observer_is_attached_when_cuda_comes_up(monkeypatch):
    queued, attached = [], []
    torch = SimpleNamespace(
        _C=SimpleNamespace(_cuda_attach_out_of_memory_observer=attached.append),
        cuda=SimpleNamespace(_lazy_call=queued.append),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    box = BlackBoxRecorder()
    telemetry.observe_allocator(box)
    assert attached == []
    queued[0]()
    assert attached == [box.out_of_memory]


def test_nothing_of_a_failure_inside_reaches_vllm(worker, monkeypatch, caplog):
    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder.stack, "stack_frames", broken)
    box = BlackBoxRecorder()
    box.out_of_memory(0, 1, 1, 1)
    box.exception(OutOfMemoryError("x"))
    box.record_now()
    assert written(worker) == []
    assert "no black box" in caplog.text


def test_a_part_that_cannot_be_read_leaves_the_others(worker):
    worker.cuda.memory_snapshot = None
    worker.cuda.memory_stats = lambda device: (_ for _ in ()).throw(RuntimeError("broken"))
    fail_in_a_step(BlackBoxRecorder())
    (record,) = written(worker)
    assert record.allocator is None and record.step is not None


def test_where_one_folder_cannot_be_written_the_next_takes_it(worker, tmp_path, caplog):
    worker.records.write_text("a file where the folder should be")
    fail_in_a_step(BlackBoxRecorder())
    (path,) = (tmp_path / "home" / "black-boxes").glob("*.json")
    assert read_record(path).request.wanted_bytes == 2 * GIB
    assert f"legroom black box written to {path}" in caplog.text


def test_a_full_disk_puts_a_short_record_into_the_log(worker, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "_record_folders", lambda: iter([worker.records]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        fail_in_a_step(BlackBoxRecorder())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(worker.records.iterdir()) == []
    line = next(entry.getMessage() for entry in caplog.records if "black box: {" in entry.getMessage())
    assert len(line) < 2000
    record = black_box.parse_record(line.removeprefix("legroom black box: "))
    assert (record.request.wanted_bytes, record.allocator.largest_free_bytes) == (2 * GIB, GIB)


def test_a_record_stays_below_its_limit_and_keeps_the_largest_segments(worker, monkeypatch):
    monkeypatch.setattr("legroom.black_box.MAX_BYTES", 100_000)
    many = [segment((n % 97 + 1) * MIB, *((MIB, "inactive"),) * 8) for n in range(600)]
    worker.cuda.memory_snapshot = lambda: many
    fail_in_a_step(BlackBoxRecorder())
    (path,) = worker.records.glob("*.json")
    record = read_record(path)
    assert path.stat().st_size <= 100_000
    assert 0 < record.allocator.segments_left_out == 600 - len(record.allocator.segments)
    smallest = min(segment.size_bytes for segment in record.allocator.segments)
    left_out = sorted((segment["total_size"] for segment in many), reverse=True)[len(record.allocator.segments) :]
    assert smallest >= left_out[0]


def test_a_process_that_keeps_failing_writes_five_records(worker):
    box = BlackBoxRecorder()
    for _ in range(9):
        fail_in_a_step(box)
    assert len(written(worker)) == 5


def test_a_record_is_of_its_owner_alone(worker):
    fail_in_a_step(BlackBoxRecorder())
    (path,) = worker.records.glob("*.json")
    assert path.stat().st_mode & 0o077 == 0
    assert list(worker.records.glob("*.new")) == []


def test_a_signal_asks_every_worker_for_a_record(worker, tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    folder = TelemetryFolder(tmp_path)
    try:
        telemetry.handle_signal(folder)
        os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert folder.record_requested_s() > 0


def test_a_reporting_worker_answers_what_is_asked_of_it(worker, tmp_path, monkeypatch):
    folder, looks = TelemetryFolder(tmp_path / "board"), []
    folder.path.mkdir()

    def sleep(_):
        looks.append(1)
        if len(looks) == 2:
            folder.request_record()
        if len(looks) == 4:
            (folder.path / f"{os.getpid()}.json").unlink()
            (folder.path / "asked").unlink()
            folder.path.rmdir()

    monkeypatch.setattr(telemetry, "time", SimpleNamespace(sleep=sleep))
    telemetry.report_until_removed(folder, BlackBoxRecorder(), every_s=0)
    (record,) = written(worker)
    assert record.trigger == "asked" and record.history[0].allocated_bytes == 4 * GIB


def test_somebody_elses_handler_of_the_signal_stays(tmp_path):
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        telemetry.handle_signal(TelemetryFolder(tmp_path))
        assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_the_limit_of_torch_is_told_where_the_driver_tells_nothing(worker, monkeypatch):
    monkeypatch.setattr(recorder.worker_memory, "card_use", lambda cuda, device: 1 / 0)
    BlackBoxRecorder().out_of_memory(0, 2 * GIB, 40 * GIB, GIB // 2)
    (record,) = written(worker)
    assert record.card.limit_bytes == 40 * GIB
