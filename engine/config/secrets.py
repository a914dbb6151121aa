"""What of a configuration would be a secret in plain sight: it is refused before it reaches a record, a log or a sink.

Called by `schema.py` and `loading.py`. Keys and passwords come from the environment: `rollout.api_key_env` names the
variable of the servers' key, Weights & Biases reads `WANDB_API_KEY`, MLflow `MLFLOW_TRACKING_USERNAME` and
`MLFLOW_TRACKING_PASSWORD`, vLLM and the hub `HF_TOKEN`; agents inherit the environment of the run. A value that is
refused here is not repeated.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from engine.errors import ConfigError

HIDDEN = "(not shown)"
SECRET = re.compile(r"(^|[_.-])(api[_-]?key|token|password|passwd|secret|credentials?)$", re.IGNORECASE)
"""How fields and parameters are called that hold a secret."""
UNSHOWN = ("rollout.api_key_env",)
"""Fields in whose place a user may have put the secret itself."""


def refuse_secrets(tree: Mapping[str, Any]) -> None:
    """Raises: `ConfigError` for the first text of a configuration that holds a secret; without its value."""
    for path, name, text in _texts(tree):
        if SECRET.search(name) or (path == "agent.command" and SECRET.search(text.lstrip("-").partition("=")[0])):
            raise ConfigError(path, HIDDEN, "a secret, which the record would keep", "give it through the environment")
        if "://" in text and (what := _in_address(text)):
            law = f"an address with {what} in it, which the record would keep"
            raise ConfigError(path, HIDDEN, law, "give it through the environment (docs/OPERATIONS.md)")


def shown(path: str, value: Any) -> Any:
    """A value as a complaint about a field may repeat it."""
    hides = path in UNSHOWN or SECRET.search(path) or (isinstance(value, str) and "://" in value and _in_address(value))
    return HIDDEN if hides else value


def _in_address(text: str) -> str:
    """What of an address is a secret; nothing if nothing is."""
    try:
        address = urlsplit(text)
        parameters = parse_qsl(address.query)
    except ValueError:
        return ""
    if address.password is not None or ("@" in address.netloc and address.scheme in ("http", "https")):
        return "a user or password"
    named = [name for name, _ in parameters if SECRET.search(name)]
    return f"the parameter {named[0]}" if named else ""


def _texts(tree: Any, path: str = "", name: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, name of the innermost field, text) of every text there is."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _texts(value, f"{path}.{key}" if path else str(key), str(key))
    elif isinstance(tree, str):
        yield path, name, tree
    elif isinstance(tree, Sequence):
        for value in tree:
            yield from _texts(value, path, name)
