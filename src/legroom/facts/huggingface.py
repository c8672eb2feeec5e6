"""Checkpoints in Hugging Face's format, in a folder or on the Hub: config.json, quantization file, safetensors headers.
huggingface_hub does the requests, so HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, its cache and its timeouts apply."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts.bundled import nearest
from legroom.facts.config.media_items import PROCESSOR_KEY, processor_files
from legroom.records import dataclass

Found = TypeVar("Found")

LARGEST_CONFIG_BYTES = 20 * 2**20
"""Above every published config.json; a larger file is not read."""
LARGEST_HEADER_BYTES = 100 * 2**20
"""The limit of the safetensors format."""
MOST_HEADERS = 16
"""The most shards whose headers are read, one request each; beyond, the total in the index is used."""
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files with the size limits of images and videos."""

QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files with the quantization of checkpoints whose config.json lacks it (ModelOpt, AutoGPTQ, AutoAWQ)."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; LegroomError where it is too large or not JSON."""
    hint = "pass the model's config.json or its folder"
    try:
        size = path.stat().st_size
        if size > LARGEST_CONFIG_BYTES:
            hint = "pass the model's config.json"
            raise LegroomError(f"{path.name} has {size / 1e6:,.0f} MB, which no config.json has", hint)
        parsed = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise LegroomError(f"{path} could not be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise LegroomError(f"{path.name} is not text", hint) from error
    except (ValueError, RecursionError) as error:
        raise LegroomError(f"{path.name} is not JSON: {error}", hint) from error
    if not isinstance(parsed, dict):
        kind = type(parsed).__name__
        raise LegroomError(f"{path.name} holds a JSON {kind}, not an object", "a config.json is an object: {...}")
    return parsed


def config_of_folder(folder: Path) -> dict[str, Any]:
    """A folder's config.json (else params.json), with its quantization file merged in; LegroomError for neither."""
    path = folder / "config.json"
    if path.is_file():
        config = read_json_object(path)
    elif (folder / "params.json").is_file():
        config = config_from_params(read_json_object(folder / "params.json"))
    else:
        raise LegroomError(f"there is no config.json in {folder}", "pass the folder that holds the model's config.json")
    for name in QUANTIZATION_FILES:
        if (folder / name).is_file():
            config = with_quantization_file(config, name, read_json_object(folder / name))
    if config.get("vision_config"):
        files = {name: read_json_object(folder / name) for name in PROCESSOR_FILES if (folder / name).is_file()}
        config = {**config, PROCESSOR_KEY: processor_files(files)}
    return config


def with_quantization_file(config: dict[str, Any], name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the content of its quantization file (`name`), unless it has a quantization_config of its own."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    method = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}[name]
    inner = content.get("quantization") if isinstance(content.get("quantization"), Mapping) else content
    return {**config, "quantization_config": {"quant_method": method, **(inner or {})}}


_NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
_LATENT_NAMES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERT_NAMES = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
}
"""The names in params.json of experts with shared ones, which vLLM serves as DeepSeek-V3."""
_DEFAULT_LEN = 128_000  # vLLM's default for a params.json without a length.


def config_from_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The HF-like config of a Mistral checkpoint that ships params.json only."""
    config: dict[str, Any] = {new: params[old] for old, new in _NAMES.items() if params.get(old) is not None}
    lengths = (params.get("max_position_embeddings"), params.get("max_seq_len"))
    config["max_position_embeddings"] = next((n for n in lengths if n), _DEFAULT_LEN)
    config["torch_dtype"] = params.get("dtype") or "bfloat16"
    config.update({"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    moe = params.get("moe")
    if isinstance(moe, Mapping) and moe.get("num_shared_experts"):
        config.update({"model_type": "deepseek_v3", "architectures": ["MistralLarge3ForCausalLM"]})
        config.update({name: params[name] for name in _LATENT_NAMES if params.get(name) is not None})
        config.update({new: moe[old] for old, new in _EXPERT_NAMES.items() if moe.get(old) is not None})
    elif isinstance(moe, Mapping):
        config.update({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]})
        config["num_local_experts"] = moe.get("num_experts")
        config["num_experts_per_tok"] = moe.get("num_experts_per_tok")
    quantization = params.get("quantization")
    if isinstance(quantization, Mapping) and quantization.get("qformat_weight") == "fp8_e4m3":
        scheme = "static" if quantization.get("qscheme_act") == "TENSOR" else "dynamic"
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": scheme}
    vision = params.get("vision_encoder") or (params.get("multimodal") or {}).get("vision_encoder_args")
    if isinstance(vision, Mapping):
        return {
            "model_type": "pixtral",
            "architectures": ["PixtralForConditionalGeneration"],
            "torch_dtype": config["torch_dtype"],
            "text_config": config,
            "vision_config": {**vision, "model_type": "pixtral"},
        }
    return config


def folder_bytes(folder: Path) -> int | None:
    """Tensor bytes of the safetensors files that vLLM would load from a folder; None where files are missing."""
    return sum(map(_file_tensor_bytes, files)) if (files := _checkpoint_files(folder)) else None


def _file_tensor_bytes(path: Path) -> int:
    """The bytes of all tensors in a safetensors file, from its header; an error where that is not readable."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 0 < size <= LARGEST_HEADER_BYTES:
                raise LegroomError(f"{path.name} is not a safetensors file", "its header length is not plausible")
            header = file.read(size)
    except OSError as error:
        raise LegroomError(f"{path} could not be read: {error.strerror or error}") from error
    if len(header) < size:
        raise LegroomError(f"{path.name} is cut short: its header is not whole", "download the checkpoint again")
    try:
        spans = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        return sum(int(end) - int(begin) for begin, end in spans)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise LegroomError(f"{path.name} is not a safetensors file", "its header is not readable") from error


def _checkpoint_files(folder: Path) -> list[Path]:
    """The files of the index, [] if one is missing; without an index all but `consolidated` and `adapter_` ones."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise LegroomError(f"{index.name} is not a safetensors index", "download the checkpoint again") from error
        files = [folder / str(name) for name in names]
        return files if all(path.is_file() for path in files) else []
    files = sorted(folder.glob("*.safetensors"))
    return [path for path in files if not path.name.startswith(("consolidated", "adapter_"))]


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """The config of a Hub model and the size of its checkpoint."""

    config: dict[str, Any]
    source: str
    checkpoint_bytes: int | None = None


def fetch(repo: str, revision: str | None = None, offline: bool = False) -> HubAnswer:
    """A Hub model's config and size, from the cache if `offline` or the Hub is down; LegroomError without a config."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    files = _RepoFiles(repo, revision, offline)
    try:
        path = files.get("config.json")
    except LegroomError as error:
        if offline or error.exit_code != UNREACHABLE:
            raise
        # Unreachable: all files come from the cache, or none.
        files = _RepoFiles(repo, revision, offline=True)
        try:
            path = files.get("config.json")
        except LegroomError:
            raise error from None
    if path is not None:
        config = read_json_object(path)
    else:
        params = files.get("params.json")
        if params is None:
            hint = "is it a model repository? GGUF files can be passed as a path"
            raise LegroomError(f"{repo} has no config.json", hint)
        config = config_from_params(read_json_object(params))
    if not config.get("quantization_config"):
        for name in QUANTIZATION_FILES:
            content = files.get(name)
            if content is not None:
                config = with_quantization_file(config, name, read_json_object(content))
                break
    at = f"{repo}@{revision}" if revision else repo
    where = "in the Hugging Face cache" if files.offline else "on the Hugging Face Hub"
    return HubAnswer(config, f"config.json of {at} {where}", files.checkpoint_bytes())


@dataclass(frozen=True, slots=True)
class _RepoFiles:
    """Small files of one repository; every error becomes a LegroomError."""

    repo: str
    revision: str | None
    offline: bool

    def get(self, filename: str) -> Path | None:
        """The local path of a file, or None where the repository has no such file."""
        return _with_hub_errors(self.repo, self.offline, lambda: self._download(filename))

    def checkpoint_bytes(self) -> int | None:
        """Bytes of all tensors, from safetensors headers or the index; None offline or where neither can be read."""
        if self.offline:
            return None
        try:
            from huggingface_hub import HfApi

            index = self._download("model.safetensors.index.json")
            if index is None:
                return _header_bytes(HfApi(), self.repo, "model.safetensors", self.revision)
            document = read_json_object(index)
            shards = sorted(set(document["weight_map"].values()))
            if len(shards) > MOST_HEADERS:
                return int(document["metadata"]["total_size"])
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(8) as pool:
                return sum(pool.map(lambda shard: _header_bytes(HfApi(), self.repo, shard, self.revision), shards))
        except Exception:
            return None  # a plan does not need it

    def _download(self, filename: str) -> Path | None:
        """A file's path in the Hub cache, downloaded unless offline; None if there is none; raises the Hub's errors."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

        if self.offline:
            cached = try_to_load_from_cache(self.repo, filename, revision=self.revision)
            if isinstance(cached, str):
                return Path(cached)
            if filename != "config.json" or cached is not None:
                return None
            raise LocalEntryNotFoundError(f"{filename} is not in the cache")
        try:
            size = get_hf_file_metadata(hf_hub_url(self.repo, filename, revision=self.revision)).size or 0
            if size > LARGEST_CONFIG_BYTES:
                raise LegroomError(f"{filename} of {self.repo} has {size / 1e6:,.0f} MB, which no config has")
            return Path(hf_hub_download(self.repo, filename, revision=self.revision))
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
                return None
            raise


def _header_bytes(api: Any, repo: str, filename: str, revision: str | None) -> int:
    """The tensor bytes of a safetensors file of a repository on the Hub (`api`: HfApi), from its header alone."""
    header = api.parse_safetensors_file_metadata(repo, filename, revision=revision)
    return max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)


def _with_hub_errors(repo: str, offline: bool, request: Callable[[], Found]) -> Found:
    """What `request` returns; an error of the Hub about `repo` becomes a LegroomError that says what to do."""
    from huggingface_hub import errors

    try:
        return request()
    except errors.GatedRepoError as error:
        raise LegroomError(
            f"{repo} is gated: the Hub does not show its config without an accepted licence",
            f"accept the licence on the model's page, then set HF_TOKEN{_nearest_names_hint(repo)}",
            UNREACHABLE,
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LegroomError(f"{repo} has no such revision", "check --revision") from error
    except errors.RepositoryNotFoundError as error:
        hint = f"check the name; a private model needs HF_TOKEN{_nearest_names_hint(repo)}"
        raise LegroomError(f"there is no model {repo} on the Hub, or it is private", hint) from error
    except errors.HFValidationError as error:
        raise LegroomError(f"{repo!r} is not a Hub id", "a Hub id is owner/name") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise _unreachable_error(repo, offline, error) from error
    except errors.HfHubHTTPError as error:
        raise _http_error(repo, error) from error
    except Exception as error:
        # Errors of huggingface_hub's HTTP library are those that its own error derives from.
        if isinstance(error, (ValueError, OSError, *errors.HfHubHTTPError.__bases__)):
            raise _unreachable_error(repo, offline, error) from error
        raise


def _http_error(repo: str, error: Any) -> LegroomError:
    """The LegroomError for an HTTP error that the Hub answered about `repo`, by its status."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        hint = f"accept the model's licence on its page and set HF_TOKEN{_nearest_names_hint(repo)}"
        return LegroomError(f"the Hub refused {repo} ({status})", hint, UNREACHABLE)
    why = f"the Hub answered {status or 'with an error'} for {repo}"
    return LegroomError(why, "try again, or pass a config.json", UNREACHABLE)


def _unreachable_error(repo: str, offline: bool, error: Exception) -> LegroomError:
    """The LegroomError for a model that is in no cache: `offline` was asked for, or the Hub is out of reach."""
    is_offline = offline or type(error).__name__ == "OfflineModeIsEnabled"
    why = "and this is offline mode" if is_offline else "and the Hub could not be reached"
    hint = f"pass its config.json{_nearest_names_hint(repo)}"
    return LegroomError(f"{repo} is not bundled, not in the Hugging Face cache, {why}", hint, UNREACHABLE)


def _nearest_names_hint(repo: str) -> str:
    """The end of a hint that names similar bundled models; empty where there are none."""
    close = nearest(repo, 3)
    return f"; bundled and near: {', '.join(close)}" if close else ""
