"""`kvcover confirm` and `kvcover compare`."""

from __future__ import annotations

import ctypes
import errno
import json
import math
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcover import build, run
from kvcover.real_backend.evidence.compare import compare, read_named
from kvcover.real_backend.evidence.confirm import (
    CONFIRMED,
    INCONCLUSIVE,
    NOT_CONFIRMED,
    NOT_PREDICTED,
    PREDICTED,
    Confirmation,
    conclude,
    expect,
    judge,
    plan,
)
from kvcover.real_backend.inside.raising import what_is_broken
from kvcover.real_backend.inside.vllm_setup import MORIIO_FOLDER
from kvcover.sim.errors import InputError
from kvcover.sim.results.result import Finding
from tests.real.linked_tree import linked_tree
from tests.real.made_up_trees import hash_made_up, made_up_tree
from tests.real.test_connector_tier import needs

MLA = {"model": "layers=2,mla=64+16"}


def sides(prefill: int, decode: int, **more: Any) -> dict[str, Any]:
    return {**MLA, "prefill": {"tp": prefill}, "decode": {"tp": decode}, **more}


def confirm(data: dict[str, Any], before: str, after: str, tier: str) -> Confirmation:
    first, second = plan(data, before, after, tier).run()
    return conclude(first, second, expect(first, None, None))


PREDICTIONS = {CONFIRMED: PREDICTED, NOT_CONFIRMED: NOT_PREDICTED}


@pytest.mark.parametrize("tier", ["model", pytest.param("connector", marks=pytest.mark.vllm)])
@pytest.mark.parametrize(
    ("prefill", "decode", "verdict", "reason"),
    [(8, 8, CONFIRMED, "corrupt with coverage 0.125"), (4, 8, NOT_CONFIRMED, "0.27.0 is hang with coverage 0.5")],
)
def test_the_public_fix_and_the_public_claim(tier: str, prefill: int, decode: int, verdict: str, reason: str) -> None:
    if tier == "connector":
        needs("0.26.0", "0.27.0")
    done = confirm(sides(prefill, decode), "0.26.0", "0.27.0", tier)
    assert done.verdict == (PREDICTIONS[verdict] if tier == "model" else verdict)
    assert reason in done.reason
    assert done.reason.startswith("the model predicts: ") == (tier == "model")
    assert done.before.scenario is not None and done.after.scenario is not None
    assert done.before.scenario["router"] == done.after.scenario["router"]


def test_what_only_time_ordered_before_is_repaired_by_order() -> None:
    done = confirm(sides(2, 2, mode="read", fabric="loopback"), "0.27.0", "0.33.0", "model")
    assert (done.verdict, "0.27.0 is ok by luck (a race) with coverage 1 before" in done.reason) == (PREDICTED, True)


def test_good_before_is_not_confirmed() -> None:
    done = confirm(sides(2, 2), "0.27.0", "0.33.0", "model")
    assert (done.verdict, "nothing to repair" in done.reason) == (NOT_PREDICTED, True)


def test_a_fault_that_never_fires_is_inconclusive() -> None:
    done = confirm(sides(8, 8, faults=["drop:no_such_key"]), "0.26.0", "0.27.0", "model")
    assert (done.verdict, "never fired" in done.reason) == (INCONCLUSIVE, True)


def _unset_variable() -> None:
    if "":
        value = 0
    print(value)


def _wrapped() -> None:
    try:
        exec("no_such_name")
    except NameError as error:
        raise RuntimeError("handshake failed") from error


def _refuse_to_register() -> None:
    source = "def register_memory():\n    raise RuntimeError('ibv_reg_mr: Invalid argument')\nregister_memory()"
    exec(compile(source, "/usr/lib/python3/dist-packages/mori/io/engine.py", "exec"), {})


