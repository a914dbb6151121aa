"""The laws of `rollout.backend: openai`: which servers, how many, and where they find new weights.

Called by `schema.py`, which describes the fields. Asks no server: `rollout.openai` does that at start.
"""

from collections.abc import Sequence

from engine.errors import ConfigError


def replicas_of(backend: str, urls: Sequence[str], replicas: int | None, weights_dir: str | None) -> int | None:
    """One replica for each server; None where another backend has no servers. `replicas`: as given, or None.

    Raises: `ConfigError` for servers that are missing, doubled, miscounted, or without a place for their weights.
    """
    if backend != "openai":
        if urls:
            law = f"only the openai backend uses servers, and rollout.backend is {backend}"
            raise ConfigError("rollout.urls", list(urls), law, "remove them, or use rollout.backend: openai")
        return None
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                "rollout.urls", url, "must start with http:// or https://", "for example http://127.0.0.1:8000"
            )
    if not urls or len({url.rstrip("/").removesuffix("/v1") for url in urls}) != len(urls):
        law = "must list the address of every server once"
        raise ConfigError("rollout.urls", list(urls), law, "for example ['http://127.0.0.1:8000']")
    if replicas not in (None, len(urls)):
        law = f"must be {len(urls)}, the number of servers in rollout.urls"
        raise ConfigError("rollout.replicas", replicas, law, f"use {len(urls)}, or remove it")
    if weights_dir is None:
        law = "the servers read new weights from this directory"
        raise ConfigError("rollout.weights_dir", None, law, "set a directory that they see under the same path")
    return len(urls)
