"""Extensions: modules beside a config and installed packages are imported; `engine check` tests them first."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from engine import policies
from engine.cli import main
from engine.cli.run import _follow_up_commands
from engine.config import extensions, load_config, load_extensions, parse_config
from engine.errors import ConfigError
from engine.inspect import open_record
from engine.inspect.cursor import Cursor
from engine.policies import PolicySet, registry, state_registry
from engine.record import Header, Recorder
from engine.simulation.proof import prove, scaled_down
from engine.states.limits import AddedState, Limits, ValidationLimits
from engine.states.view import GroupView, PoolView, ReplicaView, ValidationView, View
from engine.storage import run_directory
from tests.core.scripted import Scripted
from tests.shipped_policies import SHIPPED

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PLAIN = "model:\n  make: arithmetic\nscheduler:\n  train_batch_size: 4\n  max_staleness_steps: 2\n"


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers, imports and puts on the path is known to that test alone."""
    known = {decision: dict(names) for decision, names in registry._REGISTERED.items()}
    states, modules, path = dict(state_registry._ADDED), set(sys.modules), list(sys.path)
    monkeypatch.setattr(extensions, "_loaded", set(extensions._loaded))
    yield
    for decision, names in known.items():
        registry._REGISTERED[decision] = names
    state_registry._ADDED.clear()
    state_registry._ADDED.update(states)
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name in ("mine", "packaged", "custom_policy", "embed", *PLACES):
            del sys.modules[name]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """A config beside a module `mine` of this text."""

    def write(module: str, chosen: str) -> Path:
        (tmp_path / "mine.py").write_text(module, encoding="utf-8")
        file = tmp_path / "run.yaml"
        file.write_text(f"run:\n  extensions: [mine]\n  max_steps: 5\n{PLAIN}  {chosen}\n", encoding="utf-8")
        return file

    return write


def a_policy(decision: str, method: str, body: str) -> str:
    return (
        "from engine import policies\ncalls = [0]\n\n"
        f"@policies.register({decision!r}, 'mine')\nclass Mine:\n    acts = True\n    def {method}:\n        {body}\n"
    )


JUDGE = """
from engine import policies

class Judge:
    def enters(self, view, group):
        return group.tokens > 3

policies.add_state(
    machine="group", state="judged", phase="parked", between=("generated", "batched"), policy=Judge, concurrency=5
)
"""


PLACES = {
    "before_generation": ("retrieving", "queued"),
    "after_generation": ("judging", "generated"),
    "before_training": ("inspecting", "scoring"),
    "before_publication": ("vetting", "publishing"),
}
"""The example of each place, with its state."""


@pytest.mark.parametrize("example", PLACES)
def test_each_place_of_added_states_has_an_example(example: str) -> None:
    limits = load_config(EXAMPLES / "states" / f"{example}.yaml").limits
    assert [(state.name, state.place) for state in limits.added_states] == [PLACES[example]]


def test_the_examples_of_added_states_are_proved_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load((EXAMPLES / "states" / "before_training.yaml").read_text(encoding="utf-8"))
    tree["run"] |= {"extensions": [*PLACES], "code_dir": str(EXAMPLES / "states")}
    tree["scheduler"]["states"] = [state for state, _ in PLACES.values()]
    config = tmp_path / "all.yaml"
    config.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert main(["check", str(config)]) == 0
    assert "100 simulated runs keep every law under state retrieving, state judging" in capsys.readouterr().out
    assert main(["states", str(config)]) == 0
    drawn = capsys.readouterr().out
    assert "queued --> retrieving : retrieving" in drawn and "retrieving --> queued : prepare" in drawn
    assert "scoring --> inspecting : inspecting" in drawn and "publishing --> vetting : vetting" in drawn
    assert re.search(r"\| retrieving +\| waiting +\| prepare", drawn)


def test_weights_that_only_gpus_receive_cannot_be_inspected() -> None:
    nccl = ["rollout.transport=distributed", "rollout.transport_backend=nccl"]
    with pytest.raises(ConfigError, match="added state vetting, which inspects weights, has no GPU to receive them"):
        load_config(EXAMPLES / "states" / "before_publication.yaml", nccl)


def test_a_module_beside_the_config_is_imported(config: Callable[..., Path]) -> None:
    module = a_policy("admission", "admit(self, view, legal)", "return min(legal, 3)")
    file = config(module, "policies: {admission: mine}")
    loaded = load_config(file)
    assert loaded.run.code_dir == str(file.parent)
    assert parse_config(loaded.model_dump(mode="json")) == loaded, "so it is found again when the run is resumed"


