"""Servers that no command of vLLM's own starts: wrappers, resources of other controllers, catalogs of models, Ray."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts

LARGE = "Qwen/Qwen3-32B"


def findings(*texts, rule="does-not-fit"):
    return [each for each in lint_texts(list(texts), LintOptions()).findings if each.rule == rule]


def severities(*texts, rule="does-not-fit"):
    return [each.severity for each in findings(*texts, rule=rule)]


@pytest.mark.parametrize(("length", "count"), [(40000, 0), (200000, 1)])
def test_a_length_beyond_the_models_own_is_found_behind_a_wrapper(length, count):
    text = f"srun ~/tools/start.py vllm.sif --nodes 2 --model {LARGE} --max-model-len {length} --kv-cache-dtype auto\n"
    assert severities(("job.sh", text)) == ["warning"] * count
    assert severities(("job.sh", text), rule="not-understood") == []


def test_a_wrappers_own_flags_are_not_judged():
    text = f"./start.py --team red --model {LARGE} --max-model-len 4096 --max-num-seqs 8\n"
    assert severities(("job.sh", text), rule="flag-unknown") == []


def resource(card, memory="64Gi"):
    return (
        "model.yaml",
        f"apiVersion: llm.org.net/v1\nkind: ServedModel\nmetadata: {{name: m}}\nspec:\n  model: {{name: {LARGE}}}\n"
        f"  resources: {{limits: {{memory: {memory}}}}}\n"
        f"  pool:\n    nodeSelector: {{nvidia.com/gpu.product: {card}}}\n"
        "  vllmArgs: [--max-model-len, '8192', --gpu-memory-utilization, '0.9']\n",
    )


@pytest.mark.parametrize(("card", "expected"), [("NVIDIA-L4", ["error"]), ("NVIDIA-H200", [])])
def test_a_custom_resource_names_its_model_its_flags_and_its_card(card, expected):
    assert severities(resource(card)) == expected


def test_a_memory_limit_of_a_custom_resource_is_held_against_the_checkpoint():
    assert severities(resource("NVIDIA-H200", "24Gi"), rule="host-memory") == ["note"]
    assert severities(resource("NVIDIA-H200", "200Gi"), rule="host-memory") == []


@pytest.mark.parametrize(("card", "expected"), [("l4", ["error"]), ("h200", [])])
def test_a_catalog_names_models_by_its_keys(card, expected):
    text = f"models:\n  Qwen3-32B:\n    gpu_type: {card}\n    vllm_args:\n      --tensor-parallel-size: 1\n"
    assert severities(("models.yaml", text)) == expected


@pytest.mark.parametrize(("card", "expected"), [("L4", ["error"]), ("H200", [])])
def test_ray_serve_names_a_model_and_its_card_without_any_flag(card, expected):
    config = f"args:\n  llm_configs:\n  - model_loading_config:\n      model_id: m\n      model_source: {LARGE}\n"
    text = f"# vllm\napplications:\n- {config}    accelerator_type: {card}\n".replace("\n  llm", "\n    llm")
    text = text.replace("\n  - model_l", "\n    - model_l").replace("\n      model_", "\n        model_")
    assert severities(("serve.yaml", text.replace("\n    accel", "\n      accel"))) == expected


@pytest.mark.parametrize(("cards", "expected"), [("an L4 or an A10G", ["warning"]), ("an H200 or an A10G", [])])
def test_a_server_that_fits_none_of_the_cards_of_its_file_is_told(cards, expected):
    text = f"# runs on {cards}\ndocker run --gpus all vllm/vllm-openai:v0.20.0 --model {LARGE} --max-model-len 8192\n"
    assert severities(("run.sh", text)) == expected


@pytest.mark.parametrize(("limit", "expected"), [("8Gi", ["error"]), ("32Gi", [])])
def test_a_server_on_cpus_holds_weights_and_kv_cache_in_the_hosts_memory(limit, expected):
    text = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: m}\nspec:\n  selector: {matchLabels: {a: m}}\n"
    text += "  template:\n    metadata: {labels: {a: m}}\n    spec:\n      containers:\n"
    text += "      - image: vllm/vllm-openai-cpu:v0.20.0\n        args: [--model, Qwen/Qwen3-4B]\n"
    text += "        env: [{name: VLLM_CPU_KVCACHE_SPACE, value: '8'}]\n"
    text += f"        resources: {{limits: {{memory: {limit}}}}}\n"
    assert severities(("d.yaml", text), rule="host-memory") == expected
