"""Every module of a model on one rank, in the order in which vLLM creates them."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from legroom.facts.anatomy import Anatomy, adapts_embeddings_since, anatomy
from legroom.facts.config.quantization import online_quantization
from legroom.facts.fit import runs_on_transformers
from legroom.facts.model import Experts, LatentAttention, Layer, Mixer, Model, Quantization, attending, with_kv_heads
from legroom.memory.stages import stage_range
from legroom.memory.weights.draft import draft_is_uncounted, draft_modules, draft_settings
from legroom.memory.weights.family_modules import attention_workspaces, before_layers, layer_extras, model_extras
from legroom.memory.weights.layer_modules import encoder_modules, feedforward_modules, mixer_modules, norm
from legroom.memory.weights.module import Module, Ranks, config_number
from legroom.memory.weights.quantized_modules import Schemes
from legroom.memory.weights.rope_cache import RopeCache, rope_caches
from legroom.memory.weights.storage import Storage, StorageContext, storage
from legroom.records import dataclass
from legroom.units import round_up
from legroom.vllm.args import EngineSettings, draft_method, head_kind, predicts_itself, redundant_experts
from legroom.vllm.traits import VOCABULARY_PADDING, is_pooling


def scheme_in_use(model: Model, settings: EngineSettings) -> Quantization | None:
    """The quantization of the loaded weights (--quantization decides where it contradicts the config); None: 16-bit."""
    declared, flag = model.quantization, settings.given.quantization or settings.quantization
    if declared is None or names_another_method(model, settings):
        return (online_quantization(flag) if flag else None) or declared
    return declared


def names_another_method(model: Model, settings: EngineSettings) -> bool:
    """Whether --quantization contradicts the config; names of one method (awq and awq_marlin) do not."""
    declared, flag = model.quantization, settings.given.quantization or settings.quantization
    if declared is None or not flag:
        return False
    return not (declared.method.startswith(str(flag)) or str(flag).startswith(declared.method))


def extra_vocabulary(settings: EngineSettings) -> int:
    """Vocabulary rows for tokens that a LoRA adapter adds (lora_extra_vocab_size), up to 0.11."""
    return 256 if settings.given.enable_lora and settings.release.before("0.12.0") else 0


def lora_buffers(modules: Iterable[Module], model: Model, settings: EngineSettings) -> Iterator[Module]:
    """LoRA's A and B matrices for every linear layer and embedding, and kernel indices; none without --enable-lora."""
    given = settings.given
    if not given.enable_lora:
        return
    slots, rank = given.max_loras or 1, given.max_lora_rank or 16
    experts = settings.release.at_least("0.11.2")
    since = adapts_embeddings_since(model.model_type)
    embeddings = since is not None and settings.release.at_least(since)
    for module in modules:
        if module.part == "embeddings" and module.name == "embed_tokens":
            if not embeddings:
                continue
            # A tied lm_head is embed_tokens itself in Qwen3 before 0.28, and is wrapped under both names.
            is_qwen = model.model_type.removesuffix("_text") in ("qwen3", "qwen3_vl")
            is_both = is_qwen and model.tie_word_embeddings and settings.release.before("0.28.0")
            for _ in range(2 if is_both else 1):
                yield Module("lora", "embed_a", slots * (model.vocab_size + extra_vocabulary(settings)), rank)
                yield Module("lora", "embed_b", slots * model.hidden_size, rank)
        elif module.quantizable and module.name != "lm_head" and (module.copies == 1 or experts):
            slices = module.slices or (module.outputs,)
            for _ in slices:
                yield Module("lora", f"{module.name}_a", slots * module.copies * rank, module.inputs)
            for outputs in slices:
                yield Module("lora", f"{module.name}_b", slots * module.copies * outputs, rank)
    vocabulary = model.vocab_size
    if extra_vocabulary(settings):
        vocabulary = round_up(vocabulary + extra_vocabulary(settings), 256)
    if embeddings:
        yield Module("lora", "logits_a", slots * rank, model.hidden_size)
        yield Module("lora", "logits_b", slots * vocabulary, rank)
    # Index tensors of the LoRA kernels: five of 64-bit and four of 32-bit numbers per token.
    yield Module("lora", "indices", 14 * settings.max_num_batched_tokens, dtype="float32")


