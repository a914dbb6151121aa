"""An extension for tests: a dispatch policy that loops without end, once, in the run of the current directory."""

from pathlib import Path

from engine import policies
from engine.ids import GroupId, ReplicaId, Version
from engine.policies.built_in import LeastLoaded
from engine.states.view import View

MARKER = "LOOPED"


@policies.register("dispatch", "endless-once")
class EndlessOnce(LeastLoaded):
    def choose(self, view: View, oldest: Version, group: GroupId) -> ReplicaId | None:
        if group == 20 and not Path(MARKER).exists():
            Path(MARKER).write_text("looped")
            while True:
                pass
        return super().choose(view, oldest, group)