def test_an_added_state_is_named_in_the_config_and_drawn(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = config(JUDGE, "states: [judged]")
    assert load_config(file).limits.added_states == (AddedState(name="judged", concurrency=5),)
    assert main(["states", str(file), "--format", "table"]) == 0
    drawn = capsys.readouterr().out
    assert "| judged     | parked   | generate | generated" in drawn
    assert main(["states", "--format", "table"]) == 0
    assert "judged" not in capsys.readouterr().out


def test_the_state_in_which_groups_are_rewarded_comes_with_its_pool_alone(config: Callable[..., Path]) -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler\.states 'rewarding' is added by a pool with the task reward alone"
    ):
        load_config(config(JUDGE, "states: [rewarding]"))
    with pytest.raises(
        ConfigError,
        match=r"states 'rewardin' is not a registered state; (name .* in run.extensions|use one of (?!.*rewarding))",
    ):
        load_config(config("", "states: [rewardin]"))
    assert "rewarding" not in state_registry.state_names()


@pytest.mark.parametrize(
    ("module", "chosen", "says"),
    [
        (
            a_policy("admission", "admit(self, view, legal)", "return legal + 1"),
            "admission",
            "it must return an integer",
        ),
        (a_policy("filter", "keep(self, view, outcome)", "return 1 // 0"), "filter", "raised ZeroDivisionError"),
        (a_policy("admission", "admit(self, view, legal)", "return 0"), "admission", "the policies start nothing"),
        (
            a_policy("batching", "select(self, view, size)", "return list(view.ready_ids())[:size]"),
            "batching",
            "must take",
        ),
        (
            a_policy("filter", "keep(self, view, outcome)", "calls[0] += 1; return calls[0] % 7 > 1"),
            "filter",
            "law 8: a restored scheduler decides differently",
        ),
        (
            a_policy(
                "filter",
                "keep(self, view, outcome)",
                "self.n = getattr(self, 'n', 0) + 1; self.memory['n'] = self.n; return True",
            ).replace("acts = True", "memory: dict"),
            "filter",
            "law 8: a restored scheduler has another state",
        ),
    ],
)
def test_a_policy_that_is_not_lawful_is_refused_with_a_record_of_it(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str], module: str, chosen: str, says: str
) -> None:
    file = config(module, f"policies: {{{chosen}: mine}}")
    assert main(["check", str(file)]) == 2
    said = capsys.readouterr().err
    assert f"scheduler.policies is '{chosen} mine': fails in a simulated run" in said
    assert says in said
    shown = re.search(r"`engine debug (\S+) --extensions` shows the run", said)
    assert shown is not None
    cursor = Cursor(lambda: open_record(Path(shown[1])))
    assert len(cursor) > 1 and cursor.run == "simulated"


@pytest.mark.parametrize(
    ("method", "body", "says"),
    [
        ("__init__(self, width)", "self.width = width", r"TypeError: Mine.__init__\(\) missing .*'width'"),
        ("__init__(self)", "raise ValueError('no width')", r"ValueError: no width \(mine\.py:\d+, in __init__\)"),
    ],
)
def test_a_policy_that_cannot_be_made_is_refused_by_its_decision_and_name(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str], method: str, body: str, says: str
) -> None:
    module = a_policy("admission", "admit(self, view, legal)", "return legal") + f"    def {method}:\n        {body}\n"
    assert main(["check", str(config(module, "policies: {admission: mine}"))]) == 2
    line = f"engine: scheduler.policies.admission is 'mine': it cannot be made without arguments: {says}\n"
    assert re.fullmatch(line, capsys.readouterr().err)


