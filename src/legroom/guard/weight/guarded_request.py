"""A request on a guarded path, from its body to the end of its answer: what it may grow to, and what became of it."""

from __future__ import annotations

import math
from typing import NamedTuple

from legroom.guard.policy import PoolPolicy
from legroom.guard.pool.projection import BlockNeed, Growth, Reservation
from legroom.guard.request.body import Demand
from legroom.guard.request.prefixes import CHARS_PER_TOKEN, PrefixChain
from legroom.guard.request.prompts import Prompt
from legroom.guard.weight.engine_limits import DEFAULT_BLOCK, EngineLimits
from legroom.guard.weight.output_lengths import LikelyLengths
from legroom.guard.weight.token_estimates import FEWEST, ModelTokens

OUTPUT_SHARE = 0.99
"""Of answers without max_tokens, how many stay within what is reserved for one."""
MEDIA_MARGIN = 1.25


class Weight(NamedTuple):
    """A request at its fullest."""

    blocks: int
    tokens: int
    sequences: int
    prompt_tokens: int
    """The bound of the longest prompt, of what stands in the request: media and earlier responses are not in it."""
    certain_blocks: int
    """Of its largest sequence, the part that is counted rather than estimated: what decides that it can never fit."""
    start_blocks: int = 0
    """What it holds when its answers begin."""
    most_steps: int = 0
    """Tokens that each answer may have."""
    chains: tuple[PrefixChain, ...] = ()
    """How its prompts begin."""
    blocks_per_unit: float = 1.0
    """Of these."""
    prompts: int = 1


def weight_of(
    demand: Demand, limits: EngineLimits, policy: PoolPolicy, learnt: ModelTokens, exact_tokens: int | None = None
) -> Weight:
    """Weigh a request: each prompt with its answer, rounded up to blocks, times its copies, which share the prompt's
    full blocks where the server has a prefix cache. What it shares with other requests is the pool's to know.
    """
    longest_len = limits.max_model_len or 0
    output = _output_tokens(demand, limits, policy, learnt)
    blocks = tokens = certain = longest = start = shared = 0
    unit = limits.prefix_unit if demand.sequences > 1 and not demand.prompt_logprobs else None
    share = media_tokens(demand, limits, learnt)
    for prompt in demand.prompts or (Prompt(tokens=1),):
        size, sure, here = _prompt_tokens(prompt, limits, learnt, share)
        if exact_tokens is not None and len(demand.prompts) == 1:
            size = sure = here = exact_tokens
        whole, surely = size + output.reserved, sure + output.certain
        if longest_len:  # a longer one is refused by the server, or ends there
            whole, surely, here = min(whole, longest_len), min(surely, longest_len), min(here, longest_len)
        tokens += whole
        blocks += limits.blocks(whole)
        start += limits.blocks(min(size + 1, whole))
        if unit is not None:
            shared += max(0, min(size, whole) - unit.own_tokens) // unit.block_size
        certain = max(certain, limits.blocks(surely))
        longest = max(longest, here)
    copies = demand.sequences
    sequences = max(1, len(demand.prompts)) * copies
    saved = shared * (copies - 1)
    chains = tuple([prompt.chain for prompt in demand.prompts if prompt.chain is not None])
    rate = 1.0
    if chains and not chains[0].exact:
        text = demand.prompts[0]
        tokens_a_byte = learnt.ratio(text.ascii_only) if exact_tokens is None else exact_tokens / text.text_bytes
        rate = CHARS_PER_TOKEN * min(1.0, tokens_a_byte)
    return Weight(
        blocks * copies - saved,
        tokens * copies,
        sequences,
        longest,
        certain,
        start * copies - saved,
        output.reserved,
        chains,
        rate,
        max(1, len(demand.prompts)),
    )


