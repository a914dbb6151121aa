"""The table of docs/reference/METRICS.md, from `names.py`: `python -m engine.metrics.document` brings it up to date.

The rest of the page is written by hand. A test fails if the table is out of date.
"""

import re
from pathlib import Path

from engine.metrics.names import METRICS, Metric

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "METRICS.md"
TABLE = re.compile(r"(?<=\| name \| type \| unit \| labels \| meaning \|\n\|---\|---\|---\|---\|---\|\n)(?:\|.*\n)*")


def up_to_date(page: str) -> str:
    """The page with a row for each metric."""
    rows = "".join(map(_row, METRICS))
    return TABLE.sub(lambda _: rows, page)


def _row(metric: Metric) -> str:
    labels = "<br>".join(
        f"`{label}`" + (": " + ", ".join(f"`{value}`" for value in values) if values else "")
        for label, values in metric.labels.items()
    )
    where = f" *{metric.where}*" if metric.where else ""
    return f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.help}{where} |\n"


if __name__ == "__main__":
    PAGE.write_text(up_to_date(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
