"""`legroom export prometheus`: recording rules and alerts for a release and a plan, and what to scrape."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from legroom.errors import LegroomError
from legroom.exports.deploy.cluster.pod import WATCH_PORT_NAME
from legroom.exports.deploy.serve_command import Address, address_of, parse_command
from legroom.exports.deploy.yaml_text import manifest
from legroom.exports.export_request import MARK, ExportedFile, ExportRequest
from legroom.exports.prometheus import alerts
from legroom.exports.prometheus.alert_levels import AlertLevels, levels_for
from legroom.exports.prometheus.measures import Measures, recorded_expressions
from legroom.version import __version__

NAME = "prometheus"
HELP = "recording rules, alerts and scrape config, in the metric names of the release"
TAKES_ANY = True

RULES_FILE = "rules/legroom-vllm.rules.yml"
CONFIG_FILE = "prometheus.yml"
OPERATOR_FILE = "legroom-vllm-monitoring.yaml"
_EVALUATION_S = 30
_SCRAPE_S = 15
_TARGET = re.compile(r"(?:\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")
_MATCHERS = re.compile(
    r'[a-zA-Z_]\w*(?:=~|!~|!=|=)"(?:[^"\\]|\\.)*"(?:, ?[a-zA-Z_]\w*(?:=~|!~|!=|=)"(?:[^"\\]|\\.)*")*'
)
_JOB = re.compile(r"[A-Za-z0-9_./:-]{1,100}")
_API = "monitoring.coreos.com/v1"
_JOB_LABEL = "app.kubernetes.io/name"
"""Its value becomes the job: `legroom export kubernetes` labels every pod and Service with `vllm`."""
_MONITORS = {"pod": ("PodMonitor", "podMetricsEndpoints"), "service": ("ServiceMonitor", "endpoints")}
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?=[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def add_options(parser: Any) -> None:
    """Adds the options of the scrape job, targets, alert thresholds and the operator's objects."""
    parser.add_argument("--job", default="vllm", metavar="NAME", help="the scrape job of the servers (default: vllm)")
    about = "servers (default: localhost, the plan's port)"
    parser.add_argument("--target", action="append", metavar="HOST:PORT", help=about)
    parser.add_argument("--guard", action="append", metavar="HOST:PORT", help="a guard's proxy to scrape")
    parser.add_argument("--watch", action="append", metavar="HOST:PORT", help="a legroom watch --daemon to scrape")
    about = "where the runbook pages are, for each alert's runbook_url: legroom export alert-runbooks writes them"
    parser.add_argument("--runbook-base", metavar="URL", help=about)
    parser.add_argument("--ttft-p99", metavar="TIME", help="alert when the p99 of the first token exceeds it (2s)")
    parser.add_argument("--inter-token-p99", metavar="TIME", help="the same for the time between tokens (150ms)")
    parser.add_argument("--disk-speed", metavar="SPEED", help="how fast weights are read (default: 200MB/s)")
    parser.add_argument("--batch", metavar="LABELS", help='servers full by design: job="vllm-batch"')
    parser.add_argument("--operator", action="store_true", help="a PrometheusRule and a PodMonitor instead")
    parser.add_argument("--monitor", choices=("pod", "service"), default="pod", help="with --operator: which monitor")
    parser.add_argument("--namespace", metavar="NAME", help="of those (default: left to kubectl)")
    about = "what the operator selects them by, such as release=kube-prometheus-stack"
    parser.add_argument("--operator-label", action="append", metavar="KEY=VALUE", help=about)
    parser.add_argument("--speed-up", metavar="N", help="divide every window and `for` by N, to rehearse the alerts")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """The rules and a prometheus.yml that loads them; with --operator a PrometheusRule and a pod or service monitor."""
    options = request.options
    levels = levels_for(request.plan, options)
    job = options.get("job") or "vllm"
    if not _JOB.fullmatch(job):
        raise LegroomError(f"--job {job!r} is not a job name", "letters, digits and _ . / : - only")
    measures = Measures(request.release)
    records = [{"record": name, "expr": expr} for name, expr in recorded_expressions(measures, levels, job).items()]
    batch = str(options.get("batch") or "")
    if batch and not _MATCHERS.fullmatch(batch):
        raise LegroomError(f"--batch {batch!r} is not a list of label matchers", """write --batch 'job="batch"'""")
    conditions = alerts.vllm_conditions(measures, levels, job, batch)
    vllm_rules = [_alert_rule(condition, levels, request) for condition in conditions]
    own = [_alert_rule(condition, levels, request) for condition in alerts.legroom_conditions(levels)]
    rules = {"legroom-vllm-measures": records, "legroom-vllm": vllm_rules, "legroom": own}
    interval = levels.time(_EVALUATION_S)
    groups = [{"name": name, "interval": interval, "rules": listed} for name, listed in rules.items()]
    release = f"vLLM {request.release.version}" if request.release else "any vLLM release that legroom knows"
    plan = (
        f"# Plan: {request.plan.model} on {request.plan.gpu.count} x {request.plan.gpu.name}.\n" if request.plan else ""
    )
    on_pods = ", ".join(condition.name for condition in conditions if "kube_" in condition.expr)
    needs = (
        f"# Pods of Kubernetes: without kube-state-metrics in this Prometheus these miss what it tells: {on_pods}.\n"
    )
    head = f"# {MARK} {__version__} for {release}.\n{plan}{needs}"
    if options.get("operator"):
        return (ExportedFile(OPERATOR_FILE, head + rules_text(*_operator_objects(groups, job, request))),)
    return (
        ExportedFile(RULES_FILE, head + rules_text({"groups": groups})),
        ExportedFile(CONFIG_FILE, head + rules_text(_prometheus_config(job, request, levels))),
    )


