"""What every test runs under: reproducible Hypothesis, and skips that fail where they must not happen.

`--fail-on-skip`, or CI=true in the environment, fails a run in which any test was skipped: what tests need is installed
there.
"""

import atexit
import gc
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Two shared cores make deadlines meaningless; the suite's own time limit catches what hangs.
# Profiles inherit from the default one, which under CI=true draws the same examples in every run.
settings.register_profile("here", deadline=None, print_blob=True, derandomize=False)
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=10)  # for `make coverage`
settings.load_profile("here")


# A shell that runs the tests in the background, or behind nohup, has them ignore these, and so all that they start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Models of tests are too small to share: threads that wait for a busy core make them slower by far. Set before torch is
# imported, here and in the programs that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each process of vLLM would compile the few functions that it decorates so, in C++ the first time: longer than it runs.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# With this variable, which many images set, each program that a test starts compiles the engine again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# For clusters that tests start without `connect`: Ray's workers would hardly run beside other programs.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.pop("RAY_ADDRESS", None)  # a run would join that cluster
# Ray's log monitor lists the files of each cluster ten times a second, for lines that no test reads.
os.environ.setdefault("RAY_LOG_MONITOR_MANY_FILES_THRESHOLD", "0")
os.environ.setdefault("LOG_NAME_UPDATE_INTERVAL_S", "1e9")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip", action="store_true", default=os.environ.get("CI") == "true", help="no skip is let by"
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads the option
def pytest_configure(config: pytest.Config) -> None:
    """In CI every run draws new examples, all from one seed, which `pytest_terminal_summary` prints. The processes of
    pytest-xdist inherit it. Elsewhere Hypothesis keeps failing examples in `.hypothesis/` and tries these first."""
    if os.environ.get("CI") == "true" and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = os.environ.setdefault("HYPOTHESIS_SEED", str(secrets.randbelow(2**32)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seed = config.option.hypothesis_seed
    if seed is not None and not settings().derandomize:
        terminalreporter.write_line(f"To draw the same examples again: add --hypothesis-seed={seed}")


@pytest.hookimpl(optionalhook=True)  # with `-p no:xdist` nobody knows it
def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are processors: a test with a Ray cluster or a vLLM engine mostly waits for one process at a
    time, and for time limits."""
    return (os.cpu_count() or 1) + 2


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What all test files import is there to stay: no garbage collection looks through it, now or later."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and session.config.getoption("--fail-on-skip"):
        skipped = reporter.stats.get("skipped", [])
        if skipped and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            reporter.write_line(f"\n{len(skipped)} skipped where no test may be skipped: failed", red=True)
    yield


WITHOUT_MODEL = ("test_ray_contract", "test_ray_hangs", "test_ray_lives", "test_ray_runs")
"""Test files whose runs have no model: they are killed, or wait for time limits. They take half of the time of the
tests that share a cluster, so they have a process of their own."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that share vLLM engines in one process, where they run one after another, those that share a Ray
    cluster in two others, and those with a cluster of their own in a fourth. Files whose names and parameters do not
    say so mark themselves. These groups are the longest, and pytest-xdist begins with them."""
    for item in items:
        if item.get_closest_marker("ray") is not None:
            shared = "cluster" in getattr(item, "fixturenames", ())
            group = "deaths" if item.path.stem in WITHOUT_MODEL else "cluster" if shared else "clusters"
            item.add_marker(pytest.mark.xdist_group(group))
        elif "vllm" in item.nodeid:
            item.add_marker(pytest.mark.xdist_group("engines"))
        elif "server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))  # one process from which ranks are forked


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Make captured text sendable between pytest-xdist's processes: tests log broken text on purpose."""
    report.sections = [(name, text.encode("utf-8", "replace").decode()) for name, text in report.sections]


def pytest_runtest_teardown() -> None:
    worlds = sys.modules.get("steady_world")  # most processes that tests start need none
    if worlds is not None:
        worlds.close_worlds()


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test works in a directory of its own, and modules that it writes there are known to it alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]


ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A run of the command line keeps its handlers of signals to the end of its process."""
    before = {number: signal.getsignal(number) for number in ENDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The leaders of process groups that are killed. Fails if one has been reaped, after which its number is free."""
    killed, kill = list[int](), os.killpg

    def checked(leader: int, signal: int) -> None:
        os.waitid(os.P_PID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it has been reaped
        killed.append(leader)
        kill(leader, signal)

    monkeypatch.setattr(os, "killpg", checked)
    return killed


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """One local Ray cluster for all tests that need one, ended with the session."""
    import ray
    from forked_workers import MODEL, forked_workers

    from engine.actors.private_cluster import connect

    with forked_workers(*MODEL):
        connect()
    yield
    ray.shutdown()
