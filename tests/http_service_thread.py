"""The service of `examples/http_service.py` on a thread of a test, at a free port of this machine."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@contextmanager
def http_service() -> Iterator[str]:
    """The address of the service."""
    sys.path.append(str(EXAMPLES))
    from http_service import Service

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(Service().application())

    async def begin() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port: int = runner.addresses[0][1]
        return port

    try:
        yield f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(begin(), loop).result()}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        sys.path.remove(str(EXAMPLES))
