"""The house rules, read off the sources: who imports whom, what the pure core may not touch, sizes, names, addresses.

Every rule is a function from a source to complaints. It is run on the sources, where it must find something to look at
and nothing to complain of, and on a sample that breaks it, where it must complain: a check that cannot fail is none.
"""

import ast
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, takewhile
from pathlib import Path

import pytest

from engine.config import load_config
from engine.states.orders import RELATIONS

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "engine"
pytestmark = pytest.mark.xdist_group("house")  # one process reads the sources

# -- who may import whom (docs/ARCHITECTURE.md draws it) ---------------------------------------------------------------

TYPES = {"ids", "errors", "trajectory", "reward_histogram", "input_identity", "gpu_request"}
BOTTOM = {*TYPES, "protocols", "section", "hardware"}
EVENTS = {*TYPES, "events", "commands"}
STATES = {*EVENTS, "states"}
POLICIES = {*STATES, "policies"}
SCHEDULING = {*POLICIES, "scheduling"}
RECORD = {*SCHEDULING, "record"}
RUNTIME = {*RECORD, "hardware", "protocols", "workers", "storage", "metrics", "control", "gateway", "config", "version"}
WORK = {"training", "tasks", "environments", "rollout"}

ALLOWED: dict[str, set[str]] = {
    # the bottom: names, failures, and what a user's own code meets
    "ids": TYPES,
    "errors": TYPES,
    "trajectory": TYPES,
    "section": TYPES,
    "reward_histogram": set(),
    "input_identity": {"ids", "errors"},
    "gpu_request": set(),
    "hardware": set(),
    "protocols": BOTTOM,
    "extras": BOTTOM,
    "version": BOTTOM,
    # the pure core, each layer on those before it
    "events": TYPES,
    "commands": TYPES,
    "states": EVENTS,
    "policies": STATES,
    "scheduling": POLICIES,
    # the record
    "record": SCHEDULING,
    # orders in, events out, around a user's Generator and Trainer; and what they keep
    "storage": {*EVENTS, "protocols", "record"},
    "workers": {*POLICIES, "protocols", "storage", "record"},
    # a run seen and controlled from outside
    "control": SCHEDULING,
    "metrics": {*STATES, "protocols", "record", "control", "extras"},
    "inspect": {*RECORD, "metrics", "version"},
    # the work itself, which knows nothing of the scheduler
    "training": BOTTOM,
    "tasks": {*BOTTOM, "training", "extras"},
    "environments": {*BOTTOM, "tasks"},
    "rollout": {*BOTTOM, *WORK, "extras"},
    "gateway": {*BOTTOM, "rollout", "control"},  # agents' calls become requests to a replica
    "config": {*SCHEDULING, *BOTTOM, *WORK, "extras"},
    # the loop, and what surrounds it
    "runtime": RUNTIME,
    "simulation": {*RUNTIME, "runtime", "section", "inspect"},
    "plans": {*RUNTIME, *WORK, "runtime"},
    "actors": {*RUNTIME, *BOTTOM, *WORK, "runtime", "plans"},
    # the wiring
    "cli": {*RUNTIME, *BOTTOM, *WORK, "runtime", "plans", "simulation", "actors", "inspect", "extras"},
    "testing": {*RUNTIME, "runtime", "simulation", "inspect"},
    "api": {*RUNTIME, *WORK, "runtime", "cli", "extras"},
    "__init__": {*POLICIES, "api", "runtime", "environments", "version"},
    "__main__": {"cli"},
}

PURE = (*TYPES, "events", "commands", "states", "policies", "scheduling")
IMPURE = {"time", "random", "asyncio", "uuid", "os", "logging", "datetime", "secrets", "threading"}

# -- sources -----------------------------------------------------------------------------------------------------------


class Source:
    """One module of the engine. `path` is relative to the root of the project."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.tree = ast.parse(text, path)
        self.nodes = [*ast.walk(self.tree)]

    @property
    def unit(self) -> str:
        """The layer: first part of the path under engine/."""
        return Path(self.path).parts[1].removesuffix(".py")

    @property
    def module(self) -> str:
        return ".".join(Path(self.path).with_suffix("").parts).removesuffix(".__init__")

    @property
    def package(self) -> list[str]:
        return list(Path(self.path).parent.parts)

    def base_of(self, node: ast.ImportFrom) -> str:
        """The dotted module that names are imported from."""
        up = self.package[: len(self.package) - node.level + 1] if node.level else []
        return ".".join([*up, *([node.module] if node.module else [])])

    def imports(self) -> Iterator[tuple[int, str]]:
        """(line, dotted module) of every import, late and type-checking ones included."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self.base_of(node)
                # `from engine import policies` imports engine.policies.
                yield from ((node.lineno, f"engine.{a.name}" if base == "engine" else base) for a in node.names)


