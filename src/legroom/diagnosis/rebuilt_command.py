"""The command of the server that failed, put together from what the log, the user's line or file, and the host show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from legroom.deployments.server_words import assignments
from legroom.facts.flags import flag_name, flags_of
from legroom.records import dataclass
from legroom.vllm.args import ServeArgs
from legroom.vllm.command_line import any_release_words, command, with_settings, without_secrets

if TYPE_CHECKING:
    from legroom.facts.releases import Release
    from legroom.planning.startup_log import Startup

_UNSET = ServeArgs()
_MODULE = ("python", "-m", "vllm.entrypoints.openai.api_server")
_RESOLVED = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1, "kv_cache_dtype": "auto",
    "dtype": "bfloat16", "enable_prefix_caching": True, "enforce_eager": False, "enable_chunked_prefill": True,
    "enable_lora": False,
}  # fmt: skip
"""What an engine's config line prints although nobody gave it."""


@dataclass(frozen=True)
class RebuiltCommand:
    """The flags to write again, and what is not known of them."""

    args: ServeArgs
    comment: str = ""
    """Empty where everything is known; else what the reader has to put in."""
    is_module: bool = False
    """Written as the module that every release has, where the log shows that and no release."""

    def words(self, flags: Mapping[str, Any], env: Mapping[str, str], release: Release) -> tuple[str, ...]:
        """The line to run with some flags changed, by vLLM's Python names, None to take one away."""
        own = {name: value for name, value in flags.items() if name in ServeArgs.__dataclass_fields__}
        others = {name: value for name, value in flags.items() if name not in own}
        args = replace(self.args, **{"model": self.args.model or "MODEL", **own})
        # A release that stands in for an unknown one may lack the flag that this is about.
        dests = {flag.dest for flag in flags_of(release).values()}
        others |= {name: value for name, value in own.items() if value is not None and name not in dests}
        args = replace(args, others=with_settings(args.others, 0, others, release))
        words = command(args, release)
        if self.is_module and words[:2] == ("vllm", "serve"):
            words = (*_MODULE, "--model", *words[2:])
        return tuple(without_secrets((*assignments({**self.args.env, **env}), *words)))

    def remark(self, flags: Mapping[str, Any], env: Mapping[str, str]) -> str:
        """What stands beside the line; names the change alone where the line is not the user's own."""
        if not self.comment.endswith(":"):
            return self.comment
        changed = " ".join([*assignments(env), *any_release_words(flags)])
        gone = [flag_name(name) for name, value in flags.items() if value is None]
        taken_out = f"without {' '.join(gone)}" if gone else ""
        return f"{self.comment} {' '.join(part for part in (changed, taken_out) if part)}"


def rebuilt_command(startup: Startup, line: ServeArgs | None, model: str) -> RebuiltCommand:
    """From the user's line where there is one, else from the flags that the log prints, else from what it resolved."""
    given = startup.given
    if line is not None:
        args = _over(line, given.args if startup.args_known else _UNSET)
        return RebuiltCommand(replace(args, model=line.model or model, others=line.others))
    if startup.args_known:
        args = replace(given.args, model=given.args.model or model)
        return RebuiltCommand(args, _unknown(given.unknown, startup), given.is_module and startup.vllm is None)
    args = replace(_as_written(startup.args), model=model)
    if startup.args.model:
        comment = "the log shows what the engine resolved, not the flags that were given; keep your other flags"
        return RebuiltCommand(args, comment)
    return RebuiltCommand(args, "the log does not show the command; keep yours and change only:")


def _unknown(names: tuple[str, ...], startup: Startup) -> str:
    parts = []
    if names:
        parts.append(f"add what the log does not show in full: {', '.join(names)}")
    if startup.args.usage == "llm":
        parts.append("the log is of LLM(...) in Python: the same names are its keyword arguments")
    return "; ".join(parts)


def _over(line: ServeArgs, logged: ServeArgs) -> ServeArgs:
    """The log's flags win over what the user believes; the line fills what the log does not show."""
    shown = {
        field.name: value
        for field in fields(ServeArgs)
        if (value := getattr(logged, field.name)) != getattr(_UNSET, field.name) and field.name not in ("usage",)
    }
    return replace(line, **shown)


def _as_written(args: ServeArgs) -> ServeArgs:
    """The flags without those that only repeat what vLLM chooses by itself."""
    repeated: dict[str, Any] = {name: None for name, value in _RESOLVED.items() if getattr(args, name) == value}
    return replace(args, **repeated)