def _alert_rule(condition: alerts.AlertCondition, levels: AlertLevels, request: ExportRequest) -> dict[str, Any]:
    """One alerting rule in Prometheus's format, with severity, texts and, if a base URL is given, runbook_url."""
    texts = alerts.alert_texts()[condition.name]
    slots = alerts.alert_slots(levels, request.plan)
    base = str(request.options.get("runbook_base") or "").rstrip("/")
    rule: dict[str, Any] = {"alert": condition.name, "expr": condition.expr}
    if condition.for_s:
        rule["for"] = levels.time(condition.for_s)
    rule["labels"] = {"severity": texts["severity"]}
    rule["annotations"] = {
        "summary": alerts.fill_slots(texts["summary"], slots),
        "description": alerts.fill_slots(texts["description"], slots),
        **({"runbook_url": f"{base}/{condition.name}.md"} if base else {}),
    }
    return rule


def _prometheus_config(job: str, request: ExportRequest, levels: AlertLevels) -> dict[str, Any]:
    """A prometheus.yml that loads the rules and scrapes the targets."""
    options, address = request.options, _planned_address(request)
    servers = _scrape_config(job, _checked_targets(options.get("target"), "--target") or [f"localhost:{address.port}"])
    if address.tls:
        # The certificate is for the server's name, not for the scraped address.
        servers |= {"scheme": "https", "tls_config": {"insecure_skip_verify": True}}
    scrapes = [servers]
    if guards := _checked_targets(options.get("guard"), "--guard"):
        # A guard's page repeats the server's series, which would count as another server.
        only_own = {"source_labels": ["__name__"], "regex": "legroom_.*", "action": "keep"}
        scrapes.append({**_scrape_config(alerts.GUARD_JOB, guards), "metric_relabel_configs": [only_own]})
    if watchers := _checked_targets(options.get("watch"), "--watch"):
        scrapes.append(_scrape_config(alerts.WATCH_JOB, watchers))
    return {
        "global": {"scrape_interval": levels.time(_SCRAPE_S), "evaluation_interval": levels.time(_EVALUATION_S)},
        "rule_files": [RULES_FILE],
        "scrape_configs": scrapes,
    }


def _scrape_config(job: str, targets: list[str]) -> dict[str, Any]:
    return {"job_name": job, "metrics_path": "/metrics", "static_configs": [{"targets": targets}]}


def _checked_targets(given: Sequence[str] | None, option: str) -> list[str]:
    """The scrape targets given for `option` as a list; LegroomError for one that is not `host:port`."""
    for target in given or ():
        if not _TARGET.fullmatch(target):
            raise LegroomError(f"{option} {target!r} is not an address", f"write it like {option} gpu1:8000")
    return list(given or ())


def rules_text(*documents: Any) -> str:
    """The documents as YAML, multi-line texts as block scalars, keys in the given order."""
    import yaml  # only an export writes YAML

    class Dumper(yaml.SafeDumper):
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            """Indents lists below their key, which PyYAML does not."""
            super().increase_indent(flow, False)

    def block_scalar_if_multiline(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        """A text of several lines as a YAML block scalar, any other in the usual style."""
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, block_scalar_if_multiline)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=100_000, allow_unicode=True)


def _operator_objects(groups: Sequence[Mapping[str, Any]], job: str, request: ExportRequest) -> list[dict[str, Any]]:
    """A PrometheusRule with the groups, and a monitor of pods or Services whose label is the scrape job."""
    options = request.options
    labels = {"app.kubernetes.io/part-of": "legroom"}
    for text in options.get("operator_label") or ():
        if not _LABEL.fullmatch(text):
            hint = "write it like --operator-label release=kube-prometheus"
            raise LegroomError(f"--operator-label {text!r} is not a label", hint)
        key, _, value = text.partition("=")
        labels[key] = value
    namespace = options.get("namespace")
    about = {"name": "legroom-vllm", **({"namespace": namespace} if namespace else {}), "labels": labels}
    kind, endpoints = _MONITORS[request.options.get("monitor") or "pod"]
    # The operator skips pods without the named port, such as workers of a server over several nodes.
    endpoint: dict[str, Any] = {"port": "http", "path": "/metrics", "interval": f"{_SCRAPE_S}s"}
    if _planned_address(request).tls:
        endpoint |= {"scheme": "https", "tlsConfig": {"insecureSkipVerify": True}}
    scraped = [endpoint]
    if kind == "PodMonitor":
        # The sidecar has its own job, because it has none of vLLM's series.
        own_job = [{"targetLabel": "job", "replacement": alerts.WATCH_JOB}]
        sidecar = {"port": WATCH_PORT_NAME, "path": "/metrics", "interval": f"{_SCRAPE_S}s", "relabelings": own_job}
        scraped.append(sidecar)
    spec = {"jobLabel": _JOB_LABEL, "selector": {"matchLabels": {_JOB_LABEL: job}}, endpoints: scraped}
    rules = manifest(_API, "PrometheusRule", about, {"groups": list(groups)})
    return [rules, manifest(_API, kind, about, spec)]


def _planned_address(request: ExportRequest) -> Address:
    """The address on which the planned server listens; the default address without a plan."""
    plan = request.plan
    return address_of(parse_command(plan.command, plan.release)) if plan else Address()
