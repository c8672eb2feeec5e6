"""Alerts that fall silent on another release."""

from legroom.exports.prometheus.alerts import silenced_alerts
from legroom.facts.releases import release


def test_an_alert_falls_silent_where_every_series_of_its_measure_is_gone():
    gone = {"vllm:time_per_output_token_seconds"}
    assert silenced_alerts(release("0.10.0"), gone) == ("VllmInterTokenLatencyHigh",)


def test_an_alert_that_has_another_series_to_read_goes_on():
    assert silenced_alerts(release("0.10.0"), {"vllm:gpu_cache_usage_perc"}) == ()


def test_nothing_falls_silent_where_nothing_vanishes():
    assert silenced_alerts(release("0.20.0"), set()) == ()
