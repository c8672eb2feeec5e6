"""Flags that a log prints: `non-default args`, `Namespace(...)` and the engine's config line."""

import ast
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from legroom.errors import LegroomError
from legroom.facts import pattern as reading_pattern
from legroom.facts.bundled import derived, find
from legroom.facts.flags import Flag, default, defaults_ever, flags_ever, flags_of
from legroom.facts.model import Model
from legroom.facts.releases import Release
from legroom.records import dataclass, field
from legroom.vllm.args import ServeArgs
from legroom.vllm.command_line import flag_words
from legroom.vllm.flag_values import FIELDS, SPECULATIVE_FIELDS


@dataclass(frozen=True)
class GivenFlags:
    """The flags that were typed, as far as a log shows them."""

    args: ServeArgs = field(default_factory=ServeArgs)
    is_module: bool = False
    """Started as `python -m vllm.entrypoints.openai.api_server`: `vllm serve` passes the model as `model_tag`."""
    unknown: tuple[str, ...] = ()
    """Flags whose values are not printed."""


_HUB_CACHE = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")


def load_logged_model(name: str) -> Model:
    """The model that a log names: by Hub id, folder, Hub cache path or a known model's folder; else LegroomError."""
    from legroom.facts.model_sources import from_bundled, load  # most logs of failures name no known model

    cached = _HUB_CACHE.search(name)
    model = f"{cached['owner']}/{cached['name']}" if cached else name
    try:
        return load(model)
    except LegroomError:
        path = model.startswith(("/", "~", "."))
        known = find(model.rstrip("/").rpartition("/")[2]) if path else derived(model)
        if known is None:
            raise
        return from_bundled(known)


_PAIR = reading_pattern("printed_flags.pair")
_ENGINE_FACTS = {
    "model": re.compile(r"\bmodel=(?P<value>'[^']*'|[^,]+)"),
    "dtype": re.compile(r"\bdtype=torch\.(?P<value>\w+)"),
    "max_model_len": re.compile(r"\bmax_seq_len=(?P<value>\d+)"),
    "tensor_parallel_size": re.compile(r"\btensor_parallel_size=(?P<value>\d+)"),
    "pipeline_parallel_size": re.compile(r"\bpipeline_parallel_size=(?P<value>\d+)"),
    "data_parallel_size": re.compile(r"\bdata_parallel_size=(?P<value>\d+)"),
    "quantization": re.compile(r"\bquantization=(?P<value>[\w-]+)"),
    "enforce_eager": re.compile(r"\benforce_eager=(?P<value>True|False)"),
    "kv_cache_dtype": re.compile(r"\bkv_cache_dtype=(?P<value>[\w.]+)"),
    "enable_prefix_caching": re.compile(r"\benable_prefix_caching=(?P<value>True|False)"),
}
_ENGINE_OTHERS = {
    name: re.compile(rf"\b{name}=(?P<value>'[^']*'|[^,()\s]+)")
    for name in (
        *("tokenizer", "tokenizer_mode", "revision", "trust_remote_code", "download_dir", "load_format"),
        *("served_model_name", "reasoning_parser"),
    )
}
_CAPTURE_SIZES = re.compile(r"['\"]?cudagraph_capture_sizes['\"]?\s*[:=]\s*\[(?P<sizes>[\d,\s]*)\]")


def engine_facts(config: str) -> dict[str, Any]:
    """Settings, by vLLM's Python names, in the text of the `Initializing ... LLM engine` line (`config`)."""
    found = {name: match["value"] for name, pattern in _ENGINE_FACTS.items() if (match := pattern.search(config))}
    facts = {name: value for name, text in found.items() if (value := _python_literal(text)) is not None}
    sizes = _CAPTURE_SIZES.search(config)
    if sizes:
        facts["cudagraph_capture_sizes"] = tuple(int(size[:9]) for size in re.findall(r"\d+", sizes["sizes"]))
    return facts


def merged_args(mapping: str | None, namespace: str | None, facts: Mapping[str, Any]) -> ServeArgs:
    """The flags in the texts of `non-default args` (`mapping`) and `Namespace`; those they lack from `facts`."""
    given: dict[str, Any] = {}
    for text in (namespace, mapping):
        if text is not None:
            printed = read_printed(text)  # of a truncated text also the names after the gap
            given |= ({} if printed.is_whole else _plain_pairs(text)) | dict(printed.values)
    model = given.get("model") or given.get("model_tag") or facts.get("model") or ""
    chosen = {name: _typed_value(name, value) for name, value in given.items() if name in FIELDS and value is not None}
    for name, value in facts.items():
        if name != "cudagraph_capture_sizes" and chosen.get(name) is None:
            chosen[name] = value
    if isinstance(given.get("dtype"), str) and given["dtype"] in ("auto", "torch.bfloat16", "torch.float16"):
        chosen["dtype"] = facts.get("dtype", given["dtype"].removeprefix("torch."))
    chosen["model"] = str(model)
    return ServeArgs(**{name: value for name, value in chosen.items() if value is not None})


