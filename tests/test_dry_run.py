"""`engine check` rehearses the first prompts of a run: what it shows, what it warns of, and what it refuses by name."""

import io
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_tokenizers import save_chat_model, write_rows
from transformers import AutoTokenizer

from engine import cli
from engine.cli.project import REWARD_TEXT

Capture = pytest.CaptureFixture[str]
EXACT = "engine.tasks.rewards:exact_match"
pytestmark = pytest.mark.usefixtures("own_modules")
CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny model for each family, with a context of 64 tokens."""
    folder = tmp_path_factory.mktemp("models")
    return {family: save_chat_model(folder / family, family, context=64) for family in ("chatml", "base", "gemma")}


def write_config(model: str, *rows: Any, held_out: list[Any] | None = None, **changes: Any) -> str:
    """A run on `rows`. `changes` of a section are merged into it."""
    data = {"path": write_rows(Path("rows.jsonl"), *(rows or ({"prompt": "2+2?", "answer": 4},)))}
    if held_out is not None:
        data["validation_path"] = write_rows(Path("held_out.jsonl"), *held_out)
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": model},
        "data": data,
        "reward": {"function": EXACT},
        "scheduler": {"train_batch_size": 2, "policy_mini_batch_size": 2, "samples_per_prompt": 2},
        "rollout": {"max_tokens": 4, "device": "cpu", "replicas": 1, "slots": 2},
    }
    for name, fields in changes.items():
        tree[name] = tree.get(name, {}) | fields
    Path("run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return "run.yaml"


def shown(capsys: Capture, config: str) -> str:
    code = cli.main(["check", config])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def refused(capsys: Capture, config: str) -> str:
    assert cli.main(["check", config]) == 2
    said = capsys.readouterr().err
    assert said.startswith("engine: ") and "Traceback" not in said and said.count("\n") == 1
    return said


def test_what_the_model_reads_is_shown(models: dict[str, str], capsys: Capture) -> None:
    rows = [{"prompt": prompt, "answer": "4"} for prompt in ("2+2?", "22+22?", "222+222?")]
    said = shown(capsys, write_config(models["chatml"], *rows, held_out=[{"prompt": "1+3?", "answer": "4"}]))
    assert "ok: a response ends at '<|endoftext|>', '<|im_end|>', or after rollout.max_tokens = 4\n" in said
    limit = "and may have 63 (one token less than the context of 64)"
    assert f"ok: prompts of data.path have 23 to 27 tokens, median 25, {limit}\n" in said
    assert f"ok: prompts of data.validation_path have 23 to 23 tokens, median 23, {limit}\n" in said
    first = "    | <|im_start|>user\n    | 2+2?<|im_end|>\n    | <|im_start|>assistant\n"
    assert f"ok: the first prompt of data.path is these 23 tokens:\n{first}" in said
    assert "ok: no prompt of data.validation_path is in data.path\n" in said
    assert f"ok: reward.function {EXACT} returns 1 for the answer '4' to row 0 of data.path\n" in said
    assert "prompts of" not in "".join(line for line in said.splitlines() if line.startswith("note:"))


NOTED: dict[str, tuple[str, list[Any], dict[str, Any], str]] = {
    "repetitions": ("base", ["a", "b", "a", "a"], {}, "2 of 4 prompts of data.path are repetitions of earlier ones"),
    "a leak": ("base", ["a", "b"], {}, "1 of 2 prompts of data.validation_path are also in data.path"),
    "little room": (
        "base",
        ["a" * 59, "a" * 60, "a" * 62],
        {},
        "2 of 3 prompts of data.path leave less than rollout.max_tokens = 4 tokens for the response",
    ),
    "dropped": ("base", ["a", "a" * 64], {"overlong": "drop"}, "data.overlong drop: 1 of 2 prompts of data.path have"),
    "an answer": (
        "chatml",
        [[*CHAT, {"role": "assistant", "content": "4"}]],
        {},
        "1 of 1 prompts of data.path end with a message of the assistant",
    ),
    "rendered before": (
        "chatml",
        ["<|im_start|>user\na<|im_end|>"],
        {},
        "the first prompt of data.path contains '<|im_start|>', and the chat template is applied to it",
    ),
    "no template": ("chatml", ["a"], {"chat": "never"}, "data.chat is never: the model's chat template is not used"),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_may_surprise_is_noted(models: dict[str, str], capsys: Capture, case: str) -> None:
    family, prompts, data, note = NOTED[case]
    rows = [{"prompt" if isinstance(p, str) else "messages": p, "answer": "4"} for p in prompts]
    held_out = [{**rows[0]}, {**rows[0], **({"prompt": "new"} if "prompt" in rows[0] else {})}]
    config = write_config(models[family], *rows, held_out=held_out)
    tree = yaml.safe_load(Path(config).read_text())
    tree["data"] |= data
    Path(config).write_text(yaml.safe_dump(tree))
    assert f"note: {note}" in shown(capsys, config)


def test_an_end_that_is_never_written_is_noted(models: dict[str, str], tmp_path: Path, capsys: Capture) -> None:
    model = save_chat_model(tmp_path / "odd", "chatml")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n###\n{% endfor %}"
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    said = shown(capsys, write_config(model))
    note = r"note: the chat template ends a turn with '\n###\n', which contains no special token; it never writes"
    assert f"{note} '<|endoftext|>', so responses may not end before rollout.max_tokens" in said
    assert "note: the tokenizer of model.path has 260 tokens, but the model has only 259" in said


REFUSED: dict[str, tuple[str, list[Any], dict[str, dict[str, Any]], list[str]]] = {
    "no such model": (
        "no-one/has-this-model-7f3a",
        [],
        {},
        ["model.path 'no-one/has-this-model-7f3a' is neither a directory nor in the local cache"],
    ),
    "no model name": ("my model", [], {}, ["model.path", "is neither a directory nor a hub name"]),
    "mixed columns": (
        "base",
        [{"prompt": "a", "answer": "1"}, {"prompt": "b", "anwser": "2"}],
        {},
        [f"reward.function is '{EXACT}'", "raised on row 1 of data.path", "no field 'answer'", "did you mean anwser?"],
    ),
    "a null answer": (
        "base",
        [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}],
        {},
        ["reward.function", "row 1 of data.path: the row has no field 'answer'"],
    ),
    "unknown argument": (
        "chatml",
        [],
        {"data": {"chat_template_kwargs": {"enable_thinkng": False}}},
        ["data.chat_template_kwargs is 'enable_thinkng'", "did you mean enable_thinking?"],
    ),
    "no system message": (
        "gemma",
        [],
        {"data": {"system_prompt": "Add."}},
        ["data.system_prompt is 'Add.'", "System role not supported", "put it into the prompts"],
    ),
    "a message it refuses": (
        "gemma",
        [{"messages": CHAT}, {"messages": [{"role": "system", "content": "a"}]}],
        {},
        ["data.path", "row 1: the chat template refuses these messages"],
    ),
    "reward without a value": (
        "base",
        [],
        {"reward": {"function": "my_code:nothing"}},
        ["returned None for row 0", "row 0"],
    ),
    "a part without a value": (
        "base",
        [],
        {"reward": {"function": None, "functions": [{"name": "a", "function": "my_code:nothing"}]}},
        ["reward.functions", "all returned None for row 0 of data.path"],
    ),
    "a part that raises": (
        "base",
        [],
        {"reward": {"function": None, "functions": [{"name": "a", "function": "my_code:wrong"}]}},
        ["reward.functions.0.function", "KeyError: 'anser'", "mean answer?"],
    ),
    "reward that raises": (
        "base",
        [],
        {"reward": {"function": "my_code:wrong"}},
        ["KeyError: 'anser' (my_code.py:4, in wrong)", "mean answer?"],
    ),
    "reward that ends its process": (
        "base",
        [],
        {"reward": {"function": "my_code:leave"}},
        ["reward.function", "my_code:leave", "ended with exit code 3, on row 0 of data.path"],
    ),
}
REWARDS = """
import os
def nothing(prompt, trajectory): pass
def wrong(prompt, trajectory): return float(prompt.fields["anser"])
def leave(prompt, trajectory): os._exit(3)
"""


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_would_fail_of_is_refused_by_name(models: dict[str, str], capsys: Capture, case: str) -> None:
    family, rows, changes, words = REFUSED[case]
    Path("my_code.py").write_text(REWARDS)
    lines = [{"prompt": row, "answer": "4"} if isinstance(row, str) and row[0] != "{" else row for row in rows]
    config = write_config(models.get(family, family), *lines)
    tree = yaml.safe_load(Path(config).read_text())
    for name, fields in changes.items():
        tree[name] |= fields
    Path(config).write_text(yaml.safe_dump(tree))
    said = refused(capsys, config)
    for word in words:
        assert word in said, (word, said)


def test_every_part_of_the_reward_is_called(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text("async def half(prompt, trajectory): return 0.5\ndef skip(prompt, t): return None\n")
    specs = {"exact": EXACT, "half": "my_code:half", "skip": "my_code:skip"}
    parts = [{"name": name, "function": spec} for name, spec in specs.items()]
    said = shown(capsys, write_config(models["base"], reward={"function": None, "functions": parts}))
    for index, value in enumerate(("1", "0.5", "None (it does not apply)")):
        spec = parts[index]["function"]
        field = f"reward.functions.{index}.function"
        assert f"ok: {field} {spec} can be imported\n" in said
        assert f"ok: {field} {spec} returns {value} for the answer '4' to row 0 of data.path\n" in said


def test_the_isolation_of_code_is_shown(models: dict[str, str], capsys: Capture) -> None:
    part = {"name": "code", "function": "engine.tasks.code_rewards:python_tests"}
    row = {"prompt": "2+2?", "tests": "assert add(1, 2) == 3"}
    said = shown(capsys, write_config(models["base"], row, reward={"function": None, "functions": [part]}))
    assert f"ok: reward.functions.0.function {part['function']}: isolation of code: " in said
    row = {"prompt": "2+2?", "tests": "assert list(reversed('ab')) == ['b', 'a']"}
    said = refused(capsys, write_config(models["base"], row, reward={"function": None, "functions": [part]}))
    assert "has a test that passes without a response" in said


FORMS = """
def group(prompt, trajectories): return [float(len(trajectories))] * len(trajectories)
def trl(prompts, completions, answer, **kwargs):
    return [float(text == str(right)) for text, right in zip(completions, answer)]
