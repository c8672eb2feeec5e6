"""Convert an atlas of vLLM releases into the data files of `legroom.facts`, and its messages into fixtures of tests.

    python tools/import_atlas.py ATLAS_FOLDER [--out src/legroom/facts/data]

An atlas folder holds what was read out of vLLM's own source for every release: `versions.json` (the releases in
order), `flags.json`, `env.json`, `metrics.json` and `messages.json`. To add a release, extend the atlas and run this
again; then look at the diff of the data files. Ranges are inclusive and written as indexes into `releases.json`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

# What the atlas has no word for: how a release's parser reads a value. Read from the parsers themselves.
BOOLEAN_WITH_NO_FROM = {"EngineArgs": "0.8.5", "AsyncEngineArgs": "0.10.1", "frontend": "0.10.0"}
PLAIN_SWITCHES = {
    "--headless",
    "--grpc",
    "--data-parallel-multi-port-external-lb",
    "--disable-log-stats",
    "--aggregate-engine-logging",
}
READ_DEFAULTS = {
    # The annotation says 8 until 0.10.0; what is read where nothing is set is 4 from 0.8.2 on.
    "VLLM_MM_INPUT_CACHE_GIB": [
        {"from": "0.8.0", "to": "0.8.1", "value": 8},
        {"from": "0.8.2", "to": "0.12.0", "value": 4},
    ]
}
EXCEPTIONAL_KINDS = {
    "--enable-prefix-caching": [("0.6.5", None, "bool")],
    "--use-tqdm-on-load": [("0.8.0", None, "bool")],
    "--enable-chunked-prefill": [("0.5.3", "0.8.4", "optbool")],
    "--multi-step-stream-outputs": [("0.6.2", "0.8.4", "optbool")],
    "--disable-logprobs-during-spec-decoding": [("0.5.3", "0.8.2", "optbool")],
    "--max-model-len": [("0.8.4", None, "human")],
    "--max-num-batched-tokens": [("0.9.1", None, "human")],
    "--max-num-scheduled-tokens": [("0.26.0", None, "human")],
    "--max-num-queued-tokens": [("0.29.0", None, "human")],
    "--kv-cache-memory-bytes": [("0.10.2", None, "human")],
    "--safetensors-prefetch-block-size": [("0.21.0", None, "human")],
    "--hf-token": [("0.8.4", None, "maybe")],
    "--limit-mm-per-prompt": [("0.5.5", "0.8.4", "pairs"), ("0.8.5", None, "json")],
    "--allowed-origins": [("0.4.0", None, "str")],
    "--allowed-methods": [("0.4.0", None, "str")],
    "--allowed-headers": [("0.4.0", None, "str")],
    "--middleware": [("0.4.0", None, "str")],
    "--api-key": [("0.4.0", "0.9.2", "str"), ("0.10.0", None, "list:str")],
    "--lora-modules": [("0.4.0", None, "list:str")],
    "--prompt-adapters": [("0.4.0", None, "list:str")],
    "--device-ids": [("0.24.0", None, "str")],
    "--optimization-level": [("0.12.0", None, "str")],
    "--ssl-cert-reqs": [("0.4.0", None, "int")],
    "--max-lora-rank": [("0.4.0", None, "int")],
    "--lora-extra-vocab-size": [("0.4.0", None, "int")],
    "--block-size": [("0.4.0", None, "int")],
    "--long-lora-scaling-factors": [("0.4.3", "0.8.4", "str")],
    "--collect-detailed-traces": [("0.5.5", "0.8.5.post1", "str")],
    "--uvicorn-log-level": [("0.4.0", None, "str")],
    "--cuda-graph-sizes": [("0.9.0", None, "list:int")],
    "--cudagraph-capture-sizes": [("0.11.1", None, "list:int")],
    "--served-model-name": [("0.4.0", None, "list:str")],
    "--ignore-patterns": [("0.5.3", None, "list:str")],
    "--pt-load-map-location": [("0.9.0", None, "str")],
    "--default-mm-loras": [("0.10.0", None, "json")],
}


def kind_of(type_text: str) -> str:
    """How one value of a declared type is read from a command line."""
    text = type_text.replace("SkipValidation", "")
    if "store_true" in text or "BooleanOptionalAction" in text or re.search(r"\bbool\b", text):
        return "switch"
    if (
        re.search(r"\b(dict|Dict|Mapping|json)\b|Config\b|DummyOptions|HfOverrides", text)
        and "ConfigFormat" not in text
    ):
        return "json"
    if re.search(r"\b([Ll]ist|[Tt]uple|set)\[", text):
        inner = re.search(r"(?:[Ll]ist|[Tt]uple|set)\[(\w+)", text)
        name = inner.group(1) if inner else "str"
        return "list:" + (name if name in ("int", "float") else "str")
    if text.startswith("Literal"):
        return "str"
    if re.search(r"\bint\b", text):
        return "int"
    return "float" if re.search(r"\bfloat\b", text) else "str"


class Atlas:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.releases: list[str] = json.loads((folder / "versions.json").read_text())
        self.index = {name: i for i, name in enumerate(self.releases)}

    def read(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def span(self, pair: list[str]) -> list[int]:
        return [self.index[pair[0]], self.index[pair[1]]]

    def ranged(self, entries: list[dict[str, Any]]) -> list[list[Any]]:
        """[{from, to, value}] as [[first, last, value]], neighbours with one value joined."""
        joined: list[list[Any]] = []
        for entry in entries:
            first, last = self.index[entry["from"]], self.index[entry["to"]]
            if joined and joined[-1][2] == entry["value"] and joined[-1][1] + 1 == first:
                joined[-1][1] = last
            else:
                joined.append([first, last, entry["value"]])
        return joined


def flag_kinds(atlas: Atlas, name: str, flag: dict[str, Any]) -> list[list[Any]]:
    """How each release reads the flag's value: the declared type, corrected by what its parser really does."""
    last_release = len(atlas.releases) - 1
    by_release: dict[int, str] = {}
    for entry in flag["types"]:
        for i in range(atlas.index[entry["from"]], atlas.index[entry["to"]] + 1):
            kind = kind_of(entry["value"])
            if kind == "switch" and name not in PLAIN_SWITCHES:
                since = atlas.index[BOOLEAN_WITH_NO_FROM[flag["scope"]]]
                plain = entry["value"] == "'store_true'"
                kind = "bool" if i >= since and not plain else "switch"
            by_release[i] = kind
    for first, last, kind in EXCEPTIONAL_KINDS.get(name, []):
        stop = atlas.index[last] if last else last_release
        for i in range(atlas.index[first], stop + 1):
            if i in by_release:
                by_release[i] = kind
    runs: list[list[Any]] = []
    for i in sorted(by_release):
        if runs and runs[-1][1] + 1 == i and runs[-1][2] == by_release[i]:
            runs[-1][1] = i
        else:
            runs.append([i, i, by_release[i]])
    return runs