def given_args(mapping: str | None, namespace: str | None, release: Release | None, from_llm: bool) -> GivenFlags:
    """The flags that the user typed, from the text of `non-default args` (`mapping`), else from Namespace's without its
    defaults. `from_llm`: the LLM class started the engine, not a server."""
    text = mapping if mapping is not None else namespace
    if text is None:
        return GivenFlags()
    printed = read_printed(text)
    if mapping is None:
        printed = given_only(printed, release)
    named = {name: _typed_value(name, value) for name, value in printed.values.items() if name in FIELDS}
    speculative = {key: printed.values[name] for name, key in SPECULATIVE_FIELDS.items() if printed.values.get(name)}
    chosen = {name: value for name, value in named.items() if value is not None}
    if speculative:
        chosen["speculative_config"] = speculative
    chosen["model"] = str(printed.values.get("model") or printed.values.get("model_tag") or "")
    args = ServeArgs(**chosen, others=other_words(printed, release, from_llm))
    by_dest = _flags_by_dest(release)
    unread = [by_dest[name].name for name in printed.unread if name in by_dest and name not in _NOT_FLAGS]
    if not printed.is_whole:
        unread.append("the flags behind the place where its line was cut")
    is_module = not from_llm and "model_tag" not in printed.values and "subparser" not in printed.values
    return GivenFlags(args, is_module, tuple(unread))


def engine_words(config: str, model: str, release: Release | None) -> tuple[str, ...]:
    """Flags without effect on memory (tokenizer, load format ...) from the engine's config line, as words."""
    named = {name: match["value"] for name, pattern in _ENGINE_OTHERS.items() if (match := pattern.search(config))}
    values = {name: _python_literal(value.removeprefix("LoadFormat.").strip()) for name, value in named.items()}
    known = {name: value for name, value in values.items() if value not in (None, ...)}
    values = {name: str(value).lower() if name == "load_format" else value for name, value in known.items()}
    same = {name for name in ("tokenizer", "served_model_name") if values.get(name) == model}
    printed = PrintedFlags({name: value for name, value in values.items() if name not in same})
    return other_words(given_only(printed, release), release)


def _typed_value(name: str, value: Any) -> Any:
    """The value as the ServeArgs field `name` has it (-1 for a length of `auto`); None if it is of another type."""
    if name == "max_model_len" and value == "auto":
        return -1
    kind = FIELDS[name].partition(" ")[0].partition("[")[0]  # of `tuple[int, ...] | None`
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == "bool"):
        return None
    return tuple(value) if kind == "tuple" else float(value) if kind == "float" else value


def _plain_pairs(text: str) -> dict[str, Any]:
    """Every `name=value` or `'name': value` with a plain value in a text, the first of each name."""
    pairs: dict[str, Any] = {}
    for pair in _PAIR.finditer(text):
        pairs.setdefault(pair["name"], _python_literal(pair["value"]))
    return pairs


def _python_literal(text: str) -> Any:
    """The text as a Python literal; the text itself where it is none."""
    text = text.strip()
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


_NAME = re.compile(r"""[\s.]*(?:'(?P<quoted>\w+)'\s*:|"(?P<double>\w+)"\s*:|(?P<bare>[A-Za-z_]\w*)=)\s*""")
_ENUM = re.compile(r"<\w+\.\w+: (?P<value>'[^']*'|\d+)>")
_MODULE = re.compile(r"\w+\(name='(?P<name>[^']*)', (?:local_)?path='(?P<path>[^']*)'")
_OPEN, _CLOSE = "([{", ")]}"
_NOT_FLAGS = frozenset({"model_tag", "subparser", "command", "dispatch_function", "config", "usage_context"})
_SET_BY_LLM_CLASS = frozenset({"disable_log_stats"})  # `LLM(...)` sets these by itself.
_STRAIGHT = str.maketrans("‘’“”", "''\"\"")  # Quotes that a web page made of straight ones.
_MAX_FLAGS = 400
_TYPES: dict[str, Any] = {"bool": bool, "int": int, "str": str, "Mapping": dict}
_TYPES |= {"float": int | float, "tuple": list | tuple}
"""The Python types of printed values, by the type of the field."""


