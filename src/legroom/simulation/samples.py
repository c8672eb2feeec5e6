"""The state over time in a bounded number of points, however long the replay."""

from __future__ import annotations

from legroom.simulation.timeline import Sample

_MOST_POINTS = 2048


class Sampler:
    """Keeps the worst of every stretch of steps; when the points run out, stretches double."""

    def __init__(self) -> None:
        self._width = 1
        self._points: dict[int, tuple[int, int, int]] = {}

    def add(self, step: int, steps: int, used: int, running: int, waiting: int) -> None:
        """The pool looked like this at the end of each of `steps` steps from `step` on."""
        for stretch in range(step // self._width, (step + steps - 1) // self._width + 1):
            old = self._points.get(stretch, (0, 0, 0))
            self._points[stretch] = (max(old[0], used), max(old[1], running), max(old[2], waiting))
        while len(self._points) > _MOST_POINTS:
            self._double()

    def _double(self) -> None:
        self._width *= 2
        merged: dict[int, tuple[int, int, int]] = {}
        for stretch, point in self._points.items():
            old = merged.get(stretch // 2, (0, 0, 0))
            merged[stretch // 2] = (max(old[0], point[0]), max(old[1], point[1]), max(old[2], point[2]))
        self._points = merged

    def samples(self) -> list[Sample]:
        """The points in order of time."""
        return [Sample(stretch * self._width, *point) for stretch, point in sorted(self._points.items())]
