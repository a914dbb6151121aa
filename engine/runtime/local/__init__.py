"""The engine inside a user's own program: generators, trainer and scheduler in one process, without Ray or torch.

    result = engine.runtime.local.run(generators=[MyGenerator()], trainer=MyTrainer(), prompts=["..."],
    limits=Limits(...), samples=4)

`examples/embed.py` is a complete example; `engine.protocols` documents the two protocols. A program that keeps its own
loop uses a `Session` instead (docs/SESSION.md).
"""

from engine.runtime.local.facts import IllegalFact, answer
from engine.runtime.local.run import RunResult, run, run_async, run_plan
from engine.runtime.local.session import Due, Session
from engine.runtime.local.simple import SimpleGenerator, SimpleTrainer, response

__all__ = [
    "Due",
    "IllegalFact",
    "RunResult",
    "Session",
    "SimpleGenerator",
    "SimpleTrainer",
    "answer",
    "response",
    "run",
    "run_async",
    "run_plan",
]