@cache
def sources() -> list[Source]:
    return [Source(str(p.relative_to(ROOT)), p.read_text(encoding="utf-8")) for p in sorted(ENGINE.rglob("*.py"))]


def pure_sources() -> list[Source]:
    return [source for source in sources() if source.unit in PURE]


# -- rules -------------------------------------------------------------------------------------------------------------

Rule = Callable[[Source], Iterator[str]]


def imports_downwards(source: Source) -> Iterator[str]:
    """A layer imports itself and those below it."""
    if source.unit not in ALLOWED:
        yield f"{source.path}: {source.unit} is in no layer; give it a place in ALLOWED"
        return
    allowed = ALLOWED[source.unit] | {source.unit}
    for line, module in source.imports():
        parts = module.split(".")
        if parts[0] == "engine" and parts[1] not in allowed:
            yield f"{source.path}:{line}: {source.unit} may not import {module}"


def heavy_packages_stay_home(source: Source) -> Iterator[str]:
    """Ray, torch and vLLM are imported where they belong only."""
    homes: dict[str, bool] = {
        "ray": source.unit == "actors",
        "torch": source.unit in {"training", "rollout", "actors"},
        "peft": source.path == "engine/training/lora.py",
        "vllm": source.path.startswith("engine/rollout/vllm/"),
    }
    for line, module in source.imports():
        if not homes.get(module.split(".")[0], True):
            yield f"{source.path}:{line}: {module} is not for {source.unit}"


def core_is_pure(source: Source) -> Iterator[str]:
    """Time, chance and the world reach the core as events only."""
    for line, module in source.imports():
        if module.split(".")[0] in IMPURE:
            yield f"{source.path}:{line}: the pure core may not import {module}"


def sizes_are_kept(source: Source) -> Iterator[str]:
    """Files of at most 700 lines, functions of at most 70."""
    lines = source.text.count("\n")
    if lines > 700:
        yield f"{source.path}: {lines} lines, 700 are the roof"
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > 70:
                yield f"{source.path}:{node.lineno}: {node.name} has {length} lines, 70 are the roof"


def nothing_sleeps(source: Source) -> Iterator[str]:
    """Every wait ends by an event or a timer of its own. (What replicas do is another sleep, and no module's.)
    A simulation sleeps virtual seconds."""
    if source.path.startswith("engine/simulation/"):
        return
    aliases = [alias for node in source.nodes if isinstance(node, ast.Import) for alias in node.names]
    modules = {alias.asname or alias.name.split(".")[0] for alias in aliases}
    for node in source.nodes:
        named = isinstance(node, ast.Name) and node.id == "sleep"
        of_module = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        if named or (of_module and node.attr == "sleep"):
            yield f"{source.path}:{node.lineno}: sleeps"


UNPICKLES = {
    "engine/actors/detached_actors.py": "the plan of a run, from the process that launches it to its actors",
    "engine/runtime/wire.py": "calls between the actors of one run",
    "engine/training/rank_process.py": "calls of a rank, from memory of the process that started it",
}
"""Where something is unpickled: traffic between processes of one run, which Ray pickles as well."""
EXECUTES = {
    "engine/tasks/code_roles.py": "responses and their tests, in isolated processes",
}
"""Where code is made of text."""


