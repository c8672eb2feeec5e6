"""`legroom lint`: what is wrong in rules, dashboards, scripts, units and manifests, for one vLLM release."""

import argparse
import json

from legroom.cli.output import note, print_answer, print_json, write_file
from legroom.errors import ANSWER_IS_NO, BAD_INPUT, OK, LegroomError
from legroom.facts.releases import release as known_release
from legroom.lint.lint_report import report_json, report_sarif
from legroom.lint.linter import LintOptions, lint_files
from legroom.lint.rule import SEVERITIES, rules_by_id
from legroom.planning.plan_document import read_plan
from legroom.render.lint_text import report_text

USAGE = "legroom lint FILE ... [options] | --rules"
DESCRIPTION = """\
Read alert rules, Grafana dashboards, start scripts, Dockerfiles, compose files, systemd units, Kubernetes manifests,
values of charts, Python, vLLM config files and documents that hold them, and say what is wrong for a vLLM release:
series and flags that do not exist, settings that break or do nothing, alerts that fire on healthy servers, probes that
are too short."""

EPILOG = """\
examples:
  legroom lint alerts.yml dashboard.json start.sh
  legroom lint --vllm 0.10.2 deploy/
  legroom lint --plan plan.json deployment.yaml
  legroom lint --sarif lint.sarif deploy/
  helm template chart/ | legroom lint -
  legroom lint --rules

a comment `# legroom: ignore RULE` on a line, or alone above it, silences a rule there; `ignore-file` in the whole file

exit codes: 0 clean, 1 something was found, 2 a file could not be read
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="files or folders; -: standard input")
    basis = parser.add_argument_group("what files are checked against")
    about = "vLLM release, or any for rules that are meant for all (default: what an image, a pip install or legroom's "
    about += "own header names, else the plan's, else the newest)"
    basis.add_argument("--vllm", metavar="VERSION", help=about)
    basis.add_argument("--plan", metavar="FILE", help="compare thresholds and probes with a plan (legroom plan --json)")
    basis.add_argument("--ignore", action="append", default=[], metavar="RULE", help="leave a rule out (repeatable)")
    basis.add_argument("--only-vllm", action="store_true", help="skip files in which vLLM is not named")
    about = "the lowest severity that makes the exit code 1 (default: warning)"
    basis.add_argument("--fail-on", choices=SEVERITIES, default="warning", help=about)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="one JSON document on stdout")
    out.add_argument("--sarif", metavar="FILE", help="write SARIF 2.1.0 too (-: to stdout, instead of the text)")
    out.add_argument("--rules", action="store_true", help="list the rules, and read no file")


def run(args: argparse.Namespace) -> int:
    """Lints the files and prints the findings; exit status 1 for one at --fail-on or graver, 2 for unread files."""
    if args.rules:
        every = rules_by_id().values()
        print_answer(
            args.json,
            [{"id": r.id, "severity": r.severity, "title": r.title, "help": r.help} for r in every],
            "".join(f"{rule.id:18} {rule.severity:8} {rule.title}\n" for rule in every),
        )
        return OK
    if not args.files:
        raise LegroomError("lint what?", "legroom lint FILE...: rules, dashboards, scripts, units, manifests")
    if unknown := sorted(set(args.ignore) - set(rules_by_id())):
        raise LegroomError(f"there is no rule {unknown[0]!r}", "legroom lint --rules lists them")
    plan = read_plan(args.plan) if args.plan else None
    any_release = args.vllm == "any"
    release = known_release(args.vllm) if args.vllm and not any_release else None
    if release is not None and release.note:
        note(release.note)
    options = LintOptions(release, plan, frozenset(args.ignore), any_release, only_vllm=args.only_vllm)
    report = lint_files(args.files, options)
    if args.sarif and args.sarif != "-":
        write_file(args.sarif, json.dumps(report_sarif(report), indent=1) + "\n", "report")
    if args.sarif == "-":
        print_json(report_sarif(report))
    else:
        print_answer(args.json, lambda: report_json(report), lambda style: report_text(report, style))
    if report.unread:
        return BAD_INPUT
    failing = SEVERITIES[: SEVERITIES.index(args.fail_on) + 1]
    return ANSWER_IS_NO if any(finding.severity in failing for finding in report.findings) else OK
