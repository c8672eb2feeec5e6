"""`legroom fragments FILE|URL [LATER]`: where memory lies that is reserved and not used."""

import argparse
from collections.abc import Sequence

from legroom.cli.output import note, print_answer, write_file
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.fragments.fragment_report import AllocatorReading, fragment_report
from legroom.fragments.fragment_sources import read_source
from legroom.render.fragments_text import fragments_svg, fragments_text
from legroom.units import parse_bytes

DESCRIPTION = """\
Show what PyTorch has reserved on a GPU and nobody uses: free pieces between blocks, whole segments, the pools of CUDA
graphs, the last KV blocks; and say which setting would have served a request that failed."""

EPILOG = """\
examples:
  legroom fragments snapshot.pickle
  legroom fragments before.pickle after.pickle        # what leaks, by the line that allocates it
  legroom fragments snapshot.pickle --need 2GiB        # would a request of that size be served?
  legroom fragments legroom-blackbox-*.json
  legroom fragments summary.txt --svg segments.svg
  legroom fragments http://127.0.0.1:8000 --json

A snapshot is what torch.cuda.memory._dump_snapshot("snapshot.pickle") writes; with _record_memory_history before it,
the failed request is replayed with other settings of the allocator. The file is read as plain data: nothing in it
is run.
A server can be read if vLLM runs with LEGROOM_WORKER_MEMORY=1 and legroom is installed beside it.

exit codes: 0 nothing is wrong, 1 a request failed, something leaks or much of the memory is fragmented,
2 the input could not be read, 3 the server could not be reached
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FILE|URL", help="snapshot, black box, memory_summary() text or server")
    parser.add_argument("later", nargs="?", metavar="LATER", help="the same process later: what grew between the two")
    parser.add_argument("--need", metavar="SIZE", help="ask about a request of this size, like 2GiB")
    parser.add_argument("--gpu", metavar="NUMBER", help="which device of the source (default: the fullest)")
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the segments")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Prints where reserved GPU memory lies unused; exit status 1 where that is a problem."""
    needed = parse_bytes(args.need, "--need") if args.need else None
    first = _reading_of_gpu(read_source(args.source), args.gpu)
    later = _reading_of_gpu(read_source(args.later), first.device) if args.later else None
    report = fragment_report(later or first, needed_bytes=needed, earlier=first if later else None)
    if args.svg:
        write_file(args.svg, fragments_svg(report), "picture")
    print_answer(args.json, report.to_json, lambda style: fragments_text(report, style))
    return ANSWER_IS_NO if report.has_problem else OK


def _reading_of_gpu(readings: Sequence[AllocatorReading], device: str | None) -> AllocatorReading:
    """The allocator's reading of the GPU with this index, or the first for None; LegroomError without such a GPU."""
    if device is None:
        if len(readings) > 1:
            note(f"note: it has {len(readings)} GPUs; this is GPU {readings[0].device}, the fullest (--gpu for others)")
        return readings[0]
    for reading in readings:
        if reading.device == device:
            return reading
    raise LegroomError(f"there is no GPU {device} in it", f"it has {', '.join(r.device for r in readings)}")
