"""`engine bug`: the end of a run as one file to send to others, without its texts. Called by the command line."""

import argparse
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.cli.recorded_run import RUN_OR_FILE, record_errors, takes_run, writable
from engine.errors import ConfigError, RecordError, visible
from engine.extras import EXTRAS
from engine.version import __version__

if TYPE_CHECKING:
    from engine.record.bug_file import BugFile

PACKAGES = ("msgspec", "pydantic", *EXTRAS, "vllm")
RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*")
"""The part of a version that names no build."""
LEFT_OUT = "texts, columns, tokens, paths, host and user names, variables and secrets: they are not in the file"


def add_bug(commands: Any) -> None:
    """Add the command to the parsers of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bug",
        help="write the end of a run to one file to send to others, without texts, columns, paths and secrets",
        description="Show what a bug file of a run would contain, or what a bug file contains; with --out, also write "
        "it. `engine replay FILE` and `engine debug FILE` open it on any machine.",
    )
    takes_run(parser, RUN_OR_FILE)
    parser.add_argument("--out", metavar="FILE", help="write the file")
    parser.add_argument("--whole", action="store_true", help="begin with the first event, for a golden schedule")
    parser.set_defaults(run=write)


def write(arguments: argparse.Namespace) -> int:
    """`engine bug RUN`. Raises: `ConfigError` for a run without a record and a file that cannot be written."""
    from engine.config.plain_settings import plain_settings
    from engine.inspect import open_record
    from engine.inspect.bug_report import report_bug
    from engine.record.bug_file import BugFile, read_bug_file, write_bug_file
    from engine.record.codec import CodecError
    from engine.storage.run_directory import open_run

    if Path(arguments.directory).is_file() and arguments.out is None:
        _show(read_bug_file(Path(arguments.directory)), arguments.directory)
        return 0
    run = open_run(arguments.directory)
    with record_errors(run, extensions=arguments.extensions):
        record = open_record(run.path)
        config = plain_settings(record.header.config)
        if extensions := _texts(record.header.config, "run", "extensions"):
            config["run"]["extensions"] = extensions  # by which `--extensions` finds the policies and states
        report = report_bug(record, config, _names_in(record.header.config), whole=arguments.whole)
    file = BugFile(engine=__version__, environment=environment_here(), segment=report.recorder.to_bytes())
    _show(file, run.shown)
    print(visible(f"names         {', '.join(report.names) or 'none'}"))
    print(f'replaced      {report.texts} texts, by "text 1", "text 2", … and the exceptions that they name')
    print(f"left out      {LEFT_OUT}")
    if report.divergence:
        print(visible(f"the file ends where this engine decides differently without the texts: {report.divergence}"))
    if arguments.out is None:
        print("nothing is written yet: add --out FILE")
        return 0
    try:
        with writable("--out", Path(arguments.out)):
            size = write_bug_file(Path(arguments.out), file)
    except CodecError as error:
        raise ConfigError("RUN", run.shown, f"is too long for one file: {error}", "write it without --whole") from None
    print(f"{arguments.out} has {size} bytes: `engine replay {arguments.out}` shows whether it repeats the decisions")
    return 1 if report.divergence else 0


def _show(file: "BugFile", name: str) -> None:
    """Print what a bug file holds."""
    record = file.record(name)
    ticks, header, end = [*record.ticks()], record.header, record.outcome()
    if not ticks:
        raise RecordError(name, 0, "the bug file has no tick")
    before = "" if record.begin is None else ", after the state before them"
    lines = [
        f"engine        {header.code}, file written by {file.engine}",
        f"events        {ticks[0].first} to {ticks[-1].last}, ticks {ticks[0].number} to {ticks[-1].number}{before}",
        f"ends          {'the run went on or was killed' if end is None else f'{end.word}: {end.reason}'}",
        f"environment   {', '.join(f'{name} {version}' for name, version in file.environment.items())}",
        f"policies      {', '.join(f'{name} {policy}' for name, policy in header.policies.items())}",
        f"limits        {_settings_text(header.limits)}",
        *(f"{f'[{name}]':<13} {_settings_text(section)}" for name, section in header.config.items()),
    ]
    print("\n".join(visible(line) for line in lines))


def environment_here() -> dict[str, str]:
    """The machine and the versions of packages, none of which names anyone."""
    from importlib import metadata

    found = {"Python": platform.python_version(), "CPUs": str(os.cpu_count())}
    found[platform.system()] = platform.machine()
    for name in dict.fromkeys(PACKAGES):
        try:
            release = RELEASE.match(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
        found |= {name: release[0]} if release else {}
    return found


def _names_in(config: Any) -> list[str]:
    """The columns and rewards that policies see by name."""
    functions = config.get("reward", {}).get("functions") or ()
    return [*_texts(config, "scheduler", "policy_fields"), *(str(one.get("name", "")) for one in functions)]


def _texts(config: Any, section: str, field: str) -> list[str]:
    return [*map(str, config.get(section, {}).get(field) or ())]


def _settings_text(tree: Any, path: str = "") -> str:
    """`section.field value`, separated by commas."""
    if isinstance(tree, dict):
        parts = (_settings_text(inner, f"{path}.{name}" if path else name) for name, inner in tree.items())
        return ", ".join(part for part in parts if part)
    return f"{path} {tree}"