def _fail(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (lambda: exec("no_such_name"), "NameError"),
        (_wrapped, "NameError"),
        (lambda: exec("import no_such_module"), "ModuleNotFoundError"),
        (lambda: exec("from math import no_such_name"), "ImportError"),
        (lambda: exec("def f(:"), "SyntaxError"),
        (lambda: getattr(math, "no_such_function"), "AttributeError"),  # noqa: B009
        (lambda: ctypes.CDLL("libno_such_library.so"), "OSError"),
        (_refuse_to_register, "RuntimeError: ibv_reg_mr"),
        (_fail(MemoryError()), "MemoryError"),
        (_fail(SystemExit(0)), "SystemExit: 0"),
        (_fail(OSError(errno.EMFILE, "Too many open files")), "OSError"),
        (_fail(OSError(errno.ENOSPC, "No space left on device")), "OSError"),
    ],
)
def test_an_error_that_no_protocol_makes_is_told_from_the_connector_s_own(act: Callable[[], None], named: str) -> None:
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        act()
    assert what_is_broken(raised.value).startswith(named)


@pytest.mark.parametrize(
    "act",
    [
        lambda: dict[str, int]()["remote_tp_size"],
        lambda: getattr(None, "remote_host"),  # noqa: B009
        _unset_variable,
        _fail(AssertionError("no blocks")),
        _fail(ValueError("unequal block lengths")),
        _fail(TypeError("can only concatenate str")),
        _fail(RuntimeError("remote engine is not registered")),
        _fail(TimeoutError()),
        _fail(ConnectionRefusedError()),
        _fail(BrokenPipeError(errno.EPIPE, "Broken pipe")),
        _fail(socket.gaierror(socket.EAI_NONAME, "Name or service not known")),
        _fail(OSError(errno.EHOSTUNREACH, "No route to host")),
    ],
)
def test_the_connector_s_own_errors_stay_outcomes(act: Callable[[], None]) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        act()
    assert what_is_broken(raised.value) == ""


def test_broken_code_is_inconclusive_on_either_side() -> None:
    bad, good = (run(build(sides(8, 8, release=release))) for release in ("0.26.0", "0.27.0"))
    broken = Finding(kind="broken", text="P0: NameError in start_load_kv: x", causes=["no fault of the protocol"])
    dead = msgspec.structs.replace(bad, outcome="crash", findings=[broken])
    assert judge(bad, good, None)[0] == CONFIRMED
    for pair, when in (((dead, good), "before"), ((bad, dead), "after")):
        verdict, reason = judge(*pair, None)
        assert (verdict, reason.startswith(when), "NameError" in reason) == (INCONCLUSIVE, True, True)


def broken_tree(folder: Path, release: str, file: str, line: str) -> Path:
    """A release whose connector has a name that is nowhere, above `line`."""
    tree = linked_tree(folder / "tree", release, f"{MORIIO_FOLDER}/{file}")
    code = (tree / MORIIO_FOLDER / file).read_text()
    indent = line[: len(line) - len(line.lstrip())]
    assert code.count(line) == 1
    (tree / MORIIO_FOLDER / file).write_text(code.replace(line, f"{indent}no_such_name\n{line}"))
    return tree


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("file", "line", "call"),
    [
        ("moriio_connector.py", "        return self.connector_worker.get_finished()", "get_finished"),
        # the writer's thread catches what its tasks raise, logs it, and calls the request done
        ("moriio_engine.py", "                self._execute_write_task(task)\n            except Exception:", "_write_worker_loop"),
    ],
)  # fmt: skip
def test_a_tree_whose_connector_has_a_name_error_is_inconclusive(tmp_path: Path, file: str, line: str, call: str) -> None:
    needs("0.27.0")
    done = confirm(sides(2, 2), str(broken_tree(tmp_path, "0.27.0", file, line)), "0.27.0", "connector")
    assert done.before.outcome != "ok"
    assert done.verdict == INCONCLUSIVE
    assert call in done.reason and "no_such_name" in done.reason


def test_the_hash_is_of_the_scenario_alone() -> None:
    first = confirm(sides(8, 8), "0.26.0", "0.27.0", "model")
    assert first.sha256 == confirm(sides(8, 8), "0.25.1", "0.33.0", "model").sha256 or first.scenario["router"] != "toy-proxy"
    assert first.sha256 != confirm(sides(4, 8), "0.26.0", "0.27.0", "model").sha256


