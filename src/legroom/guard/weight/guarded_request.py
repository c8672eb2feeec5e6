"""The KV blocks that a request may need, and the state of a request while it is guarded."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from legroom.guard.policy import PoolPolicy
from legroom.guard.pool.projection import BlockNeed, Growth, Reservation
from legroom.guard.request.body import Demand
from legroom.guard.request.prefixes import CHARS_PER_TOKEN, PrefixChain
from legroom.guard.request.prompts import Prompt
from legroom.guard.weight.engine_limits import EngineLimits
from legroom.guard.weight.learnt_tokens import FEWEST, LikelyLengths, ModelTokens


class Weight(NamedTuple):
    """A request at its longest."""

    blocks: int
    tokens: int
    sequences: int
    prompt_tokens: int
    """Bound of the longest prompt, without media and earlier responses."""
    certain_blocks: int
    """Blocks of its largest sequence by counted tokens alone; more than the pool can never fit."""
    start_blocks: int = 0
    """Blocks held when its answers begin."""
    most_steps: int = 0
    """Tokens that each answer may have."""
    chains: tuple[PrefixChain, ...] = ()
    """Prefixes of its prompts."""
    blocks_per_unit: float = 1.0
    """Blocks per unit of the prefixes."""
    prompts: int = 1


def weight_of(
    demand: Demand, limits: EngineLimits, policy: PoolPolicy, learnt: ModelTokens, exact_tokens: int | None = None
) -> Weight:
    """What the request holds at its longest: each prompt with its answer, times `n`. `exact_tokens`: the prompt's
    tokens where the server's tokenizer counted them."""
    longest_len = limits.max_model_len or 0
    reserved_output, named_output = _output_tokens(demand, limits, policy, learnt)
    blocks = tokens = certain = longest = start = shared = 0
    unit = limits.prefix_unit if demand.sequences > 1 and not demand.prompt_logprobs else None
    share = media_tokens(demand, limits, learnt)
    for prompt in demand.prompts or (Prompt(tokens=1),):
        size, sure, here = _prompt_tokens(prompt, limits, learnt, share)
        if exact_tokens is not None and len(demand.prompts) == 1:
            size = sure = here = exact_tokens
        whole, surely = size + reserved_output, sure + named_output
        if longest_len:  # the server refuses a longer one, or ends it there
            whole, surely, here = min(whole, longest_len), min(surely, longest_len), min(here, longest_len)
        tokens += whole
        blocks += limits.blocks(whole)
        start += limits.blocks(min(size + 1, whole))
        if unit is not None:
            shared += max(0, min(size, whole) - unit.own_tokens) // unit.block_size
        certain = max(certain, limits.blocks(surely))
        longest = max(longest, here)
    copies, prompts = demand.sequences, max(1, len(demand.prompts))
    sequences, saved = prompts * copies, shared * (copies - 1)
    chains = tuple([prompt.chain for prompt in demand.prompts if prompt.chain is not None])
    rate = 1.0
    if chains and not chains[0].exact:
        text = demand.prompts[0]
        tokens_a_byte = learnt.ratio(text.ascii_only) if exact_tokens is None else exact_tokens / text.text_bytes
        rate = CHARS_PER_TOKEN * min(1.0, tokens_a_byte)
    held, begun, whole = blocks * copies - saved, start * copies - saved, tokens * copies
    return Weight(held, whole, sequences, longest, certain, begun, reserved_output, chains, rate, prompts)


def need_of(
    weight: Weight, answer: LikelyLengths | None, blocks: int | None, sequences: int | None, block_size: int
) -> BlockNeed:
    """What a request reserves in a pool of `blocks` and `sequences` (None: no limit), by the likely lengths of its
    `answer`; at its longest where `answer` is None."""
    # A request larger than the pool is still served, because vLLM queues its sequences: it is counted as the whole
    # pool, or by projection as half of it.
    fewer = 1 if answer is None else 2
    most_blocks, most_sequences = (
        needed if limit is None or needed <= limit else max(1, limit // fewer)
        for needed, limit in ((weight.blocks, blocks), (weight.sequences, sequences))
    )
    whole = most_blocks == weight.blocks
    if answer is None or not weight.most_steps:
        # Prefixes of texts are estimates, which strict admission does not use.
        exact = weight.chains if whole and all(chain.exact for chain in weight.chains) else ()
        return BlockNeed(most_blocks, most_sequences, chains=exact)
    part = most_blocks / max(1, weight.blocks)
    steps = min(answer.expected, weight.most_steps)
    grown = weight.start_blocks + (weight.blocks - weight.start_blocks) * steps / weight.most_steps
    start_blocks, end_blocks = max(1, round(weight.start_blocks * part)), max(1, math.ceil(grown * part))
    # Copies of one prompt allocate blocks in the same step; several prompts do not.
    free, size = (-weight.prompt_tokens % block_size, block_size) if weight.prompts == 1 else (0, 0)
    growth = Growth(start_blocks, end_blocks, steps, weight.most_steps, answer.quantiles, free, size)
    chains = weight.chains if whole else ()
    return BlockNeed(most_blocks, most_sequences, growth, weight.prompt_tokens, chains, weight.blocks_per_unit)


def _output_tokens(demand: Demand, limits: EngineLimits, policy: PoolPolicy, learnt: ModelTokens) -> tuple[int, int]:
    """(Output tokens to reserve per sequence, the request's own max_tokens or 0 without one)."""
    if not demand.generates:
        return 0, 0
    if demand.output_tokens is not None:
        return demand.output_tokens, demand.output_tokens
    worst = limits.default_output_tokens or limits.max_model_len or 4096
    if isinstance(policy.open_ended, int):
        return min(worst, policy.open_ended), 0
    if policy.open_ended == "learnt" and learnt.outputs.count >= FEWEST:
        return min(worst, learnt.outputs.at(0.99)), 0
    return worst, 0


def _prompt_tokens(prompt: Prompt, limits: EngineLimits, learnt: ModelTokens, media: int) -> tuple[int, int, int]:
    """(Bound of a prompt's tokens with `media` more for images, those known exactly, bound for its text alone)."""
    if prompt.exact:
        return prompt.tokens, prompt.tokens, prompt.tokens
    here = max(prompt.tokens, learnt.bound(prompt.text_bytes, prompt.ascii_only, prompt.messages))
    return (limits.max_model_len or here, 0, here) if prompt.open_ended else (here + media, 0, here)


def media_tokens(demand: Demand, limits: EngineLimits, learnt: ModelTokens) -> int:
    """The most tokens that all media may add, as learnt from 32 responses; before, max_model_len or 4,096 for each."""
    if not demand.media:
        return 0
    if learnt.media_tokens.count < FEWEST:
        return limits.max_model_len or 4096 * len(demand.media)
    return int(learnt.media_tokens.value * 1.25) * len(demand.media)


@dataclass(slots=True, eq=False)
class GuardedRequest:
    """A request from its body to the end of its response."""

    body: bytes
    demand: Demand
    changed: bool = False
    """The body was rewritten by the policy's caps."""
    client: str = ""
    weight: Weight | None = None
    reservation: Reservation | None = None
    usage: tuple[int, int] | None = None
    """Prompt and output tokens by the latest `usage` of its response."""
    answered: bool = False
    """A response with status 200 began."""
    events: int = 0
    """Events streamed so far."""
    copies: int = field(init=False)
    """Answers of one request."""
    informative: bool = field(init=False)

    def __post_init__(self) -> None:
        self.copies = max(1, self.demand.sequences * len(self.demand.prompts))
        self.informative = self.demand.informative
