"""An agent as a program of its own, with nothing but the standard library: asks twice. The first to run is killed by a
signal, the first of another group ends with an error."""

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

text = json.loads(Path(os.environ["STEP_ENGINE_PROMPT_FILE"]).read_text())["text"]
try:
    Path("killed").symlink_to(text)  # the first of all, and what it was asked
    os.kill(os.getpid(), signal.SIGTERM)
except FileExistsError:
    pass
if os.readlink("killed") != text:
    try:
        Path("raised").touch(exist_ok=False)  # the first that was asked something else
        sys.exit("there is no tool")
    except FileExistsError:
        pass

messages = [{"role": "user", "content": text}]
for _ in range(2):
    asked = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "model", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(asked) as answer:
        messages += [json.load(answer)["choices"][0]["message"], {"role": "user", "content": "more"}]
