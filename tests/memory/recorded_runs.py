"""legroom's own recordings of vLLM 0.26 on an H200, as models and settings; the file's first line says how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from legroom.facts.config.model_config import model_from_config
from legroom.facts.gpus import Gpu, gpu, with_total
from legroom.facts.model import Model
from legroom.facts.releases import release
from legroom.vllm.args import EngineSettings, ServeArgs
from legroom.vllm.resolve import resolve

RECORDED = Path(__file__).parent.parent / "fixtures/h200_0.26.jsonl"
H200: Gpu = with_total(gpu("NVIDIA H200"), 150109880320)


@dataclass(frozen=True)
class Recorded:
    id: str
    model: Model
    settings: EngineSettings
    compile: str
    seen: dict[str, Any]


def settle(model: Model, version: str = "0.26.0", card: Gpu = H200, **flags: Any) -> EngineSettings:
    """The settings of a model under some flags."""
    return resolve(ServeArgs(model=model.name, usage="serve", **flags), model, card, release(version))


@cache
def models() -> dict[str, Model]:
    lines = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    return {line["name"]: model_from_config(line["config"], line["name"]) for line in lines if line["kind"] == "model"}


@cache
def recorded() -> tuple[Recorded, ...]:
    found = []
    for line in map(json.loads, RECORDED.read_text().splitlines()):
        if line["kind"] != "run":
            continue
        model = models()[line["model"]]
        settings = settle(model, env=line.get("env", {}), **line["args"])
        if settings.runner == line["runner"]:
            found.append(Recorded(line["id"], model, settings, line["compile"], line))
    return tuple(found)
