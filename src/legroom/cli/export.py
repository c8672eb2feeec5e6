"""`legroom export FORMAT`: the plan and the facts of a release, in the forms other tools read."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from legroom.cli import shared_options
from legroom.cli.main import Parser
from legroom.cli.output import note, print_json
from legroom.errors import OK, LegroomError
from legroom.exports.deploy.cluster.pod import DEFAULT_GPUS_PER_NODE
from legroom.exports.deploy.serve_command import ALL_ADDRESSES, API_KEY_NAME, address_of, parse_command
from legroom.exports.export_request import MARK, ExportedFile, ExportRequest
from legroom.facts.releases import Release, latest
from legroom.facts.releases import release as known_release
from legroom.planning.advice import with_advice
from legroom.planning.machine import plan_deployment
from legroom.planning.plan_document import PlanDocument, read_plan
from legroom.planning.plan_json import plan_document
from legroom.vllm.command_line import any_release_words

FORMATS = {
    "prometheus": "legroom.exports.prometheus.rules",
    "grafana": "legroom.exports.grafana.dashboard",
    "alert-runbooks": "legroom.exports.prometheus.alert_runbooks",
    "systemd": "legroom.exports.deploy.systemd",
    "docker": "legroom.exports.deploy.docker",
    "compose": "legroom.exports.deploy.compose",
    "kubernetes": "legroom.exports.deploy.kubernetes",
    "helm-values": "legroom.exports.deploy.helm_values",
    "kserve": "legroom.exports.deploy.kserve",
    "llm-d-values": "legroom.exports.deploy.llm_d_values",
    "script": "legroom.exports.deploy.script",
    "env": "legroom.exports.deploy.env_file",
    "runbook": "legroom.exports.runbook",
    "gate": "legroom.exports.gate_manifests",
}
"""Format -> its module, imported when it is chosen. It has `NAME`, `HELP` and `files(request)`, and optionally
`add_options(parser)`, `NEEDS_PLAN = True` and `TAKES_ANY = True` (`--vllm any` is accepted and the default)."""
_ON_THE_HOST = ("systemd", "script", "env")
_ONE_MACHINE = (*_ON_THE_HOST, "docker", "compose", "helm-values")

USAGE = "legroom export FORMAT [--plan FILE | MODEL --gpu NAME [any vLLM flag]] [--vllm VERSION] [-o PATH]"
DESCRIPTION = """\
Write what other tools read, from the facts of a vLLM release and the plan of a deployment."""

EPILOG = """\
the plan: --plan FILE (from legroom plan --json), or MODEL --gpu NAME with any vLLM flag, as legroom plan takes them

examples:
  legroom export prometheus --vllm 0.32.0 -o monitoring/
  legroom export prometheus --plan plan.json -o monitoring/
  legroom export prometheus --vllm any
  legroom export grafana llama-3.1-8b --gpu h100 -o dashboard.json
  legroom export systemd llama-3.1-8b --gpu h100 --max-model-len 32768
  legroom export kubernetes --plan plan.json --with-guard -o deploy/
  legroom export runbook -o runbook/
  legroom export gate --mode enforce --certificates self -o gate/

exit codes: 0 fine, 2 the call or an input is wrong, 3 something needed was unreachable
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: each export format declares its own options, see `_format_parser`."""


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The options of `legroom export FORMAT`, with the format's module as `module` and vLLM's flags as `vllm_words`."""
    if words and words[0] in ("-h", "--help"):
        table = parser.add_argument_group("formats (legroom export FORMAT --help says more)")
        for name in FORMATS:
            table.add_argument(name, nargs="?", help=_module_of_format(name).HELP)
        parser.parse_args(["--help"])
    module = _module_of_format(words[0] if words else "")
    chosen = _format_parser(module)
    own, rest, after = shared_options.split_words(chosen, words[1:])
    args = chosen.parse_args(own)
    args.module, args.vllm_words, args.command_words = module, rest, after
    return args


