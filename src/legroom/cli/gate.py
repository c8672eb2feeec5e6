"""`legroom gate`: the admission webhook that refuses a manifest whose vLLM cannot start."""

import argparse

from legroom.cli.output import print_answer, print_json_line
from legroom.cli.ui import listening_socket
from legroom.errors import ANSWER_IS_NO, OK, LegroomError

_PORT = 9443
_TLS_DIR = "/etc/legroom/tls"
USAGE = "legroom gate [--mode warn|enforce] [options] | legroom gate --try FILE"
DESCRIPTION = """\
Answer Kubernetes before it takes a manifest: a Deployment, StatefulSet, LeaderWorkerSet, KServe InferenceService or
LLMInferenceService, KubeAI Model, Job or Pod whose vLLM cannot start on its GPU is refused with the reason and the
flags that fix it (--mode enforce), or let through with a warning (--mode warn). What is not understood, and anything
that goes wrong here, is let through. legroom export gate writes the manifests that set it up."""

EPILOG = """\
examples:
  legroom export gate -o gate/ && kubectl apply -f gate/
  legroom gate --tls-dir /etc/legroom/tls
  legroom gate --mode enforce --default-gpu l4 --not-namespace sandbox
  legroom gate --try deployment.yaml

exit codes: 0 it ended, 1 --try found what would be refused, 2 the call is wrong, the port is in use or there is no
certificate, 3 something needed is missing
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", metavar="ADDRESS", default="0.0.0.0", help="address to serve on (default: all)")
    parser.add_argument("--port", metavar="N", type=int, default=_PORT, help=f"port; 0: any (default: {_PORT})")
    about = f"folder of tls.crt and tls.key ({_TLS_DIR})"
    parser.add_argument("--tls-dir", metavar="DIR", default=_TLS_DIR, help=about)
    what = parser.add_argument_group("what it does")
    what.add_argument("--mode", choices=("warn", "enforce"), default="warn", help="warn, or refuse (default: warn)")
    what.add_argument("--default-gpu", metavar="NAME", default="", help="the GPU of a pod that names none")
    for option, about in (("--only-namespace", "this one alone"), ("--not-namespace", "not this one")):
        what.add_argument(option, metavar="NAME", action="append", default=[], help=f"{about}; repeatable")
    about = "only objects with the label or annotation legroom/gate"
    what.add_argument("--only-labelled", action="store_true", help=about)
    what.add_argument("--hub", action="store_true", help="look up models that are not bundled on the Hugging Face Hub")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--deadline", metavar="S", type=float, default=4.0, help="most seconds for an answer (4)")
    about = "seconds that an answer waits for flags that take a search (default: 0: they come with the next try)"
    limits.add_argument("--wait-for-flags", metavar="S", type=float, default=0.0, help=about)
    parser.add_argument("--try", dest="try_file", metavar="FILE", help="say what it would answer to a file")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout: where it is, or the answers")


def run(args: argparse.Namespace) -> int:
    """Serves the admission webhook until it is stopped; with --try prints the verdicts on a file instead."""
    from legroom.facts.gpus import gpu

    if not 0.1 <= args.deadline <= 30:
        raise LegroomError("--deadline is 0.1 to 30 seconds", "the default suits most clusters")
    if not 0 <= args.wait_for_flags <= args.deadline:
        raise LegroomError("--wait-for-flags is 0 to --deadline seconds", "raise --deadline too if it is to be longer")
    if args.default_gpu:
        gpu(args.default_gpu)
    if args.try_file is not None:
        return _print_verdicts(args)
    from legroom.gate.verdict import CacheOptions
    from legroom.gate.webhook import CertificateFiles, GatePolicy, serve

    files = CertificateFiles.in_folder(args.tls_dir)
    files.server_context()  # raises LegroomError where there is no certificate
    not_namespaces = GatePolicy().not_namespaces | set(args.not_namespace)
    policy = GatePolicy(args.mode, frozenset(args.only_namespace), not_namespaces, args.only_labelled)
    listening = listening_socket(args.host, args.port)
    url = f"https://{args.host}:{listening.getsockname()[1]}/validate"
    if args.json:
        print_json_line({"url": url, "mode": args.mode})
    else:
        print(f"legroom gate answers at {url}, mode {args.mode} (Ctrl-C ends it)", flush=True)
    serve(listening, policy, CacheOptions(args.default_gpu, args.hub, args.deadline, args.wait_for_flags), files)
    return OK


def _print_verdicts(args: argparse.Namespace) -> int:
    """Prints what the webhook would answer to each object in the file of --try; 1 where it refuses one."""
    from pathlib import Path

    from legroom.deployments.source_text import Text, read_text
    from legroom.deployments.yaml_nodes import load_nodes
    from legroom.drawing.text import wrap
    from legroom.gate.admission_review import startup_fields
    from legroom.gate.verdict import plan_verdict

    try:
        documents = load_nodes(Text(args.try_file, read_text(Path(args.try_file))))
    except LegroomError as error:
        raise LegroomError(f"{args.try_file} {error.message.removeprefix(args.try_file).strip()}", error.hint) from None
    answers = []
    for document in documents:
        manifest = document.plain()
        if isinstance(manifest, dict) and manifest.get("kind"):
            verdict = plan_verdict(startup_fields(manifest), args.default_gpu, hub=args.hub)
            name = f"{manifest['kind']} {document.text('metadata', 'name')}".rstrip()
            answers.append({"object": name, **verdict.to_json()})
    lines = []
    for answer in answers:
        lines.append(f"{answer['object']}: {_ANSWERS[answer['outcome']]}")
        lines += [line for sentence in answer["sentences"] for line in wrap(sentence, 80, "  ", "  ")]
    print_answer(args.json, answers, "".join(f"{line}\n" for line in lines))
    return ANSWER_IS_NO if any(answer["outcome"] == "does_not_fit" for answer in answers) else OK


_ANSWERS = {
    "fits": "let through",
    "no_server": "let through: it starts no vLLM",
    "tight": "let through with a warning",
    "not_understood": "let through with a warning",
    "does_not_fit": "refused, or in warn mode let through with a warning",
}
