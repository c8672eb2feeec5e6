"""Real start-ups to score on, as a folder of vLLM's own logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from legroom.errors import LegroomError
from legroom.facts.model import Model
from legroom.facts.releases import release
from legroom.planning.plan import Target
from legroom.planning.scoring import Bad, Printed, ScoredStart
from legroom.planning.scoring_data import FREE_MEMORY_FAILURE, LOG_ROUNDING_BYTES, Loaded, card_of, text_of
from legroom.vllm_logs.startup_log import Startup, read_startups


def log_cases(folder: Path, load_model: Callable[[str], Model], gpu_name: str | None = None) -> Loaded:
    """Cases from a folder of start-up logs; `load_model` finds a model by the name that the log gives."""
    cases, bad = [], []
    for path in _log_files(folder):
        startups = read_startups(text_of(path))
        if not startups:
            bad.append(Bad(path.name, "no vLLM start-up in it"))
        for number, startup in enumerate(startups, 1):
            name = path.name if len(startups) == 1 else f"{path.name}#{number}"
            try:
                cases.append(case_of_startup(startup, name, load_model, gpu_name))
            except LegroomError as error:
                bad.append(Bad(name, error.message))
    if not cases and not bad:
        raise LegroomError(f"{folder} holds no files", "give a folder of vLLM start-up logs")
    return Loaded(tuple(cases), tuple(bad))


def case_of_startup(
    startup: Startup, name: str, load_model: Callable[[str], Model], gpu_name: str | None = None
) -> ScoredStart:
    """One start-up of a log as a case."""
    if startup.vllm is None:
        raise LegroomError("the log does not say which vLLM release wrote it")
    if not startup.args.model:
        raise LegroomError("the log does not name its model")
    model = load_model(startup.args.model)
    card = card_of(gpu_name or startup.gpu_name, startup.gpu_total_bytes)
    args = startup.args
    needed = args.gpus_needed
    started: bool | None = {"started": True, "failed": False}.get(startup.outcome)
    if startup.failure and startup.failure.id == FREE_MEMORY_FAILURE:
        started = None
    target = Target(model, card, needed, release(startup.vllm))
    return ScoredStart(
        id=name,
        source=name,
        target=target,
        args=args,
        printed=Printed(
            weights_bytes=startup.weights_bytes,
            kv_bytes=startup.available_kv_bytes,
            tokens=startup.tokens or _tokens_of_blocks(startup),
            total_bytes=startup.gpu_total_bytes,
            activation_bytes=startup.activation_bytes,
            rounding_bytes=LOG_ROUNDING_BYTES,
            started=started,
            failure=startup.failure.id if startup.failure else "",
        ),
        groups={
            "family": model.model_type,
            "gpu": card.name,
            "release": target.release.version,
            "quantization": model.quantization.method if model.quantization else "none",
        },
    )


def _tokens_of_blocks(startup: Startup) -> int | None:
    return startup.blocks * (startup.args.block_size or 16) if startup.blocks else None


def _log_files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise LegroomError(f"{folder} is not a folder", "give a folder of vLLM start-up logs")
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(".") and path.suffix.lower() not in (".md", ".gz", ".zip"):
            yield path
