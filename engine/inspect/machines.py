"""Prints the state machines as tables and Mermaid diagrams. Used by `engine states`."""

from typing import Any

from engine.states.group import GROUP, group_table
from engine.states.limits import GENERATED, PUBLISHING, QUEUED, SCORING, Limits
from engine.states.machine import Table
from engine.states.pool import POOL
from engine.states.process import PROCESS
from engine.states.replica import REPLICA
from engine.states.step import STEP, step_table
from engine.states.validation import VALIDATION
from engine.states.version import VERSION

MACHINES = (GROUP, STEP, PROCESS, REPLICA, VERSION, VALIDATION, POOL)


def tables_of(limits: Limits | None) -> tuple[Table, ...]:
    """Every machine, with the states that a run adds."""
    if limits is None:
        return MACHINES
    at = limits.states_at
    return (group_table(at(GENERATED), at(QUEUED)), step_table(at(SCORING), at(PUBLISHING)), *MACHINES[2:])


def machines_text(format: str, limits: Limits | None = None) -> str:
    """Every machine in a format: `mermaid`, `table` or `both`. `limits`: of a run, which may add states."""
    parts: list[str] = []
    for table in tables_of(limits):
        parts.append(f"## {table.name}\n")
        if format != "table":
            parts.append(f"```mermaid\n{mermaid(table)}\n```\n")
        if format != "mermaid":
            parts.append(markdown(table) + "\n")
    return "\n".join(parts).rstrip()


def machines_plain(limits: Limits | None = None) -> dict[str, Any]:
    """Every machine as plain data, by name."""
    return {
        table.name: {
            "initial": table.initial,
            "states": {state: table.phases[state].name.lower() if table.phases else None for state in table.states},
            "transitions": [
                {"trigger": t.trigger, "from": t.sources, "to": t.target, "when": t.why} for t in table.transitions
            ],
        }
        for table in tables_of(limits)
    }


def mermaid(table: Table) -> str:
    """The diagram of a machine."""
    lines = ["stateDiagram-v2", f"    [*] --> {table.initial}"]
    for transition in table.transitions:
        lines += [f"    {source} --> {transition.target} : {transition.trigger}" for source in transition.sources]
    lines += [f"    {state} --> [*]" for state in table.terminal]
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """A machine as a Markdown table: one row for each transition out of a state."""
    phases = table.phases
    rows = [("state", *(("phase",) if phases else ()), "trigger", "next state", "when")]
    for state in table.states:
        phase = (phases[state].name.lower(),) if phases else ()
        leaving = [t for t in table.transitions if state in t.sources]
        rows += [(state, *phase, t.trigger, t.target, t.why) for t in leaving]
        if not leaving:
            rows.append((state, *phase, "", "", "final state"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
