"""From a YAML file and overrides to a `Config`; from what a user got wrong to a `ConfigError` that says how to mend it.

Called by the CLI. Reads the configuration file, and imports the extensions that it names: whether data exist and
rewards import is found out by those who use them. A pydantic or YAML error never leaves this module.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from engine.config.extensions import load_extensions_of
from engine.config.schema import Config
from engine.config.secrets import shown
from engine.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, write `path=value` overrides over it, and check everything.

    Raises: ConfigError, for a missing or malformed file too.
    """
    tree = _read(Path(path))
    for override in overrides:
        _override(tree, override)
    run = tree.get("run")
    if isinstance(run, dict) and run.get("extensions"):
        run.setdefault("extensions_dir", str(Path(path).resolve().parent))
    return parse_config(tree)


def parse_config(tree: Mapping[str, Any]) -> Config:
    """A Config from plain data, e.g. of a record's header, once its extensions are imported. Raises: ConfigError."""
    load_extensions_of(tree)
    try:
        # An empty section (`validation:` with nothing under it) is one with all its defaults.
        return Config.model_validate({key: {} if value is None else value for key, value in tree.items()})
    except ValidationError as error:
        raise _first_of(error) from None


class _Loader(yaml.SafeLoader):
    """YAML where `1e-6` is a number, `on` is text (only true and false are not), and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse_yaml(text: str, field: str, value: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or error
        raise ConfigError(field, value, f"not YAML: {where}{reason}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("config", str(path), "no such file", _nearest_file(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"cannot be read: {error}") from None
    tree = _parse_yaml(text, "config", str(path))
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        law = "must hold sections by name"
        raise ConfigError("config", str(path), law, f"one of {', '.join(Config.model_fields)} at the start of a line")
    return tree


def _nearest_file(path: Path) -> str:
    there = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, there, n=1, cutoff=0.5)
    return f"did you mean {path.parent / near[0]}?" if near else ""


def _override(tree: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError("--set", override, "must read path=value", "for example --set scheduler.train_batch_size=16")
    inner = tree
    for depth, key in enumerate(keys[:-1], start=1):
        if inner.get(key) is None:
            inner[key] = {}
        if not isinstance(inner[key], dict):
            raise ConfigError("--set", override, f"{'.'.join(keys[:depth])} is a value, not a section")
        inner = inner[key]
    inner[keys[-1]] = _parse_yaml(text, "--set", override)


def _first_of(error: ValidationError) -> ConfigError:
    """The first thing wrong, as a ConfigError; the paths of the others are named with it."""
    first, *others = error.errors(include_url=False, include_context=False)
    path = ".".join(str(part) for part in first["loc"]) or "config"
    if first["type"] == "extra_forbidden":
        law, fix = "unknown key", _nearest_key(path)
    elif first["type"] == "missing":
        law, fix = "required", expected(path)
    else:
        law, fix = f"must be {expected(path)}", _example(path)
        law += f" ({info.description})" if (info := dict(fields()).get(path)) is not None else ""
    rest = ", ".join(sorted({".".join(str(part) for part in e["loc"]) for e in others} - {path}))
    return ConfigError(
        path,
        None if law == "required" else shown(path, first["input"]),
        law,
        fix + (f" (also wrong: {rest})" if rest else ""),
    )


def fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key there is, sections included, as (dotted path, pydantic field)."""
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields(info.annotation, f"{prefix}{name}.")


def _nearest_key(path: str) -> str:
    """The nearest in the same section if one is near; else anywhere: a key in the wrong section finds its own."""
    known = [name for name, _ in fields()]
    section, _, key = path.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near:
        return f"the nearest known key is {f'{section}.' if section else ''}{near[0]}"
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"it is known as {elsewhere[0]}"
    return f"known here: {', '.join(siblings) or expected(section)}"


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
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} long",
    "maxItems": "at most {} of them",
}


def expected(path: str) -> str:
    """What would hold for a field, in words: its kind and its bounds."""
    schema = Config.model_json_schema()
    node = schema
    for key in path.split("."):
        node = node.get("properties", {}).get(key) or node.get("items") or {}
        node = _resolved(node, schema)
    if "items" in node:
        node = {**node, "items": _resolved(node["items"], schema)}
    return " or ".join(_in_words(option) for option in node.get("anyOf", [node]))


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """A section that is referred to by name, itself."""
    found: dict[str, Any] = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    return found


def _in_words(node: Mapping[str, Any]) -> str:
    if "properties" in node:
        return f"a section with the keys {', '.join(node['properties'])}"
    if "const" in node or "enum" in node:
        return " or ".join(str(value) for value in node.get("enum", [node.get("const")]))
    if node.get("type") == "array":
        inner = node.get("prefixItems") or [node.get("items", {})]
        return f"a list of {len(inner)} numbers" if "prefixItems" in node else f"a list, each {_in_words(inner[0])}"
    bounds = [words.format(node[key]) for key, words in _BOUNDS.items() if key in node]
    return ", ".join([_KINDS.get(node.get("type", ""), "a value"), *bounds])


def _example(path: str) -> str:
    info = dict(fields()).get(path)
    simple = info is not None and isinstance(info.default, str | int | float | bool | tuple)
    return f"the default is {info.default!r}" if simple and info is not None else ""
