"""num_gpu_blocks, the KV cache size and concurrency that the release logs, and its length checks."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from functools import partial

from legroom.facts.gpus import Gpu
from legroom.facts.model import Model
from legroom.figures import Term
from legroom.memory.kv.layer_specs import WHOLE_REQUEST
from legroom.memory.kv.shape import LONGEST_LEN, KvShape, demanded, kv_shape
from legroom.memory.layout import Failure, check_text, too_long_text
from legroom.records import dataclass, field
from legroom.units import cdiv
from legroom.vllm.args import EngineSettings


@dataclass(frozen=True, slots=True)
class KvPlan:
    """The KV cache of one deployment. Tokens and concurrency are those that the release logs."""

    num_blocks: int
    block_size: int
    tokens: int
    max_concurrency: float
    bytes_per_block: int
    """Bytes of one block id on the tightest stage."""
    bytes_per_token: int
    """Bytes of a full-length request over its length."""
    max_model_len: int
    """As given, or fitted to the memory."""
    needed_bytes: int
    """Bytes of one request of max_model_len in the release's length check."""
    state_blocks: int | None
    """Blocks for recurrent states, the upper limit of max_num_seqs in hybrid models with full CUDA graphs."""
    failure: Failure | None
    shape: KvShape = field(repr=False, compare=False)
    checked_bytes: tuple[int, ...] = field(repr=False)
    """The bytes that the length check of each stage uses."""

    @property
    def longest_len(self) -> int:
        """The longest max_model_len that passes vLLM's check; 0 for an unsupported cache, LONGEST_LEN without any."""
        if self.shape.is_empty:
            return LONGEST_LEN
        if self.shape.unsupported is not None:
            return 0
        return min(self.shape.longest_len(bytes_, stage) for stage, bytes_ in enumerate(self.checked_bytes))

    @property
    def token_terms(self) -> tuple[Term, ...]:
        """The terms of the bytes per token on one GPU, one per kind of layer; empty with V0."""
        counts = Counter(spec for group in self.shape.groups for spec in group.specs)
        return tuple(
            Term(
                f"{number} {spec.title} layer{'s' if number > 1 else ''}",
                number * spec.bytes_of_token,
                spec.arithmetic_text,
            )
            for spec, number in counts.items()
        )

    def longest_for(self, requests: int) -> int:
        """The longest context (at most max_model_len) of which this many requests fit at once; 0 without KV blocks."""
        if self.shape.is_empty or self.num_blocks <= 0:
            return 0
        requests_at_once = partial(_logged_concurrency, self.shape, self.num_blocks)
        lengths = range(1, self.max_model_len + 1)
        # Concurrency falls as requests grow, so the lengths can be bisected.
        return bisect_left(lengths, True, key=lambda length: requests_at_once(length) < requests)


def kv_plan(model: Model, settings: EngineSettings, gpu: Gpu, available_bytes: Sequence[int]) -> KvPlan:
    """The KV cache of a deployment and the first check that fails; `available_bytes`: for KV on each pipeline stage."""
    return plan_of_shape(kv_shape(model, settings, gpu), settings, available_bytes)


def plan_of_shape(shape: KvShape, settings: EngineSettings, available_bytes: Sequence[int]) -> KvPlan:
    """The KV cache of this shape, and the first check that fails; `available_bytes`: for KV on each pipeline stage."""
    if shape.is_empty or shape.unsupported is not None:
        text = shape.unsupported or "NotImplementedError: this release cannot mix KV caches with pages of these sizes"
        failure = None if shape.is_empty else Failure("unsupported_kv_cache", text, 0, 0)
        return KvPlan(0, shape.block_size, 0, 0.0, 0, 0, settings.max_model_len, 0, None, failure, shape, ())
    available, override = available_bytes, settings.num_gpu_blocks_override
    if override is not None and shape.era.override_replaces_memory:
        available = [override * stage.bytes_per_block for stage in shape.stages]
    checked = [shape.checked_bytes(bytes_, stage) for stage, bytes_ in enumerate(available)]
    length = settings.max_model_len
    if settings.auto_fit_len:
        length = min(length, *(shape.longest_len(bytes_, stage, length) for stage, bytes_ in enumerate(checked)))
    counts = [_stage_blocks(shape, settings, bytes_, stage) for stage, bytes_ in enumerate(available_bytes)]
    blocks = min(counts)
    printed = counts[0] if shape.era.first_stage_printed else blocks
    concurrency = _logged_concurrency(shape, printed, length)
    tightest = counts.index(blocks)
    return KvPlan(
        num_blocks=blocks,
        block_size=_block_size(shape, length),
        tokens=_logged_tokens(shape, printed, concurrency, length),
        max_concurrency=concurrency,
        bytes_per_block=shape.stages[tightest].bytes_per_block,
        bytes_per_token=_bytes_per_token(shape, tightest, max(length, 1)),
        max_model_len=length,
        needed_bytes=shape.needed_bytes(max(length, 1), tightest),
        state_blocks=blocks if shape.has_states and shape.engine == "V1" else None,
        failure=_failed_check(shape, settings, checked, length, blocks),
        shape=shape,
        checked_bytes=tuple(checked),
    )


