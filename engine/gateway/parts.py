"""The parts of a gateway other than its HTTP server. Other processes can import this without loading the server."""

from dataclasses import dataclass

from engine.gateway.runners import Runner
from engine.gateway.sessions import Bounds
from engine.gateway.tool_calls import Parser
from engine.rollout.chat import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """The parts of a gateway. `Plan.make_gateway` creates them in the gateway's actor."""

    chat: Chat
    runner: Runner
    bounds: Bounds
    model: str
    parser: Parser
    max_body_bytes: int
    host: str = "127.0.0.1"
    port: int = 0
