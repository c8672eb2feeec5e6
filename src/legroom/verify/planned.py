"""The pool that a plan promises, from the document that `legroom plan --json` printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError
from legroom.verify.checks import PlannedPool

_HINT = "write it with legroom plan ... --json > FILE"


def read_plan(path: str) -> PlannedPool:
    """The blocks of a saved plan, with the band that its own certainty gives them."""
    try:
        document = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise LegroomError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise LegroomError(f"{path} is not JSON", _HINT) from None
    try:
        return _planned(document)
    except KeyError as error:
        raise LegroomError(f"{path} is not a plan: {error} is missing", _HINT) from None
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise LegroomError(
            f"{path} is not a plan: what it says of the KV cache is not as it is written", _HINT
        ) from None


def _planned(document: Any) -> PlannedPool:
    kv, args = document["kv"], document["args"]
    blocks, size = int(kv["num_blocks"]), int(kv["block_size"])
    sure = document.get("confidence", {}).get("kv_cache_bytes", {})
    planned_bytes = int(document["layout"]["kv_cache_bytes"])
    fixed = args.get("num_gpu_blocks_override") is not None or not planned_bytes
    low, high = (sure.get("low", planned_bytes), sure.get("high", planned_bytes)) if not fixed else (1, 1)
    scale = blocks / planned_bytes if not fixed else blocks
    seqs, context = int(args["max_num_seqs"]), int(args["max_model_len"])
    if blocks < 0 or min(size, context) < 1:
        raise ValueError("a pool of nothing")
    return PlannedPool(
        blocks, size, int(low * scale), int(high * scale), seqs, context, str(document.get("model") or "")
    )
