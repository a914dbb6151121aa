"""An extension for tests: a state in which groups are judged, by a process that dies once on request."""

import os
import signal
from pathlib import Path
from typing import Any

from engine import policies
from engine.trajectory import TrajectoryGroup

MARKER = "JUDGE_DIED"


class Judge:
    def enters(self, view: Any, group: Any) -> bool:
        return True

    async def work(self, group: TrajectoryGroup) -> TrajectoryGroup:
        marker = Path(group.prompt.text)
        if group.group == 6 and not marker.exists():
            marker.write_text("died")
            os.kill(os.getpid(), signal.SIGKILL)
        for trajectory in group.trajectories:
            trajectory.reward = 7.0 + len(trajectory.token_ids) * group.trajectories.index(trajectory)
        return group


policies.add_state(
    machine="group", state="refereeing", phase="parked", between=("generated", "batched"), policy=Judge, concurrency=2
)
