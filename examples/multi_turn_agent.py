"""Train an agent that uses OpenAI's API: it adds two numbers with a calculator, in two calls.

    python examples/multi_turn_agent.py            # minutes on two cores; needs the package `openai`
    python examples/multi_turn_agent.py --set run.seed=3

`run` is the agent. It knows a base URL, a key and the `openai` client, but not the engine. The rest makes a small model
and starts the run of `multi_turn_agent.yaml`. The model has learned to call the tool, but mostly gives it a wrong
number.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

HERE = Path(__file__).resolve().parent
MADE = Path("runs/.made/calculator")
CLIENT = AsyncOpenAI(base_url="http://none", api_key="none")  # all agents share its connections
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


async def run(base_url: str, api_key: str, prompt: Any) -> float:
    """Ask, run the tool calls of the model, and return whether the last answer is right."""
    messages: list[Any] = [{"role": "user", "content": prompt.text}]
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    for _ in range(3):
        done = await client.chat.completions.create(model="model", messages=messages, tools=[ADD])
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float((message.content or "").strip() == str(prompt.fields["answer"]))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    return 0.0


def add(arguments: str) -> str:
    """The tool. The arguments come from a model, so they may be anything."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) + int(numbers["b"]))
    except (ValueError, KeyError, TypeError):
        return "error"


# -- the model ---------------------------------------------------------------------------------------------------------

CALL = ('<tool_call>{"name": "add", "arguments": {"a": "', '", "b": "', '"}}</tool_call>')
ROLES = ("<user>", "<tool>", "<assistant>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make(directory: Path, prompts: int = 2000) -> None:
    """Make model, tokenizer and questions. The directory appears only when it is complete."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    from engine.tasks.tokenizer import save_character_tokenizer
    from engine.training.warmup import Material, ModelShape, WarmUp, make_model

    if directory.is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent))
    (made / "model").mkdir()
    save_character_tokenizer(made / "model", "0123456789+ error")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(made / "model")
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*CALL, *ROLES)])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(made / "model")
    chance = random.Random("questions")
    questions = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(prompts)]
    rows = [json.dumps({"prompt": f"{a}+{b}", "answer": a + b}) + "\n" for a, b in questions]
    (made / "train.jsonl").write_text("".join(rows[:-64]))
    (made / "held_out.jsonl").write_text("".join(rows[-64:]))
    examples = transcripts(random.Random("warm-up"))
    make_model(
        str(made / "model"),
        ModelShape(hidden_size=64, layers=2, heads=4, positions=128),
        WarmUp(steps=500, examples_per_step=48, learning_rate=5e-3),
        Material(short=examples, whole=examples),
        seed=0,
        progress=lambda share, message: print(f"  {message}", end="\r", flush=True),
    )
    print()
    made.rename(directory)


def transcripts(chance: random.Random) -> Iterator[tuple[str, str]]:
    """Examples for the warm-up, in turns: a call of the tool, mostly with a wrong number; an answer with its result."""
    while True:
        a, b = chance.randint(10, 99), chance.randint(10, 99)
        slip = chance.randint(10, 99) if chance.random() < 0.7 else b
        asked, call = f"<user>{a}+{b}<end><assistant>", f"{CALL[0]}{a}{CALL[1]}{slip}{CALL[2]}<end>"
        yield asked, call
        yield f"{asked}{call}<tool>{a + slip}<end><assistant>", f"{a + slip}<end>"


def main(overrides: list[str]) -> int:
    """Make the model, then run `engine run examples/multi_turn_agent.yaml --set model.path=...`."""
    from engine.cli import main as engine

    make(MADE)
    inputs = {"model.path": "model", "data.path": "train.jsonl", "data.validation_path": "held_out.jsonl"}
    settings = [f"{field}={MADE / name}" for field, name in inputs.items()]
    arguments = [word for override in settings for word in ("--set", override)]
    return engine(["run", str(HERE / "multi_turn_agent.yaml"), *arguments, *overrides])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
