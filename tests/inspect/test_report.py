"""The report of a run: its data, and the page in a real browser, headless Chromium driven by Playwright."""

import html
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from steady_world import close_worlds, steady_world

from engine.cli import main
from engine.cli.advice_line import may_have_gpus
from engine.inspect.history_reader import read_history
from engine.inspect.report import _curves, _idle_bins, report_html
from engine.inspect.timeline import timeline_of
from engine.metrics.journal import line_of
from engine.record import Header, Recorder
from engine.simulation.advice import advise
from engine.storage.samples import SampleFiles, SampleRow
from tests.inspect.recorded_worlds import faulty_record, recorded

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
TURNED = "\u202etxt"
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose name, metrics and responses try to be markup."""
    directory = tmp_path_factory.mktemp("run")
    history = read_history(faulty_record(directory=directory / "schedule", run=f"r{HOSTILE}"))
    close_worlds()  # before a browser is open
    rewards = {"reward": [[0, 0, 1], [0.9, 1, 3]], f"reward_{HOSTILE}": [[0.5, 0.5, 4]]}
    rows = [{**row, "loss": 0.5, HOSTILE: 1.0, "reward_histograms": rewards} for row in history.rows]
    del rows[2]["reward_histograms"]
    (directory / "metrics.jsonl").write_bytes(b"".join(map(line_of, rows)) + b'{"step": 6, "los')
    samples = SampleFiles(directory / "samples")
    for step in range(4):
        row = {"kind": "train", "step": step, "group": 4 * step, "prompt_row": 0, "reward": 1.0, "tokens": 3}
        samples.write_step(step, [SampleRow(**row, prompt=f"What is 2 + {step}?", response=HOSTILE)])
    return directory


@pytest.fixture(scope="module")
def page_file(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    assert main(["report", str(run), "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="class")
def browser(page_file: Path) -> Iterator[Any]:
    """No simulated world can run while it is open: both have an event loop in this thread."""
    if CHROMIUM is None:
        pytest.skip("needs the program chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any, page_file: Path) -> Iterator[Any]:
    """The open report. At the end, nothing was printed to the console, raised or fetched, and no text was markup."""
    problems: list[str] = []
    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="dark")
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if request.url == page_file.as_uri() else problems.append(request.url))
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    yield page
    assert page.evaluate("window.broken") is None
    page.close()
    assert problems == []


def details(page: Any) -> dict[str, str]:
    pairs = page.locator("#details dl div").all()
    return {pair.locator("dt").inner_text(): pair.locator("dd").inner_text() for pair in pairs}


@pytest.mark.xdist_group("browser")
class TestPage:
    def test_a_page_has_the_figures_of_the_run_and_its_texts_as_text(self, page: Any) -> None:
        assert page.locator("h1").inner_text() == f"r{HOSTILE}"
        assert "finished: 6 train steps" in page.locator("section[aria-label=Summary]").inner_text()
        tables = page.locator("table.shares").all_inner_texts()
        assert [table.split("\t")[0] for table in tables] == ["Slots", "Trainer", "Sampled tokens", "Attempts"]
        assert "idle: weight sync" in tables[0] and "trained: a train step has trained" in tables[2]
        titles = page.locator(".plot h3").all_inner_texts()
        hostile = f"reward {HOSTILE}".replace("_", " ")
        histograms = [f"{name}: responses by value" for name in ("reward", hostile)]
        assert titles == ["reward", "loss", "response tokens", "staleness", "seconds", *histograms]
        assert page.locator(".plot canvas").count() == len(titles)
        assert page.locator("details.sample pre").nth(1).text_content() == HOSTILE
        assert "max_staleness_steps: 2" in page.locator("section[aria-label=Configuration] pre").text_content()
        assert page.locator("section[aria-label=Advice]").count() == 1

    def test_the_mouse_shows_and_follows_a_group(self, page: Any) -> None:
        box = page.locator("#timeline").bounding_box()
        spots = ((x, y) for y in range(150, 420, 7) for x in range(140, 1100, 40))
        for x, y in spots:
            page.mouse.move(box["x"] + x, box["y"] + y)
            if page.locator("#tip").is_visible() and page.locator("#tip b").inner_text().startswith("group"):
                break
        group = page.locator("#tip b").inner_text().removeprefix("group ")
        assert "tokens: " in page.locator("#tip").inner_text()
        page.mouse.click(box["x"] + x, box["y"] + y)
        assert page.input_value("#group") == group and details(page)["group"] == group
        links = page.locator("#details .links").all_inner_texts()
        assert any(text.startswith(("caused by", "caused")) for text in links)
        page.locator("#details .links button").first.click()
        assert page.locator("#details h3").inner_text() != ""

    def test_every_function_of_the_timeline_has_a_key(self, page: Any) -> None:
        canvas = page.locator("#timeline")

        def span() -> tuple[float, float]:
            page.evaluate("new Promise(requestAnimationFrame)")
            page.evaluate("new Promise(requestAnimationFrame)")
            return float(canvas.get_attribute("data-from")), float(canvas.get_attribute("data-to"))

        whole = span()
        canvas.focus()
        page.keyboard.press("+")
        page.keyboard.press("+")
        near = span()
        assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 4)
        page.keyboard.press("ArrowRight")
        assert span()[0] > near[0]
        page.keyboard.press("Home")
        assert span() == whole
        for _ in range(4):
            page.keyboard.press("ArrowDown")
        page.keyboard.press("n")
        first = details(page)
        page.keyboard.press("n")
        assert float(details(page)["start"].split()[0]) >= float(first["start"].split()[0])
        assert details(page)["track"] == first["track"] and first["track"].startswith("replica")
        page.keyboard.press("Enter")
        assert page.input_value("#group") == details(page)["group"]
        page.keyboard.press("Escape")
        assert page.input_value("#group") == "" and "Choose a slice" in page.locator("#details").inner_text()

    def test_light_dark_and_colorings_draw_differently(self, page: Any) -> None:
        def drawn() -> bytes:
            page.evaluate("new Promise(requestAnimationFrame)")
            page.evaluate("new Promise(requestAnimationFrame)")
            return bytes(page.locator("#timeline").screenshot())

        assert page.get_attribute("html", "data-theme") == "dark"
        dark = drawn()
        page.select_option("#coloring", "staleness")
        stale = drawn()
        page.click("#theme")
        assert len({dark, stale, drawn()}) == 3 and page.get_attribute("html", "data-theme") == "light"
        page.check("input[value=wall]")
        assert page.locator(".plot canvas").count() == 7

    def test_curves_have_whole_steps_and_room_for_their_numbers(self, page: Any) -> None:
        for plot in range(page.evaluate("plots.length")):
            page.evaluate(f"plots[{plot}].setScale('x', {{min: 0, max: 1}})")
            page.evaluate(f"plots[{plot}].setScale('y', {{min: -0.00004, max: -0.00001}})")
            page.evaluate("new Promise(requestAnimationFrame)")
            wide = "Math.max(...y._values.map((text) => ctx.measureText(text).width)) / devicePixelRatio"
            steps, numbers, room, wide = page.evaluate(
                "({axes: [x, y], ctx}) => [x._splits, y._values, y._size, (ctx.font = y.font[0], " + wide + ")]",
                page.evaluate_handle(f"plots[{plot}]"),
            )
            assert steps == [0, 1]
            assert not any("-" in text for text in numbers) or room >= wide + 15, "the sign is not cut off"

    def test_a_group_without_a_slice_is_named(self, page: Any) -> None:
        page.fill("#group", "99999")
        page.press("#group", "Enter")
        assert page.locator("#details").inner_text() == "Group 99999 has no slice in this run."


def test_bins_of_idle_time_add_up_to_the_slots() -> None:
    history = read_history(recorded(seed=5))
    bins = _idle_bins(history)
    whole = sum(sum(row) for row in bins["slots"]) * bins["seconds"]
    assert whole == pytest.approx(history.busy_s + sum(history.idle_s.values()), rel=1e-3)


def test_a_histogram_of_rewards_has_the_mean_of_the_responses() -> None:
    buckets = {"reward": [[0, 0, 1], [0.9, 1, 1]], "reward_right": [[0, 0, 1], [0.9, 1, 1]]}
    row = {"step": 0, "reward_mean": 0.5, "reward_right": 0.25, "reward_histograms": buckets}
    drawn = _curves(read_history(recorded(seed=1, steps=1)), [row, {"step": 1, "reward_mean": 0.75}])["histograms"]
    assert drawn == {
        "reward": {"buckets": [buckets["reward"], []], "mean": [0.5, 0.75]},
        "reward_right": {"buckets": [buckets["reward_right"], []], "mean": [0.25, None]},
    }


def test_a_report_shows_advice_and_hides_secrets() -> None:
    record = recorded(seed=1, steps=1)
    record.header.config["wandb"] = {"api_key": "hunter22"}  # type: ignore[index]
    page = report_html(timeline_of(read_history(record)), advice=["raise rollout.slots to 8: 12 % fewer seconds"])
    assert "<li>raise rollout.slots to 8: 12 % fewer seconds</li>" in page
    assert "hunter22" not in page and "***" in page


def test_the_report_of_a_run_has_the_advice_about_it(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(path)]) == 0
    history = read_history(run)
    advice = advise(history, gpus=may_have_gpus(history.config)).lines
    assert "".join(f"<li>{html.escape(line)}</li>" for line in advice) in path.read_text(encoding="utf-8")


def test_the_report_of_a_failed_run_counts_no_step_and_shows_failed_rewards(tmp_path: Path) -> None:
    limits = steady_world().setting.limits
    recorder = Recorder(tmp_path / "schedule", Header(run="fails", limits=limits.to_plain()))
    steady_world(recorder=recorder).until(lambda state: state.groups.ledger.batched > 0)
    recorder.close()
    texts = {"prompt": "?\x9b2J", "response": f"!\x1b[2J{TURNED}", "answer": TURNED, "error": f"no such thing{TURNED}"}
    row = SampleRow(kind="failed", group=3, attempt=2, prompt_row=0, **texts)
    SampleFiles(tmp_path / "samples").write_failure(3, 2, [row])
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"train steps</dt>\s*<dd>0</dd>", page)
    assert "attempt 2, group 3, sample 0" in page and "no such thing" in page
    assert "!\\x1b[2J\\u202etxt" in page and not {"\x1b", "\x9b", "\u202e"} & {*page}
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o600


def test_a_report_is_named_after_the_directory_of_its_run(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run)]) == 0  # the record names the run with slashes
    assert [path.name for path in tmp_path.iterdir()] == [f"{run.name}.html"]


def test_wrong_arguments_of_report_are_refused(run: Path, tmp_path: Path, capsys: Any) -> None:
    for arguments, message in (
        ([str(run), "--samples", "one"], "must be numbers of train steps, separated by commas; use 0,50,99"),
        ([str(run), "--samples", "2,7"], "names steps without samples: 7; use steps from 0 to 3"),
        ([str(run), "--out", str(tmp_path / "no" / "file")], "cannot be written: No such file or directory"),
        ([str(tmp_path)], "has no schedule/ directory"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
