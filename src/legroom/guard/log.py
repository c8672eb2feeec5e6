"""The guard's log: sentences on stderr, also inside vLLM, which sets up its own loggers only."""

from __future__ import annotations

import logging
import sys

LOG = logging.getLogger("legroom.guard")


class _Stderr(logging.Handler):
    """Writes to whatever stderr is at the moment: servers put another in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Give the log a handler: without one our sentences would be lost inside vLLM."""
    LOG.setLevel(logging.INFO)
    LOG.disabled = False  # libraries that configure logging switch off the loggers they find
    if not LOG.handlers:
        handler = _Stderr()
        form = "%(levelname)s %(asctime)s legroom guard: %(message)s"
        handler.setFormatter(logging.Formatter(form, "%m-%d %H:%M:%S"))
        LOG.addHandler(handler)
        LOG.propagate = False


def log_bug(error: BaseException | None) -> None:
    """Something escaped: say so, and go on with the other requests."""
    LOG.error("a request failed inside the guard: %r", error, exc_info=error)
