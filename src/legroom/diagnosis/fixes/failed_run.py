"""The failed run: its settings, its plan and its command line. Every computed fix is a change of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

from legroom.deployments.server_words import assignments
from legroom.diagnosis.fixes.log_accounting import deduce_total_bytes, pool_bytes
from legroom.diagnosis.pasted_command import NUMBERS
from legroom.errors import LegroomError
from legroom.facts import read_data
from legroom.facts.flags import flag_name, flags_of
from legroom.facts.gpus import Gpu, all_gpus, with_total
from legroom.facts.gpus import gpu as known_gpu
from legroom.facts.releases import Release, known_releases, latest, logged_release
from legroom.facts.releases import release as known_release
from legroom.isolation import is_local_model
from legroom.memory.deployment_memory import Measurements
from legroom.records import dataclass
from legroom.units import GIB, MIB, gib
from legroom.vllm.args import ServeArgs, is_given
from legroom.vllm.command_line import any_release_words, command, with_settings, without_secrets
from legroom.vllm_logs.log_sources import names_a_file

if TYPE_CHECKING:
    from legroom.deployments.deployment import Deployment
    from legroom.diagnosis.case import Case
    from legroom.facts.model import Model
    from legroom.planning.plan import Plan, Target
    from legroom.vllm_logs.startup_log import Startup

_UNSET = ServeArgs()
MAX_RANKS = 64
"""Larger numbers in a log are not ranks of one engine."""
NOT_PLANNABLE = (LegroomError, ArithmeticError, LookupError, TypeError, ValueError)
"""Errors of planning with flags from a log, which may be invalid; there is no plan then."""


@dataclass(frozen=True, slots=True)
class Hints:
    """Options of the user that complete the log."""

    command: str | None = None
    """The command line, or the file that starts the server."""
    model: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    vllm: str | None = None
    local_models: bool = True
    """Whether model folders that the log or the command names may be read."""


ReleaseSource = Literal["given", "log", "command", "assumed"]
"""Who names the release of a run: the user, the log, the image of the user's command, or nobody."""


@dataclass(frozen=True)
class KnownDeployment:
    """What is known of the failed deployment: from the log, else from the user."""

    args: ServeArgs
    release: Release
    release_known: bool
    """False: the release is guessed from the style of the log."""
    gpu: Gpu | None
    gpus: int | None
    total_bytes: int | None
    rebuilt: RebuiltCommand
    """The command line of the failed run."""
    ranks: int = 1
    """Lower bound of the ranks of one engine, by its flags or the ranks that log."""
    ranks_known: bool = False
    """False: there may be more ranks than the log shows."""
    total_deduced: bool = False
    """The card's total is computed from other figures of the log."""
    release_source: ReleaseSource = "assumed"
    host_limit_bytes: int | None = None
    """The memory limit of the server's container."""


_NOT_REPEATED = ("unknown", "removed", "not_yet")  # Problems of a flag for which it is left out of a command.


