"""Draws a run as docs/run.svg: reward and staleness over wall time, from the run's files alone.

Run from the root: python docs/run_picture.py runs/latest docs/run.svg
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

WIDTH, LEFT, RIGHT = 860, 70, 24
REWARD, STALENESS = (44, 176), (268, 84)
"""Top and height of the two plots."""
HEIGHT = 406
BLUE, LIGHT, ORANGE, GREY = "#1f5fa8", "#bcd3ec", "#c4571b", "#8a8f98"
Point = tuple[float, float]


class Plot:
    """Maps values to places in one of the two plots."""

    def __init__(self, place: tuple[int, int], seconds: float, highest: float) -> None:
        self.top, self.height = place
        self.seconds, self.highest = seconds, highest

    def at(self, point: Point) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / self.seconds
        return f"{x:.1f},{self.top + self.height * (1 - point[1] / self.highest):.1f}"

    def line(self, points: Sequence[Point], style: str) -> str:
        return f'<polyline fill="none" {style} points="{" ".join(map(self.at, points))}"/>'

    def area(self, low: Sequence[Point], high: Sequence[Point], color: str) -> str:
        return f'<polygon fill="{color}" points="{" ".join(map(self.at, [*low, *reversed(high)]))}"/>'

    def dots(self, points: Sequence[Point], color: str) -> list[str]:
        places = [self.at(point).split(",") for point in points]
        return [f'<circle cx="{x}" cy="{y}" r="5" fill="{color}" stroke="#fff"/>' for x, y in places]

    def axis(self, values: Sequence[float], title: str) -> list[str]:
        lines = [self.line([(0, value), (self.seconds, value)], 'stroke="#e3e6ea"') for value in values]
        labels = []
        for value in values:
            y = float(self.at((0, value)).split(",")[1]) + 4
            labels.append(words(LEFT - 10, y, f"{value:g}", anchor="end", color=GREY))
        return [*lines, *labels, words(LEFT, self.top - 12, title, weight="600")]


def words(x: float, y: float, text: str, *, anchor: str = "start", color: str = "#22262b", weight: str = "400") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-weight="{weight}">{text}</text>'


def legend(y: float, entries: Sequence[tuple[str, str]]) -> list[str]:
    """Right-aligned entries of (color, text)."""
    parts, x = [], float(WIDTH - RIGHT)
    for color, text in reversed(entries):
        x -= 7.2 * len(text)
        parts += [words(x, y, text), f'<rect x="{x - 17:.1f}" y="{y - 9:.1f}" width="11" height="11" fill="{color}"/>']
        x -= 34
    return parts


def drawn(run: Path) -> str:
    """The picture of a run. Its `metrics.jsonl` has a row for each train step and validation."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    bound = config["scheduler"]["max_staleness_steps"]
    steps = [row for row in rows if "step" in row]
    seconds = max(row["elapsed_s"] for row in rows)
    reward, staleness = Plot(REWARD, seconds, 1.0), Plot(STALENESS, seconds, bound + 0.25)

    def of(name: str) -> list[Point]:
        return [(row["elapsed_s"], row[name]) for row in steps]

    measured = [(row["elapsed_s"], row["accuracy"]) for row in rows if row.get("outcome") == "reported"]
    every = next(size for size in (1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600) if seconds / size <= 12)
    times = []
    for time in range(0, int(seconds) + 1, every):
        x = float(staleness.at((time, 0)).split(",")[0])
        times.append(words(x, sum(STALENESS) + 20, f"{time}", anchor="middle", color=GREY))
    parts = [
        *reward.axis((0, 0.25, 0.5, 0.75, 1), "reward"),
        *legend(REWARD[0] - 12, [(BLUE, "mean of a train step"), (ORANGE, "validation accuracy")]),
        reward.line(of("reward_mean"), f'stroke="{BLUE}" stroke-width="1.6" stroke-linejoin="round"'),
        *reward.dots(measured, ORANGE),
        *staleness.axis(range(bound + 1), "staleness of the groups, in train steps"),
        *legend(STALENESS[0] - 12, [(LIGHT, "min to max"), (BLUE, "mean"), (ORANGE, f"bound S = {bound}")]),
        staleness.area(of("staleness_min"), of("staleness_max"), LIGHT),
        staleness.line(of("staleness_mean"), f'stroke="{BLUE}" stroke-width="1.6"'),
        staleness.line([(0, bound), (seconds, bound)], f'stroke="{ORANGE}" stroke-width="1.6" stroke-dasharray="6 4"'),
        *times,
        words(LEFT, sum(STALENESS) + 42, f"seconds of wall time; {len(steps)} train steps", color=GREY),
    ]
    font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" {font}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawn(Path(sys.argv[1])), encoding="utf-8")
