"""Flags that a release does not accept as written, and their replacements."""

from dataclasses import replace
from typing import Literal

from legroom.facts.flags import advice, flag_history, flags_ever, flags_of
from legroom.facts.releases import Release
from legroom.records import dataclass

ProblemKind = Literal["unknown", "removed", "not_yet", "renamed", "bad_value", "bad_choice", "ignored", "uncertain"]
_FATAL: frozenset[ProblemKind] = frozenset({"unknown", "removed", "not_yet", "renamed", "bad_value", "bad_choice"})


@dataclass(frozen=True, slots=True)
class FlagProblem:
    """One flag that the release does not accept as written."""

    flag: str
    kind: ProblemKind
    message: str
    instead: str = ""
    """The replacement: a flag, a flag with its value, or empty where the flag should be left out."""
    value: str = ""
    """The value that is not accepted, where the flag itself is."""

    @property
    def stops_vllm(self) -> bool:
        """Whether vLLM refuses to start with the flag as written."""
        return self.kind in _FATAL


def explain_unknown(name: str, release: Release) -> FlagProblem:
    """Why a release does not have a flag: removed, not yet added, or never existed."""
    history = flag_history(name)
    if history is None:
        return _short_name_problem(name, release) or _unknown_flag_problem(name, release)
    if release.before(history.first):
        message = f"{name} came with vLLM {history.first}; {release} does not have it"
        older = next((use for use in _OLDER_FLAGS.get(name, ()) if _replacement_in_release(use, release)), "")
        return FlagProblem(name, "not_yet", message, older)
    known = advice(name)
    use = _replacement_in_release(known.use, release) if known else ""
    kind: ProblemKind = "renamed" if known and known.renamed and use else "removed"
    message = f"{name} was {kind} in vLLM {history.removed_in or 'a later release'}"
    if known and known.why:
        message += f": {known.why}"
    return FlagProblem(name, kind, message, use)


def _short_name_problem(name: str, release: Release) -> FlagProblem | None:
    """The problem of a short name such as -cc in a release without it; None for a name that no release has."""
    flag = flags_ever().get(name)
    if flag is None:
        return None
    if flag.name not in flags_of(release):
        return _abbreviation_problem(name, flag.name, release)
    # 0.12.0 gave -O to --optimization-level, and -cc to --compilation-config in its place.
    if name == "-cc":
        return FlagProblem(name, "not_yet", f"-cc came with vLLM 0.12.0; {release} has -O for {flag.name}", "-O")
    if name == "-O":
        return FlagProblem(name, "renamed", f"-O is no longer short for {flag.name} since vLLM 0.12.0", "-cc")
    return None


def _abbreviation_problem(name: str, whole: str, release: Release) -> FlagProblem:
    """The problem of the flag `whole`, told under the abbreviation `name` that the user typed."""
    problem = explain_unknown(whole, release)
    return replace(problem, flag=name, message=f"{name} is short for {whole}: {problem.message}")


def _unknown_flag_problem(name: str, release: Release) -> FlagProblem:
    """The problem of a flag that no release has, with advice, the flag it abbreviates, or the nearest spelling."""
    known = advice(name)
    if known:
        message = f"no vLLM release has {name}" + (f": {known.why}" if known.why else "")
        return FlagProblem(name, "unknown", message, _replacement_in_release(known.use, release))
    # argparse accepts unique prefixes; one of fewer than 8 characters is more likely another program's flag.
    whole = [flag for flag in flags_ever() if flag.startswith(name)] if name.startswith("--") else []
    if len(whole) == 1 and len(name) >= 8 and whole[0] not in flags_of(release):
        return _abbreviation_problem(name, whole[0], release)
    near = nearest_flags(name, release)
    message = f"no vLLM release has {name}{' (one word)' if ' ' in name else ''}"
    return FlagProblem(name, "unknown", message, near[0] if near else "")


def _replacement_in_release(use: str, release: Release) -> str:
    """The advised replacement `use` (a flag, or other words); empty where it is a flag that this release lacks, too."""
    flag = use.partition(" ")[0].partition(".")[0]
    if not flag.startswith("--") or flag in flags_of(release) or flag.replace("--no-", "--", 1) in flags_of(release):
        return use
    return ""


_OLDER_FLAGS = {
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


def nearest_flags(name: str, release: Release) -> tuple[str, ...]:
    """At most three flags of this release with a similar spelling, the closest first; empty where none is similar."""
    import difflib  # only a misspelt flag needs it

    names = [flag for flag in flags_of(release) if flag.startswith("--")]
    return tuple(difflib.get_close_matches(name, names, n=3, cutoff=0.7))
