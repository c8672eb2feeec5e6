"""legroom: GPU memory in vLLM serving as a thing you know.

>>> import legroom
>>> answer = legroom.plan("llama-3.1-8b", gpu="h100", max_model_len=32768)
>>> answer.verdict, answer.layout.weights.kind
('fits', 'exact')

`print(answer)` draws the picture, `answer.json()` is the document that `legroom plan --json` prints.
"""

from typing import TYPE_CHECKING, Any

from legroom.version import __version__

if TYPE_CHECKING:
    from legroom.api.diagnosis_report import DiagnosisReport as DiagnosisReport
    from legroom.api.diagnosis_report import diagnose as diagnose
    from legroom.api.plan_report import PlanReport as PlanReport
    from legroom.api.plan_report import layout as layout
    from legroom.api.plan_report import plan as plan
    from legroom.api.simulate_request import simulate as simulate
    from legroom.api.size_report import SizeReport as SizeReport
    from legroom.api.size_report import size as size
    from legroom.api.watch_report import WatchReport as WatchReport
    from legroom.api.watch_report import watch as watch

_MODULE_OF = {
    **dict.fromkeys(("DiagnosisReport", "diagnose"), "diagnosis_report"),
    **dict.fromkeys(("PlanReport", "layout", "plan"), "plan_report"),
    "simulate": "simulate_request",
    **dict.fromkeys(("SizeReport", "size"), "size_report"),
    **dict.fromkeys(("WatchReport", "watch"), "watch_report"),
}

__all__ = ["DiagnosisReport", "PlanReport", "SizeReport", "WatchReport", "__version__"]
__all__ += ["diagnose", "layout", "plan", "simulate", "size", "watch"]


def __getattr__(name: str) -> Any:
    """A public function or class, whose module is imported on first use; AttributeError for any other name."""
    if name in _MODULE_OF:
        from importlib import import_module

        return getattr(import_module(f"legroom.api.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'legroom' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
