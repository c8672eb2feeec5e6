"""Writes a model's config.json down in legroom's own form, in `src/legroom/facts/data/models/FAMILY.json`.

    python tools/add_model.py path/to/config.json --family llama --name llama-3.1-8b \
        --id meta-llama/Llama-3.1-8B --id meta-llama/Llama-3.1-8B-Instruct \
        --parameters 8030261248 --source "config.json of meta-llama/Llama-3.1-8B"

Only facts that memory depends on are kept: token ids, activation names, sampling settings and the like are
dropped, and long lists (a type a layer, modules left unquantized) are written as cycles, runs or patterns.
`--base NAME` keeps only what differs from a bundled model, as for a quantized checkpoint of it.
The published parameter count goes with it: a test counts the parameters of every entry and compares.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from legroom.facts.bundled import FOLDER, bundled_config, find
from legroom.facts.huggingface import config_of_folder, read_json_object

DROPPED = re.compile(
    r".*(_token_id|_token_index|_token_ids|_token|dropout|_pdrop|_eps|epsilon|_loss_coef|_softcapping|_act|activation"
    r"|_activation_func|_func|_length_penalty|_penalty|placeholder)$"
    r"|(auto_map|transformers_version|_name_or_path|_attn_implementation|aux_loss_alpha|seq_aux|use_cache|pretraining_tp"
    r"|initializer_.*|output_(attentions|hidden_states|scores|router_logits)|return_dict.*|torchscript|id2label|label2id"
    r"|begin_suppress_tokens|suppress_tokens|bad_words_ids|early_stopping|do_sample|diversity_penalty|encoder_no_repeat.*"
    r"|no_repeat_ngram_size|num_beam.*|num_return_sequences|top_k|top_p|typical_p|temperature|max_length|min_length"
    r"|prefix|problem_type|pruned_heads|remove_invalid_values|task_specific_params|tf_legacy_loss|tokenizer_class"
    r"|tie_encoder_decoder|use_bfloat16|finetuning_task|is_decoder|add_cross_attention|cross_attention_hidden_size"
    r"|exponential_decay.*|chunk_size_feed_forward|scoring_func|norm_topk_prob|routed_scaling_factor|ep_size"
    r"|router_jitter_noise|time_step_.*|use_mamba_kernels|rescale_prenorm_residual|residual_in_fp32|num_logits_to_keep"
    r"|query_pre_attn_scalar|cache_implementation|process_image_mode|ignore_index|rope_interleave"
    r"|indexer_rope_interleave|swiglu_(alpha|limit)|moe_router_scaling_factor|attention_value_scale|hc_.*"
    r"|language_model_only|producer|version|fmt|scale_fmt|initializer_factor|max_shard_size|mm_hidden_size_unused)$"
)
NULL_MATTERS = ("sliding_window", "q_lora_rank")
"""Fields whose null is not their default: no window, no low-rank queries."""
LAYER = re.compile(r"(?<=layers\.)\d+(?=\.|$|\*)")
EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.|$|\*)")
ROPE_KEPT = ("rope_type", "type", "factor", "original_max_position_embeddings", "rope_theta", "partial_rotary_factor")


def compact(config: dict[str, Any]) -> dict[str, Any]:
    """The facts of a config that memory depends on, in the short forms."""
    kept = {key: _fact(key, value) for key, value in config.items() if not DROPPED.match(key)}
    return {key: _short(value) for key, value in kept.items() if key in NULL_MATTERS or value not in (None, {}, [])}


def _fact(key: str, value: Any) -> Any:
    if key in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
        return _rope(value)
    if key == "quantization_config" and isinstance(value, dict):
        return _quantization(value)
    if key == "block_configs":
        return [_deci_block(block) for block in value]
    return compact(value) if isinstance(value, dict) else value


def difference(config: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """What a variant's config has that its base's has not."""
    return {key: value for key, value in config.items() if key not in base or base[key] != value}


def _rope(rope: dict[str, Any]) -> dict[str, Any]:
    if any(isinstance(value, dict) for value in rope.values()):
        return {key: _rope(value) for key, value in rope.items() if isinstance(value, dict)}
    return {key: rope[key] for key in ROPE_KEPT if rope.get(key) is not None}


def _quantization(config: dict[str, Any]) -> dict[str, Any]:
    dropped = {"producer", "version", "fmt", "scale_fmt", "kv_cache_quant_algo_note", "quantization_status"}
    if config.get("quantized_layers"):
        # Mixed precision: the map of layers says it all, and the groups say it again.
        dropped |= {"config_groups", "targets"}
    return {
        key: _mapped(value)
        if key == "quantized_layers"
        else _short(_quantization(value) if isinstance(value, dict) else value)
        for key, value in config.items()
        if key not in dropped and value is not None
    }


def _mapped(layers: dict[str, Any]) -> dict[str, Any]:
    """Layers that share a scheme become patterns with that scheme."""
    groups: dict[str, list[str]] = {}
    for name, scheme in layers.items():
        groups.setdefault(json.dumps(scheme, sort_keys=True), []).append(name)
    return {"each": [[_patterns(names)["names"], json.loads(scheme)] for scheme, names in groups.items()]}


def _deci_block(block: dict[str, Any]) -> dict[str, Any]:
    kept = ("n_heads_in_group", "no_op", "replace_with_linear", "ffn_mult", "intermediate_size")
    return {part: {key: block[part].get(key) for key in kept if block[part].get(key)} for part in ("attention", "ffn")}


def _short(value: Any) -> Any:
    if not isinstance(value, list) or len(value) < 6:
        return value
    if sum(isinstance(item, str) and LAYER.search(item) is not None for item in value) > len(value) // 2:
        return _patterns(value)
    for length in range(1, min(13, len(value) // 2 + 1)):
        times = len(value) // length
        cycle, rest = value[:length], value[length * times :]
        if cycle * times == value[: length * times] and len(rest) < length:
            return {"cycle": cycle, "times": times} | ({"then": rest} if rest else {})
    runs: list[list[Any]] = []
    for item in value:
        if runs and runs[-1][0] == item:
            runs[-1][1] += 1
        else:
            runs.append([item, 1])
    return {"runs": runs} if len(runs) * 2 < len(value) else value


def _patterns(names: list[str]) -> dict[str, Any]:
    """Names that differ in the numbers of layer and expert alone become one pattern with its spans."""
    groups: dict[tuple[str, str], list[int]] = {}
    experts: dict[str, dict[int, list[int]]] = {}
    plain = []
    for name in names:
        layer = LAYER.search(name)
        if not layer:
            plain.append(name)
            continue
        template, number = name[: layer.start()] + "{}" + name[layer.end() :], int(layer.group())
        expert = EXPERT.search(template)
        if expert:
            both = template[: expert.start()] + "{}" + template[expert.end() :]
            experts.setdefault(both, {}).setdefault(number, []).append(int(expert.group()))
        else:
            groups.setdefault((template, ""), []).append(number)
    for template, layers in experts.items():
        for number, which in layers.items():
            groups.setdefault((template, _spans(which)), []).append(number)
    return {"names": plain + [[t, _spans(numbers), *([s] if s else [])] for (t, s), numbers in groups.items()]}


def _spans(numbers: list[int]) -> str:
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in spans)


def entry(config: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The family file's entry of one model."""
    facts = compact(config)
    made: dict[str, Any] = {"ids": args.id}
    if args.base:
        base = find(args.base)
        if base is None:
            sys.exit(f"{args.base} is not bundled")
        made["base"] = base.name
        quantization = facts.pop("quantization_config", None)
        inherited = compact(bundled_config(base))
        facts, lacking = difference(facts, inherited), [key for key in inherited if key not in facts]
        if lacking:
            made["without"] = lacking
        if quantization:
            made["quantization"] = quantization
    if args.parameters:
        made["parameters"] = args.parameters
    made["source"] = args.source
    if facts:
        made["config"] = facts
    return made


def write(family: str, entries: dict[str, Any]) -> Path:
    """One entry a line, so that a change reads as one line."""
    path = FOLDER / f"{family}.json"
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in entries.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a config.json, or the folder that holds it")
    parser.add_argument("--family", required=True, help="the file in data/models, without .json")
    parser.add_argument("--name", required=True, help="the short name")
    parser.add_argument("--id", action="append", required=True, help="a Hub id that shares these facts; repeat it")
    parser.add_argument("--source", required=True, help="where the facts were read")
    parser.add_argument("--parameters", type=int, help="the published parameter count")
    parser.add_argument("--base", help="the bundled model this is a variant of")
    args = parser.parse_args()
    config = config_of_folder(args.config) if args.config.is_dir() else read_json_object(args.config)
    path = FOLDER / f"{args.family}.json"
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries[args.name] = entry(config, args)
    print(write(args.family, entries))


if __name__ == "__main__":
    main()
