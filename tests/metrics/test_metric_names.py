"""The names of `names.py` are exactly those exported, scraped over HTTP and written in the docs."""

import re
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from steady_world import GROUP_TOKENS, SteadyWorld, steady_world

from engine import events as e
from engine.control.listening_address import check_addresses
from engine.errors import ConfigError
from engine.metrics.document import PAGE, TABLE, up_to_date
from engine.metrics.export import ExternalFigures, registry
from engine.metrics.metrics_server import MetricsServer
from engine.metrics.names import FIGURES_KEPT, METRICS, REWARD_FUNCTIONS_KEPT, REWARD_HISTOGRAM, Metric
from engine.reward_histogram import BOUNDS, HISTOGRAMS, histogram_of
from engine.states.limits import ValidationLimits
from engine.states.training import Training
from engine.trajectory import SOURCES


def scrape(server: MetricsServer) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Samples of a real scrape over HTTP, by sample name and labels."""
    with urllib.request.urlopen(server.url, timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_names_follow_the_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"engine_[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.help.endswith(".") and metric.unit
        assert "seconds" not in metric.unit or "seconds" in metric.name


def suffixes(metric: Metric) -> tuple[str, ...]:
    """A histogram with buckets below 0 has neither sum nor count."""
    whole = ("_bucket",) if metric is REWARD_HISTOGRAM else ("_bucket", "_count", "_sum")
    return whole if metric.kind == "histogram" else ("",)


def half_way(**others: Any) -> SteadyWorld:
    """A run in its third step, measured once, with a figure for every name that a run without surroundings has."""
    world = steady_world(steps=None, mode="abort", validation=ValidationLimits(rows=4), **others)
    world.until(lambda state: state.training.steps_trained >= 3 and state.groups.ledger.running > 0)
    return world


def everything(directory: Path) -> ExternalFigures:
    return ExternalFigures(
        now=lambda: 77.0,
        events_waiting=lambda: 3,
        record=lambda: (10, 2),
        store=lambda: (4, 99, 120),
        directory=directory,
    )


class TwoSources:
    """Prompts of two sources, of which the batch has one."""

    def figures(self) -> dict[str, dict[str, int]]:
        return {name: {"drawn": 9, "dropped": 1, "rested": 0} for name in ("code", "math")}


def test_exactly_these_names_are_scraped_over_http(tmp_path: Path) -> None:
    world = half_way()
    metrics = world.metrics
    figures = {"groups": 1, "queued": 0, "at_once": 4, "calls": 2, "seconds": 1.0, "running_s": 0.0, "setting": ""}
    world.tell(e.CallsMeasured(kind="replica", index=0, life=1, function="reward slow", **figures))
    world.tell(e.CacheMeasured(kind="replica", index=0, life=1, used=0.5))
    metrics.mixed = TwoSources()
    metrics.report(3, {SOURCES: {"math": {"groups": 2, "share": 1.0, "reward_mean": 0.5}}})
    server = MetricsServer(registry(metrics, everything(tmp_path)))
    try:
        assert server.port > 0
        assert set(scrape(server)) == {m.name + suffix for m in METRICS for suffix in suffixes(m)}
        assert scrape(server)["engine_source_share"] == {(("source", "code"),): 0.0, (("source", "math"),): 1.0}
    finally:
        server.close()


def test_a_run_without_surroundings_leaves_out_what_belongs_to_them() -> None:
    server = MetricsServer(registry(half_way().metrics))
    try:
        assert set(scrape(server)) == {m.name + s for m in METRICS if not m.where for s in suffixes(m)}
    finally:
        server.close()


def test_a_trainer_that_renames_figures_every_step_does_not_create_endless_series() -> None:
    metrics = steady_world().metrics
    for step in range(1000):
        metrics.report(step, {f"loss_of_step_{step}": 1.0})
    (family,) = [f for f in registry(metrics).collect() if f.name == "engine_trainer_figure"]
    assert len(family.samples) == FIGURES_KEPT


def test_rewards_are_counted_in_buckets_for_a_bounded_number_of_functions() -> None:
    metrics = steady_world().metrics
    for rewards in ([0.0, 1.0, 1.0], [-1.0, 7.5, 2e7]):
        metrics.report(0, {HISTOGRAMS: {"reward": histogram_of(rewards)}})
    metrics.report(1, {HISTOGRAMS: {f"reward_{number}": histogram_of([0.5]) for number in range(30)}})
    (family,) = [f for f in registry(metrics).collect() if f.name == REWARD_HISTOGRAM.name]
    assert len(family.samples) == (1 + REWARD_FUNCTIONS_KEPT) * (len(BOUNDS) + 1)
    counted = {s.labels["le"]: s.value for s in family.samples if s.labels["figure"] == "reward"}
    assert [counted[le] for le in ("-1.5", "-1.0", "0.0", "0.9", "1.0", "10.0", "1000000.0", "+Inf")] == [
        0, 1, 2, 2, 4, 5, 5, 6,
    ]  # fmt: skip


def test_figures_of_a_kind_of_tokens_end_with_the_step_that_has_none() -> None:
    metrics = steady_world().metrics
    metrics.report(0, {"loss": 1.0, "ratio_mean_fresh": 0.9, "token_share_stale_1": 0.5})
    metrics.report(1, {"loss": 2.0, "ratio_mean_stale": 1.0})
    assert metrics.figures == {"loss": 2.0, "ratio_mean_stale": 1.0}


def test_exemplars_name_the_group() -> None:
    world = half_way()
    server = MetricsServer(registry(world.metrics))
    try:
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        with urllib.request.urlopen(urllib.request.Request(server.url, headers=accept), timeout=60) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    for name in ("engine_staleness_steps", "engine_response_tokens", "engine_group_seconds"):
        groups = re.findall(rf'^{name}_bucket{{.*# {{group="(\d+)"}}', text, re.MULTILINE)
        assert groups and all(int(group) < world.scheduler.state.groups.ledger.drawn for group in groups), name


def test_labels_are_those_documented(tmp_path: Path) -> None:
    world = half_way()
    for metric in METRICS:
        (family,) = [f for f in registry(world.metrics, everything(tmp_path)).collect() if f.name == metric.family]
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            assert set(labels) == set(metric.labels), metric.name
            for label, value in labels.items():
                assert not metric.labels[label] or value in metric.labels[label], (metric.name, label, value)


def test_a_scrape_in_the_middle_of_a_run_tells_its_state() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_trained == 3)
    server = MetricsServer(registry(world.metrics, ExternalFigures(now=lambda: 77.0)))
    try:
        found = scrape(server)
    finally:
        server.close()
    state = world.scheduler.state
    assert found["engine_train_steps_total"][()] == 3
    assert found["engine_uptime_seconds"][()] == 77.0
    assert found["engine_groups_running"][()] == state.groups.ledger.running
    counted = {labels[0][1]: value for labels, value in found["engine_groups"].items()}
    records = list(state.groups.live.values())
    assert counted == {name: sum(group.state == name for group in records) for name in counted}
    assert found["engine_groups_ended_total"][(("state", "consumed"),)] == state.groups.ledger.consumed
    assert found["engine_staleness_steps_count"][()] == 6
    assert found["engine_staleness_steps_bucket"][(("le", "1.0"),)] == 6, "none is staler than S = 1"
    assert found["engine_tokens_trained_total"][()] == 6 * GROUP_TOKENS
    moves = found["engine_transitions_total"]
    assert moves[(("from", "batched"), ("machine", "group"), ("to", "consumed"))] == 6


def test_capacity_shrinks_as_groups_are_admitted() -> None:
    world = steady_world(batch=2, stale=1, workers=3)
    assert world.metrics.idle.capacity == (3, 4)
    world.until(lambda state: state.groups.ledger.running == 3)
    assert world.metrics.idle.capacity == (0, 1)


def test_scrapes_from_another_thread_while_the_run_goes_on() -> None:
    world = steady_world(batch=4, stale=2, workers=12, steps=100, replicas=4, slots=4)
    own, over, failures = registry(world.metrics), threading.Event(), []

    def keep_scraping() -> None:
        while not over.is_set():
            try:
                for family in own.collect():
                    said = family.name == "engine_trainer_figure"  # whatever a trainer says, NaN included
                    assert said or all(sample.value >= 0 for sample in family.samples), family.name
            except Exception as error:
                failures.append(error)
                return

    thread = threading.Thread(target=keep_scraping)
    thread.start()
    world.run()
    over.set()
    thread.join()
    assert not failures


def seen_within(function: Any, act: Callable[[], object], look: Callable[[], Any]) -> list[Any]:
    """What another thread may see before each line of a function that `act` calls."""
    seen: list[Any] = []

    def each_line(frame: Any, event: str, _: object) -> object:
        seen.append(look())
        return each_line

    sys.settrace(lambda frame, *_: each_line if frame.f_code is function.__code__ else None)
    try:
        act()
    finally:
        sys.settrace(None)
    return seen


def test_a_scrape_while_a_replica_changes_sees_no_half_changed_capacity() -> None:
    world = steady_world(batch=2, stale=3, workers=2, steps=None, replicas=1)
    idle = world.metrics.idle
    world.until(lambda state: state.training.steps_trained >= 3 and idle.capacity[1] > 0)
    (replica,) = world.scheduler.state.replicas.by_id.values()

    def change() -> None:
        for state in ("ready", "pausing", "installing", "ready"):
            replica.state = state
            idle.replicas_changed()

    before = (*idle.capacity, idle.slots)
    seen = seen_within(type(idle).replicas_changed, change, lambda: (*idle.capacity, idle.slots))
    assert seen and set(seen) == {before}


def test_a_scrape_while_a_run_branches_sees_a_number_of_steps() -> None:
    training = steady_world(steps=2).to_the_end().scheduler.state.training
    seen = seen_within(Training.branch, lambda: training.branch(0, 0.0), lambda: training.steps_batched)
    assert seen and {*seen} == {0, 2}


def test_two_runs_in_one_process_do_not_share_a_registry() -> None:
    one, two = steady_world(steps=1).to_the_end(), steady_world(steps=2).to_the_end()
    assert registry(one.metrics).get_sample_value("engine_train_steps_total") == 1
    assert registry(two.metrics).get_sample_value("engine_train_steps_total") == 2


@pytest.mark.parametrize("host", ["300.1.1.1", "no host", "a..b", "203.0.113.7"])
def test_a_host_that_is_not_of_this_machine_is_refused(host: str) -> None:
    for refuse in (
        lambda: MetricsServer(registry(steady_world().metrics), host=host),
        lambda: check_addresses([("metrics", host, 0)]),
    ):
        with pytest.raises(ConfigError, match=rf"metrics.host '{host}' .*use 127.0.0.1 for this machine alone"):
            refuse()


def test_a_port_in_use_is_refused_and_a_check_leaves_it_free() -> None:
    own = registry(steady_world().metrics)
    first = MetricsServer(own)
    taken = ("metrics", "127.0.0.1", first.port)
    for refuse in (lambda: check_addresses([taken]), lambda: MetricsServer(own, port=first.port)):
        with pytest.raises(ConfigError, match=rf"metrics.port {first.port} .*use 0 for any free port"):
            refuse()
    first.close()
    check_addresses([taken])
    with pytest.raises(ConfigError, match=rf"control.port {first.port} .*use 0 for any free port"):
        check_addresses([taken, ("control", "127.0.0.1", first.port)])
    again = MetricsServer(own, port=first.port)
    again.close()
    again.close()


def test_the_page_is_up_to_date() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert TABLE.search(written), "the page has no table"
    assert written == up_to_date(written), "run: python -m engine.metrics.document"


@pytest.mark.parametrize("page", [PAGE, PAGE.parents[1] / "MONITORING.md"], ids=lambda page: page.stem)
def test_every_name_on_a_page_exists(page: Path) -> None:
    known = {metric.name for metric in METRICS}
    mentioned = set(re.findall(r"\bengine_[a-z_]+", page.read_text(encoding="utf-8")))
    assert mentioned <= known, mentioned - known


def test_series_stay_as_steps_pass_replicas_return_and_settings_change() -> None:
    def series(world: SteadyWorld) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        families = registry(world.metrics).collect()
        return {(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples}

    def live(world: SteadyWorld, lives: range) -> None:
        for life in lives:
            world.after(0.0, world.process("replica", 1).die)
            world.until(lambda state, life=life: state.replicas.by_id[1].process.life == life + 1)
            world.until(lambda state: state.replicas.by_id[1].process.state == "up")
            setting, value = "scheduler.max_concurrent_groups", str(3 + life % 2)
            world.tell(e.SettingChanged(setting=setting, value=value))
            after = world.scheduler.state.training.steps_trained + 2
            world.until(lambda state, after=after: state.training.steps_trained >= after)

    world = steady_world(steps=None, mode="abort", lengths=lambda group: 1 + group % 3)
    world.until(lambda state: state.training.steps_trained == 4)
    live(world, range(1, 12))
    early = series(world)
    live(world, range(12, 60))
    assert series(world) == early
