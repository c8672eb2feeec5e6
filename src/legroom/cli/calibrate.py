"""`legroom calibrate`: learn from the start-up logs of the user's own machine."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from legroom.cli.output import note, print_answer
from legroom.drawing.text import columns
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.files import store_path
from legroom.planning import calibration_store as store
from legroom.planning.calibration import CalibratedStart, calibrated_starts, usable_observations
from legroom.planning.calibration_store import import_receipts, read_store, receipt, store_observations, to_json
from legroom.units import human_bytes

_LARGEST_LOG_BYTES = 256 * 2**20
_TERMS = {
    "weights_bytes": "weights",
    "activation_bytes": "activation peak",
    "non_torch_bytes": "non-torch memory",
    "profiled_non_torch_bytes": "beside the other terms",
    "graph_estimate_bytes": "CUDA-graph estimate",
    "graph_bytes": "CUDA graphs",
    "kv_cache_bytes": "left for the KV cache",
}
USAGE = "legroom calibrate LOG ... [options] | --show | --forget KEY | export FOLDER | import FOLDER|FILE ..."
DESCRIPTION = "Read vLLM start-up logs and remember what they measured; later plans use it and say `measured`."
EPILOG = """\
examples:
  legroom calibrate vllm.log --gpu h100
  journalctl -u vllm | legroom calibrate -
  legroom calibrate --show
  legroom calibrate --forget 3f2a9c01d4
  legroom calibrate export receipts/      # to share: no host names, paths or keys
  legroom calibrate import receipts/      # measurements of others; your own win

The store is $LEGROOM_HOME/calibration.json, or calibration.json in $XDG_DATA_HOME/legroom (~/.local/share/legroom).

