"""`legroom export grafana`: the dashboard, built with the Grafana Foundation SDK."""

import hashlib
from typing import Any

from legroom.errors import UNREACHABLE, LegroomError
from legroom.exports.export_request import ExportedFile, ExportRequest
from legroom.exports.grafana.dashboard_rows import INSTANCE, Panel, dashboard_rows
from legroom.exports.prometheus.alert_levels import levels_for
from legroom.exports.prometheus.measures import Measures

NAME = "grafana"
HELP = "a dashboard with the plan beside what the servers measure"
TAKES_ANY = True

FILE = "legroom-vllm.json"
_VARIABLES = (
    ("cluster", "cluster", "Cluster"),
    ("namespace", "namespace", "Namespace"),
    ("job", "job", "Job"),
    ("model", "model_name", "Model"),
    ("instance", "instance", "Server"),
)
"""Dashboard variables with their label and title."""


def add_options(parser: Any) -> None:
    """Adds the options of latency targets that panels draw as thresholds."""
    parser.add_argument("--ttft-p99", metavar="TIME", help="target for the p99 of the first token (2s)")
    parser.add_argument("--inter-token-p99", metavar="TIME", help="target for the p99 between tokens (150ms)")


def files(request: ExportRequest) -> tuple[ExportedFile, ...]:
    """The dashboard's JSON file; LegroomError where the Grafana Foundation SDK is not installed."""
    try:
        import grafana_foundation_sdk  # noqa: F401
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
    except ImportError as error:
        hint = "pip install 'legroom[export]'"
        raise LegroomError("the Grafana Foundation SDK is not installed", hint, UNREACHABLE) from error
    return (ExportedFile(FILE, JSONEncoder(sort_keys=True, indent=2).encode(_dashboard(request)) + "\n"),)


def _dashboard(request: ExportRequest) -> Any:
    """The built dashboard as an object of the Grafana SDK, not yet JSON."""
    from grafana_foundation_sdk.builders import dashboard
    from grafana_foundation_sdk.models.dashboard import DashboardCursorSync

    levels, plan = levels_for(request.plan, request.options), request.plan
    named, uid = "vLLM", "legroom-vllm"
    if plan is not None:  # a uid of the deployment alone, so that an import replaces the dashboard
        which = f"{plan.model} {plan.gpu.name} {plan.gpu.count}"
        named, uid = f"vLLM: {plan.model}", f"{uid}-{hashlib.sha256(which.encode()).hexdigest()[:8]}"
    builder = (
        dashboard.Dashboard(f"{named} (legroom)")
        .uid(uid)
        .description("GPU memory, queue, throughput and latency of vLLM servers; written by legroom export grafana.")
        .tags(["vllm", "legroom"])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
    )
    for variable in _dashboard_variables(Measures(request.release)):
        builder.with_variable(variable)
    up = f"up{{{INSTANCE}}}"
    annotations = {
        "Incidents": ("sum by (cluster, namespace, job, kind) (legroom_incidents_open) > 0", "red"),
        "Alerts": ('ALERTS{alertname=~"Vllm.*|Legroom.*", alertstate="firing"}', "orange"),
        "Came up": (f"({up} == 1) unless ({up} offset 1m == 1)", "blue"),
    }
    for name, (expr, colour) in annotations.items():
        annotation = dashboard.AnnotationQuery().name(name).datasource(_data_source()).enable(True)
        builder.annotation(annotation.icon_color(colour).expr(expr))
    number = 0
    for row in dashboard_rows(request.release, levels, plan):
        number += 1
        title = f"{row.title} (needs {row.needs})" if row.needs else row.title
        builder.with_row(dashboard.Row(title).id(number))
        for panel in row.panels:
            number += 1
            builder.with_panel(_panel_builder(panel).id(number))
    built: Any = builder.build()
    for variable in built.templating.list_val:
        # The SDK writes these settings of interval variables for every kind of variable.
        variable.auto = variable.auto_count = variable.auto_min = None
    return built


def _data_source() -> Any:
    """A reference to the data source that the dashboard's variable selects."""
    from grafana_foundation_sdk.models.common import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid="${datasource}")


def _dashboard_variables(measures: Measures) -> list[Any]:
    """The data source variable, then label variables, each filtered by those before it."""
    from grafana_foundation_sdk.builders import dashboard
    from grafana_foundation_sdk.models.dashboard import VariableOption, VariableRefresh, VariableSort

    running = measures.series("running")[0]
    variables: list[Any] = [dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")]
    chosen: list[str] = []
    for name, label, title in _VARIABLES:
        variable = dashboard.QueryVariable(name).label(title).datasource(_data_source())
        variable.query(f"label_values({running}{{{', '.join(chosen)}}}, {label})")
        variable.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.ALPHABETICAL_ASC)
        variable.multi(True).include_all(True).all_value(".*")
        variables.append(variable.current(VariableOption(selected=True, text="All", value="$__all")))
        chosen.append(f'{label}=~"${name}"')
    return variables


def _panel_builder(panel: Panel) -> Any:
    """The Grafana SDK's builder for one panel, with queries, unit and thresholds."""
    from grafana_foundation_sdk.builders import bargauge, dashboard, stat, table, timeseries
    from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode

    kinds = {"timeseries": timeseries, "stat": stat, "bargauge": bargauge, "table": table}
    builder = kinds[panel.kind].Panel().title(panel.title).description(panel.description).datasource(_data_source())
    builder.unit(panel.unit).min(0).span(panel.width).height(4 if panel.kind == "stat" else 8)
    steps = [Threshold(value=value, color=colour) for value, colour in ((None, "green"), *panel.levels)]
    builder.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.max is not None:
        builder.max(panel.max)
    if panel.kind == "timeseries":
        from grafana_foundation_sdk.builders import common as build
        from grafana_foundation_sdk.models import common

        builder.fill_opacity(8).line_width(1).show_points(common.VisibilityMode.NEVER)
        tooltip = build.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
        builder.tooltip(tooltip.sort(common.SortOrder.DESCENDING))
        if panel.levels:
            style = build.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
            builder.thresholds_style(style)
    if panel.kind == "bargauge":
        from grafana_foundation_sdk.models.common import VizOrientation

        builder.orientation(VizOrientation.HORIZONTAL)
    for number, (legend, expr) in enumerate(panel.queries.items()):
        builder.with_target(_prometheus_query(expr, legend, chr(ord("A") + number), panel.kind))
    return builder


def _prometheus_query(expr: str, legend: str, ref_id: str, panel_kind: str) -> Any:
    """The SDK's builder for a PromQL query `ref_id` (A, B ...): a range for a time series panel, else instant."""
    from grafana_foundation_sdk.builders import prometheus
    from grafana_foundation_sdk.models.prometheus import PromQueryFormat

    builder = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(ref_id).datasource(_data_source())
    if panel_kind == "timeseries":
        return builder.range()
    builder.instant()
    return builder.format(PromQueryFormat.TABLE) if panel_kind == "table" else builder
