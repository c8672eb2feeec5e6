"""A plan as a file holds it (`legroom plan --json`), checked once and then read by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.errors import LegroomError
from legroom.facts.releases import release as known_release
from legroom.records import dataclass

if TYPE_CHECKING:
    from legroom.facts.releases import Release

_HOW = "write one with: legroom plan MODEL --gpu NAME --json > plan.json"
_MOST_BYTES = 32 * 2**20
_PARTS = ("gpu", "args", "layout", "kv")
_NUMBERS = (
    ("gpu", "count"), ("gpu", "total_bytes"), ("layout", "total_bytes"), ("layout", "budget_bytes"),
    ("layout", "weights_bytes"), ("layout", "kv_cache_bytes"), ("layout", "peak_used_bytes"),
    ("kv", "block_size"), ("kv", "num_blocks"), ("kv", "tokens"), ("kv", "max_concurrency"),
    ("args", "max_model_len"), ("args", "max_num_seqs"),
)  # fmt: skip


@dataclass(frozen=True)
class PlanDocument:
    """A planned server. `document` is the whole JSON document; docs/json.md describes every key."""

    document: Mapping[str, Any]
    source: str = "the plan"
    """Where it was read, for messages."""

    @property
    def release(self) -> Release:
        """The vLLM release it was planned for."""
        return known_release(self.document["vllm"])

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.document["model"])

    @property
    def gpu(self) -> Mapping[str, Any]:
        """`name`, `count`, `total_bytes` of one."""
        return self.document["gpu"]  # type: ignore[no-any-return]

    @property
    def args(self) -> Mapping[str, Any]:
        """Every setting as the release resolves it."""
        return self.document["args"]  # type: ignore[no-any-return]

    @property
    def layout(self) -> Mapping[str, int]:
        """Where every byte of the tightest GPU goes."""
        return self.document["layout"]  # type: ignore[no-any-return]

    @property
    def kv(self) -> Mapping[str, Any]:
        """The pool: `block_size`, `num_blocks`, `tokens`, `max_concurrency` ..."""
        return self.document["kv"]  # type: ignore[no-any-return]

    @property
    def engines(self) -> int:
        """Data-parallel copies behind one server's address, each with the pool of `kv`. With a balancer of the user's
        own every copy is a server."""
        alone = ("--data-parallel-rank", "--data-parallel-external-lb")
        if any(str(word).partition("=")[0] in alone for word in self.document.get("command", ())):
            return 1
        return max(1, int(self.args.get("data_parallel_size") or 1))

    @property
    def command(self) -> tuple[str, ...]:
        """The command line, ready to run."""
        return tuple(str(word) for word in self.document["command"])

    @property
    def fits(self) -> bool:
        """Whether the server that was planned starts."""
        return self.document.get("verdict") != "does_not_fit"


def read_plan(path: str) -> PlanDocument:
    """The plan in a file (`-`: stdin), or what is wrong with it."""
    try:
        if path == "-":
            import sys  # noqa: PLC0415

            text = sys.stdin.read(_MOST_BYTES)
        elif (size := Path(path).stat().st_size) > _MOST_BYTES:
            raise LegroomError(f"{path} is no plan: it has {size:,} bytes", _HOW)
        else:
            text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LegroomError(f"could not read the plan {path}: {error.strerror}", _HOW) from error
    except UnicodeDecodeError as error:
        raise LegroomError(f"{path} is no plan: it is not text", _HOW) from error
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise LegroomError(f"{path} is no plan: it is not JSON ({error})", _HOW) from error
    return plan_document(document, path)


def plan_document(document: Any, source: str = "the plan") -> PlanDocument:
    """A plan's JSON document, checked."""
    wrong = _problem(document)
    if wrong:
        raise LegroomError(f"{source} is no plan of legroom: {wrong}", _HOW)
    plan = PlanDocument(document, source)
    plan.release  # noqa: B018  # a release that is none ends here, not half-way through an export
    return plan


def _problem(document: Any) -> str:
    """What keeps a document from being a plan, or an empty text."""
    if not isinstance(document, dict):
        return "it is not a JSON object"
    for name in ("model", "vllm"):
        if not isinstance(document.get(name), str):
            return f"it has no {name!r}"
    for name in _PARTS:
        if not isinstance(document.get(name), dict):
            return f"it has no {name!r}"
    for part, name in _NUMBERS:
        value = document[part].get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"{part}.{name} is not a number"
    command = document.get("command")
    if not isinstance(command, list) or not command:
        return "it has no 'command'"
    return ""