def _stage_blocks(shape: KvShape, settings: EngineSettings, available_bytes: int, stage: int) -> int:
    """Blocks that fit into `available_bytes` on a stage (LONGEST_LEN without KV), or --num-gpu-blocks-override."""
    override = settings.num_gpu_blocks_override
    if override is not None and not shape.era.override_forgotten:
        return override
    width = shape.stages[stage].bytes_per_block
    return max(available_bytes, 0) // width if width else LONGEST_LEN


def _block_size(shape: KvShape, length: int) -> int:
    """Tokens per block as reported: the smallest group's (0.18+); `length` if every group has states (0.20+)."""
    smallest = min((group.block_size for group in shape.stages[0].groups), default=shape.block_size)
    if shape.release.before("0.18.0") or (smallest == WHOLE_REQUEST and shape.release.before("0.20.0")):
        return shape.block_size
    return length if smallest == WHOLE_REQUEST else smallest


def _logged_concurrency(shape: KvShape, blocks: int, length: int) -> float:
    """Requests of `length` tokens that `blocks` hold at once, as the "Maximum concurrency" log line states them."""
    if length < 1:
        return 0.0
    if shape.era.concurrency_by_slots:
        return blocks * shape.block_size / length
    request = demanded(shape.printed, length)
    if not shape.era.concurrency_by_blocks:
        request = cdiv(request, shape.stages[0].groups[0].spec.page_bytes)
    return blocks / max(1, request)


def _logged_tokens(shape: KvShape, blocks: int, concurrency: float, length: int) -> int:
    """The tokens of the "GPU KV cache size" line, when `blocks` hold `concurrency` requests of `length` tokens."""
    if shape.era.tokens_line == "slots":
        return blocks * shape.block_size
    if shape.era.tokens_line == "full-length requests":
        return int(concurrency * length)
    groups = shape.stages[0].groups
    if shape.release.version == "0.9.1":
        smallest = shape.block_size
    else:  # a state that stands for a whole request counts as a block of max_model_len
        smallest = min(length if group.block_size == WHOLE_REQUEST else group.block_size for group in groups)
    return blocks // len(groups) * smallest * shape.context_shards


def _bytes_per_token(shape: KvShape, stage: int, length: int) -> int:
    """KV bytes on one stage of a request of `length` tokens, per token (a short one: per slot of one block)."""
    here = shape.stages[stage]
    if shape.engine == "V0":
        return here.bytes_per_block // shape.block_size
    return cdiv(here.bytes_per_block * shape.blocks(length, stage), max(length, shape.block_size))


def _failed_check(
    shape: KvShape, settings: EngineSettings, stage_bytes: Sequence[int], length: int, blocks: int
) -> Failure | None:
    """The first KV cache check that fails for a request of `length` tokens and a pool of `blocks`, or None."""
    if settings.auto_fit_len and length <= 0:
        needed = max(shape.needed_bytes(1, stage) for stage in range(len(stage_bytes)))
        return Failure("no_cache_blocks", check_text("auto_fit", shape.release), needed, min(stage_bytes), 0)
    if shape.engine == "V0":
        return _v0_failure(shape, settings, stage_bytes, blocks)
    stages = [(stage, bytes_) for stage, bytes_ in enumerate(stage_bytes) if shape.stages[stage].specs]
    for stage, bytes_ in [(0, min(stage_bytes))] if shape.era.smallest_stage_alone else stages:
        needed = shape.needed_bytes(length, stage)
        if bytes_ <= 0:
            return Failure("no_cache_blocks", check_text("no_blocks", shape.release), needed, bytes_, 0)
        if needed > bytes_:
            longest = shape.longest_len(bytes_, stage, length)
            tokens = {"max_model_len": length, "estimated_max_len": longest, "capacity": blocks * shape.block_size}
            text = too_long_text(shape.release, needed, bytes_, **tokens)
            return Failure("kv_too_small_for_max_len", text, needed, bytes_, longest)
    return state_failure(shape, settings, blocks)


def _v0_failure(shape: KvShape, settings: EngineSettings, stage_bytes: Sequence[int], blocks: int) -> Failure | None:
    """The V0 engine's failed check: no blocks, or fewer token slots than max_model_len; else None."""
    tightest = min(range(len(stage_bytes)), key=lambda stage: stage_bytes[stage])
    needed = shape.needed_bytes(settings.max_model_len, tightest)
    if blocks <= 0:
        return Failure("no_cache_blocks", check_text("no_blocks", shape.release), needed, stage_bytes[tightest], 0)
    capacity = blocks * shape.block_size
    if settings.max_model_len <= capacity:
        return None
    text = check_text("too_long_v0", shape.release, max_model_len=settings.max_model_len, capacity=capacity)
    return Failure("kv_too_small_for_max_len", text, needed, stage_bytes[tightest], capacity)


def state_failure(shape: KvShape, settings: EngineSettings, blocks: int) -> Failure | None:
    """A hybrid model's failure (0.20+) where full CUDA graphs need more state blocks than there are; else None."""
    full_graphs = not settings.enforce_eager and "FULL" in settings.cudagraph_mode
    if not shape.has_states or not full_graphs or settings.max_num_seqs <= blocks:
        return None
    text = check_text("state_blocks", shape.release, max_num_seqs=settings.max_num_seqs, num_blocks=blocks)
    width = shape.stages[0].bytes_per_block
    return Failure("hybrid_state_cache_limit", text, settings.max_num_seqs * width, blocks * width) if text else None
