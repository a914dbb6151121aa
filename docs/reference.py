"""Writes docs/reference: every field of a configuration, command of `engine`, setting of other systems, request field.

Run from the root: python docs/reference.py. The pages are made from the models of the configuration, the shipped
configurations, the parser of the command line and the tables of migration and gateway, so a test notices a page that
is not written again.
"""

import argparse
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from engine import cli
from engine.config.loading import expected, parse_yaml
from engine.config.migration import tables
from engine.config.schema import Config
from engine.config.workload import ResponseSource, Workload
from engine.gateway.request_fields import CHAT, COMPLETIONS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
EXAMPLES = ROOT / "docs" / "reference_examples.yaml"
NO_DEFAULT = object()

CONFIG = """\
# Every field of a configuration

Which values each field takes, what it is if you leave it out, and what it means. `engine check CONFIG` checks a file;
`--set rollout.slots=16` changes a field for one run. The laws between fields are on the pages of their subjects.

`python docs/reference.py` writes this page from the models in `engine/config`: do not edit it.
`[]` marks the items of a list. A field without a default must be set. Each example is a value that the field accepts.
"""
COMMANDS = """\
# Every command

What each command of `engine` does, its arguments, its exit codes, and how to read it from a program.
`python docs/reference.py` writes this page from the parser in `engine/cli`: do not edit it.

RUN is the directory of a run, or its name under `runs/`; `latest` is the newest.

**Exit codes:** 0 success; 1 the run failed, or the replay differs; 2 bad input: the message names the field, its value
and what to do; 130 interrupted, or ended on request. `engine status` has [its own](../OPERATIONS.md#watch-a-run).
(`make` turns every failure into 2.)

**JSON:** with `--json`, a command prints one line with one object: first `command` and `run` (the directory of the run,
or null), then what the text shows, under stable names. Missing figures are null, secrets are `***`, and errors still go
to stderr. `samples --json` prints one line for each sample instead.

    engine runs --json | jq -r '.runs[] | select(.state == "failed") | .name'

**Completion** of commands, options, files and the names of runs (extra `inspect`):

    eval "$(engine --completion bash)"            # in ~/.bashrc
    eval "$(engine --completion zsh)"             # in ~/.zshrc, after compinit
    engine --completion fish | source             # in ~/.config/fish/config.fish
"""


MIGRATION = """\
# Every setting of other systems

The field or command that replaces each setting of TRL, verl, SkyRL, prime-rl and AReaL.
[MIGRATION.md](../MIGRATION.md) has whole configurations before and after, and what behaves differently.

`python docs/reference.py` writes this page from `engine/config/migration_tables.md`: do not edit it.
A `*` stands for every setting with that prefix.
"""


REQUESTS = """\
# Every field of a request

What the gateway for [agents](../AGENTS.md#endpoints) does with each field of OpenAI's API, in `/v1/chat/completions`
and `/v1/completions`. Fields that are in neither this table nor OpenAI's documentation have no effect.

In `/v1/completions`, `logprobs` is the number of most likely tokens, from 0 to 20, and `add_special_tokens` must be
true. `python docs/reference.py` writes this page from `engine/gateway/request_fields.py`: do not edit it.
"""


WORKLOAD = """\
# Every field of a workload

What `engine simulate` and `engine tune` read ([how to use it](../CHOOSING.md)), and what `engine whatif --save` writes.
A *figure* is one number, or a list: the smallest, ..., the largest, at equal shares of the cases.

`python docs/reference.py` writes this page from `engine/config/workload.py`: do not edit it.
"""


@dataclass(frozen=True)
class SectionFields:
    """A section: its path, such as `validation.sets[]`, what it is for, and its fields."""

    path: str
    description: str
    fields: Mapping[str, FieldInfo]


def sections() -> list[SectionFields]:
    """Every section of a configuration, each before those within it."""
    return [one for name, field in Config.model_fields.items() for one in _sections_of(name, field)]


def _sections_of(path: str, field: FieldInfo) -> Iterator[SectionFields]:
    model, is_list = _model_in(field.annotation)
    if model is None:
        return
    path = f"{path}[]" if is_list else path
    yield SectionFields(path, field.description or "", model.model_fields)
    for name, inner in model.model_fields.items():
        yield from _sections_of(f"{path}.{name}", inner)


