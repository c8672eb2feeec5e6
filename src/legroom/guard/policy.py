"""The policy: what one request may ask for, and how the pool is shared out.

A small TOML file. Each key is a field below, so that what is documented, read and checked is one thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from legroom.records import dataclass
from legroom.units import MIB

Choice = tuple[str, ...]


def _key(default: Any, about: str, **more: Any) -> Any:
    return field(default=default, metadata={"about": about, **more})


@dataclass(frozen=True)
class RequestBounds:
    """What one request may ask for."""

    body_bytes: int = _key(64 * MIB, "largest request body, images included", unit="bytes", least=1024)
    max_prompt_tokens: int = _key(0, "longest prompt; 0: what the model takes")
    max_output_tokens: int = _key(0, "longest answer (max_tokens, max_completion_tokens, max_output_tokens); 0: any")
    output_over: str = _key("cap", "an answer over that is capped or rejected", choices=("cap", "reject"))
    default_output_tokens: int = _key(0, "set this max_tokens where a request names none; 0: leave it open")
    max_sequences: int = _key(0, "largest n, best_of or beam width; 0: max_num_seqs")
    max_prompts: int = _key(0, "most prompts in one request; 0: 65,536")
    max_logprobs: int | None = _key(
        None, "most logprobs and top_logprobs a token; unset: the server's --max-logprobs, or 20", optional=True
    )
    max_prompt_logprobs: int | None = _key(
        None, "most prompt_logprobs a token, each a row of the vocabulary; unset: likewise", optional=True
    )
    logprobs_over: str = _key("reject", "more than that is capped or rejected", choices=("cap", "reject"))
    max_images: int | None = _key(None, "images a request; unset: the server's own limit", optional=True)
    max_audios: int | None = _key(None, "audio clips a request; unset: likewise", optional=True)
    max_videos: int | None = _key(None, "videos a request; unset: likewise", optional=True)
    media_bytes: int = _key(20 * MIB, "largest single image, clip or video sent in the request", unit="bytes", least=1)
    image_pixels: int = _key(50_000_000, "largest image sent in the request: a small file can unpack to a huge one")
    remote_media: str = _key("allow", "media named by an http address", choices=("allow", "reject"))


@dataclass(frozen=True)
class PoolPolicy:
    """How the KV pool is shared out."""

    tokens: int = _key(0, "size of the pool; 0: as the engine or the plan says")
    overcommit: float = _key(
        1.0, "1: nothing is ever preempted; 1.5: count on answers ending early", low=0.1, high=10.0
    )
    max_running: int = _key(0, "sequences admitted at once; 0: max_num_seqs")
    open_ended: int | str = _key(
        "learnt", "reserve for an answer without max_tokens: learnt, worst, or tokens", choices=("learnt", "worst")
    )
    count: str = _key(
        "auto", "prompt tokens: bytes (bound), tokenize (exact, a call each), auto (only where it decides)",
        choices=("auto", "bytes", "tokenize"),
    )  # fmt: skip
    when_unknown: str = _key(
        "open", "size of the pool not known: open lets all in, closed none", choices=("open", "closed")
    )
    abort_grace_s: float = _key(1.0, "what an aborted request held is kept back this long", low=0.0, high=60.0)


@dataclass(frozen=True)
class QueuePolicy:
    """Who may wait for room."""

    requests: int = _key(512, "requests that may wait; more get 429 with Retry-After")
    wait_s: float = _key(30.0, "longest wait, then 429 with Retry-After", low=0.0, high=3600.0)
    body_timeout_s: float = _key(30.0, "a body must arrive within this", low=0.1, high=3600.0)
    drain_retry_s: int = _key(10, "Retry-After while draining", least=1)


@dataclass(frozen=True)
class Policy:
    requests: RequestBounds = RequestBounds()
    pool: PoolPolicy = PoolPolicy()
    queue: QueuePolicy = QueuePolicy()


SECTIONS: Mapping[str, type] = {"requests": RequestBounds, "pool": PoolPolicy, "queue": QueuePolicy}


def policy_toml(policy: Policy | None = None) -> str:
    """The policy as a file with its comments; the default one where none is given."""
    shown = policy or Policy()
    lines = ["# legroom guard policy. Every key is optional; these are its values now.", ""]
    for name, kind in SECTIONS.items():
        lines.append(f"[{name}]")
        section = getattr(shown, name)
        for key in fields(kind):
            value = getattr(section, key.name)
            written = f"{key.name} = {_toml(value)}" if value is not None else f"# {key.name} = 4"
            lines.append(f"{written:<32}# {key.metadata['about']}")
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, int) and value >= 100_000:
        return f"{value:_}"
    return str(value)