def nothing_read_is_unpickled(source: Source) -> Iterator[str]:
    """Nothing from disk or network becomes code: no pickle, however wrapped, and no code of a model's repository."""
    pickling = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle", "pandas"}
    calls = {"torch.load", "np.load", "numpy.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec"}
    for node in source.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom) and source.path not in UNPICKLES:
            of = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            parts = {part for name in (*of, *(alias.name for alias in node.names)) for part in name.split(".")}
            if parts & pickling:
                yield f"{source.path}:{node.lineno}: imports {sorted(parts & pickling)[0]}"
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in calls and source.path not in EXECUTES:
                yield f"{source.path}:{node.lineno}: calls {ast.unparse(node.func)}"
            automatic, _, method = ast.unparse(node.func).rpartition(".")
            loads = automatic.startswith("Auto") and method in ("from_pretrained", "from_config")
            if loads and all(word.arg != "trust_remote_code" for word in node.keywords):
                yield f"{source.path}:{node.lineno}: {automatic} asks the user without trust_remote_code=False"
            for word in node.keywords:
                if word.arg in ("allow_pickle", "trust_remote_code") and ast.unparse(word.value) != "False":
                    yield f"{source.path}:{node.lineno}: asks for {word.arg}"


def names_say_something(source: Source) -> Iterator[str]:
    """No module is called after nothing in particular."""
    empty = {"utils", "util", "helpers", "helper", "manager", "managers", "misc", "common"}
    for part in Path(source.path).with_suffix("").parts:
        if empty & set(part.split("_")):
            yield f"{source.path}: {part!r} does not say what is in it"


TEST_NAME = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)

BANNED_NAMES = {
    *("utils", "helpers", "manager", "misc", "common"),
    *("told", "past", "survived", "lasting", "watched", "going_on", "kept", "ended", "there", "to_nowhere"),
}


def names_are_nouns_and_verbs(source: Source) -> Iterator[str]:
    """Names of modules, functions and classes say what they contain or do: none is a bare participle or preposition."""
    named = [(1, Path(source.path).stem)]
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named += [(node.lineno, node.name) for node in source.nodes if isinstance(node, defined)]
    for line, name in named:
        if name.strip("_").lower() in BANNED_NAMES:
            yield f"{source.path}:{line}: {name!r} does not say what it is or does"


def _is_set(node: ast.expr | None, known: set[str]) -> bool:
    """Whether an expression is a set as far as this file shows. `known` holds names and attributes that hold sets."""
    if isinstance(node, ast.Set | ast.SetComp):
        return True
    if isinstance(node, ast.Call):
        made = isinstance(node.func, ast.Name) and node.func.id in {"set", "frozenset"}
        derived = {"difference", "union", "intersection", "symmetric_difference"}
        return made or (isinstance(node.func, ast.Attribute) and node.func.attr in derived)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.BitOr | ast.BitAnd | ast.BitXor):
        return _is_set(node.left, known) or _is_set(node.right, known)
    return ast.unparse(node).rpartition(".")[2] in known if isinstance(node, ast.Name | ast.Attribute) else False


