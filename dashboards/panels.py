"""The building blocks of the boards: single figures, graphs over time, timelines of states, and the board itself.

Every panel is made by one of these functions, so each has a title, a description of a good state and a unit. Units are
Grafana's ids; `suffix:` makes a custom unit.
"""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from dashboards.queries import REPLICA, RUN
from engine.metrics.names import REPLICA_STATE, UPTIME

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WINDOWS = ("30s", "1m", "5m", "15m", "1h", "6h")
TAG = "step-engine"
REF_IDS = "ABCDEFGHIJKLMNOP"

Thresholds = Sequence[tuple[float | None, str]]
"""(lowest value, color); None: no lower limit."""

PLAIN: Thresholds = ((None, "text"),)
Panel = heatmap.Panel | stat.Panel | timeseries.Panel | statetimeline.Panel


def thresholds(steps: Thresholds) -> dashboard.ThresholdsConfig:
    values = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(values)


def query(expression: str, legend: str, ref_id: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(ref_id).datasource(SOURCE)


def glance(
    title: str,
    good: str,
    unit: str,
    expression: str,
    *,
    steps: Thresholds = PLAIN,
    legend: str = "",
    decimals: int = -1,
) -> stat.Panel:
    """One figure of the top row. `legend`: the text to show if the query returns one series for each active value."""
    panel = stat.Panel().title(title).description(good).unit(unit).datasource(SOURCE).height(4).span(4)
    target = query(expression, legend or title, "A")
    panel = panel.with_target(target.instant() if legend else target).thresholds(thresholds(steps))
    mode = common_models.BigValueGraphMode.NONE if legend else common_models.BigValueGraphMode.AREA
    panel = panel.graph_mode(mode).no_value("none yet")
    options = common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)
    panel = panel.reduce_options(options)
    if legend:
        panel = panel.text_mode(common_models.BigValueTextMode.NAME)
    return panel.decimals(decimals) if decimals >= 0 else panel


def graph(
    title: str,
    good: str,
    unit: str,
    lines: Mapping[str, str],
    *,
    span: int = 12,
    stacked: bool = False,
    low: float | None = 0.0,
    high: float | None = None,
    steps: bool = False,
    exemplars: bool = False,
) -> timeseries.Panel:
    """Figures over time: legend → query."""
    panel = timeseries.Panel().title(title).description(good).unit(unit).datasource(SOURCE).height(8).span(span)
    for ref_id, (legend, expression) in zip(REF_IDS, lines.items(), strict=False):
        target = query(expression, legend, ref_id)
        panel = panel.with_target(target.exemplar(True) if exemplars else target)
    panel = panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    mode, order = common_models.TooltipDisplayMode.MULTI, common_models.SortOrder.DESCENDING
    panel = panel.tooltip(common.VizTooltipOptions().mode(mode).sort(order))
    panel = panel.line_width(1).fill_opacity(70 if stacked else 8)
    panel = panel.show_points(common_models.VisibilityMode.AUTO).span_nulls(False)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
    if steps:
        panel = panel.line_interpolation(common_models.LineInterpolation.STEP_AFTER)
    panel = panel if low is None else panel.min(low)
    return panel if high is None else panel.max(high)


def timeline(
    title: str, good: str, expression: str, legend: str, colours: Mapping[str, str], *, span: int = 24
) -> statetimeline.Panel:
    """States over time: a line for each series of `queries.coded`, with the name and the color of its value."""
    named = {
        str(code): models.ValueMappingResult(text=text, color=color, index=code - 1)
        for code, (text, color) in enumerate(colours.items(), start=1)
    }
    panel = statetimeline.Panel().title(title).description(good).unit("none").datasource(SOURCE)
    panel = panel.height(8).span(span).with_target(query(expression, legend, "A")).merge_values(True)
    panel = panel.mappings([models.ValueMap(options=named)])
    return panel.show_value(common_models.VisibilityMode.AUTO).line_width(0).fill_opacity(70)


def heat(title: str, good: str, expression: str, *, span: int = 12) -> heatmap.Panel:
    """A histogram over time: a query that keeps the label `le`."""
    target = query(expression, "{{le}}", "A").format(prometheus_models.PromQueryFormat.HEATMAP)
    panel = heatmap.Panel().title(title).description(good).unit("short").datasource(SOURCE).height(8).span(span)
    linear = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LINEAR)
    return panel.with_target(target).calculate(False).scale_distribution(linear)


def row(title: str) -> dashboard.Row:
    return dashboard.Row(title)


def board(uid: str, title: str, purpose: str) -> dashboard.Dashboard:
    """An empty board with its variables, and links to the other boards."""
    page = dashboard.Dashboard(f"Step Engine / {title}").uid(f"step-engine-{uid}").description(purpose)
    page = page.tags([TAG]).editable().refresh("10s").time("now-1h", "now").timezone("browser")
    page = page.tooltip(models.DashboardCursorSync.CROSSHAIR)
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    page = page.with_variable(source)
    page = page.with_variable(_choice("run", "Run", f"label_values({UPTIME.name}, run)"))
    replicas = _choice("replica", "Replica", f'label_values({REPLICA_STATE.name}{{run="{RUN}"}}, replica)')
    every = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    page = page.with_variable(replicas.multi(True).include_all(True).all_value(".*").current(every))
    window = dashboard.IntervalVariable("window").label("Averaged over").values(",".join(WINDOWS))
    page = page.with_variable(window.current(models.VariableOption(selected=True, text="5m", value="5m")))
    others = dashboard.DashboardLink("Boards").type(models.DashboardLinkType.DASHBOARDS).tags([TAG])
    return page.link(others.as_dropdown(False).include_vars(True).keep_time(True))


def _choice(name: str, label: str, values: str) -> dashboard.QueryVariable:
    page = dashboard.QueryVariable(name).label(label).datasource(SOURCE)
    page = page.query({"query": values, "refId": name}).refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return page.sort(models.VariableSort.ALPHABETICAL_DESC if name == "run" else models.VariableSort.NUMERICAL_ASC)


__all__ = ["REPLICA", "Panel", "board", "glance", "graph", "heat", "row", "timeline"]