def _model_in(kind: Any) -> tuple[type[BaseModel] | None, bool]:
    """The model that a field holds, and whether it holds a list of them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind, False
    found = [_model_in(one)[0] for one in get_args(kind)]
    model = next((one for one in found if one is not None), None)
    return model, model is not None and get_origin(kind) in (list, tuple)


# -- fields ------------------------------------------------------------------------------------------------------------


def config_page() -> str:
    """The text of CONFIG.md."""
    files = [EXAMPLES, *sorted((ROOT / "configs").glob("*.yaml")), *sorted((ROOT / "examples").glob("*.yaml"))]
    written = [parse_yaml(file.read_text(encoding="utf-8"), "config", str(file)) for file in files]
    every = sections()
    names = [f"[{one.path}](#{anchor(one.path)})" for one in every if "." not in one.path]
    parts = [CONFIG, f"Sections: {' · '.join(names)}\n"]
    for one in every:
        level = "#" * (2 + one.path.count("."))
        rows = [_row(one.path, name, field, written) for name, field in one.fields.items()]
        head = "| field | value | default | example | meaning |\n|---|---|---|---|---|"
        parts.append(f"{level} {one.path}\n\n{one.description}\n\n{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(section: str, name: str, field: FieldInfo, written: list[Any]) -> str:
    path = f"{section}.{name}"
    model, is_list = _model_in(field.annotation)
    default = NO_DEFAULT if field.is_required() else plain_of(field.get_default(call_default_factory=True))
    shown = "" if default is NO_DEFAULT else code(default)
    if model is not None:
        path = f"{path}[]" if is_list else path
        value = ("a list of sections" if is_list else "a section") + (" or null" if default is None else "")
        cells = [value, "" if isinstance(default, dict) else shown, f"[{path}](#{anchor(path)})"]
    else:
        cells = [words_for(path), shown, code(example_of(path, field, default, written))]
    return "| " + " | ".join([f"`{name}`", *cells, cell(field.description or "")]) + " |"


def plain_of(value: Any) -> Any:
    """A default in the form that YAML can write."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value


