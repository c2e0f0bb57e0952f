"""The public door: what is in it, what it lets in, and what a type checker and a newcomer see of it."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import math
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import kvcover
from kvcover import (
    Expect,
    FabricSpec,
    InputError,
    RequestSpec,
    Scenario,
    Side,
    Timers,
    build,
    explore,
    matrix,
    record_of,
    resolve,
    run,
    run_world,
    story,
)
from kvcover.faults import parse_fault
from kvcover.sim.scenario import scenario as scenarios

ROOT = Path(__file__).parents[2]
SLOW_IMPORTS = {"numpy", "simpy", "rich", "torch", "jinja2", "matplotlib"}

# -- bad objects -------------------------------------------------------------------------------------------------

DEEP: Any = {}
for _ in range(50):
    DEEP = {"a": DEEP}

# What an object says, and the same as plain data, of which the command line says what is wrong.
AS_DATA: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"mode": "wirte"}, {"mode": "wirte"}),
    ({"prefill": Side(tp=-1)}, {"prefill": {"tp": -1}}),
    ({"decode": Side(tp=0)}, {"decode": {"tp": 0}}),
    ({"decode": Side(tp=257)}, {"decode": {"tp": 257}}),
    ({"prefill": Side(tp=4.0)}, {"prefill": {"tp": 4.0}}),  # type: ignore[arg-type]
    ({"prefill": Side(tp=True)}, {"prefill": {"tp": True}}),
    ({"prefill": Side(tp="8")}, {"prefill": {"tp": "8"}}),  # type: ignore[arg-type]
    ({"prefill": Side(tp=np.int64(4))}, {"prefill": {"tp": np.int64(4)}}),  # type: ignore[arg-type]
    ({"prefill": Side(layout="spilt")}, {"prefill": {"layout": "spilt"}}),  # type: ignore[arg-type]
    ({"prefill": Side(hybrid_kv=1)}, {"prefill": {"hybrid_kv": 1}}),  # type: ignore[arg-type]
    ({"prefill": Side(host="a b")}, {"prefill": {"host": "a b"}}),
    ({"timers": None}, {"timers": None}),
    ({"timers": Timers(defer_timeout_s=math.nan)}, {"timers": {"defer_timeout_s": math.nan}}),
    ({"timers": Timers(defer_timeout_s=10**400)}, {"timers": {"defer_timeout_s": 10**400}}),
    ({"seed": -1}, {"seed": -1}),
    ({"requests": 0}, {"requests": 0}),
    ({"requests": (RequestSpec(prompt_tokens=0),)}, {"requests": [{"prompt_tokens": 0}]}),
    ({"release": 26}, {"release": 26}),
    ({"model": "\ud800"}, {"model": "\ud800"}),
    ({"overrides": {1: "x"}}, {"overrides": {1: "x"}}),
    ({"overrides": {"ports": 2}}, {"overrides": {"ports": 2}}),
    ({"faults": "drop:transfer_id"}, {"faults": "drop:transfer_id"}),
    ({"faults": ("dorp:transfer_id",)}, {"faults": ["dorp:transfer_id"]}),
    ({"schema": 2}, {"schema": 2}),
    ({"expect": Expect(coverage=1.5)}, {"expect": {"coverage": 1.5}}),
]


@pytest.mark.parametrize(("fields", "data"), AS_DATA, ids=[repr(data)[:50] for _, data in AS_DATA])
def test_a_bad_object_gets_the_line_of_the_command_line(fields: dict[str, Any], data: dict[str, Any]) -> None:
    with pytest.raises(InputError) as told:
        resolve(build(data))
    for door in (run, resolve, matrix):
        with pytest.raises(InputError) as found:
            door(Scenario(**fields))
        assert str(found.value) == str(told.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prefill": {"tp": 8}}, "prefill: {'tp': 8} is no Side; write Side(tp=8), or give all of it to build()"),
        ({"prefill": Timers()}, "prefill: Timers("),
        ({"requests": ({"plain": True},)}, "requests[0]: {'plain': True} is no RequestSpec; write RequestSpec(plain=True), or"),
        (
            {"fabric": {"write_fixed_ns": 1}},
            "fabric: {'write_fixed_ns': 1} is no FabricSpec; write FabricSpec(write_fixed_ns=1), or",
        ),
        ({"expect": {"outcome": "ok"}}, "expect: {'outcome': 'ok'} is no Expect; write Expect(outcome='ok'), or"),
        ({"faults": (parse_fault("drop:transfer_id"),)}, "faults[0]: KeyFault("),
        ({"faults": ({"kind": "drop", "key": DEEP},)}, "faults[0].key: {'a': {'a':"),
        ({"faults": ({"kind": "set", "key": "transfer_id", "value": DEEP},)}, "faults[0]"),
        ({"model": Path("x")}, "model: PosixPath('x') is wrong; expected text"),
    ],
)
def test_an_object_in_the_place_of_another_is_named(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as found:
        run(Scenario(**fields))
    assert str(found.value).startswith(says)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("given", [None, {"release": "0.26.0"}, "0.26.0", Side(), Scenario])
def test_what_is_no_scenario_is_said(given: Any) -> None:
    for door in (run, resolve, matrix):
        with pytest.raises(InputError, match=r"^scenario: .* is no "):
            door(given)


def test_lists_stand_for_tuples() -> None:
    """`faults=[…]` is what people write; what is run is the same."""
    listed = Scenario(release="0.26.0", faults=["drop:remote_tp_size"], requests=[RequestSpec()])  # type: ignore[arg-type]
    tupled = Scenario(release="0.26.0", faults=("drop:remote_tp_size",), requests=(RequestSpec(),))
    assert resolve(listed).scenario == tupled
    assert run(listed).digest == run(tupled).digest


def test_a_good_object_is_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swarm resolves a thousand scenarios a second: what is right goes the quick way, and stays as it is."""

    def never(*_: object) -> Any:
        raise AssertionError("the slow way")

    monkeypatch.setattr(scenarios, "build", never)
    fabric = FabricSpec(write_fixed_ns=5850, write_gb_per_s=48.8, read_fixed_ns=6550, read_gb_per_s=43.9)
    for good in (
        Scenario(),
        Scenario(prefill=Side(tp=8, executor_timeout_s=None), timers=Timers(defer_timeout_s=5), fabric=fabric),
        Scenario(requests=(RequestSpec(prompt_tokens=16, decode_blocks=(3,)),), overrides={"ports": "dp_plus_tp"}),
    ):
        assert resolve(good).scenario == good


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: explore(0), "seeds: 0 is wrong"),
        (lambda: explore(5, first=-1), "first: -1 is wrong"),
        (lambda: explore(5, budget_s=math.nan), "budget_s: nan"),
        (lambda: explore(5, pins={"mode": "wirte"}), "mode: 'wirte' is not one of its values; did you mean 'write'?"),
        (lambda: explore(5, pins={"release": "0.26.1"}), "release: "),
        (lambda: explore(5, features=["pt"]), "--features: no feature 'pt'"),
        (lambda: explore(5, pins={"prefill": {"num_blocks": 1}}), "explore: no scenario makes sense"),
        (lambda: matrix(Scenario(), modes=["wirte"]), "mode: 'wirte' is not one of its values; did you mean 'write'?"),
        (lambda: matrix(Scenario(), prefill=[0]), "prefill.tp: 0 is wrong"),
        (lambda: matrix(Scenario(), tier="modle"), "--tier: no tier 'modle'; did you mean 'model'?"),
        (lambda: matrix(Scenario(expect=Expect())), "expect: "),
        (lambda: story(record_of(run_world(resolve(Scenario()))[1]), -1), "request: there is no request -1; use 0 to 0"),
    ],
)
def test_bad_arguments_are_one_line(call: Any, says: str) -> None:
    with pytest.raises(InputError) as found:
        call()
    assert str(found.value).startswith(says)


