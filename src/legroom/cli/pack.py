"""`legroom pack`: several servers on one machine, each with flags under which all of them start in any order."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from legroom.cli.export import deliver
from legroom.cli.output import note, print_answer
from legroom.cli.shared_options import add_policy_option, described_server, gpu_count, split_words
from legroom.errors import ANSWER_IS_NO, OK, LegroomError
from legroom.exports.deploy.pack_files import pack_files
from legroom.exports.export_request import ExportedFile
from legroom.facts.gpus import Gpu, gpu
from legroom.facts.releases import latest, release
from legroom.planning.machine import Machine, card_and_used_bytes, make_target, with_measurements
from legroom.planning.packing.gpu_packing import PackRequest, PackResult, pack, pack_json
from legroom.planning.packing.needs import (
    SERVER_OPTIONS,
    OtherProgram,
    PackedServer,
    packed_server,
    with_own_names_and_ports,
)
from legroom.planning.packing.pack_changes import changes_that_fit, meet_goals
from legroom.planning.packing.placement import Card, Shift, offered_cards
from legroom.render.pack_text import pack_text
from legroom.units import parse_bytes
from legroom.vllm.args import ServeArgs

USAGE = "legroom pack --gpu NAME [options] -- vllm serve A ... -- vllm serve B ..."
DESCRIPTION = """\
Put several vLLM servers, and programs that are not vLLM, on one GPU, on the slices of one, or on several: with flags
for each server so that all of them start in any order, and again after any one is restarted while the others are under
load. What is left is shared out as KV cache. If they do not fit, it shows the arithmetic and the smallest change that
would help."""

EPILOG = """\
options of one server, written among its own flags: --want-context LEN and --want-concurrency N (what its KV cache must
at least hold), --weight W (its share of what is left; default: 1), --name NAME

examples:
  legroom pack --gpu h100 -- vllm serve llama-3.1-8b --max-model-len 16384 -- vllm serve qwen3-4b --max-model-len 8192
  legroom pack --gpu h200 --other trainer=40GiB -- vllm serve llama-3.1-8b --want-context 32k --want-concurrency 8
  legroom pack --gpu h100 --gpus 2 -- vllm serve qwen3-32b -- vllm serve llama-3.1-8b -- vllm serve bge-m3
  legroom pack --gpu h200 --gpus 3g.71gb,3g.71gb -- vllm serve qwen3-14b -- vllm serve llama-3.1-8b
  legroom pack --gpu l40s --shift day=chat --shift night=batch -- vllm serve llama-3.1-8b --name chat -- vllm serve \\
    qwen3-14b --name batch
  legroom pack --gpu h100 --format systemd -o units/ -- vllm serve llama-3.1-8b -- vllm serve qwen3-4b

exit codes: 0 they fit or are tight, 1 they do not fit, 2 the call is wrong, 3 something needed was unreachable
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where they run")
    where.add_argument("--gpu", metavar="NAME", help="a GPU (h100, a100-80gb, rtx4090, l4 ...) or a size (24GiB)")
    where.add_argument("--gpus", metavar="N|SLICES", default="1", help="how many, or MIG slices (3g.40gb,...)")
    where.add_argument("--gpu-memory", metavar="SIZE", help="total memory of one GPU as your machine reports it")
    where.add_argument("--gpu-used", metavar="SIZE", help="what a desktop and other programs use of each GPU (2GiB)")
    where.add_argument("--vllm", metavar="VERSION", help="vLLM release (default: the newest known)")
    about = "another program; repeatable"
    where.add_argument("--other", metavar="NAME=SIZE[@GPU]", action="append", default=[], help=about)
    how = parser.add_argument_group("how")
    how.add_argument("--shift", metavar="SHIFT=NAME,...", action="append", default=[], help="who is awake together")
    how.add_argument("--sleep-level", choices=("1", "2"), default="1", help="how deep they sleep (default: 1)")
    add_policy_option(how, "safe")
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--format", choices=("compose", "systemd", "llama-swap"), help="write files instead of commands")
    out.add_argument("-o", "--output", metavar="PATH", help="where to write them (default: stdout)")
    out.add_argument("--force", action="store_true", help="replace files that legroom did not write")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The namespace of the command's own options, with `groups`: the words of each server."""
    own, rest, after = split_words(parser, words)
    args = parser.parse_args(own)
    if rest:
        raise LegroomError(f"{rest[0]!r} is no option of pack", "a server follows after --, like -- vllm serve MODEL")
    args.groups = [list(group) for is_end, group in groupby(after, "--".__eq__) if not is_end]
    return args


