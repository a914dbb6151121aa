"""Turns a YAML file and overrides into a `Config`, and a user's mistake into a `ConfigError` that says how to fix it.

Called by the CLI. It reads the configuration file, and imports the extensions that it names. It does not check that
data files exist or that rewards can be imported: `inputs.py` does. A pydantic error never leaves this module.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from engine.config.extensions import load_extensions_of
from engine.config.migration import exact_hint, loose_hint
from engine.config.paths import RUNS, absolute_paths
from engine.config.schema import Config
from engine.config.secrets import refuse_secrets
from engine.errors import ALIKE, ConfigError, suggestion
from engine.errors.redaction import shortened
from engine.section import FORMS, NAMED

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

# -- YAML --------------------------------------------------------------------------------------------------------------


MOST_BYTES = 1 << 20
"""Maximum size of a configuration file."""
MOST_NODES = 100_000
"""Maximum number of values in a document, with aliases expanded."""
MOST_CHARACTERS = 1 << 20
"""Maximum number of characters in all values, with aliases expanded."""
MOST_DEEP = 100
"""Maximum nesting, in levels."""


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-6` is a number, only true and false are booleans (`on` is text), a date is text, and no key
    repeats."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                reason = f"{shortened(key.value)!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] not in ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, field: str, value: str) -> Any:
    """Parse a document. `field` and `value` name its origin in errors. Raises: `ConfigError`."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _require_bounded(node, field, value)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or _reason(error)
        raise ConfigError(field, value, f"is not valid YAML: {where}{shortened(str(reason))}") from None


def _reason(error: Exception) -> str:
    """The reason without the value: the message of a plain ValueError repeats it."""
    if isinstance(error, RecursionError):
        return "values are nested too deeply to read"
    return str(error) if isinstance(error, yaml.YAMLError) else "a number that cannot be read"


def _require_bounded(root: yaml.Node, field: str, value: str) -> None:
    """Count the values of a document with its aliases expanded. It visits each node once.

    Raises: `ConfigError` if the document is too large, too deep, or contains itself.
    """
    sizes: dict[int, tuple[int, int]] = {}

    def size(node: yaml.Node, depth: int) -> tuple[int, int]:
        """(values, characters) of a node. A node that is met again while it is being counted contains itself."""
        if id(node) in sizes:
            return sizes[id(node)]
        if depth > MOST_DEEP:
            raise ConfigError(field, value, f"is more than {MOST_DEEP} levels deep", "flatten it")
        values, characters = 1, len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        sizes[id(node)] = (MOST_NODES + 1, 0)
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        items = node.value if isinstance(node, yaml.SequenceNode) else ()
        for inner in (*(part for pair in pairs for part in pair), *items):
            more = size(inner, depth + 1)
            values, characters = values + more[0], characters + more[1]
        if values > MOST_NODES or characters > MOST_CHARACTERS:
            law = f"has more than {MOST_NODES} values or {MOST_CHARACTERS} characters with its aliases written out"
            raise ConfigError(field, value, law, "write values out instead of aliases (&name, *name)")
        sizes[id(node)] = (values, characters)
        return sizes[id(node)]

    size(root, 0)


# -- files, overrides and errors ---------------------------------------------------------------------------------------


SHOWN = 8
"""Maximum number of other wrong fields that an error names."""


def load_config(
    path: str | Path, overrides: Sequence[str] = (), change: Callable[[dict[str, Any]], None] = lambda tree: None
) -> Config:
    """Read a YAML file, apply `path=value` overrides, and check everything. `change` edits the plain data before it is
    checked.

    Paths in the file are relative to its directory, those in overrides to the working directory.
    Raises: ConfigError, for a missing or malformed file too.
    """
    directory = os.path.dirname(os.path.abspath(path))
    tree = absolute_paths(_read(Path(path)), directory)
    apply_overrides(tree, overrides)
    change(tree)
    return _checked(tree, directory)


def parse_config(tree: Mapping[str, Any]) -> Config:
    """Make a Config from plain data, such as a record's header. Its extensions are imported first. Paths are relative
    to the working directory. Raises: ConfigError."""
    return _checked(absolute_paths(dict(tree), os.getcwd()), os.getcwd())


