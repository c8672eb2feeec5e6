"""`legroom size --rate` from the outside: GPUs for a rate of requests, and their money."""

import json
import re

import pytest

from legroom.cli.main import main
from legroom.facts.gpus import list_prices
from legroom.simulation import fleet_size

SMALL = ("--rate", "2", "--prompt", "300", "--answer", "10")


ANSWERS = {}
"""The same call is made once: several tests look at parts of one answer."""
FLEETS = {}


@pytest.fixture(autouse=True)
def size_a_fleet_once(monkeypatch):
    """The replays of one load on one card are made once, for the table and for the JSON of several calls."""
    size = fleet_size.size_fleet

    def size_once(task, cell):
        load, (number, card) = task.load, cell
        lengths = tuple(load.trace.prompt_lens), tuple(load.trace.output_lens)
        task_key = task.models[number].name, task.release, repr(task.args[number]), load.goal, task.most_gpus
        key = (card, load.requests_per_s, hash(lengths), *task_key)
        if key not in FLEETS:
            FLEETS[key] = size(task, cell)
        return FLEETS[key]

    monkeypatch.setattr(fleet_size, "size_fleet", size_once)


def answer(capsys, *words, code=0):
    if words not in ANSWERS:
        ended = main(["size", "--json", *words])
        ANSWERS[words] = ended, capsys.readouterr().out
    ended, out = ANSWERS[words]
    assert ended == code
    return json.loads(out)


def rows_that_hold(document):
    return [row for row in document["rows"] if row["holds"]]


def test_a_rate_gives_gpus_a_latency_and_money_with_a_band(capsys):
    document = answer(capsys, "llama-3.1-8b", *SMALL, "--gpu", "h200", "--ttft", "2", "--tpot", "50")
    (row,) = rows_that_hold(document)
    assert row["replicas"] == {"low": 1, "middle": 1, "high": 1}
    assert 0 < row["first_token_p99_s"] <= 2
    assert 0 < row["time_per_token_p99_s"] <= 0.050
    assert row["usd_per_hour"]["middle"] == row["price"]["usd_per_hour"]
    assert row["price"]["date"]
    tokens_per_hour = 2 * 10 * 3600
    assert row["usd_per_million_tokens"]["high"] == pytest.approx(
        row["usd_per_hour"]["high"] / tokens_per_hour * 1e6, 1e-3
    )


@pytest.mark.parametrize(
    ("model", "gpu", "says", "silent"),
    [
        ("llama-3.1-8b", "h200,l40s", "▶ the cheapest that holds", "not tried"),
        ("meta-llama/Llama-3.1-70B-Instruct", "h200", "Llama-3.1-70B-Instruct-FP8", "▶ the cheapest that"),
        ("meta-llama/Llama-3.1-70B", "h200", "--gpus tries more", "not tried"),
    ],
)
def test_the_remarks_name_the_arrow_and_smaller_weights_tuned_alike(model, gpu, says, silent, capsys):
    limits = ("--tpot", "15" if "70B" in model else "60", "--gpus", "16")
    main(["size", model, *SMALL, "--gpu", gpu, *limits])
    out = " ".join(capsys.readouterr().out.split())
    assert says in out
    assert silent not in out


def test_the_command_of_a_row_starts_the_server_that_was_sized(capsys):
    (row,) = rows_that_hold(answer(capsys, "llama-3.1-8b", *SMALL, "--gpu", "h200"))
    assert row["command"][:2] == ["vllm", "serve"]
    assert row["command"][row["command"].index("--max-model-len") + 1] == "1024"  # room for a longer prompt


def test_a_name_of_two_cards_is_sized_and_priced_as_the_one_that_is_named(capsys):
    (row, *_) = rows_that_hold(answer(capsys, "qwen3-30b-a3b", *SMALL, "--gpu", "a100"))
    assert (row["gpu"], row["tensor_parallel_size"]) == ("NVIDIA A100-SXM4-40GB", 2)


def test_times_are_of_as_many_servers_as_are_counted(capsys):
    users = ("--users", "120@30s", "--prompt", "3000", "--answer", "400", "--ttft", "3", "--gpu", "h100")
    (row,) = rows_that_hold(answer(capsys, "qwen3-30b-a3b", *users))
    assert row["replicas"]["middle"] < row["replicas"]["high"]
    assert row["first_token_p99_s"] < 0.5, "two servers, not the one that a faster step would need"


