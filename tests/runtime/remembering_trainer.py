"""A trainer that remembers its prompts, for tests of which rows a run, its copies and its resumes draw."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.protocols import Batch
from engine.runtime.local import SimpleTrainer


class Remembering(SimpleTrainer):
    """Its state is the texts that each step was trained on, sorted. At the steps `copies`, it copies the run as a crash
    leaves it, to the directory with the step behind its name."""

    def __init__(self, run_dir: Path, copies: Sequence[int] = ()) -> None:
        self.run_dir, self.copies = run_dir, copies
        self.steps: list[list[str]] = []
        self.by_group: dict[int, str] = {}

    def train(self, batch: Batch) -> dict[str, float]:
        if batch.step in self.copies:
            shutil.copytree(self.run_dir, f"{self.run_dir}-{batch.step}")
        self.steps.append(sorted(group.prompt.text for group in batch.groups))
        self.by_group |= {group.group: group.prompt.text for group in batch.groups}
        return {}

    def weights(self) -> Any:
        return len(self.steps)

    def save(self, directory: str, step: int) -> None:
        Path(directory, "steps.json").write_text(json.dumps(self.steps))

    def load(self, directory: str) -> None:
        self.steps = json.loads(Path(directory, "steps.json").read_text())

    def texts(self) -> list[str]:
        return [text for step in self.steps for text in step]