def run(args: argparse.Namespace) -> int:
    """Makes the files of the chosen format, and writes or prints them; LegroomError where a plan is missing."""
    module = args.module
    plan = _plan_of_options(args)
    release = _release_of_export(args, module, plan)
    if getattr(module, "NEEDS_PLAN", False) and plan is None:
        hint = f"{args.prog} --plan FILE, or {args.prog} MODEL --gpu NAME [any vLLM flag]"
        raise LegroomError(f"which server? {module.NAME} is made from a plan", hint)
    if module.NAME in _ONE_MACHINE and plan is not None and plan.gpu.count > DEFAULT_GPUS_PER_NODE:
        more = "legroom export kubernetes spreads a server over nodes"
        note(f"{plan.gpu.count} GPUs are asked of one machine, and most have {DEFAULT_GPUS_PER_NODE}: {more}")
    if module.NAME in _ON_THE_HOST and plan is not None and _answers_everybody(plan, args.secret_names):
        note("it listens on every interface and answers everybody: --api-key KEY or --host 127.0.0.1 closes that")
    files = module.files(ExportRequest(release, plan, vars(args), args.secret_names, args.plan is not None))
    deliver(files, args)
    return OK


def _answers_everybody(plan: PlanDocument, secret_names: Sequence[str]) -> bool:
    """Whether the server listens on all addresses, with no API key in its command or among `secret_names`."""
    words = parse_command(plan.command, plan.release)
    address = address_of(words)
    return address.host in ALL_ADDRESSES and not address.socket and API_KEY_NAME not in (*words.secrets, *secret_names)


def deliver(files: Sequence[ExportedFile], args: argparse.Namespace) -> None:
    """Writes the files to stdout, a file or a folder; with --json prints them as a document."""
    is_written = args.output not in (None, "-")
    if is_written:
        _write_files(files, args.output, args.force)
    if args.json:
        named = [{"path": file.path, "text": file.text, "executable": file.executable} for file in files]
        print_json({"format": args.module.NAME, "files": named})
    elif not is_written:
        sys.stdout.write(files[0].text if len(files) == 1 else _stream_text(files))


def _stream_text(files: Sequence[ExportedFile]) -> str:
    """The files as one text, each after its name: YAML as documents of their own, files marked `beside` as comments."""
    stream = ""
    for file in files:
        text = "".join(f"# {line}" for line in file.text.splitlines(keepends=True)) if file.beside else file.text
        between = "---\n" if stream and file.path.endswith((".yaml", ".yml")) and not file.beside else ""
        stream += f"{between}# ==> {file.path} <==\n{text}\n"
    return stream


def _write_files(files: Sequence[ExportedFile], output: str, force: bool) -> None:
    """Write to one file or into a folder; without `force`, refuses to replace files legroom did not write."""
    target = Path(output)
    as_folder = len(files) > 1 or output.endswith("/") or target.is_dir()
    if as_folder and target.exists() and not target.is_dir():
        raise LegroomError(f"-o {output} is a file, and there are {len(files)} files to write", "name a folder")
    if as_folder and target.suffix[1:2].isalpha() and not target.exists() and not output.endswith("/"):
        hint = f"name a folder; if it is to be one, say -o {output}/"
        raise LegroomError(f"-o {output} looks like a file, and there are {len(files)} files to write", hint)
    places = [(file, target / file.path if as_folder else target) for file in files]
    if not force:
        for file, path in places:
            _check_replaced(path, file.text)
    for file, path in places:
        try:
            if as_folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
            if file.executable:
                path.chmod(path.stat().st_mode | 0o111)
        except OSError as error:
            raise LegroomError(f"could not write {path}: {error.strerror}") from error
        note(f"wrote {path}")


def _check_replaced(path: Path, text: str) -> None:
    """Raises LegroomError where a file with other content exists that legroom did not write."""
    if not path.is_file():
        return
    try:
        there = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise LegroomError(f"could not read {path}: {error.strerror}") from error
    if there.strip() and there != text and MARK not in there and '"uid": "legroom-' not in there:
        hint = "name another path, or replace it with --force"
        raise LegroomError(f"{path} is there already, and legroom did not write it", hint)