exit codes: 0 done, 1 the logs hold no measurement, 2 the call is wrong or a log cannot be read
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("logs", nargs="*", metavar="LOG", help="start-up logs; - reads from a pipe")
    unsaid = parser.add_argument_group("what the logs may not say")
    unsaid.add_argument("--gpu", metavar="NAME", help="the GPU of the logs; most logs do not name it")
    unsaid.add_argument("--model", metavar="MODEL", help="the model, if legroom does not know the log's name for it")
    parser.add_argument("--dry-run", action="store_true", help="show what would be learnt, and remember nothing")
    store = parser.add_argument_group("what has been learnt")
    store.add_argument("--show", action="store_true", help="print what has been learnt")
    store.add_argument("--forget", nargs="?", const="", metavar="KEY", help="forget one entry by its key, or `all`")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Learns from logs, or shows, forgets or shares what was learnt; exit status 1 where nothing could be learnt."""
    if args.show:
        return _print_observations(args.json)
    if args.forget is not None:
        return _forget_observations(args.forget, args.json)
    if args.logs[:1] in (["export"], ["import"]):
        return _transfer_receipts(args.logs[0], [Path(word) for word in args.logs[1:]], args.json)
    if not args.logs:
        raise LegroomError("no log given", "legroom calibrate LOG..., or --show, or --forget KEY")
    starts = [start for log in args.logs for start in calibrated_starts(_read_log_text(log), log, args.gpu, args.model)]
    observations = usable_observations(starts)
    is_stored = bool(observations) and not args.dry_run
    if is_stored and (remark := store_observations(observations)):
        note(f"note: {remark}")
    text = "\n".join(_start_lines(starts, is_stored)) + "\n"
    print_answer(args.json, {"learnt": [_start_json(start) for start in starts]}, text)
    return OK if observations else ANSWER_IS_NO


def _start_json(start: CalibratedStart) -> dict[str, Any]:
    """A calibrated start as an entry of `legroom calibrate --json`: measured and predicted bytes."""
    startup, seen = start.startup, start.observation
    terms = seen.terms if seen else {}
    return {
        "log": start.log,
        "lines": [startup.first_line, startup.last_line],
        "key": seen.key if seen else None,
        "model": seen.model if seen else startup.args.model,
        "gpu": seen.gpu if seen else startup.gpu_name,
        "vllm": startup.vllm,
        "outcome": startup.outcome,
        "failure": startup.failure.id if startup.failure else None,
        "terms": {
            name: {"measured_bytes": value, "predicted_bytes": start.predicted.get(name)}
            for name, value in terms.items()
        },
        "available_kv_bytes": startup.available_kv_bytes,
        "predicted_kv_bytes": start.predicted.get("kv_cache_bytes"),
        "note": start.note or None,
    }


def _start_lines(starts: Sequence[CalibratedStart], is_stored: bool) -> list[str]:
    """Measured and predicted bytes of each start as a table, and whether the measurements were stored."""
    lines: list[str] = []
    for start in starts:
        startup, seen = start.startup, start.observation
        title = f"{start.log}: {startup.args.model or 'unnamed model'}, vLLM {startup.vllm or '(not said)'}"
        lines.append(f"{title}, {startup.outcome}" + (f" ({startup.failure.id})" if startup.failure else ""))
        measured = dict(seen.terms) if seen else {}
        if measured and startup.available_kv_bytes is not None and not startup.explicit_kv:
            measured["kv_cache_bytes"] = startup.available_kv_bytes
        rows = [["", "measured", "predicted", "off by"]]
        for name, value in measured.items():
            compared = ["", ""]
            if (predicted := start.predicted.get(name)) is not None:
                sign = "+" if predicted >= value else "-"
                compared = [human_bytes(predicted), sign + human_bytes(abs(predicted - value))]
            rows.append([f"  {_TERMS[name]}", human_bytes(value), *compared])
        lines += columns(rows, "<>>>") if measured else []
        if start.note:
            lines.append(f"  {start.note}")
        lines.append("")
    stored = "remembered; later plans of these use it and say `measured`"
    return [*lines, stored if is_stored else "nothing was remembered"]


def _print_observations(as_json: bool) -> int:
    """Prints every stored observation; the exit code is 0. LegroomError where the store cannot be read."""
    stored = read_store()
    if stored.problem:
        raise LegroomError(stored.problem, "the next `legroom calibrate LOG` moves it aside and begins a new one")
    rows = [["key", "model", "GPU", "vLLM", "seen", "measured"]]
    for seen in stored.observations:
        terms = ", ".join(f"{_TERMS[name]} {human_bytes(value)}" for name, value in seen.terms.items())
        rows.append([seen.key, seen.model or "-", seen.gpu, seen.release, seen.seen, terms])
    table = "\n".join(columns(rows, "<<<<<<")) if stored.observations else f"nothing learnt yet ({store_path()})"
    document = {"store": str(store_path()), "observations": [to_json(seen) for seen in stored.observations]}
    print_answer(as_json, document, table + "\n")
    return OK


def _forget_observations(key: str, as_json: bool) -> int:
    """Deletes and counts the observations under `key` (one that --show prints, or `all`); LegroomError for another."""
    if not key:
        raise LegroomError("forget what?", "name a key that --show prints, or `all`")
    path = store_path()
    if not path.exists():
        raise LegroomError("nothing has been learnt yet, so there is nothing to forget", "legroom calibrate LOG learns")
    with store.locked(path):
        observations, remark = store.open_for_change(path)
        kept = () if key == "all" else tuple(seen for seen in observations if seen.key != key)
        if len(kept) == len(observations) and key != "all":
            raise LegroomError(f"nothing is stored under {key!r}", "legroom calibrate --show lists the keys")
        store.write_store(kept, path)
    if remark:
        note(f"note: {remark}")
    forgotten = len(observations) - len(kept)
    print_answer(as_json, {"forgotten": forgotten}, f"forgot {forgotten} of {len(observations)}\n")
    return OK


def _transfer_receipts(verb: str, places: Sequence[Path], as_json: bool) -> int:
    """`verb` export: writes observations as JSON files to a folder; import: stores such files. Status 1 for none."""
    if not places or (verb == "export" and len(places) > 1):
        raise LegroomError(f"{verb} which folder?", f"legroom calibrate {verb} FOLDER")
    public: dict[str, Any] = {}
    stored = read_store().observations if verb == "export" else ()
    try:
        if verb == "import":
            files = [file for place in places for file in (sorted(place.glob("*.json")) if place.is_dir() else [place])]
            done = import_receipts((file.name, file.read_text("utf-8")) for file in files)
        else:
            public = {seen.key: content for seen in stored if (content := receipt(seen)) is not None}
            places[0].mkdir(parents=True, exist_ok=True)
            for key, content in public.items():
                (places[0] / f"{key}.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            done = len(public)
    except (OSError, UnicodeDecodeError) as error:
        raise LegroomError(f"a receipt cannot be read or written: {error}", "name a folder of receipts") from error
    held_back = len(stored) - len(public)
    told = f"{verb}ed {done} receipts" + (f"; {held_back} held back: a setting names a path" if held_back else "")
    print_answer(as_json, {f"{verb}ed": done, "held_back": held_back}, told + "\n")
    return OK if done else ANSWER_IS_NO


def _read_log_text(log: str) -> str:
    """The text of a log file, or of stdin for `-`, cut at the size limit; LegroomError where it is unreadable."""
    try:
        if log == "-":
            return sys.stdin.buffer.read(_LARGEST_LOG_BYTES).decode("utf-8", "replace")
        path = Path(log)
        if path.stat().st_size > _LARGEST_LOG_BYTES:
            note(f"note: only the first {_LARGEST_LOG_BYTES >> 20} MiB of {log} are read")
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(_LARGEST_LOG_BYTES)
    except OSError as error:
        raise LegroomError(f"{log} cannot be read: {error.strerror}", "give the path of a vLLM log") from error
