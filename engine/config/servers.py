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
            law = f"rollout.backend {backend} asks no servers"
            raise ConfigError("rollout.urls", list(urls), law, "leave them out, or rollout.backend: openai")
        return None
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                "rollout.urls", url, "must be an address with http:// or https://", "http://127.0.0.1:8000"
            )
    if not urls or len({url.rstrip("/").removesuffix("/v1") for url in urls}) != len(urls):
        law = "the openai backend needs the addresses of its servers, each once"
        raise ConfigError("rollout.urls", list(urls), law, "['http://127.0.0.1:8000'] would hold")
    if replicas not in (None, len(urls)):
        law = f"rollout.urls names {len(urls)} servers, each of them one replica"
        raise ConfigError("rollout.replicas", replicas, law, f"{len(urls)} would hold, or leave it out")
    if weights_dir is None:
        law = "the servers must be given new weights"
        raise ConfigError("rollout.weights_dir", None, law, "a directory that they read under the same path")
    return len(urls)
