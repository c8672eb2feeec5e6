"""`legroom size` and `legroom plan --want-...` from the outside."""

import json
import re

import pytest

from legroom.cli.main import main
from legroom.planning.search_space import counts_up_to


def answer(capsys, *words, code=0):
    assert main([words[0], "--json", *words[1:]]) == code
    return json.loads(capsys.readouterr().out)


def test_counts_are_powers_of_two_and_the_limit():
    assert counts_up_to(1) == (1,)
    assert counts_up_to(4) == (1, 2, 4)
    assert counts_up_to(6) == (1, 2, 4, 6)


def test_a_wish_is_granted_by_the_command_it_prints(capsys):
    words = ("plan", "llama-3.1-8b", "--gpu", "l4", "--want-context", "8k", "--want-concurrency", "4")
    found = answer(capsys, *words)
    assert found["kv"]["max_concurrency"] >= 4
    assert found["search"]["considered"] > 1000
    again = answer(capsys, "plan", "--gpu", "l4", "--", *found["command"])
    assert again["layout"] == found["layout"]
    assert again["kv"]["max_concurrency"] == found["kv"]["max_concurrency"]


def test_fewer_gpus_come_first(capsys):
    words = ("plan", "llama-3.1-8b", "--gpu", "h100", "--gpus", "4", "--want-context", "8k", "--want-concurrency", "8")
    assert answer(capsys, *words)["gpu"]["count"] == 1


def test_flags_that_are_given_are_kept(capsys):
    words = ("plan", "llama-3.1-8b", "--gpu", "l4", "--max-num-seqs", "16", "--want-context", "8k")
    assert answer(capsys, *words)["args"]["max_num_seqs"] == 16


def test_a_wish_that_nothing_grants_is_code_1_and_says_what_is_short(capsys):
    words = ("plan", "llama-3.1-70b", "--gpu", "l4", "--gpus", "1", "--quantization", "fp8", "--want-context", "8k")
    found = answer(capsys, *words, code=1)
    assert found["verdict"] == "does_not_fit"
    assert found["search"]["short_by"]


def test_policies_differ_in_what_they_keep(capsys):
    words = ("plan", "llama-3.1-8b", "--gpu", "h100", "--want-context", "32k", "--want-concurrency", "8", "--policy")
    assert {policy: answer(capsys, *words, policy)["search"]["policy"] for policy in ("safe", "tight")} == {
        "safe": "safe",
        "tight": "tight",
    }


