"""Allocator settings that break the server or do nothing for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from legroom.deployments.subjects import StartedServer
from legroom.deployments.text import Place
from legroom.exports.deploy.environment import ALLOCATOR_NAMES
from legroom.lint.rule import Context, LintFinding, Rule, Severity, finding, flag_word

BREAKS = Rule(
    "allocator-breaks",
    "error",
    "Expandable segments where they break the server",
    "Memory of expandable segments cannot be shared by IPC handles, pinned by a KV connector, or (before 0.20.1) put "
    "to sleep (LR906).",
)
CLASHES = Rule(
    "allocator-clash",
    "warning",
    "Expandable segments beside custom all-reduce",
    "Custom all-reduce shares buffers between ranks by IPC handles; with expandable segments starts were seen to fail "
    "with 'invalid argument' (LR906).",
)
USELESS = Rule(
    "allocator-useless",
    "note",
    "garbage_collection_threshold",
    "It frees cached segments earlier and joins no pieces; with a full pool there is hardly anything to free (LR406).",
)
RULES = (BREAKS, CLASHES, USELESS)


def check(subject: Any, context: Context) -> Iterator[LintFinding]:
    """What PYTORCH_*_ALLOC_CONF says against the flags beside it."""
    if not isinstance(subject, StartedServer):
        return
    for name in ALLOCATOR_NAMES:
        word = subject.env.get(name)
        if word is None:
            continue
        place = subject.place_of(word)
        if "expandable_segments:true" in word.text.replace(" ", "").lower():
            # vLLM itself looks for these very words in this variable alone.
            is_asserted = name == "PYTORCH_CUDA_ALLOC_CONF" and "expandable_segments:True" in word.text
            yield from _expandable(subject, context, place, is_asserted)
        if "garbage_collection_threshold" in word.text:
            yield finding(USELESS, place, "garbage_collection_threshold does not fix fragmentation", "leave it out")


def _expandable(subject: StartedServer, context: Context, place: Place, is_asserted: bool) -> Iterator[LintFinding]:
    severity: Severity | None = None if is_asserted and context.knows_release(subject) else "warning"
    release = context.release_of(subject)
    args = context.parsed(subject).args
    ways = args.tensor_parallel_size or 1
    if flag_word(subject, "--enable-sleep-mode") and release.before("0.20.1"):
        message = f"sleep mode of vLLM {release} asserts against expandable segments (they go together from 0.20.1 on)"
        yield finding(BREAKS, place, message, "leave expandable_segments out", severity=severity)
    connector = flag_word(subject, "--kv-transfer-config", "--kv-offloading-size")
    if (
        connector
        and release.at_least("0.21.0")
        and not flag_word(subject, "--enable-sleep-mode", "--enable-cumem-allocator")
    ):
        message = f"vLLM {release} refuses expandable segments with a KV connector ({connector.text.partition('=')[0]})"
        yield finding(BREAKS, place, message, "leave expandable_segments out", severity=severity)
    if ways > 1 and flag_word(subject, "--disable-custom-all-reduce") is None:
        instead = "leave expandable_segments out, or add --disable-custom-all-reduce"
        if release.within("0.21.0", "0.28.0"):
            message = (
                f"expandable segments break custom all-reduce of {ways} ranks in vLLM {release} ('invalid argument')"
            )
            # Custom all-reduce is used only between GPUs that reach each other's memory, which no file says.
            yield finding(BREAKS, place, message, instead, severity="warning")
        else:
            message = (
                f"expandable segments beside custom all-reduce of {ways} ranks: the start fails in vLLM 0.21.0 to "
                f"0.28.0, and IPC handles are shared in {release} too"
            )
            yield finding(CLASHES, place, message, instead)