@pytest.mark.parametrize("data", [{"expect": {"outcome": "ok"}}, {"model": "nothing"}])
def test_bad_input_is_an_error(data: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        confirm(data, "0.26.0", "0.27.0", "model")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kvcover", *words], capture_output=True, text=True, timeout=120)


def test_the_command_leaves_evidence_and_exits_by_verdict(tmp_path: Path) -> None:
    folder = tmp_path / "evidence"
    words = ["--before", "0.26.0", "--after", "0.27.0", "--decode", "tp=8", "--model", MLA["model"]]
    done = command("confirm", *words, "--prefill", "tp=8", "-o", str(folder))
    assert (done.returncode, done.stdout.split(":")[0]) == (0, PREDICTED)
    assert "model tier: nothing real ran" in done.stdout
    evidence = json.loads((folder / "confirmation.json").read_text())
    assert {"scenario", "scenario_sha256", "tier", "environment", "before", "after", "verdict"} <= set(evidence)
    assert {"kvcover", "python", "kernel", "torch", "rocm", "gpus", "nics"} <= set(evidence["environment"])
    assert evidence["before"]["result"]["outcome"] == "corrupt"
    told = (folder / "summary.md").read_text()
    assert told.startswith("**PREDICTED: the model predicts: 0.26.0 is corrupt with coverage 0.125 before")
    assert "a prediction, nothing real ran" in told and "CONFIRMED" not in told
    assert command("confirm", *words, "--prefill", "tp=4").returncode == 1


@pytest.mark.parametrize("option", ["--release", "--decode-release", "--vllm", "--check"])
def test_no_option_is_offered_that_is_refused(option: str) -> None:
    assert f"  {option} " not in command("confirm", "--help").stdout
    done = command("confirm", "--before", "0.26.0", "--after", "0.27.0", option, "0.27.0")
    assert (done.returncode, "no such option" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--before", "0.26.0"], "--after: is missing"),
        (["--after", "0.26.0"], "--before: is missing"),
        ([], "0 files and no vLLM"),
        (["one.json"], "1 files and no vLLM"),
        (["--before", "0.26.0", "--after", "0.26.0"], "is what --before is"),
        (["--before", "0.25.0", "--after", "0.25.1"], "are the same connector"),
        (["--before", "0.26.0", "--after", "0.27.0", "--report", "vllm#1"], "--report: no report 'vllm#1'"),
        (["--before", "0.27.0", "--after", "0.33.0", "--report", "vllm#47764"], "has 0.27.0 ok; take for before 0.25.1–0.26.0"),
        (["--before", "0.26.0", "--after", "0.27.0", "a.toml", "b.toml"], "one file too many"),
        (["--before", "/no/such/tree", "--after", "0.27.0"], "the model tier has no release"),
    ],
)
def test_what_can_not_be_confirmed_is_one_line(words: list[str], said: str) -> None:
    done = command("confirm", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert said in done.stderr


def test_one_connector_under_two_names_is_refused_before_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hash_made_up(monkeypatch)
    trees = [str(made_up_tree(tmp_path / name, "0.26.0", name)) for name in ("0.26.0", "0.27.0")]
    with pytest.raises(InputError, match="is the connector that --before is"):
        plan(sides(2, 2), trees[0], trees[1], "connector").check()
    other = made_up_tree(tmp_path / "other", "0.27.0", "0.26.0")
    plan(sides(2, 2), trees[0], str(other), "connector").check()


def test_a_report_brings_its_scenario_and_its_signature() -> None:
    words = ["--before", "0.26.0", "--after", "0.27.0", "--report", "vllm#47764", "--model", MLA["model"]]
    done = command("confirm", *words)
    assert (done.returncode, "corrupt with coverage 0.125 before, as vllm#47764 of 0.26.0 says" in done.stdout) == (0, True)
    other = command("confirm", *words, "--prefill", "tp=4")
    assert (other.returncode, "not what vllm#47764 of 0.26.0 says: outcome corrupt, seen hang" in other.stdout) == (3, True)


@pytest.mark.vllm
def test_evidence_of_the_connector_tier_names_what_ran(tmp_path: Path) -> None:
    needs("0.26.0", "0.27.0")
    folder = tmp_path / "evidence"
    done = command("confirm", "--before", "0.26.0", "--after", "0.27.0", "--tier", "connector", "--prefill", "tp=2", "--decode", "tp=2",
                   "--model", MLA["model"], "-o", str(folder))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    evidence = json.loads((folder / "confirmation.json").read_text())
    ran = [evidence[when]["vllm"]["prefill"] for when in ("before", "after")]
    assert evidence["mori"] == "loopback"
    assert [each["identity"] for each in ran] == ["0.26.0", "0.27.0"]
    assert ran[0]["connector_sha256"] != ran[1]["connector_sha256"]
    assert [file for file in folder.glob("logs/*.log") if file.stat().st_size]
    for file in folder.glob("*.*"):
        assert str(Path.home()) not in file.read_text()
    again = command("confirm", str(folder / "before.json"), str(folder / "after.json"))
    assert (again.returncode, again.stdout.split(":")[0]) == (0, CONFIRMED)


@pytest.mark.vllm
@pytest.mark.parametrize("side", ["--before", "--after"])
def test_a_tree_that_can_not_be_imported_leaves_evidence_and_no_verdict(tmp_path: Path, side: str) -> None:
    """A missing library is no fault of the protocol, and nothing of it looks like one."""
    needs("0.26.0", "0.27.0")
    tree = linked_tree(tmp_path / "tree", "0.26.0", f"{MORIIO_FOLDER}/moriio_connector.py")
    file = tree / MORIIO_FOLDER / "moriio_connector.py"
    file.write_text("import no_such_library\n" + file.read_text())
    sides = {"--before": "0.26.0", "--after": "0.27.0"} | {side: str(tree)}
    folder = tmp_path / "evidence"
    done = command("confirm", *(word for pair in sides.items() for word in pair), "--tier", "connector", "--prefill", "tp=2",
                   "--decode", "tp=2", "--model", MLA["model"], "-o", str(folder))  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "no_such_library" in done.stderr
    assert "INCONCLUSIVE: TierError" in (folder / "summary.md").read_text()
    assert any("no_such_library" in log.read_text() for log in folder.glob("logs/*.log"))
    kept = json.loads((folder / "environment.json").read_text())["vllm"]
    (found,) = [one for one in kept if one["kind"] == "working copy"]
    assert found["is"] == "derived from 0.26.0, 1 file differs"


def test_compare_marks_what_differs(tmp_path: Path) -> None:
    results = [run(build(sides(2, decode))) for decode in (2, 4)]
    assert not [line for line in compare(results[0], results[0]) if line.differs]
    assert {"decode", "needed"} <= {line.name for line in compare(*results) if line.differs}
    files = [tmp_path / f"{index}.json" for index in range(2)]
    for file, result in zip(files, results, strict=True):
        file.write_text(result.to_json())
    done = command("compare", *map(str, files), "--check")
    assert done.returncode == 1 and "≠ decode" in done.stdout


@pytest.mark.parametrize("change", ["by_request", "checks"])
def test_compare_sees_what_one_request_and_one_check_came_to(tmp_path: Path, change: str) -> None:
    """All else is alike: neither a request that fared worse nor a race is `no difference in what was seen`."""
    result = run(build(sides(2, 2)))
    other = result.to_dict()
    if change == "checks":
        other["checks"] = [each | ({"verdict": "fail"} if each["name"] == "no-race" else {}) for each in other["checks"]]
    else:
        other["by_request"] = ["recomputed"]
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    files[0].write_text(result.to_json())
    files[1].write_text(json.dumps(other))
    done = command("compare", *map(str, files), "--check")
    assert done.returncode == 1 and ("≠ no-race" if change == "checks" else "≠ by_request") in done.stdout


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', "{}\n{}"])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(InputError):
        read_named(str(file))
