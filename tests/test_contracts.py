"""The contracts of `engine.testing`: the engine's own classes keep them, and a class that breaks a law is named.

`ModelGenerator` and `ModelTrainer` run them beside their other tests."""

import importlib
import importlib.util
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine import policies
from engine.config import Config, parse_config
from engine.errors import ConfigError
from engine.policies import registry, state_registry
from engine.protocols import Batch, Generated, GroupWork
from engine.record import Header, Recorder
from engine.runtime.local import SimpleGenerator
from engine.simulation.world import Faults, Setting, World
from engine.testing import GeneratorContract, PolicyContract, StateContract, TrainerContract, assert_same_schedule
from engine.trajectory import TrajectoryGroup
from tests.shipped_policies import SHIPPED

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own() -> Iterator[None]:
    """Forget what a test registers."""
    before = {*registry.registered(), *state_registry.registered()}
    yield
    new = [cls for cls in (*registry.registered(), *state_registry.registered()) if cls not in before]
    registry.forget(new)
    state_registry.forget(new)


# -- the engine's own classes ------------------------------------------------------------------------------------------

EMBED = example("embed")


class TestGuesser(GeneratorContract):
    def make(self) -> Any:
        return EMBED.Guesser()

    def weights(self, version: int) -> float:
        return 0.2 * version


class Learner(EMBED.Learner):  # type: ignore[misc]
    def save(self, directory: str, step: int) -> None:
        (Path(directory) / "chance").write_text(repr(self.chance))

    def load(self, directory: str) -> None:
        self.chance = float((Path(directory) / "chance").read_text())


class TestLearner(TrainerContract):
    def make(self) -> Any:
        return Learner()


@pytest.mark.parametrize(("decision", "name"), [(decision, name) for decision in SHIPPED for name in SHIPPED[decision]])
def test_the_built_in_policies_keep_their_contract(decision: str, name: str) -> None:
    contract = PolicyContract()
    contract.decision, contract.name, contract.worlds = decision, name, 1
    contract.test_simulated_runs_keep_every_law()


def test_the_policy_of_the_example_keeps_its_contract(own: None) -> None:
    example("custom_policy")
    contract = PolicyContract()
    contract.decision, contract.name, contract.worlds = "admission", "curriculum", 2
    contract.test_simulated_runs_keep_every_law()


class JudgeContract(StateContract):
    state, worlds = "judging", 2
    judge: Any

    def work(self) -> Any:
        return self.judge


def test_the_state_of_the_example_keeps_its_contract(own: None) -> None:
    contract = JudgeContract()
    contract.judge = example("judge_state").Judge()
    contract.test_simulated_runs_keep_every_law()
    contract.test_work_changes_only_what_it_may()


def test_a_state_before_generation_keeps_its_contract_or_the_law_is_named(own: None) -> None:
    class RetrieverContract(JudgeContract):
        state = "retrieving"

    class Renumbering:
        async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
            return replace(group, prompt=replace(group.prompt, row=8))

    contract = RetrieverContract()
    contract.judge = example("states/before_generation").Retrieve()
    contract.test_work_changes_only_what_it_may()
    contract.judge = Renumbering()
    with pytest.raises(AssertionError, match="it may change text and fields only"):
        contract.test_work_changes_only_what_it_may()


def test_a_state_of_train_steps_keeps_its_contract_and_is_told_what_it_must_return(own: None) -> None:
    class InspectorContract(StateContract):
        state, does = "inspecting", example("states/before_training").InspectBatch()

        def work(self) -> Any:
            return self.does

    class Approving:
        async def work(self, given: Any) -> Any:
            return True

    contract = InspectorContract()
    contract.test_work_changes_only_what_it_may()
    contract.state, contract.does = "vetting", example("states/before_publication").VetWeights()
    contract.test_work_changes_only_what_it_may()
    contract.does = Approving()
    with pytest.raises(AssertionError, match="must return None if it lets them pass, or a text with the reason"):
        contract.test_work_changes_only_what_it_may()


def test_the_page_lists_exactly_the_stable_names() -> None:
    page = (EXAMPLES.parent / "docs" / "API.md").read_text(encoding="utf-8")
    listed: dict[str, set[str]] = {}
    stable = page.partition("## Stable names")[2].partition("provisional")[0]
    for row in stable.splitlines():
        if row.startswith("| `engine"):
            _, module, _, names, _ = row.split("|")
            listed.setdefault(module.strip(" `"), set()).update(re.findall(r"`(\w+)`", names))
    for module, names in listed.items():
        assert names == set(importlib.import_module(module).__all__), module
    assert [*listed] == ["engine", "engine.protocols", "engine.policies", "engine.testing"]


