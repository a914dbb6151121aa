"""A tiny model on disk and short ways to make batches for the training tests. No downloads, no sleeps, all seeded."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_ranks import SETTINGS, ForkServer, LocalNodes, OfRanks, starts_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.protocols import Batch
from engine.training.model_trainer import ModelTrainer
from engine.training.ranked_trainer import RankedTrainer
from engine.training.trainer_settings import TrainerSettings
from engine.trajectory import Prompt, Span, Trajectory, TrajectoryGroup

VOCABULARY = 16

MakeGroup = Callable[..., TrajectoryGroup]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """These models are too small to share; threads that wait for a busy core make the tests slower by far."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer Llama of random weights with tied embeddings, and a word-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    words_to_ids = Tokenizer(WordLevel(words, unk_token="w0"))
    words_to_ids.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words_to_ids, eos_token="w1").save_pretrained(path)
    return str(path)


NO_NUMBER = 15
"""The token that `flawed_path` computes nothing finite for, as if its activations overflowed."""


@pytest.fixture(scope="session")
def flawed_path(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with an input embedding of NaN: a trajectory with that token among its inputs, and no other, has
    log-probs that are not finite."""
    path = tmp_path_factory.mktemp("flawed-model")
    config = LlamaConfig.from_pretrained(model_path, tie_word_embeddings=False)
    torch.manual_seed(7)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[NO_NUMBER] = torch.nan
    model.save_pretrained(path)
    return str(path)


def make_flawed_batch(step: int) -> Batch:
    """Two groups of different rewards. The second trajectory of the first cannot be computed on `flawed_path`."""
    responses = [[5, 6, 7], [8, NO_NUMBER, 9, 5], [6, 6, 8, 9, 10], [11]]
    groups = [make_group(0, [1.0, 0.0, 0.5, 0.2], responses=responses)]
    return make_batch(step, [*groups, make_group(1, [0.0, 1.0], responses=[[7, 8, 9], [10, 11]])])


def make_group(
    number: int,
    rewards: Sequence[float],
    *,
    prompt: Sequence[int] = (2, 3, 4),
    responses: Sequence[Sequence[int]] | None = None,
    behavior: float = -2.5,
) -> TrajectoryGroup:
    """A finished group. Responses differ in length and content unless given; behavior log-probs are all equal."""
    trajectories = []
    for index, reward in enumerate(rewards):
        if responses is None:
            tokens = [(5 + number + index + place * (index + 1)) % VOCABULARY for place in range(3 + 2 * index)]
        else:
            tokens = list(responses[index])
        trajectory = Trajectory(prompt_ids=list(prompt), reward=reward, finish_reason="stop")
        trajectory.extend(tokens, [behavior] * len(tokens), [Span(0, len(tokens), 0)])
        trajectories.append(trajectory)
    return TrajectoryGroup(group=number, prompt=Prompt(row=number, text=""), trajectories=trajectories)


def make_batch(step: int, groups: Sequence[TrajectoryGroup]) -> Batch:
    return Batch(step=step, groups=list(groups), staleness=[0] * len(groups))


@pytest.fixture(scope="session")
def group() -> MakeGroup:
    return make_group


@pytest.fixture
def batch() -> Callable[[int, int], Batch]:
    """A batch of `size` groups of four trajectories, of different lengths and rewards; another one each step."""

    def make(step: int, size: int = 4) -> Batch:
        groups = [make_group(step * size + index, [1.0, 0.0, 0.5, 0.0]) for index in range(size)]
        return make_batch(step, groups)

    return make


@pytest.fixture
def flawed_batch() -> Callable[[int], Batch]:
    return make_flawed_batch


@pytest.fixture
def as_batch() -> Callable[[int, Sequence[TrajectoryGroup]], Batch]:
    return make_batch


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


@pytest.fixture
def of_ranks(server: ForkServer, model_path: str) -> OfRanks:
    """A trainer of so many ranks, which fail as the files of the folder `faults` say. Several `nodes` are in truth this
    machine, too, but find each other by TCP."""

    @contextmanager
    def started(
        count: int,
        path: str = model_path,
        faults: Path | None = None,
        nodes: int = 1,
        in_turns: bool = False,
        **changes: Any,
    ) -> Iterator[Any]:
        settings = TrainerSettings(**{**SETTINGS, "ranks": count, **changes})
        if count == 1:
            yield ModelTrainer(path, settings)
            return
        with starts_of(server, faults):
            own = LocalNodes(nodes) if nodes > 1 else None
            trainer = RankedTrainer(path, settings, nodes=own, in_turns=in_turns)
        with closing(trainer):
            yield trainer

    return started
