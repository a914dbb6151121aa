"""The quickstart's files: a tokenizer and model that transformers loads, made once and found again."""

import os
from pathlib import Path
from typing import Any

import pytest

from engine.protocols.named_code import find
from engine.tasks import quickstart
from engine.tasks.arithmetic import ALPHABET, reward
from engine.tasks.dataset import Dataset
from engine.tasks.quickstart import Quickstart, prepare
from engine.tasks.tokenizer import END, PAD, save_character_tokenizer

TINY = Quickstart(layers=1, hidden_size=16, heads=2, train_prompts=40, validation_prompts=10, warmup_steps=6)


def test_the_tokenizer_is_loaded_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    size = save_character_tokenizer(tmp_path, "ab )-\n")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == size == 9
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)
    text = " a  b)-a\n a."
    ids = tokenizer.encode(text)
    assert len(ids) == len(text) and ids[-1] == tokenizer.unk_token_id
    assert tokenizer.decode(ids[:-1]) == text[:-1]
    ended = [*ids[:3], tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert tokenizer.decode(ended, skip_special_tokens=True) == " a "
    assert tokenizer.encode("a" + END) == [ids[1], tokenizer.eos_token_id]
    assert tokenizer.encode("") == []


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, quickstart.Prepared]:
    directory = tmp_path_factory.mktemp("quickstart")
    progress: list[tuple[float, str]] = []
    prepared = prepare(directory, TINY, lambda done, text: progress.append((done, text)))
    assert [done for done, _ in progress] == sorted(done for done, _ in progress) and progress[-1][0] == 1.0
    return directory, prepared


def test_a_made_model_generates(made: tuple[Path, quickstart.Prepared]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, prepared = made
    tokenizer = AutoTokenizer.from_pretrained(prepared.model_path)
    model = AutoModelForCausalLM.from_pretrained(prepared.model_path)
    assert model.config.model_type == "qwen2" and model.config.vocab_size == len(tokenizer) == len(ALPHABET) + 3
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert list(Path(prepared.model_path).glob("*.safetensors"))
    inputs = tokenizer("830-7=", return_tensors="pt")
    assert model.generate(inputs.input_ids, max_new_tokens=4).shape[1] > inputs.input_ids.shape[1]


def test_made_data_fit_the_model_and_the_reward(made: tuple[Path, quickstart.Prepared]) -> None:
    _, prepared = made
    training, held_out = Dataset.load(prepared.training_path), Dataset.load(prepared.validation_path)
    assert (len(training), len(held_out)) == (40, 10)
    assert set(training.prompt(0).text) <= set(ALPHABET) and "answer" in training.prompt(0).fields
    assert find(prepared.reward, None, "reward.function") is reward
    assert TINY.most_tokens == 142 and not prepared.reused


def test_a_second_call_makes_nothing(made: tuple[Path, quickstart.Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, prepared = made
    monkeypatch.setattr(Quickstart, "make", lambda *_: pytest.fail("made again"))
    before = sorted((p, p.stat().st_mtime_ns) for p in directory.rglob("*"))
    again = prepare(directory, TINY)
    assert again.reused and again.model_path == prepared.model_path and again.warm_up == prepared.warm_up
    assert sorted((p, p.stat().st_mtime_ns) for p in directory.rglob("*")) == before


def test_what_is_half_made_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Quickstart, workplace: Path, *others: object) -> None:
        (workplace / "train.jsonl").write_text("{}\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(Quickstart, "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, TINY)
    assert list(tmp_path.iterdir()) == []


def test_what_dead_processes_left_is_swept_and_what_the_living_make_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".making-left"
    (left / "model").mkdir(parents=True)
    os.utime(left, (0, 0))

    def make(_: Quickstart, workplace: Path, seed: int, progress: object) -> dict[str, Any]:
        assert not left.exists()
        if seed == 0:
            os.utime(workplace, (0, 0))
            prepare(tmp_path, TINY, seed=2)  # Another process, much later.
        return {"warm_up": {}}

    monkeypatch.setattr(Quickstart, "make", make)
    prepare(tmp_path, TINY)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"arithmetic-{TINY.key(seed)}" for seed in (0, 2))


def test_the_second_of_two_makers_takes_what_the_first_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def once(wanted: Quickstart, workplace: Path, *_: object) -> dict[str, Any]:
        calls.append(workplace.name)
        if len(calls) == 1:
            prepare(tmp_path, wanted)  # Another process, while this one is at work.
        return {"warm_up": {"by": workplace.name}}

    monkeypatch.setattr(Quickstart, "make", once)
    assert prepare(tmp_path, TINY).warm_up == {"by": calls[1]}
    assert len(calls) == 2 and len(list(tmp_path.iterdir())) == 1


def test_every_parameter_changes_the_key() -> None:
    assert Quickstart().key(2) != Quickstart().key(3)
    assert Quickstart().key(0) == Quickstart().key(0) != Quickstart(carelessness=0.1).key(0)