# -- what is there -----------------------------------------------------------------------------------------------


def test_every_name_is_there_and_listed() -> None:
    assert len(set(kvcover.__all__)) == len(kvcover.__all__)
    assert all(getattr(kvcover, name) is not None for name in kvcover.__all__)
    assert set(kvcover.__all__) <= set(dir(kvcover))
    starred: dict[str, Any] = {}
    exec("from kvcover import *", starred)
    assert set(kvcover.__all__) <= set(starred)
    with pytest.raises(AttributeError, match="no attribute 'rnu'"):
        _ = kvcover.rnu  # type: ignore[attr-defined]


def test_the_map_names_what_is_there() -> None:
    told = inspect.getdoc(kvcover) or ""
    missing = [name for name in kvcover.__all__ if name not in told]
    assert not missing
    rooms = [path.name for path in (ROOT / "sim").iterdir() if (path / "__init__.py").is_file()]
    assert not [room for room in rooms if f"`{room}`" not in told]


@pytest.mark.parametrize(
    "code", ["import kvcover", "from kvcover.sim.cli import kvcover; kvcover(['--help'], standalone_mode=False)"]
)
def test_nothing_slow_is_imported_before_it_is_needed(code: str) -> None:
    code += "; import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert "kvcover" in loaded and not loaded & SLOW_IMPORTS


