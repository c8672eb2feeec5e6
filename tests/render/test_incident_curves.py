"""The curves of an incident stand on an even line of time, so that its marks stand where they belong."""

from legroom.live.journal.sample_store import JournalPoint
from legroom.render.incident_text import incident_curves


def point(time_s: float, running: float = 1.0, span_s: int = 0) -> JournalPoint:
    return JournalPoint(time_s, span_s, running=running, running_max=running)


def running(*points: JournalPoint) -> list[float]:
    return next(list(curve.values) for curve in incident_curves(points) if curve.name == "running")


def test_looks_at_an_even_pace_are_drawn_as_they_are():
    assert running(*(point(5.0 * n, n) for n in range(6))) == [0, 1, 2, 3, 4, 5]


def test_an_outage_takes_its_time_in_the_drawing():
    before, after = [point(5.0 * n) for n in range(4)], [point(100.0 + 5.0 * n) for n in range(4)]
    drawn = running(*before, *after)
    assert len(drawn) == 24
    assert drawn[:5] == [1.0] * 5 and drawn[-4:] == [1.0] * 4 and not any(drawn[5:-4])


def test_one_lost_look_leaves_no_hole():
    assert running(*(point(5.0 * n) for n in range(9) if n != 4)) == [1.0] * 9


def test_what_was_made_one_point_lasts_as_long_as_it_stands_for():
    minutes = [point(60.0 * n, 2.0, 60) for n in range(2)]
    assert running(*minutes, *(point(120.0 + 5.0 * n) for n in range(12))) == [2.0] * 24 + [1.0] * 12


def test_a_year_of_looks_is_no_wider_than_the_drawing():
    assert len(running(point(0.0), point(5.0), point(10.0), point(3e7))) <= 561