_ATTENTION_SCALARS = 4  # vLLM's _k_scale, _v_scale, _q_scale and _prob_scale: each takes 512 bytes of the allocator.
_QUANTIZED_SCALARS = 5  # Further scales of methods with a KV cache method (BaseKVCacheMethod).
_KV_METHODS = ("fp8", "compressed-tensors", "modelopt")


@dataclass(frozen=True, slots=True)
class StoredModule:
    """A module, its storage, and the rotary tables that are created after it."""

    module: Module
    storage: Storage
    ropes: tuple[RopeCache, ...] = ()
    in_layer: bool = False


@dataclass(frozen=True, slots=True)
class _Build:
    """The inputs of building the modules of one rank."""

    model: Model
    settings: EngineSettings
    context: StorageContext
    shape: Anatomy
    ranks: Ranks
    scheme: Quantization | None
    schemes: Schemes
    first: bool
    last: bool


def loaded_modules(
    model: Model, settings: EngineSettings, context: StorageContext, pp_rank: int
) -> Iterator[StoredModule]:
    """Every module of one rank: encoders, embeddings, layers, output layer, LoRA, draft."""
    shape = anatomy(model.model_type, model.architecture, model.config)
    tp, experts = settings.tensor_parallel_size, settings.expert_ranks
    ranks = Ranks(tp, expert_slices=experts)
    if settings.enable_expert_parallel:
        ranks = Ranks(tp, expert=experts, redundant_experts=redundant_experts(settings.given))
    scheme = scheme_in_use(model, settings)
    last = settings.pipeline_parallel_size - 1
    build = _Build(
        model, settings, context, shape, ranks, scheme, Schemes(scheme, shape), pp_rank == 0, pp_rank == last
    )
    built = _base_weights(build, stage_range(len(model.layers), settings, pp_rank))
    yield from built
    for module in lora_buffers((each.module for each in built), model, settings):
        yield StoredModule(module, storage(module, None, context))
    if build.last and not draft_is_uncounted(settings):
        yield from _draft_weights(build)


def _draft_weights(build: _Build) -> Iterator[StoredModule]:
    """The speculative decoding weights of the last stage: a draft model, a head, or the model's MTP layers."""
    model, settings, context = build.model, build.settings, build.context
    method = draft_method(settings.given.speculative_config)
    if method == "draft_model" and model.draft is not None:
        # A draft model has its own embeddings, output layer and quantization.
        for drafted in loaded_modules(
            model.draft, draft_settings(settings), replace(context, quantization_flag=None), 0
        ):
            part = drafted.module.part if drafted.module.part in ("buffers", "workspace") else "draft"
            yield replace(drafted, module=replace(drafted.module, part=part), in_layer=False)
        return
    own = predicts_itself(method)
    kind, tokens = head_kind(settings.given.speculative_config), settings.num_speculative_tokens
    for module in draft_modules(model, kind, build.shape, build.ranks, tokens):
        yield StoredModule(
            module, storage(module, build.schemes.of(module, len(model.layers)) if own else None, context)
        )


def _base_weights(build: _Build, stage: range) -> list[StoredModule]:
    """The stored weights of one rank without draft model and adapters, in the order of loading."""
    context = build.context
    stored = _stored_alike((*encoder_modules(build.model, build.settings, build.ranks.tensor),), context)
    stored += [
        StoredModule(each, storage(each, build.schemes.of(each, 0), context)) for each in _seq2seq_encoder(build)
    ]
    stored += _stored_alike((*_embeddings(build), *before_layers(build.scheme, context)), context)
    stored += _stage_layers(build, stage)
    for module in _output_modules(build):
        scheme = build.schemes.of_lm_head() if module.name == "lm_head" else None
        stored.append(StoredModule(module, storage(module, scheme, context)))
    return stored


def _stored_alike(modules: Iterable[Module], context: StorageContext) -> list[StoredModule]:
    """The modules as unquantized StoredModules; equal entries of the list share one object."""
    every = list(modules)
    known = {id(module): module for module in every}
    stored = {key: StoredModule(module, storage(module, None, context)) for key, module in known.items()}
    return [stored[id(module)] for module in every]