def convert_flags(atlas: Atlas) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    source = atlas.read("flags.json")
    flags: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    choices: dict[str, Any] = {}
    for name, flag in source["flags"].items():
        entry: dict[str, Any] = {"in": [atlas.span(pair) for pair in flag["versions"]]}
        if flag["dest"] != name[2:].replace("-", "_"):
            entry["dest"] = flag["dest"]
        entry["kinds"] = flag_kinds(atlas, name, flag)
        if flag.get("aliases"):
            entry["aliases"] = flag["aliases"]
        if flag.get("marked_deprecated"):
            entry["deprecated"] = [atlas.span(pair) for pair in flag["marked_deprecated"]]
        if flag["scope"] == "frontend":
            entry["server"] = True
        if flag["memory_relevant"]:
            entry["memory"] = True
        flags[name] = entry
        listed = [e for e in flag.get("choices", []) if isinstance(e["value"], list)]
        if listed:
            choices[name] = atlas.ranged(listed)
        defaults[name] = atlas.ranged(flag["defaults"])
    meta = {"source": "vLLM's own argument parsers and config classes, release by release"}
    return {**meta, "flags": flags}, {**meta, "defaults": defaults}, {**meta, "choices": choices}


def convert_env(atlas: Atlas) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, env in atlas.read("env.json")["env"].items():
        entry: dict[str, Any] = {
            "in": [atlas.span(pair) for pair in env["versions"]],
            "defaults": atlas.ranged(READ_DEFAULTS.get(name, env["defaults"])),
        }
        if env.get("type"):
            entry["type"] = env["type"]
        if env["memory_relevant"]:
            entry["memory"] = True
        out[name] = entry
    return {"source": "vLLM's environment variable tables, release by release", "env": out}