def test_the_price_of_the_stated_number_comes_before_its_range_and_the_command_of_the_slow_end_last(capsys):
    words = ("--rate", "5", "--prompt", "2000", "--answer", "20", "--gpu", "l4", "--tensor-parallel-size", "1")
    assert main(["size", "llama-3.1-8b", *words, "--ttft", "2"]) == 0
    out = capsys.readouterr().out
    row = re.search(r"L4~? +(\d+) \((\d+)–(\d+)\).*? ([\d.]+) \(([\d.]+)–.*\(", out)
    gpus, low, high, usd, usd_low = map(float, row.groups())
    each = list_prices()["NVIDIA L4"].usd_per_hour
    assert (usd, usd_low) == (pytest.approx(gpus * each, abs=0.005), pytest.approx(low * each, abs=0.005))
    assert out.partition(f"  {high:.0f} servers of 1 x NVIDIA L4\n  $ vllm serve ")[2].startswith("meta-llama")


def test_more_requests_take_more_gpus(capsys):
    def needed(rate):
        words = ("--rate", rate, "--prompt", "2000", "--answer", "20", "--gpu", "l4", "--tensor-parallel-size", "1")
        (row,) = rows_that_hold(answer(capsys, "llama-3.1-8b", *words, "--ttft", "2"))
        return row["gpus"]

    few, many = needed("1"), needed("5")
    assert few["middle"] < many["middle"]
    assert many["low"] <= many["middle"] <= (many["high"] or 32)


def test_only_what_was_measured_has_the_narrow_band(capsys):
    rows = rows_that_hold(answer(capsys, "llama-3.1-8b", *SMALL, "--gpu", "h200,h100"))
    bands = {row["gpu"]: (row["basis"], row["step_time_band"]["high"]) for row in rows}
    assert bands["NVIDIA H200"][0] == "measured"
    assert bands["NVIDIA H100 80GB HBM3"][0] == "data_sheet"
    assert bands["NVIDIA H200"][1] < bands["NVIDIA H100 80GB HBM3"][1]


def test_a_release_with_another_engine_was_not_measured(capsys):
    (row,) = rows_that_hold(answer(capsys, "llama-3.1-8b", *SMALL, "--gpu", "h200", "--vllm", "0.6.4"))
    assert row["basis"] == "data_sheet"


def test_a_card_whose_speed_is_not_known_gets_no_number(capsys):
    document = answer(capsys, "llama-3.2-1b", *SMALL, "--gpu", "24GiB", code=1)
    assert all(row["replicas"]["middle"] is None for row in document["rows"])
    assert "not known" in document["rows"][0]["reason"]


def test_a_time_per_token_that_no_replica_reaches_is_code_1_and_says_why(capsys):
    document = answer(capsys, "llama-3.1-8b", *SMALL, "--gpu", "l4", "--gpus", "1", "--tpot", "5", code=1)
    assert "ms a token" in document["rows"][0]["reason"]
    assert document["rows"][0]["usd_per_hour"] is None


def test_without_a_price_there_is_no_money_and_all_else(capsys):
    (row,) = rows_that_hold(answer(capsys, "llama-3.2-1b", *SMALL, "--gpu", "a40"))
    assert row["usd_per_hour"] is None
    assert row["price"] is None
    assert row["gpus"]["middle"] == 1