def _module_of_format(name: str) -> Any:
    """The module in FORMATS of a format such as `grafana`; LegroomError, with the nearest name, for other words."""
    if name in FORMATS:
        return importlib.import_module(FORMATS[name])
    if not name or name.startswith("-"):
        raise LegroomError("export what?", f"legroom export {' | '.join(FORMATS)}")
    import difflib

    near = difflib.get_close_matches(name, FORMATS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the formats are {', '.join(FORMATS)}"
    raise LegroomError(f"there is no export format {name!r}", hint)


def _format_parser(module: Any) -> argparse.ArgumentParser:
    """The parser of `legroom export FORMAT` for the module of one format."""
    prog = f"legroom export {module.NAME}"
    usage = f"{prog} [--plan FILE | MODEL --gpu NAME [any vLLM flag]] [options]"
    parser = Parser(prog=prog, usage=usage, description=module.HELP, allow_abbrev=False)
    about = "vLLM release (default: the plan's, else the newest known)"
    if getattr(module, "TAKES_ANY", False):
        about = "vLLM release, or `any`: names that work across renames (default: the plan's, else any)"
    parser.add_argument("--vllm", metavar="VERSION", help=about)
    parser.add_argument("--plan", metavar="FILE", help="a plan that legroom plan --json wrote (-: stdin)")
    where = parser.add_argument_group("or a server to plan, said as legroom plan takes it: MODEL, vLLM's flags, and")
    shared_options.add_machine_options(where)
    shared_options.add_source_options(parser)
    if hasattr(module, "add_options"):
        module.add_options(parser.add_argument_group(module.NAME))
    out = parser.add_argument_group("output")
    out.add_argument("-o", "--output", metavar="PATH", help="a file, or a folder for several (default, and -: stdout)")
    out.add_argument("--force", action="store_true", help="replace a file that legroom did not write")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout: the files with their text")
    parser.set_defaults(prog=prog, secret_names=())
    return parser


def _plan_of_options(args: argparse.Namespace) -> PlanDocument | None:
    """The plan of --plan or of the described server, whose secret names go to `args.secret_names`; None for neither."""
    described = bool(args.vllm_words or args.command_words or args.line or args.file or args.python)
    if args.plan is not None:
        if described or args.gpu:
            extra = args.vllm_words[0] if args.vllm_words else "the server described beside it"
            hint = "leave it out, or leave --plan out and give MODEL --gpu NAME with vLLM's flags"
            raise LegroomError(f"--plan says what runs already, so {extra} has no place here", hint)
        return _require_fit(read_plan(args.plan))
    if not described:
        return None
    if args.vllm == "any":
        hint = "name its release, or give a plan file: --plan plan.json --vllm any"
        raise LegroomError("a server is planned for one release, and --vllm says any", hint)
    # The exported server does not inherit this shell's environment.
    deployment = shared_options.described_server(args, environ={})
    args.secret_names = deployment.secret_names
    planned = plan_deployment(deployment, shared_options.described_machine(args, deployment), advice=False)
    if args.file and args.module.NAME == "kubernetes":
        note(f"these objects have names of their own: applied beside {args.file}, they are a second server")
    document = plan_document(planned)
    if not document.fits and (fixes := with_advice(planned, enough=1).advice):
        changes = f"change its flags to {' '.join(any_release_words(fixes[0].flags))}"
        return _require_fit(document, f"{changes} (costs: {fixes[0].trades}), and export it then")
    return _require_fit(replace(document, env={**deployment.given_env, **document.env}))


def _require_fit(plan: PlanDocument, hint: str = "legroom plan says which flags fix it") -> PlanDocument:
    """The plan, with a note where it is tight; raises LegroomError, with this hint, where its server does not start."""
    if not plan.fits:
        why = f": {plan.failure.message}" if plan.failure and plan.failure.message else ""
        raise LegroomError(f"the planned server does not start{why}", hint)
    if plan.verdict == "tight":
        note(f"the planned server is tight and may not start{f': {plan.reason}' if plan.reason else ''}")
    return plan


def _release_of_export(args: argparse.Namespace, module: Any, plan: PlanDocument | None) -> Release | None:
    """The vLLM release whose flag and metric names are written; None: names that hold for any release."""
    takes_any = getattr(module, "TAKES_ANY", False)
    if args.vllm == "any":
        if not takes_any:
            raise LegroomError(f"{module.NAME} is written for one release, and --vllm says any", "name the release")
        return None
    if args.vllm is None:
        if plan is None and takes_any:
            note("no release was named: written so that it works with any (--vllm VERSION for one)")
            return None
        return plan.release if plan else latest()
    given = known_release(args.vllm)
    if given.note:
        note(given.note)
    if plan and given.version != plan.release.version:
        hint = "plan the release that runs"
        raise LegroomError(f"--vllm says {given.version}, the plan is for {plan.release.version}", hint)
    return given
