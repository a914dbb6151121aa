"""Draws what `engine tune` found as SVG: groups per second over mean staleness. Called by `engine tune`."""

from collections.abc import Sequence
from html import escape

from engine.simulation.tuning import Search, Tried

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 420, 70, 24, 44, 60
BLUE, GREY, ORANGE, GREEN = "#1f5fa8", "#c3c8cf", "#c4571b", "#2e7d4f"
TICKS = 5


def front_picture(search: Search, title: str) -> str:
    """Every setting tried as a grey dot, the front as a line, the run and the recommendation marked."""
    front, best = search.front(), search.recommended()
    shown = [*search.searched.values(), *front, search.base]
    most = [1.05 * max(value) or 1.0 for value in zip(*map(_figures, shown), strict=True)]

    def place(values: Sequence[float]) -> tuple[float, float]:
        x, y = (value / end for value, end in zip(values, most, strict=True))
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)

    def dot(one: Tried, radius: int, color: str) -> str:
        x, y = place(_figures(one))
        words = escape(", ".join(f"{path}={value}" for path, value in one.settings) or "as the run")
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"><title>{words}</title></circle>'

    parts = [_text(LEFT, TOP - 18, title)]
    for share in (tick / TICKS for tick in range(TICKS + 1)):
        x, y = place((share * most[0], share * most[1]))
        parts += [
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e3e6ea"/>',
            _text(LEFT - 10, y + 4, f"{share * most[1]:.3g}", "end"),
            _text(x, HEIGHT - BOTTOM + 20, f"{share * most[0]:.2g}", "middle"),
        ]
    line = " ".join("{:.1f},{:.1f}".format(*place(_figures(one))) for one in front)
    parts += [
        _text(LEFT, HEIGHT - 14, "groups per second over mean staleness, in train steps"),
        *(dot(one, 3, GREY) for one in search.searched.values()),
        f'<polyline fill="none" stroke="{BLUE}" stroke-width="1.6" points="{line}"/>',
        *(dot(one, 5, BLUE) for one in front), dot(search.base, 6, ORANGE), dot(best, 6, GREEN),
    ]  # fmt: skip
    for number, (color, name) in enumerate(((ORANGE, "the run"), (GREEN, "recommended"), (BLUE, "front"))):
        x = WIDTH - RIGHT - 110 * (3 - number)
        parts += [f'<circle cx="{x}" cy="{TOP - 22}" r="5" fill="{color}"/>', _text(x + 10, TOP - 18, name)]
    font = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" {font}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def _figures(one: Tried) -> tuple[float, float]:
    return one.staleness, one.speed.median


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#22262b">{escape(words)}</text>'
