"""A progress bar on stderr, for people only."""

from __future__ import annotations

import sys
import time

_SECONDS_BETWEEN, _PATIENCE_S, _WIDTH = 0.2, 1.0, 30


class ProgressBar:
    """Draws nothing unless a person is watching and the wait is longer than a moment."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.began = self.drawn_at = time.monotonic()
        self.is_drawn = False

    def __call__(self, share: float) -> None:
        """`share` of the work is done."""
        now = time.monotonic()
        if not sys.stderr.isatty() or now - self.began < _PATIENCE_S or now - self.drawn_at < _SECONDS_BETWEEN:
            return
        self.drawn_at, self.is_drawn = now, True
        full = round(share * _WIDTH)
        left = (now - self.began) * (1 - share) / share if share > 0 else 0
        sys.stderr.write(f"\r{self.what} [{'#' * full}{'.' * (_WIDTH - full)}] {share:4.0%} {left:4.0f} s left ")
        sys.stderr.flush()

    def clear(self) -> None:
        """Leave no trace."""
        if self.is_drawn:
            sys.stderr.write("\r" + " " * 79 + "\r")
            sys.stderr.flush()
