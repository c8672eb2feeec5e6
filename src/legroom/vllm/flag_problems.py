"""What is wrong with a flag for one release, and what to write instead."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from legroom.facts.flags import advice, flag_history, flags_ever, flags_of
from legroom.facts.releases import Release
from legroom.records import dataclass

ProblemKind = Literal["unknown", "removed", "not_yet", "renamed", "bad_value", "bad_choice", "ignored", "uncertain"]
_FATAL: frozenset[ProblemKind] = frozenset({"unknown", "removed", "not_yet", "renamed", "bad_value", "bad_choice"})

_SHORTEST_PREFIX = 8
"""Shorter beginnings are more likely a flag of something else."""


@dataclass(frozen=True, slots=True)
class FlagProblem:
    """One flag that the release does not take as it was written."""

    flag: str
    kind: ProblemKind
    message: str
    instead: str = ""
    """What to write: a flag, a flag with its value, or empty where it is simply to be dropped."""
    value: str = ""
    """The value that is not taken, where that is what is wrong."""

    @property
    def stops_vllm(self) -> bool:
        """Whether vLLM would exit at it rather than start."""
        return self.kind in _FATAL


def explain_unknown(name: str, release: Release) -> FlagProblem:
    """Why a release does not know a flag: gone, not there yet, or never there."""
    history = flag_history(name)
    if history is None:
        return _short_name(name, release) or _never_existed(name, release)
    if release.before(history.first):
        return FlagProblem(
            name,
            "not_yet",
            f"{name} came with vLLM {history.first}; {release} does not have it",
            _older_way(name, release),
        )
    told = advice(name)
    use = _usable(told.use, release) if told else ""
    gone_in = history.removed_in or "a later release"
    kind: ProblemKind = "renamed" if told and told.renamed and use else "removed"
    message = f"{name} was {'renamed' if kind == 'renamed' else 'removed'} in vLLM {gone_in}"
    if told and told.why:
        message += f": {told.why}"
    return FlagProblem(name, kind, message, use)


def _short_name(name: str, release: Release) -> FlagProblem | None:
    """A short name comes and goes with its flag; None for one that no release has."""
    flag = flags_ever().get(name)
    if flag is None:
        return None
    if flag.name not in flags_of(release):
        told = explain_unknown(flag.name, release)
        return replace(told, flag=name, message=f"{name} is short for {flag.name}: {told.message}")
    # 0.12.0 gave -O to --optimization-level, and -cc to --compilation-config in its place.
    if name == "-cc":
        return FlagProblem(name, "not_yet", f"-cc came with vLLM 0.12.0; {release} has -O for {flag.name}", "-O")
    if name == "-O":
        return FlagProblem(name, "renamed", f"-O is no longer short for {flag.name} since vLLM 0.12.0", "-cc")
    return None


def _never_existed(name: str, release: Release) -> FlagProblem:
    told = advice(name)
    whole = [flag for flag in flags_ever() if flag.startswith(name)] if name.startswith("--") and not told else []
    if len(whole) == 1 and len(name) >= _SHORTEST_PREFIX and whole[0] not in flags_of(release):
        gone = explain_unknown(whole[0], release)  # argparse takes a beginning for the flag itself
        return replace(gone, flag=name, message=f"{name} is short for {whole[0]}: {gone.message}")
    if told:
        message = f"no vLLM release has {name}" + (f": {told.why}" if told.why else "")
        return FlagProblem(name, "unknown", message, _usable(told.use, release))
    near = nearest_flags(name, release)
    message = f"no vLLM release has {name}"
    return FlagProblem(name, "unknown", message, near[0] if near else "")


def _usable(use: str, release: Release) -> str:
    """The replacement, unless this release lacks it too."""
    flag = use.partition(" ")[0].partition(".")[0]
    if not flag.startswith("--") or flag in flags_of(release) or flag.replace("--no-", "--", 1) in flags_of(release):
        return use
    return ""


_OLDER_WAYS = {
    "--cudagraph-capture-sizes": ("--cuda-graph-sizes", "--compilation-config '{\"cudagraph_capture_sizes\": [...]}'"),
    "--attention-backend": ("VLLM_ATTENTION_BACKEND in the environment",),
    "--runner": ("--task",),
    "--convert": ("--task",),
    "--kv-cache-memory-bytes": ("--gpu-memory-utilization", "--num-gpu-blocks-override"),
    "--max-cudagraph-capture-size": ("--cuda-graph-sizes",),
    "--speculative-config": ("--speculative-model",),
    "--enable-log-requests": ("nothing: requests are logged unless --disable-log-requests is given",),
    "--structured-outputs-config": ("--guided-decoding-backend",),
    "--max-seq-len-to-capture": ("--max-context-len-to-capture",),
    "--num-gpu-blocks-override": ("--forced-num-gpu-blocks",),
    "--optimization-level": ("--compilation-config",),
}


def _older_way(name: str, release: Release) -> str:
    for use in _OLDER_WAYS.get(name, ()):
        if usable := _usable(use, release):
            return usable
    return ""


def nearest_flags(name: str, release: Release, limit: int = 3) -> tuple[str, ...]:
    """Flags of this release that look like a misspelt one, the likeliest first."""
    import difflib  # only a misspelt flag needs it

    names = [flag for flag in flags_of(release) if flag.startswith("--")]
    return tuple(difflib.get_close_matches(name, names, n=limit, cutoff=0.7))
