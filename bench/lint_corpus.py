"""Precision and recall of lint on a folder of public files, by judgements made by hand.

    python bench/lint_corpus.py FOLDER [--judgements FILE] [--repo NAME ...] [--json FILE] [--unjudged]

FOLDER holds a folder for each repository (`owner+name`), with its files at their own paths; the files are not part of
legroom. A judgement is one line of JSON:

    {"repo": "owner+name", "path": "deploy/a.yaml", "line": "3f9c2a...", "rule": "flag-removed", "right": true,
     "held_out": true, "group": "E", "of": "precision", "why": "..."}

`line` is the start of the SHA-256 of the line without the spaces around it: nothing of the file is kept. `right` says
whether something is wrong there as the rule says, `why` for what reason, `of` whether it was an error of lint's or a
hit of the search for recall. A judgement with `right` that lint does not report is a miss; so recall is of what was
looked for, not of what nobody knows. Precision is of errors. A file that has changed since no
longer matches its judgements, and its errors are counted as unjudged.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench_harness import arguments, read_lines, write_json

from legroom.lint.linter import LintOptions, lint_texts

JUDGEMENTS = Path(__file__).with_name("lint_judgements.jsonl")
HASH_LENGTH = 12
_FAMILIES = {"flag-unknown": "flag", "flag-removed": "flag", "flag-not-yet": "flag", "flag-ignored": "flag"}
"""Rules that say the same of a line for different releases: a miss is only a miss where none of them speaks."""


@dataclass(frozen=True)
class Spot:
    """A line of a file, and what is said of it."""

    repo: str
    path: str
    line: str
    rule: str

    @property
    def family(self) -> tuple[str, str, str, str]:
        return self.repo, self.path, self.line, _FAMILIES.get(self.rule, self.rule)


@dataclass(frozen=True)
class Judgement:
    spot: Spot
    right: bool
    held_out: bool = False


def line_hash(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:HASH_LENGTH]


def read_judgements(path: Path) -> list[Judgement]:
    return [
        Judgement(Spot(row["repo"], row["path"], row["line"], row["rule"]), row["right"], row.get("held_out", False))
        for row in read_lines(path)
    ]


def reported(folder: Path, repo: str, path: str) -> Iterator[tuple[Spot, str, str]]:
    """What lint says of a file: the spot, the severity, the message."""
    text = (folder / repo / path).read_text("utf-8-sig", errors="replace")
    lines = text.splitlines()
    for finding in lint_texts([(path, text)], LintOptions()).findings:
        line = lines[finding.place.line - 1] if finding.place.line <= len(lines) else ""
        yield Spot(repo, path, line_hash(line), finding.rule), finding.severity, finding.message


@dataclass
class Score:
    """What one half of the repositories comes to."""

    right: int = 0
    wrong: int = 0
    unjudged: int = 0
    known: int = 0
    known_reported: int = 0

    @property
    def precision(self) -> float | None:
        return self.right / (self.right + self.wrong) if self.right + self.wrong else None

    @property
    def recall(self) -> float | None:
        return self.known_reported / self.known if self.known else None


def score(folder: Path, judgements: list[Judgement], files: set[tuple[str, str]]) -> tuple[Score, list[str]]:
    """Every judged file that is there, and the spots that nobody judged."""
    by_spot = {judgement.spot: judgement.right for judgement in judgements}
    total, notes = Score(), []
    families: set[tuple[str, str, str, str]] = set()
    here = set()
    for repo, path in sorted(files):
        here.add((repo, path))
        seen = set()
        for spot, severity, message in reported(folder, repo, path):
            families.add(spot.family)
            if severity != "error" or spot in seen:
                continue
            seen.add(spot)
            verdict = by_spot.get(spot)
            total.right += verdict is True
            total.wrong += verdict is False
            total.unjudged += verdict is None
            if verdict is not True:
                notes.append(f"{'wrong' if verdict is False else 'unjudged'}  {repo}/{path}  {spot.rule}: {message}")
    for judgement in judgements:
        if judgement.right and (judgement.spot.repo, judgement.spot.path) in here:
            total.known += 1
            total.known_reported += judgement.spot.family in families
            if judgement.spot.family not in families:
                notes.append(f"missed  {judgement.spot.repo}/{judgement.spot.path}  {judgement.spot.rule}")
    return total, notes


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def main() -> int:
    args = arguments(__doc__, "folder:path", judgements=JUDGEMENTS, repo=(), json=Path, unjudged=False)
    judgements = [
        judgement for judgement in read_judgements(args.judgements) if not args.repo or judgement.spot.repo in args.repo
    ]
    gone = Counter(
        judgement.spot.repo
        for judgement in judgements
        if not (args.folder / judgement.spot.repo / judgement.spot.path).is_file()
    )
    figures = {}
    print(f"{'half':10} {'errors':>7} {'wrong':>6} {'unjudged':>9} {'precision':>10} {'known':>6} {'recall':>8}")
    for half, held_out in (("looked at", False), ("held out", True)):
        chosen = [judgement for judgement in judgements if judgement.held_out is held_out]
        files = {(judgement.spot.repo, judgement.spot.path) for judgement in chosen}
        present = {(repo, path) for repo, path in files if (args.folder / repo / path).is_file()}
        total, notes = score(args.folder, chosen, present)
        print(
            f"{half:10} {total.right + total.wrong + total.unjudged:7} {total.wrong:6} {total.unjudged:9} "
            f"{_share(total.precision):>10} {total.known:6} {_share(total.recall):>8}"
        )
        figures[half] = {**vars(total), "precision": total.precision, "recall": total.recall, "files": len(present)}
        if args.unjudged:
            print("\n".join(f"  {note}" for note in notes))
    if gone:
        print(f"{sum(gone.values())} judgements are of files that are not there: {', '.join(sorted(gone))}")
    write_json(args.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