def known_deployment(case: Case, hints: Hints) -> KnownDeployment:
    """The failed deployment from the log, the user's hints and values deduced from both."""
    startup = case.startup
    release, release_known = _release_in_use(case, hints)
    source: ReleaseSource = "given" if hints.vllm is not None else "log" if startup.vllm else "assumed"
    args, gpus, line, limit = startup.args, hints.gpus, None, case.host_limit_bytes
    lost: tuple[str, ...] = ()
    if hints.command:
        deployment = given_deployment(hints, release if release_known else None)
        if not release_known and deployment.problems and not deployment.release_hint:
            release, deployment = _release_with_flags(hints, release, deployment)
        line = deployment.args
        lost = tuple(problem.flag for problem in deployment.problems if problem.kind in _NOT_REPEATED)
        args = merge_args(line, args if startup.args_known else _UNSET)
        gpus, limit = gpus or deployment.gpu_count, limit or deployment.memory_limit_bytes
        if not release_known and deployment.release_hint:
            release, release_known, source = deployment.release, True, "command"
    if hints.model:
        args = replace(args, model=hints.model)
    if not hints.local_models and is_local_model(args.model):
        args = replace(args, model="")
    args, gpus = _without_impossible_values(args), gpus or _visible_gpus(args) or _listed_gpus(case)
    rebuilt = rebuilt_command(startup, line, args.model, lost)
    seen = count_ranks(case)
    if args.tensor_parallel_size is None and args.engine_ranks < seen and not startup.args_known and line is None:
        args = replace(args, tensor_parallel_size=seen // args.engine_ranks)
    total, deduced = _printed_total_bytes(case), False
    if total is None and release_known and not startup.gpu_name:
        total = _deduced_total(case, args, release)
        if hints.gpu and total and _size_with_total(known_gpu(hints.gpu), total):
            total = None  # the name tells it better
        deduced = total is not None and not hints.gpu
    card = _find_gpu(case, hints, total)
    given = startup.args_known or line is not None or startup.args.tensor_parallel_size is not None
    ranks_known = given or bool(startup.world_size) or all_ranks_logged(case, seen) or _stated_ranks(case) > 1
    ranks = max(args.engine_ranks, seen)
    return KnownDeployment(
        args, release, release_known, card, gpus, total, rebuilt, ranks, ranks_known, deduced, source, limit
    )


def _visible_gpus(args: ServeArgs) -> int | None:
    """Cards that CUDA_VISIBLE_DEVICES names for the process, where they are several; else None."""
    cards = args.env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return len(cards) if len(cards) > 1 and all(card.strip().isdigit() for card in cards) else None


def _listed_gpus(case: Case) -> int | None:
    """Number of GPUs of the machine by nvidia-smi's or collect_env's list, or a sentence; None where none tells."""
    listed = [item.facts for item in case.all("gpus_listed") if not _TRIED_ON.search(item.text)]
    told = [(name, NUMBERS.get(str(fact).lower(), fact)) for facts in listed for name, fact in facts.items() if fact]
    return max(
        (int(count) + (name == "index_count") for name, count in told), default=1 if case.has("one_gpu_told") else None
    )


_TRIED_ON = re.compile(r"(?i)\b(?:tried|used?|using)(?: \w{1,20}){0,2} [2-8] (?:x )?(?:GPUs|cards)\b")
_SPLIT = re.compile(r"(?i)\b(?:splits?|splitting|shards?|sharded)\b|\bper[- ](?:GPU|card)\b")


def _stated_ranks(case: Case) -> int:
    """The number of GPUs that a sentence says the run was split over; 1 without one, or if only the first was used."""
    told = [item for item in case.all("gpus_listed") if "gpus_count" in item.facts and not case.has("first_card_told")]
    told = [item for item in told if _TRIED_ON.search(item.text) or _SPLIT.search(item.text)]
    return max((int(item.facts["gpus_count"]) for item in told), default=1)


def given_deployment(hints: Hints, release: Release | None) -> Deployment:
    """The server that the user's command, or the file it names, starts, read for `release` (None: not known)."""
    from legroom.deployments.deployment import deployment_from_file, deployment_from_text  # only for a given line

    line = hints.command or ""
    if hints.local_models and names_a_file(line):
        return deployment_from_file(line, release)
    return deployment_from_text(line, release)


def _release_with_flags(hints: Hints, guess: Release, read: Deployment) -> tuple[Release, Deployment]:
    """The newest release that accepts the user's line, and the server it reads from that; else `guess` and `read`."""
    for version in reversed(known_releases()):
        try:
            deployment = given_deployment(hints, known_release(version))
        except LegroomError:
            continue
        if not any(problem.stops_vllm for problem in deployment.problems):
            return known_release(version), deployment
    return guess, read


def count_ranks(case: Case) -> int:
    """Ranks of one engine as printed, else the power of two above the highest rank that logs; 1 where none does."""
    if case.startup.world_size and case.startup.world_size <= MAX_RANKS:
        return case.startup.world_size
    highest = max((item.rank for item in case.evidence if item.rank is not None), default=0)
    highest = max(highest, case.oom.gpu or 0 if case.oom else 0)  # a rank uses the device with its number
    # Until V1 the first rank ran in the engine's own process, beside its workers.
    workers = {item.pid for item in case.evidence if "WorkerProcess" in item.process or "RayWorker" in item.process}
    highest = max(highest, len(workers), _stated_ranks(case) - 1)
    if any("Worker_TP" in item.process for item in case.evidence):
        highest = max(highest, 1)  # a worker is numbered where there are several
    return 1 << highest.bit_length() if highest < MAX_RANKS else 1


def all_ranks_logged(case: Case, ranks: int) -> bool:
    """Whether the log shows all `ranks` (> 1): each number, or as many workers, or one above 3, as of 8 a machine."""
    logged = {item.rank for item in case.evidence if item.rank is not None}
    workers = {item.pid for item in case.evidence if "WorkerProcess" in item.process or "RayWorker" in item.process}
    return ranks > 1 and (logged >= set(range(ranks)) or max(logged, default=0) > 3 or len(workers) >= ranks - 1)


def plan_of_failed_run(case: Case, known: KnownDeployment) -> Plan | None:
    """The plan of the failed run with the sizes of its log; None without model or GPU, or if the log contradicts it."""
    if not known.args.model or known.gpu is None:
        return None
    from legroom.planning.plan import Target, plan, plan_on_named_card

    args = known.args
    try:
        model, seen = _logged_model(known.args), _logged_sizes(case)
        if (args.pipeline_parallel_size or 1) > 1 and not all_ranks_logged(case, args.gpus_needed):
            seen = replace(seen, weights_bytes=None)  # of one stage; another may hold more
        others = _neighbours_bytes(case)
        target = Target(model, known.gpu, max(known.gpus or 1, args.gpus_needed), known.release, seen, others)
        made, pool = plan_on_named_card(target, known.args), pool_bytes(case)
        if not known.ranks_known and args.gpu_memory_utilization is None and pool is not None and pool < 0:
            args = _with_implied_utilization(made, args, pool)
            made = plan_on_named_card(target, args)
        is_loaded = case.was_ready or case.phase == "serving" or (case.is_oom and case.phase == "startup_kv")
        is_loaded = is_loaded and made.layout.weights.low > made.layout.total_bytes
        is_loaded = is_loaded or weights_and_pool_beyond_card(case, known) > 0
        if (pool is not None and pool <= 0 and made.verdict == "fits") or is_loaded or _is_plan_too_small(made, case):
            return None  # flags, model or card are not what the text lets one think
        return plan(_with_logged_pool(made, case), args)
    except NOT_PLANNABLE:
        return None


def plan_of_started_run(made: Plan) -> Plan | None:
    """The plan of a run that served although by `made` it does not start: its pool held one request at least, so what
    that lacks is taken off the peak. None where the peak is not what the plan has too much of."""
    from legroom.planning.plan import plan

    layout, needed = made.layout, made.memory.kv.needed_bytes
    missing = needed - layout.kv_cache.bytes
    if made.settings.kv_cache_memory_bytes is not None or not 0 < missing <= layout.activation.bytes:
        return None
    started = plan(_with_pool(made, needed), made.args)
    return started if started.starts else None


def _logged_model(args: ServeArgs) -> Model:
    """The model with its draft, by the names that the log prints; without the draft where that is unknown."""
    from legroom.vllm.resolve import with_draft
    from legroom.vllm_logs.printed_flags import load_logged_model  # costs a tenth of a second

    model = load_logged_model(args.model)
    try:
        return with_draft(model, args, load_logged_model)
    except LegroomError:
        return model


def weights_and_pool_beyond_card(case: Case, known: KnownDeployment) -> int:
    """The printed weights and KV cache of one GPU together, where they exceed the card that is named; else 0."""
    weights, pool, card = case.startup.weights_bytes or 0, pool_bytes(case) or 0, known.gpu
    is_one_rank = (known.args.pipeline_parallel_size or 1) == 1  # the pool of another stage may be larger
    is_more = card is not None and not card.larger and pool > 0 and weights + pool > card.total_bytes
    return weights + pool if is_one_rank and is_more else 0


def _with_implied_utilization(made: Plan, args: ServeArgs, pool: int) -> ServeArgs:
    """The flags with the utilization implied by weights, peak and the logged `pool` bytes, if below the default."""
    layout, default = made.layout, made.settings.gpu_memory_utilization
    share = round(default + (pool - layout.kv_cache.high) / layout.total_bytes, 2)
    return replace(args, gpu_memory_utilization=share) if 0 < share < default - 0.05 else args  # a step of shares


def _is_plan_too_small(made: Plan, case: Case) -> bool:
    """Whether the plan is far too small: before the KV cache, torch needed over a GiB more than its upper bounds."""
    oom, layout = case.oom, made.layout
    if oom is None or oom.torch_bytes is None or oom.pools_bytes or case.site not in ("", "profile"):
        return False
    is_pool_there = case.was_ready or case.phase_reached in ("startup_kv", "startup_graph", "serving")
    is_batch = oom.wanted_bytes >= max(2 * GIB, layout.total_bytes // 10)  # no weight is that large
    if is_pool_there or not (case.site or is_batch):
        return False
    return oom.torch_bytes + oom.wanted_bytes > layout.weights.high + layout.activation.high + GIB


def _with_logged_pool(made: Plan, case: Case) -> Target:
    """The plan's target, its KV pool the logged one plus the largest rounding error that prints alike, as vLLM
    estimates the length; unchanged where none is logged."""
    pool, tokens = pool_bytes(case), case.number("kv_tokens_short", "fits_len_count")
    if pool is None and tokens and not case.startup.explicit_kv:
        pool = made.memory.kv.shape.needed_bytes(tokens)
    is_given = pool is None or made.settings.kv_cache_memory_bytes is not None
    return made.target if pool is None or is_given else _with_pool(made, pool + GIB // 200 - MIB)


def _with_pool(made: Plan, pool: int) -> Target:
    """The plan's target with its activation peak changed so that the planned KV pool has `pool` bytes."""
    seen = made.target.seen or Measurements(source="this log")
    layout = made.layout
    peak = layout.activation.bytes + layout.kv_cache.bytes - pool
    # The sum is measured, so none of its terms has a band.
    terms: dict[str, Any] = {"weights_bytes": layout.weights.bytes, "non_torch_bytes": layout.non_torch.bytes}
    # What the model's peak is too much for, its graphs are, too.
    graphs = max(layout.cuda_graph.bytes + min(peak, 0), 0)
    terms |= {"graph_estimate_bytes": graphs} if layout.cuda_graph.bytes else {}
    terms |= {"activation_bytes": max(peak, 0)}
    derived = tuple(name for name in terms if getattr(seen, name) is None)
    return replace(made.target, seen=replace(seen, **terms, derived=derived))


def _release_in_use(case: Case, hints: Hints) -> tuple[Release, bool]:
    """(vLLM release of the run, whether it is known); for an unknown one a release that writes logs of this style."""
    if hints.vllm is not None:
        return known_release(hints.vllm), True
    if case.startup.vllm is not None:
        try:
            return known_release(case.startup.vllm), True
        except LegroomError:
            return logged_release(case.startup.vllm), False
    if case.engine.generation == "V0":
        return known_release("0.7.3" if case.engine.before_brackets else "0.8.5"), False
    return latest(), False


def merge_args(line: ServeArgs, logged: ServeArgs) -> ServeArgs:
    """The log's flags, completed by those of the user's command `line`."""
    shown = {
        field.name: value
        for field in fields(ServeArgs)
        if (value := getattr(logged, field.name)) != getattr(_UNSET, field.name) and field.name != "usage"
    }
    return replace(line, **shown)


_LARGEST = read_data("evidence.json")["largest_values"]


def _without_impossible_values(args: ServeArgs) -> ServeArgs:
    """The flags without numbers that no server can have, as a log may be truncated or garbled."""
    odd: dict[str, None] = {}
    for field in fields(ServeArgs):
        value = getattr(args, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        largest = 1.0 if field.name == "gpu_memory_utilization" else _LARGEST.get(field.name, 1 << 48)
        smallest = -1 if field.name == "max_model_len" else 0
        if not smallest <= value <= largest or (value == 0 and field.name in _LARGEST):
            odd[field.name] = None
    if any(not 0 < size <= 1 << 20 for size in args.cudagraph_capture_sizes or ()):
        odd["cudagraph_capture_sizes"] = None
    return replace(args, **odd) if odd else args  # type: ignore[arg-type]


def _find_gpu(case: Case, hints: Hints, total_bytes: int | None) -> Gpu | None:
    """The card by the user's or log's name, else its total; None without. LegroomError for the user's, if unknown."""
    name = hints.gpu or case.startup.gpu_name
    card: Gpu | None = None
    if name:
        try:
            card = known_gpu(name)
        except LegroomError:
            if hints.gpu:
                raise
    if card is None and total_bytes:
        card = None if case.oom is not None and case.oom.platform == "NPU" else _card_of_total(total_bytes)
        card = card or known_gpu(f"{total_bytes / GIB:.2f}GiB")
    if card is None or not total_bytes:
        return card
    size = _size_with_total(card, total_bytes) or (card if hints.gpu else None)
    return with_total(size, total_bytes) if size else card


def _size_with_total(card: Gpu, total_bytes: int) -> Gpu | None:
    """The variant of the card (of two memory sizes under one name) within 10 % of this total; None where none is."""
    sizes = (card, known_gpu(card.larger)) if card.larger else (card,)
    return next((size for size in sizes if abs(size.total_bytes - total_bytes) < size.total_bytes * 0.1), None)


def other_card_notes(case: Case, hints: Hints | None) -> tuple[str, ...]:
    """A note that the log's card has another memory size than the one that the user named; empty where it has not."""
    if hints is None or not hints.gpu:
        return ()
    total, named = known_deployment(case, hints).total_bytes, known_gpu(hints.gpu)
    if not total or _size_with_total(named, total):
        return ()
    logged = f"The log is of a card of {gib(total)}, and {named.name} has {gib(named.total_bytes)}"
    return (f"{logged}: everything here is computed with the log's size.",)


def _card_of_total(total_bytes: int) -> Gpu | None:
    """The card that reports this total; None where none does or cards of several compute capabilities do."""
    near = [card for card in all_gpus() if card.total_low_bytes * 0.995 <= total_bytes <= card.total_high_bytes * 1.005]
    return near[0] if near and len({card.compute_capability for card in near}) == 1 else None


def _printed_total_bytes(case: Case) -> int | None:
    """The card's total bytes as printed anywhere in the log; None where not printed."""
    if case.startup.gpu_total_bytes:
        return case.startup.gpu_total_bytes
    if case.oom and case.oom.total_bytes:
        return case.oom.total_bytes
    check = case.first("free_below_desired", "hbm_oom", "weights_told")
    total = check.number("total_bytes") if check else None
    return total if total is not None and total >= GIB // 4 else None


def _deduced_total(case: Case, args: ServeArgs, release: Release) -> int | None:
    """The card's total from vLLM's accounting; None where it cannot be computed."""
    try:
        return deduce_total_bytes(case, args, release, _logged_sizes(case))
    except NOT_PLANNABLE:
        return None


def _logged_sizes(case: Case) -> Measurements:
    """Weights, activation peak, non-torch and CUDA graph bytes that this log prints."""
    startup = case.startup
    return Measurements(
        startup.weights_bytes or None,
        startup.activation_bytes,
        startup.non_torch_bytes,
        startup.graph_estimate_bytes,
        startup.graph_bytes,
        "this log",
    )


def _neighbours_bytes(case: Case) -> int:
    """Bytes of the card that other processes hold according to the log; 0 where it shows none."""
    free, total = (case.number("free_below_desired", name) for name in ("free_bytes", "total_bytes"))
    if free is not None and total is not None:
        return max(total - free - GIB // 2, 0)
    return case.ledger.other_processes_bytes or 0


_MODULE = ("python", "-m", "vllm.entrypoints.openai.api_server")
_RESOLVED = read_data("evidence.json")["resolved_values"]
"""Values that an engine's config line prints although they were not given."""


@dataclass(frozen=True)
class RebuiltCommand:
    """The failed command line, as far as it can be reconstructed."""

    args: ServeArgs
    comment: str = ""
    """What the reader has to fill in; empty where everything is known."""
    is_unknown: bool = False
    """The command is not known: the comment names only the change."""
    is_module: bool = False
    """Started as `python -m vllm.entrypoints.openai.api_server`."""

    def words(self, flags: Mapping[str, Any], env: Mapping[str, str], release: Release) -> tuple[str, ...]:
        """The command as words, with `flags` (by vLLM's Python names; None removes one) and variables changed."""
        own = {name: value for name, value in flags.items() if name in ServeArgs.__dataclass_fields__}
        others = {name: value for name, value in flags.items() if name not in own}
        args = replace(self.args, **{"model": self.args.model or "MODEL", **own})
        if self.args.model and args.model != self.args.model and not is_given(self.args, "--served-model-name"):
            others["served_model_name"] = self.args.model  # the name that clients ask for
        # A guessed release may lack the flag.
        dests = {flag.dest for flag in flags_of(release).values()}
        others |= {name: value for name, value in own.items() if value is not None and name not in dests}
        args = replace(args, others=with_settings(args.others, 0, others, release))
        words = command(args, release)
        if self.is_module and words[:2] == ("vllm", "serve"):
            words = (*_MODULE, "--model", *words[2:])
        return tuple(without_secrets((*assignments({**self.args.env, **env}), *words)))

    def remark(self, flags: Mapping[str, Any], env: Mapping[str, str]) -> str:
        """The comment for the command; where the command is not known, the changed flags and variables alone."""
        if not self.is_unknown:
            return self.comment
        changed = " ".join([*assignments(env), *any_release_words(flags)])
        gone = [flag_name(name) for name, value in flags.items() if value is None]
        taken_out = f"without {' '.join(gone)}" if gone else ""
        return f"{self.comment}: {' '.join(part for part in (changed, taken_out) if part)}"


def rebuilt_command(startup: Startup, line: ServeArgs | None, model: str, lost: tuple[str, ...] = ()) -> RebuiltCommand:
    """The failed command: the user's line (`lost`: its unknown flags), else logged flags, else the engine's config."""
    given = startup.given
    if line is not None:
        args = merge_args(line, given.args if startup.args_known else _UNSET)
        comment = f"this release does not take {', '.join(lost)} of your line: not repeated here" if lost else ""
        return RebuiltCommand(replace(args, model=line.model or model, others=line.others), comment)
    if startup.args_known:
        args = replace(given.args, model=given.args.model or model)
        return RebuiltCommand(
            args, _unknown_flags_comment(given.unknown, startup), is_module=given.is_module and startup.vllm is None
        )
    repeated: dict[str, Any] = {name: None for name, value in _RESOLVED.items() if getattr(startup.args, name) == value}
    args = replace(startup.args, **repeated, model=model)
    if startup.args.model:
        resolved = "the log shows what the engine resolved, not the flags that were given; "
        comment = f"{resolved if startup.last_line else ''}keep your other flags"
        return RebuiltCommand(args, comment)
    return RebuiltCommand(args, "keep your command and change only", is_unknown=True)


def _unknown_flags_comment(names: tuple[str, ...], startup: Startup) -> str:
    """A comment on flags `names` that the log cuts off, and on keyword arguments of LLM(...); empty without both."""
    parts = []
    if names:
        parts.append(f"add what the log does not show in full: {', '.join(names)}")
    if startup.args.usage == "llm":
        parts.append("the log is of LLM(...) in Python: the same names are its keyword arguments")
    return "; ".join(parts)