def _set_names(tree: ast.Module) -> set[str]:
    """Names and attributes that are annotated as sets or assigned one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            target = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            if re.match(r"(typing\.)?(set|frozenset|Set|AbstractSet|MutableSet)\b", ast.unparse(node.annotation)):
                names.add(target.rpartition(".")[2])
        elif isinstance(node, ast.Assign) and _is_set(node.value, set()):
            names |= {ast.unparse(target).rpartition(".")[2] for target in node.targets}
    return names


def loops_are_ordered(source: Source) -> Iterator[str]:
    """A set is for membership, never for a loop: its order is not the same in the next process."""
    known = _set_names(source.tree)
    for node in source.nodes:
        looped: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            looped = [node.iter]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            # sorted, len, min, max, sum, any and all do not depend on the order.
            looped = node.args if node.func.id in {"list", "tuple", "iter", "enumerate", "map", "filter", "zip"} else []
        for expression in looped:
            if _is_set(expression, known):
                yield f"{source.path}:{expression.lineno}: loops over a set: {ast.unparse(expression)}"


EVERYWHERE: list[tuple[Rule, str, str]] = [
    (imports_downwards, "engine/states/group.py", "from engine.policies import registry"),
    (imports_downwards, "engine/states/group.py", "from ..runtime.driver import Driver"),
    (imports_downwards, "engine/simulation/world.py", "def late():\n    from engine import actors"),
    (imports_downwards, "engine/training/losses.py", "import engine.rollout.torch.torch_backend"),
    (imports_downwards, "engine/novel/thing.py", "import engine.ids"),
    (heavy_packages_stay_home, "engine/runtime/driver.py", "import ray.util"),
    (heavy_packages_stay_home, "engine/tasks/rewards.py", "from torch.nn import Linear"),
    (heavy_packages_stay_home, "engine/rollout/torch/torch_backend.py", "import vllm"),
    (sizes_are_kept, "engine/runtime/driver.py", "x = 1\n" * 701),
    (sizes_are_kept, "engine/runtime/driver.py", "def f():\n" + "    x = 1\n" * 70),
    (nothing_sleeps, "engine/runtime/driver.py", "import time\ntime.sleep(1)"),
    (nothing_sleeps, "engine/runtime/driver.py", "import asyncio as loops\nloops.sleep(1)"),
    (nothing_sleeps, "engine/runtime/driver.py", "from asyncio import sleep\nasync def f():\n    await sleep(0)"),
    (nothing_read_is_unpickled, "engine/record/reader.py", "import pickle"),
    (nothing_read_is_unpickled, "engine/control/control_server.py", "from ray import cloudpickle"),
    (nothing_read_is_unpickled, "engine/training/model_checkpoint.py", "import torch\ntorch.load('model.pt')"),
    (
        nothing_read_is_unpickled,
        "engine/tasks/dataset.py",
        "import numpy as np\nnp.load('rows.npy', allow_pickle=True)",
    ),
    (nothing_read_is_unpickled, "engine/config/loading.py", "import yaml\nyaml.unsafe_load('')"),
    (nothing_read_is_unpickled, "engine/runtime/wire.py", "AutoModel.from_pretrained('x', trust_remote_code=True)"),
    (nothing_read_is_unpickled, "engine/runtime/wire.py", "AutoConfig.from_pretrained('x')"),
    (names_say_something, "engine/utils.py", ""),
    (names_say_something, "engine/rollout/weight_manager.py", ""),
    (names_are_nouns_and_verbs, "engine/runtime/survived.py", ""),
    (names_are_nouns_and_verbs, "engine/runtime/driver.py", "class A:\n    async def _ended(self): ..."),
    (names_are_nouns_and_verbs, "engine/runtime/driver.py", "class Kept: ..."),
]
IN_THE_CORE: list[tuple[Rule, str, str]] = [
    (core_is_pure, "engine/scheduling/scheduler.py", "import time"),
    (core_is_pure, "engine/policies/retry.py", "from random import random"),
    (core_is_pure, "engine/states/ledger.py", "import os.path"),
    (loops_are_ordered, "engine/scheduling/scheduler.py", "for x in {1, 2}: pass"),
    (loops_are_ordered, "engine/scheduling/scheduler.py", "a = [x for x in set(b)]"),
    (loops_are_ordered, "engine/scheduling/scheduler.py", "for x in a.difference(b): pass"),
    (loops_are_ordered, "engine/scheduling/scheduler.py", "for x in set(a) - b: pass"),
    (
        loops_are_ordered,
        "engine/scheduling/scheduler.py",
        "class A:\n    late: set[int]\n    def f(self):\n        return list(self.late)",
    ),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in EVERYWHERE), ids=lambda rule: rule.__name__)
def test_rule_of_the_engine(rule: Rule) -> None:
    everything = sources()
    assert len(everything) > 20, "found too little to check"
    assert [complaint for source in everything for complaint in rule(source)] == []


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in IN_THE_CORE), ids=lambda rule: rule.__name__)
def test_rule_of_the_pure_core(rule: Rule) -> None:
    core = pure_sources()
    missing = set(PURE) - {source.unit for source in core}
    assert not missing, f"found nothing to check in {sorted(missing)}"
    assert [complaint for source in core for complaint in rule(source)] == []


@pytest.mark.parametrize(("rule", "path", "text"), [*EVERYWHERE, *IN_THE_CORE])
def test_a_broken_rule_is_noticed(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text)))


def test_ordered_loops_are_let_by() -> None:
    text = (
        "seen: set[int] = set()\nfor x in sorted(seen): pass\nfor y in {1: 2}: pass\nok = 3 in seen and len(seen) > 1"
    )
    assert list(loops_are_ordered(Source("engine/scheduling/scheduler.py", text))) == []


def test_a_sleeping_replica_is_let_by() -> None:
    text = "import time\nasync def f(replica):\n    await replica.sleep()\n    await replica.engine.sleep(level=1)"
    assert list(nothing_sleeps(Source("engine/workers/replica.py", text))) == []


BESIDE = {*BOTTOM, "extras", "version", "__init__", "__main__"}
"""What the picture of the layers leaves out: files that every folder may import."""


def layers(of: Sequence[Source]) -> dict[str, set[str]]:
    """Which folders each imports, without those that it reaches by others. `commands` counts as `events`."""
    whole: dict[str, set[str]] = {}
    for source in of:
        unit = source.unit.replace("commands", "events")
        if unit in BESIDE:
            continue
        units = [
            module.split(".")[1].replace("commands", "events") for _, module in source.imports() if "engine." in module
        ]
        whole.setdefault(unit, set()).update(
            one for one in units if one in ALLOWED and one not in BESIDE and one != unit
        )

    def reached(unit: str) -> set[str]:
        return whole[unit].union(*(reached(other) for other in whole[unit]))

    return {unit: direct - set().union(*(reached(one) for one in direct)) for unit, direct in whole.items()}


def drawn(page: str) -> dict[str, set[str]]:
    """The edges of a page's first mermaid picture."""
    picture = page.split("```mermaid", 1)[1].split("```", 1)[0]
    edges = re.findall(r"^ *(\w+) --> (\w+)$", picture, re.MULTILINE)
    return {unit: {below for above, below in edges if above == unit} for edge in edges for unit in edge}


