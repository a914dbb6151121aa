"""The training of a run: its steps, its weights versions, and the train steps that each version contains.

Written by `scheduling/steps.py` and `scheduling/weights.py`. Checkpoints and pools have their own modules.
"""

from collections.abc import Container

from engine.ids import StepId, Version
from engine.states.facts import Facts
from engine.states.step import Step
from engine.states.version import WeightsVersion


class Training(Facts):
    """What was trained and published.

    Other threads may ask for its counts at any moment: they are read from copies of the keys, which are never none.
    """

    steps: dict[StepId, Step] = {}
    """Steps whose batch is formed and that are not finished, and the next step, which comes last."""
    step_reward: float | None = None
    """Mean reward of the groups of the last step trained."""
    setbacks: dict[str, int] = {}
    """How often groups had been aborted, resumed, filtered and failed when the last step finished."""
    versions: dict[Version, WeightsVersion] = {}
    steps_in: dict[Version, StepId] = {}
    """Train steps in each version that an open group, a replica or a validation may still refer to, the newest last."""
    updates_in: dict[StepId, int] = {}
    """Optimizer updates in the first n train steps, by n, for each n after which a trainer may begin: it needs them for
    its schedule. The steps trained so far come last."""
    publishing_attempt: int = 0
    publish_failures: int = 0
    exceeded: int = 0
    """How often publications exceeded their time limit since one was answered."""

    def begin(self) -> None:
        """A run begins: nothing is trained, and replicas have the initial weights."""
        self.updates_in[0] = 0
        self.next_step(0, 0.0)
        self.publish(0)

    def next_step(self, id: StepId, at: float) -> None:
        """Add the next step."""
        self.steps[id] = Step(id, entered_at=at)

    def finish(self, step: Step, setbacks: dict[str, int]) -> None:
        """A step is trained and, if it publishes, published. `setbacks`: of groups so far."""
        step.setbacks = {state: count - self.setbacks.get(state, 0) for state, count in setbacks.items()}
        self.setbacks = setbacks
        del self.steps[step.id]

    def publish(self, version: Version) -> None:
        """Add the newest version. It holds the steps trained so far."""
        self.versions[version] = WeightsVersion(version)
        self.steps_in[version] = self.steps_trained

    def branch(self, steps: StepId, at: float) -> None:
        """Go back to `steps` train steps."""
        self.steps = {steps: Step(steps, entered_at=at)}
        self.steps_in = {version: min(held, steps) for version, held in self.steps_in.items()}
        self.updates_in = {after: updates for after, updates in self.updates_in.items() if after <= steps}

    @property
    def steps_batched(self) -> StepId:
        """Number of steps whose batch was formed."""
        return [*self.steps][-1]

    @property
    def steps_trained(self) -> StepId:
        return [*self.updates_in][-1]

    @property
    def latest_version(self) -> Version:
        return [*self.steps_in][-1]

    @property
    def formed_steps(self) -> list[Step]:
        """Steps whose batch is formed and that are not finished, in their order: at most two."""
        return list(self.steps.values())[:-1]

    @property
    def training_step(self) -> Step | None:
        """The first step whose batch is formed and that is not finished."""
        return next(iter(self.formed_steps), None)

    def forget_versions(self, least: StepId, used: Container[Version]) -> None:
        """Drop the figures of versions with fewer than `least` train steps that are not `used`."""
        latest = self.latest_version
        for version in list(self.steps_in):
            if self.steps_in[version] >= least or version >= latest - 1:
                return
            if version and version not in used:  # a fresh replica has version 0
                del self.steps_in[version]

    def forget_updates(self, oldest: StepId, kept: Container[StepId]) -> None:
        """Drop the figures of steps before `oldest` that are not `kept`: no trainer can begin there."""
        for steps in [steps for steps in self.updates_in if 0 < steps < oldest and steps not in kept]:
            del self.updates_in[steps]
