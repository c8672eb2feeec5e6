"""Device memory that torch does not allocate (non_torch_memory), and memory outside vLLM's budget. On cards that share
one memory with the host (GB10, Jetson, APUs) the kernel, vLLM's other processes and cached checkpoint files use the
same memory, and a start that fills it takes the machine down."""

from legroom.facts.fit import by_release, constants
from legroom.facts.gpus import HOPPER, Gpu, dotted
from legroom.facts.model import Model, recurrent
from legroom.figures import Figure, Term, estimated, measured
from legroom.memory.activation import profile_run
from legroom.memory.activation.layer_peaks import expert_scratch, layer_kinds
from legroom.memory.attention_workspace import flashinfer_workspace
from legroom.memory.cudagraph_memory import fuses_all_reduce, graph_bytes, graph_estimate, is_nvlink_server
from legroom.memory.dtypes import FLOAT32_BYTES, dtype_bytes
from legroom.memory.figure_cache import ALL_PARTS, PROFILE_RUN, cached, cached_by_model
from legroom.memory.runner_buffers import runner_buffers, sampler_tables, segment_rests
from legroom.memory.weights.draft import draft_is_uncounted, draft_settings
from legroom.memory.weights.loaded import loaded_weights
from legroom.units import MIB, gib
from legroom.vllm.args import EngineSettings, is_given
from legroom.vllm.traits import traits


def cuda_context(gpu: Gpu) -> Figure:
    """GPU memory of one process's CUDA context."""
    if gpu.measured is not None and gpu.measured.context_bytes is not None:
        return measured(gpu.measured.context_bytes, "CUDA context", "measured by legroom probe")
    fit = constants()["context"]
    size = int(fit["mib_by_capability"].get(dotted(gpu.compute_capability), fit["mib_unknown"]) * MIB)
    spread = int(fit["band_mib"] * MIB)
    term = Term("CUDA context", size, "held before the first allocation")
    return estimated(size, max(0, size - spread), size + spread, (term,))


