"""Makes Python's cyclic garbage collection rare.

A command makes it rare while it runs, a replica or trainer while it loads, the scheduler and the trajectory store for
good. By default, Python traverses all objects again and again while they grow in number. Imports of torch and
transformers create hundreds of thousands, and a quarter of their processor time is this traversal. Must never turn
collection off: cycles can hold tensors.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def collect_rarely(objects: int = 200_000) -> None:
    """Make collection rare in this process: the first one comes after `objects` new objects."""
    gc.set_threshold(objects, 20, 100)


@contextmanager
def rare_collection() -> Iterator[None]:
    """Make collection rare while a process loads."""
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*before)


def freeze_objects() -> None:
    """Collect once, and exclude all existing objects from later collections.

    For a process that has loaded what it needs: modules, models and tokenizers live as long as it does, and the
    scheduler's state has up to millions of small objects and no cycles. A full collection would block decisions, for
    half a second at 300 000 open groups.
    """
    gc.collect()
    gc.freeze()