def test_the_notebook_uses_the_public_door_only() -> None:
    tree = ast.parse((ROOT / "notebooks" / "rank_collapse.py").read_text(encoding="utf-8"))
    used = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvcover")]
    assert used and all(node.module == "kvcover" for node in used)
    assert {alias.name for node in used for alias in node.names} <= set(kvcover.__all__)
    assert not [a for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names if a.name.startswith("kvcover.")]


# -- examples ----------------------------------------------------------------------------------------------------


def modules() -> list[str]:
    """All of the package that needs neither vLLM nor torch."""
    found = [info.name for info in pkgutil.walk_packages(kvcover.__path__, "kvcover.", onerror=lambda _: None)]
    return ["kvcover", *(name for name in found if ".inside" not in name and ".loopback" not in name and "torchrun" not in name)]


def test_examples_in_docstrings_are_right() -> None:
    public = {name: getattr(kvcover, name) for name in kvcover.__all__}
    runner, finder = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL), doctest.DocTestFinder(exclude_empty=True)
    told = set()
    for name in modules():
        module = importlib.import_module(name)
        for test in finder.find(module, name, globs={**public, **vars(module)}):
            report: list[str] = []
            runner.run(test, out=report.append)
            assert not report, "".join(report)
            told.add(test.name.rpartition(".")[2])
    functions = {name for name, item in public.items() if inspect.isfunction(item)}
    assert functions <= told, "every function of the door shows how it is called"
    assert runner.tries > len(functions)


# -- types -------------------------------------------------------------------------------------------------------

USER = '''"""A user's own module: every name has its type, and what is not there is an error."""

from typing import assert_type

import kvcover
from kvcover import (
    RELEASES, Exploration, InputError, RequestSpec, Result, Scenario, Setup, Side, World, build, explore, load, matrix, record_of,
    resolve, run, run_world, story,
)

scenario = Scenario(release="0.26.0", prefill=Side(tp=2), decode=Side(tp=2), requests=(RequestSpec(prompt_tokens=32),))
assert_type(run(scenario), Result)
assert_type(kvcover.run(scenario).coverage, float)
assert_type(resolve(scenario), Setup)
assert_type(run_world(resolve(scenario)), tuple[Result, World])
assert_type(story(record_of(run_world(resolve(scenario))[1])), list[str])
assert_type(matrix(scenario, prefill=[1]), list[Result])
assert_type(explore(5), Exploration)
assert_type(build({"release": "0.26.0"}), Scenario)
assert_type(list(RELEASES), list[str])
try:
    build(load("scenario.toml"))
except InputError as error:
    assert_type(error.place, str)
kvcover.rnu  # type: ignore[attr-defined]
Side(tp="8")  # type: ignore[arg-type]
Scenario(mode="wirte")  # type: ignore[arg-type]
Scenario(prefill={"tp": 8})  # type: ignore[arg-type]
'''


def test_a_users_module_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="NOT RUN: needs mypy (extra `lint`)")
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scenarios_of_results_are_scenarios() -> None:
    """What a result keeps can be built again, whoever made the scenario."""
    scenario = Scenario(release="0.27.0", prefill=Side(tp=4), decode=Side(tp=8), model="deepseek-v3")
    assert build(run(scenario).scenario or {}) == scenario
    assert msgspec.json.decode(run(scenario).to_json())["coverage"] == 0.5  # measured: row 0.27.0/write/p4d8/mla/toy