def held_at_start(model: Model, settings: EngineSettings, gpu: Gpu) -> Figure:
    """Memory in use at vLLM's first snapshot: CUDA context, NCCL (0.11+), and the system on unified memory."""
    held = cuda_context(gpu)
    if nccl := nccl_before_snapshot(model, settings, gpu):
        held += nccl
    if system := system_bytes(gpu):
        term = Term("the system", system, "shares this memory")
        held += estimated(system, system // 2, 2 * system, (term,))
    return held


def desktop_bytes(gpu: Gpu) -> int:
    """Bytes that a desktop usually holds on a card with display outputs; 0 for other cards."""
    return int(constants()["desktop"]["usual_mib"] * MIB) if gpu.screen else 0


def communicator_ranks(model: Model, settings: EngineSettings) -> tuple[int, ...]:
    """The ranks in each NCCL communicator of a worker (TP, PP, DCP, PCP, DP, experts, EPLB); none of a single rank."""
    # From 0.14 on, dense models have no expert group, and their data-parallel ranks are servers of their own.
    grouped = traits(model).moe or settings.release.before("0.14.0")
    balanced = is_given(settings.given, "--enable-eplb") and settings.release.at_least("0.17.0")
    ranks = [settings.tensor_parallel_size, settings.pipeline_parallel_size]
    ranks += [settings.decode_context_parallel_size, settings.prefill_context_parallel_size]
    ranks += [settings.data_parallel_size, settings.expert_ranks] if grouped else []
    return tuple(each for each in (*ranks, settings.expert_ranks if balanced else 1) if each > 1)


def nccl_before_snapshot(model: Model, settings: EngineSettings, gpu: Gpu) -> Figure | None:
    """NCCL's buffers that exist at vLLM's first memory snapshot; None before 0.11 and without communicators."""
    ranks = communicator_ranks(model, settings)
    if not ranks or settings.engine == "V0" or settings.release.before("0.11.0"):
        return None
    fit = constants()["non_torch"]["before_snapshot"]
    card = "hopper" if is_nvlink_server(gpu) else "other"
    further = fit[f"{card}_further_mib"] * (len(ranks) - 1)
    more_ranks = fit["mib_per_doubling"] * sum(each.bit_length() - 2 for each in ranks)
    size = int((fit[f"{card}_mib"] + further + more_ranks) * MIB)
    # Beyond the first one, communicators were measured on NVLink servers only.
    unknown = 0 if card == "hopper" else int((fit["hopper_mib"] * (len(ranks) - 1) - further) * MIB)
    why = f"NCCL communicators, {len(ranks)} of them, start before the budget's first look at the card (0.11+)"
    return estimated(size, size // 2, size + size // 2 + unknown, (Term("communication", size, why),))


def charges_device_wide(settings: EngineSettings) -> bool:
    """Whether the budget is charged with device memory of any process outside torch: V0 in 0.6.4, V1 up to 0.9.0."""
    release = settings.release
    return release.within("0.6.4", "0.6.4.post1") if settings.engine == "V0" else release.within("0.6.5", "0.9.0.1")


def counts_runner_buffers(settings: EngineSettings) -> bool:
    """Whether the model runner's buffers count as non-torch memory: 0.27+ charges the whole drop of free memory."""
    return settings.engine == "V1" and settings.release.at_least("0.27.0")


@cached(PROFILE_RUN)
def non_torch(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """vLLM's non_torch_memory: CUDA modules, library handles and communication buffers."""
    fit = constants()["non_torch"]
    row = by_release(fit["base"], settings.release)
    # NVLink servers and AMD Instinct cards.
    like_hopper = is_nvlink_server(gpu) or (gpu.vendor != "nvidia" and gpu.compute_capability >= HOPPER)
    base = int(row["hopper_mib" if like_hopper else "other_mib"] * MIB)
    source = f"as measured on releases from {row['since']}"
    communication = communication_bytes(settings, gpu)
    if gpu.measured is not None and gpu.measured.modules_bytes is not None:
        base, source = gpu.measured.modules_bytes, "measured by legroom probe"
        communication = 0 if gpu.measured.with_communication else communication
    terms = [Term("modules and handles", base, source)]
    if communication:
        terms.append(Term("communication", communication, f"{settings.tensor_parallel_size} tensor-parallel ranks"))
    if charges_device_wide(settings):
        terms.append(Term("CUDA context", cuda_context(gpu).bytes, "this release charges all that the card holds"))
    if shared := charged_to_vllm(model, gpu):
        terms.append(Term("host memory", shared, "CPU and GPU share one memory, and free memory is the system's"))
    if counts_runner_buffers(settings):
        terms.append(Term("runner buffers", sampler_tables(model, settings), "counted from 0.27 on"))
        rests = segment_rests(model, settings, gpu, pp_rank)
        terms.append(Term("unused rest of segments", rests, "reserved by torch, counted from 0.27 on"))
    size = sum(term.bytes for term in terms)
    spread = int(fit["fixed_band_mib"] * MIB) + int(fit["relative_band"] * (size - base))
    return estimated(size, max(0, size - spread), size + spread, tuple(terms))


def communication_bytes(settings: EngineSettings, gpu: Gpu) -> int:
    """Bytes of NCCL and all-reduce buffers that count as non-torch memory; 0 on one GPU."""
    ranks = settings.tensor_parallel_size
    if ranks * settings.pipeline_parallel_size == 1:
        return 0
    rows = constants()["non_torch"]["communication"]
    row = by_release(rows["V0" if settings.engine == "V0" else "V1"], settings.release)
    nvlink = is_nvlink_server(gpu)
    if fuses_all_reduce(settings, gpu):  # its workspace is the largest part
        return int((row["fused_mib"] + row["fused_mib_per_doubling"] * (ranks.bit_length() - 2)) * MIB)
    first, each = row["hopper_mib"] if nvlink else row["other_mib"], row["mib_per_doubling"]
    if gpu.vendor == "nvidia" and not nvlink and "pcie_mib" in row:
        first, each = row["pcie_mib"], row["pcie_mib_per_doubling"]
    return int((first + each * max(0, ranks.bit_length() - 2)) * MIB)


@cached(ALL_PARTS)
def outside(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> Figure:
    """Memory that vLLM holds on the card outside its budget once it has served full batches."""
    width = dtype_bytes(settings.dtype)
    taken, guessed = graph_bytes(model, settings, gpu), graph_estimate(model, settings, gpu)
    charged = profile_run.activation(model, settings, gpu, pp_rank)
    kept = expert_scratch(model, settings, gpu).kept_elements * width + profile_run.cublas_workspace(gpu)
    kept += profile_run.sampling(model, settings, gpu).kept_bytes
    buffers = runner_buffers(model, settings, gpu)
    if counts_runner_buffers(settings):
        buffers -= sampler_tables(model, settings)
    reserved = cached_bytes(model, settings, gpu, pp_rank)
    terms = [
        Term("runner buffers", buffers, "sampler tables, block tables and input buffers"),
        Term("workspaces", kept, "experts, cuBLAS and sampler scratch that stay"),
        Term("cached by torch", reserved, "blocks of the largest batches that the allocator keeps"),
        Term("CUDA graphs beyond the estimate", taken.bytes - guessed.bytes, "captured after the KV cache is sized"),
    ]
    if not charges_device_wide(settings):
        terms.insert(0, Term("CUDA context", cuda_context(gpu).bytes, "outside every term of the budget"))
    if nccl := nccl_before_snapshot(model, settings, gpu):
        terms.insert(1, *nccl.terms)
    if model.draft is not None and draft_is_uncounted(settings):
        draft = loaded_weights(model.draft, draft_settings(settings), gpu).figure.bytes
        terms.append(Term("the draft model", draft, "V0 charges the weights of the model alone (0.6.5+)"))
    if workspace := flashinfer_workspace(model, settings, gpu):
        terms.append(Term("FlashInfer's workspace", workspace, "kept by the attention backend"))
    outside_total = sum(term.bytes for term in terms)
    # A larger activation reserve (profile runs that sorted the logits) stays idle inside the budget.
    covered = min(charged.bytes, outside_total)
    terms.append(Term("charged activation", -covered, "the budget sets this aside for the same blocks"))
    terms.extend(host_terms(gpu))
    size = outside_total - covered + sum(term.bytes for term in host_terms(gpu))
    fit = constants()["cached"]
    spread = int(fit["band_mib"] * MIB) + int(fit["relative_band"] * reserved) + (taken.high - taken.bytes)
    unknown = nccl.high - nccl.bytes - nccl.bytes // 2 if nccl else 0
    return estimated(size, max(0, size - spread), size + spread + unknown, tuple(terms))


def cached_bytes(model: Model, settings: EngineSettings, gpu: Gpu, pp_rank: int = 0) -> int:
    """Bytes that torch keeps reserved after the largest prefill and the largest sampling batch."""
    rows = constants()["cached"][settings.runner if settings.engine == "V1" else "V1"]
    fit = by_release(rows, settings.release)
    last = pp_rank == settings.pipeline_parallel_size - 1
    sequences = min(settings.max_num_seqs, settings.max_num_batched_tokens) if last else 0
    logits = sequences * model.vocab_size * FLOAT32_BYTES
    forward = profile_run.forward_bytes(model, settings, gpu, pp_rank)
    per_forward = fit["per_forward_byte"]
    if not profile_run.is_compiled(settings):
        per_forward = fit.get("uncompiled_per_forward_byte", per_forward)
    return int(fit["mib"] * MIB + fit["per_logit_byte"] * logits + per_forward * forward)


def host_terms(gpu: Gpu) -> tuple[Term, ...]:
    """Unified memory: what the system and vLLM's other processes use of the card's memory; empty for other cards."""
    if not gpu.unified:
        return ()
    own = max(0, gpu.host_total_bytes - gpu.total_bytes)
    servers = int(constants()["unified"]["servers_mib"] * MIB) - max(0, own - _unified_system_bytes(gpu))
    why = "the API server and its tokenizer share this memory too"
    system = Term("the system", system_bytes(gpu), "shares this memory: kernel, services, desktop")
    return tuple(term for term in (system, Term("vLLM's other processes", max(0, servers), why)) if term.bytes)


def system_bytes(gpu: Gpu) -> int:
    """Bytes of unified memory, as the GPU counts it, that the system uses before vLLM starts; 0 on other cards."""
    own = max(0, gpu.host_total_bytes - gpu.total_bytes)
    return max(0, _unified_system_bytes(gpu) - own) if gpu.unified else 0


def reserve_bytes(gpu: Gpu) -> int:
    """Bytes of unified memory, as the GPU counts it, that must stay free, or the kernel thrashes; 0 on other cards."""
    if not gpu.unified:
        return 0
    own = max(0, gpu.host_total_bytes - gpu.total_bytes)
    fit = constants()["unified"]
    wanted = int(max(gpu.total_bytes, gpu.host_total_bytes) * fit["reserve_share"])
    return max(0, wanted - max(0, own - _unified_system_bytes(gpu) - int(fit["servers_mib"] * MIB)))


def loader_bytes(gpu: Gpu, weights_bytes: int) -> int:
    """Bytes of page cache of the checkpoint file being read, on unified memory; 0 on other cards."""
    return min(weights_bytes, int(constants()["unified"]["shard_mib"] * MIB)) if gpu.unified else 0


def file_cache_bytes(gpu: Gpu, checkpoint_bytes: int) -> int:
    """Bytes of the checkpoint's page cache in the GPU's part of unified memory, after the rest; 0 on other cards."""
    return max(0, checkpoint_bytes - max(0, gpu.host_total_bytes - gpu.total_bytes)) if gpu.unified else 0


def charged_to_vllm(model: Model, gpu: Gpu) -> int:
    """Bytes of the worker's host memory that count as non-torch memory on unified memory (NVIDIA); else 0."""
    if not gpu.unified or gpu.vendor != "nvidia":
        return 0
    states = recurrent(layer.mixer for layer, _ in cached_by_model(layer_kinds, model))
    return int(constants()["unified"]["charged_recurrent_mib" if states else "charged_mib"] * MIB)


def host_note(settings: EngineSettings, gpu: Gpu) -> str:
    """The note of a plan about unified memory; empty for other cards."""
    if not gpu.unified:
        return ""
    held = sum(term.bytes for term in host_terms(gpu))
    counted = f"{gib(held, 1)} are counted for the system, and " if held else ""
    note = f"CPU and GPU share this memory: {counted}{gib(reserve_bytes(gpu), 1)} should stay free"
    if gpu.vendor == "nvidia" and settings.release.before("0.11.1"):
        # These releases read MemFree as free memory.
        return note + "; this release counts cached files as used: drop the page cache before a start"
    return note + "; cached files are in the way of large allocations: drop the page cache before a start"


def _unified_system_bytes(gpu: Gpu) -> int:
    """Bytes of unified memory that the operating system uses (fitted by its size); valid for such GPUs only."""
    fit = constants()["unified"]
    whole = max(gpu.total_bytes, gpu.host_total_bytes)
    return max(int(fit["system_least_mib"] * MIB), int(whole * fit["system_share"]))
