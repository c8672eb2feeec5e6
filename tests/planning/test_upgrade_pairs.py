"""The same server on two releases, as it was published."""

from upgrade_pairs import summary


def test_published_upgrades_change_the_kv_cache_as_they_did_and_lie_in_their_bands():
    found = summary()
    assert found["not_planned"] == []
    assert all(found["directions"]) and len(found["directions"]) >= 16
    assert sum(found["figures"]) >= 0.9 * len(found["figures"])
    assert all(found["ends"])
