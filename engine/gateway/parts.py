"""What a gateway is made of, apart from its HTTP server, which only the gateway's own process need load."""

from dataclasses import dataclass

from engine.gateway.runners import Runner
from engine.gateway.sessions import Bounds
from engine.gateway.tool_calls import Parser
from engine.rollout.chat import Chat


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayParts:
    """`Plan.make_gateway` makes them in the gateway's actor."""

    chat: Chat
    runner: Runner
    bounds: Bounds
    model: str
    parser: Parser
    max_body_bytes: int
    host: str = "127.0.0.1"
    port: int = 0
