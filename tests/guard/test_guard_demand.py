"""What a request asks for is read off its body as vLLM reads it, or taken at its worst."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.guard.policy import PoolPolicy
from legroom.guard.request.body import demand_of
from legroom.guard.request.endpoints import GUARDED, Kind, kind_of
from legroom.guard.request.media import image_pixels, media_of
from legroom.guard.request.prompts import MOST_PROMPTS, MOST_WALKED
from legroom.guard.weight.engine_limits import EngineLimits
from legroom.guard.weight.guarded_request import weight_of
from legroom.guard.weight.learnt_tokens import ModelTokens


def completion(**body):
    return demand_of(Kind.COMPLETION, body)


def chat(**body):
    return demand_of(Kind.CHAT, {"messages": [{"role": "user", "content": "hi"}], **body})


def test_token_ids_are_counted_exactly():
    demand = completion(prompt=[1, 2, 3], max_tokens=5)
    assert [prompt.tokens for prompt in demand.prompts] == [3]
    assert demand.prompts[0].exact


def test_a_batch_of_prompts_is_one_prompt_each():
    assert [prompt.tokens for prompt in completion(prompt=[[1], [2, 3]]).prompts] == [1, 2]
    assert [prompt.text_bytes for prompt in completion(prompt=["a", "bcd"]).prompts] == [1, 3]


def test_a_completion_without_max_tokens_gets_sixteen_as_in_vllm():
    assert completion(prompt="x").output_tokens == 16


def test_an_explicit_null_leaves_the_answer_open():
    assert completion(prompt="x", max_tokens=None).output_tokens is None
    assert chat().output_tokens is None


@pytest.mark.parametrize(("older", "newer", "key"), [(5, 9, "max_completion_tokens"), (9, 5, "max_tokens")])
def test_the_larger_of_a_chats_two_lengths_counts_as_releases_differ_in_which_they_read(older, newer, key):
    demand = chat(max_tokens=older, max_completion_tokens=newer)
    assert (demand.output_tokens, demand.output_key) == (9, key)


def test_a_zero_does_not_hide_the_other_key():
    assert chat(max_completion_tokens=0, max_tokens=9).output_tokens == 9
    assert chat(max_completion_tokens=0).output_tokens == 0


def test_each_of_several_prompt_embeddings_is_a_prompt():
    assert len(completion(prompt_embeds=["QUFB"] * 8).prompts) == 8
    assert len(completion(prompt_embeds="QUFB").prompts) == 1


@pytest.mark.parametrize(
    ("written", "read"),
    [("7", 7), ("7.0", 7), (" 7.00 ", 7), (7.0, 7), (-3, 0), ("x", None), ("1.5", None), (1.5, None), ([], None)],
)
def test_numbers_are_read_as_leniently_as_the_server_reads_them(written, read):
    assert chat(max_tokens=written).output_tokens == read


@pytest.mark.parametrize("huge", [10**400, 1e300, "9" * 400])
def test_huge_numbers_stay_numbers_that_can_be_weighed(huge):
    demand = completion(prompt="x", max_tokens=huge, n=huge, logprobs=huge, prompt_logprobs=huge)
    assert float(demand.output_tokens) * demand.sequences > 2**100
    assert demand.logprobs == demand.prompt_logprobs == 1 << 31


@pytest.mark.parametrize("written", [True, "true", 1])
def test_only_a_response_can_go_to_the_background(written):
    assert demand_of(Kind.RESPONSES, {"input": "hi", "background": written}).background
    assert not chat(background=written).background
    assert chat(stream=written).streams


def test_copies_are_the_largest_of_n_and_best_of():
    assert completion(prompt="x", n=2, best_of=5).sequences == 5


def test_minus_one_logprobs_asks_for_the_whole_vocabulary():
    assert completion(prompt="x", logprobs=-1).logprobs >= 1 << 31
    assert chat(logprobs=True, top_logprobs=7).logprobs == 7
    assert completion(prompt="x", prompt_logprobs=3).prompt_logprobs == 3


def test_an_echoed_prompt_comes_with_the_logprobs_of_the_answer():
    assert completion(prompt="x", echo=True, logprobs=5).prompt_logprobs == 5
    assert chat(echo="true", logprobs=True, top_logprobs=7).prompt_logprobs == 7
    assert completion(prompt="x", echo=True, logprobs=5, prompt_logprobs=1).prompt_logprobs == 1
    assert completion(prompt="x", logprobs=5).prompt_logprobs == 0


def test_a_template_of_the_clients_own_may_write_a_prompt_of_any_length():
    assert chat(chat_template="{% for i in range(99999) %}x{% endfor %}").prompts[0].open_ended
    assert not chat(chat_template=None).prompts[0].open_ended


@pytest.mark.parametrize("cut", [{"truncate_prompt_tokens": 8}, {"truncate_prompt_tokens": -1}])
def test_a_prompt_that_the_server_cuts_is_known_as_such(cut):
    assert completion(prompt="x", **cut).is_truncated
    assert not completion(prompt="x", truncate_prompt_tokens=None).is_truncated


def test_more_values_than_any_request_has_are_not_looked_at_one_by_one():
    few, many = [1] * 1000, [1] * (MOST_WALKED + 1)
    assert not chat(messages=[{"role": "user", "content": few}]).prompts[0].open_ended
    assert chat(messages=[{"role": "user", "content": many}]).prompts[0].open_ended
    assert len(completion(prompt=["x"] * (MOST_PROMPTS + 99)).prompts) == MOST_PROMPTS + 1
    assert len(demand_of(Kind.SCORE, {"documents": ["x"] * (MOST_PROMPTS + 99)}).prompts) == MOST_PROMPTS + 1


def test_tools_count_as_prompt():
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 500}}]
    assert chat(tools=tools).prompts[0].text_bytes > chat().prompts[0].text_bytes + 500


def test_the_structure_of_tools_and_their_keys_count_as_they_are_written():
    for parameters in ({"enum": [[]] * 500}, {"properties": {"中" * 300: {}}}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        written = len(json.dumps(tools, ensure_ascii=False).encode())
        assert chat(tools=tools).prompts[0].text_bytes >= written + len("hi")
    assert not chat(tools=tools).prompts[0].ascii_only


def test_keys_of_other_scripts_in_messages_are_measured_in_bytes():
    prompt = chat(messages=[{"role": "user", "content": "hi", "日本": 1}]).prompts[0]
    assert not prompt.ascii_only
    assert prompt.text_bytes >= chat().prompts[0].text_bytes + 6


def test_token_ids_that_are_handed_on_in_place_of_a_chat_are_weighed():
    demand = chat(kv_transfer_params={"prompt_token_ids": [1] * 5000}, max_tokens=1)
    learnt = ModelTokens()
    assert weight_of(demand, EngineLimits(1000, 16), PoolPolicy(), learnt).prompt_tokens == 5000
    assert weight_of(chat(max_tokens=1), EngineLimits(1000, 16), PoolPolicy(), learnt).prompt_tokens < 200
    for odd in (None, [], {"prompt_token_ids": 7}):
        assert chat(kv_transfer_params=odd).prompts == chat().prompts


def test_a_tool_with_a_parameter_called_image_is_no_image():
    tools = [{"type": "function", "function": {"parameters": {"properties": {"image": {"type": "string"}}}}}]
    assert chat(tools=tools).media == ()


def test_other_scripts_are_measured_in_bytes():
    demand = chat(messages=[{"role": "user", "content": "日本"}])
    assert not demand.prompts[0].ascii_only
    assert demand.prompts[0].text_bytes >= 6


def test_an_image_is_media_and_no_text():
    data = base64.b64encode(
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (300).to_bytes(4) + (200).to_bytes(4) + bytes(900)
    ).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    demand = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "what?"}, part]}])
    assert demand.prompts[0].text_bytes < 100
    (image,) = demand.media
    assert (image.kind, image.pixels, image.remote) == ("image", 60_000, False)
    assert image.sent_bytes == pytest.approx(924, abs=3)


@pytest.mark.parametrize("extra", [{"image": "a"}, {"type": "image_url"}, {"image_url": {"url": "http://a/b"}}])
def test_a_message_is_no_image_whatever_else_it_carries(extra):
    demand = chat(messages=[{"role": "user", "content": "x" * 1000, **extra}])
    assert demand.media == ()
    assert demand.prompts[0].text_bytes >= 1000


def test_text_beside_an_image_counts_and_the_image_does_not():
    part = {"type": "image_url", "image_url": {"url": "data:," + "y" * 5000, "note": "n" * 300}, "text": "x" * 1000}
    demand = chat(messages=[{"role": "user", "content": [part]}])
    assert len(demand.media) == 1
    assert 1300 <= demand.prompts[0].text_bytes < 1500
    embeds = {"type": "image_embeds", "image_embeds": {"image_embeds": "A" * 5000, "image_grid_thw": "B" * 500}}
    assert chat(messages=[{"role": "user", "content": [embeds]}]).prompts[0].text_bytes < 100


def test_a_part_with_a_uuid_is_what_its_key_says_whatever_its_type():
    part = {"type": "text", "uuid": "u1", "image_url": {"url": "http://a/b"}}
    assert [media.kind for media in chat(messages=[{"role": "user", "content": [part]}]).media] == ["image"]
    assert chat(messages=[{"role": "user", "content": [part | {"uuid": None}]}]).media == ()


def test_embeddings_of_a_video_are_media():
    assert media_of({"type": "video_embeds", "video_embeds": {"a": "QUFB"}}).kind == "video"


def test_an_address_is_remote_media():
    assert media_of({"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}).remote


@pytest.mark.parametrize(
    ("head", "pixels"),
    [
        (b"GIF89a" + (7).to_bytes(2, "little") + (3).to_bytes(2, "little") + bytes(4), 21),
        (b"BM" + bytes(16) + (7).to_bytes(4, "little") + (-3).to_bytes(4, "little", signed=True), 21),
        (b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + (6).to_bytes(3, "little") + (2).to_bytes(3, "little"), 21),
        (b"\xff\xd8\xff\xe0\0\x04\0\0\xff\xc0\0\x11\x08" + (3).to_bytes(2) + (7).to_bytes(2) + bytes(9), 21),
        (b"nothing of the kind", None),
        (b"", None),
    ],
)
def test_the_pixels_of_an_image_are_read_off_its_head(head, pixels):
    assert image_pixels(head) == pixels


FRAME = b"\xff\xc0\0\x11\x08" + (3).to_bytes(2) + (7).to_bytes(2) + bytes(9)


@pytest.mark.parametrize(
    ("before", "pixels"),
    [
        ((b"\xff\xe1\xff\xff" + bytes(65_533)) * 2, 21),
        ((b"\xff\xe1\xff\xff" + bytes(65_533)) * 40, 21),
        (b"stray bytes" + b"\xff\0", 21),
        (b"\xff\xe1\0\x02" * 5000, 65_535**2),
    ],
)
def test_metadata_does_not_hide_the_size_of_a_jpeg(before, pixels):
    data = base64.b64encode(b"\xff\xd8" + before + FRAME).decode()
    assert media_of({"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + data}}).pixels == pixels


@given(st.binary(max_size=64))
def test_any_bytes_have_pixels_or_none(data):
    for start in (b"", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBPVP8L", b"\x89PNG\r\n\x1a\n"):
        assert image_pixels(start + data) is None or image_pixels(start + data) >= 0


def test_an_earlier_response_makes_a_prompt_open_ended():
    demand = demand_of(Kind.RESPONSES, {"input": "hi", "previous_response_id": "r1", "max_output_tokens": 9})
    assert demand.prompts[0].open_ended
    assert demand.output_tokens == 9


def test_scores_pair_every_document_with_the_query():
    demand = demand_of(Kind.SCORE, {"query": "q" * 10, "documents": ["d" * 5, "e" * 7]})
    assert [prompt.text_bytes for prompt in demand.prompts] == [15, 17]
    assert not demand.generates


def test_token_ids_of_a_score_are_counted():
    demand = demand_of(Kind.SCORE, {"query": [1] * 50, "items": [[2] * 5, [3] * 7]})
    assert [(prompt.tokens, prompt.exact) for prompt in demand.prompts] == [(55, True), (57, True)]
    mixed = demand_of(Kind.SCORE, {"query": "q", "items": [[2] * 5]})
    assert [prompt.open_ended for prompt in mixed.prompts] == [True]


def test_an_instruction_stands_before_each_pair_of_a_score():
    plain, told = ({"query": "q", "documents": ["d", "e"], **more} for more in ({}, {"instruction": "i" * 500}))
    for short, long in zip(demand_of(Kind.SCORE, plain).prompts, demand_of(Kind.SCORE, told).prompts, strict=True):
        assert long.text_bytes >= short.text_bytes + 500


def test_images_and_mixed_inputs_of_an_embedding_are_media():
    image = "data:image/png;base64," + "A" * 5000
    demand = demand_of(Kind.POOLING, {"images": [image] * 3})
    assert (len(demand.prompts), [media.kind for media in demand.media]) == (3, ["image"] * 3)
    content = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": image}}]
    demand = demand_of(Kind.POOLING, {"inputs": [{"content": content}]})
    assert (len(demand.media), demand.prompts[0].text_bytes < 100) == (1, True)


def test_what_a_plugin_makes_of_its_data_may_be_of_any_length():
    assert [prompt.open_ended for prompt in demand_of(Kind.POOLING, {"data": {"a": 1}}).prompts] == [True]


def test_each_question_of_a_decision_is_a_prompt_with_the_state():
    body = {"state": {"a": "s" * 100}, "questions": {"q1": {"text": "x" * 10}, "q2": {}}, "images": ["http://a/b", 7]}
    demand = demand_of(Kind.DECISION, body)
    assert [prompt.text_bytes > 100 for prompt in demand.prompts] == [True, True]
    assert [media.kind for media in demand.media] == ["image"]
    assert not demand.generates


def test_an_invocation_is_told_by_its_keys():
    assert demand_of(Kind.ANY, {"messages": []}).kind is Kind.CHAT
    assert demand_of(Kind.ANY, {"prompt": "x"}).kind is Kind.COMPLETION
    assert demand_of(Kind.ANY, {"messages": None, "prompt": "x"}).kind is Kind.COMPLETION
    assert demand_of(Kind.ANY, {"messages": None, "prompt": None, "input": "x"}).kind is Kind.POOLING
    assert demand_of(Kind.ANY, {"data": "x"}).kind is Kind.POOLING
    assert demand_of(Kind.ANY, {"query": "x", "documents": ["y"]}).kind is Kind.SCORE


def test_a_null_beside_the_prompt_does_not_hide_it():
    for body in ({"messages": None, "input": "x" * 50}, {"input": None, "texts": ["x" * 50]}):
        assert [prompt.text_bytes for prompt in demand_of(Kind.POOLING, body).prompts] == [50]


def test_paths_are_read_as_a_lenient_server_routes_them():
    assert kind_of("POST", "/v1/completions") is Kind.COMPLETION
    assert kind_of("POST", "//v1/completions/") is Kind.COMPLETION
    assert kind_of("POST", "/x/../v1/./completions") is Kind.COMPLETION
    assert kind_of("POST", "/api/v1/completions", "/api") is Kind.COMPLETION
    assert kind_of("POST", "/v1/systemone") is Kind.DECISION
    for path in ("/v1/messages/render", "/v1/responses/render", "/cohere/v2/chat/render", "/v1/completions/derender"):
        assert kind_of("POST", path) is Kind.TEXT
    assert kind_of("GET", "/v1/completions") is None
    assert all(kind_of("POST", path) is None for path in ("/health", "/metrics", "/version", "/v1/models", "/docs"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        "prompt",
        "messages",
        "input",
        "max_tokens",
        "n",
        "best_of",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "token_ids",
        "sampling_params",
        "documents",
        "query",
        "tools",
        "model",
        "stream",
        "image_url",
        "type",
        "state",
        "questions",
        "images",
        "kv_transfer_params",
        "prompt_embeds",
        "items",
        "inputs",
        "data",
        "echo",
        "uuid",
    ]
)


@given(st.sampled_from(sorted(set(GUARDED.values()), key=str)), st.dictionaries(KEYS, JSON, max_size=6))
def test_any_body_is_read_without_an_error(kind, body):
    demand = demand_of(kind, body)
    assert demand.sequences >= 1
    assert demand.output_tokens is None or demand.output_tokens >= 0
    assert all(prompt.tokens >= 0 and prompt.text_bytes >= 0 for prompt in demand.prompts)
