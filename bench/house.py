"""How large is the house? Lines, files, numeric constants and options of the product, lines of benches, words of docs.

python bench/house.py [ROOM]
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def numeric_constants(tree: ast.Module) -> int:
    """Names in capitals that a module binds to a number, or to arithmetic on numbers alone."""
    return sum(
        all(
            isinstance(node, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
            for node in ast.walk(value)
        )
        and not any(
            isinstance(node, ast.Constant) and not isinstance(node.value, int | float) for node in ast.walk(value)
        )
        and not (isinstance(value, ast.Constant) and isinstance(value.value, bool))
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign) and (value := statement.value) is not None
    )


def options(tree: ast.Module) -> set[str]:
    """The long options that a file of `cli/` declares."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    words = (
        word
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for word in call.args
    )
    return {word.value for word in words if isinstance(word, ast.Constant) and str(word.value).startswith("--")}


def main() -> None:
    room = sys.argv[1] if len(sys.argv) > 1 else ""
    source = sorted((ROOT / "src/legroom" / room).rglob("*.py"))
    trees = {path: ast.parse(path.read_text("utf-8")) for path in source}
    declared = [option for path, tree in trees.items() if "cli" in path.parts for option in options(tree)]
    figures = {
        "src_lines": sum(path.read_text("utf-8").count("\n") for path in source),
        "src_files": len(source),
        "numeric_constants": sum(map(numeric_constants, trees.values())),
        "options": len(set(declared)),
        "bench_lines": sum(path.read_text("utf-8").count("\n") for path in (ROOT / "bench").glob("*.py")),
        "docs_words": sum(len(re.findall(r"\S+", path.read_text("utf-8"))) for path in (ROOT / "docs").rglob("*.md")),
    }
    for name, value in figures.items():
        print(f"{name:20}{value:10,}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
