"""A small environment with a tool: follow a number of links from a key, and say where they end.

`follow 3 from k` asks for the key that is three links away from k. Each row has its own links, and only the tool
`lookup` shows them, so a model must call it to find the answer. `model.make: lookup` makes a model and rows for this
environment (`tasks.lookup`). A row has the fields `start`, `steps`, `links` and `answer`.
"""

from collections.abc import Mapping, Sequence

from engine.environments.protocol import Environment, StepResult, Tool, Turn
from engine.errors import DataFailure
from engine.trajectory import Prompt

FIELDS = ("start", "steps", "links", "answer")


class Lookup(Environment):
    """The reward is 1 for the right answer, minus `error_penalty` for each tool call that fails."""

    def __init__(self, error_penalty: float = 0.1) -> None:
        self._error_penalty = error_penalty
        self._links: Mapping[str, str] = {}
        self._answer = ""

    @property
    def tools(self) -> Sequence[Tool]:
        return [self.lookup]

    def reset(self, prompt: Prompt, seed: int) -> str:
        missing = [name for name in FIELDS if name not in prompt.fields]
        if missing:
            raise DataFailure(f"a row needs the fields {', '.join(FIELDS)}; this row lacks {', '.join(missing)}")
        self._links, self._answer = prompt.fields["links"], prompt.fields["answer"]
        return f"follow {prompt.fields['steps']} from {prompt.fields['start']}"

    def lookup(self, key: str) -> str:
        """The key that a key links to."""
        if key not in self._links:
            raise LookupError(f"there is no key {key}")
        return self._links[key]

    def step(self, turn: Turn) -> StepResult:
        penalty = self._error_penalty * sum(call.failed for call in turn.calls)
        if turn.calls:
            return StepResult(reward=-penalty)
        right = float(turn.text.strip() == self._answer)
        return StepResult(reward=right, done=True, figures={"right": right})
