"""Data files that are named by their address on the hub, from a server of the test that answers as the hub does."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engine.config.check import check_config
from engine.config.loading import load_config
from engine.errors import ConfigError
from engine.tasks.data_files import files_of
from engine.tasks.dataset import Dataset

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "main/train-0.jsonl": b'{"prompt": "one"}\n',
    "main/train-1.jsonl": b'{"prompt": "two"}\n',
    "main/test-0.jsonl": b'{"prompt": "three"}\n',
}
TRAIN = "hf://datasets/owner/name/main/train-*.jsonl"


class Hub(BaseHTTPRequestHandler):
    """One dataset, `owner/name`, with one branch and one tag."""

    def log_message(self, format: str, *given: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        place = self.path.partition("?")[0]
        if place in (
            f"/api/datasets/owner/name/{of}" for of in ("", "revision/main", "revision/v1", "revision/refs%2Fpr%2F1")
        ):
            return self._send(json.dumps({"id": "owner/name", "sha": COMMIT, "siblings": []}).encode())
        if place == f"/api/datasets/owner/name/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": name, "size": len(text), "oid": _oid(text)} for name, text in FILES.items()
            ]
            return self._send(json.dumps(tree).encode())
        name = place.removeprefix(f"/datasets/owner/name/resolve/{COMMIT}/")
        if name in FILES:
            text = FILES[name]
            return self._send(text, {"ETag": f'"{_oid(text)}"', "X-Repo-Commit": COMMIT})
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        return b""

    def _send(self, text: bytes, headers: dict[str, str] | None = None) -> bytes:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(text)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        return text if self.command == "GET" else b""


def _oid(text: bytes) -> str:
    return hashlib.sha1(text).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """With an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    files = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("files", ["main/train-*.jsonl", "main/**/train-*.jsonl"])
@pytest.mark.parametrize("revision", ["", "@v1", f"@{COMMIT}", "@refs/pr/1"])
def test_files_on_the_hub_are_those_that_the_glob_matches(hub: ThreadingHTTPServer, revision: str, files: str) -> None:
    data = Dataset.load(f"hf://datasets/owner/name{revision}/{files}")
    assert [prompt.text for prompt in data.prompts()] == ["one", "two"]


def test_files_from_the_hub_are_found_again_without_it(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = files_of(TRAIN, "data.path")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert files_of([TRAIN], "data.path") == first
    with pytest.raises(ConfigError, match="not in the local cache, and cannot be downloaded: OfflineModeIsEnabled"):
        files_of(TRAIN.replace("owner", "another"), "data.path")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("hf://datasets/owner/name", "is not an address of dataset files on the hub"),
        ("hf://models/owner/name/train.jsonl", "is not an address of dataset files on the hub"),
        ("hf://datasets/another/name/train.jsonl", r"the hub refuses this dataset \(HTTP 404\)"),
        ("hf://datasets/owner/name/main/trian-*.jsonl", r"hf://.*trian-\*.* matches no file of the dataset"),
        ("hf://datasets/owner/name/main/trian-0.jsonl", "matches no file of the dataset"),
    ],
)
def test_a_wrong_address_on_the_hub_is_refused(hub: ThreadingHTTPServer, address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        files_of(address, "data.path")


def test_an_address_on_the_hub_stays_as_it_is_in_a_configuration() -> None:
    config = load_config("configs/gpu_1.yaml")
    assert config.data.path == "hf://datasets/openai/gsm8k/main/train-*.parquet"
    notes = [line for line in check_config(config) if "names no commit" in line]
    assert len(notes) == 2, "one for training prompts, one for validation"
