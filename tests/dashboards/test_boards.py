"""The boards: up to date, in Grafana's own schema, understandable, and about names that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_server import ALERTS, BOARDS, ROOT, needs_prometheus

from dashboards.generate import BOARDS as MADE
from dashboards.generate import main, text_of
from dashboards.overview import STALENESS_SPREAD
from dashboards.queries import of
from dashboards.rollout import VLLM
from engine.metrics import names
from engine.metrics.names import METRICS

GENERATED = sorted((BOARDS / "generated").glob("*.json"))
EXPORTED = {
    metric.name + suffix
    for metric in METRICS
    for suffix in (("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",))
}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_the_boards_that_are_shipped_are_those_the_code_makes() -> None:
    assert {path.stem for path in GENERATED} == set(MADE)
    for path in GENERATED:
        assert path.read_text("utf-8") == text_of(MADE[path.stem]()), "run: python -m dashboards.generate"


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.stem)
def test_a_board_is_one_in_grafanas_schema(path: Path) -> None:
    """Read into the SDK's models and written again, nothing is lost: every field is one that Grafana knows."""
    register_default_plugins()
    shipped = json.loads(path.read_text("utf-8"))
    again = json.loads(json.dumps(Dashboard.from_json(shipped), cls=JSONEncoder))
    assert again == shipped
    assert shipped["uid"].startswith("step-engine-") and shipped["title"].startswith("Step Engine / ")
    ids = [panel["id"] for panel in shipped["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.stem)
def test_every_panel_says_what_it_shows_and_what_is_good(path: Path) -> None:
    board = json.loads(path.read_text("utf-8"))
    titles = [panel["title"] for panel in panels(board)]
    assert len(titles) > 8 and len(set(titles)) == len(titles)
    for panel in panels(board):
        assert len(panel["title"]) > 3 and "_" not in panel["title"], panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"] and all(target["legendFormat"] for target in panel["targets"])
    glances = [panel for panel in panels(board) if panel["type"] == "stat"]
    assert len(glances) == 6 and all(panel["gridPos"]["y"] == 0 for panel in glances), "one row on top"
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "run", "replica", "window"]
    (links,) = board["links"]
    assert links["tags"] == ["step-engine"] and board["tags"] == ["step-engine"] and links["includeVars"]


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.stem)
def test_panels_do_not_lie_on_each_other(path: Path) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in json.loads(path.read_text("utf-8"))["panels"]:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24 and (x, y) not in taken, (panel["title"], taken.get((x, y)))
                taken[x, y] = panel["title"]


def titled(board: str, title: str) -> dict[str, Any]:
    (found,) = [panel for panel in panels(json.loads(text_of(MADE[board]()))) if panel["title"] == title]
    return found


def test_what_is_named_at_a_glance_is_what_holds_now() -> None:
    """Over a span of time it would name whatever held at some moment of it."""
    (target,) = titled("overview", "What limits the rollout now")["targets"]
    assert target["instant"] is True and target["range"] is False and "== 1" in target["expr"]


