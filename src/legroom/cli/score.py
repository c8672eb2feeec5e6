"""`legroom score`: how right legroom is on real start-ups."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from legroom.cli.output import ProgressBar, note, print_json, write_file
from legroom.errors import BAD_INPUT, OK, LegroomError

if TYPE_CHECKING:
    from legroom.planning.scoring import Result, ScoreSummary
    from legroom.planning.scoring_data import Loaded

_LABELS = {
    "weights": "weights",
    "kv": "KV bytes",
    "kv_of_card": "KV bytes, of the card",
    "tokens_per_byte": "tokens a KV byte",
    "activation": "activation peak",
    "peak_of_card": "peak use, of the card",
}
_BANDED_LABELS = {
    "kv_cache": "KV bytes",
    "weights": "weights",
    "activation": "activation peak",
    "non_torch": "non-torch",
}
_EPILOG = """\
DATA.jsonl holds one JSON object per start-up, either as published logs state it (model, gpu, vllm_version, flags,
weights_gib, available_kv_gib, kv_tokens, outcome; facts of models that are not bundled in models.json beside it) or as
an instrumented run measured it (weights_bytes, available_kv_bytes, peak_activation, ...; config.json folders named with
--configs).

examples:
  legroom score startups.jsonl
  legroom score measured.jsonl --configs configs/
  legroom score --from-logs /var/log/vllm --gpu h100

exit codes: 0 scored, 2 the call is wrong or the records cannot be read
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The options of `legroom score`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "score",
        usage="legroom score DATA.jsonl [options] | --from-logs DIR [--gpu NAME]",
        description="Predict every start-up of a file and print how far off each figure is.",
        epilog=_EPILOG,
    )
    parser.add_argument("data", nargs="?", metavar="DATA.jsonl", help="start-ups, one JSON object per line")
    source = parser.add_argument_group("what is scored")
    source.add_argument(
        "--models", metavar="FILE", help="model facts of the records (default: models.json beside them, else bundled)"
    )
    source.add_argument(
        "--configs", metavar="DIR", nargs="+", help="folders with a config.json each, for instrumented runs"
    )
    source.add_argument("--from-logs", metavar="DIR", help="score a folder of vLLM start-up logs instead")
    source.add_argument("--gpu", metavar="NAME", help="the GPU of the logs, where they do not name it")
    out = parser.add_argument_group("output")
    out.add_argument("--worst", type=int, default=5, metavar="N", help="how many of the worst records to list (5)")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--out", metavar="FILE", help="write every record's errors to a JSON file")
    return parser


def run(args: argparse.Namespace) -> int:
    """Score, print, and say which records could not be used."""
    from legroom.planning.scoring import score

    loaded = _load(args)
    bar = ProgressBar("scoring")
    try:
        results = score(loaded.cases, lambda done, of: bar(done / of))
    finally:
        bar.clear()
    document = _document(results, loaded)
    if args.out:
        _write(args.out, document, results)
    if args.json:
        print_json(document)
    else:
        print("\n".join(report(results, loaded, args.worst)))
    return OK


def _load(args: argparse.Namespace) -> Loaded:
    from legroom.planning import scoring_data, scoring_logs

    if bool(args.data) == bool(args.from_logs):
        raise LegroomError("give either a file of records or --from-logs DIR", "see legroom score --help")
    if args.from_logs:
        from legroom.vllm_logs.printed_flags import load_logged_model

        return scoring_logs.log_cases(Path(args.from_logs), load_logged_model, args.gpu)
    path = Path(args.data)
    if path.is_dir():
        path /= "startups.jsonl"
    records = scoring_data.read_records(path)
    if any(isinstance(record, dict) and scoring_data.is_gpu_run(record) for _, record in records):
        configs = [Path(name) for name in args.configs or ()] or sorted((path.parent / "kit").glob("configs*"))
        if not configs or not all(folder.is_dir() for folder in configs):
            raise LegroomError("these runs need the models' configs", "name their folder: --configs DIR", BAD_INPUT)
        return scoring_data.gpu_run_cases(records, *configs)
    if all(isinstance(record, str) for _, record in records):
        raise LegroomError(f"{path} holds no start-up record", "give a file with one JSON object a line")
    models = Path(args.models) if args.models else path.with_name("models.json")
    if not models.exists() and not args.models:
        note(f"there is no {models}: bundled models are scored, the others left out")
        return scoring_data.bundled_cases(records)
    return scoring_data.published_cases(records, scoring_data.read_models(models))


def _document(results: Sequence[Result], loaded: Loaded) -> dict[str, Any]:
    from legroom.planning.scoring import GROUPS, summaries_by, summary

    unanswered = [{"id": r.case.id, "why": r.why_unanswered} for r in results if r.why_unanswered]
    return {
        "summary": asdict(summary(results)),
        "by": {
            group: {value: asdict(some) for value, some in summaries_by(results, group).items()} for group in GROUPS
        },
        "bad": [asdict(bad) for bad in loaded.bad] + unanswered,
        "passed_over": loaded.passed_over,
    }


def _write(path: str, document: dict[str, Any], results: Sequence[Result]) -> None:
    from legroom.planning.scoring import result_json

    rows = [result_json(result) for result in results]
    write_file(path, json.dumps({**document, "rows": rows}, indent=1), "errors")


