"""From the text of a YAML document to plain data: strictly, safely, and of a bounded size.

Called by `loading.py` for configuration files and for the values of overrides. A YAML error never leaves this module.
"""

import re
from typing import Any

import yaml

from engine.errors import ConfigError
from engine.redaction import shortened

MOST_BYTES = 1 << 20
"""Of a configuration file."""
MOST_NODES = 100_000
"""Values of a document, with each alias counted as all that it stands for."""
MOST_CHARACTERS = 1 << 20
"""Of all these values."""
MOST_DEEP = 100
"""Levels of values within values."""


class _Loader(yaml.SafeLoader):
    """YAML where `1e-6` is a number, `on` is text (only true and false are not), and a key given twice is an error."""

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
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, field: str, value: str) -> Any:
    """Plain data. `field` and `value` say where the text is from. Raises: `ConfigError`."""
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
        raise ConfigError(field, value, f"not YAML: {where}{shortened(str(reason))}") from None


def _reason(error: Exception) -> str:
    """A plain ValueError repeats the value that it cannot read."""
    if isinstance(error, RecursionError):
        return "values within values within values, too deep to read"
    return str(error) if isinstance(error, yaml.YAMLError) else "a number or date that cannot be read"


def _require_bounded(root: yaml.Node, field: str, value: str) -> None:
    """Count what a document holds once its aliases are written out, each node of the text looked at once.

    Raises: `ConfigError` for a document that is too large, too deep, or endless.
    """
    sizes: dict[int, tuple[int, int]] = {}

    def size(node: yaml.Node, depth: int) -> tuple[int, int]:
        """(values, characters) of a node; a node that is being counted already holds itself."""
        if id(node) in sizes:
            return sizes[id(node)]
        if depth > MOST_DEEP:
            raise ConfigError(field, value, f"must hold values at most {MOST_DEEP} levels deep", "flatten it")
        values, characters = 1, len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        sizes[id(node)] = (MOST_NODES + 1, 0)
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        items = node.value if isinstance(node, yaml.SequenceNode) else ()
        for inner in (*(part for pair in pairs for part in pair), *items):
            more = size(inner, depth + 1)
            values, characters = values + more[0], characters + more[1]
        if values > MOST_NODES or characters > MOST_CHARACTERS:
            law = f"must hold at most {MOST_NODES} values and {MOST_CHARACTERS} characters, its aliases written out"
            raise ConfigError(field, value, law, "write values out instead of aliases (&name, *name)")
        sizes[id(node)] = (values, characters)
        return sizes[id(node)]

    size(root, 0)
