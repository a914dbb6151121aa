"""Where the frames of a run go: into a new record, on with the one that an earlier process wrote, or nowhere.

Called by the scheduler actor.
"""

from engine import __version__
from engine.actors.past import Past
from engine.actors.survived import Survived
from engine.policies import PolicySet
from engine.runtime.plan import Plan
from engine.schedule import Header, NullRecorder, Recorder


def recorder_of(plan: Plan, policies: PolicySet, earlier: Past | Survived | None) -> Recorder | NullRecorder:
    """Raises: `RecordError`."""
    if plan.run_dir is None:
        return NullRecorder()
    if earlier is not None:
        return Recorder(plan.run_dir / "schedule", earlier.after, lock=earlier.lock)
    header = Header(
        run=plan.run_dir.name,
        limits=plan.limits.to_plain(),
        policies=dict(policies.names),
        config=plan.config,
        code=__version__,
    )
    return Recorder(plan.run_dir / "schedule", header)