def _seq2seq_encoder(build: _Build) -> Iterator[Module]:
    """The encoder of an encoder-decoder model: convolutions, layers and final norm."""
    model, shape, hidden = build.model, build.shape, build.model.hidden_size
    if not model.encoder_layers:
        return
    if shape.mel_convolutions:
        yield Module("encoder", "conv1", hidden, 3 * (config_number(model.config, "num_mel_bins") or 80), bias=True)
        yield Module("encoder", "conv2", hidden, 3 * hidden, bias=True)
    for layer in model.encoder_layers:
        yield from _layer_modules(layer, hidden, build, _ATTENTION_SCALARS, shape.encoder_norms)
    yield from norm("norms", "encoder.norm", hidden, shape)
    if shape.encoder_positions:
        yield Module("embeddings", "encoder.positions", config_number(model.config, shape.encoder_positions), hidden)


def _vocabulary_rows(build: _Build) -> int:
    """Embedding rows of one rank, padded to a multiple of 64; all, unpadded, in families that do not split them."""
    if build.shape.whole_embeddings:
        return build.model.vocab_size
    rows = build.model.vocab_size + extra_vocabulary(build.settings)
    return round_up(rows, VOCABULARY_PADDING) // build.ranks.tensor


def _table_rows(rows: int, build: _Build) -> int:
    """One rank's rows of a position or token type table: all, or in some families padded and split over ranks."""
    return round_up(rows, VOCABULARY_PADDING) // build.ranks.tensor if build.shape.tables_split else rows


