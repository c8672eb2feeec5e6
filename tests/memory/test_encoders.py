"""Models that keep no KV cache."""

import legroom


def test_an_encoder_gets_no_pool_and_the_card_stays_free():
    answer = legroom.plan("bge-m3", gpu="t4", vllm="0.32.0", advice=False)
    assert answer.layout.kv_cache.bytes == 0
    assert answer.layout.headroom_bytes > answer.layout.total_bytes // 2
    assert answer.verdict == "fits"
    assert "keeps no KV cache" in str(answer)
