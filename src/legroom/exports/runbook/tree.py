"""The troubleshooting tree: the catalog's entries under the question they answer, in the order they are asked."""

from __future__ import annotations

from collections.abc import Iterable

from legroom.explain.entry import Entry, Language, Localized
from legroom.records import dataclass


@dataclass(frozen=True, slots=True)
class Branch:
    """One answer to "where does it happen?"."""

    key: str
    """The first digit of its entries."""
    question: Localized
    look: Localized
    """How to see that it is this one."""
    colour: str
    entries: tuple[Entry, ...] = ()

    def with_entries(self, entries: Iterable[Entry]) -> Branch:
        """The same question with its answers."""
        return Branch(self.key, self.question, self.look, self.colour, tuple(entries))


_BRANCHES = (
    Branch(
        "9",
        Localized("Is it something else than memory?", "是否根本不是显存问题？"),
        Localized(
            "the last lines name a driver, a kernel, NCCL or a flag, and no size",
            "末尾几行提到驱动、内核、NCCL 或参数，没有字节数",
        ),
        "grey",
    ),
    Branch(
        "1",
        Localized("Does it end while the model loads?", "是否在加载模型时失败？"),
        Localized("before the line that says what model loading took", "在 Model loading took 之前"),
        "blue",
    ),
    Branch(
        "3",
        Localized("In the profile run, in graph capture or in a warm-up?", "是否在探测、图捕获或预热时失败？"),
        Localized(
            "after loading; profile_run, capture_model or warming up is in the traceback",
            "加载之后；堆栈里有 profile_run、capture_model 或 warm up",
        ),
        "purple",
    ),
    Branch(
        "2",
        Localized("When the KV cache is sized?", "是否在确定 KV 缓存大小时失败？"),
        Localized(
            "the message speaks of cache blocks, of max seq len or of KV cache memory",
            "报错提到 cache blocks、max seq len 或 KV cache memory",
        ),
        "green",
    ),
    Branch(
        "4",
        Localized("While it serves?", "是否在服务期间出现？"),
        Localized("it had started, and requests were answered", "已经启动，并且处理过请求"),
        "orange",
    ),
    Branch(
        "5",
        Localized("Is it the host?", "是否是主机的问题？"),
        Localized(
            "the process was killed, or /dev/shm, pinned or unified memory is named",
            "进程被杀死，或提到 /dev/shm、锁页内存、统一内存",
        ),
        "red",
    ),
)


def tree(entries: Iterable[Entry]) -> tuple[Branch, ...]:
    """Every branch with the entries of the catalog that belong to it; an imported record has none and is left out."""
    own = [entry for entry in entries if entry.id.startswith("LR") and entry.story is not None]
    branches = (branch.with_entries(entry for entry in own if entry.id[2:3] == branch.key) for branch in _BRANCHES)
    return tuple(branch for branch in branches if branch.entries)


def first_remedy(entry: Entry, language: Language) -> str:
    """What to try first: entries list what costs least and fits most first."""
    return entry.workarounds[0].action.said(language) if entry.workarounds else ""