def tokens(prompt, trajectory, *, each): return [each for _ in trajectory.token_ids]
def short(prompt, trajectory): return []
def needs(completions, solution): return [0.0 for _ in completions]
def hang(prompt, trajectory):
    import threading
    threading.Event().wait()
def crash(prompt, trajectory):
    import os
    os._exit(3)
"""


def test_every_form_of_a_reward_is_called(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text(FORMS)
    parts: list[dict[str, Any]] = [
        {"name": "group", "function": "my_code:group"},
        {"name": "trl", "function": "my_code:trl", "processes": 1},
        {"name": "tokens", "function": "my_code:tokens", "unit": "token", "arguments": {"each": 0.5}},
    ]
    said = shown(capsys, write_config(models["base"], reward={"function": None, "functions": parts}))
    row = "for the answer '4' to row 0 of data.path"
    assert f"my_code:group returns 2 {row}, called once for each group\n" in said
    assert f"my_code:trl returns 1 {row}, called for several groups at once\n" in said
    assert f"my_code:tokens returns 1 numbers, one for each token, {row}\n" in said


THREADS = """
import signal, threading
four, home = threading.Barrier(4), threading.current_thread()
def alarmed(prompt, trajectory):
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return float(trajectory.text == str(prompt.fields["answer"]))
def quiet(prompt, trajectory):
    try:
        return alarmed(prompt, trajectory)
    except ValueError:
        return 0.0
