"""The release, model and settings of a running server, from its own HTTP API. `/version` and `/v1/models` exist in
every release; `vllm:cache_config_info` has the KV cache's settings; `/server_info` has all settings, in development
mode (VLLM_SERVER_DEV_MODE=1) only."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts.gpus import Gpu
from legroom.facts.releases import Release
from legroom.live.metrics.endpoint import Endpoint, endpoint
from legroom.live.metrics.scrape import TIMEOUT_S, ScrapeFailed, fetch, open_session
from legroom.records import dataclass, field
from legroom.vllm.args import ServeArgs
from legroom.vllm.resolve import resolve, served_model

if TYPE_CHECKING:
    import aiohttp

_CACHE_CONFIG = re.compile(r'^vllm:cache_config_info\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}', re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_CACHE_LABELS = {
    "gpu_memory_utilization": float,
    "cache_dtype": str,
    "kv_cache_memory_bytes": int,
    "num_gpu_blocks_override": int,
    "cpu_offload_gb": float,
}
"""Labels of `vllm:cache_config_info` that are settings."""
_NAMES = {"cache_dtype": "kv_cache_dtype"}
_SERVER_SETTINGS = {
    "scheduler_config": ("max_num_seqs", "max_num_batched_tokens"),
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "enable_expert_parallel",
    ),
    "model_config": ("enforce_eager", "quantization", "dtype"),
}
"""Settings in `/server_info`, by vLLM's own names."""
_SIZES = (*_SERVER_SETTINGS["parallel_config"], "enforce_eager", "quantization")
"""Settings whose default, one of these, does not depend on model and GPU."""
_UNSET = (None, 1, False)


@dataclass(frozen=True)
class RunningServer:
    version: str
    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Resolved values by vLLM's names, defaults included."""
    pool_slots: int | None = None
    """Blocks times block size of one engine."""
    tells_all: bool = False
    """Whether `/server_info` was available."""

    def serve_args(self, gpu: Gpu, release: Release) -> ServeArgs:
        """The server's settings as flags, without defaults of its release, so that another release's defaults apply."""
        values = {name: self.settings.get(name) for name in _SIZES}
        sizes: dict[str, Any] = {name: each for name, each in values.items() if each is True or each not in _UNSET}
        plain = ServeArgs(self.model, **sizes)
        defaults = resolve(plain, served_model(plain), gpu, release)
        known = {"cpu_offload_gb": 0.0, "kv_cache_memory_bytes": None, "num_gpu_blocks_override": None}
        others = ((name, value) for name, value in self.settings.items() if name not in _SIZES)
        given = {name: value for name, value in others if value != known.get(name, getattr(defaults, name, None))}
        return replace(plain, **given)


def running_server(address: str, api_key: str | None = None, *, verify_tls: bool = True) -> RunningServer:
    """Queries a vLLM server over HTTP. Raises LegroomError where it does not answer or is not vLLM."""
    return asyncio.run(_query_server(endpoint(address, api_key, verify_tls=verify_tls)))


async def _query_server(target: Endpoint) -> RunningServer:
    """The server's version, model, settings and KV pool, from four of its endpoints; LegroomError if it is no vLLM."""
    async with open_session() as session:
        version = await _json_at(session, target, "/version")
        models = await _json_at(session, target, "/v1/models")
        metrics = (await fetch(session, target, TIMEOUT_S)).decode("utf-8", "replace")
        try:
            info = await _json_at(session, replace(target, query="config_format=json"), "/server_info")
        except LegroomError:
            info = {}  # not in development mode
    served: Any = next(iter(models.get("data") or ()), {})
    if not isinstance(version.get("version"), str) or not isinstance(served, dict):
        raise LegroomError(f"{target.server} does not answer as vLLM does", "give the address of its API", UNREACHABLE)
    line = _CACHE_CONFIG.search(metrics)
    labels = dict(_LABEL.findall(line[1])) if line else {}
    length = served.get("max_model_len")
    settings = {**dict(_cache_settings(labels)), **dict(_server_settings(info.get("vllm_config")))}
    if isinstance(length, int) and 0 < length < 2**53:
        settings["max_model_len"] = length
    model = str(served.get("root") or served.get("id") or "")
    tokens = _pool_tokens(labels, settings)
    return RunningServer(version["version"], model, settings, tokens, "max_num_seqs" in settings)


async def _json_at(session: aiohttp.ClientSession, target: Endpoint, path: str) -> dict[str, Any]:
    """The JSON object that the server returns for a path; ScrapeFailed for anything else."""
    body = await fetch(session, replace(target, url=target.server + path), TIMEOUT_S)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise ScrapeFailed("not_metrics", f"{target.server}{path} does not answer as vLLM does")
    return document


def _pool_tokens(labels: Mapping[str, str], settings: Mapping[str, Any]) -> int | None:
    """One engine's KV pool in tokens: the labels' blocks x block size / data_parallel_size; None if unknown."""
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isdigit() and size.isdigit()):
        return None
    # The label has the blocks of all data-parallel engines together (0.9+).
    return int(blocks) * int(size) // int(settings.get("data_parallel_size") or 1)


def _cache_settings(labels: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """(name, value) of the settings in the labels of `vllm:cache_config_info`; unreadable values are left out."""
    for name, kind in _CACHE_LABELS.items():
        if labels.get(name, "None") != "None":
            with suppress(ValueError):
                yield _NAMES.get(name, name), kind(labels[name])


def _server_settings(config: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of the known settings in `/server_info`; other shapes are ignored."""
    if not isinstance(config, dict):
        return
    for part, names in _SERVER_SETTINGS.items():
        values: Any = config.get(part)
        for name in names if isinstance(values, dict) else ():
            if (value := values.get(name)) is not None:
                yield name, value.removeprefix("torch.") if isinstance(value, str) else value