@dataclass(frozen=True, slots=True)
class PrintedFlags:
    """Flags by vLLM's Python names, and names whose value is not printed."""

    values: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    is_whole: bool = True
    """Nothing is truncated."""


def read_printed(text: str) -> PrintedFlags:
    """Names and values at the top level of a printed dict or call; of a truncated text those before the cut."""
    text = text.translate(_STRAIGHT)
    values: dict[str, Any] = {}
    unread: list[str] = []
    inner, at = text.strip(), 0
    # Namespace(...) is passed without its brackets; a dictionary without its closing brace is truncated.
    inner = inner[1:] if inner.startswith("{") else f"{inner})"
    while len(values) < _MAX_FLAGS and (named := _NAME.match(inner, at)):
        end = _end_of_value(inner, named.end())
        if end is None:
            break
        name, at = named["quoted"] or named["double"] or named["bare"], end + 1
        try:
            values.setdefault(name, _printed_value(inner[named.end() : end].strip()))
        except ValueError:
            unread.append(name)
    return PrintedFlags(values, tuple(unread), not inner[at:].strip(" )}"))


def given_only(printed: PrintedFlags, release: Release | None) -> PrintedFlags:
    """The printed flags that are not the release's default (None: any release's), and whose value could be read."""
    by_dest = _flags_by_dest(release)
    values = {
        name: value
        for name, value in printed.values.items()
        if name not in by_dest or not _is_default(by_dest[name], value, release)
    }
    # Printed objects mostly are defaults.
    return PrintedFlags(values, (), printed.is_whole)


def other_words(printed: PrintedFlags, release: Release | None, from_llm: bool = False) -> tuple[str, ...]:
    """Printed flags without a ServeArgs field as command-line words; `from_llm`: not those that LLM() itself sets."""
    words: list[str] = []
    by_dest = _flags_by_dest(release)
    for name, value in printed.values.items():
        flag = by_dest.get(name)
        if flag is None or name in FIELDS or name in _NOT_FLAGS or name in SPECULATIVE_FIELDS:
            continue
        if value is None or value in ([], {}, "") or (from_llm and name in _SET_BY_LLM_CLASS):
            continue
        words += _flag_words(flag, value)
    return tuple(words)


def _flag_words(flag: Flag, value: Any) -> list[str]:
    """The flag and a logged value as command-line words; none for a switch that is off."""
    if isinstance(value, dict) or (isinstance(value, list) and not flag.kind.startswith("list:")):
        return [flag.name, json.dumps(value)]
    if isinstance(value, bool) and flag.kind not in ("switch", "bool", "optbool"):
        return [flag.name] if value else []
    return flag_words(flag, value)


def _flags_by_dest(release: Release | None) -> dict[str, Flag]:
    """Flags of every release by argparse's dest: as this release defines them, else (or with None) as the newest."""
    table = {flag.dest: flag for flag in flags_ever().values()}
    return table if release is None else table | {flag.dest: flag for flag in flags_of(release).values()}


def _is_default(flag: Flag, value: Any, release: Release | None) -> bool:
    """Whether the value is empty, off, or the flag's default in this release (in any release where it is unknown)."""
    if value is None or value is False or value in ([], {}, ""):
        return True
    declared = defaults_ever(flag.name) if release is None else (default(flag.name, release),)
    # vLLM's source writes some defaults as members of an enum, others as expressions, which count as equal.
    shown = str(value).lower()
    named = (text for text in declared if isinstance(text, str))
    return value in declared or any("(" in text or text.rpartition(".")[2].lower() == shown for text in named)


def _end_of_value(text: str, at: int) -> int | None:
    """The index of the comma or closing bracket after the value at index `at`; None where the text ends before it."""
    depth, quote = 0, ""
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            if depth == 0:
                return at
            depth -= 1
        elif char == "," and depth == 0:
            return at
        at += 1
    return None


def _printed_value(written: str) -> Any:
    """The value that Python or JSON wrote, an enum's value, or LoRA modules as `name=path`; else ValueError."""
    enum = _ENUM.fullmatch(written)
    text = enum["value"] if enum else written
    with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    modules = [f"{module['name']}={module['path']}" for module in _MODULE.finditer(text)]
    if modules and text.startswith("["):
        return modules
    raise ValueError(text)
