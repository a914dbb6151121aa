"""What a run must never do: listen to strangers, follow a path out of its directory, read without bound, tell a secret.

That nothing is unpickled is a house rule (`test_house.py`); the control endpoint's own tests are in `control/`.
"""

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.cli import top
from engine.config import Config, load_config
from engine.config.loading import parse_config
from engine.config.resumption import resumed
from engine.errors import ConfigError, EngineError, reason_of, visible
from engine.errors.redaction import is_secret_name
from engine.metrics.address_files import FILE, address_of, announce
from engine.storage import run_directory
from engine.storage.checkpoints import SUMS, damaged_of, verify_checkpoint
from engine.tasks import http_client
from engine.tasks.http_client import Http, Unavailable
from engine.workers.plan import ServerAddress

MADE: dict[str, Any] = {"model": {"make": "arithmetic"}}
SECRET = "hunter2-and-more"

# -- who may connect ---------------------------------------------------------------------------------------------------


def test_everything_listens_on_this_machine_alone_unless_set_otherwise() -> None:
    config = parse_config(MADE)
    assert {config.metrics.host, config.control.host, config.agent.host} == {"127.0.0.1"}
    assert ServerAddress().host == "127.0.0.1"


# -- text of users' code -----------------------------------------------------------------------------------------------


def test_the_reason_of_an_exception_cannot_control_a_terminal() -> None:
    """Reasons are recorded, logged and shown by `engine top`, and may quote what a model wrote."""
    reason = reason_of(ValueError("\x1b]0;owned\x07 \x9b2J \u202e\ud800\r\n\tend"))
    assert reason == "ValueError: \\x1b]0;owned\\x07 \\x9b2J \\u202e?\\r\n\tend"
    assert visible("ä ✓\n") == "ä ✓\n"


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../escaped", "a/b", "/tmp/x", "..", ".hidden", ""])
def test_a_name_of_a_run_is_no_path(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        parse_config({**MADE, "run": {"name": name}})


def test_a_name_under_runs_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work" / "runs").mkdir(parents=True)
    (tmp_path / "work" / "other" / "schedule").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert run_directory.open_run("other").path == Path("other"), "what the user types as a path is one"
    with pytest.raises(ConfigError, match="does not exist"):
        run_directory.open_run("../other")
    with pytest.raises(ConfigError, match="does not exist"):
        run_directory.open_run("../../work/other/../nowhere")


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "inside/../../../secret"])
def test_the_sums_of_a_checkpoint_name_nothing_outside_it(tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "run" / "step-000001"
    checkpoint.mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (checkpoint / SUMS).write_text(f"{'0' * 64}  {name}\n")
    with pytest.raises(ConfigError, match="which is outside the checkpoint"):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("left", ["", f"{'0' * 64}  config.json\n"])
def test_sums_that_were_cut_short_vouch_for_nothing(tmp_path: Path, left: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"altered")
    if left:
        (tmp_path / "config.json").write_bytes(b"{}")
        left = left.replace("0" * 64, hashlib.sha256(b"{}").hexdigest())
    (tmp_path / SUMS).write_text(left)
    with pytest.raises(ConfigError, match=rf"model\.safetensors.* {SUMS} does not name it"):
        verify_checkpoint(tmp_path)


def test_sums_that_are_no_text_are_reported_as_damage(tmp_path: Path) -> None:
    """As a bit that the disk has turned over leaves them: whoever can continues from another checkpoint."""
    (tmp_path / SUMS).write_bytes(b"\xb0" * 64 + b"  config.json\n")
    with pytest.raises(ConfigError, match=rf"its {SUMS} cannot be read"):
        verify_checkpoint(tmp_path)
    assert list(damaged_of([tmp_path])) == [tmp_path]


def test_a_pickle_in_a_checkpoint_is_not_read(tmp_path: Path) -> None:
    """`transformers` would take it where the tensors are missing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.training.model_checkpoint import read_checkpoint

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    state = {"format": 1, "step": 1, "optimizer_steps": 1, "settings": {}}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(OSError, match=r"model\.safetensors"):
        read_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))


def test_modules_that_only_a_record_names_are_not_imported(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(MADE))
    recorded = load_config(config).model_dump(mode="json")
    recorded["run"] |= {"extensions": ["planted"], "code_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"run\.extensions is \[\]: the run began with \['planted'\]"):
        resumed(config, recorded)
    assert not (tmp_path / "ran").exists()


# -- sizes -------------------------------------------------------------------------------------------------------------


@contextmanager
def answering(body: bytes, status: int = 200) -> Iterator[str]:
    """A server of other people's, which answers everything alike: its `host:port`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:
                return

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_answer_of_a_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "LARGEST_ANSWER_BYTES", 1000)
    with answering(b" " * 1001) as address, pytest.raises(ConfigError, match="an answer of more than 1000 bytes"):
        top.ask(address, "a run")


