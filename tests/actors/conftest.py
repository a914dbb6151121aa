"""One local Ray cluster for all tests of the actors, ended with the session."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray

    from engine.actors.run import connect

    connect()
    yield
    ray.shutdown()
