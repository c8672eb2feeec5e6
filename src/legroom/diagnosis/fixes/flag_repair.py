"""Fixes of refused flags: renamed, corrected, limited or removed; larger explicit KV pools; the share vLLM advises."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from difflib import SequenceMatcher
from typing import Any

from legroom.diagnosis.finding import Fix, FixKind, known_fix, reason
from legroom.diagnosis.fixes.failed_run import NOT_PLANNABLE
from legroom.diagnosis.fixes.fix_planner import FixPlanner
from legroom.diagnosis.pasted_command import prose
from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.facts.flags import advice, choices, dest_name, flag_kind_ever, flag_name, flags_of
from legroom.facts.gpus import all_gpus
from legroom.facts.gpus import gpu as known_gpu
from legroom.facts.releases import known_releases, release
from legroom.memory.kv.kv_plan import KvPlan, kv_plan
from legroom.units import GIB, MIB, cdiv, human_bytes
from legroom.vllm.args import ServeArgs
from legroom.vllm.engine_selection import on_cpu
from legroom.vllm.flag_problems import FlagProblem
from legroom.vllm.parse import parse_flags
from legroom.vllm_logs.evidence import Evidence

_CPU_SPACE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"


def has_given_pool(args: ServeArgs) -> bool:
    """Whether a flag sets the KV pool's size, so that vLLM does not compute it at start."""
    sizes = (args.num_gpu_blocks_override, args.kv_cache_memory_bytes, args.env.get(_CPU_SPACE_VARIABLE))
    return any(size is not None for size in sizes)


def larger_pool_fix(planner: FixPlanner) -> Fix | None:
    """Fix: a larger KV pool, its size set by flag or variable, for one request of max_model_len; None if not set."""
    args = planner.given_args
    if args.num_gpu_blocks_override is not None:
        return _more_pool_blocks_fix(planner, args) or _scaled_pool_fix(planner, "num_gpu_blocks_override")
    if args.kv_cache_memory_bytes is not None:
        return _more_pool_bytes_fix(planner, args) or _scaled_pool_fix(planner, "kv_cache_memory_bytes")
    if _CPU_SPACE_VARIABLE in args.env and not args.env[_CPU_SPACE_VARIABLE].strip("0."):
        plan = _kv_plan_of_pool(planner, args, 0)
        if plan is None:
            return None
        space = max(cdiv(plan.needed_bytes + 2 * plan.bytes_per_block, GIB), 1)
        why = f"{_CPU_SPACE_VARIABLE} is in GiB; one request needs {human_bytes(plan.needed_bytes)}."
        return Fix("kv_cache_memory_bytes", why, env={_CPU_SPACE_VARIABLE: str(space)})
    told = planner.case.first("kv_tokens_short")
    wanted, fits = (told.number(name) or 0 if told else 0 for name in ("max_model_len_count", "fits_len_count"))
    if told is None or _CPU_SPACE_VARIABLE not in told.window or not 0 < fits < wanted:
        return None
    steps = (f"{_CPU_SPACE_VARIABLE}: {wanted / fits * 1.02:.1f} times what it is now, in GiB of RAM",)
    return Fix("kv_cache_memory_bytes", "The message names it: on the CPU backend it is the pool.", steps=steps)


def advised_utilization_fix(planner: FixPlanner, short_bytes: int) -> Fix | None:
    """Fix: the gpu_memory_utilization that vLLM's line about CUDA graphs advises; None if that adds too little."""
    printed = planner.case.first("graph_share")
    advised = printed.facts.get("advised_ratio") if printed else None
    total = planner.total_bytes or max(card.total_bytes for card in all_gpus())
    if not isinstance(advised, float) or (advised - planner.utilization) * total <= max(short_bytes, 0):
        return None
    why = "vLLM counts CUDA graphs inside the share, and names the share that leaves the pool of earlier releases."
    steps = ("or keep the share and set VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0: graphs are not counted then",)
    return Fix("raise_util", why, {"gpu_memory_utilization": advised}, steps=steps, proven=True)