def test_the_word_of_where_a_run_answers_is_bounded(tmp_path: Path) -> None:
    announce([tmp_path / FILE], "127.0.0.1:1", "a run")
    assert address_of(tmp_path, "a run") == "127.0.0.1:1"
    (tmp_path / FILE).write_bytes(b" " * (1 << 16) + (tmp_path / FILE).read_bytes())
    with pytest.raises(ConfigError, match=r"has an unreadable endpoint\.json"):
        address_of(tmp_path, "a run")


@pytest.mark.parametrize("status", [200, 500])
def test_the_answer_of_a_server_is_bounded(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setattr(http_client, "LARGEST_ANSWER_BYTES", 1000)

    async def call(address: str) -> None:
        http = Http(f"http://{address}", None, timeout_s=30)
        try:
            await http.call("GET", "/v1/models")
        finally:
            await http.close()

    with answering(b" " * 200_000, status) as address, pytest.raises(Unavailable, match="more than 1000 bytes"):
        asyncio.run(call(address))


# -- secrets -----------------------------------------------------------------------------------------------------------

SERVERS = {"backend": "openai", "weights_dir": "w"}
TELLTALE: dict[str, dict[str, Any]] = {
    "rollout.urls": {"rollout": {**SERVERS, "urls": [f"http://user:{SECRET}@host:8000"]}},
    "rollout.urls, a key": {"rollout": {**SERVERS, "urls": [f"http://{SECRET}@host:8000"]}},
    "rollout.urls, a parameter": {"rollout": {**SERVERS, "urls": [f"http://host:8000/v1?api_key={SECRET}"]}},
    "metrics.sinks.mlflow.uri": {"metrics": {"sinks": {"mlflow": {"uri": f"postgresql://me:{SECRET}@db/mlflow"}}}},
    "rollout.engine_args.hf_token": {"rollout": {"backend": "vllm", "engine_args": {"hf_token": SECRET}}},
    "rollout.engine_args.deep": {"rollout": {"backend": "vllm", "engine_args": {"a": [{"api_key": SECRET}]}}},
    "rollout.engine_args.aws_secret_access_key": {
        "rollout": {"backend": "vllm", "engine_args": {"aws_secret_access_key": SECRET}}
    },
    "rollout.engine_args.headers": {
        "rollout": {"backend": "vllm", "engine_args": {"headers": {"Authorization": f"Bearer {SECRET}"}}}
    },
    "rollout.engine_args.api_key": {"rollout": {"engine_args": {"api_key": 48151623}}},
    "rollout.engine_args.apiKey": {"rollout": {"backend": "vllm", "engine_args": {"apiKey": [48151623]}}},
    "rollout.engine_args.credentials": {"rollout": {"engine_args": {"credentials": {"me": SECRET}}}},
    "rollout.engine_args.http_proxy": {"rollout": {"engine_args": {"http_proxy": f"http://me:{SECRET}@proxy"}}},
    "rollout.engine_args.proxies": {"rollout": {"engine_args": {"proxies": [f"me:{SECRET}@proxy:3128"]}}},
    "rollout.engine_args.note": {"rollout": {"engine_args": {"note": f"sk-{SECRET}-{'x1' * 10}"}}},
    "rollout.urls, of no backend": {"rollout": {"urls": [f"http://user:{SECRET}@host:8000"]}},
    "rollout.urls, cut short": {"rollout": {**SERVERS, "urls": [f"http://user:{SECRET}@[host"]}},
    "metrics.sinks.mlflow.uri, without scheme": {"metrics": {"sinks": {"mlflow": {"uri": f"me:{SECRET}@mlflow"}}}},
    "metrics.sinks.mlflow.uri, a parameter": {
        "metrics": {"sinks": {"mlflow": {"uri": f"mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3D{SECRET}"}}}
    },
    "metrics.sinks.mlflow.uri, a fragment": {"metrics": {"sinks": {"mlflow": {"uri": f"http://m/#token={SECRET}"}}}},
    "model.password": {"model": {"make": "arithmetic", "password": SECRET}},
    "login": {"login": {"password": SECRET}},
    "rollout.api_key_env": {"rollout": {**SERVERS, "urls": ["http://host"], "api_key_env": f"sk-{SECRET}"}},
    "metrics.sinks.wandb.api_key": {"metrics": {"sinks": {"wandb": {"api_key": SECRET}}}},
}


@pytest.mark.parametrize("case", TELLTALE)
def test_a_secret_in_a_configuration_is_refused_and_not_repeated(case: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**MADE, **TELLTALE[case]})
    assert SECRET not in str(caught.value) and SECRET not in repr(caught.value.details)
    assert "48151623" not in str(caught.value) and "***" in str(caught.value)
    assert case.split(",")[0].removesuffix(".deep") in str(caught.value)


