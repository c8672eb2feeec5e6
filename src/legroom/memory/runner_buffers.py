"""Persistent buffers of the model runner: outside the budget before 0.27."""

from legroom.facts.fit import constants
from legroom.facts.gpus import Gpu
from legroom.facts.model import Model, latent
from legroom.memory.activation.layer_peaks import layer_kinds
from legroom.memory.dtypes import INT32_BYTES, dtype_bytes
from legroom.memory.figure_cache import cached_by_model
from legroom.memory.kv.attention_backend import DEFAULT_BLOCK_SIZE, attention_backend
from legroom.memory.kv.shape import kv_shape
from legroom.memory.kv.specs import StateSpec
from legroom.memory.weights.loaded import unused_bytes
from legroom.units import KIB, MIB, cdiv
from legroom.vllm.args import HEADS, EngineSettings, draft_method, predicts_itself
from legroom.vllm.traits import builds_encoders, is_encoder_decoder, is_pooling, traits


def runner_buffers(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes of the model runner's sampler and input tables, block tables and MLA workspace on one rank."""
    widths = [mixer.latent_width for mixer in latent(layer.mixer for layer, _ in cached_by_model(layer_kinds, model))]
    latent_workspace = 0 if not widths else latent_workspace_tokens(model, settings, gpu) * max(widths) * 2
    return sampler_tables(model, settings) + _block_tables(model, settings, gpu) + latent_workspace


def sampler_tables(model: Model, settings: EngineSettings) -> int:
    """Bytes of the runner's large tables: token counts, bit masks and sampling parameters (V2), embeddings (V1)."""
    parameters = settings.runner == "V2" and settings.engine == "V1" and not is_pooling(settings.given, model)
    return sum(_large_tables(model, settings)) + (settings.max_num_seqs * 19 * KIB if parameters else 0)


def _large_tables(model: Model, settings: EngineSettings) -> list[int]:
    """Bytes of every table of the runner that grows with the vocabulary, the context or the batch; empty for V0."""
    if settings.engine == "V0":
        return []
    inputs = settings.max_num_batched_tokens * model.hidden_size * dtype_bytes(settings.dtype)
    has_encoder = model.modalities and builds_encoders(settings.given, model, settings.release)
    tables = [inputs] if settings.runner != "V2" or has_encoder else []
    if settings.runner != "V2" or is_pooling(settings.given, model):
        return tables
    sequences, mask = settings.max_num_seqs, cdiv(model.vocab_size, 8)
    # The grammar bitmask has a row for every token that a sequence may verify at once.
    rows = 1 + settings.num_speculative_tokens
    tables += [sequences * model.vocab_size * INT32_BYTES, sequences * mask, sequences * rows * mask]
    method = draft_method(settings.given.speculative_config)
    if method in HEADS or predicts_itself(method):
        tables.append(inputs)  # the hidden states that the draft reads
    if method == "ngram":
        tables.append(sequences * settings.max_model_len * INT32_BYTES)  # the token ids of all sequences
    return tables


def segment_rests(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """Bytes that torch has reserved but not allocated after the profile run: the unused rests of its segments."""
    measured = constants()["segment_rests"]
    if settings.quantization == "mxfp4":
        return int(measured["mxfp4_mib"] * MIB)
    if is_encoder_decoder(model):
        return int(measured["encoder_decoder_mib"] * MIB)
    return unused_bytes(model, settings, gpu, _large_tables(model, settings), pp_rank)


def _block_tables(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes of the block tables: one per KV cache group, a row of max_model_len per sequence; V2 keeps two."""
    groups = kv_shape(model, settings, gpu).groups
    kernel_block = settings.block_size or DEFAULT_BLOCK_SIZE
    # An entry is a kernel block of attention, or a whole block of recurrent states.
    entries = [group.block_size if isinstance(group.spec, StateSpec) else kernel_block for group in groups]
    rows = [cdiv(settings.max_model_len, tokens) for tokens in entries]
    copies = 2 if settings.runner == "V2" else 1
    plain = cdiv(settings.max_model_len, kernel_block)
    return copies * settings.max_num_seqs * (sum(rows) or plain) * INT32_BYTES


def latent_workspace_tokens(model: Model, settings: EngineSettings, gpu: Gpu) -> int:
    """Tokens of MLA's chunked_prefill_workspace_size: 64 Ki at most, or max_num_seqs blocks if more; DeepSeek-V4: 0."""
    if traits(model).compressed_mla:
        return 0
    block_size = settings.block_size or attention_backend(model, settings, gpu).preferred_block
    wanted = max(8 * settings.max_model_len, 4 * settings.max_num_seqs * block_size)
    return max(min(wanted, 64 * 1024), settings.max_num_seqs * block_size)