def _scaled_pool_fix(planner: FixPlanner, name: str) -> Fix | None:
    """Fix: pool flag `name` x needed / available bytes of vLLM's check; None where that exceeds the measured pool."""
    needed, has = (planner.case.number("kv_bytes_short", part) for part in ("needed_bytes", "available_bytes"))
    measured = planner.case.startup.available_kv_bytes
    if not needed or not has or has <= 0 or needed <= has or (measured or needed) < needed:
        return None
    size = cdiv(getattr(planner.given_args, name) * needed * 105, has * 100)  # both are rounded to two digits
    room = f" of the {human_bytes(measured)} that were measured" if measured else ""
    why = f"The flag limits the pool to {human_bytes(has)}, and one request needs {human_bytes(needed)}{room}."
    return _pool_fix(planner, {name: size}, why)


def _more_pool_bytes_fix(planner: FixPlanner, args: ServeArgs) -> Fix | None:
    """Fix: a --kv-cache-memory-bytes that holds one request of max_model_len; None where none does."""
    plan = _kv_plan_of_pool(planner, args, args.kv_cache_memory_bytes or 0)
    if plan is None:
        return None
    wanted = cdiv(plan.needed_bytes + 2 * plan.bytes_per_block, MIB) * MIB
    while (
        (larger := _kv_plan_of_pool(planner, args, wanted)) is not None
        and larger.failure is not None
        and wanted < 1 << 44
    ):
        wanted = cdiv(wanted * 5 // 4, MIB) * MIB
    if larger is None or larger.failure is not None:
        return None
    flags = {"kv_cache_memory_bytes": wanted}
    why = f"One request of {larger.max_model_len:,} tokens needs {human_bytes(plan.needed_bytes)} of KV cache."
    return _pool_fix(planner, flags, why)


def _more_pool_blocks_fix(planner: FixPlanner, args: ServeArgs) -> Fix | None:
    """Fix: a --num-gpu-blocks-override that holds one request of max_model_len; None where none does."""
    plan = _kv_plan_of_pool(planner, replace(args, num_gpu_blocks_override=None), 1 << 44)
    if plan is None or plan.failure is not None or not plan.bytes_per_block:
        return None
    blocks = cdiv(plan.needed_bytes, plan.bytes_per_block) + 1  # 0.28 and later keep one back
    why = f"One request of {plan.max_model_len:,} tokens needs {blocks:,} blocks."
    return _pool_fix(planner, {"num_gpu_blocks_override": blocks}, why)


def _pool_fix(planner: FixPlanner, flags: Mapping[str, Any], why: str) -> Fix | None:
    """Fix: another KV cache size by these flags; None where the memory model says that it would not start."""
    trades = "that much more memory" if "kv_cache_memory_bytes" in flags else "more of the pool is used"
    return planner.plan_change("kv_cache_memory_bytes", flags, why, trades=trades)


def _kv_plan_of_pool(planner: FixPlanner, args: ServeArgs, pool_bytes: int) -> KvPlan | None:
    """The KV blocks that a pool of this many bytes holds for the model; None where the model is not known."""
    from legroom.vllm.resolve import resolve
    from legroom.vllm_logs.printed_flags import load_logged_model  # costs a tenth of a second

    if not args.model:
        return None
    card = planner.known.gpu or known_gpu("24GiB")
    is_gpu = planner.known.gpu is not None or any("gpu_worker" in item.at for item in planner.case.evidence)
    args = replace(args if is_gpu else on_cpu(args), kv_cache_memory_bytes=None)
    try:
        model = load_logged_model(args.model)
        settings = resolve(args, model, card, planner.known.release)
        return kv_plan(model, settings, card, [pool_bytes] * settings.pipeline_parallel_size)
    except NOT_PLANNABLE:
        return None


def smaller_media_fix(planner: FixPlanner, why: str) -> Fix:
    """Fix: the pixel limit that the text names, else one image and no video a prompt, and max_pixels if supported."""
    # A limit of 0 refuses what the text serves.
    told = " ".join(item.text.lower() for item in planner.case.evidence if item.role != "frame")
    flags: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1, "video": int(" video" in told)}}
    named = " ".join([planner.known.args.model, *(item.text for item in planner.case.all("frame_vision"))]).lower()
    if patches := planner.case.number("pixels_told", "patches_count"):
        flags = {"mm_processor_kwargs": {"max_pixels": patches * 28 * 28}}
    elif any(name in named for name in read_data("towers.json")["max_pixels"]):
        are_many = re.search(r"\b(?:several|multiple|many|[2-9]) (?:\w+ )?images\b", told)  # one would refuse them
        flags = {**({} if are_many else flags), "mm_processor_kwargs": {"max_pixels": _MEGAPIXEL}}
    return Fix("limit_multimodal", why, flags=flags, trades="larger or more media are scaled or refused")