def at_once(prompt, trajectory):
    barrier = four
    if barrier is not None:
        barrier.wait(30)
        globals().update(four=None)
    return float(threading.current_thread() is not home is not threading.main_thread())
"""


def test_a_reward_is_called_on_threads_as_in_a_run(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text(THREADS)
    said = refused(capsys, write_config(models["base"], reward={"function": "my_code:alarmed"}))
    assert "signal only works in main thread" in said
    assert said.endswith("name it in reward.functions with processes: 1, whose main thread takes signals\n")
    part = {"name": "part", "function": "my_code:alarmed", "processes": 1}
    said = shown(capsys, write_config(models["base"], reward={"function": None, "functions": [part]}))
    assert "my_code:alarmed returns 1 for the answer '4' to row 0" in said
    said = shown(capsys, write_config(models["base"], reward={"function": "my_code:quiet"}))
    assert "my_code:quiet: no answer to row 0 of data.path from its columns (answer) gets a higher reward" in said
    said = shown(capsys, write_config(models["base"], reward={"function": "my_code:at_once"}))
    assert "my_code:at_once returns 1 for" in said


@pytest.mark.parametrize(
    ("part", "story"),
    [
        ({"function": "my_code:short", "unit": "token"}, "returned 0 numbers for row 0 of data.path, not one finite"),
        ({"function": "my_code:tokens"}, "missing a required argument"),
        ({"function": "my_code:tokens", "arguments": {"all": 1}}, "cannot be passed to my_code:tokens"),
        ({"function": "my_code:needs"}, "the row has no column 'solution', which the reward requires"),
        ({"function": "my_code:hang", "processes": 1, "timeout_s": 0.2}, "took longer than 0.2 s; its process was"),
        ({"function": "my_code:crash", "processes": 1}, "crashed: its process ended with exit code 3, on row 0"),
        ({"function": "my_code:group", "memory_mb": 100}, "limits the processes of the function, but it has none"),
        ({"function": "my_code:group", "processes": 1, "concurrency": 2}, "cannot be set beside"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused(
    models: dict[str, str], capsys: Capture, part: dict[str, Any], story: str
) -> None:
    Path("my_code.py").write_text(FORMS)
    parts = [{"name": "part", **part}]
    assert cli.main(["check", write_config(models["base"], reward={"function": None, "functions": parts})]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("engine: reward.functions.0.") and story in said[-1]
    assert len(said) == 1 or "in hang" in "".join(said), "what its process wrote"


def test_nothing_of_rows_and_rewards_controls_the_terminal(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text("def score(prompt, trajectory): raise ValueError(prompt.text)\n")
    config = write_config(
        models["base"], {"prompt": "\x1b[2Jgone", "answer": "4"}, reward={"function": "my_code:score"}
    )
    assert cli.main(["check", config]) == 2
    said = capsys.readouterr()
    assert r"\x1b[2Jgone" in said.out and r"\x1b[2Jgone" in said.err
    assert "\x1b" not in said.out + said.err
    logging.getLogger("engine.rollout").warning("the answer was %s", "\x1b[2J")
    assert "\x1b" not in capsys.readouterr().err


def test_a_model_with_its_own_code_is_refused_without_a_question(
    models: dict[str, str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    model = tmp_path / "own"
    shutil.copytree(models["base"], model)
    (model / "own.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    described = json.loads((model / "config.json").read_text())
    described |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (model / "config.json").write_text(json.dumps(described))
    assert cli.main(["check", write_config(str(model))]) == 2
    said = capsys.readouterr()
    assert "model.path" in said.err and "contains custom code" in said.err
    assert "[y/N]" not in said.out and not Path("ran").exists()


def test_agents_make_their_own_messages(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text("async def play(client, prompt): pass\n")
    said = shown(
        capsys, write_config(models["base"], {"messages": CHAT, "answer": "4"}, agent={"rollout": "my_code:play"})
    )
    assert "the first prompt of data.path" not in said and f"reward.function {EXACT} returns 1" in said


AGENTS = """
import json, signal, urllib.request
from engine.trajectory import RolloutResult, Trajectory
async def ask(client, prompt): return await client.sample([{"role": "user", "content": prompt.text}])
async def turns(client, prompt):
    await ask(client, prompt)
    return 0.5
