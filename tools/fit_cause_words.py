"""Fits the words that tell the cause of a failure: src/legroom/facts/data/cause_words.json.

    python tools/fit_cause_words.py told_failures.jsonl [--check]

Needs scikit-learn. Each line of the file is an object with `text`, `cause`, `set` (who wrote it), `source` (the
thread that it retells, or "written") and optionally `also` (causes that are right as well). First each set is
predicted from the others. `--check` writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression

from legroom.diagnosis.cause_words import concepts, description_vector, words

STEP = 1.0
"""Weights are rounded to multiples of it: a quarter of it changes no share below by more than two in a hundred."""
FEWEST_TEXTS = 3
"""A word of fewer texts is left out: it is the name of one model or person."""
PENALTY = 10.0
"""The inverse of the penalty on weights: 30 states too much of pasted texts."""
TARGET = Path(__file__).parents[1] / "src/legroom/facts/data/cause_words.json"

WRITTEN = "written"
Row = dict[str, Any]


class Fit:
    """A classifier fitted to the words and concepts of rows."""

    def __init__(self, rows: list[Row]) -> None:
        counts = [Counter(words(row["text"])) for row in rows]
        texts_with = Counter(word for each in counts for word in each)
        known = {word: number for word, number in texts_with.items() if number >= FEWEST_TEXTS}
        self.rarity = {
            word: round((math.log((1 + len(rows)) / (1 + number)) + 1) / STEP) * STEP for word, number in known.items()
        }
        spoken_of = {name for row in rows for name in concepts(row["text"])}
        self.column = {token: at for at, token in enumerate(sorted({*known, *spoken_of}))}
        model = LogisticRegression(C=PENALTY, class_weight="balanced", max_iter=300)
        model.fit(self.matrix(rows, counts), [row["cause"] for row in rows])
        self.causes = list(model.classes_)
        self.weights, self.intercepts = model.coef_, model.intercept_

    def matrix(self, rows: list[Row], counts: list[Counter[str]]) -> csr_matrix:
        cells = [
            (value, at, self.column[token])
            for at, (row, each) in enumerate(zip(rows, counts, strict=True))
            for token, value in description_vector(each, concepts(row["text"]), self.rarity).items()
            if token in self.column
        ]
        values, at, columns = zip(*cells, strict=True)
        return csr_matrix((values, (at, columns)), shape=(len(rows), len(self.column)))

    def chances(self, rows: list[Row]) -> np.ndarray:
        scores = self.matrix(rows, [Counter(words(row["text"])) for row in rows]) @ self.weights.T + self.intercepts
        raised = np.exp(scores - scores.max(1, keepdims=True))
        return raised / raised.sum(1, keepdims=True)


def cross_validate(rows: list[Row]) -> None:
    """Prints how well each set is predicted from the others, and what probabilities of retold threads are worth.

    These are lower than the shares that are right, on purpose: pasted texts are less like the fitted ones than these
    are like each other, and there they hold.
    """
    fifths: dict[int, list[tuple[float, bool]]] = {}
    for name in sorted({row["set"] for row in rows}):
        left_out = [row for row in rows if row["set"] == name]
        sources = {row["source"] for row in left_out} - {WRITTEN}
        others = [row for row in rows if row["set"] != name and row["source"] not in sources]
        fitted = Fit(others)
        chances = fitted.chances(left_out)
        right = [
            fitted.causes[best] in {row["cause"], *row.get("also", ())}
            for row, best in zip(left_out, chances.argmax(1), strict=True)
        ]
        print(f"{name}: {len(left_out)} texts, right {np.mean(right):.1%} from {len(others)} others")
        for chance, is_right in zip(chances.max(1), right, strict=True) if sources else ():
            fifths.setdefault(min(int(chance * 5), 4), []).append((float(chance), is_right))
    for _, answers in sorted(fifths.items()):
        said, held = (np.mean([each[at] for each in answers]) for at in (0, 1))
        print(f"said {said:.0%}: right {held:.0%} of {len(answers)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.texts.read_text("utf-8").splitlines() if line.strip()]
    cross_validate(rows)
    if options.check:
        return
    fitted = Fit(rows)
    table = {
        word: [round(fitted.rarity.get(word, 0) / STEP), *(round(w / STEP) for w in fitted.weights[:, at])]
        for word, at in fitted.column.items()
    }
    content = {
        "source": f"Fitted by tools/fit_cause_words.py to {len(rows)} told failures with known causes.",
        "step": STEP,
        "causes": fitted.causes,
        "intercepts": [round(float(value), 3) for value in fitted.intercepts],
        "words": {word: row for word, row in table.items() if any(row[1:])},
    }
    lines = ",\n".join(
        f"    {json.dumps(w, ensure_ascii=False)}: {json.dumps(row, separators=(',', ':'))}"
        for w, row in content.pop("words").items()
    )  # type: ignore[attr-defined]
    head = json.dumps(content, indent=2)[:-2]
    TARGET.write_text(f'{head},\n  "words": {{\n{lines}\n  }}\n}}\n', "utf-8")
    print(f"{TARGET.name}: {len(table)} words, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
