"""`trainer.compile` changes nothing but the speed: gradients and log-probs are those of plain layers, and rows of new
lengths are not compiled again."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from test_packed_rows import WAYS, differ, gradient_of, model_of, policy_of, prepared, uneven
from torch._dynamo.utils import counters

from engine.training.gradients import Policy, checkpoint_layers, compile_layers
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import TrajectoryGroup

Make = Callable[..., TrajectoryGroup]


@pytest.fixture
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend of torch.compile: `eager` finds the same graphs and shapes, but generates no code."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.long)], indirect=True)
def test_compiled_layers_give_the_same_results_and_are_compiled_once(group: Make) -> None:
    def policy(choice: bool) -> Policy:
        model = model_of("llama")
        compile_layers(model, TrainerSettings(compile=choice))
        assert checkpoint_layers(model) == 2
        return policy_of(model, compile=choice, **WAYS["shared"])

    plain, compiled = policy(False), policy(True)
    samples = prepared(uneven(group), plain.settings)
    assert differ(gradient_of(plain, samples), gradient_of(compiled, samples)) < 1e-6
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= 5, "both layers have the same code"
    for some in (samples[2:], samples[:3], samples[1:6]):
        assert differ(gradient_of(plain, some), gradient_of(compiled, some)) < 1e-6
    assert counters["stats"]["unique_graphs"] == graphs, "other lengths are not compiled again"
    for mine, expected in zip(compiled.score(samples), plain.score(samples), strict=True):
        assert torch.allclose(mine, expected, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 2 * graphs