async def breaks(client, prompt): return float((await ask(client, prompt)).text)
async def silent(client, prompt): return 0.5
async def broken(client, prompt): return {}["tool"]
async def calls(base_url, api_key, prompt):
    body = {"model": "model", "messages": [{"role": "user", "content": prompt.text}]}
    head = {"Authorization": f"Bearer {api_key}"}
    asked = urllib.request.Request(base_url + "/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(asked) as answer:
        return float(len(json.load(answer)["choices"]))
async def text(base_url, api_key, prompt):
    await calls(base_url, api_key, prompt)
    return "good"
async def nan(client, prompt):
    await ask(client, prompt)
    return RolloutResult(reward=1.0, figures={"share": float("nan")})
async def empty(client, prompt):
    await ask(client, prompt)
    return Trajectory(reward=1.0, token_ids=[1])
async def alarmed(client, prompt): signal.signal(signal.SIGALRM, signal.SIG_DFL)
async def wrong(base_url, api_key, prompt): urllib.request.urlopen(base_url + "/nothing")
"""
PROGRAM = """
import asyncio, json, os
from types import SimpleNamespace
from my_code import calls
said = json.load(open(os.environ["STEP_ENGINE_PROMPT_FILE"]))
asyncio.run(calls(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], SimpleNamespace(**said)))
"""


def write_agent(model: str, agent: dict[str, Any]) -> str:
    Path("my_code.py").write_text(AGENTS)
    Path("my_agent.py").write_text(PROGRAM)
    return write_config(model, {"prompt": "2+2?", "answer": "4"}, agent=agent)


@pytest.mark.parametrize(
    ("agent", "line"),
    [
        ({"rollout": "my_code:turns"}, "ok: agent.rollout my_code:turns ends after 1 call of a scripted model"),
        ({"function": "my_code:calls"}, "ok: agent.function my_code:calls ends after 1 call of a scripted model"),
        ({"command": [sys.executable, "my_agent.py"]}, "my_agent.py ends after 1 call of a scripted model"),
        ({"rollout": "my_code:silent"}, "note: agent.rollout my_code:silent ends without a call of the model"),
        ({"rollout": "my_code:breaks"}, "breaks raised ValueError on prompt row 0: could not convert string to float"),
    ],
)
def test_an_agent_is_run_once_with_a_scripted_model(
    models: dict[str, str], capsys: Capture, agent: dict[str, Any], line: str
) -> None:
    assert line in shown(capsys, write_agent(models["chatml"], agent))


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ({"function": "no_such_module:run"}, ["agent.function", "no module named 'no_such_module'"]),
        ({"rollout": "my_code:nobody"}, ["agent.rollout", "has no attribute 'nobody'"]),
        ({"command": ["no-such-program"]}, ["agent.command", "'no-such-program' is no program on the PATH"]),
        ({"command": ["./my_agent.py"]}, ["agent.command", "'./my_agent.py' is no program"]),
        ({"command": [sys.executable, "no_such.py"]}, ["agent.command", "can't open file", "no_such.py"]),
        ({"rollout": "my_code:broken"}, ["fails before the model has answered", "KeyError on prompt row 0: 'tool'"]),
        ({"rollout": "my_code:alarmed"}, ["fails before the model has answered", "signal only works in main thread"]),
        ({"function": "my_code:text"}, ["agent.function", "agent my_code.text returned the reward 'good' of type str"]),
        ({"rollout": "my_code:nan"}, ["agent.rollout", "returned the figure 'share' as nan on prompt row 0"]),
        ({"rollout": "my_code:empty"}, ["agent.rollout", "1 token_ids, 0 logprobs and 0 loss_mask entries"]),
        ({"function": "my_code:wrong"}, ["agent.function", "fails before the model has answered", "404"]),
    ],
)
def test_an_agent_that_would_fail_every_time_is_refused(
    models: dict[str, str], capsys: Capture, agent: dict[str, Any], words: list[str]
) -> None:
    said = refused(capsys, write_agent(models["chatml"], agent))
    for word in words:
        assert word in said, (word, said)


def test_a_validation_set_is_judged_by_its_own_reward_only(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text(
        "def tests(prompt, trajectory):\n    return float(len(prompt.fields['tests']))\n"
        "def broken(prompt, trajectory):\n    raise ValueError('no compiler')\n"
    )
    code = write_rows(Path("code.jsonl"), {"prompt": "write 4", "tests": "xy"})
    own = {"name": "code", "path": code, "reward": "my_code:tests"}
    said = shown(capsys, write_config(models["base"], validation={"sets": [own]}))
    assert "ok: validation.sets.0.reward my_code:tests returns 2 for the answer" in said
    assert "to row 0 of validation.sets.0.path" in said

    said = refused(capsys, write_config(models["base"], validation={"sets": [own | {"reward": "my_code:broken"}]}))
    assert "validation.sets.0.reward is 'my_code:broken'" in said and "ValueError: no compiler" in said

    said = refused(capsys, write_config(models["base"], validation={"sets": [own | {"reward": None}]}))
    assert "reward.function is 'engine.tasks.rewards:exact_match'" in said  # which needs the column `answer`


def test_a_row_without_an_answer_is_found_if_a_reward_reads_the_response_first(
    models: dict[str, str], capsys: Capture
) -> None:
    Path("my_code.py").write_text(REWARD_TEXT)
    config = {"reward": {"function": "my_code:score"}}
    right = {"prompt": "2+2?", "answer": "4"}
    said = shown(capsys, write_config(models["base"], right, **config))
    assert "returns 1 for the answer '4' to row 0" in said and "returns 0 for the answer 'The test" in said
    said = refused(capsys, write_config(models["base"], right, right, {"prompt": "3+3?"}, **config))
    assert "row 2 of data.path" in said and "KeyError: 'answer'" in said
    rows = [right, {"prompt": "3+3?", "answer": ""}]
    said = shown(capsys, write_config(models["base"], *rows, **config))
    assert "note: data.path: column 'answer' has no value in 1 of 2 rows, the first in line 2" in said


def test_prompts_that_several_validation_sets_share_are_judged_by_each(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text("def half(prompt, trajectory):\n    return 0.5\n")
    sets = [{"name": "a"}, {"name": "b", "reward": "my_code:half"}]
    held_out = [{"prompt": "5+5?", "answer": 10}]
    said = shown(capsys, write_config(models["base"], held_out=held_out, validation={"sets": sets}))
    assert "ok: reward.function engine.tasks.rewards:exact_match returns 1 for the answer '10' to row 0" in said
    assert "ok: validation.sets.1.reward my_code:half returns 0.5 for the answer '10' to row 0" in said


NO_HIGHER = (
    "note: reward.function my_code:{}: no answer to row 0 of data.path from its columns ({}) gets a higher reward than "
)


def test_a_reward_that_tells_no_answer_from_another_is_noted(models: dict[str, str], capsys: Capture) -> None:
    note = (
        NO_HIGHER.format("half", "answer")
        + "'The test answer is \\\\boxed{42}.', which gets 0.5; make sure that a right"
    )
    Path("my_code.py").write_text("def half(prompt, trajectory):\n    return 0.5\n")
    reward = {"function": "my_code:half"}
    assert note in shown(capsys, write_config(models["base"], reward=reward))
    assert "note: reward" not in shown(capsys, write_config(models["base"]))
    assert "note: reward" not in shown(capsys, write_config(models["base"], {"prompt": "2+2?"}, reward=reward))
    parts = [{"name": f"part_{n}", "function": function} for n, function in enumerate(("my_code:half", EXACT))]
    mixed = write_config(models["base"], reward={"function": None, "functions": parts})
    assert "note: reward" not in shown(capsys, mixed), "one part that tells them apart is enough"


RIGHT = """
def bare(prompt, trajectory):
    return float(trajectory.text == str(prompt.fields['sum']))

