"""Thresholds: one home, set from a file by name, with mistakes said."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from legroom.errors import LegroomError
from legroom.live import thresholds
from legroom.live.thresholds import DEFAULT, Hold, Thresholds
from legroom.sidecar.watch_config import thresholds_of
from legroom.toml_tables import KeyLines, TomlTable


def set_to(settings: dict[str, object]) -> Thresholds:
    return thresholds_of(TomlTable(settings, (), Path("watch.toml"), KeyLines("")))


def test_a_threshold_is_set_by_its_name() -> None:
    changed = set_to({"pool_full_ratio": 0.9, "hold": {"seconds": 30}, "crash_restarts": 5})
    assert (changed.pool_full_ratio, changed.hold, changed.crash_restarts) == (0.9, Hold(3, 30), 5)


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_ful": 0.9},
        {"pool_full_ratio": "high"},
        {"pool_full_ratio": 95},
        {"hold": 3},
        {"queue_wait_s": -1},
        {"hold": {"minutes": 1}},
        {"queue_wait_s": True},
        {"queue_wait_s": float("inf")},
        {"crash_restarts": 0},
        {"switch_least": 0},
        {"crash_restarts": 2.5},
        {"hold": {"samples": 0}},
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object]) -> None:
    with pytest.raises(LegroomError, match=next(iter(settings))):
        set_to(settings)


def test_calm_lies_below_alarm() -> None:
    assert DEFAULT.pool_calm_ratio < DEFAULT.pool_full_ratio


def test_every_level_that_is_no_calm_twin_or_alert_time_has_its_reason_beside_it() -> None:
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(thresholds)).body
        if isinstance(node, ast.ClassDef) and node.name == "Thresholds"
    )
    bare = []
    for number, node in enumerate(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            after = body[number + 1] if number + 1 < len(body) else None
            if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                bare.append(node.target.id)
    assert [name for name in bare if not ("calm" in name or name.startswith("alert") or name.endswith("over_s"))] == [
        "crash_restarts"
    ]


def test_a_path_of_a_user_who_is_not_there_is_taken_as_it_is() -> None:
    table = TomlTable({"journal": "~nobody-of-this-name/j.db"}, (), Path("/etc/watch.toml"), KeyLines(""))
    assert table.path("journal") == Path("/etc/~nobody-of-this-name/j.db")
