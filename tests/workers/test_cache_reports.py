"""When a replica reports its KV cache, on a virtual clock."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from worker_bench import Bench, plan_of

from engine.workers.cache_reports import CacheReports
from engine.workers.clock import VirtualLoop
from engine.workers.replica import ReplicaWorker
from tests.workers.virtual_minute import for_a_minute


class Cache:
    """A generator whose cache the test fills."""

    def __init__(self) -> None:
        self.used, self.running = 0.0, 0

    def cache_used(self) -> float:
        return self.used


class Timed(Bench):
    """A replica; the time and share of its reports."""

    def __init__(self, every_s: float) -> None:
        super().__init__(ReplicaWorker, plan_of(cache_every_s=every_s))
        self.rows = list[tuple[float, float]]()

    def take(self, event: Any) -> None:
        self.rows.append((asyncio.get_running_loop().time(), event.used))


def reported(
    scene: Callable[[Cache, CacheReports], object], every_s: float = 2.0, source: object = None
) -> list[tuple[float, float]]:
    """The reports in a minute. `scene` begins at 0 s."""
    cache, made = Cache(), list[Timed]()

    def begin(loop: VirtualLoop) -> None:
        made.append(Timed(every_s))
        scene(cache, CacheReports(made[0].worker, source or cache, lambda: cache.running))

    for_a_minute(begin)
    return made[0].rows


def filled(cache: Cache, reports: CacheReports) -> None:
    """Two groups run; the last one ends after 5 s."""
    cache.used, cache.running = 0.5, 2
    reports.begin()
    reports.begin()
    asyncio.get_running_loop().call_later(3.0, lambda: setattr(cache, "used", 0.7))
    asyncio.get_running_loop().call_later(5.0, lambda: setattr(cache, "running", 0))


def test_the_cache_is_reported_while_groups_run_and_once_after_the_last() -> None:
    assert reported(filled) == [(2.0, 0.5), (4.0, 0.7), (6.0, 0.7)]


def test_nothing_is_reported_without_an_interval_or_a_cache() -> None:
    assert reported(filled, every_s=0.0) == []
    assert reported(filled, source=object()) == []


@pytest.mark.parametrize("used", [1.5, float("nan"), "half"])
def test_a_share_that_is_none_is_logged_once_and_no_more_is_reported(
    used: float, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(cache: Cache, reports: CacheReports) -> None:
        filled(cache, reports)
        cache.used = used

    with caplog.at_level(logging.ERROR):
        assert reported(wrong) == []
    said = "replica 0 no longer reports its KV cache: correct cache_used() of its generator"
    assert [record.getMessage() for record in caplog.records] == [said]
