"""The control endpoint over real HTTP: who is let in, what is refused, and what is decided."""

import asyncio
import json
import os
import socketserver
import stat
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from control_rig import Rig
from steady_world import steady_world

from engine import cli
from engine.control.address_file import FILE, ControlPlace, announce, place_of, withdraw
from engine.control.client import tell
from engine.control.control_server import ControlServer
from engine.control.requests import (
    MAX_BODY_BYTES,
    Drain,
    Look,
    Scale,
    Set,
    SettingRequest,
    after_resuming,
    changes,
    check_replicas,
    decide,
    parse,
)
from engine.errors import ConfigError
from engine.events import DrainRequested, ProcessLost, ReplicaLeaves, ReplicasWanted, SettingChanged, StopRequested
from engine.record.files import RecordLock
from engine.states.limits import Limits, Pool, ValidationLimits
from tests.core.scripted import Scripted

Capture = pytest.CaptureFixture[str]


def post(rig: Rig, body: bytes | dict[str, Any], token: str | None = None, **headers: str) -> httpx.Response:
    """`token` None: the right one."""
    given = {"Authorization": f"Bearer {rig.place.token if token is None else token}", **headers}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{rig.place.url}/control", content=content, headers=given, timeout=30, trust_env=False)


# -- who is let in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", "Basic {token}", "Bearer {token}x", "{token}"])
def test_nobody_is_let_in_without_the_token(rig: Rig, authorization: str) -> None:
    headers = {"Authorization": authorization.format(token=rig.place.token)}
    for path in ("/control", "/", "/status"):
        answer = httpx.post(f"{rig.place.url}{path}", content=b"{}", headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == 401
        assert rig.place.token not in answer.text
    assert httpx.get(rig.place.url, timeout=30, trust_env=False).status_code == 401
    assert rig.events == []


def test_a_header_that_is_no_ascii_is_refused_like_any_other(rig: Rig) -> None:
    headers = {b"Authorization": "Bearer tökén".encode()}
    assert httpx.post(f"{rig.place.url}/control", headers=headers, timeout=30, trust_env=False).status_code == 401


def test_an_address_that_is_taken_is_refused_by_its_field(rig: Rig) -> None:
    port = int(rig.place.url.rpartition(":")[2])

    async def start() -> None:
        await ControlServer("token", lambda asked: {}).start("127.0.0.1", port)

    with pytest.raises(ConfigError, match=rf"control\.port {port} cannot be opened on 127\.0\.0\.1"):
        asyncio.run(start())


def test_the_token_lies_in_a_file_for_its_user_alone(rig: Rig) -> None:
    path = rig.run_dir / FILE
    assert place_of(rig.run_dir, "run") == rig.place and len(rig.place.token) >= 43
    assert rig.place.token not in repr(rig.place)
    assert {entry.name for entry in rig.run_dir.iterdir()} == {"schedule", FILE}, "and nowhere else"
    withdraw(rig.run_dir)
    assert not path.exists()


def test_a_file_is_written_for_its_user_alone_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        announce(tmp_path, ControlPlace("http://127.0.0.1:1", "secret"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_link_in_its_place_is_not_written_through(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / FILE).symlink_to(precious)
    announce(tmp_path, ControlPlace("http://127.0.0.1:1", "secret"))
    assert precious.read_text() == "mine"
    assert not (tmp_path / FILE).is_symlink()


SPOILT = {
    "a link": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to(path.with_name("elsewhere"))),
    "open to others": lambda path: path.chmod(0o644),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "too large": lambda path: path.write_text(path.read_text() + " " * 5000),
    "no JSON": lambda path: path.write_text("{"),
    "no object": lambda path: path.write_text("[1]"),
    "another scheme": lambda path: path.write_text('{"url": "file:///etc/passwd", "token": "x"}'),
    "no text": lambda path: path.write_text('{"url": "http://x", "token": 3}'),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_file_that_no_run_wrote_is_refused(rig: Rig, how: str) -> None:
    SPOILT[how](rig.run_dir / FILE)
    with pytest.raises(ConfigError, match=FILE):
        tell(rig.run_dir, "run", Look())
    assert rig.events == []


# -- what is refused ---------------------------------------------------------------------------------------------------

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "no operation": b"{}",
    "unknown operation": b'{"operation": "format"}',
    "unknown field": b'{"operation": "stop", "reason": "x", "force": true}',
    "missing field": b'{"operation": "scale"}',
    "no replicas": b'{"operation": "scale", "replicas": 0}',
    "too many": b'{"operation": "scale", "replicas": 5000}',
    "a fraction": b'{"operation": "scale", "replicas": 2.5}',
    "text": b'{"operation": "scale", "replicas": "2"}',
    "true": b'{"operation": "scale", "replicas": true}',
    "a long reason": json.dumps({"operation": "stop", "reason": "x" * 501}).encode(),
    "nothing to set": b'{"operation": "set", "settings": []}',
    "much to set": json.dumps({"operation": "set", "settings": [{"setting": "a", "value": "1"}] * 65}).encode(),
    "no UTF-8": b'{"operation": "stop", "reason": "\xff"}',
    "deep": b"[" * 30_000,
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_body_that_is_no_operation_is_refused_in_one_line(rig: Rig, case: str) -> None:
    answer = post(rig, MALFORMED[case])
    assert answer.status_code == 400
    assert "\n" not in answer.json()["error"]
    assert rig.events == []


def test_a_body_that_is_too_large_is_refused_before_it_is_read(rig: Rig) -> None:
    assert post(rig, b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    assert rig.events == []


def test_other_routes_and_methods_are_refused(rig: Rig) -> None:
    headers = {"Authorization": f"Bearer {rig.place.token}"}
    for method, path, status in (("GET", "/control", 405), ("POST", "/", 404)):
        answer = httpx.request(method, rig.place.url + path, headers=headers, timeout=30, trust_env=False)
        assert answer.status_code == status and "POST /control" in answer.json()["error"]


def test_a_law_that_would_be_broken_is_named_and_nothing_is_delivered(rig: Rig) -> None:
    answer = post(rig, {"operation": "scale", "replicas": 9})
    assert answer.status_code == 409 and "use a number from 1 to 8" in answer.json()["error"]
    both = [
        {"setting": "scheduler.max_staleness_steps", "value": "3"},
        {"setting": "scheduler.max_concurrent_groups", "value": "99"},
    ]
    answer = post(rig, {"operation": "set", "settings": both})
    assert answer.status_code == 409 and "max_concurrent_groups" in answer.json()["error"]
    answer = post(rig, {"operation": "drain", "reason": "spot", "replica": 7})
    assert answer.status_code == 409 and "[0, 1]" in answer.json()["error"]
    assert rig.events == []


def test_a_run_that_is_over_takes_no_orders(rig: Rig) -> None:
    rig.world.tell(StopRequested(reason="enough"))
    said = post(rig, {"operation": "scale", "replicas": 2}).json()["error"]
    assert said == "RUN is 'stopped': the run has ended: enough; resume it with `engine resume`"
    assert post(rig, {"operation": "state"}).status_code == 200
    assert rig.events == []


@pytest.mark.parametrize(
    ("figures", "fix"),
    [
        ({"max_steps": 1}, "resume it with a larger run.max_steps"),
        ({"prompts": 2}, "begin a run with its exported weights and more prompts"),
    ],
)
def test_a_finished_run_says_how_to_train_more(figures: dict[str, int], fix: str) -> None:
    run = Scripted(train_batch_size=2, max_staleness_steps=0, max_concurrent_groups=2, **figures)
    run.train_on(*run.running())
    with pytest.raises(ConfigError, match=fix):
        decide(Scale(replicas=2), run.scheduler, 8)


def test_replicas_that_others_count_on_are_not_scaled() -> None:
    figures = {"train_batch_size": 4, "max_staleness_steps": 2, "max_concurrent_groups": 12}
    pools = (Pool(tasks=("rollout",), replicas=(0, 1)), Pool(tasks=("train",)))
    with pytest.raises(ConfigError, match="pools of this run"):
        check_replicas(2, Limits(**figures, pools=pools), 8)
    apart = Limits(**figures, validation=ValidationLimits(rows=4, own_from=3))
    with pytest.raises(ConfigError, match="reserved for validation"):
        check_replicas(4, apart, 8)
    check_replicas(3, apart, 8)


# -- what is decided ---------------------------------------------------------------------------------------------------


def test_each_operation_is_the_event_that_carries_it_out(rig: Rig) -> None:
    bodies = [
        {"operation": "scale", "replicas": 4},
        {"operation": "drain", "reason": "spot", "replica": 1},
        {"operation": "set", "settings": [{"setting": "scheduler.max_drops", "value": "2"}]},
        {"operation": "state"},
        {"operation": "drain", "reason": "tonight"},
        {"operation": "stop", "reason": "now"},
    ]
    for one in bodies:
        assert post(rig, one).json()["done"] == f"did {one['operation']}"
    assert rig.events == [
        ReplicasWanted(replicas=4),
        ReplicaLeaves(replica=1, life=1, reason="spot"),
        SettingChanged(setting="scheduler.max_drops", value="2"),
        DrainRequested(reason="tonight"),
        StopRequested(reason="now"),
    ]


def test_settings_are_checked_one_after_the_other(rig: Rig) -> None:
    """K = 16 holds once S is 3."""
    settings = [("scheduler.max_staleness_steps", "3"), ("scheduler.max_concurrent_groups", "16")]
    changed = changes(settings, rig.world.scheduler.state.limits, rig.world.scheduler.policies)
    assert [(event.setting, event.value) for event in changed if isinstance(event, SettingChanged)] == settings


def test_an_attempt_is_given_more_time_than_its_rewards(rig: Rig) -> None:
    def set_group_s(seconds: str) -> Set:
        return Set(settings=(SettingRequest(setting="timeouts.group_s", value=seconds),))

    for seconds in ("null", "31"):
        assert len(decide(set_group_s(seconds), rig.world.scheduler, 8, reward_timeout_s=30.0)) == 1
    with pytest.raises(
        ConfigError,
        match=r"timeouts\.group_s is 30\.0, but must be longer than reward\.timeout_s = 30; use more than 30",
    ):
        decide(set_group_s("30"), rig.world.scheduler, 8, reward_timeout_s=30.0)


def test_a_replica_that_is_not_up_cannot_be_drained() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_trained == 1)
    world.tell(ProcessLost(kind="replica", index=1, life=1, reason="killed"))
    with pytest.raises(ConfigError, match=r"--replica 1 is starting: only a replica that is up .* use one of \[0\]"):
        decide(Drain(reason="spot", replica=1), world.scheduler, 8)


def test_a_resumed_run_has_the_replicas_that_were_wanted_last() -> None:
    world = steady_world(steps=None).until(lambda state: state.training.steps_trained == 1)
    lost = ProcessLost(kind="replica", index=1, life=1, final=True, reason="for good")
    assert after_resuming(steady_world().scheduler, (), replicas=2) == (), "it has never begun"
    assert after_resuming(world.scheduler, (), replicas=2) == ()
    world.tell(lost)
    assert after_resuming(world.scheduler, (), replicas=2) == (), "it is still wanted"
    world.tell(ReplicasWanted(replicas=3))
    assert after_resuming(world.scheduler, (), replicas=2) == (ReplicasWanted(replicas=3),)
    assert after_resuming(world.scheduler, (("rollout.replicas", "2"),), replicas=2) == ()
    world.tell(ReplicasWanted(replicas=1))
    assert after_resuming(world.scheduler, (), replicas=2) == (ReplicasWanted(replicas=1),)


def test_what_is_sent_is_what_is_parsed() -> None:
    for asked in (
        Drain(reason="x", replica=3),
        Scale(replicas=2),
        Look(),
        Set(settings=(SettingRequest(setting="a", value="b"),)),
    ):
        assert parse(asked.model_dump_json().encode()) == asked


# -- the command line --------------------------------------------------------------------------------------------------


def refused(capture: Capture, *arguments: str) -> str:
    """What is said on stderr: one line, exit 2."""
    assert cli.main(arguments) == 2
    said = capture.readouterr().err
    assert said.startswith("engine: ") and said.count("\n") == 1 and "Traceback" not in said
    return said


def test_the_commands_tell_the_run(rig: Rig, capsys: Capture) -> None:
    run = str(rig.run_dir)
    assert cli.main(["scale", run, "--replicas", "3"]) == 0
    assert capsys.readouterr().out == "did scale\n"
    assert cli.main(["set", run, "scheduler.max_drops=2", "scheduler.policies.deadline=drop"]) == 0
    assert cli.main(["drain", run, "--replica", "0"]) == 0
    assert cli.main(["drain", rig.run_dir.name]) == 0, "a name under runs/"
    assert cli.main(["stop", run]) == 0
    assert cli.main(["waits", run]) == 0
    assert rig.events == [
        ReplicasWanted(replicas=3),
        SettingChanged(setting="scheduler.max_drops", value="2"),
        SettingChanged(setting="scheduler.policies.deadline", value="drop"),
        ReplicaLeaves(replica=0, life=1, reason="asked by engine drain"),
        DrainRequested(reason="asked by engine drain"),
        StopRequested(reason="asked by engine stop"),
    ]


REFUSED: dict[str, tuple[list[str], str]] = {
    "B": (
        ["set", "RUN", "scheduler.train_batch_size=8"],
        "cannot be changed while the run is running: earlier admissions",
    ),
    "k": (["set", "RUN", "scheduler.sync_every=2"], "cannot be changed while the run is running: it determined"),
    "a typo": (["set", "RUN", "scheduler.max_stalenes_steps=2"], "did you mean scheduler.max_staleness_steps?"),
    "another field": (["set", "RUN", "trainer.learning_rate=1"], "while the run is running; set it in a new run"),
    "no value": (["set", "RUN", "scheduler.max_drops"], "must be path=value"),
    "a law": (["set", "RUN", "scheduler.max_concurrent_groups=3"], "B <= K <= B"),
    "no number": (["set", "RUN", "scheduler.max_drops=many"], "many"),
    "no policy": (["set", "RUN", "scheduler.policies.deadline=never"], "is not a registered policy"),
    "no replicas": (["scale", "RUN", "--replicas", "0"], "from 1 to 4096"),
    "no such replica": (["drain", "RUN", "--replica", "9"], "does not exist"),
    "no run": (["drain", "nowhere"], "does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_its_law(rig: Rig, capsys: Capture, case: str) -> None:
    arguments, words = REFUSED[case]
    said = refused(capsys, *[str(rig.run_dir) if word == "RUN" else word for word in arguments])
    assert words in said
    assert rig.place.token not in said
    assert rig.events == []


def test_a_run_that_has_ended_is_said_to_have(rig: Rig, capsys: Capture) -> None:
    withdraw(rig.run_dir)
    assert "is not started: its process ended before the first event" in refused(capsys, "stop", str(rig.run_dir))


def test_a_run_without_an_address_that_lives_is_not_to_be_resumed(rig: Rig, capsys: Capture) -> None:
    withdraw(rig.run_dir)
    lock = RecordLock(rig.run_dir / "schedule")
    for command in ("waits", "stop"):
        said = refused(capsys, command, str(rig.run_dir))
        assert "is still starting or ending, or runs with control.enabled: false" in said and "resume" not in said
    lock.release()


def test_a_run_that_was_killed_is_said_to_be_gone(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "schedule").mkdir()
    announce(tmp_path, ControlPlace("http://127.0.0.1:1", "secret"))
    said = refused(capsys, "drain", str(tmp_path))
    assert "does not answer at http://127.0.0.1:1" in said and "secret" not in said


def test_what_speaks_no_http_is_no_run(tmp_path: Path, capsys: Capture) -> None:
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(4096)
            self.request.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

    (tmp_path / "schedule").mkdir()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, args=(0.01,), daemon=True).start()
        announce(tmp_path, ControlPlace(f"http://127.0.0.1:{other.server_address[1]}", "secret"))
        said = refused(capsys, "drain", str(tmp_path))
        other.shutdown()
    assert "is not from a run of this engine version" in said and "secret" not in said


def test_a_token_of_another_run_is_refused(rig: Rig, capsys: Capture) -> None:
    announce(rig.run_dir, ControlPlace(rig.place.url, "stale-token"))
    said = refused(capsys, "stop", str(rig.run_dir))
    assert "refuses the token" in said and "stale-token" not in said
    assert rig.events == []