def boxed(prompt, trajectory):
    return float(r'\\boxed{%s}' % prompt.fields['sum'] in trajectory.text)

def short(prompt, trajectory):
    return float(len(trajectory.text) < 4)

def upside_down(prompt, trajectory):
    return -bare(prompt, trajectory)
"""


def test_the_right_answer_is_tried_whatever_its_column_is_called(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text(RIGHT)
    rows = [{"prompt": f"{n}+{n}?", "source": "school", "level": n, "sum": 2 * n} for n in range(1, 4)]

    def said(function: str) -> str:
        return shown(capsys, write_config(models["base"], *rows, reward={"function": f"my_code:{function}"}))

    lines = said("bare")
    returns = "ok: reward.function my_code:bare returns"
    assert f"{returns} 1 for the answer '2' to row 0 of data.path (from its column 'sum')\n" in lines
    assert f"{returns} 0 for the answer '4' to row 0 of data.path (a wrong answer: that of row 1)\n" in lines
    assert f"{returns} 0 for the answer 'The test answer is \\\\boxed{{42}}.' to row 0 of data.path\n" in lines
    assert "note: reward" not in lines
    lines = said("boxed")
    right = "'The test answer is \\\\boxed{2}.' to row 0 of data.path (from its column 'sum')"
    assert f"returns 1 for the answer {right}\n" in lines
    assert "returns 0 for the answer 'The test answer is \\\\boxed{4}.' to row 0 of data.path (a wrong answer" in lines
    assert "note: reward" not in lines
    assert NO_HIGHER.format("upside_down", "source, level, sum") in said("upside_down")
    lines = said("short")
    best = "'2' (a wrong answer: that of row 1), which gets 1; make sure"
    assert NO_HIGHER.format("short", "source, level, sum") + best in lines


SLOW = """
import time

def slow(prompt, trajectory):
    time.sleep(0.25)
    return 1.0
"""


def test_a_slow_reward_is_reported_with_the_time_of_a_step(models: dict[str, str], capsys: Capture) -> None:
    Path("my_code.py").write_text(SLOW)
    sizes = {"train_batch_size": 32, "policy_mini_batch_size": 32, "samples_per_prompt": 4}
    reward = {"function": "my_code:slow", "concurrency": 2}
    said = shown(capsys, write_config(models["base"], reward=reward, scheduler=sizes))
    (note,) = [line for line in said.splitlines() if line.startswith("note: reward.function my_code:slow takes 0.")]
    assert note.endswith(" s, 2 at once on each replica; make it faster, or raise reward.concurrency")
    assert "a call: the 128 calls of a train step take about " in note
    said = shown(capsys, write_config(models["base"], reward={**reward, "concurrency": 64}, scheduler=sizes))
    assert "ok: reward.function my_code:slow takes 0." in said
