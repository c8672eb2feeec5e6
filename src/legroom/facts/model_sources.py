"""A `Model` from a bundled name, a Hub id, a folder, a config.json or a GGUF file."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts import bundled as bundled_models
from legroom.facts.config.fields import overridden
from legroom.facts.config.model_config import model_from_config
from legroom.facts.config.quantization import LINEAR_ATTENTION, quantization
from legroom.facts.huggingface import config_of_folder, fetch, folder_bytes, read_json_object
from legroom.facts.model import Experts, Model, Quantization
from legroom.isolation import given_models
from legroom.memo import Memo

_bundled_models: Memo[Model] = Memo(most=64)
"""Bundled models by entry, id and overrides: figures are cached by the object of the model."""


def load(
    name_or_path: str,
    revision: str | None = None,
    offline: bool | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """The model of a bundled name, Hub id or path, its config changed by `overrides`; LegroomError if not found.
    `offline`: ask no Hub; None: as HF_HUB_OFFLINE says."""
    text = name_or_path.strip()
    if not text:
        raise LegroomError("no model was named", "pass a Hub id, a folder with a config.json, or a config.json")
    if "\0" in text or len(text) > 4096:
        raise LegroomError("the model name is not a name or a path", "pass a Hub id or a path")
    if (models := given_models()) is not None:
        given = models.get(text)
        given_json = json.dumps([given.config, given.checkpoint_bytes]) if given else ""
        return _model_of_request(text, given_json, json.dumps(dict(overrides or {})))
    path = Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib's raises where a user is not known
    if path_exists(path):
        return _from_path(path, overrides)
    if revision is None and (bundled := bundled_models.find(text)):
        return from_bundled(bundled, text, overrides)
    _refuse_search_words(text)
    _refuse_misspelt(text)
    if text.startswith(("/", "./", "../", "~")) or text.endswith((".json", ".gguf", os.sep)) or text.count("/") > 1:
        if not text.endswith(".json") and (named := bundled_models.derived(text)):
            return _from_mirror(named, text, overrides)
        raise LegroomError(f"there is no file or folder {text}", f"check the path; {_nearest_hint(text)}".rstrip("; "))
    if revision is None and (bundled := bundled_models.mirrored(text)):
        return _from_mirror(bundled, text, overrides)
    try:
        return _from_hub(text, revision, offline, overrides)
    except LegroomError as error:
        unread = error.exit_code == UNREACHABLE or not is_hub_id(text)
        if unread and revision is None and (named := bundled_models.derived(text)):
            return _from_mirror(named, text, overrides)
        if revision is not None and bundled_models.find(text):
            error.hint = f"{text} is bundled: leave the revision out to use the bundled facts"
        raise


def from_bundled(bundled: bundled_models.Bundled, name: str = "", overrides: Mapping[str, Any] | None = None) -> Model:
    """The `Model` of a bundled entry, named `name` if given, its config changed by `overrides`."""
    hub_id, entry = name if "/" in name else bundled_models.hub_id_of(bundled, name or bundled.name), bundled.entry

    def build() -> Model:
        """The model from the entry's config."""
        config = overridden(bundled_models.bundled_config(bundled, hub_id), overrides)
        model = model_from_config(config, name=hub_id, source=f"bundled: {bundled.source}")
        return replace(model, assumed=True, named_alone="named_alone" in entry) if entry.get("assumed") else model

    return _bundled_models.get((entry,), (bundled.name, bundled.base, hub_id, repr(overrides)), build)


def _from_mirror(bundled: bundled_models.Bundled, name: str, overrides: Mapping[str, Any] | None) -> Model:
    """A bundled model under the mirror's name; if quantized, its unquantized modules are those usual for the method."""
    model = from_bundled(bundled, name, overrides)
    if model.quantization is None or bundled.base is None:
        return model
    return _with_usual_exclusions(model, model.quantization)


def stored_as_named(model: Model) -> Model:
    """The model, quantized as its name says if its config is silent; its weights' error band then covers both cases."""
    scheme, name = model.quantization, model.name.lower()
    if scheme and scheme.list_assumed and "bf16" in name and LINEAR_ATTENTION not in scheme.ignored:
        return replace(model, quantization=replace(scheme, ignored=(*scheme.ignored, LINEAR_ATTENTION)))
    section = None if scheme or model.checkpoint_bytes else bundled_models.named_scheme(name)
    named = quantization({**model.config, "quantization_config": section}) if section else None
    return _with_usual_exclusions(model, replace(named, named=True)) if named else model


