"""Allocator settings that break the server or have no effect."""

from __future__ import annotations

from legroom.deployments.source_text import Place
from legroom.deployments.subjects import StartedServer
from legroom.exports.deploy.environment import ALLOCATOR_NAMES
from legroom.lint.rule import Context, Findings, Rule, checks, finding, flag_word
from legroom.vllm.args import other_value

_WHY_BREAKS = (
    "Memory of expandable segments cannot be shared by IPC handles, pinned by a KV connector, or (before 0.20.1) put "
    "to sleep (LR906)."
)
BREAKS = Rule("allocator-breaks", "error", "Expandable segments where they break the server", _WHY_BREAKS)
_WHY_CLASHES = (
    "Custom all-reduce shares buffers between ranks by IPC handles; with expandable segments starts were seen to fail "
    "with 'invalid argument' (LR906)."
)
CLASHES = Rule("allocator-clash", "warning", "Expandable segments beside custom all-reduce", _WHY_CLASHES)
_WHY_USELESS = (
    "It frees cached segments earlier and joins no pieces; with a full pool there is hardly anything to free (LR406)."
)
USELESS = Rule("allocator-useless", "note", "garbage_collection_threshold", _WHY_USELESS)


@checks(StartedServer, BREAKS, CLASHES, USELESS)
def allocator_settings(server: StartedServer, context: Context) -> Findings:
    """PYTORCH_*_ALLOC_CONF values that conflict with the server's flags or release."""
    for name in ALLOCATOR_NAMES:
        word = server.env.get(name)
        if word is None:
            continue
        place = server.place_of(word)
        if "expandable_segments:true" in word.text.replace(" ", "").lower():
            # vLLM asserts only on this spelling in this variable.
            is_asserted = name == "PYTORCH_CUDA_ALLOC_CONF" and "expandable_segments:True" in word.text
            yield from _expandable_segments_findings(server, context, place, is_asserted)
        if "garbage_collection_threshold" in word.text:
            yield finding(USELESS, place, "garbage_collection_threshold does not fix fragmentation", "leave it out")


def _expandable_segments_findings(server: StartedServer, context: Context, place: Place, is_asserted: bool) -> Findings:
    """Expandable segments beside sleep mode, a KV connector or custom all-reduce, which some releases refuse."""
    is_certain = is_asserted and context.is_release_certain(server)
    release = context.release_of(server)
    ranks = context.parsed_args(server).args.tensor_parallel_size or 1
    sleeps = flag_word(server, "--enable-sleep-mode")
    if sleeps and release.before("0.20.1"):
        message = f"sleep mode of vLLM {release} asserts against expandable segments (they go together from 0.20.1 on)"
        yield finding(BREAKS, place, message, "leave expandable_segments out", is_certain=is_certain)
    connector = flag_word(server, "--kv-transfer-config", "--kv-offloading-size")
    if connector and release.at_least("0.21.0") and not (sleeps or flag_word(server, "--enable-cumem-allocator")):
        message = f"vLLM {release} refuses expandable segments with a KV connector ({connector.text.partition('=')[0]})"
        yield finding(BREAKS, place, message, "leave expandable_segments out", is_certain=is_certain)
    # Ranks on several nodes do not use custom all-reduce, and Ray may have them there.
    is_spread = other_value(context.parsed_args(server).args, "--distributed-executor-backend") == "ray"
    is_spread = is_spread or not server.env.keys().isdisjoint(("RAY_ADDRESS", "VLLM_HOST_IP"))
    if ranks > 1 and not is_spread and flag_word(server, "--disable-custom-all-reduce", "--nnodes") is None:
        instead = "leave expandable_segments out, or add --disable-custom-all-reduce"
        if release.within("0.21.0", "0.28.0"):
            message = (
                f"expandable segments break custom all-reduce of {ranks} ranks in vLLM {release} ('invalid argument')"
            )
            # A warning: only GPUs with peer access use custom all-reduce, and no file says whether they have it.
            yield finding(BREAKS, place, message, instead, is_certain=False)
        else:
            message = (
                f"expandable segments beside custom all-reduce of {ranks} ranks: the start fails in vLLM 0.21.0 to "
                f"0.28.0, and IPC handles are shared in {release} too"
            )
            yield finding(CLASHES, place, message, instead)