COMMANDS: dict[str, list[str]] = {
    "joined": ["./agent", f"--api-key={SECRET}"],
    "in one word": ["./agent", f"--api_key {SECRET}"],
    "in two words": ["./agent", "--api-key", SECRET],
    "a token": ["./agent", "--token", SECRET],
    "one dash": ["./agent", "-token", SECRET],
    "capitals": ["./agent", f"--apiKey={SECRET}"],
    "a variable": ["env", f"OPENAI_API_KEY={SECRET}", "./agent"],
    "a header": ["curl", "-H", f"Authorization: Bearer {SECRET}"],
    "a joined header": ["curl", f"--header=X-Api-Key: {SECRET}"],
    "a basic header": ["curl", f"-HAuthorization: Basic {SECRET}"],
    "a user": ["curl", "-u", f"me:{SECRET}"],
    "in a shell": ["sh", "-c", f"OPENAI_API_KEY='{SECRET}' exec ./agent"],
    "an option in a shell": ["sh", "-c", f"./agent --password {SECRET} --fast"],
    "JSON": ["./agent", f'{{"api_key": "{SECRET}"}}'],
    "an address": ["./agent", f"--base-url=https://me:{SECRET}@host/v1"],
    "a parameter": ["./agent", "--url", f"https://host/v1?access_token={SECRET}"],
    "a known form": ["./agent", f"sk-{SECRET}-{'x1' * 10}"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_secret_in_a_command_is_refused_and_not_repeated(case: str) -> None:
    for agent in ({"command": COMMANDS[case]}, {"command": COMMANDS[case], "function": "no function"}):
        with pytest.raises(ConfigError, match=r"agent\.command '\*\*\*'") as caught:
            parse_config({**MADE, "agent": agent})
        assert SECRET not in str(caught.value) + repr(caught.value.details)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("--set", f"rollout.engine_args.api_key={SECRET}"),
        ("rollout.urls", [f"http://me:{SECRET}@host"]),
        ("rollout.engine_args", {"a": [{"api_key": SECRET}], "b": f"token={SECRET}"}),
        ("agent.command", ["--token", SECRET, f"--api-key={SECRET}"]),
        ("agent.command", ("sh", "-c", f"./agent --token {SECRET}")),
    ],
)
def test_whatever_is_wrong_with_a_value_its_secrets_are_not_shown(field: str, value: Any) -> None:
    error = ConfigError(field, value, "is wrong")
    assert SECRET not in str(error) + repr(error.details) and "***" in str(error)


def test_an_override_that_holds_a_secret_is_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(MADE))
    for override in (f"run.api_key: {SECRET}", f"model.make.api_key={SECRET}", f"run.password=[{SECRET}"):
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "config.yaml", [override])
        assert SECRET not in str(caught.value) + repr(caught.value.details)


# -- documents that grow -----------------------------------------------------------------------------------------------


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines) + "\n"


