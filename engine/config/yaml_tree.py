"""Parses a YAML document into plain data: strictly, safely, and with limits on its size.

Called by `loading.py` for configuration files and for the values of overrides. It must never raise a YAML error.
"""

import re
from typing import Any

import yaml

from engine.errors import ConfigError
from engine.redaction import shortened

MOST_BYTES = 1 << 20
"""Maximum size of a configuration file."""
MOST_NODES = 100_000
"""Maximum number of values in a document, with aliases expanded."""
MOST_CHARACTERS = 1 << 20
"""Maximum number of characters in all values, with aliases expanded."""
MOST_DEEP = 100
"""Maximum nesting, in levels."""


class _Loader(yaml.SafeLoader):
    """YAML in which `1e-6` is a number, only true and false are booleans (`on` is text), and no key repeats."""

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
    return str(error) if isinstance(error, yaml.YAMLError) else "a number or date that cannot be read"


def _require_bounded(root: yaml.Node, field: str, value: str) -> None:
    """Count the values of a document with its aliases expanded. It visits each node once.

    Raises: `ConfigError` if the document is too large, too deep, or contains itself.
    """
    sizes: dict[int, tuple[int, int]] = {}

    def size(node: yaml.Node, depth: int) -> tuple[int, int]:
        """(values, characters) of a node. A node found again while it is counted contains itself."""
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
