"""Send a request to a running run, from a command-line process.

Called by `engine scale`, `set`, `drain`, `stop` and `waits`. Every failure is a one-line `ConfigError` without the
token.
"""

import http.client
import json
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import IO, Any

from engine.control.address_file import place_of
from engine.control.requests import MAX_ANSWER_BYTES, Operation
from engine.errors import ConfigError

ANSWER_TIMEOUT_S = 30.0
"""Time limit for the answer of the run."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a run never redirects, so another program would get the token."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


RUN_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
"""Opens the endpoints of a run. Without proxies, whose answers do not come from a run."""


def tell(run_dir: Path, shown: str, operation: Operation) -> dict[str, Any]:
    """Send an operation to the run of a directory and return its answer.

    Raises: `ConfigError` if the run is not running, does not answer, or rejects the operation (with the broken rule).
    """
    place = place_of(run_dir, shown)
    request = urllib.request.Request(
        f"{place.url}/control",
        data=operation.model_dump_json().encode(),
        headers={"Authorization": f"Bearer {place.token}", "Content-Type": "application/json"},
        method="POST",
    )
    try:
        with RUN_OPENER.open(request, timeout=ANSWER_TIMEOUT_S) as answer:
            return _plain(answer.read(MAX_ANSWER_BYTES + 1))
    except urllib.error.HTTPError as error:
        raise _refused(shown, error) from None
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        raise no_answer(place.url, shown, error) from None
    except (ValueError, http.client.HTTPException) as error:
        raise not_from_a_run(place.url, shown, error) from None


def no_answer(address: str, shown: str, error: Exception) -> ConfigError:
    reason = getattr(error, "reason", None) or error
    law = f"does not answer at {address} ({reason}): the run was killed, or its machine is unreachable"
    return ConfigError("RUN", shown, law, f"`engine status {shown}` says whether it can be resumed")


def not_from_a_run(address: str, shown: str, error: Exception) -> ConfigError:
    law = f"the answer from {address} is not from a run of this engine version: {' '.join(str(error).split())}"
    return ConfigError("RUN", shown, law, "use the engine version that started this run")


def _refused(shown: str, error: urllib.error.HTTPError) -> ConfigError:
    try:
        reason = str(_plain(error.read(MAX_ANSWER_BYTES + 1))["error"])
    except (ValueError, LookupError, OSError):
        reason = f"HTTP {error.code}"
    if error.code == 401:
        law = f"refuses the token in its control.json ({reason})"
        return ConfigError("RUN", shown, law, "the run that wrote the token has ended")
    return ConfigError("RUN", shown, f"refuses: {reason}")


def _plain(body: bytes) -> dict[str, Any]:
    if len(body) > MAX_ANSWER_BYTES:
        raise ValueError("its answer is too large")
    answer = json.loads(body)
    if not isinstance(answer, dict):
        raise ValueError("its answer is not a JSON object")
    return answer