@pytest.mark.parametrize(
    ("board", "title", "values", "lines"),
    [
        ("rollout", "State of each replica", names.REPLICA_STATE.labels["state"], "replica {{replica}}"),
        ("scheduler", "What prevents the next group from starting", names.ADMISSION_LIMIT.labels["limit"], "limit"),
    ],
)
def test_a_timeline_has_one_line_that_names_and_colours_what_is(
    board: str, title: str, values: tuple[str, ...], lines: str
) -> None:
    panel = titled(board, title)
    (target,) = panel["targets"]
    assert target["legendFormat"] == lines
    (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
    named = [mapping["options"][str(code)] for code in range(1, len(values) + 1)]
    assert [said["text"] for said in named] == list(values) and len(named) == len(mapping["options"])
    for code, said in enumerate(named, start=1):
        assert said["color"]
        assert re.search(rf'="{said["text"]}"[^}}]*}} \* {code}\b', target["expr"]), said["text"]


def test_panels_of_the_rollout_board_distinguish_replicas() -> None:
    for title in (
        "Slots of each replica",
        "Response tokens per second, by replica",
        "Aborted, failed and resumed attempts, by replica",
        "Share of time that a replica pauses for new weights",
        "Response tokens of a group, by replica",
    ):
        for target in titled("rollout", title)["targets"]:
            assert "{{replica}}" in target["legendFormat"], title


def test_no_line_of_a_graph_is_without_a_name() -> None:
    """`vector(0)` has no labels for a legend to name it by."""
    for path in GENERATED:
        for panel in panels(json.loads(path.read_text("utf-8"))):
            for target in panel["targets"]:
                assert "vector(0)" not in target["expr"] or "{{" not in target["legendFormat"], panel["title"]


def asked(text: str) -> set[str]:
    return set(re.findall(r"\b(?:engine_|vllm:)[a-z_]+", text))


def test_boards_and_alerts_ask_for_names_that_exist() -> None:
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
    texts = [rule["expr"] for rule in rules]
    for path in GENERATED:
        texts += [target["expr"] for panel in panels(json.loads(path.read_text())) for target in panel["targets"]]
    mentioned = set().union(*map(asked, texts))
    assert {name for name in mentioned if name.startswith("vllm:")} == set(VLLM)
    assert mentioned - set(VLLM) <= EXPORTED, mentioned - set(VLLM) - EXPORTED


def test_every_metric_is_on_a_board() -> None:
    shown = set().union(*(asked(path.read_text("utf-8")) for path in GENERATED))
    forgotten = {metric.name for metric in METRICS} - {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    assert forgotten - shown == set()


def test_vllm_exports_the_names_that_the_board_asks_it_for() -> None:
    vllm = pytest.importorskip("importlib.util").find_spec("vllm")
    if vllm is None:
        pytest.skip("vllm is not installed")
    source = (Path(vllm.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py").read_text("utf-8")
    for name in VLLM:
        assert f'"{name.removesuffix("_total")}"' in source, name


def test_a_query_for_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="has no label 'state'"):
        of(names.REWARD, state="busy")
    with pytest.raises(ValueError, match="never has state='bussy'"):
        of(names.SLOTS, state="bussy")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "boards")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("dashboards: ") and "cannot be written" in said and said.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--into"], ["a", "b"]])
def test_arguments_that_are_no_folder_are_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: python -m dashboards.generate [-h] [FOLDER]" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_of_the_docs_writes_the_boards(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "dashboards.generate", str(tmp_path)], cwd=ROOT, check=True)
    assert done.returncode == 0
    for path in GENERATED:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


# -- alerts and what brings them up ------------------------------------------------------------------------------------


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=BOARDS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
def test_promtool_accepts_rules_and_configuration() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")


@needs_prometheus
def test_every_alert_fires_where_it_must_and_nowhere_else() -> None:
    promtool("test", "rules", "alerts_test.yml")


@needs_prometheus
def test_the_queries_that_reckon_say_what_they_should(tmp_path: Path) -> None:
    """The p95 of staleness is one that there was, the code of a state is that of the one that is, alerts have names."""
    states = names.REPLICA_STATE.labels["state"]
    (state,) = titled("rollout", "State of each replica")["targets"]

    def series(metric: str, labels: str, value: int) -> dict[str, str]:
        return {"series": f'{metric}{{run="a", {labels}}}', "values": f"0+{value}x20"}

    def case(expression: str, *samples: tuple[str, float]) -> dict[str, Any]:
        text = expression.replace("$run", "a").replace("$replica", ".*").replace("$window", "5m")
        return {
            "eval_time": "10m",
            "expr": text,
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }

    buckets = {"0.0": 0, "1.0": 1, "2.0": 50, "3.0": 50, "4.0": 50, "6.0": 100, "+Inf": 100}
    staleness = [series("engine_staleness_steps_bucket", f'le="{le}"', count) for le, count in buckets.items()]
    staleness.append({"series": 'engine_max_staleness_steps{run="a"}', "values": "5x20"})
    shown = [
        {
            "series": f'engine_replica_state{{run="a", replica="{replica}", state="{name}"}}',
            "values": f"{int(name == now)}x20",
        }
        for replica, now in (("0", "ready"), ("1", "gone"))
        for name in states
    ]
    codes = [(f'{{replica="{id}"}}', float(1 + states.index(now))) for id, now in (("0", "ready"), ("1", "gone"))]
    (alerts,) = titled("overview", "Firing alerts")["targets"]
    firing = [
        {"series": 'engine_uptime_seconds{run="a"}', "values": "7x20"},
        {"series": 'ALERTS{run="a", alertname="EngineReplicaLost", alertstate="firing"}', "values": "1x20"},
        {"series": 'ALERTS{run="a", alertname="EngineSyncSlow", alertstate="pending"}', "values": "1x20"},
        {"series": 'ALERTS{run="b", alertname="EngineDiskFilling", alertstate="firing"}', "values": "1x20"},
    ]
    cases = [
        case(STALENESS_SPREAD["p95"], ("{}", 5.0)),
        case(state["expr"], *codes),
        case(alerts["expr"], ('{alertname="EngineReplicaLost"}', 1.0), ('{alertname="none"}', 0.0)),
    ]
    tests = [{"interval": "1m", "input_series": staleness + shown + firing, "promql_expr_test": cases}]
    (tmp_path / "queries_test.yml").write_text(yaml.safe_dump({"tests": tests}))
    promtool("test", "rules", str(tmp_path / "queries_test.yml"))


def test_every_alert_has_cases_and_a_runbook() -> None:
    rules = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"][0]["rules"]
    cases = [
        case
        for test in yaml.safe_load((BOARDS / "alerts_test.yml").read_text("utf-8"))["tests"]
        for case in test["alert_rule_test"]
    ]
    runbook = (ROOT / "docs" / "TROUBLESHOOTING.md").read_text("utf-8")
    headings = {heading.lower() for heading in re.findall(r"^### (Engine\w+)$", runbook, re.MULTILINE)}
    assert len(rules) > 8
    for rule in rules:
        name = rule["alert"]
        assert any(case["alertname"] == name and case["exp_alerts"] for case in cases), f"{name} never fires"
        assert rule["annotations"]["runbook"] == f"docs/TROUBLESHOOTING.md#{name.lower()}"
        assert name.lower() in headings, f"{name} has no runbook"
        assert rule["labels"]["severity"] in ("warning", "critical")
    assert headings == {rule["alert"].lower() for rule in rules}


def test_what_is_provisioned_is_there() -> None:
    compose = yaml.safe_load((BOARDS / "compose.yaml").read_text("utf-8"))
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (BOARDS / source).exists(), source
    (source,) = yaml.safe_load((BOARDS / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((BOARDS / "grafana/provisioning/dashboards/boards.yaml").read_text())["providers"]
    assert provider["options"]["path"] == "${STEP_ENGINE_BOARDS}"
    grafana = compose["services"]["grafana"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in grafana["volumes"]}
    boards = grafana["environment"]["STEP_ENGINE_BOARDS"]
    assert mounted[boards] == "./generated"
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{boards}/overview.json"
    monitoring = (ROOT / "docs" / "MONITORING.md").read_text("utf-8")
    assert 'STEP_ENGINE_BOARDS="$PWD/dashboards/generated" grafana server' in monitoring