def _with_usual_exclusions(model: Model, scheme: Quantization) -> Model:
    """The model with this scheme and, as its own list was not read, the usual list of unquantized modules."""
    if any(each.is_nvfp4 for each in (scheme, *(own for _, own in scheme.rules))):
        has_experts = any(isinstance(layer.feedforward, Experts) for layer in model.layers)
        ignored = ["lm_head", LINEAR_ATTENTION] if has_experts else ["lm_head"]
        usual = quantization({"quantization_config": {"quant_algo": "NVFP4", "ignore": ignored}})
        assert usual is not None
        scheme = replace(usual, named=scheme.named)
    return replace(model, assumed=True, quantization=replace(scheme, list_assumed=True))


@lru_cache(maxsize=64)
def _model_of_request(name: str, given_json: str, overrides_json: str) -> Model:
    """The model that a name means without files or Hub, changed by `overrides_json`; `given_json`: its [config,
    checkpoint bytes], or empty."""
    overrides = json.loads(overrides_json)
    if given_json:
        config, checkpoint_bytes = json.loads(given_json)
        model = model_from_config(overridden(config, overrides), name=name, source="the given config.json")
        return stored_as_named(replace(model, checkpoint_bytes=checkpoint_bytes) if checkpoint_bytes else model)
    if not bundled_models.find(name):
        _refuse_search_words(name)
        _refuse_misspelt(name)
    for read, build in (
        (bundled_models.find, from_bundled),
        (bundled_models.mirrored, _from_mirror),
        (bundled_models.derived, _from_mirror),
    ):
        if bundled := read(name):
            return build(bundled, name, overrides)
    error = _unknown_model_error(name, "is not among the models that legroom brings along")
    error.hint = f"give its config.json; {error.hint}" if bundled_models.nearest(name) else "give its config.json"
    raise error


def _from_path(path: Path, overrides: Mapping[str, Any] | None) -> Model:
    """The model of a checkpoint folder, a config.json or a GGUF file."""
    if path.is_dir():
        name, size = path.resolve().name, folder_bytes(path)
        config = overridden(config_of_folder(path), overrides)
        model = model_from_config(config, name=name, source=f"folder {name}")
        return stored_as_named(replace(model, checkpoint_bytes=size))
    if path.suffix.lower() == ".gguf":
        from legroom.facts.gguf import read_gguf  # few users have one

        return read_gguf(path)
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    config = config_of_folder(path.parent) if path.name == "config.json" else read_json_object(path)
    return stored_as_named(model_from_config(overridden(config, overrides), name=name, source=f"file {path.name}"))


def _from_hub(name: str, revision: str | None, offline: bool | None, overrides: Mapping[str, Any] | None) -> Model:
    """The model of a Hub repository, or LegroomError; HF_HUB_OFFLINE decides where `offline` is None."""
    if not is_hub_id(name):
        raise _unknown_model_error(name, "is neither a bundled model, a path, nor a Hub id (owner/name)")
    if offline is None:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    answer = fetch(name, revision, offline)
    model = model_from_config(overridden(answer.config, overrides), name=name, source=answer.source)
    return stored_as_named(replace(model, checkpoint_bytes=answer.checkpoint_bytes or model.checkpoint_bytes))


def _refuse_search_words(text: str) -> None:
    """Raises LegroomError for a text with spaces, which is no Hub id: no command could be written for it."""
    if " " in text and "/" not in text:
        raise _unknown_model_error(text, "is no model id: it has a space")


def _refuse_misspelt(text: str) -> None:
    """Raises LegroomError for an id that differs from a known model's by an unknown word: vLLM would not find it."""
    if bundled_models.is_misspelt(text):
        error = _unknown_model_error(text, "is neither a bundled model, a path, nor a Hub id (owner/name)")
        error.hint += f"; if it is a folder on the server: ./{text}"
        raise error


def _unknown_model_error(name: str, why: str) -> LegroomError:
    """The LegroomError that no model of this name was found, for the reason `why`; its hint names similar ones."""
    if "$" in name or "{{" in name:
        return LegroomError(f"the model is {name}, which is known only where it runs", "write its name in the file")
    hint = _nearest_hint(name) or "pass a Hub id, a folder with a config.json, or a config.json"
    return LegroomError(f"{name!r} {why}", hint)


def _nearest_hint(name: str) -> str:
    """The nearest bundled models as a hint; empty where no name is similar."""
    return f"nearest bundled: {', '.join(bundled_models.nearest(name))}" if bundled_models.nearest(name) else ""


def path_exists(path: Path) -> bool:
    """Whether the file exists; False for a text too long for a name, or with a zero byte."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_hub_id(text: str) -> bool:
    """Whether the text has the form owner/name; nothing is looked up."""
    owner, slash, repo = text.partition("/")
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    return bool(slash and owner and repo) and set(owner + repo) <= allowed
