"""The engine inside a user's own program: generators, trainer and scheduler in one process, without Ray or torch.

    result = engine.runtime.local.run(generators=[MyGenerator()], trainer=MyTrainer(), prompts=["..."],
    limits=Limits(...), samples=4)

`examples/embed.py` is a complete example; `engine.protocols` documents the two protocols. A program that keeps its own
loop uses a `Session` instead (docs/SESSION.md).
"""

from engine.runtime.local.run import RunResult, run, run_async, run_plan
from engine.runtime.local.session import Session
from engine.runtime.local.session_orders import IllegalEvent, SessionOrder
from engine.runtime.local.simple import SimpleGenerator, SimpleTrainer, response

__all__ = [
    "IllegalEvent",
    "RunResult",
    "Session",
    "SessionOrder",
    "SimpleGenerator",
    "SimpleTrainer",
    "response",
    "run",
    "run_async",
    "run_plan",
]
