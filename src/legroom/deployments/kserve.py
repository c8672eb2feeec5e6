"""KServe: its own names for vLLM's flags, and the models that its runtimes are given."""

from __future__ import annotations

from legroom.deployments.shell.scan import Word
from legroom.deployments.yaml_nodes import Node
from legroom.facts.flags import all_flag_names, flag_name

_RENAMED = {"--model-id": "--model", "--model-name": "--served-model-name", "--model-revision": "--revision"}
_OWN = ("--backend", "--task", "--model-dir")
"""Flags of KServe's server that some vLLM has too, with other values."""
_WITHOUT_VLLM = "huggingface"
"""The other backend of KServe's Hugging Face runtime."""


def runtime_of(model: Node) -> str:
    """`vllm` or `huggingface` where an InferenceService's model is served by vLLM, else empty."""
    name = model.text("modelFormat", "name").lower()
    return name if name in ("vllm", "huggingface") else ""


def kserve_words(model: Node, given: tuple[Word, ...]) -> tuple[Word, ...] | None:
    """The arguments of KServe's Hugging Face runtime as vLLM's; None where another backend serves the model.

    Its server has many flags of its own: only what some release of vLLM knows is taken for vLLM's.
    """
    known = set(all_flag_names())
    words: list[Word] = []
    keeps = True
    for i, word in enumerate(given):
        head, equals, value = word.text.partition("=")
        if not head.startswith("--"):
            words += [word] if keeps else []
            continue
        name = flag_name(head)
        following = given[i + 1].text if i + 1 < len(given) else ""
        if name == "--backend" and (value or following) == _WITHOUT_VLLM:
            return None
        name = _RENAMED.get(name, name)
        keeps = name in known and name not in _OWN
        words += [word.with_text(name + equals + value)] if keeps else []
    return (*words, *_stored_model(model, words))


def _stored_model(model: Node, words: list[Word]) -> tuple[Word, ...]:
    """`storageUri: hf://org/model` where no flag names the model."""
    storage = model.get("storageUri")
    if storage is None or any(word.text.partition("=")[0] == "--model" for word in words):
        return ()
    scheme, _, name = (storage.scalar or "").partition("://")
    return (Word(f"--model={name}", storage.offset),) if scheme == "hf" and name else ()