_MEGAPIXEL = 1003520  # 1,280 patches of 28 x 28 pixels: what Qwen's own model cards use to bound an image.

_MISSPELT_RATIO = 0.85
"""One wrong letter in six: --max-seq-len and --max-model-len are below it, --tensor-paralel-size is above."""
_SWITCHES = ("switch", "bool", "optbool")


def refusal_fixes(planner: FixPlanner) -> Iterator[Fix | None]:
    """Fixes for vLLM's refusals in the text: of unknown flags first, of a flag whose value an error names last."""
    case = planner.case
    unknown = case.first("unrecognized_arguments")
    if unknown is not None:
        yield _replace_unknown_flags(planner, str(unknown.facts.get("words", "")).split())
    for id_, repair in _FIX_BY_MESSAGE.items():
        evidence = case.first(id_)
        if evidence is not None:
            yield repair(planner, evidence)
    only_v0 = case.first("v1_unsupported_flag")
    if only_v0 is not None and str(only_v0.facts.get("flag", "")).startswith("--"):
        name = str(only_v0.facts["flag"])
        yield _flag_fix(planner, {dest_name(name): None}, f"{name} is of the V0 engine; V1 does not have it.")
    for id_, (name, why) in read_data("diagnosis_texts.json")["removed_flags"].items():
        if case.has(id_):
            yield _flag_fix(planner, {name: None}, why)
    yield named_value_fix(planner, case.first_failure.window if case.first_failure is not None else "")


