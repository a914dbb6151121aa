"""A generator and a trainer that the configuration names: what `engine check` says of them, and runs in one process."""

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chat_tokenizers import save_chat_model, write_rows
from http_service_thread import EXAMPLES, http_service

from engine.cli import main
from engine.config import check_config, extensions, load_config
from engine.config.custom_classes import OF_GENERATORS
from engine.errors import ConfigError, EngineError
from engine.plans import state_rehearsal
from engine.plans.backend_rehearsal import rehearse_backends
from engine.plans.configured_plan import plan_of
from engine.policies import state_registry
from engine.runtime.local.run import run_plan
from engine.scheduling.settings import MAX_STEPS
from engine.training.named_tensors import require_finite, require_named_tensors
from engine.workers.plan import Resumption

Capture = pytest.CaptureFixture[str]

MODULE = '''
import abc
import json
import signal
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from engine.runtime.local import SimpleGenerator, response


class Generator(SimpleGenerator):
    """Answers with the same tokens, under the version that is installed."""

    def __init__(self, setup, answer):
        super().__init__()
        self.setup, self.answer = setup, answer

    async def sample(self, work, weights, version):
        assert (weights is None) == (version == 0)
        limit = self.setup.sampling[work.validation_set].max_tokens
        ids = self.setup.prompt_ids(work.prompt)
        return [response(self.answer[:limit], prompt_ids=ids, version=version) for _ in range(work.samples)]


class Trainer:
    """Adds 1 to the weights of a model; knows how many steps are in them."""

    def __init__(self, setup, shift=1.0):
        self.model, self.shift, self.steps = AutoModelForCausalLM.from_pretrained(setup.model), shift, 0

    def train(self, batch):
        assert batch.step == self.steps
        self.steps += 1
        with torch.no_grad():
            for value in self.model.parameters():
                value.add_(self.shift)
        return {"steps": float(self.steps)}

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def save(self, directory, step):
        assert step == self.steps or step == 1
        Path(directory, "steps.json").write_text(json.dumps(self.steps))

    def load(self, directory):
        self.steps = json.loads(Path(directory, "steps.json").read_text())


class Unbound:
    def __init__(self, setup):
        raise AssertionError("engine check only reads the class")


class NoWeights(Unbound):
    def train(self, batch): ...
    def save(self, directory, step): ...
    def load(self, directory): ...


class ShortTrain(NoWeights):
    def train(self): ...
    def weights(self): ...


class AsyncSave(NoWeights):
    def weights(self): ...
    async def save(self, directory, step): ...


class Deaf(SimpleGenerator):
    def __init__(self, setup): ...
    def pause(self, mode): ...


class Listed(Trainer):
    def weights(self):
        return list(self.model.parameters())


class Doubled(Trainer):
    def weights(self):
        return {name: value.double() for name, value in super().weights().items()}


class Nameless(Trainer):
    def weights(self):
        return dict(enumerate(self.model.parameters()))


class Renamed(Trainer):
    def weights(self):
        return {f"module.{name}": value for name, value in super().weights().items()}


class Headed(Trainer):
    def weights(self):
        return super().weights() | {"value_head.weight": torch.ones(2)}


class Broken(Trainer):
    def weights(self):
        weights = super().weights()
        next(iter(weights.values())).view(-1)[-1] = float("nan")
        return weights


class Talkative(Trainer):
    def train(self, batch):
        return super().train(batch) | {"note": "fine", 3: 1.0}


class Unsaved(Trainer):
    def save(self, directory, step): ...


class Counted(Trainer):
    def train(self, batch):
        return len(batch.groups)


class Bare(Trainer, abc.ABC):
    @abc.abstractmethod
    def optimizer(self): ...


class Interrupting(Trainer):
    def __init__(self, *given):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


class Quitter(Trainer):
    def train(self, batch):
        raise SystemExit(3)


class Short(Generator):
    async def sample(self, work, weights, version):
        return [*await super().sample(work, weights, version)][1:]


class Promptless(Generator):
    async def sample(self, work, weights, version):
        return [response(self.answer, version=version) for _ in range(work.samples)]


class Foreign(Generator):
    async def sample(self, work, weights, version):
        found = await super().sample(work, weights, version)
        found[1].token_ids[0] = 1_000_000
        return found


class Mute(Generator):
    async def sample(self, work, weights, version):
        raise LookupError("no such service")


a_function = lambda setup: None


def score(prompt, trajectory):
    return 0.25 if trajectory.text and trajectory.reward is None else 9.0
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chatml", "chatml", context=128)


@pytest.fixture(autouse=True)
def beside_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a module `mine` of its own, and the modules of the examples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(MODULE, encoding="utf-8")
    yield
    for name in ("mine", "http_generator", "http_service", "huggingface_trainer"):
        sys.modules.pop(name, None)


def configured(model: str, **changes: Any) -> str:
    """The file of a run of four steps on eight prompts. `changes` of a section are merged into it."""
    rows = [{"prompt": f"{n}+2?", "answer": "5"} for n in range(8)]
    tree: dict[str, dict[str, Any]] = {
        "run": {"max_steps": 4, "epochs": None, "dir": "runs"},
        "model": {"path": model},
        "data": {"path": write_rows(Path("rows.jsonl"), *rows)},
        "reward": {"function": "engine.tasks.rewards:exact_match"},
        "scheduler": {"train_batch_size": 2, "samples_per_prompt": 2, "max_staleness_steps": 1},
        "rollout": {"max_tokens": 4, "device": "cpu", "replicas": 1, "slots": 2},
        "trainer": {"device": "cpu", "checkpoint_every": 2, "threads": 1},
        "validation": {"at_start": False, "at_end": False},
    }
    for name, fields in changes.items():
        tree[name] = tree.get(name, {}) | fields
    Path("run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return "run.yaml"


OWN = {"backend": "mine:Generator", "arguments": {"answer": [3, 4]}}


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("trainer", {"backend": "mine:NoWeights"}, "lacks the method weights; define def weights(self) -> Any"),
        ("trainer", {"backend": "mine:ShortTrain"}, "define def train(self, batch: Batch) -> "),
        ("trainer", {"backend": "mine:AsyncSave"}, "its save() is a coroutine function, but it must block"),
        ("trainer", {"backend": "mine:a_function"}, "is of type function, not a class"),
        ("trainer", {"backend": "mine:Bare"}, "is abstract: it lacks the method optimizer"),
        ("trainer", {"backend": "mine:Trainr"}, "did you mean Trainer?"),
        ("trainer", {"backend": "mine:Trainer", "arguments": {"shft": 2}}, "its arguments are now shift"),
        ("trainer", {"backend": "mine:Trainer", "learning_rate": 0.1}, "trainer.learning_rate 0.1 is not read"),
        ("trainer", {"backend": "mine:Trainer", "lora": {"rank": 2}}, "is not read with trainer.backend mine:Trainer"),
        ("trainer", {"arguments": {"shift": 2}}, "only a custom trainer has arguments"),
        ("rollout", {"backend": "mine:Trainer"}, "lacks the methods generate, abort, truncate, pause"),
        ("rollout", {"backend": "mine:Deaf"}, "define async def pause(self, mode: str) -> None"),
        ("rollout", {"backend": "mine:Generator"}, "missing a required argument: 'answer'"),
        ("rollout", {"backend": "pytorch"}, "must be torch, vllm, openai, sglang, or module:Class"),
        ("rollout", {**OWN, "context": 64}, "only the torch backend uses it"),
    ],
)
def test_check_names_what_a_class_lacks_with_the_expected_signature(
    section: str, fields: dict[str, Any], said: str, model: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(configured(model, **{section: fields})))
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{section}.")


def test_a_simple_generator_whose_sample_is_no_coroutine_is_refused(model: str) -> None:
    with open("mine.py", "a", encoding="utf-8") as module:
        module.write("class Blocking(SimpleGenerator):\n    def sample(self, work, weights, version): return []\n")
    with pytest.raises(ConfigError, match=r"Blocking must define: async def sample\(self, work, weights, version"):
        check_config(load_config(configured(model, rollout={"backend": "mine:Blocking"})))


def test_a_generator_that_a_limit_by_the_kv_cache_cannot_ask_is_refused(model: str) -> None:
    with open("mine.py", "a", encoding="utf-8") as module:
        module.write("class Measuring(Generator):\n    def cache_used(self): return 0.5\n")

    def checked(backend: str) -> list[str]:
        adaptive = {"policies": {"concurrency": "kv-cache"}}
        return check_config(load_config(configured(model, rollout={**OWN, "backend": backend}, scheduler=adaptive)))

    assert checked("mine:Measuring")
    with pytest.raises(ConfigError, match=r"lacks the method cache_used; define def cache_used\(self\) -> float"):
        checked("mine:Generator")


def test_an_agent_with_a_custom_generator_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="is set too, but a custom generator runs whole rollouts"):
        load_config(configured(model, rollout=OWN, agent={"rollout": "mine:a_function"}))


def test_check_rehearses_the_examples_on_one_group(model: str, capsys: Capture) -> None:
    with http_service() as url:
        config = configured(
            model,
            run={"code_dir": str(EXAMPLES)},
            rollout={
                "backend": "http_generator:HttpGenerator",
                "arguments": {"url": url, "weights_dir": str(Path.cwd() / "weights")},
            },
            trainer={"backend": "huggingface_trainer:HuggingFaceTrainer"},
        )
        assert main(["check", config]) == 0
    said = capsys.readouterr().out
    assert "ok: rollout.backend http_generator:HttpGenerator generates a group of " in said
    assert "HuggingFaceTrainer trains one group: 3 metrics, weights, a checkpoint" in said
    assert "HttpGenerator installs the weights of huggingface_trainer:HuggingFaceTrainer" in said
    assert list(Path("weights").iterdir()) == []


@pytest.mark.parametrize(
    ("section", "fields", "said"),
    [
        ("trainer", {"backend": "mine:Listed"}, "it returned a list"),
        ("trainer", {"backend": "mine:Nameless"}, "a name is 0, not a text"),
        ("trainer", {"backend": "mine:Doubled"}, "is a float64 tensor, not a dense one of float32, bfloat16, float16"),
        ("trainer", {"backend": "mine:Renamed"}, "model.layers.0.input_layernorm.weight is missing"),
        ("trainer", {"backend": "mine:Headed"}, "value_head.weight is not a tensor of the model"),
        ("trainer", {"backend": "mine:Broken"}, "model.embed_tokens.weight has a value that is not finite"),
        ("trainer", {"backend": "mine:Unsaved"}, "save() wrote no file into the directory that it was given"),
        (
            "trainer",
            {"backend": "mine:Quitter"},
            "cannot train a group: RuntimeError: Quitter.train raised SystemExit: 3 (",
        ),
        ("trainer", {"backend": "mine:Counted"}, "train() must return a dict of metrics or None, not int"),
        ("trainer", {"backend": "mine:Interrupting"}, "cannot be made: ValueError: signal only works in main thread"),
        ("rollout", {**OWN, "backend": "mine:Short"}, "generate() returned 1 trajectories, not the 2 asked for"),
        ("rollout", {**OWN, "backend": "mine:Promptless"}, "trajectory 0 has no prompt_ids; use setup.prompt_ids(work"),
        ("rollout", {**OWN, "backend": "mine:Foreign"}, "trajectory 1 has the token id 1000000, but the model has"),
        ("rollout", {**OWN, "backend": "mine:Mute"}, "LookupError: no such service (mine.py:"),
    ],
)
def test_the_rehearsal_names_what_a_run_would_refuse(
    section: str, fields: dict[str, Any], said: str, model: str, capsys: Capture
) -> None:
    assert main(["check", configured(model, **{section: fields})]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert f"{section}.backend" in message


def test_the_rehearsal_of_two_classes_refuses_weights_that_are_not_finite(model: str, capsys: Capture) -> None:
    assert main(["check", configured(model, rollout=OWN, trainer={"backend": "mine:Broken"})]) == 2
    assert "weights() must return finite tensors; model.embed_tokens.weight has" in capsys.readouterr().err


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(value: float) -> None:
    weights = {"counts": torch.arange(3), "first": torch.ones(2, 2), "last": torch.tensor([0.0, value, 1.0])}
    with pytest.raises(EngineError, match="last has a value that is not finite"):
        require_finite(weights)


def test_a_tensor_outside_the_model_is_refused_unless_it_is_a_tied_one() -> None:
    ours, embedding = {"embed.weight": (2, 2)}, torch.rand(2, 2)
    require_named_tensors(ours, {"embed.weight": embedding, "lm_head.weight": embedding.clone()})
    with pytest.raises(EngineError, match=r"lm_head.* is not a tensor of the model"):
        require_named_tensors(ours, {"embed.weight": embedding, "lm_head.weight": embedding + 1})


def test_the_rehearsal_names_metrics_that_a_run_skips(model: str, capsys: Capture) -> None:
    assert main(["check", configured(model, trainer={"backend": "mine:Talkative"})]) == 0
    said = capsys.readouterr().out
    assert "mine:Talkative trains one group: 1 metric, weights, a checkpoint" in said
    assert "note: trainer.backend mine:Talkative: train() returned the metric 'note' as a str, which is not" in said
    assert "train() returned a metric named 3, a int; a name must be a str: skipped" in said


STATES = """
import asyncio
from dataclasses import replace
from engine import policies


class Enters:
    def enters(self, view, subject):
        return True


class Retrieve(Enters):
    async def work(self, group):
        return replace(group, prompt=replace(group.prompt, text=group.prompt.text + "!"))


class Judge(Enters):
    async def work(self, group):
        for trajectory in group.trajectories:
            trajectory.reward = 0.5
        return group


class Gate(Enters):
    async def work(self, batch):
        return None if batch.groups[0].trajectories else "an empty group"


class Vet(Enters):
    async def work(self, published):
        return None if any(value.any() for value in published.weights.values()) else "all zeros"


class Endless(Enters):
    async def work(self, batch):
        await asyncio.Event().wait()


class Raising(Enters):
    async def work(self, batch):
        raise LookupError("no such gate")


class Approving(Enters):
    async def work(self, batch):
        return True


class Cutting(Enters):
    async def work(self, group):
        group.trajectories[0].token_ids.pop()
        return group


BEFORE, AFTER = ("queued", "generating"), ("generated", "batched")
policies.add_state(machine="group", state="m-retrieve", phase="waiting", between=BEFORE, policy=Retrieve)
for name, policy in (("m-judge", Judge), ("m-cutting", Cutting)):
    policies.add_state(machine="group", state=name, phase="parked", between=AFTER, policy=policy)
for name, policy in (("m-gate", Gate), ("m-endless", Endless), ("m-raising", Raising), ("m-approving", Approving)):
    policies.add_state(machine="step", state=name, between=("scoring", "training"), policy=policy)
policies.add_state(machine="step", state="m-vet", between=("publishing", "finished"), policy=Vet)
"""


@pytest.fixture
def states(beside_the_config: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `mystates` whose states are known to one test alone."""
    Path("mystates.py").write_text(STATES, encoding="utf-8")
    monkeypatch.setattr(extensions, "_loaded", set(extensions._loaded))
    before = {*state_registry.registered()}
    yield
    state_registry.forget({*state_registry.registered()} - before)
    sys.modules.pop("mystates", None)


def rehearsed(model: str, *names: str) -> list[str]:
    changes = {"run": {"extensions": ["mystates"]}, "scheduler": {"states": [*names], "state_timeout_s": 20.0}}
    return [*rehearse_backends(load_config(configured(model, **changes)))]


@pytest.mark.usefixtures("states")
def test_the_rehearsal_calls_the_work_of_each_state(model: str) -> None:
    assert rehearsed(model, "m-retrieve", "m-judge", "m-gate", "m-vet") == [
        "ok: state m-retrieve does its work",
        "ok: state m-judge does its work",
        "ok: state m-gate does its work",
        "note: state m-vet refuses weights of zeros: all zeros",
    ]


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("m-endless", r"its work has not ended after 0\.1 s"),
        ("m-raising", "its work failed: LookupError: no such gate .mystates.py:.*, in work.; define async def work"),
        ("m-approving", r".* must return None if it lets them pass, or a text .*, not True"),
        ("m-cutting", r".* changed token_ids of trajectory 0; it may change rewards only; define async def work"),
    ],
)
def test_the_rehearsal_names_a_state_whose_work_a_run_would_refuse(
    state: str, said: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if state == "m-endless":
        monkeypatch.setattr(state_rehearsal, "LONGEST_S", 0.1)
    with pytest.raises(ConfigError, match=f"scheduler.states is '{state}': {said}"):
        rehearsed(model, state)


def test_classes_are_not_rehearsed_before_the_first_run_makes_the_model(capsys: Capture) -> None:
    tree = {"run": {"dir": "runs"}, "model": {"make": "arithmetic"}, "trainer": {"backend": "mine:Trainer"}}
    Path("made.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["check", "made.yaml"]) == 0
    why = "model.make builds the model when a run starts; repeat the check after a first run"
    assert f"note: your classes are not tested on a group: {why}" in capsys.readouterr().out


def test_both_classes_run_in_one_process_and_the_engine_scores(model: str) -> None:
    held_out = write_rows(Path("held_out.jsonl"), {"prompt": "1+1?", "answer": "2"})
    changes = {"data": {"path": "rows.jsonl", "validation_path": held_out}, "reward": {"function": "mine:score"}}
    changes |= {"trainer": {"backend": "mine:Trainer"}, "validation": {"at_end": True}}
    config = load_config(configured(model, rollout=OWN, **changes))
    plan = replace(plan_of(config, Path("run")), control=None, metrics=None)
    result = run_plan(plan)
    assert (result.outcome, result.steps, result.version) == ("finished", 4, 4)
    assert [row["steps"] for row in result.metrics] == [1.0, 2.0, 3.0, 4.0]
    assert {row["reward_histograms"]["reward"][-1][1] for row in result.metrics} == {0.25}, (
        "the reward of the configuration"
    )
    assert [row["outcome"] for row in result.validations if row["version"] == 4] == ["reported"]
    again = run_plan(replace(plan, resume=True, resumption=Resumption(settings=[(MAX_STEPS, "6")])))
    assert (again.outcome, again.steps) == ("finished", 6)
    assert [row["steps"] for row in again.metrics] == [5.0, 6.0], "the trainer has loaded its checkpoint"


def test_classes_of_a_script_run_without_an_import(model: str) -> None:
    from engine.api import configured as from_arguments

    sys.path.append(str(Path.cwd()))
    import mine  # beside the configuration

    class Trainer(mine.Trainer):  # type: ignore[misc, name-defined]
        pass

    settings = {"trainer.backend": Trainer, "trainer.checkpoint_every": 0, "scheduler.train_batch_size": 2}
    configured(model)
    config, local = from_arguments(model, "rows.jsonl", "engine.tasks.rewards:exact_match", settings=settings)
    assert local == {"trainer.backend": Trainer}
    check_config(config, local)
    assert type(plan_of(config, Path("run"), local=local).make_trainer()) is Trainer


def test_the_run_fails_and_names_weights_that_no_sampler_can_install(model: str) -> None:
    config = load_config(configured(model, trainer={"backend": "mine:Broken"}))
    plan = replace(plan_of(config, Path("run")), control=None, metrics=None)
    with pytest.raises(Exception, match=r"last error: .*model\.embed_tokens\.weight has a value that"):
        run_plan(plan)


def test_the_example_of_a_configuration_is_accepted() -> None:
    lines = check_config(load_config(EXAMPLES / "custom_backends.yaml"))
    assert any("HttpGenerator has the 8 methods generate," in line for line in lines)


def test_every_method_of_a_generator_is_required() -> None:
    from engine.protocols import Generator

    assert {method.name for method in OF_GENERATORS} == {name for name in vars(Generator) if name[0] != "_"}