def code(value: Any) -> str:
    """A value as one line of YAML, in a cell of a table."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return cell(f"`{text.strip().removesuffix('...').strip()}`")


def cell(text: str) -> str:
    """A text in a cell of a table: `<id>` in it is no tag of HTML."""
    plain = re.sub(r"`[^`]*`|<", lambda found: "\\<" if found[0] == "<" else found[0], text)
    return plain.replace("|", "\\|").replace("\n", " ")


def words_for(path: str) -> str:
    """The values that a field takes, as an error message names them."""
    return cell(re.sub(r"(?<=that matches )\S+", r"`\g<0>`", expected(path.replace("[]", ".0"))))


def anchor(heading: str) -> str:
    """The anchor of a heading with a path, as GitHub makes it."""
    return heading.replace(".", "").replace("[]", "")


def example_of(path: str, field: FieldInfo, default: Any, written: list[Any]) -> Any:
    """A value that the field accepts, other than its default if one is known. Raises: `LookupError` if none is."""
    accepts = TypeAdapter(Annotated[field.annotation, "", *field.metadata], config=ConfigDict(strict=True))
    found = [value for config in written for value in values_at(config, path.replace("[]", ".[]").split("."))]
    accepted = [
        value for value in [*found, *_suggested(accepts.json_schema(), default)] if _is_accepted(value, accepts)
    ]
    if not accepted:
        raise LookupError(f"no example of {path} is known: add one to {EXAMPLES.relative_to(ROOT)}")
    return next((value for value in accepted if value != default), accepted[0])


def _is_accepted(value: Any, accepts: TypeAdapter[Any]) -> bool:
    try:
        accepts.validate_python(value)
    except ValidationError:
        return False
    return value is not None


def values_at(tree: Any, path: list[str]) -> Iterator[Any]:
    """The values that a configuration as written has at a path."""
    if not path:
        yield tree
    elif path[0] == "[]":
        for one in tree if isinstance(tree, list) else []:
            yield from values_at(one, path[1:])
    elif isinstance(tree, Mapping) and path[0] in tree:
        yield from values_at(tree[path[0]], path[1:])


def _suggested(schema: Mapping[str, Any], default: Any) -> Iterator[Any]:
    """Values that a type suggests: other choices, the other boolean, twice or half of the default, a small number."""
    yield from schema.get("enum", [])
    for one in schema.get("anyOf", []):
        yield from _suggested(one, default)
    kind = schema.get("type")
    if kind == "boolean":
        yield not default
    elif kind in ("integer", "number"):
        convert = int if kind == "integer" else float
        if isinstance(default, int | float) and default:
            yield from (convert(default * 2), convert(default / 2))
        yield from (convert(one) for one in (16, 4, 1, 0.5))


# -- commands ----------------------------------------------------------------------------------------------------------


def commands() -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """What each command does, and its parser, by name; first `engine` itself."""
    parser = cli._parser()
    (choices,) = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    does = {one.dest: one.help or "" for one in choices._choices_actions}
    named = {f"engine {name}": (text, choices.choices[name]) for name, text in does.items()}
    return {"engine": ((parser.description or "").rstrip("."), parser), **named}


def commands_page() -> str:
    """The text of COMMANDS.md."""
    found = commands()
    names = [f"[{name.removeprefix('engine ')}](#{name.replace(' ', '-')})" for name in found if name != "engine"]
    parts = [COMMANDS, f"Commands: {' · '.join(names)}\n"]
    for name, (does, parser) in found.items():
        usage = f"```text\n{usage_of(parser)}\n```"
        rows = [_argument(one) for one in parser._actions if one.help and not isinstance(one, argparse._HelpAction)]
        table = "\n".join(["| argument | meaning |", "|---|---|", *rows])
        parts.append(f"## {name}\n\n{does[:1].upper()}{does[1:]}.\n\n{usage}\n\n{table}\n")
    return "\n".join(parts)


def usage_of(parser: argparse.ArgumentParser) -> str:
    """The usage in lines of at most 100 characters. Each version of argparse wraps them differently."""
    words = [parser.prog]
    for one in sorted(parser._actions, key=lambda one: not one.option_strings):
        if one.option_strings and not isinstance(one, argparse._HelpAction):
            shown = " ".join([one.option_strings[0], *_values(one)])
            words.append(shown if one.required else f"[{shown}]")
        elif not one.option_strings:
            words += [f"[{value}]" if one.nargs in ("?", "*") else value for value in _values(one)]
    lines = textwrap.wrap(
        "\n".join(word.replace(" ", "\N{NO-BREAK SPACE}") for word in words), 100, break_on_hyphens=False
    )
    return "\n    ".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def _values(action: argparse.Action) -> list[str]:
    """The words for the values of an argument."""
    if action.nargs == 0:
        return []
    if action.choices is not None and action.metavar is None:
        return ["{" + ",".join(map(str, action.choices)) + "}"]
    name = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
    return [name] if isinstance(name, str) else list(name)


def _argument(action: argparse.Action) -> str:
    shown = " ".join([", ".join(action.option_strings), *_values(action)]).strip()
    text = argparse.HelpFormatter("engine")._expand_help(action) if action.help else ""
    return f"| {cell(f'`{shown}`')} | {cell(text)} |"


# -- settings of other systems -----------------------------------------------------------------------------------------


def migration_page() -> str:
    """The text of MIGRATION.md."""
    names = [f"[{name}](#{name.lower()})" for name in tables()]
    parts = [MIGRATION, f"Systems: {' · '.join(names)}\n"]
    return "\n".join([*parts, *(f"## {name}\n\n{table}\n" for name, table in tables().items())])


# -- requests of agents ------------------------------------------------------------------------------------------------


def requests_page() -> str:
    """The text of REQUESTS.md."""
    merged = {**CHAT, **COMPLETIONS, **{name: CHAT[name] for name in ("logprobs", "add_special_tokens")}}
    rows = [f"| `{name}` | {rule.treatment} | {rule.allowed} | {rule.reason} |" for name, rule in merged.items()]
    return "\n".join([REQUESTS, "| field | | allowed | remark |", "|---|---|---|---|", *rows]) + "\n"


# -- workloads ---------------------------------------------------------------------------------------------------------


def workload_page() -> str:
    """The text of WORKLOAD.md."""
    parts = [WORKLOAD]
    for section, field in Workload.model_fields.items():
        model, _ = _model_in(field.annotation)
        name = f"{section}.NAME" if model is ResponseSource else section
        rows = [_figure(section, field)] if model is None else [_figure(*one) for one in model.model_fields.items()]
        about = field.description or "" if model is None else (model.__doc__ or "").strip()
        head = "| field | value | default | meaning |\n|---|---|---|---|"
        parts.append(f"## {name}\n\n" + (about + "\n\n" if model else "") + f"{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _figure(name: str, field: FieldInfo) -> str:
    kinds = {float: "a number", int: "a whole number", str: "text"}
    optional = type(None) in get_args(field.annotation)
    kind = next((kinds[one] for one in (field.annotation, *get_args(field.annotation)) if one in kinds), "a mapping")
    kind = "a figure" if float in get_args(field.annotation) and not optional else kind
    kind = "a mapping" if get_origin(field.annotation) is dict else kind
    default = "" if field.is_required() else code(plain_of(field.get_default(call_default_factory=True)))
    return f"| `{name}` | {kind} | {default} | {cell(field.description or '')} |"


PAGES = {
    "CONFIG.md": config_page,
    "COMMANDS.md": commands_page,
    "MIGRATION.md": migration_page,
    "REQUESTS.md": requests_page,
    "WORKLOAD.md": workload_page,
}

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for page, text in PAGES.items():
        (FOLDER / page).write_text(text(), encoding="utf-8")
        print(f"docs/reference/{page}")
