from enum import Enum, auto

from legroom.simulation.block_pool import Block
from legroom.simulation.trace import TraceRequest


class Status(Enum):
    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Request:
    """A request in the scheduler: its lengths, its progress, and the steps of its latency."""

    def __init__(self, row: TraceRequest, arrival_index: int, max_model_len: int) -> None:
        self.id = row.id
        self.arrival_index = arrival_index
        self.priority = row.priority
        self.num_prompt_tokens = row.prompt_len
        self.max_total_tokens = min(row.prompt_len + row.output_len, max_model_len)
        self.num_output_tokens = self.num_computed_tokens = self.peak_computed_tokens = self.num_draft_tokens = 0
        self.draft_credit = 0.0
        """Fraction of a draft token that is accepted later, as only whole ones are."""
        self.num_placeholders = 0
        """Tokens that steps in flight sample: counted, but not known yet."""
        self.in_flight_tokens = 0
        self.stale_tokens = 0
        """Tokens in flight from before its preemption."""
        self.stable_until_tokens = 0
        """Its blocks do not change up to this length."""
        self.num_preemptions = self.shared_prefix_boundary = 0
        self.status = Status.WAITING
        self.token_ids: list[int] = []
        self.block_hashes: list[int] = []
        self.blocks: list[list[Block]] = []
        self.num_cached_blocks: list[int] = []
        self.first_sched_step = self.first_token_step = self.finish_step = -1

    @property
    def num_tokens(self) -> int:
        """Prompt tokens and the output tokens generated so far."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_complete(self) -> bool:
        """Whether all requested output tokens were sampled."""
        return self.num_tokens >= self.max_total_tokens

    @property
    def priority_key(self) -> tuple[int, int]:
        """The order in which vLLM's priority policy serves requests, smallest first: priority, then arrival."""
        return (self.priority, self.arrival_index)
