"""The weights store: published versions until they are retired, and the newest trained weights."""

import pytest

from engine.errors import EngineError
from engine.storage.weights import Trained, WeightsStore


def test_a_version_is_held_from_its_publication_until_it_is_retired() -> None:
    store = WeightsStore()
    assert store.newest == 0
    with pytest.raises(EngineError, match="does not hold version 2; it holds none"):
        store.get(2)
    store.put(1, "one")
    store.put(2, "two")
    store.put(2, "two again")
    assert (store.newest, store.get(1), store.get(2)) == (2, "one", "two again")
    with pytest.raises(EngineError, match="version 1 cannot be published after version 2"):
        store.put(1, "late")
    store.retire(1)
    store.retire(1)
    with pytest.raises(EngineError, match="does not hold version 1; it holds version 2"):
        store.get(1)


def test_trained_weights_replace_the_earlier_ones_and_are_no_version() -> None:
    store = WeightsStore()
    with pytest.raises(EngineError, match="does not hold the weights after 3 train steps; it holds none"):
        store.get(Trained(3))
    store.put(Trained(3), "three")
    store.put(Trained(4), "four")
    assert (store.get(Trained(4)), store.newest) == ("four", 0)
    with pytest.raises(EngineError, match="the weights after 3 train steps; it holds the weights after 4 train steps"):
        store.get(Trained(3))
