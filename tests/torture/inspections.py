"""States of train steps for torture: they let everything pass, and bring death to one inspection of a life.

The process of the states imports this module. `DEATH` in its environment says what dies where.
"""

import json
import os
from pathlib import Path
from typing import Any

from engine import policies
from engine.protocols import Batch, PublishedWeights

DEATH = "STEP_ENGINE_TORTURE_DEATH"
STATES = {"batch-torture": ("scoring", "training"), "weights-torture": ("publishing", "finished")}


class Inspector:
    def enters(self, view: Any, step: Any) -> bool:
        return True

    async def work(self, given: Batch | PublishedWeights) -> str | None:
        from tests.torture.chain import MARK, TREE, kill_tree, strike

        death = json.loads(os.environ.get(DEATH, "null"))
        here = ["batch-torture", given.step] if isinstance(given, Batch) else ["weights-torture", given.steps]
        if death is not None and [death["state"], death["number"]] == here and not Path(death["sprung"]).exists():
            Path(death["sprung"]).touch()
            if death["victim"] == TREE:
                kill_tree(os.environ[MARK])
            strike(os.getpid())
        return None


for name, between in STATES.items():
    policies.add_state(machine="step", state=name, between=between, policy=Inspector)
