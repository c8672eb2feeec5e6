"""The entry point of the group `vllm.general_plugins` (0.5.5 on): called in the API server, the engine and the workers.

Everybody who installs legroom beside vLLM has this called, so it is light and never the reason why a server fails.
"""

from __future__ import annotations

import os

SWITCH = "LEGROOM_WORKER_MEMORY"


def register() -> None:
    """Report this process's memory if it is a worker's, where the environment asks for it."""
    if os.environ.get(SWITCH, "").strip().lower() not in {"1", "true", "yes", "on"}:
        return
    try:
        from legroom.worker import telemetry  # most servers never ask

        telemetry.join()
    except Exception as error:
        import logging

        logging.getLogger("legroom.worker").warning("memory of the workers is not reported: %r", error)