def convert_metrics(atlas: Atlas) -> dict[str, Any]:
    source = atlas.read("metrics.json")
    metrics: dict[str, Any] = {}
    for name, metric in source["metrics"].items():
        variants = []
        for variant in metric["variants"]:
            one = {"in": [atlas.span(pair) for pair in variant["versions"]]}
            for key in ("engine", "type", "labels", "exposed"):
                one[key] = variant[key]
            for key in ("deprecated", "condition", "buckets"):
                if variant.get(key):
                    one[key] = variant[key]
            variants.append(one)
        metrics[name] = variants
    labels = atlas.ranged(source["cache_config_info_labels"])
    renames = [{k: v for k, v in entry.items() if k != "note"} for entry in source["renames"]]
    return {
        "source": "vLLM's metric declarations, release by release",
        "metrics": metrics,
        "renames": renames,
        "cache_config_info_labels": labels,
    }


def convert_messages(atlas: Atlas) -> tuple[dict[str, Any], dict[str, Any]]:
    """(core messages, the rest): what a memory diagnosis reads, and what it may skip."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for message in atlas.read("messages.json")["messages"]:
        one: dict[str, Any] = {
            "id": message["id"],
            "level": message["level"],
            "template": message["template"],
            "regex": message["regex"],
            "in": [atlas.span(pair) for pair in message["versions"]],
        }
        fields = [
            {k: field[k] for k in ("expr", "kind", "unit", "optional") if field.get(k)} for field in message["fields"]
        ]
        if fields:
            one["fields"] = fields
        if message["family"]:
            one["family"] = message["family"]
        if message["topics"]:
            one["topics"] = message["topics"]
        parts[0 if message["core"] else 1].append(one)
    meta = {"source": "log and exception texts in vLLM's source, release by release"}
    return {**meta, "messages": parts[0]}, {**meta, "messages": parts[1]}


def write(folder: Path, name: str, data: Any) -> None:
    """One entry a line, so that a new release is a readable diff."""
    lines = ["{"]
    keys = list(data)
    for key in keys:
        value = data[key]
        comma = "," if key != keys[-1] else ""
        if isinstance(value, (dict, list)) and value:
            opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
            lines.append(f"{json.dumps(key)}: {opening}")
            items = value.items() if isinstance(value, dict) else ((None, one) for one in value)
            body = [
                ("" if one_key is None else json.dumps(one_key) + ": ")
                + json.dumps(one, separators=(",", ":"), ensure_ascii=False)
                for one_key, one in items
            ]
            lines.append(",\n".join(body))
            lines.append(closing + comma)
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}{comma}")
    lines.append("}")
    (folder / name).write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert an atlas of vLLM releases into legroom's data files.")
    parser.add_argument("atlas", type=Path, help="folder with versions.json, flags.json, env.json, ...")
    default_out = Path(__file__).parents[1] / "src" / "legroom" / "facts" / "data"
    parser.add_argument("--out", type=Path, default=default_out)
    fixtures = Path(__file__).parents[1] / "tests" / "fixtures"
    parser.add_argument("--messages", type=Path, default=fixtures, help="folder for what the tests hold the catalog to")
    options = parser.parse_args()
    atlas = Atlas(options.atlas)
    releases = {"source": "vLLM releases on PyPI, every post and patch release included", "releases": atlas.releases}
    write(options.out, "releases.json", releases)
    flags, defaults, choices = convert_flags(atlas)
    write(options.out, "flags.json", flags)
    write(options.out, "defaults.json", defaults)
    write(options.out, "choices.json", choices)
    write(options.out, "env.json", convert_env(atlas))
    write(options.out, "metrics.json", convert_metrics(atlas))
    core, others = convert_messages(atlas)
    write(options.messages, "release_messages.json", core)
    write(options.messages, "release_messages_other.json", others)


if __name__ == "__main__":
    main()
