"""What the cases before a hardware session's own may say, and that a session that they don't vouch for gives no result."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcover import Result, build, run
from kvcover.real_backend.machine.hashes import KNOWN
from kvcover.real_backend.machine.trees import Tree
from kvcover.real_backend.tiers import report, session
from kvcover.real_backend.tiers.hardware import read_result
from kvcover.real_backend.tiers.session import Case, easy, failure, require, run_session, verdict
from kvcover.sim.cli import main
from kvcover.sim.errors import Inconclusive, TierError
from kvcover.sim.releases.records import PUBLISHED
from tests.real.made_up_trees import hash_made_up, made_up_tree

GOOD = run(build({"model": "layers=2,mla=64+16"}))
WRONG = msgspec.structs.replace(GOOD, outcome="corrupt", coverage=31 / 32, wrong=1 / 32)


@pytest.mark.parametrize("decode_release", PUBLISHED)
@pytest.mark.parametrize("release", PUBLISHED)
def test_the_good_case_is_good_between_any_two_releases(release: str, decode_release: str) -> None:
    result = run(easy(build({"release": release, "decode_release": decode_release, "mode": "read", "prefill": {"tp": 8}})))
    assert (result.mode, result.outcome, result.coverage) == ("write", "ok", 1.0)


def written(path: Path, result: Result | dict[str, Any] | None) -> Path:
    if result is not None:
        path.write_text(result.to_json() if isinstance(result, Result) else json.dumps(result))
    return path


@pytest.mark.parametrize(
    ("good", "wrong", "said"),
    [
        (GOOD, WRONG, "passed: a good case is ok, one wrong byte is seen (0.03125 of the cells wrong)"),
        (GOOD, GOOD, "one byte was made wrong, and that was not seen: ok, 0 of the cells wrong"),
        (GOOD, msgspec.structs.replace(WRONG, outcome="ok"), "that was not seen"),
        (GOOD, msgspec.structs.replace(WRONG, wrong=0.0), "that was not seen"),
        (GOOD, msgspec.structs.replace(WRONG, coverage=0.5), "that was not seen"),  # and half of it never came
        (WRONG, WRONG, "the good case, P TP1 → D TP1, is corrupt"),
        (msgspec.structs.replace(GOOD, outcome="hang"), WRONG, "is hang"),
        (msgspec.structs.replace(GOOD, coverage=0.5), WRONG, "is ok with coverage 0.5"),
        (None, WRONG, "the good case failed: it gave no result"),
        (GOOD, None, "the case with a wrong byte failed: it gave no result"),
        (failure(TierError("--vllm", "no such thing", "get it")), WRONG, "the good case failed: --vllm: no such thing"),
    ],
)
def test_only_a_good_case_and_a_seen_wrong_byte_pass(tmp_path: Path, good: Any, wrong: Any, said: str) -> None:
    told = verdict(written(tmp_path / "good", good), written(tmp_path / "wrong", wrong))
    assert said in told
    if told.startswith("passed"):
        require(told)
    else:
        with pytest.raises(Inconclusive, match="self-test did not pass"):
            require(told)


def test_a_session_without_a_passed_test_gives_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(failure(Inconclusive("the session's self-test did not pass: x"))))
    with pytest.raises(Inconclusive, match="did not pass: x"):
        read_result(file)
    monkeypatch.setattr("kvcover.sim.commands.run.build_scenario", lambda _data: read_result(file))
    monkeypatch.setattr("sys.argv", ["kvcover", "run"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert (stop.value.code, capsys.readouterr().err) == (3, "kvcover: inconclusive: the session's self-test did not pass: x\n")


@pytest.mark.parametrize(
    ("rank", "played"),
    [("0", ["good 0 of 2", "wrong byte 0 of 2", "run 0 of 4"]), ("1", ["run 1 of 4"]), ("2", ["good 1 of 2", "wrong byte 1 of 2", "run 2 of 4"])],
)  # fmt: skip
def test_the_first_rank_of_each_engine_plays_the_cases_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, played: list[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "4")
    book = tmp_path / "book"

    def body(case: Case) -> int:
        with book.open("a") as file:
            file.write(f"{case.name} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\n")
        if rank == "0" and case.name == "run":
            assert case.self_test is not None and case.self_test.startswith("passed")
        elif rank == "0":
            case.output.write_text((WRONG if case.wrong_byte else GOOD).to_json())
        return 0

    scenario = build({"prefill": {"tp": 2}, "decode": {"tp": 2}})
    assert run_session(scenario, 2, tmp_path / "result.json", body) == 0
    assert book.read_text().splitlines() == played


def test_a_case_that_fails_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")

    def body(case: Case) -> int:
        assert case.name == "good"
        case.output.write_text(json.dumps(failure(TierError("--vllm", "is not here"))))
        return 2

    assert run_session(build({}), 2, tmp_path / "result.json", body) == 2
    with pytest.raises(TierError, match="--vllm: is not here"):
        read_result(tmp_path / "result.json")


def test_a_rank_that_dies_by_a_signal_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")

    def body(_case: Case) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert run_session(build({}), 2, tmp_path / "result.json", body) == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()


def test_what_an_earlier_session_left_is_gone_before_this_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    given, stale = tmp_path / "scenario.json", tmp_path / "result.json"
    given.write_text('{"mode": "write"}')
    stale.write_text(GOOD.to_json())
    with pytest.raises(TierError, match="3 processes for 2 ranks"):
        session.begin(str(given), stale, None, test=True)
    assert not stale.exists()


def test_a_scenario_that_names_no_release_is_of_the_vllm_that_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two images run one scenario file; one that names a release is judged by each engine's node."""
    hash_made_up(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tree = str(made_up_tree(tmp_path / "image", "0.26.0", "0.26.1.dev350+rocm723"))
    for text, release in (('mode = "write"', "0.26.0"), ('release = "0.27.0"', "0.27.0")):
        (tmp_path / "scenario.toml").write_text(text)
        found, prefill_ranks = session.begin(str(tmp_path / "scenario.toml"), tmp_path / "result.json", tree, test=True)
        assert (found.release, prefill_ranks) == (release, 1)


@pytest.mark.parametrize(
    ("chosen", "imported", "rules", "said"),
    [
        ("0.26.0", "0.26.0", "0.26.0", ""),
        ("", "0.26.0", "0.26.0", ""),
        ("0.26.0", "0.27.0", "0.26.0", "is not the one that was chosen"),
        ("", "0.27.0", "0.26.0", "was run as 0.26.0, and what was imported is 0.27.0"),
    ],
)
def test_what_ran_is_what_was_imported(chosen: str, imported: str, rules: str, said: str) -> None:
    tree = Tree(None, "0.26.0", "installed", tuple(KNOWN[chosen].items()) if chosen else ())
    info = {"vllm": "0.26.0", "connector_files": KNOWN[imported]}
    if said:
        with pytest.raises(TierError, match=said):
            report._release(tree, info, rules)
    else:
        assert report._release(tree, info, rules) == "0.26.0"
