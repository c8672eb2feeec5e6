"""Which way of speculative decoding a config means, as vLLM reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADS = frozenset({"eagle", "eagle3"})
"""Small heads that run on the model's own hidden states and share its embeddings."""
WITHOUT_CACHE = frozenset({"ngram", "ngram_gpu", "medusa", "mlp_speculator", "suffix", "custom_class"})
"""Methods that keep no keys and values of their own."""
_WITHOUT_MODEL = frozenset({"ngram", "ngram_gpu", "suffix", "custom_class"})
_PREDICTORS = ("mtp", "dspark")
_NAMED = (("eagle3", "eagle3"), ("eagle-", "eagle"), ("dflash", "dflash"), ("dspark", "dspark"))


def draft_method(config: Mapping[str, Any] | None) -> str:
    """The method in use, told by the draft's name where none was given; empty without speculative decoding."""
    if not config:
        return ""
    stated, name = str(config.get("method") or ""), str(config.get("model") or "")
    if stated and stated != "draft_model":
        return stated
    if name in ("ngram", "[ngram]"):
        return "ngram"
    told = next((method for part, method in _NAMED if part in name.lower()), None)
    return told or ("draft_model" if name or stated else "ngram")


def head_kind(config: Mapping[str, Any] | None) -> str:
    """How an EAGLE head is built: vLLM keeps a stated `eagle`, but the head's own class is that of its checkpoint."""
    method = draft_method(config)
    return "eagle3" if method in HEADS and "eagle3" in draft_name(config).lower() else method


def predicts_itself(method: str) -> bool:
    """Whether the model's own prediction layers draft (MTP)."""
    return method.endswith(_PREDICTORS)


def draft_name(config: Mapping[str, Any] | None) -> str:
    """The other checkpoint that is loaded beside the model; empty where there is none."""
    method = draft_method(config)
    if not config or method in _WITHOUT_MODEL or predicts_itself(method):
        return ""
    return str(config.get("model") or "").strip()
