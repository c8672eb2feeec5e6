"""A plan's command can be pasted, and shows no secret."""

from __future__ import annotations

from dataclasses import replace

from legroom.planning.plan import plan, ready_command
from legroom.vllm.args import ServeArgs


def test_a_bundled_short_name_becomes_the_id_on_the_hub(target):
    made = plan(target(card="h100"), ServeArgs(model="llama-3.1-8b", max_model_len=8192))
    assert ready_command(made)[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]


def test_keys_and_tokens_are_never_shown(target):
    made = plan(target(card="h100"), ServeArgs(model="llama-3.1-8b", max_model_len=8192))
    given = ("--api-key", "sk-1", "sk-2", "--hf-token=hf-3", "--seed", "7")
    words = ready_command(replace(made, args=replace(made.args, others=given)))
    assert words[-6:] == ["--api-key", "YOUR_API_KEY", "YOUR_API_KEY", "--hf-token=YOUR_HF_TOKEN", "--seed", "7"]
