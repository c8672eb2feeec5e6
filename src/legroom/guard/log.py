"""The guard's log on stderr, also inside vLLM, which configures only its own loggers."""

import logging
import sys

LOG = logging.getLogger("legroom.guard")


class _Stderr(logging.Handler):
    """Writes to the current sys.stderr, which servers may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def log_to_stderr() -> None:
    """Add the stderr handler to the guard's logger, unless it has a handler, and enable its INFO messages."""
    LOG.setLevel(logging.INFO)
    LOG.disabled = False  # logging.config disables existing loggers
    if not LOG.handlers:
        handler = _Stderr()
        form = "%(levelname)s %(asctime)s legroom guard: %(message)s"
        handler.setFormatter(logging.Formatter(form, "%m-%d %H:%M:%S"))
        LOG.addHandler(handler)
        LOG.propagate = False


def log_bug(error: BaseException | None) -> None:
    """Log an unexpected exception with its traceback, as a bug of the guard; other requests continue."""
    LOG.error("a request failed inside the guard: %r", error, exc_info=error)