def _embeddings(build: _Build) -> Iterator[Module]:
    """The embedding tables of this stage; none on stages without them."""
    model, shape = build.model, build.shape
    tied_end = build.last and model.tie_word_embeddings
    if not (build.first or shape.embeddings_on == "all" or tied_end):
        return
    config = model.config
    stated = config.get("word_embed_proj_dim")  # smaller than hidden_size in OPT-350m
    width = stated if isinstance(stated, int) and stated > 0 else model.hidden_size
    yield Module("embeddings", "embed_tokens", _vocabulary_rows(build), width)
    if width != model.hidden_size:
        yield Module("embeddings", "project_in", model.hidden_size, width)
        yield Module("embeddings", "project_out", width, model.hidden_size)
    if shape.positions:
        count = (config_number(config, shape.positions) or model.max_position_embeddings) + shape.positions_offset
        yield Module("embeddings", "embed_positions", _table_rows(count, build), model.hidden_size)
        if shape.causal_mask and runs_on_transformers(model.model_type, build.settings.release):
            yield Module("buffers", "causal_mask", count, count // build.context.dtype_bytes)
    if shape.token_types:
        rows = _table_rows(config_number(config, shape.token_types) or 2, build)
        yield Module("embeddings", "token_type", rows, model.hidden_size)
    yield from model_extras(config, model.hidden_size, len(model.layers), build.ranks.tensor)
    if shape.embedding_norm:
        yield from norm("norms", "embed_norm", model.hidden_size, shape)
    if shape.normalizer:
        yield Module("buffers", "normalizer", 1)


def _output_modules(build: _Build) -> Iterator[Module]:
    """The final norm and the LM head of this stage; no head where embeddings are tied or the model pools."""
    model, shape = build.model, build.shape
    if shape.final_norm and (build.last or shape.final_norm_on == "all"):
        yield from norm("norms", "norm", model.hidden_size, shape)
    if is_pooling(build.settings.given, model) or not shape.lm_head or not (build.last or shape.lm_head_on == "all"):
        return
    if not model.tie_word_embeddings:
        name = "lm_head"
        yield Module(name, name, _vocabulary_rows(build), model.hidden_size, shape.lm_head_bias, quantizable=True)


class _StoredLayers:
    """The stored modules of layers; equal layers share them."""

    def __init__(self, build: _Build) -> None:
        self._build = build
        self._modules: dict[Layer, list[Module]] = {}
        self._stored: dict[tuple[int, int], list[StoredModule]] = {}
        self._scalars = _ATTENTION_SCALARS
        if build.scheme is not None and build.scheme.method.startswith(_KV_METHODS):
            self._scalars += _QUANTIZED_SCALARS

    def of(self, index: int) -> list[StoredModule]:
        """The stored weights of a layer; equal layers share one list."""
        layer = self._build.model.layers[index]
        kind = id(layer), self._build.schemes.kind_of_layer(index)
        stored = self._stored.get(kind)
        if stored is None:
            if layer not in self._modules:
                hidden = self._build.model.hidden_size
                self._modules[layer] = _layer_modules(layer, hidden, self._build, self._scalars)
            stored = self._stored[kind] = list(self._store(self._modules[layer], index))
        return stored

    def _store(self, modules: list[Module], index: int) -> Iterator[StoredModule]:
        """A layer's modules with their storage; a quantized `kv_b_proj` is followed by its 16-bit copy."""
        context = self._build.context
        for module in modules:
            scheme = self._build.schemes.of(module, index)
            yield StoredModule(module, storage(module, scheme, context), in_layer=True)
            if scheme is not None and module.name == "self_attn.kv_b_proj":
                # MLA decodes with a 16-bit copy of this matrix, so a quantized one exists twice.
                copy = replace(module, name="self_attn.kv_b_copy", quantizable=False)
                yield StoredModule(copy, storage(copy, None, context), in_layer=True)


def _stage_layers(build: _Build, stage: range) -> Iterator[StoredModule]:
    """The stored weights of the stage's layers, with rope caches and workspaces where they are created."""
    model, context = build.model, build.context
    pending = rope_caches(model, build.shape, build.settings, context.dtype_bytes)
    workspaces = attention_workspaces(model, build.settings, context)
    layers = _StoredLayers(build)
    for index in stage:
        # A pipeline stage that starts after a table's layer creates it at the next layer of that kind.
        mixer = model.layers[index].mixer
        due = tuple(r for r in pending if r.layer <= index and model.layers[r.layer].mixer == mixer)
        pending = [rope for rope in pending if rope not in due]
        if not due and not workspaces:
            yield from layers.of(index)
            continue
        for stored in layers.of(index):
            at_output = due if stored.module.name.endswith(("o_proj", "out_proj")) else ()
            yield replace(stored, ropes=at_output) if at_output else stored
            due = () if at_output else due
            if stored.module.name == "scale" and workspaces:
                for workspace in workspaces:
                    yield StoredModule(workspace, storage(workspace, None, context))
                workspaces = []
        if due:
            yield StoredModule(Module("buffers", "none", 0), Storage(()), due)


def _stored_mixer(mixer: Mixer, build: _Build) -> Mixer:
    """The mixer whose weights vLLM loads: MLA's for a model with `kv_lora_rank` that caches full heads (MiniCPM3); with
    keys and values, which nothing reads, for layers that share another's KV cache (Gemma 3n and 4, up to 0.27)."""
    config, heads = build.model.config, with_kv_heads([mixer])
    if heads and heads[0].shares_kv and build.settings.release.before("0.28.0"):
        return replace(heads[0], shares_kv=False)
    if not heads or not isinstance(config.get("kv_lora_rank"), int):
        return mixer
    nope, rope, value = (config_number(config, f"{part}_head_dim") for part in ("qk_nope", "qk_rope", "v"))
    return LatentAttention(mixer.heads, int(config["kv_lora_rank"]), config.get("q_lora_rank"), nope, rope, value)


def _layer_modules(layer: Layer, hidden: int, build: _Build, scalars: int, norms: int | None = None) -> list[Module]:
    """The modules of a layer on one rank; `scalars`: KV scales per attention; `norms`: how many, None: the family's."""
    shape, ranks = build.shape, build.ranks
    out: list[Module] = []
    extras = layer_extras(build.model.config, hidden, ranks.tensor, is_hybrid=bool(layer.also))
    if build.model.model_type == "zamba2":
        layer = replace(layer, also=(), feedforward=None)  # in the shared blocks, beside the embeddings
    for mixer in (layer.mixer, *layer.also):
        if mixer is None:
            continue
        out += mixer_modules(_stored_mixer(mixer, build), hidden, shape, ranks)
        if attending([mixer]):
            out += [Module("buffers", "scale", 1, dtype="float32")] * scalars
    if layer.feedforward is not None:
        out += feedforward_modules(layer.feedforward, shape, ranks)
    count = shape.norms if norms is None else norms
    for number in range(count + (shape.expert_norms if isinstance(layer.feedforward, Experts) else 0)):
        out += norm("norms", f"norm{number}", hidden, shape)
    return out + extras + [Module("buffers", "scalar", 1)] * shape.scalars_per_layer
