"""legroom: GPU memory in vLLM serving as a thing you know.

>>> import legroom
>>> answer = legroom.plan("llama-3.1-8b", gpu="h100", max_model_len=32768)
>>> answer.verdict, answer.layout.weights.kind
('fits', 'exact')

`print(answer)` draws the picture, `answer.json()` is the document that `legroom plan --json` prints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from legroom.version import __version__

if TYPE_CHECKING:
    from legroom.api import DiagnosisReport as DiagnosisReport
    from legroom.api import PlanReport as PlanReport
    from legroom.api import SizeReport as SizeReport
    from legroom.api import WatchReport as WatchReport
    from legroom.api import diagnose as diagnose
    from legroom.api import layout as layout
    from legroom.api import plan as plan
    from legroom.api import simulate as simulate
    from legroom.api import size as size
    from legroom.api import watch as watch

_PUBLIC = (
    "DiagnosisReport",
    "PlanReport",
    "SizeReport",
    "WatchReport",
    "diagnose",
    "layout",
    "plan",
    "simulate",
    "size",
    "watch",
)

__all__ = [
    "DiagnosisReport",
    "PlanReport",
    "SizeReport",
    "WatchReport",
    "__version__",
    "diagnose",
    "layout",
    "plan",
    "simulate",
    "size",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Import the API only when it is used: the command line should not pay for it."""
    if name in _PUBLIC:
        from legroom import api

        return getattr(api, name)
    raise AttributeError(f"module 'legroom' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