# -- classes that break a law ------------------------------------------------------------------------------------------


class Unfinished(SimpleGenerator):
    async def generate(self, work: GroupWork) -> Generated:
        return Generated(group=TrajectoryGroup(group=work.group, prompt=work.prompt, trajectories=[]))


class Forgetful(EMBED.Guesser):  # type: ignore[misc]
    """Samples under the old version after an install."""

    async def install(self, version: int) -> None: ...


class Endless(EMBED.Guesser):  # type: ignore[misc]
    """Drops the tokens of an earlier attempt."""

    async def generate(self, work: GroupWork) -> Generated:
        found: Generated = await super().generate(work)
        if work.attempt == 1:
            fresh: Generated = await super().generate(work)
            found = Generated(group=fresh.group, aborted=True)
            for trajectory in found.group.trajectories:
                trajectory.token_ids[0], trajectory.finish_reason = 7, ""
        return found


class Aborting(EMBED.Guesser):  # type: ignore[misc]
    """Is aborted on its own, again and again, or when it should end."""

    async def generate(self, work: GroupWork) -> Generated:
        found: Generated = await super().generate(work)
        for trajectory in found.group.trajectories:
            trajectory.finish_reason = ""
        return Generated(group=found.group, aborted=True)


@pytest.mark.parametrize(
    ("generator", "test", "words"),
    [
        (Aborting, "test_an_aborted_group_resumes_from_its_prefix", "must not be aborted again"),
        (Aborting, "test_a_truncated_group_ends", "must finish the group, not abort it"),
        (Unfinished, "test_it_generates_a_whole_group", "0 trajectories, not the 2 asked for"),
        (Forgetful, "test_new_weights_mark_the_tokens_that_they_sample", "have version 0, but it must be 1"),
        (Endless, "test_an_aborted_group_resumes_from_its_prefix", "must keep the tokens of GroupWork.partial"),
    ],
)
def test_the_law_that_a_generator_breaks_is_named(generator: Any, test: str, words: str) -> None:
    class Contract(GeneratorContract):
        def make(self) -> Any:
            return generator()

    with pytest.raises(AssertionError, match=words):
        getattr(Contract(), test)()


class Sharing(Learner):
    """Returns its own weights, not a copy."""

    def __init__(self) -> None:
        self.shared = {"chance": [0.2]}

    def train(self, batch: Batch) -> dict[str, float]:
        self.shared["chance"][0] += 0.1
        return {}

    def weights(self) -> Any:
        return self.shared


class Nameless(Learner):
    def weights(self) -> Any:
        return {0: self.chance}


class Amnesiac(Learner):
    def load(self, directory: str) -> None: ...


class Silent(Learner):
    def train(self, batch: Batch) -> Any:
        return "done"


class Wordy(Learner):
    def train(self, batch: Batch) -> Any:
        return {"loss": "low"}


class Numbering(Learner):
    def train(self, batch: Batch) -> Any:
        return {0: 1.0}


class Idle(Learner):
    def train(self, batch: Batch) -> Any: ...


class Unwritten(Learner):
    def save(self, directory: str, step: int) -> None: ...


@pytest.mark.parametrize(
    ("trainer", "test", "words"),
    [
        (Sharing, "test_weights_are_a_named_copy", "must return a copy"),
        (Nameless, "test_weights_are_a_named_copy", "name each tensor by a text, not 0"),
        (Amnesiac, "test_a_checkpoint_restores_the_weights_and_the_next_step", "must be those of the saved trainer"),
        (Idle, "test_weights_are_a_named_copy", "must change the weights with each batch"),
        (Unwritten, "test_a_checkpoint_restores_the_weights_and_the_next_step", "must write its files"),
        (Wordy, "test_train_returns_metrics", "the metric 'loss' must be a number, not 'low'"),
        (Numbering, "test_train_returns_metrics", "the name of a metric must be a str, not 0"),
        (Silent, "test_train_returns_metrics", "must return a dict of metrics or None, not str"),
    ],
)
def test_the_law_that_a_trainer_breaks_is_named(trainer: Any, test: str, words: str) -> None:
    class Contract(TrainerContract):
        def make(self) -> Any:
            return trainer()

    with pytest.raises(AssertionError, match=words):
        getattr(Contract(), test)()


