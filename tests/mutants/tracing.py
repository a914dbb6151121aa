"""A pytest plugin of `make mutants`, with two uses: it writes down which lines each test reaches, or runs chosen tests.

Both run in a copy of the repository. Hypothesis draws the same examples in each run, and does not shrink.
"""

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

TIMED_OUT = 99
"""Exit status of a run in which a test exceeded its limit."""

settings.register_profile(
    "mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


class Plugin:
    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        settings.load_profile("mutants")


class Reached(Plugin):
    """Writes {test: {seconds, {file: mask of its lines}}} for the tests that pass."""

    def __init__(self, root: Path, folders: list[str], output: Path) -> None:
        import coverage

        self.root = root
        self.output = output
        self.seconds: dict[str, float] = defaultdict(float)
        self.bad: set[str] = set()
        include = [f"{root}/{folder}{end}" for folder in folders for end in ("", "/**")]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=include)
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        yield
        self.seconds[item.nodeid] = time.perf_counter() - start
        self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.bad.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        masks: dict[str, dict[str, int]] = {test: {} for test in self.seconds if test not in self.bad}
        for file in data.measured_files():
            name = str(Path(file).relative_to(self.root))
            for line, tests in data.contexts_by_lineno(file).items():
                for test in tests:
                    if test in masks:
                        masks[test][name] = masks[test].get(name, 0) | 1 << line
        found = {}
        for test, of_files in masks.items():
            lines = {file: f"{mask:x}" for file, mask in of_files.items()}
            found[test] = {"seconds": round(self.seconds[test], 3), "lines": lines}
        self.output.write_text(json.dumps({"tests": found, "failed": sorted(self.bad)}))


class Chosen(Plugin):
    """Runs the chosen tests, {test: its limit in seconds}, in their order, and writes the first that fails."""

    def __init__(self, limits: dict[str, float], output: Path) -> None:
        self.limits = limits
        self.output = output

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self.limits if test in found]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        alarm = threading.Timer(self.limits[item.nodeid], self.end, [item.nodeid])
        alarm.daemon = True
        alarm.start()
        yield
        alarm.cancel()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.output.exists():
            self.output.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.output.exists():
            self.output.write_text(f"import of {report.nodeid}")

    def end(self, test: str) -> None:
        self.output.write_text(test)
        os._exit(TIMED_OUT)