def merges(levels: int) -> str:
    lines = ["m0: &m0 {a: 1}", *(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}" for n in range(1, levels))]
    return "\n".join(lines) + "\n"


GROWING = {
    "aliases": laughs(9),
    "merges": merges(30),
    "a long text": "a: &a " + "x" * 100_000 + "\nb: [" + ", ".join(["*a"] * 100) + "]\n",
    "itself": "a: &a [*a]\n",
    "itself, by name": "a: &a {b: *a}\n",
    "depth": "a: " + "[" * 300 + "]" * 300 + "\n",
    "size": "a: " + "x" * (2 << 20) + "\n",
}


@pytest.mark.parametrize("case", GROWING)
def test_a_document_that_grows_is_refused_in_a_short_message(tmp_path: Path, case: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(GROWING[case])
    with pytest.raises(ConfigError, match=r"has more than|levels deep|too deep|larger than") as caught:
        load_config(config)
    assert len(str(caught.value)) < 1000


def test_a_value_in_a_message_is_shortened(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    long = "x" * 100_000
    texts = (
        laughs(3) + "model: {make: arithmetic}\n",
        f"{long}: 1\n",
        f"run: {{{long}: [{long}]}}\n",
        f"run: {long}\n",
    )
    for text in texts:
        config.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(config)
        assert len(str(caught.value)) < 2500 and len(repr(caught.value.details)) < 2500
    config.write_text("\n".join(f"key{number}: 1" for number in range(9000)))
    with pytest.raises(ConfigError, match=r"and \d+ more") as caught:
        load_config(config)
    assert len(str(caught.value)) < 2500


def test_aliases_of_a_plain_size_are_read(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("model: {make: arithmetic}\nrun: {seed: &seed 3, epochs: *seed}\n")
    assert load_config(config).run.epochs == 3


@pytest.mark.parametrize(
    "sections",
    [
        {"rollout": {**SERVERS, "urls": ["http://127.0.0.1:8000/v1"], "api_key_env": "SERVERS_KEY"}},
        {"metrics": {"sinks": {"mlflow": {"uri": "http://mlflow:5000"}}}},
        {"rollout": {"backend": "vllm", "engine_args": {"hf_token": True, "max_num_batched_tokens": 9}}},
        {"agent": {"command": ["./agent", "--max-tokens=9", "--tokenizer", "x"]}},
        {"agent": {"command": ["sh", "-c", "./agent --token $HF_TOKEN --api-key=${KEY} --stop-token '</s>'"]}},
        {
            "agent": {
                "command": ["./agent", "--api-key-env", "KEY", "--user", "1000:1000", "-u", "--token-file=/run/key"]
            }
        },
        {"metrics": {"sinks": {"mlflow": {"uri": "postgresql://me@db/mlflow"}}}},
        {"metrics": {"hosts": ["metrics.example"]}},
        {"rollout": {"backend": "vllm", "engine_args": {"hf_token": None}}},
    ],
)
def test_what_is_no_secret_is_let_by(sections: dict[str, Any]) -> None:
    parse_config({**MADE, **sections})


@pytest.mark.parametrize("status", [401, 500])
def test_a_server_that_repeats_its_key_is_not_repeated(status: int) -> None:
    async def call(address: str) -> None:
        http = Http(f"http://{address}", SECRET, timeout_s=30)
        try:
            await http.call("GET", "/v1/models")
        finally:
            await http.close()

    body = json.dumps({"error": f"the key {SECRET} is not known"}).encode()
    with answering(body, status) as address, pytest.raises(EngineError, match=r"the key \(the key\) is not") as caught:
        asyncio.run(call(address))
    assert SECRET not in str(caught.value) + repr(caught.value.details)


def test_no_field_takes_a_secret_itself() -> None:
    """A new field that is named like one must hold the name of an environment variable."""
    from engine.config.loading import fields

    assert [path for path, _ in fields() if is_secret_name(path)] == []
    assert [path for path, _ in fields() if path.endswith("_key_env")] == ["rollout.api_key_env"]


def test_what_a_run_writes_down_holds_the_name_of_a_key_and_not_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERS_KEY", SECRET)
    sections = {"rollout": {**SERVERS, "urls": ["http://127.0.0.1:8000"], "api_key_env": "SERVERS_KEY"}}
    config: Config = parse_config({**MADE, **sections})
    directory = run_directory.create(tmp_path, "keyed", config_yaml=config.dump_yaml())
    written = b"".join(path.read_bytes() for path in directory.path.rglob("*") if path.is_file())
    assert b"SERVERS_KEY" in written and SECRET.encode() not in written
    assert SECRET not in json.dumps(config.model_dump(mode="json")), "which the record's header holds"
    assert os.environ["SERVERS_KEY"] == SECRET