def run(args: argparse.Namespace) -> int:
    """Packs the servers on the GPUs and prints the result or writes its files; exit status 1 where they do not fit."""
    if args.gpu is None:
        raise LegroomError("which GPU?", "say --gpu h100, a100-80gb, l40s, l4, rtx4090 ..., or a size: --gpu 24GiB")
    if not args.groups:
        raise LegroomError("which servers?", "each after a --: legroom pack --gpu h100 -- vllm serve A -- vllm serve B")
    cards = _offered_cards(args)
    servers = with_own_names_and_ports([_packed_server(args, words, cards[0]) for words in args.groups])
    for remark in args.remarks:
        note(f"note: {remark}")
    shifts = tuple(_parse_shift(text, servers) for text in args.shift)
    for name in {server.name for server in servers} - {name for shift in shifts for name in shift.awake}:
        if shifts:
            raise LegroomError(f"{name} is awake in no shift", f"name it in one: --shift day={name}")
    result = meet_goals(pack(PackRequest(tuple(servers), cards, shifts, args.policy)))
    changes = changes_that_fit(result)
    files = _format_files(args, result)
    if args.json or not files:
        named = {"files": [{"path": file.path, "text": file.text} for file in files]} if files else {}
        print_answer(args.json, pack_json(result, changes) | named, lambda style: pack_text(result, changes, style))
    return ANSWER_IS_NO if result.verdict == "does_not_fit" else OK


def _format_files(args: argparse.Namespace, result: PackResult) -> tuple[ExportedFile, ...]:
    """Writes or prints, and returns, the files of --format; empty where it is not given or the servers do not fit."""
    if not args.format or result.verdict == "does_not_fit":
        return ()
    files = pack_files(result, args.format)
    if args.output not in (None, "-") or not args.json:
        deliver(files, argparse.Namespace(output=args.output, force=args.force, json=False))
    return files


def _offered_cards(args: argparse.Namespace) -> tuple[Card, ...]:
    """The cards, or MIG slices, that --gpu and --gpus offer, with what other programs hold on them."""
    machine = Machine(args.gpu, None, args.gpu_memory, args.gpu_used)
    card, used_bytes = card_and_used_bytes(machine, release(args.vllm) if args.vllm else latest(), ServeArgs())
    if args.gpus.isascii() and args.gpus.isdigit():
        gpus = [card] * (gpu_count(args.gpus, "--gpus") or 1)
    else:
        gpus = [_mig_slice(args.gpu, name) for name in args.gpus.replace("+", ",").split(",")]
    if card.note:
        note(f"note: {card.note}")
    return offered_cards(gpus, [_parse_other_program(text, len(gpus)) for text in args.other], used_bytes)


def _mig_slice(card: str, profile: str) -> Gpu:
    """The MIG slice of a card with this profile, such as `3g.40gb`; raises for an unknown one."""
    try:
        return gpu(f"{card} mig {profile.strip().lower()}")
    except LegroomError:
        why = f"--gpus {profile!r} is neither a number nor a MIG slice of {card} that legroom knows"
        hint = "write it like --gpus 2, or --gpus 3g.71gb,3g.71gb; `legroom gpus mig` lists the slices"
        raise LegroomError(why, hint) from None


def _parse_other_program(text: str, num_gpus: int) -> tuple[int, OtherProgram]:
    """(GPU index, program) of NAME=SIZE[@INDEX], index 0 if left out and below `num_gpus`; else LegroomError."""
    name, equals, size = text.partition("=")
    size, _, place = size.partition("@")
    if not (name and equals and size and (not place or place.isdecimal())):
        raise LegroomError(f"--other {text!r} is not NAME=SIZE", "write it like --other trainer=40GiB")
    if int(place or 0) >= num_gpus:
        raise LegroomError(f"--other {text!r} is on GPU {place}, and there are {num_gpus}", "GPUs are counted from 0")
    return int(place or 0), OtherProgram(name, parse_bytes(size, f"--other {name}"))


def _packed_server(args: argparse.Namespace, words: Sequence[str], card: Card) -> PackedServer:
    """The server of one group of words on the first card; the notes about its command go to `args.remarks`."""
    parser = argparse.ArgumentParser("legroom pack", add_help=False, allow_abbrev=False)
    for option in SERVER_OPTIONS:
        parser.add_argument(option)
    own, rest, _ = split_words(parser, words)
    described = {"vllm": args.vllm, "vllm_words": [], "command_words": rest, "prog": "legroom pack"}
    deployment = described_server(argparse.Namespace(**described, line=None, file=None, python=None))
    target = make_target(deployment.args, deployment.release, Machine(args.gpu, max(deployment.args.gpus_needed, 1)))
    target = with_measurements(replace(target, gpu=card.gpu), deployment.args)
    args.remarks = dict.fromkeys((*getattr(args, "remarks", ()), *deployment.notes))
    options = {f"--{name.replace('_', '-')}": value for name, value in vars(parser.parse_args(own)).items() if value}
    return packed_server(options, target, deployment.args, args.policy, int(args.sleep_level))


def _parse_shift(text: str, servers: Sequence[PackedServer]) -> Shift:
    """The `Shift` of --shift NAME=SERVER,...: servers awake at one time; LegroomError for one that is not packed."""
    name, equals, members = text.partition("=")
    awake = frozenset(part.strip() for part in members.split(",") if part.strip())
    if not (name and equals and awake):
        raise LegroomError(f"--shift {text!r} is not SHIFT=NAME,...", "write it like --shift night=batch,embedder")
    known = [server.name for server in servers]
    for unknown in sorted(awake - set(known)):
        raise LegroomError(f"--shift {name}: there is no server {unknown!r}", f"the servers are {', '.join(known)}")
    return Shift(name, awake)
