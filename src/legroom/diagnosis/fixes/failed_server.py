"""What is known of the failed server: its settings in force, its plan, the accounting of its log, its card."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from legroom.diagnosis.case import Case
from legroom.diagnosis.fixes import failed_run
from legroom.diagnosis.fixes.log_accounting import LogAccounting, log_accounting
from legroom.errors import LegroomError
from legroom.facts.flags import default
from legroom.facts.gpus import gpu as known_gpu
from legroom.vllm.args import ServeArgs
from legroom.vllm.batching import device_defaults

if TYPE_CHECKING:
    from legroom.facts.model import Model
    from legroom.planning.plan import Plan

_CUT_CHECK = "free_below_desired_bare"
_BY_CARD = ("max_num_batched_tokens", "max_num_seqs")


class FailedServer:
    """The server that failed, as its log, its plan and the user tell of it."""

    def __init__(self, case: Case, hints: failed_run.Hints | None = None) -> None:
        self.case = case
        self._hints = hints or failed_run.Hints()

    @cached_property
    def known(self) -> failed_run.KnownDeployment:
        """Model, GPU, release and flags of the failed deployment, from the log, else from the user."""
        return failed_run.known_deployment(self.case, self._hints)

    @cached_property
    def given_args(self) -> ServeArgs:
        """The flags exactly as typed: from the user's line, else from the log."""
        if self._hints.command:
            return failed_run.given_deployment(self._hints, self.known.release).args
        return self.case.startup.args

    @cached_property
    def failed_plan(self) -> Plan | None:
        """The failed run as a plan; None where model or GPU is not known, or the log contradicts it."""
        made = failed_run.plan_of_failed_run(self.case, self.known)
        is_refuted = made is not None and self.case.was_ready and not made.starts
        return failed_run.plan_of_started_run(made) if made is not None and is_refuted else made

    @cached_property
    def refuted_plan(self) -> Plan | None:
        """The plan of a run that served, by which it cannot have started; None where there is no such plan."""
        is_refuted = self.failed_plan is None and self.case.was_ready
        return failed_run.plan_of_failed_run(self.case, self.known) if is_refuted else None

    @cached_property
    def model(self) -> Model | None:
        """The model of the failed run, whatever its card; None where its name or config is not known."""
        from legroom.vllm_logs.printed_flags import load_logged_model  # costs a tenth of a second

        if self.failed_plan is not None:
            return self.failed_plan.target.model
        try:
            return load_logged_model(self.known.args.model) if self.known.args.model else None
        except LegroomError:
            return None

    @cached_property
    def accounting(self) -> LogAccounting:
        """vLLM's memory accounting for the failed run: the log's figures, weights planned where it prints none."""
        made = None if self.case.startup.weights_bytes else self.plan_by_config
        planned = made.layout.weights.bytes if made is not None else None
        return log_accounting(self.case, self.utilization, self.total_bytes, planned)

    @cached_property
    def plan_by_config(self) -> Plan | None:
        """The plan without the log's sizes, on the known card or 96 GiB; None if model or GPU count is unknown."""
        from legroom.planning.plan import Target, plan

        args = self.known.args
        if self.model is None or not (self.known.ranks_known or args.tensor_parallel_size is None):
            return None
        try:
            card = self.known.gpu or known_gpu("96GiB")
            return plan(Target(self.model, card, args.gpus_needed, self.known.release), args)
        except failed_run.NOT_PLANNABLE:
            return None

    @property
    def one_request_bytes(self) -> int:
        """KV cache bytes of one request of max_model_len by the model's config; 0 where it is not known."""
        made = self.plan_by_config
        return made.memory.kv.shape.needed_bytes(made.settings.max_model_len) if made is not None else 0

    @property
    def utilization_known(self) -> bool:
        """Whether the log or the user shows gpu_memory_utilization, or that it was not set."""
        if self.case.has("free_below_desired", "graph_share") or self.known.args.gpu_memory_utilization is not None:
            return True
        return self.flags_known or any("utilization_ratio" in item.facts for item in self.case.all(_CUT_CHECK))

    @property
    def flags_known(self) -> bool:
        """Whether the log or the user shows every flag, so that a missing one has its default."""
        return self.case.startup.args_known or bool(self._hints.command)

    @property
    def utilization(self) -> float:
        """gpu_memory_utilization of the failed run: as shown, else the default, or the fraction in use if less."""
        check, compared = self.case.first("free_below_desired", _CUT_CHECK), self.case.first("graph_share")
        for share in (
            check.facts.get("utilization_ratio") if check else None,
            self.known.args.gpu_memory_utilization,
            compared.facts.get("given_ratio") if compared else None,
        ):
            if isinstance(share, float):
                return share
        default, ledger = self.default_utilization, self.case.ledger
        if not ledger.total_bytes or ledger.free_bytes is None or self.case.phase not in ("serving", "startup_graph"):
            return default
        # With the pool in place a server holds its share and what is outside of it, so the share is at most that.
        held = ledger.total_bytes - ledger.free_bytes - (ledger.other_processes_bytes or ledger.unowned_bytes)
        return min(default, math.floor(held / ledger.total_bytes * 100) / 100)

    def in_force(self, name: str) -> Any:
        """The failed run's value of setting `name`: as given, else its default on this card; None where not known."""
        if (given := getattr(self.known.args, name, None)) is not None:
            return given
        if self.failed_plan is not None:
            return getattr(self.failed_plan.settings, name, None)
        if name not in _BY_CARD or not self.flags_known:
            return None
        return self._default_by_card(name)

    def _default_by_card(self, name: str) -> int | None:
        """V1's default of max_num_batched_tokens or max_num_seqs on this card; None where the card is not known."""
        card, known = self.known.gpu, self.known
        return device_defaults(card, known.release, known.args.usage)[_BY_CARD.index(name)] if card else None

    @property
    def step_tokens(self) -> int:
        """max_num_batched_tokens of the failed run; where not known, the smallest default that it may have."""
        if (known := self.in_force(_BY_CARD[0])) or (known := self._default_by_card(_BY_CARD[0])):
            return int(known)
        # V0 takes whole prompts.
        return 8192 if self.known.args.usage == "llm" or self.case.engine.generation == "V0" else 2048

    @property
    def unpredicted_pool_bytes(self) -> int:
        """The KV pool that the failed run's plan predicts although the text says that none was left; else 0."""
        is_told = self.case.has("no_cache_blocks") and self.case.startup.available_kv_bytes is None
        return max(self.failed_plan.layout.kv_cache.bytes, 0) if is_told and self.failed_plan is not None else 0

    @property
    def may_be_before_v1(self) -> bool:
        """Whether the release is before 0.8, which made V1 the default; if unknown, whether frames name no engine."""
        if self.known.release_known:
            return self.known.release.before("0.8.0") and self.case.engine.generation != "V1"
        calls = (item.text for item in self.case.evidence if item.role == "frame")
        return not self.case.engine.generation and any(text.endswith(")") for text in calls)

    @property
    def captures_outside_budget(self) -> bool:
        """Whether CUDA graphs are allocated outside gpu_memory_utilization's budget, as before 0.20."""
        release = self.known.release
        return release.before("0.20.0") if self.known.release_known else self.case.engine.generation == "V0"

    @property
    def can_offload_weights(self) -> bool:
        """Whether weights can stay in host RAM: V1 reads them in pinned memory, which vLLM does not use under WSL."""
        return not self.case.platform.wsl or self.case.engine.generation == "V0"

    @property
    def at_share(self) -> str:
        """` at 0.9 of the card`, to append to a sentence; empty where gpu_memory_utilization is not known."""
        return f" at {self.utilization:g} of the card" if self.utilization_known else ""

    def release_is_within(self, first: str, last: str) -> bool:
        """Whether the release is known and lies in first..last, both included; an empty `last` means no upper bound."""
        release = self.known.release
        if not self.known.release_known or not release.at_least(first):
            return False
        return not last or release.within(first, last)

    @property
    def default_utilization(self) -> float:
        """The release's default of gpu_memory_utilization; 0.9, as of nearly all, where the release is not known."""
        return float(default("--gpu-memory-utilization", self.known.release)) if self.known.release_known else 0.9

    @property
    def total_bytes(self) -> int | None:
        """The card's total memory, as printed, else of the card that is named; None where neither is known."""
        return self.known.total_bytes or (self.known.gpu.total_bytes if self.known.gpu else None)