def _checked(tree: dict[str, Any], directory: str) -> Config:
    """`directory`: the default of `run.code_dir`, where modules and agent programs are."""
    refuse_secrets(tree)  # first, because the message of another error could repeat a secret
    run = {} if tree.get("run") is None else tree["run"]
    if isinstance(run, dict):
        defaults = {"dir": os.path.abspath(RUNS), "code_dir": directory}
        tree = {**tree, "run": defaults | run}
    load_extensions_of(tree)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise _first_of(error, tree) from None


def read_yaml(path: Path, field: str) -> Any:
    """Parse a file. `field`: names its origin in errors. Raises: `ConfigError`."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ConfigError(field, str(path), f"is larger than {MOST_BYTES} bytes", "give a configuration file")
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(field, str(path), "does not exist", _nearest_file(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(field, str(path), f"cannot be read: {error}") from None
    return parse_yaml(text, field, str(path))


def _read(path: Path) -> dict[str, Any]:
    tree = read_yaml(path, "config")
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        law = "has no sections"
        raise ConfigError("config", str(path), law, f"begin lines with section names: {', '.join(Config.model_fields)}")
    return tree


def _nearest_file(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    return suggestion(path.name, names, prefix=str(path).removesuffix(path.name), alike=ALIKE)


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Change plain data by `path=value` texts. Raises: `ConfigError`."""
    for override in overrides:
        _override(tree, override)


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError("--set", override, "must be path=value", "for example --set scheduler.train_batch_size=16")
    if len(keys) > MOST_DEEP:
        raise ConfigError("--set", override, f"has more than {MOST_DEEP} levels", "name a field of the configuration")
    if not text.strip():
        raise ConfigError("--set", override, "has no value", "give a value; null unsets the field")
    inner = tree
    for depth, key in enumerate(keys[:-1], start=1):
        if inner.get(key) is None:
            inner[key] = {}
        if not isinstance(inner[key], dict):
            raise ConfigError("--set", override, f"{'.'.join(keys[:depth])} is a value, not a section")
        inner = inner[key]
    inner[keys[-1]] = absolute_paths(parse_yaml(text, "--set", override), os.getcwd(), ".".join(keys))


def _first_of(error: ValidationError, tree: Mapping[str, Any]) -> ConfigError:
    """The first error, as a ConfigError that also names the paths of the others. `tree`: what was checked."""
    schema = _schema()
    found = error.errors(include_url=False)
    first, *others = (_of_fixed_list(one, tree, schema) or one for one in found)
    path = _path_of(first["loc"]) or "config"
    if first["type"] == "extra_forbidden":
        inside = (exact_hint(leaf) or loose_hint(leaf) for leaf in _leaves(first["input"], path))
        law, fix = "unknown key", next(filter(None, inside), "") or nearest_key(path)
    elif first["type"] == "missing":
        law, fix = "required", f"set it to {expected(path)}"
    else:
        law, fix = f"must be {expected(path)}", _example(path) or _as_named(first)
        info = dict(fields()).get(path) or _item_field(path)
        law += f" ({info.description.rstrip('.')})" if info is not None else ""
    wrong = sorted({_path_of(other["loc"]) for other in others} - {path})
    rest = ", ".join(shortened(other) for other in wrong[:SHOWN])
    rest += f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    value = None if law == "required" else first["input"]
    return ConfigError(path, value, law, "; ".join(filter(None, (fix, rest and f"also wrong: {rest}"))))


def _leaves(value: Any, path: str) -> Iterator[str]:
    """The dotted paths of the values in an unknown section."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _leaves(inner, f"{path}.{key}") if isinstance(inner, Mapping) else (f"{path}.{key}",)


def _of_fixed_list(error: "ErrorDetails", tree: Mapping[str, Any], schema: dict[str, Any]) -> "ErrorDetails | None":
    """The error of a whole list, from that of an item, if the number of items is fixed; None for other errors."""
    *above, item = error["loc"] or ("",)
    if not isinstance(item, int) or "prefixItems" not in _node_of(_path_of(tuple(above)), schema):
        return None
    value = reduce(lambda inner, part: inner[part], above, cast(Any, tree))
    return {**error, "loc": tuple(above), "type": "list_type", "input": value}


def _path_of(parts: tuple[int | str, ...]) -> str:
    """The dotted path, without pydantic's names of the types that a field may have, such as list[constrained-str]."""
    return ".".join(str(part) for part in parts if not re.search(r"[\[\]-]", str(part)))