def report(results: Sequence[Result], loaded: Loaded, worst: int) -> list[str]:
    """The error table for people."""
    from legroom.planning.scoring import GROUPS, summaries_by, summary

    whole = summary(results)
    lines = [f"{whole.records} start-ups predicted; {loaded.passed_over} say too little to be scored", ""]
    lines += _error_table(whole)
    lines += ["", *_verdict_lines(whole)]
    if whole.coverage:
        lines += ["", *_band_table(whole, summaries_by(results, "class"))]
    for group in GROUPS:
        parts = summaries_by(results, group)
        if len(parts) > 1:
            lines += ["", *_group_table(group, parts)]
    lines += _worst_lines(results, worst)
    lines += _bad_lines(results, loaded)
    return lines


def _error_table(whole: ScoreSummary) -> list[str]:
    from legroom.drawing.text import columns

    rows = [["error", "records", "sources", "median", "p90", "worst", "mean by source", "bias"]]
    for measure, spread in whole.spreads.items():
        rows.append(
            [
                _LABELS[measure],
                str(spread.count),
                str(spread.sources),
                f"{spread.median:.2%}",
                f"{spread.p90:.2%}",
                f"{spread.worst:.2%}",
                f"{spread.mean_by_source:.2%}",
                f"{spread.bias:+.2%}",
            ]
        )
    return columns(rows, "<>>>>>>>")


def _band_table(whole: ScoreSummary, by_class: dict[str, ScoreSummary]) -> list[str]:
    """How often the bands hold the truth; those of the KV cache class by class too."""
    from legroom.drawing.text import columns

    rows = [["truth inside the 90 % band", "records", "inside", "median width, of the card"]]
    covered = [(_BANDED_LABELS[name], cover) for name, cover in whole.coverage.items()]
    covered += [
        (f"KV bytes, {name}", part.coverage["kv_cache"])
        for name, part in by_class.items()
        if "kv_cache" in part.coverage
    ]
    rows += [
        [name, str(cover.count), f"{cover.inside:.0%}", f"{cover.median_width_of_card:.2%}"] for name, cover in covered
    ]
    return columns(rows, "<>>>")


def _verdict_lines(whole: ScoreSummary) -> list[str]:
    lines = []
    if whole.tokens_exact is not None:
        lines.append(f"tokens exact to rounding: {whole.tokens_exact:.1%}")
    if whole.kv_within_2_percent_of_card is not None:
        lines.append(f"KV bytes within 2 % of the card: {whole.kv_within_2_percent_of_card:.1%}")
    if whole.peak_within_1_percent_of_card is not None:
        lines.append(f"peak use within 1 % of the card: {whole.peak_within_1_percent_of_card:.1%}")
    if whole.starts_right is not None:
        lines.append(f"will it start: {whole.starts_right:.1%} of {whole.starts} starts right")
    if whole.failures_right is not None:
        lines.append(f"will it start: {whole.failures_right:.1%} of {whole.failures} start-up failures right")
    return lines


def _group_table(group: str, parts: dict[str, ScoreSummary]) -> list[str]:
    from legroom.drawing.text import columns

    rows = [[f"by {group}", "records", "weights", "KV", "KV of card", "bias", "tokens exact", "verdict"]]
    for value, part in parts.items():
        right = [count * share for count, share in _verdicts(part)]
        judged = sum(count for count, _ in _verdicts(part))
        rows.append(
            [
                value[:44],
                str(part.records),
                _median(part, "weights"),
                _median(part, "kv"),
                _median(part, "kv_of_card"),
                f"{part.spreads['kv_of_card'].bias:+.2%}" if "kv_of_card" in part.spreads else "",
                "" if part.tokens_exact is None else f"{part.tokens_exact:.0%}",
                f"{round(sum(right))}/{judged}" if judged else "",
            ]
        )
    return columns(rows, "<>>>>>>>")


def _verdicts(part: ScoreSummary) -> list[tuple[int, float]]:
    pairs = ((part.starts, part.starts_right), (part.failures, part.failures_right))
    return [(count, share) for count, share in pairs if share is not None]


def _median(part: ScoreSummary, measure: str) -> str:
    return f"{part.spreads[measure].median:.2%}" if measure in part.spreads else ""


def _worst_lines(results: Sequence[Result], count: int) -> list[str]:
    from legroom.drawing.text import columns

    measured = [result for result in results if "kv_of_card" in result.errors]
    measured.sort(key=lambda result: -abs(result.errors["kv_of_card"]))
    if count <= 0 or not measured:
        return []
    rows = [["farthest off", "model", "GPU", "vLLM", "weights", "KV of card"]]
    for result in measured[:count]:
        target = result.case.target
        weights = result.errors.get("weights")
        rows.append(
            [
                result.case.id,
                target.model.name[:44],
                target.gpu.name[:28],
                target.release.version,
                "" if weights is None else f"{weights:+.2%}",
                f"{result.errors['kv_of_card']:+.2%}",
            ]
        )
    return ["", *columns(rows, "<<<<>>")]


def _bad_lines(results: Sequence[Result], loaded: Loaded) -> list[str]:
    bad = [(bad.id, bad.why) for bad in loaded.bad]
    bad += [(result.case.id, result.why_unanswered) for result in results if result.why_unanswered]
    if not bad:
        return []
    shown = [f"  {id_}: {why}" for id_, why in bad[:20]]
    more = [f"  ... and {len(bad) - 20} more"] if len(bad) > 20 else []
    return ["", f"{len(bad)} records could not be used:", *shown, *more]
