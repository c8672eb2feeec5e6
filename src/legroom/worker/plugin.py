"""The entry point of the group `vllm.general_plugins` (0.5.5 on): called in the API server, the engine and the workers.
It runs wherever legroom is installed beside vLLM, so it imports little and never raises."""

import os

SWITCH = "LEGROOM_WORKER_MEMORY"


def register() -> None:
    """Start the telemetry of this process if `LEGROOM_WORKER_MEMORY` is 1, true, yes or on."""
    if os.environ.get(SWITCH, "").strip().lower() not in {"1", "true", "yes", "on"}:
        return
    try:
        from legroom.worker import telemetry  # imported only where it is switched on

        telemetry.start()
    except Exception as error:
        import logging

        logging.getLogger("legroom.worker").warning("memory of the workers is not reported: %r", error)