def _item_field(path: str) -> Any:
    """The pydantic field of a section in a list, such as `reward.functions.0.name`; None for other paths."""
    model: Any = Config
    info: Any = None
    for part in path.split("."):
        if not part.isdigit():
            info = model.model_fields.get(part)
            inner = () if info is None else get_args(info.annotation) or (info.annotation,)
            model = next((kind for kind in inner if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)
    return info


def fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key, sections included, as (dotted path, pydantic field)."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        either = get_args(info.annotation) if get_origin(info.annotation) is UnionType else (info.annotation,)
        for kind in either:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from fields(kind, f"{prefix}{name}.")


def nearest_key(path: str) -> str:
    """The field that replaces this key of another system, else a similar key of the same section, else one that begins
    with it, else the same key of another section, else the section's keys."""
    if theirs := exact_hint(path):
        return theirs
    known = [name for name, _ in fields()]
    section, _, key = path.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    longer = [name for name in siblings if name.startswith(f"{key}_")]
    if longer:
        otherwise = f"did you mean {section}.{longer[0]}?"
    elif elsewhere:
        otherwise = f"did you mean {min(elsewhere, key=lambda name: name.count('.'))}?"
    elif theirs := loose_hint(path):
        otherwise = theirs
    else:
        otherwise = f"use one of {', '.join(siblings)}" if siblings else f"{section} must be {expected(section)}"
    return suggestion(key, siblings, otherwise, prefix=f"{section}." if section else "")


_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
    "object": "a mapping",
}
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} long",
    "maxLength": "at most {} long",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "maxProperties": "at most {} entries",
}


@cache
def _schema() -> dict[str, Any]:
    return Config.model_json_schema()


def expected(path: str) -> str:
    """The allowed values of a field in words: its type and its bounds."""
    schema = _schema()
    node = _node_of(path, schema)
    if "items" in node:
        node = {**node, "items": _resolved(node["items"], schema)}
    return " or ".join(_in_words(_resolved(option, schema)) for option in node.get("anyOf", [node]))


def _node_of(path: str, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a field."""
    node = schema
    for key in path.split("."):
        options = [_resolved(option, schema) for option in node.get("anyOf", [node])]
        inside = [option["properties"][key] for option in options if key in option.get("properties", {})]
        node = _resolved(inside[0] if inside else node.get("items") or node.get("additionalProperties") or {}, schema)
    return node


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a section that `node` refers to by name; else `node`."""
    found: dict[str, Any] = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    return found


def _in_words(node: Mapping[str, Any]) -> str:
    if "properties" in node:
        return f"a section with the keys {', '.join(node['properties'])}"
    if "const" in node or "enum" in node:
        choices = [str(value) for value in node.get("enum", [node.get("const")])]
        return f"one of {', '.join(choices)}" if len(choices) > 2 else " or ".join(choices)
    if node.get("pattern") in FORMS:
        return FORMS[node["pattern"]]
    bounds = [words.format(node[key]) for key, words in _BOUNDS.items() if key in node]
    if node.get("type") == "array":
        inner = node.get("prefixItems") or [node.get("items", {})]
        if "prefixItems" in node:
            return f"a list of {len(inner)} numbers"
        return f"a list{' of ' if bounds else ''}{' and '.join(bounds)}, each {_in_words(inner[0])}"
    bounds += [f"that matches {node['pattern']}"] if "pattern" in node else []
    return ", ".join([_KINDS.get(node.get("type", ""), "a value"), *bounds])


def _as_named(error: "ErrorDetails") -> str:
    """The fix for `module.name` and `./module.py:name`, where `module:name` is needed; empty for another error."""
    given, wanted = error["input"], error.get("ctx", {}).get("pattern")
    if wanted != NAMED or not isinstance(given, str):
        return ""
    file, _, name = given.rpartition(":" if ":" in given else ".")
    named = f"{file.removesuffix('.py').removeprefix('./').replace('/', '.')}:{name}"
    return f"did you mean {named}?" if re.fullmatch(NAMED, named) else ""


def _example(path: str) -> str:
    info = dict(fields()).get(path)
    simple = info is not None and isinstance(info.default, str | int | float | bool | tuple)
    return f"the default is {info.default!r}" if simple and info is not None else ""