def named_value_fix(planner: FixPlanner, message: str) -> Fix | None:
    """Fix: remove the one typed flag whose value the `message` names; None where it names none or several."""
    typed = {name: value for name, value in typed_flags(planner).items() if isinstance(value, str) and name != "model"}
    named = [name for name, value in typed.items() if re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", message)]
    if len(named) != 1 or typed[named[0]] == "auto":
        return None
    return _flag_fix(
        planner, {named[0]: None}, f"The message is about {typed[named[0]]}: {flag_name(named[0])} asks for it."
    )


def _replace_unknown_flags(planner: FixPlanner, words: list[str]) -> Fix | None:
    """Fix: of the refused `words` of a command, misspelt or renamed flags put right, others out; None without flags."""
    flags: dict[str, Any] = {}
    reasons, steps = [], []
    if words and "/" in words[0] and not words[0].startswith(("-", "{")):
        steps = [f"vllm serve {words[0]} ... (with the same flags), or put --model in front of {words[0]}"]
        return Fix("flag", reason("model_by_position", {"word": words[0]}), steps=tuple(steps))
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, joined, value = word.partition("=")
        if not joined and position + 1 < len(words) and not words[position + 1].startswith("-"):
            value = words[position + 1]
        problem = _flag_problem(planner, name)
        if not planner.known.release_known and name in flags_of(planner.known.release):
            if all(name in flags_of(each) for each in map(release, known_releases())):
                return known_fix("flag_of_every_release")
            flags[dest_name(name)] = None
            reasons.append(f"vLLM {planner.known.release.version} has {name}: the one that refused it is older.")
            steps.append(f"pip install -U vllm, or take {name} out")
            continue
        if problem is None:
            continue
        flags[dest_name(name)] = None
        is_like = SequenceMatcher(None, name, problem.instead).ratio() >= _MISSPELT_RATIO
        if problem.kind == "unknown" and not is_like and advice(name) is None:
            problem = replace(problem, instead="")  # another program's flag
        instead = _replacement_dest(planner, problem, value)
        if instead is not None:
            flags[instead] = _parse_value(planner, instead, value)
        reasons.append(f"{problem.message}.")
        is_written = problem.instead and problem.instead not in words
        steps.append(f"write {problem.instead} in place of {name}" if is_written else f"take {name} out")
    return _flag_fix(planner, flags, " ".join(reasons), tuple(steps)) if flags else None


def _flag_problem(planner: FixPlanner, name: str) -> FlagProblem | None:
    """What is wrong with a flag (`--max-model-len`) in this release; None where nothing is."""
    try:
        problems = parse_flags([name], planner.known.release).problems
    except LegroomError:
        return None
    return problems[0] if problems else None


def _replacement_dest(planner: FixPlanner, problem: FlagProblem, value: str) -> str | None:
    """Python name of the flag to use instead of the problem's, if it needs a value as that has `value`; else None."""
    if problem.kind not in ("renamed", "unknown") or not problem.instead.startswith("--") or " " in problem.instead:
        return None
    flag = flags_of(planner.known.release).get(problem.instead)
    return None if flag is None or (flag.kind in _SWITCHES) != (not value) else flag.dest


def _parse_value(planner: FixPlanner, dest: str, text: str) -> Any:
    """The value of flag `dest` as this release parses `text`; True (a switch) for an empty text."""
    if not text:
        return True
    flag = next(flag for flag in flags_of(planner.known.release).values() if flag.dest == dest)
    value = getattr(parse_flags([flag.name, text], planner.known.release).args, dest, None)
    return text if value is None else value


def _argparse_refusal_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: without the flag whose value argparse refuses, or with the value in its right form; None if unknown."""
    name = str(evidence.facts.get("flag", "")).split("/")[-1]
    flag = flags_of(planner.known.release).get(name)
    if flag is None and flag_kind_ever(name) is None:
        return None
    refused = next((evidence.facts[key] for key in ("choice", "value", "unread") if key in evidence.facts), None)
    if flag is not None and "unread" in evidence.facts:
        value = getattr(parse_flags([name, str(refused)], planner.known.release).args, flag.dest, None)
        if value is not None:
            return _flag_fix(planner, {flag.dest: value}, f"{name} takes JSON in vLLM {planner.known.release}.")
    what = f"{name} does not take {refused}" if refused else f"{name} has no value"
    dest = flag.dest if flag else dest_name(name)
    return _flag_fix(planner, {dest: None}, f"{what}: without it vLLM's default applies.")


def _out_of_range_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: remove the number that is out of range; a utilization of 2 to 100 is per cent. None if no flag has it."""
    given = typed_flags(planner)
    flags: dict[str, Any] = {}
    for name in (evidence.facts.get("name"), evidence.facts.get("second")):
        value = given.get(str(name))
        if value is not None:
            percent = name == "gpu_memory_utilization" and isinstance(value, int | float) and 2 <= value <= 100
            flags[str(name)] = round(value / 100, 2) if percent else None
    limit = f"{evidence.facts.get('bound')} than {evidence.facts.get('limit')}"
    violated = limit.replace("less", "more") if limit.startswith("less") else limit.replace("greater", "less")
    remedy = "without it vLLM's default applies" if None in flags.values() else "it was meant in per cent"
    return _flag_fix(planner, flags, f"{' and '.join(flags)} may not be {violated}: {remedy}.") if flags else None


def _max_len_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: --max-model-len set to the model's own limit, which vLLM's refusal prints; None where it prints none."""
    limit = evidence.facts.get("limit_count")
    if not isinstance(limit, int) or limit < 1:
        return None
    return _flag_fix(planner, {"max_model_len": limit}, f"The model was made for {limit:,} tokens.")


def _batched_tokens_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: --max-num-batched-tokens raised to a whole prompt, or to a token a sequence; None if neither is printed."""
    length, seqs, tokens = (evidence.facts.get(name) for name in ("len_count", "seqs_count", "batched_count"))
    if isinstance(length, int):
        why = f"A step of {length:,} tokens holds a whole prompt."
        proposals: list[dict[str, Any]] = [{"max_num_batched_tokens": length}, {"max_model_len": tokens}]
    elif isinstance(seqs, int):
        why = f"A step of {seqs:,} tokens has one for every sequence."
        proposals = [{"max_num_batched_tokens": seqs}, {"max_num_seqs": tokens}]
    else:
        return None
    return planner.first_change_that_fits("max_num_batched_tokens", proposals, why) or _flag_fix(
        planner, proposals[0], why
    )


def _tensor_parallel_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: the largest power of two up to the refused ranks that divides the attention heads; None if not printed."""
    heads, ranks = evidence.facts.get("heads_count"), evidence.facts.get("ranks_count")
    if not isinstance(heads, int) or not isinstance(ranks, int):
        return None
    size = max(number for number in (1, 2, 4, 8, 16, 32) if number <= ranks and heads % number == 0)
    why = f"{heads} attention heads can be split over {size} ranks, not over {ranks}."
    return _flag_fix(planner, {"tensor_parallel_size": size}, why)


def _lora_rank_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: the smallest max_lora_rank that the release takes and that holds the adapter; None where none does."""
    rank = evidence.number("rank_count") or 0
    allowed = choices("--max-lora-rank", planner.known.release) or (rank,)
    holds = [int(size) for size in allowed if int(size) >= rank]
    return _flag_fix(planner, {"max_lora_rank": min(holds)}, f"The adapter has rank {rank}.") if holds else None


def _literal_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: of the values that pydantic lists, the least above the refused one, else the largest; else None."""
    match = prose("literal").search(evidence.window)
    if match is None or flag_kind_ever(flag_name(match["name"])) is None:
        return None
    name, allowed = match["name"], [int(number) for number in re.findall(r"\d+", match["allowed"])]
    value = min((size for size in allowed if size >= int(match["value"])), default=max(allowed))
    return _flag_fix(planner, {name: value}, f"{flag_name(name)} takes {match['allowed']}, not {match['value']}.")


def fewer_ranks_fix(planner: FixPlanner) -> Fix | None:
    """Fix: as many tensor-parallel ranks as vLLM's error says there are GPUs, or a larger machine; else None."""
    error, stages = planner.case.first("too_few_gpus"), planner.known.args.pipeline_parallel_size or 1
    have = error.number("have_count") if error is not None else None
    if not have or have < stages:
        return None
    kind: FixKind = "more_or_fewer_gpus_tp_pp"
    why = f"vLLM sees {have} GPU{'s' * (have > 1)} here."
    sizes = [{"tensor_parallel_size": size} for size in range(have // stages, 0, -1)]
    if planner.failed_plan is None:
        return planner.plan_change(kind, sizes[0], why)
    fix = planner.first_change_that_fits(kind, sizes, why)
    enough = ("legroom size MODEL says how many of which GPU hold it",)
    return fix or Fix(kind, f"{why} It does not fit on {'them' if have > 1 else 'it'}, by the plan.", steps=enough)


def _unsupported_setting_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: without the setting that the message names; None where it is no flag of any release."""
    name, value = (str(evidence.facts[key]) for key in ("name", "value"))
    if flag_kind_ever(flag_name(name)) is None:
        return None
    return _flag_fix(planner, {name: None}, f"{flag_name(name)} {value} is refused here: without it vLLM chooses.")


def _unknown_keyword_fix(planner: FixPlanner, evidence: Evidence) -> Fix | None:
    """Fix: without the keyword that this release's EngineArgs lack; None where no release has such a setting."""
    name = str(evidence.facts["name"])
    if "EngineArgs" not in str(evidence.facts["callee"]) or flag_kind_ever(flag_name(name)) is None:
        return None
    why = f"{name} is a setting of other releases; this one starts without it."
    older = "or, where another program's code passes it: install the vLLM release that this code was written for"
    return Fix("flag", why, steps=(f"leave {name} out of LLM(...), EngineArgs(...) or the file that sets it", older))


_FIX_BY_MESSAGE: Mapping[str, Callable[[FixPlanner, Evidence], Fix | None]] = {
    "argument_refused": _argparse_refusal_fix,
    "setting_out_of_range": _out_of_range_fix,
    "len_over_derived": _max_len_fix,
    "batched_below_len": _batched_tokens_fix,
    "heads_and_ranks": _tensor_parallel_fix,
    "lora_rank": _lora_rank_fix,
    "setting_unsupported": _unsupported_setting_fix,
    "unexpected_keyword": _unknown_keyword_fix,
    "pydantic_extra": _literal_fix,
}


def typed_flags(planner: FixPlanner) -> dict[str, Any]:
    """The flags exactly as typed: vLLM's Python name (`max_model_len`) -> value."""
    args = planner.given_args
    return {
        field.name: value
        for field in fields(ServeArgs)
        if (value := getattr(args, field.name)) not in (None, "", (), {}) and field.name not in ("usage", "env")
    }


def _flag_fix(planner: FixPlanner, flags: Mapping[str, Any], why: str, steps: tuple[str, ...] = ()) -> Fix:
    """A fix that only corrects flags: vLLM's Python name -> value, None to remove it."""
    return Fix("flag", why, dict(flags), steps=steps)