def test_the_picture_of_the_layers_is_the_import_graph() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert drawn(page) == layers(sources())
    missing = page.replace("    runtime --> workers\n", "")
    assert drawn(missing) != layers(sources()) and drawn(
        page.replace("storage --> record", "storage --> events")
    ) != drawn(page)


def test_the_layers_have_no_circle() -> None:
    def below(unit: str, above: tuple[str, ...] = ()) -> None:
        assert unit not in above, f"{unit} is below itself: {above}"
        for lower in ALLOWED[unit] - BOTTOM - {unit}:
            below(lower, (*above, unit))

    for unit in ("cli", "__init__"):
        below(unit)


def module_graph(all_sources: Sequence[Source]) -> dict[str, list[str]]:
    """Which files each file imports, those for type checking alone and late imports included."""
    known = {source.module: source for source in all_sources}

    def reached(source: Source) -> Iterator[str]:
        for node in source.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = source.base_of(node)
                yield from (f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names)

    graph = {module: {*reached(source)} & known.keys() - {module} for module, source in known.items()}
    return {module: sorted(below) for module, below in graph.items()}


def circles(graph: dict[str, list[str]]) -> Iterator[list[str]]:
    """A path back to its beginning for each file that is on one; the first found."""
    for module in graph:
        paths, seen = [[module]], {module}
        while paths:
            path = paths.pop()
            if module in graph[path[-1]]:
                yield path
                break
            new = [below for below in graph[path[-1]] if below not in seen]
            seen.update(new)
            paths += [[*path, below] for below in new]


def test_no_files_import_each_other_in_a_circle() -> None:
    assert list(circles(module_graph(sources()))) == []


@pytest.mark.parametrize("late", ["def f():\n    from engine import b", "if TYPE_CHECKING:\n    from .b import B"])
def test_a_circle_of_late_or_typing_imports_is_noticed(late: str) -> None:
    files = [Source("engine/a.py", late), Source("engine/b.py", "import engine.a")]
    assert next(circles(module_graph(files))) == ["engine.a", "engine.b"]


# -- what an import brings ---------------------------------------------------------------------------------------------


LIGHT = (
    "engine", "engine.runtime.driver", "engine.policies", "engine.api", "engine.config", "engine.runtime.local",
    "engine.plans.configured_plan", "engine.gateway.gateway_server",
)  # fmt: skip


def brought(modules: Sequence[str], heavy: Sequence[str]) -> list[str]:
    """Which heavy packages a new process has after it imported these modules."""
    code = f"import sys, {', '.join(modules)}; print(*(m for m in {heavy!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_light_imports_bring_nothing_heavy() -> None:
    assert brought(LIGHT, ("ray", "torch", "vllm", "transformers")) == []


def test_the_process_of_an_actor_loads_what_it_uses_alone() -> None:
    """A run starts at least six of them at once: what Ray itself loads is their start, and little of ours. Each has a
    handle of the scheduler, and Ray imports the class of a handle."""
    actors = ("engine.actors.worker_actor", "engine.actors.store_actors", "engine.actors.scheduler_actor")
    heavy = ("aiohttp", "prometheus_client", "numpy", "pydantic", "torch", "vllm", "transformers")
    assert brought(actors, heavy) == []