def test_prices_of_the_user_replace_those_of_the_cards_they_name(capsys, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[h200]\nusd_per_hour = 1.25\n")
    words = ("llama-3.1-8b", *SMALL, "--gpu", "h200,h100", "--prices", str(prices))
    own, listed = (row["price"] for row in rows_that_hold(answer(capsys, *words)))
    assert (own["usd_per_hour"], own["source"]) == (1.25, str(prices))
    assert listed["usd_per_hour"] == list_prices()["NVIDIA H100 80GB HBM3"].usd_per_hour
    assert main(["size", *words]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "yours for NVIDIA H200" in out
    assert out.index("NVIDIA H200") < out.index("NVIDIA H100")


def test_no_count_is_below_what_its_servers_finish_a_second_when_full(capsys):
    words = ("--context", "32k", "--rate", "2", "--prompt", "1500", "--answer", "300", "--tensor-parallel-size", "1")
    (row,) = rows_that_hold(answer(capsys, "Qwen/Qwen3-32B", *words, "--gpu", "a100-80gb"))
    rates = {}
    for replicas in (row["replicas"]["middle"] - 1, row["replicas"]["middle"]):
        load = f"poisson rate={2 / replicas} prompt=1500 output=300"
        server = ("--model", "Qwen/Qwen3-32B", "--gpu", "a100-80gb", "--max-model-len", "32k")
        main(["simulate", "--json", *server, "--synthetic", load])
        rates[replicas] = json.loads(capsys.readouterr().out)["verdict"]
    assert [verdict == "falls_behind" for verdict in rates.values()] == [True, False]


def test_one_server_holds_the_slowest_steps_where_size_counts_one_for_them(capsys):
    """The verdict of a replay on a load and the number of GPUs for it are one answer."""
    server = ("--max-model-len", "16k", "--gpu", "rtx4090")
    told = {}
    for rate in ("0.5", "2"):
        load = ("--synthetic", f"poisson rate={rate} prompt=1000 output=300 requests=400")
        main(["simulate", "--model", "llama-3.1-8b", *server, *load])
        says = capsys.readouterr().out
        main(["simulate", "--model", "llama-3.1-8b", *server, *load, "--json"])
        slowest = json.loads(capsys.readouterr().out)["slowest"]
        words = ("--rate", rate, "--prompt", "1000", "--answer", "300", "--tensor-parallel-size", "1", *server)
        (row,) = rows_that_hold(answer(capsys, "llama-3.1-8b", *words))
        assert slowest == {"step_time_ratio": row["step_time_band"]["high"], "holds": row["replicas"]["high"] == 1}
        assert ("and not with steps that take 1.69 times" in " ".join(says.split())) is not slowest["holds"]
        told[rate] = slowest["holds"]
    assert told == {"0.5": True, "2": False}


def test_a_plan_that_would_probably_not_start_is_no_candidate(capsys):
    words = ("Qwen/Qwen3-32B", "--context", "32k", *SMALL, "--gpu", "h100")
    first, refused = answer(capsys, *words)["rows"][:2]
    assert (first["holds"], first["tensor_parallel_size"]) == (True, 2)
    assert (refused["tensor_parallel_size"], refused["command"]) == (1, None)
    assert "may not start" in refused["reason"]


def test_the_marked_card_costs_least_at_the_slow_end(capsys):
    words = ("llama-3.1-8b", "--rate", "5", "--prompt", "1000", "--answer", "300", "--tpot", "50", "--gpu", "h100,l40s")
    rows = rows_that_hold(answer(capsys, *words))
    cheapest = {end: min(rows, key=lambda row: row["usd_per_hour"][end])["gpu"] for end in ("middle", "high")}
    assert cheapest["middle"] != cheapest["high"]
    assert main(["size", *words]) == 0
    out = capsys.readouterr().out
    assert cheapest["high"] in next(line for line in out.splitlines() if line.startswith("▶"))
    assert f"1 server of 1 x {cheapest['high']}\n  $ vllm serve" in out


def test_an_unknown_card_in_the_prices_is_told(capsys, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[h2000]\nusd_per_hour = 1.25\n")
    assert main(["size", "llama-3.1-8b", *SMALL, "--prices", str(prices)]) == 2
    assert "h2000" in capsys.readouterr().err


def test_a_trace_is_sized_by_its_own_times(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = ({"arrival": i / 4, "prompt_len": 200, "output_len": 20} for i in range(81))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = answer(capsys, "llama-3.2-1b", "--trace", str(trace), "--gpu", "h200")
    assert document["load"]["requests_per_s"] == 4
    assert rows_that_hold(document)


@pytest.mark.parametrize("clock", [{"arrival_step": 3}, {"arrival": 0}])
def test_a_trace_without_times_gets_a_clear_answer(capsys, tmp_path, clock):
    trace = tmp_path / "trace.jsonl"
    trace.write_text((json.dumps({**clock, "prompt_len": 10, "output_len": 5}) + "\n") * 3)
    assert main(["size", "llama-3.1-8b", "--trace", str(trace), "--gpu", "h200"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "its requests arrive" in message
    assert "--rate" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ttft", "2"), "--ttft needs --users, --rate or --trace"),
        (("--users", "4.5", "--prompt", "100", "--answer", "5"), "--users '4.5' is not"),
        (("--users", "4@soon", "--prompt", "100", "--answer", "5"), "write it like 30s"),
        (("--users", "4", "--rate", "2"), "both --rate and --users"),
        (("--rate", "5", "--prompt", "100"), "--answer is missing"),
        (("--rate", "0", "--prompt", "100", "--answer", "5"), "--rate 0 is not"),
        (("--rate", "nan", "--prompt", "100", "--answer", "5"), "--rate nan is not"),
        (("--rate", "5", "--prompt", "0", "--answer", "5"), "at least 1 token"),
        (("--rate", "5", "--prompt", "9", "--answer", "5", "--tpot", "0"), "above 0"),
        (("--rate", "5", "--prompt", "9", "--answer", "5", "--concurrency", "4"), "--concurrency has no place"),
        (("--rate", "5", "--trace", "x"), "both --trace and --rate"),
        ((*SMALL, "--data-parallel-size", "2"), "replicas are what is counted"),
    ],
)
def test_a_load_that_makes_no_sense_is_a_wrong_call(capsys, words, message):
    assert main(["size", "llama-3.1-8b", "--gpu", "h200", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_table_names_the_cheapest_and_what_was_not_measured(capsys):
    assert main(["size", "llama-3.1-8b", *SMALL, "--gpu", "h200,h100", "--ttft", "2"]) == 0
    out = capsys.readouterr().out
    cheapest = next(line for line in out.splitlines() if line.startswith(("▶", ">")))
    assert "NVIDIA H100 80GB HBM3~" in cheapest
    assert "not measured" in out
    assert "list prices of 2026-" in out


def test_a_table_with_prices_of_the_user_does_not_call_them_list_prices(capsys, tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text('[h200]\nusd_per_hour = 1.25\ndate = "2026-01-01"\n')
    assert main(["size", "llama-3.1-8b", *SMALL, "--gpu", "h200", "--prices", str(prices)]) == 0
    out = capsys.readouterr().out
    assert "that you gave" in out
    assert "list prices" not in out


def test_a_model_with_experts_gets_a_number_with_a_range(capsys):
    document = answer(capsys, "gpt-oss-120b", *SMALL, "--gpu", "h100", "--tensor-parallel-size", "2")
    (row,) = rows_that_hold(document)
    assert row["step_time_band"]["low"] < 0.7
    assert row["step_time_band"]["high"] > 1.4
    assert row["gpus"]["low"] <= row["gpus"]["middle"] <= (row["gpus"]["high"] or 32)


def test_two_workers_give_the_rows_of_one(capsys, monkeypatch):
    monkeypatch.undo()  # a function of this file is not known to them
    words = ("llama-3.2-1b", *SMALL, "--gpu", "h200,h100")
    assert answer(capsys, *words, "--workers", "2") == answer(capsys, *words)


def test_a_card_that_is_too_slow_alone_says_so_and_not_that_its_splits_are_unknown(capsys):
    document = answer(capsys, "llama-3.1-8b", *SMALL, "--gpu", "l4", "--gpus", "2", "--tpot", "5", code=1)
    assert "ms a token" in document["rows"][0]["reason"]


def test_cards_that_exchange_data_over_pcie_have_a_wider_range_that_says_why(capsys):
    words = ("llama-3.1-8b", *SMALL, "--gpu", "l4", "--tensor-parallel-size", "2")
    (row,) = rows_that_hold(answer(capsys, *words))
    (known,) = rows_that_hold(answer(capsys, "llama-3.1-8b", *SMALL, "--gpu", "h100"))
    assert row["step_time_band"]["high"] >= known["step_time_band"]["high"]
    assert main(["size", *words]) == 0
    assert "PCIe is assumed" in " ".join(capsys.readouterr().out.split())


def test_a_model_whose_steps_wait_for_the_host_has_a_wider_band(capsys):
    small, large = (
        answer(capsys, model, *SMALL, "--gpu", "h200")["rows"][0]["step_time_band"]
        for model in ("qwen3-0.6b", "llama-3.1-8b")
    )
    assert small["low"] < large["low"]
    assert small["high"] > large["high"]


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "llama-3.1-8b-fp8-dynamic"])
def test_what_was_measured_on_the_h200_has_the_narrow_band(capsys, model):
    (row,) = rows_that_hold(answer(capsys, model, *SMALL, "--gpu", "h200"))
    assert row["basis"] == "measured"


def test_longer_steps_never_takes_fewer_gpus(capsys):
    words = ("--rate", "3", "--prompt", "2000", "--answer", "20", "--gpu", "a10,l4", "--tpot", "400")
    for row in rows_that_hold(answer(capsys, "llama-3.1-8b", *words)):
        gpus = row["gpus"]
        assert gpus["low"] <= gpus["middle"] <= (gpus["high"] or gpus["middle"])
        money = row["usd_per_hour"]
        assert money["low"] == pytest.approx(gpus["low"] * row["price"]["usd_per_hour"], abs=1e-3)


def test_the_row_leads_with_as_many_gpus_as_the_command_has_servers(capsys):
    words = ("--rate", "1.4", "--prompt", "7k", "--answer", "1k", "--ttft", "5", "--tpot", "200", "--gpu", "h200")
    document = answer(capsys, "qwen3-32b", *words)
    assert document["load"]["mean_prompt_tokens"] == 7168
    most = document["rows"][0]["gpus"]["high"]
    main(["size", "qwen3-32b", *words])
    out = capsys.readouterr().out
    assert f"{most} servers of 1 x NVIDIA H200" in out
    assert re.search(rf"NVIDIA H200 +{most} \(", out)


def test_users_become_a_rate_by_their_pause_and_the_time_of_an_answer(capsys):
    lengths = ("--prompt", "300", "--answer", "200", "--gpu", "h200")
    fast, slow = (answer(capsys, "llama-3.1-8b", "--users", users, *lengths) for users in ("60@10s", "60@1min"))
    for document, think_s in ((fast, 10), (slow, 60)):
        (row,) = rows_that_hold(document)
        assert document["load"]["users"] == {"count": 60, "think_s": think_s}
        assert row["requests_per_s"] == pytest.approx(60 / (think_s + row["answer_p50_s"]), rel=0.08)
        assert row["answer_p50_s"] == pytest.approx(200 / row["tokens_per_s_each"], rel=0.2)
    assert main(["size", "llama-3.1-8b", "--users", "60", *lengths]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "60 users who ask again 30 s after an answer" in table
    assert "tok/s each" in table


def test_the_table_says_what_a_count_must_be_enough_for_and_what_a_dollar_buys(capsys):
    load = ("--users", "60", "--prompt", "300", "--answer", "200", "--gpu", "h200")
    (row,) = rows_that_hold(answer(capsys, "llama-3.1-8b", *load))
    assert row["users_per_usd"] == pytest.approx(60 / row["usd_per_hour"]["high"], abs=0.01)
    assert main(["size", "llama-3.1-8b", *load]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "users/$" in table
    assert "could finish 5% more requests a second than it gets; with fewer GPUs users wait longer" in table


def test_a_model_that_is_too_large_for_a_node_is_said_to_be_that(capsys):
    load = ("--users", "9", "--prompt", "99", "--answer", "9", "--gpu", "h100")
    assert main(["size", "deepseek-v3", *load, "--json"]) == 1
    reason = json.loads(capsys.readouterr().out)["rows"][0]["reason"]
    assert reason == "does not start on 8 GPUs of one node (weights too big); --concurrency tries several nodes"


def test_more_users_than_requests_are_refused(capsys):
    load = ["simulate", "--synthetic", "users=5000 requests=2000", "--blocks", "4000", "--step-ms", "30"]
    assert main(load) == 2
    assert "2,000 requests are too few to show how long 5,000 users wait" in capsys.readouterr().err


def test_users_and_concurrency_say_what_tells_them_apart(capsys):
    load = ("--users", "100", "--prompt", "1000", "--answer", "300", "--gpu", "l4")
    assert main(["size", "qwen3-0.6b", *load, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["requests_at_once"] == pytest.approx(100 - 30 * row["requests_per_s"], abs=0.1)
    assert main(["size", "qwen3-0.6b", *load]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "size --concurrency asks for the memory of so many at full length, and for no speed" in said
    assert "which the tok/s of --concurrency leaves out" in said
    assert main(["size", "qwen3-0.6b", "--concurrency", "100", "--gpu", "l4"]) == 0
    assert "of users who pause, fewer ask at once: size --users counts" in " ".join(capsys.readouterr().out.split())