def test_a_state_whose_policy_cannot_be_made_is_named(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    module = JUDGE.replace("class Judge:", "class Judge:\n    def __init__(self, width):\n        self.width = width\n")
    assert main(["check", str(config(module, "states: [judged]"))]) == 2
    says = r"engine: scheduler.states is 'judged': its policy Judge cannot be made without arguments: TypeError: .*\n"
    assert re.fullmatch(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("registered", "method", "says"),
    [
        ("'filter', 'mine', api=2", "keep", "is 2: the policy 'mine' needs a policy API version other than this"),
        ("'filtre', 'mine'", "keep", "'filtre' is not a decision; use one of " + ", ".join(policies.DEFAULTS)),
        ("'filter', 'none'", "keep", "'none' is already registered for filter; use another name"),
        ("'filter', 'mine'", "kept", "'Mine' has no method keep(); see policies/protocols.py"),
    ],
)
def test_a_module_whose_registration_is_refused_gets_only_that_error(
    config: Callable[..., Path], registered: str, method: str, says: str
) -> None:
    module = f"from engine import policies\n@policies.register({registered})\nclass Mine:\n    {method} = len\n"
    with pytest.raises(ConfigError) as caught:
        load_config(config(module, "states: []"))
    assert str(caught.value).startswith(f"run.extensions is 'mine': policies.register {says}")
    assert "Python path" not in str(caught.value)


def test_only_the_error_of_a_missing_module_says_where_modules_are_searched(config: Callable[..., Path]) -> None:
    file = config("raise RuntimeError('out of order')", "states: []")
    with pytest.raises(
        ConfigError, match=r"'mine' cannot be imported: RuntimeError: out of order \(mine\.py:1, in <module>\)$"
    ):
        load_config(file)
    says = r"'none\.such' cannot be imported: .*No module named 'none'; use a module on the Python path or in"
    with pytest.raises(ConfigError, match=says):
        load_config(file, ["run.extensions=[none.such]"])


def test_a_module_that_fails_after_it_has_registered_fails_by_the_same_error_again(
    config: Callable[..., Path],
) -> None:
    good = JUDGE + a_policy("admission", "admit(self, view, legal)", "return legal")
    file = config(good + "raise RuntimeError('out of order')\n", "states: [judged]")
    for _ in range(2):
        with pytest.raises(ConfigError, match="'mine' cannot be imported: RuntimeError: out of order"):
            load_config(file)
    assert "judged" not in state_registry.state_names() and "mine" not in registry.names("admission")
    (file.parent / "mine.py").write_text(good, encoding="utf-8")
    importlib.invalidate_caches()
    assert load_config(file).scheduler.states == ("judged",)


def test_modules_of_one_name_beside_two_configs_are_refused(config: Callable[..., Path], tmp_path: Path) -> None:
    file = config(JUDGE, "states: [judged]")
    load_config(file)
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.py").write_text("", encoding="utf-8")
    (other / "run.yaml").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    says = rf"{tmp_path}/mine\.py and {other}/mine\.py are different modules of this name; rename one"
    with pytest.raises(ConfigError, match=says):
        load_config(other / "run.yaml")
    load_config(file)


@pytest.mark.parametrize("command", ["replay", "waits"])
def test_a_command_says_that_the_extensions_of_its_run_are_not_imported(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(JUDGE)
    before = {*state_registry.registered()}
    judged = (AddedState(name="judged", concurrency=5),)
    limits = Limits(train_batch_size=4, max_staleness_steps=1, max_concurrent_groups=8, added_states=judged).to_plain()
    written = {"run": {"extensions": ["mine"], "code_dir": str(tmp_path)}}
    for name, own in (("own", written), ("plain", {"run": {"extensions": []}})):
        header = Header(run=name, limits=limits, policies={}, config=own)
        Recorder(tmp_path / name / "schedule", header).close()
    says = "engine: the run's configuration names extensions: use --extensions to import them"
    assert main([command, str(tmp_path / "own")]) == 2
    said = capsys.readouterr().err
    assert "'judged' is not a registered state" in said and says in said
    assert main([command, str(tmp_path / "plain")]) == 2
    assert says not in capsys.readouterr().err
    main([command, str(tmp_path / "own"), "--extensions"])
    assert "not a registered state" not in capsys.readouterr().err
    state_registry.forget({*state_registry.registered()} - before)
    assert main(["status", str(tmp_path / "own")]) == 5, "it needs no extensions"


def install(place: Path, module: str, points: str = "own = packaged") -> None:
    """A package as pip would leave it."""
    (place / "packaged.py").write_text(module, encoding="utf-8")
    (place / "packaged-1.0.dist-info").mkdir()
    (place / "packaged-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: packaged\nVersion: 1.0\n")
    (place / "packaged-1.0.dist-info" / "entry_points.txt").write_text(f"[step_engine.extensions]\n{points}\n")
    sys.path.insert(0, str(place))


def test_an_installed_package_is_imported_when_a_config_is_read(tmp_path: Path) -> None:
    install(tmp_path, a_policy("admission", "admit(self, view, legal)", "return legal"))
    file = tmp_path / "run.yaml"
    file.write_text(f"{PLAIN}  policies: {{admission: mine}}\n", encoding="utf-8")
    assert load_config(file).policies().custom == ["admission mine"]
    load_extensions()  # once is enough


def test_an_entry_point_may_be_a_function(tmp_path: Path) -> None:
    install(
        tmp_path, f"def begin():\n{'    '.join(['', *JUDGE.strip().splitlines(keepends=True)])}", "own = packaged:begin"
    )
    load_extensions()
    assert "judged" in state_registry.state_names()


def test_a_broken_package_is_named_with_the_reason(tmp_path: Path) -> None:
    install(tmp_path, "raise RuntimeError('out of order')")
    says = r"'own' of packaged cannot be loaded: RuntimeError: out of order \(.*\); fix or uninstall packaged"
    with pytest.raises(ConfigError, match=says):
        load_extensions()


# scaling a run down


def test_a_run_is_scaled_down_within_the_laws() -> None:
    limits = Limits(
        train_batch_size=1024, max_staleness_steps=9, max_concurrent_groups=4096, sync_every=6, async_ratio=7.5,
        over_sample=0.5, max_steps=500, added_states=(AddedState(name="rewarding", concurrency=64),),
        validation=ValidationLimits(rows=999, replicas=7, own_from=31, every=3),
    )  # fmt: skip
    small = scaled_down(limits)
    assert (small.train_batch_size, small.max_staleness_steps, small.sync_every) == (4, 3, 4)
    assert (small.async_ratio, small.over_sample, small.max_steps) == (3, 0.5, 6)
    assert small.max_concurrent_groups == 16, "four batches, as before"
    assert small.added_states == (AddedState(name="rewarding", concurrency=3),)
    assert small.validation == replace(limits.validation, rows=12, replicas=2, own_from=2)  # type: ignore[type-var]
    assert prove(limits, {}, runs=2) == 2


def test_simulated_runs_do_not_call_the_work_of_a_state(config: Callable[..., Path]) -> None:
    """The work may take a minute, and may call a paid service."""
    costly = "    async def work(self, group):\n        raise SystemExit('called')\n\npolicies.add_state"
    file = config(JUDGE.replace("policies.add_state", costly), "states: [judged]")
    assert prove(load_config(file).limits, {}, runs=2) == 2


# the example


def test_the_example_is_lawful(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(EXAMPLES / "custom_policy.yaml")]) == 0
    assert "ok: 100 simulated runs keep every law under admission curriculum\n" in capsys.readouterr().out


def test_the_example_widens_as_the_reward_rises() -> None:
    load_extensions(["custom_policy"], str(EXAMPLES))
    run = Scripted(
        train_batch_size=2, max_staleness_steps=3, max_concurrent_groups=8, policies={"admission": "curriculum"}
    )
    widths = []
    for reward in (0.2, 0.2, 0.31, 0.1, 0.42):
        widths.append(len(run.running()))
        for id in run.running()[:2]:
            run.tell(structs.replace(run.generated(id), reward_mean=reward))
        run.train()
        run.publish()
        run.install()
    widths.append(len(run.running()))
    assert widths == [2, 2, 2, 4, 4, 6], "0.11 is two steps of 0.05, 0.22 four"


def test_the_example_runs_in_one_process() -> None:
    program = "import custom_policy; result = custom_policy.main(); assert result.steps == 20"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("finished: 20 train steps")


def test_the_names_of_the_engines_own_policies_need_no_proof() -> None:
    assert PolicySet.from_names({"admission": "whole-batches"}).custom == []


def test_the_page_names_every_decision_every_policy_and_every_field() -> None:
    page = (EXAMPLES.parent / "docs" / "EXTENDING.md").read_text(encoding="utf-8")
    fields = [name for name in dir(View) if not name.startswith("_")]
    fields += [*GroupView._fields, *ReplicaView._fields, *ValidationView._fields, *PoolView._fields]
    chosen = [name for decision in SHIPPED for name in (decision, *SHIPPED[decision])]
    missing = [name for name in {*fields, *chosen} if f"`{name}`" not in page and f"`{name}(" not in page]
    assert not missing


@pytest.mark.parametrize(("named", "flag"), [(["mine"], " --extensions"), ([], "")])
def test_what_to_type_next_imports_what_the_config_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: list[str], flag: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Recorder(Path("here/schedule"), Header(run="x", limits={}, config={"run": {"extensions": named}})).close()
    said = list(_follow_up_commands(run_directory.RunDirectory(Path("here")), finished=True))
    assert said == ["next:", f"  engine explain here{flag}", f"  engine replay here{flag}"]