def need_of(
    weight: Weight,
    answer: LikelyLengths | None,
    blocks: int | None,
    sequences: int | None,
    block_size: int = DEFAULT_BLOCK,
) -> BlockNeed:
    """What the pool is asked for. `answer` None: strictly, all of it from the start.

    A request of more sequences than run at once has its turn all the same: vLLM queues sequences. Strictly that is when
    it has the pool to itself; else half of the pool is enough to begin.
    """
    fewer = 1 if answer is None else 2
    most_blocks = weight.blocks if blocks is None or weight.blocks <= blocks else max(1, blocks // fewer)
    most_seats = weight.sequences if sequences is None or weight.sequences <= sequences else max(1, sequences // fewer)
    whole = most_blocks == weight.blocks
    if answer is None or not weight.most_steps:
        # Strictly, only what is counted is counted on.
        exact = weight.chains if whole and all(chain.exact for chain in weight.chains) else ()
        return BlockNeed(most_blocks, most_seats, chains=exact)
    part = most_blocks / max(1, weight.blocks)
    steps = min(answer.expected, weight.most_steps)
    grown = weight.start_blocks + (weight.blocks - weight.start_blocks) * steps / weight.most_steps
    # Copies of one prompt take their blocks together, in one step; of several prompts each when it comes to it.
    by_blocks = weight.prompts == 1
    growth = Growth(
        max(1, round(weight.start_blocks * part)),
        max(1, math.ceil(grown * part)),
        steps,
        weight.most_steps,
        answer.quantiles,
        -weight.prompt_tokens % block_size if by_blocks else 0,
        block_size if by_blocks else 0,
    )
    chains = weight.chains if whole else ()
    return BlockNeed(most_blocks, most_seats, growth, weight.prompt_tokens, chains, weight.blocks_per_unit)


class _Output(NamedTuple):
    reserved: int
    certain: int


def _output_tokens(demand: Demand, limits: EngineLimits, policy: PoolPolicy, learnt: ModelTokens) -> _Output:
    if not demand.generates:
        return _Output(0, 0)
    if demand.output_tokens is not None:
        return _Output(demand.output_tokens, demand.output_tokens)
    worst = limits.default_output_tokens or limits.max_model_len or 4096
    if isinstance(policy.open_ended, int):
        return _Output(min(worst, policy.open_ended), 0)
    if policy.open_ended == "learnt" and learnt.outputs.count >= FEWEST:
        return _Output(min(worst, learnt.outputs.at(OUTPUT_SHARE)), 0)
    return _Output(worst, 0)


def _prompt_tokens(prompt: Prompt, limits: EngineLimits, learnt: ModelTokens, media: int) -> tuple[int, int, int]:
    """The bound, how much of it is certain, and how much of it stands in the request."""
    if prompt.exact:
        return prompt.tokens, prompt.tokens, prompt.tokens
    here = max(prompt.tokens, learnt.bound(prompt.text_bytes, prompt.ascii_only, prompt.messages))
    if prompt.open_ended:
        return limits.max_model_len or here, 0, here
    return here + media, 0, here


def media_tokens(demand: Demand, limits: EngineLimits, learnt: ModelTokens) -> int:
    """What images and clips may add; the whole length of the model until answers have shown what one takes."""
    if not demand.media:
        return 0
    if learnt.media_tokens.count < FEWEST:
        return limits.max_model_len or 4096 * len(demand.media)
    return int(learnt.media_tokens.value * MEDIA_MARGIN) * len(demand.media)


class GuardedRequest:
    __slots__ = (
        "answered",
        "body",
        "changed",
        "client",
        "copies",
        "demand",
        "events",
        "informative",
        "reservation",
        "usage",
        "weight",
    )

    def __init__(self, body: bytes, demand: Demand, changed: bool = False, client: str = "") -> None:
        self.body = body
        self.demand = demand
        self.changed = changed
        """The body is not as the client sent it."""
        self.client = client
        self.copies = max(1, demand.sequences * len(demand.prompts))
        """Answers that it asks for."""
        self.informative = demand.informative
        self.weight: Weight | None = None
        self.reservation: Reservation | None = None
        self.usage: tuple[int, int] | None = None
        """Prompt and output tokens, as its answer named them last."""
        self.answered = False
        """A good answer began."""
        self.events = 0
        """Pieces of its stream so far."""
