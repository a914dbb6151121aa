"""Added states of train steps: who inspects a batch before it is trained, and weights before replicas get them.

`pools.py` asks whenever it could train a batch, so that room is made again after each inspection; `steps.py` when a
version is in the weights store, and when its inspection has ended. An inspection lets its subject pass or ends the
run: nothing here changes a batch or a version.
"""

from engine.commands import InspectStep, TrainStep
from engine.ids import NO_VERSION, EventId, Version
from engine.scheduling.core import Core
from engine.states.limits import PUBLISHING, SCORING
from engine.states.step import Step
from engine.states.view import StepView


def train_or_inspect(core: Core, step: Step, cause: EventId) -> None:
    """Order the next inspection of a batch, behind the state that it is in; if none is left, order the training.
    `cause`: the event that completed the batch in this tick, or -1."""
    about = StepView(step.id, NO_VERSION, step.attempt, step.groups, step.staleness)
    name = _next_state(core, SCORING, about, "" if step.state == "scoring" else step.state)
    if name:
        core.state.fire_step(step, name)
        core.state.orders.add(
            InspectStep(step=step.id, attempt=step.attempt, state=name, groups=step.groups, staleness=step.staleness,
                        cause=cause)
        )  # fmt: skip
        return
    core.state.fire_step(step, "train")
    core.state.orders.add(
        TrainStep(step=step.id, attempt=step.attempt, groups=step.groups, staleness=step.staleness, cause=cause)
    )  # fmt: skip


def inspect_weights(core: Core, version: Version, after: str = "") -> bool:
    """Order the next inspection of a version in the store, behind the state `after`. False if none is left."""
    state = core.state
    about = StepView(state.training.steps_trained - 1, version, state.training.publishing_attempt)
    name = _next_state(core, PUBLISHING, about, after)
    if not name:
        return False
    step = publishing_step(core)
    if step is not None:  # after a resume there may be none
        state.fire_step(step, name)
    _order_inspection(core, version, name)
    return True


def inspect_weights_again(core: Core, version: Version, name: str) -> None:
    """Order an inspection that failed once more."""
    core.state.training.publishing_attempt += 1
    _order_inspection(core, version, name)


def _order_inspection(core: Core, version: Version, name: str) -> None:
    training = core.state.training
    step, attempt = training.steps_trained - 1, training.publishing_attempt
    core.state.orders.add(InspectStep(step=step, version=version, attempt=attempt, state=name))


def publishing_step(core: Core) -> Step | None:
    """The trained step whose weights are being published or inspected."""
    step = core.state.training.training_step
    places = ("publishing", *core.state.limits.states_at(PUBLISHING))
    return step if step is not None and step.state in places else None


def _next_state(core: Core, place: str, about: StepView, after: str) -> str:
    """The next state in a place whose policy wants to inspect; empty if there is none."""
    names = core.state.limits.states_at(place)
    for name in names[names.index(after) + 1 if after else 0 :]:
        if core.decisions.ask(f"state {name}", (about,), (bool,)):
            return name
    return ""
