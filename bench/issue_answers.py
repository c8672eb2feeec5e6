"""How would the issue action answer? Counts its answers to issue texts, and what was wrong of what it was sure of.

python bench/issue_answers.py TEXTS.jsonl ...

A line is {"url", "title", "body" or "log", "causes"}: `causes` are the labels that a reader of the whole thread accepts
([] or ["not_memory"]: no memory problem; without the key: not judged).
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations/github-issues"))
from answer_issue import NOT_MEMORY, answer


def judgement(row: dict[str, Any], kind: str, cause: str) -> str:
    """What a reader of the thread says of the answer."""
    causes = row.get("causes", row.get("accept_causes"))
    if causes is None:
        return "not judged"
    if set(causes) <= NOT_MEMORY:
        return "silent on what is not memory" if kind == "silence" else "spoke of what is not memory"
    if kind == "diagnosis":
        return "sure and right" if cause in causes else "sure and wrong"
    return f"{kind} on a memory problem"


def main() -> None:
    """Prints the counts of each file, and every sure answer that is wrong."""
    for name in sys.argv[1:]:
        kinds, judged = Counter[str](), Counter[str]()
        for line in Path(name).read_text("utf-8").splitlines():
            row = json.loads(line)
            found = answer(f"{row.get('title', '')}\n{row.get('body') or row.get('log', '')}")
            said = judgement(row, found.kind, found.cause)
            kinds[found.kind] += 1
            judged[said] += 1
            if said in ("sure and wrong", "spoke of what is not memory"):
                print(f"  {said}: {row['url']} {found.kind} {found.cause}")
        print(f"{name}: {sum(kinds.values())} texts, {dict(kinds)}, {dict(judged)}")


if __name__ == "__main__":
    main()