def test_the_answer_to_a_wish_reads_well(capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--want-context", "8k", "--want-concurrency", "8"]) == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert said.startswith("✓ meta-llama/Llama-3.1-8B on 1 x NVIDIA H100 80GB HBM3 holds 8 requests of 8,192 tokens.")
    assert "$ vllm serve" in out


def test_size_gives_a_row_a_gpu_with_a_command_that_holds(capsys):
    table = answer(capsys, "size", "llama-3.1-8b", "--context", "4k", "--concurrency", "8", "--gpu", "h100,t4")
    assert {row["gpu"] for row in table["rows"]} == {"NVIDIA H100 80GB HBM3", "Tesla T4"}
    for row in table["rows"]:
        assert row["count"] >= 1
        assert row["max_concurrency"] >= 8
        again = answer(capsys, "plan", "--gpu", row["gpu"], "--", *row["command"])
        assert again["layout"] == row["layout"]


def test_a_quantized_checkpoint_that_needs_fewer_gpus_has_a_row_of_its_own(capsys):
    rows = answer(capsys, "size", "qwen3-32b", "--gpu", "l40s")["rows"]
    assert [(row["count"], row["model"], bool(row["gives_up"])) for row in rows] == [
        (1, "Qwen/Qwen3-32B-FP8", True),
        (2, "Qwen/Qwen3-32B", False),
    ]
    assert all(row["tokens_per_s"]["low"] < row["tokens_per_s"]["high"] for row in rows)


def test_size_ends_in_commands_that_are_not_tight_one_of_them_with_the_model_as_it_is(capsys):
    assert main(["size", "qwen3-32b", "--gpu", "l4,rtx-a6000", "--max-num-seqs", "256"]) == 0
    out = capsys.readouterr().out
    assert "1 x NVIDIA L4 in 4 bits* tight" in out
    assert "1 x NVIDIA L4 in 4 bits: tight: " in out
    commands = [line.strip() for line in out.splitlines() if line.startswith("  $ ")]
    assert [command.split()[3] for command in commands] == ["Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B"]


def test_where_every_row_is_tight_size_ends_in_the_command_of_the_first(capsys):
    words = ("--context", "8k", "--concurrency", "1", "--gpus", "1", "--max-num-seqs", "256")
    assert main(["size", "qwen3-32b", "--gpu", "l4", *words]) == 0
    out = capsys.readouterr().out
    assert "one user, tok/s" in out
    command = out.split("  1 x NVIDIA L4 in 4 bits* tight\n")[1]
    assert command.split()[:4] == ["$", "vllm", "serve", "Qwen/Qwen3-32B-AWQ"]
    assert "1 x NVIDIA L4, Qwen/Qwen3-32B itself: " in out


def test_what_size_says_is_short_is_what_the_smallest_checkpoint_lacks(capsys):
    words = ("--gpu", "4090", "--context", "16k", "--concurrency", "8", "--gpus", "1")
    (row,) = answer(capsys, "size", "qwen3-32b", *words, code=1)["rows"]
    (awq,) = answer(capsys, "size", "Qwen/Qwen3-32B-AWQ", *words, code=1)["rows"]
    assert row["short_bytes"] <= awq["short_bytes"] < 20 * 2**30


def test_a_wish_that_only_later_starts_hold_says_so_first(capsys):
    model = ("plan", "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8", "--gpu", "rtx4090", "--max-model-len", "8192")
    planned = answer(capsys, *model)
    users = int(planned["kv"]["max_concurrency"])
    assert planned["first_start"]["max_concurrency"] < users
    assert main([*model, "--want-context", "8k", "--want-concurrency", str(users)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"holds {users} requests of 8,192 tokens after the first start; the first start holds" in said


def test_a_second_card_is_the_first_thing_that_a_wish_gives_up(capsys):
    words = ("plan", "qwen3-32b-awq", "--gpu", "4090", "--want-context", "16k", "--want-concurrency", "8")
    words += ("--max-num-seqs", "16", "--max-num-batched-tokens", "2048", "--enforce-eager")
    found = answer(capsys, *words, code=1)
    assert found["search"]["gives_up"][0] == "2 cards instead of 1"
    assert main([*words]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("! 1 x NVIDIA GeForce RTX 4090 does not hold 8 requests")
    assert "; 2 x NVIDIA GeForce RTX 4090 do, with Qwen/Qwen3-32B-AWQ" in said
    assert said.index("One card is not enough: ") < said.index("$ vllm serve")
    assert "cards" not in str(answer(capsys, *words, "--gpus", "2")["search"]["gives_up"])


def test_a_wish_that_one_card_does_not_grant_names_the_cards_that_do_and_what_fits(capsys):
    words = ["plan", "qwen3-32b", "--gpu", "4090", "--gpus", "1", "--want-context", "16k", "--want-concurrency", "8"]
    assert main(words) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "--gpus 2 holds it" in said
    assert "legroom models --gpu 4090 --context 16384 --concurrency 8" in said


def test_the_command_of_a_tight_plan_has_its_first_remedy(capsys):
    words = ("qwen3-32b-awq", "--gpu", "4090", "--max-model-len", "16384", "--kv-cache-dtype", "fp8", "--enforce-eager")
    first = answer(capsys, "plan", *words)["advice"][0]["flags"]
    assert main(["plan", *words]) == 0
    command = capsys.readouterr().out.partition("$ vllm serve")[2].split()
    assert command[command.index("--max-model-len") + 1] == str(first["max_model_len"]) != "16384"


def test_the_text_of_a_plan_has_its_speed_and_price(capsys):
    from legroom.web.endpoints import answer as page_answer

    assert main(["plan", "llama-3.1-8b", "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    speed = page_answer("speed", {"model": "llama-3.1-8b", "gpu": "h100"})
    assert f"tokens/s     {speed['one_user_tokens_per_s']['estimate']:.0f} (" in out
    assert f"${speed['usd_per_hour']:.2f} an hour, list price of {speed['price_date']}" in out


def test_size_takes_vllm_flags(capsys):
    words = ("size", "llama-3.1-8b", "--gpu", "h100", "--kv-cache-dtype", "fp8")
    assert "fp8" in answer(capsys, *words)["rows"][0]["command"]


def test_size_is_code_1_where_nothing_holds_it(capsys):
    table = answer(capsys, "size", "llama-3.1-70b", "--gpu", "t4", "--gpus", "1", code=1)
    assert table["rows"][0]["count"] == 0
    assert table["rows"][0]["command"] is None


@pytest.mark.parametrize("matrix", [(), ("--matrix",)])
def test_size_prints_a_table(capsys, matrix):
    words = ["size", "llama-3.1-8b", "qwen3-8b", "--gpu", "h100,l4", "--context", "4k", *matrix]
    assert main(words) == 0
    out = capsys.readouterr().out
    for word in ("Llama-3.1-8B", "Qwen3-8B", "NVIDIA H100 80GB HBM3", "NVIDIA L4"):
        assert word in out


def test_a_wish_for_no_tokens_is_a_wrong_call(capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu", "l4", "--want-context", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("size llama-3.1-8b --context long", "32k (32,768)"),
        ("size gpt-oss-120b --context 32g", "32k (32,768)"),
        ("size qwen3-32b --contxt 32k", "instead of --contxt: --context"),
        ("size qwen3-32b --max-modle-len 4096", "instead of --max-modle-len: --max-model-len"),
        ("size qwen3-32b --kv-cache-dtype fp9", "instead of fp9: fp8"),
    ],
)
def test_a_misspelt_word_is_told_how_to_write_it(words, says, capsys):
    assert main(words.split()) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_context_above_the_limit_of_the_model_is_said_once(capsys):
    assert main(["size", "gpt-oss-120b", "--context", "1m", "--gpu", "h100,l4"]) == 1
    out = capsys.readouterr().out
    assert out.count("above the 131072 tokens") == 1
    assert "L4" not in out


def test_a_wish_beyond_what_the_model_takes_says_so(capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--want-context", "999999k"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "1,023,998,976 tokens" in said
    assert "131072" in said.replace(",", "")


def test_a_wish_holds_on_the_first_start_too(capsys):
    words = ("plan", "llama-3.1-70b", "--gpu", "a100-40gb", "--gpus", "2", "--want-context", "8k")
    found = answer(capsys, *words, "--want-concurrency", "4")
    cold = answer(capsys, "plan", "--gpu", "a100-40gb", "--cold", "--", *found["command"])
    assert cold["kv"]["max_concurrency"] >= 4


def test_a_checkpoint_that_fits_with_ease_comes_before_one_that_is_squeezed_in(capsys):
    words = ("plan", "llama-3.1-70b", "--gpu", "a100-40gb", "--gpus", "2", "--want-context", "8k")
    found = answer(capsys, *words, "--want-concurrency", "4")
    assert found["layout"]["headroom_bytes"] > 0.025 * found["gpu"]["total_bytes"]


def test_a_host_limit_that_is_too_small_is_a_failure_of_its_own(capsys):
    found = answer(capsys, "plan", "llama-3.1-8b", "--gpu", "h100", "--host-memory", "2GiB", code=1)
    assert found["failure"]["id"] == "host_ram_oom"
    assert found["host"]["given_bytes"] == 2 * 2**30


def test_a_container_line_gives_the_host_limit(capsys):
    line = "docker run --gpus 1 -m 2g vllm/vllm-openai:v0.26.0 --model meta-llama/Llama-3.1-8B-Instruct"
    found = answer(capsys, "plan", "--gpu", "h100", "--command", line, code=1)
    assert found["host"]["given_bytes"] == 2 * 2**30


def test_advice_is_spoken_of_only_where_it_was_looked_for(capsys):
    assert main(["plan", "llama-3.1-70b", "--gpu", "h100", "--no-advice"]) == 1
    assert "No change of flags" not in capsys.readouterr().out


def test_several_users_are_told_what_context_they_get(capsys):
    found = answer(capsys, "plan", "llama-3.1-8b", "--gpu", "h100")
    shares = {int(users): tokens for users, tokens in found["kv"]["context_by_users"].items()}
    assert shares
    for users, tokens in shares.items():
        assert users * tokens <= found["kv"]["tokens"]


def test_a_wish_in_the_words_of_another_command_is_answered_by_the_option_of_this_one(capsys):
    assert (
        main(["upgrade", "0.19.0", "0.32.0", "--gpu", "h100", "--", "vllm", "serve", "qwen3-8b", "--users", "4"]) == 2
    )
    assert "plan, size and models have --users" in capsys.readouterr().err


def test_the_limit_of_a_longrope_model_is_its_full_length(capsys):
    assert main(["plan", "phi-4-mini", "--gpu", "h100", "--max-model-len", "16384", "--no-advice"]) == 0
    assert "131,072 tokens" in capsys.readouterr().out


def test_rows_above_the_budget_are_left_out_and_none_within_it_is_a_no(capsys):
    words = ("size", "qwen3-8b", "--context", "8k", "--gpu", "h100,l4")
    dearer, cheaper = sorted(row["usd_per_hour"] for row in answer(capsys, *words)["rows"])[::-1][:2]
    rows = answer(capsys, *words, "--budget", str((dearer + cheaper) / 2))["rows"]
    assert {row["usd_per_hour"] <= cheaper for row in rows} == {True}
    assert answer(capsys, *words, "--budget", "0.01", code=1)["rows"] == []


def test_size_names_the_speed_of_each_wanted_user(capsys):
    (row,) = answer(capsys, "size", "qwen3-8b", "--context", "8k", "--concurrency", "8", "--gpu", "h100")["rows"]
    assert row["each_user_tokens_per_s"]["estimate"] < row["tokens_per_s"]["estimate"]
    assert main(["size", "qwen3-8b", "--context", "8k", "--concurrency", "8", "--gpu", "h100"]) == 0
    assert "each of 8" in capsys.readouterr().out


def test_a_wish_shows_the_speed_of_the_wanted_users(capsys):
    words = ["plan", "qwen3-0.6b", "--gpu", "l4", "--want-context", "8k", "--want-concurrency", "3"]
    assert main(words) == 0
    assert re.search(r"for 3\s+together", capsys.readouterr().out)


def test_a_setting_that_needs_nearly_the_whole_card_says_so_and_has_the_verdict_of_its_plan(capsys):
    words = ("plan", "qwen3-32b", "--gpu", "h200", "--gpus", "2", "--want-context", "8k", "--want-concurrency", "200")
    found = answer(capsys, *words)
    share, free = found["args"]["gpu_memory_utilization"], found["layout"]["headroom_bytes"]
    assert free < 0.025 * found["gpu"]["total_bytes"]
    assert share >= 0.95
    assert found["search"]["gives_up"][-1].startswith(f"at {share:g} of the card only ")
    assert found["verdict"] == answer(capsys, "plan", "--gpu", "h200", "--", *found["command"])["verdict"]


@pytest.mark.parametrize(
    ("model", "load"), [("llama-3.1-70b", (8, 30)), ("qwen3-32b", (8, 200)), ("qwen3-14b", (32, 4))]
)
def test_every_row_of_size_has_the_verdict_of_its_plan(capsys, model, load):
    words = ("--context", f"{load[0]}k", "--concurrency", str(load[1]), "--gpu", "h100,h200,l40s,rtx4090")
    rows = answer(capsys, "size", model, *words)["rows"]
    for row in (row for row in rows if row["count"]):
        planned = ("plan", "--gpu", row["gpu"], "--gpus", str(row["count"]), "--", *row["command"])
        code = 1 if row["verdict"] == "does_not_fit" else 0
        assert answer(capsys, *planned, code=code)["verdict"] == row["verdict"], row


def test_size_has_a_row_for_each_concession_and_the_command_of_every_row_of_one_card(capsys):
    words = ["size", "llama-3.1-70b", "--context", "8k", "--concurrency", "30", "--gpu", "h100"]
    rows = answer(capsys, *words)["rows"]
    assert [(row["count"], row["gives_up"][:1]) for row in rows] == [
        (1, ["another checkpoint, its weights in 4 bits"]),
        (2, ["another checkpoint, its weights in 8 bits"]),
        (4, []),
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    commands = [line.split()[3] for line in out.splitlines() if line.startswith("  $ ")]
    assert commands == [row["command"][2] for row in rows]
    assert "of another row" not in out


def test_a_checkpoint_that_brings_an_eight_bit_kv_cache_says_that_it_gives_it_up(capsys):
    rows = answer(capsys, "size", "qwen3-30b-a3b", "--context", "32k", "--gpu", "h100,b200")["rows"]
    brought = [row for row in rows if (row["model"] != "Qwen/Qwen3-30B-A3B")]
    for row in brought:
        planned = answer(capsys, "plan", "--gpu", row["gpu"], "--gpus", str(row["count"]), "--", *row["command"])
        said = any(loss.startswith("keys and values in 8 bits") for loss in row["gives_up"])
        assert said == planned["args"]["kv_cache_dtype"].startswith("fp8"), row


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("models", "--context", "32k"), "--context needs a GPU"),
        (("models", "--gpu", "l4", "--concurrency", "four"), "--concurrency 'four' is not a number from 1"),
        (("size", "qwen3-8b", "--concurrency", "1k"), "--concurrency '1k' is not a number from 1"),
        (("plan", "qwen3-8b", "--gpu", "l4", "--want-context", "many"), "is not a length"),
    ],
)
def test_a_count_has_no_unit_and_an_option_without_its_gpu_is_refused(capsys, words, says):
    assert main(list(words)) == 2
    assert says in capsys.readouterr().err


def test_a_length_of_vllms_flag_says_what_vllm_reads(capsys):
    assert main(["plan", "llama-3.1-8b", "--gpu", "h100", "--max-model-len", "8k"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "--max-model-len 8k as 8,000; 8K is 8,192" in out
    assert "meta-llama/Llama-3.1-8B-Instruct" in out  # the name stands for the base model


def test_models_on_a_card_end_in_the_command_of_the_first(capsys):
    assert main(["models", "qwen3-0.6b", "--gpu", "l4"]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("  $ vllm serve Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(("model", "length", "users"), [("Qwen/Qwen3-32B-AWQ", "32k", 3), ("gpt-oss-20b", "128k", 16)])
def test_the_length_that_is_named_in_place_of_a_wish_is_held(capsys, model, length, users):
    words = ["plan", model, "--gpu", "rtx4090", "--gpus", "1", "--want-concurrency", str(users), "--want-context"]
    assert main([*words, length]) == 1
    shorter = re.search(
        rf"(?:about|or) {users}(?: requests)? of ([\d,]+) tokens", " ".join(capsys.readouterr().out.split())
    )
    assert shorter is not None
    assert main([*words, shorter[1].replace(",", "")]) == 0


def test_a_budget_below_every_row_says_what_the_cheapest_costs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["size", "llama-3.1-8b", "--gpu", "l4", "--budget", "$0.01"])
    assert re.search(r"left out; the cheapest costs \$0\.\d\d\)", capsys.readouterr().out)


def test_a_table_of_gpus_says_what_a_dollar_holds_and_what_its_speeds_leave_out(capsys):
    words = ["size", "llama-3.1-8b", "--context", "8k", "--concurrency", "4", "--gpu", "l40s"]
    assert main([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["held_per_usd"] == pytest.approx(row["max_concurrency"] / row["usd_per_hour"], abs=0.01)
    assert main(words) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "held/$: requests at once for a dollar an hour" in table
    assert "each of 4: all decoding at this length at once; prompts between make it slower" in table


def test_plan_takes_a_wish_in_the_words_of_size_and_models(capsys):
    pairs = (("--want-context", "--want-concurrency"), ("--context", "--concurrency"), ("--context", "--users"))
    asked = [(context, "8k", users, "4") for context, users in pairs]
    assert len({json.dumps(answer(capsys, "plan", "qwen3-8b", "--gpu", "rtx4090", *words)) for words in asked}) == 1


def test_a_row_of_models_says_what_the_first_start_holds(capsys):
    assert main(["models", "qwen3-8b", "--gpu", "rtx4090", "--gpus", "2"]) == 0
    out = capsys.readouterr().out
    assert "weights a card" in out
    row = next(line for line in out.splitlines() if re.match(r"  qwen3-8b ", line))
    later, first = (float(figure) for figure in re.search(r"([\d.]+) \(([\d.]+)\)", row).groups())
    assert 0 < first < later