def test_the_launching_process_loads_no_server_and_no_model() -> None:
    launching = ("engine.cli", "engine.actors.launch", "engine.control.listening_address")
    assert brought(launching, ("aiohttp", "prometheus_client", "torch", "vllm", "transformers")) == []


# -- configs and documents ---------------------------------------------------------------------------------------------


def test_every_shipped_config_loads() -> None:
    shipped = sorted((ROOT / "configs").glob("*.yaml"))
    assert shipped, "found no config to check"
    for path in shipped:
        load_config(path)


def test_the_config_that_the_readme_shows_loads(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert blocks, "found no config to check"
    for block in blocks:
        (tmp_path / "shown.yaml").write_text(block, encoding="utf-8")
        load_config(tmp_path / "shown.yaml")


def test_the_readme_shows_the_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shown = re.findall(r"^make ([a-z]+)", readme, re.MULTILINE)
    assert {"run", "test"} <= set(shown)
    for target in shown:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target} is shown and does not exist"
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def order_rows() -> list[str]:
    """The table of orders as docs/ARCHITECTURE.md shows it: a row for each relation and the commands that share it."""
    rows: list[str] = []
    for relation, alike in groupby(RELATIONS, key=RELATIONS.__getitem__):
        commands = list(alike)
        withdraws = f" (withdraws: {', '.join(relation.withdraws)})" if relation.withdraws else ""
        key = f"{relation.subject} ({', '.join(relation.id)})" if relation.id else relation.subject
        names_a_field = all(relation.owner in command.__struct_fields__ for command in commands)
        owner = f"`{relation.owner}`" if names_a_field else relation.owner
        reports = f"; reports: {_named(relation.reports)}" if relation.reports else ""
        cells = (
            _named(commands) + withdraws,
            key,
            ", ".join(relation.echo) or "–",
            owner,
            relation.limit or "–",
            _named(relation.answers) + reports,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _named(classes: Iterable[type]) -> str:
    return ", ".join(f"`{one.__name__}`" for one in classes)


def test_the_architecture_shows_every_order_as_the_table_has_it() -> None:
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    _, found, rest = page.partition("| order | key | echo | owner | limit | answered by |\n|---|---|---|---|---|---|\n")
    assert found, "found no table to check"
    assert list(takewhile(lambda line: line.startswith("|"), rest.splitlines())) == order_rows()


EVENT_PATH_NAMES = re.compile(r'(?:paint-order="stroke"|font-weight="600")>(.*)</text>')
"""Texts of docs/img/event_path.svg: its title, folders and their files."""


def test_the_picture_of_an_event_has_the_files_of_a_run_now() -> None:
    """Every file, in the order of the first calls; the number of calls may differ by a tenth."""
    program = runpy.run_path(str(ROOT / "benchmarks" / "event_path.py"))
    path = program["median_path"](program["paths"]())
    shown = program["PICTURE"].read_text(encoding="utf-8")
    stale = "docs/img/event_path.svg is stale: run python benchmarks/event_path.py --draw, and look at it"
    names, names_now = (re.sub(r"\d", "", "|".join(EVENT_PATH_NAMES.findall(text)))
                        for text in (shown, program["drawing"](path)))  # fmt: skip
    assert names == names_now != "", stale
    (calls,) = re.findall(r", (\d+) calls</text>", shown)
    assert 0.9 * int(calls) <= len(path) <= 1.1 * int(calls), stale


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 120


@pytest.mark.parametrize(("heading", "state"), [("Built, untested", "○"), ("Absent", "–")])
def test_every_feature_that_is_not_tested_says_so(heading: str, state: str) -> None:
    page = (ROOT / "docs" / "FEATURES.md").read_text(encoding="utf-8")
    part = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    head, *states = re.findall(r"^\| .+? \| (\S+) \|", part, re.MULTILINE)
    assert head == "state" and len(states) > 8 and {*states} == {state}


def test_links_between_documents_lead_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    links = [
        (page, link, part)
        for page in pages
        for link, part in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text("utf-8"))
    ]
    assert links, "found no link to check"
    assert [f"{page.name}: {link}" for page, link, _ in links if not (page.parent / link).exists()] == []
    parts = [(page.parent / link if link else page, part) for page, link, part in links if part]
    assert [f"{page.name}#{part}" for page, part in parts if page.suffix == ".md" and part not in anchors(page)] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