def test_a_trainer_without_a_score_keeps_its_contract() -> None:
    class Plain:
        """What `trainer.backend` requires."""

        def __init__(self) -> None:
            self.steps = 0

        def train(self, batch: Batch) -> None:
            self.steps += 1

        def weights(self) -> int:
            return self.steps

    class Contract(TrainerContract):
        def make(self) -> Any:
            return Plain()

    for name in (name for name in dir(Contract) if name.startswith("test_")):
        getattr(Contract(), name)()


def test_work_that_changes_tokens_is_refused_with_the_law(own: None) -> None:
    example("judge_state")

    class Rewriter:
        async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
            changed = deepcopy(group)
            changed.trajectories[0].token_ids[0] += 1
            return changed

    contract = JudgeContract()
    contract.judge = Rewriter()
    with pytest.raises(AssertionError, match=r"changed token_ids of trajectory 0; it may change rewards only"):
        contract.test_work_changes_only_what_it_may()


def test_the_law_that_a_policy_or_a_state_breaks_is_named(own: None) -> None:
    @policies.register("admission", "greedy")
    class Greedy:
        def admit(self, view: Any, legal: int) -> int:
            return legal + 1

    contract = PolicyContract()
    contract.decision, contract.name = "admission", "greedy"
    with pytest.raises(
        AssertionError, match=r"fails in a simulated run .*; correct it: docs/EXTENDING.md says what it may answer"
    ):
        contract.test_simulated_runs_keep_every_law()

    class Hesitant:
        def enters(self, view: Any, group: Any) -> Any:
            return "perhaps"

    policies.add_state(
        machine="group", state="hesitating", phase="parked", between=("generated", "batched"), policy=Hesitant
    )
    state = StateContract()
    state.state = "hesitating"
    with pytest.raises(
        AssertionError, match=r"fails in a simulated run .*; correct it: docs/EXTENDING.md says what it may answer"
    ):
        state.test_simulated_runs_keep_every_law()


def test_the_contract_of_a_state_that_is_not_registered_says_so() -> None:
    contract = StateContract()
    contract.state = "jugding"
    for test in (contract.test_simulated_runs_keep_every_law, contract.test_work_changes_only_what_it_may):
        contract.work = object  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match=r"scheduler\.states 'jugding' is not a registered state"):
            test()


# -- a golden schedule -------------------------------------------------------------------------------------------------


CONFIG = {"model": {"make": "arithmetic"}, "run": {"max_steps": 4}, "validation": {"at_start": False, "at_end": False}}
SCHEDULER = {"train_batch_size": 4, "max_staleness_steps": 1, "samples_per_prompt": 2}


def golden_config(**scheduler: Any) -> Config:
    return parse_config({**CONFIG, "scheduler": {**SCHEDULER, **scheduler}})


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the policies and limits of the configuration."""
    directory, config = tmp_path_factory.mktemp("golden"), golden_config()
    chosen = config.policies()
    recorder = Recorder(directory / "schedule", Header(run="g", limits=config.limits.to_plain(), policies=chosen.names))
    setting = Setting(limits=config.limits, replicas=2, slots=4, seed=1, faults=Faults(fail_group=0.1))
    World(setting, chosen, recorder).run()
    recorder.close()
    return directory


def test_a_golden_schedule_is_repeated_with_other_settings_that_never_mattered(golden: Path, tmp_path: Path) -> None:
    assert_same_schedule(golden)
    assert_same_schedule(golden, golden_config())
    assert_same_schedule(golden, golden_config(deadline_timeout_s=7.0))
    (tmp_path / "c.yaml").write_text(golden_config().dump_yaml())
    assert_same_schedule(golden, tmp_path / "c.yaml")


def test_a_golden_schedule_fails_at_the_first_other_decision(golden: Path, own: None) -> None:
    @policies.register("admission", "one-at-a-time")
    class OneAtATime:
        def admit(self, view: Any, legal: int) -> int:
            return min(1, legal)

    with pytest.raises(AssertionError, match=r"(?s)diverged at tick \d+.*expected: .*StartGroup.*got: "):
        assert_same_schedule(golden, golden_config(policies={"admission": "one-at-a-time"}))
    with pytest.raises(AssertionError, match="diverged at tick"):
        assert_same_schedule(golden, golden_config(max_concurrent_groups=4))


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        ({"train_batch_size": 2}, "scheduler.train_batch_size is 2, but must be 4, as in the golden schedule"),
        ({"over_sample": 0.5}, "limits.over_sample is 0.5, but must be 0.0"),
        ({"policies": {"concurrency": "cache"}}, "scheduler.policies.concurrency"),
    ],
)
def test_a_golden_schedule_refuses_figures_on_which_its_events_depend(
    golden: Path, scheduler: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        assert_same_schedule(golden, golden_config(**scheduler))
