"""A model's config from the Hugging Face Hub: config.json, quantization file and safetensors headers, never weights.

huggingface_hub does the requests, so HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, its cache and its timeouts apply.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from legroom.errors import UNREACHABLE, LegroomError
from legroom.facts.bundled import nearest
from legroom.facts.model_sources import (
    LARGEST_CONFIG_BYTES,
    QUANTIZATION_FILES,
    config_from_params,
    read_json_object,
    with_quantization_file,
)
from legroom.records import dataclass

Found = TypeVar("Found")

MOST_HEADERS = 16
"""The most shards whose headers are read, one request each; beyond, the total in the index is used."""


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """The config of a Hub model and the size of its checkpoint."""

    config: dict[str, Any]
    source: str
    checkpoint_bytes: int | None = None


def fetch(repo: str, revision: str | None = None, offline: bool = False) -> HubAnswer:
    """The config of a Hub model, from the cache where it is there, else from the Hub."""
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
            raise LegroomError(
                f"{repo} has no config.json", "is it a model repository? GGUF files can be passed as a path"
            )
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
        """The sum of the safetensors headers or the index's total; None where neither can be read."""
        try:
            return self._checkpoint_bytes()
        except Exception:
            return None  # a plan does not need it

    def _download(self, filename: str) -> Path | None:
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

    def _checkpoint_bytes(self) -> int | None:
        if self.offline:
            return None
        from huggingface_hub import HfApi

        index = self._download("model.safetensors.index.json")
        if index is None:
            return _header_bytes(HfApi(), self.repo, "model.safetensors", self.revision)
        document = read_json_object(index)
        shards = sorted(set(document["weight_map"].values()))
        if len(shards) > MOST_HEADERS:
            return int(document["metadata"]["total_size"])
        with ThreadPoolExecutor(8) as pool:
            return sum(pool.map(lambda shard: _header_bytes(HfApi(), self.repo, shard, self.revision), shards))


def _header_bytes(api: Any, repo: str, filename: str, revision: str | None) -> int:
    header = api.parse_safetensors_file_metadata(repo, filename, revision=revision)
    return max((tensor.data_offsets[1] for tensor in header.tensors.values()), default=0)


def _with_hub_errors(repo: str, offline: bool, request: Callable[[], Found]) -> Found:
    from huggingface_hub import errors

    try:
        return request()
    except errors.GatedRepoError as error:
        raise LegroomError(
            f"{repo} is gated: the Hub does not show its config without an accepted licence",
            f"accept the licence on the model's page, then set HF_TOKEN{_or_nearest(repo)}",
            UNREACHABLE,
        ) from error
    except errors.RevisionNotFoundError as error:
        raise LegroomError(f"{repo} has no such revision", "check --revision") from error
    except errors.RepositoryNotFoundError as error:
        raise LegroomError(
            f"there is no model {repo} on the Hub, or it is private",
            f"check the name; a private model needs HF_TOKEN{_or_nearest(repo)}",
        ) from error
    except errors.HFValidationError as error:
        raise LegroomError(f"{repo!r} is not a Hub id", "a Hub id is owner/name") from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        raise _unreachable(repo, offline, error) from error
    except errors.HfHubHTTPError as error:
        raise _http(repo, error) from error
    except Exception as error:
        if isinstance(error, (ValueError, *_transport_errors())):
            raise _unreachable(repo, offline, error) from error
        raise


def _transport_errors() -> tuple[type[Exception], ...]:
    """Connection errors: OSError, and the base error of huggingface_hub's HTTP library."""
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception)))


def _http(repo: str, error: Any) -> LegroomError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return LegroomError(
            f"the Hub refused {repo} ({status})",
            f"accept the model's licence on its page and set HF_TOKEN{_or_nearest(repo)}",
            UNREACHABLE,
        )
    return LegroomError(
        f"the Hub answered {status or 'with an error'} for {repo}", "try again, or pass a config.json", UNREACHABLE
    )


def _unreachable(repo: str, offline: bool, error: Exception) -> LegroomError:
    why = (
        "and this is offline mode"
        if offline or type(error).__name__ == "OfflineModeIsEnabled"
        else "and the Hub could not be reached"
    )
    hint = f"pass its config.json{_or_nearest(repo)}"
    return LegroomError(f"{repo} is not bundled, not in the Hugging Face cache, {why}", hint, UNREACHABLE)


def _or_nearest(repo: str) -> str:
    close = nearest(repo, 3)
    return f"; bundled and near: {', '.join(close)}" if close else ""