"""The first cell of a row of docs/TROUBLESHOOTING.md: a message of the engine."""
LEAST_PART = 8
"""Characters of the longest fixed part of a message, so that it is not found by chance."""


def fixed_parts(message: str) -> list[str]:
    """The parts of a printed message that do not differ. A `ConfigError` joins its field, its law and its fix."""
    return [part.strip() for part in re.split(r"…|; |: |, but |, and |, so that ", message) if part.strip()]


def texts_of_the_engine() -> str:
    """Every text in the code of engine/, without docstrings, a line each. Parts of an f-string are texts, too."""
    nodes = [node for source in sources() for node in source.nodes]
    docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join(str(node.value) for node in texts if id(node) not in docs)


def test_the_engine_has_every_message_of_the_troubleshooting_page() -> None:
    messages = MESSAGE.findall((ROOT / "docs" / "TROUBLESHOOTING.md").read_text("utf-8"))
    texts = texts_of_the_engine()
    assert len(messages) > 40
    assert [one for one in messages if max(map(len, fixed_parts(one))) < LEAST_PART] == []
    assert [part for one in messages for part in fixed_parts(one) if part not in texts] == []


def test_every_error_of_a_command_says_what_to_do() -> None:
    """Each `ConfigError` of the commands and of control has a fix, except that which repeats a refusal of the run."""
    without = []
    for path in sorted([*(ROOT / "engine/cli").glob("*.py"), *(ROOT / "engine/control").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError":
                fixed = len(node.args) == 4 and ast.unparse(node.args[3]) not in ("''", '""')
                if not fixed and "refuses: " not in ast.unparse(node):
                    without.append(f"{path.name}:{node.lineno}")
    assert without == []


# -- addresses ---------------------------------------------------------------------------------------------------------

# Written in pieces, so that this file holds none of them.
REGISTRY = re.compile(
    "|".join(
        (
            "py" + r"pi\.(org|python\.org)",
            "python" + r"hosted\.org",
            "download" + r"\.pytorch\.org",
            "index" + r"[-_]url",
            "find" + r"-links",
            r"https?://\S*/" + r"simple\b",
            "registry" + r"\.npmjs",
            r"^[\w.-]+ @ (file|https?):",
        )
    ),
    re.IGNORECASE | re.MULTILINE,
)


def tracked_files() -> list[Path]:
    """Files of the repository, new ones included; of a plain copy, every file that is not hidden or made."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]
    made = {"runs", "build", "dist", "__pycache__"}
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in made and not name.startswith(".")]
        found += [Path(folder) / name for name in names]
    return found


def test_no_file_holds_the_address_of_a_package_registry() -> None:
    files = tracked_files()
    assert {ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "Makefile"} <= set(files)
    complaints: list[str] = []
    for path in files:
        found = REGISTRY.search(path.read_text(encoding="utf-8", errors="replace"))
        if found:
            complaints.append(f"{path.relative_to(ROOT)}: {found.group()}")
    assert complaints == []


def test_no_file_cites_a_page_that_is_not_in_the_project() -> None:
    cited = re.compile(r"\bDE" + r"SIGN\b")  # the plan of the project
    found = [path for path in tracked_files() if cited.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert found == []
    named = {page for source in sources() for page in re.findall(r"\bdocs/([\w/]+\.md)", source.text)}
    assert "ARCHITECTURE.md" in named and [page for page in sorted(named) if not (ROOT / "docs" / page).is_file()] == []


WORDS: list[tuple[str, str, str]] = [
    (r"(?i)incarnation", "life", "the newest incarnation"),
    (r"\bevents as facts?\b|\bscheduler\.facts\b|\bfacts of (a|the newest) tick\b|\b(books|blocks)\.facts\b", "event",
     "from engine import events as fact"),
    (r"\b[Ss]tage_?([Ww]orker|[Oo]wner|[Qq]ueues?|[Ww]ork)|\bstage_s\b|_in_stage\b|\.stages\.(by_name|at|out)\b",
     "added state", "timeouts.stage_s"),
    (r"\b(subject|limit)=\"stage\"|\bopen\[\"stage\"\]", "added state", 'orders.open["stage"]'),
    (r"\bvalidations\.runs\b|\brun: Validation\b|\brun(, \w+)? = .*\.validations\b|\bfor run in .*\.validations\b",
     "validation", "for run in state.validations.live.values():"),
    (r"(?i)\b(a|the|each|every|one) validation run\b|\bValidation runs:", "validation", "The validation run: rows"),
    (r"\(\w+( (==|!=|in|is) [^()]+)?\) <= \(", "implies(a, b)", "(state == 'asleep') <= (not running)"),
]  # fmt: skip
"""Refused: pattern, the one word for this thing (docs/GLOSSARY.md), and an example."""
READS_OLD_WORDS = {"CHANGELOG.md", "tests/test_house.py", "tests/oracle/formats.py", "tests/oracle/recordings.py"}


def test_one_thing_has_one_word() -> None:
    files = [path for path in tracked_files() if str(path.relative_to(ROOT)) not in READS_OLD_WORDS]
    assert {ROOT / "engine/events.py", ROOT / "docs/GLOSSARY.md"} <= set(files)
    found = [
        f"{path.relative_to(ROOT)}: {hit.group()!r}; say {word}"
        for path in files
        for text in [path.read_text(encoding="utf-8", errors="replace")]
        for pattern, word, _ in WORDS
        for hit in re.finditer(pattern, text)
    ]
    assert found == []


@pytest.mark.parametrize(("pattern", "word", "text"), WORDS)
def test_a_second_word_for_one_thing_is_noticed(pattern: str, word: str, text: str) -> None:
    assert re.search(pattern, text) and not re.search(pattern, word)


@pytest.mark.parametrize("text", ["--extra-index" + "-url x", "https://py" + "pi.org/p", "six @" + " file:///x"])
def test_the_address_of_a_registry_is_noticed(text: str) -> None:
    assert REGISTRY.search(text)


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==([0-9]+!)?[0-9][0-9A-Za-z.]*", pin) for pin in pins), (
        "exact, without local versions"
    )
    pinned = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = {
        re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r'^    "([A-Za-z-]+)[>=<]', project, re.MULTILINE)
    }
    assert len(wanted) > 15
    assert wanted <= pinned


def test_no_aiohttp_that_queues_unlimited_requests_is_accepted() -> None:
    """CVE-2026-54273: aiohttp before 3.14.1 queues any number of pipelined requests of one connection."""
    least = re.search(r'"aiohttp>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert least is not None and tuple(map(int, least[1].split("."))) >= (3, 14, 1)


# -- the runner --------------------------------------------------------------------------------------------------------

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(("arguments", "outcome"), [([], 0), (["--fail-on-skip"], 1)])
def test_a_skip_fails_where_none_may_be(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: list[str], outcome: int
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))  # what it imports
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile("import pytest\ndef test_a(): pass\ndef test_b(): pytest.skip('no such program')")
    assert pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments).ret == outcome


def test_ci_draws_new_examples_and_prints_the_seed_that_repeats_them(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run draws in a process of pytest-xdist."""
    monkeypatch.setenv("CI", "true")
    monkeypatch.delenv("HYPOTHESIS_SEED", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(
        "from hypothesis import given, settings, strategies\n"
        "drawn = []\n"
        "@given(strategies.integers())\n"
        "def test_a(number): drawn.append(number)\n"
        "def test_b():\n"
        "    assert not settings().derandomize\n"
        "    open('drawn', 'a').write(f'{drawn}\\n')"
    )
    first = pytester.runpytest_subprocess("-n", "1", "-p", "no:cacheprovider")
    (again,) = [line.split("add ")[1] for line in first.outlines if "--hypothesis-seed=" in line]
    assert pytester.runpytest_subprocess("-p", "no:cacheprovider", again).ret == first.ret == 0
    drawn, repeated = (pytester.path / "drawn").read_text(encoding="utf-8").splitlines()
    assert drawn == repeated != "[]"


def test_the_name_of_a_test_has_at_most_80_characters() -> None:
    found = [
        name for path in sorted((ROOT / "tests").rglob("test_*.py")) for name in TEST_NAME.findall(path.read_text())
    ]
    assert len(found) > 2000 and [name for name in found if len(name) > 80] == []


def test_a_class_name_means_one_thing() -> None:
    names = Counter(node.name for source in sources() for node in source.nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set()
