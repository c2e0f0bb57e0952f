"""What became worse between two runs: each kind by itself, better is never worse, and what can't be told is no pass."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvcover import InputError, Result, TierError, build, judge_run, run
from kvcover.sim.results.gate import Cell, cells_of, verdict_of
from kvcover.sim.results.junit import junit
from kvcover.sim.results.regress import by_pairing, change, refuse_other_matrix
from kvcover.sim.results.result import OUTCOMES, Finding
from kvcover.sim.results.verdict import PASS

GOOD = run(build({"release": "0.33.0", "model": "layers=1,mla=8", "decode": {"tp": 2}}))


def but(result: Result = GOOD, **changes: Any) -> Result:
    return msgspec.structs.replace(result, **changes)


def checks(**verdicts: str) -> dict[str, Any]:
    """The checks of GOOD, some with another verdict."""
    names = {name.replace("_", "-"): verdict for name, verdict in verdicts.items()}
    changed = [msgspec.structs.replace(each, verdict=names.get(each.name, each.verdict)) for each in GOOD.checks]
    return {"checks": changed}


def test_a_run_is_no_worse_than_itself() -> None:
    assert GOOD.outcome == "ok"
    assert change(GOOD, GOOD) == change(but(outcome="crash"), but(outcome="crash"))
    found = change(GOOD, GOOD)
    assert not found.worse and not found.better and not found.unclear


@pytest.mark.parametrize(("before", "now"), [(a, b) for a in OUTCOMES for b in OUTCOMES if a != b])
def test_an_outcome_further_down_the_list_is_worse_and_one_further_up_is_better(before: str, now: str) -> None:
    found = change(but(outcome=before), but(outcome=now))
    worse = OUTCOMES.index(now) > OUTCOMES.index(before)
    assert (bool(found.worse), bool(found.better)) == (worse, not worse)


def test_as_bad_for_another_reason_is_said_and_is_no_verdict() -> None:
    """Which rank dies, and of what text, is up to timing; of what class somebody should know."""

    def crash(*raised: str) -> Result:
        findings = [Finding(kind="crash", text=f"P{rank} died: {text}", causes=[]) for rank, text in enumerate(raised)]
        return but(outcome="crash", findings=findings)

    before = crash("TransferError: transfer timeout", "KeyError: 3")
    assert change(before, crash("KeyError: 7")).otherwise == ()
    found = change(before, crash("TransferError: x", "AssertionError: "))
    assert found.otherwise == ("crash by AssertionError, not so in the baseline",)
    assert not found.worse and not found.unclear
    hangs = [but(outcome="hang", findings=[Finding(kind=kind, text="", causes=[])]) for kind in ("never-told", "dead-port")]
    assert change(*hangs).otherwise == ("dead-port, not so in the baseline",)
    assert change(before, but()).otherwise == () == change(but(), before).otherwise
    [cell] = cells_of({"a": crash("AssertionError: ")}, {"a": before}, lambda name, result: judge_run(result))
    assert cell.otherwise and cell.as_before and cell.verdict.status != "fail"
    assert "as bad, but otherwise: crash by AssertionError" in junit("x", [cell], PASS)


WORSE: dict[str, dict[str, Any]] = {
    "coverage": {"coverage": 0.5},
    "coverage at the end": {"coverage_end": 0.5},
    "wrong cells": {"wrong": 0.1},
    "stray cells": {"stray": 3},
    "one rank": {"by_rank": [GOOD.by_rank[0], msgspec.structs.replace(GOOD.by_rank[1], coverage=0.0)]},
    "told": {"sets": msgspec.structs.replace(GOOD.sets, told=["D0"])},
    "written": {"sets": msgspec.structs.replace(GOOD.sets, written=["D1"])},
    "released": {"sets": msgspec.structs.replace(GOOD.sets, prefill_released=[])},
    "a check": checks(nothing_held="fail"),
    "a race": checks(no_race="fail"),
    "a request": {"by_request": ["refused"]},
}


@pytest.mark.parametrize("changes", WORSE.values(), ids=WORSE)
def test_each_kind_is_worse_by_itself_and_better_the_other_way(changes: dict[str, Any]) -> None:
    other = but(**changes)
    found = change(GOOD, other)
    assert found.worse and not found.unclear
    assert not change(other, GOOD).worse


def test_what_one_side_can_not_see_is_no_difference() -> None:
    blind = but(stray=None, sets=msgspec.structs.replace(GOOD.sets, prefill_told=None, prefill_released=None))
    assert not change(blind, GOOD).worse and not change(GOOD, blind).worse


def test_a_check_that_can_not_be_told_any_more_is_unclear() -> None:
    assert change(GOOD, but(**checks(no_stray_write="unknown"))).unclear
    assert not change(but(outcome="crash"), but(outcome="refused", **checks(no_stray_write="unknown"))).unclear


def test_fewer_ranks_are_told_where_the_outcome_is_better() -> None:
    """0.26.0 tells ranks that never got data; a connector that fails the request tells none, and that is better."""
    lying, honest = but(outcome="corrupt"), but(outcome="failed", sets=msgspec.structs.replace(GOOD.sets, told=[]))
    assert not change(lying, honest).worse


def test_less_is_covered_where_the_outcome_is_better_but_nothing_else_is_worse() -> None:
    """What was half written and said to be done, and is refused now, is better; what spoils more cells on the way is not."""
    half = but(outcome="corrupt", coverage=0.5, coverage_end=0.5)
    assert not change(half, but(outcome="refused", coverage=0.0, coverage_end=0.0)).worse
    assert change(half, but(outcome="refused", coverage=0.0, coverage_end=0.0, stray=7)).worse
    assert change(half, but(outcome="corrupt", coverage=0.4, coverage_end=0.5)).worse


@pytest.mark.parametrize(("before", "now"), [("ok", "vacuous"), ("vacuous", "ok"), ("vacuous", "vacuous")])
def test_a_vacuous_run_is_neither(before: str, now: str) -> None:
    found = change(but(outcome=before), but(outcome=now))
    assert found.unclear and not found.worse and not found.better


# -- many ----------------------------------------------------------------------------------------------------------


def judged(now: dict[str, Any], baseline: dict[str, Any] | None) -> list[Cell]:
    return cells_of(now, baseline, lambda name, result: judge_run(result))


CRASH = but(outcome="crash", coverage=0.0, **checks(coverage_at_go="unknown", no_stray_write="unknown"))


@pytest.mark.parametrize(
    ("now", "baseline", "status"),
    [
        ({"a": GOOD, "b": CRASH}, {"a": GOOD, "b": CRASH}, "pass"),
        ({"a": GOOD, "b": CRASH}, {"a": GOOD, "b": GOOD}, "fail"),
        ({"a": GOOD, "b": GOOD}, {"a": GOOD, "b": CRASH}, "pass"),
        ({"a": GOOD, "new": GOOD}, {"a": GOOD}, "pass"),
        ({"a": GOOD, "new": CRASH}, {"a": GOOD}, "fail"),
        ({"a": GOOD}, {"a": GOOD, "gone": GOOD}, "inconclusive"),
        ({"a": GOOD, "b": TierError("x", "y")}, {"a": GOOD, "b": GOOD}, "inconclusive"),
        ({"a": GOOD, "b": GOOD}, {"a": GOOD, "b": TierError("x", "y")}, "inconclusive"),
        ({"b": CRASH}, {"b": CRASH}, "inconclusive"),
        ({"a": GOOD, "b": but(outcome="vacuous")}, {"a": GOOD, "b": GOOD}, "inconclusive"),
        ({"a": GOOD, "b": CRASH}, None, "fail"),
        ({"a": GOOD}, None, "pass"),
    ],
)
def test_a_gate(now: dict[str, Any], baseline: dict[str, Any] | None, status: str) -> None:
    assert verdict_of(judged(now, baseline), "pairings").status == status


def test_bad_and_no_worse_is_said() -> None:
    (cell,) = judged({"a": CRASH}, {"a": CRASH})
    assert cell.as_before and cell.verdict.idle


def test_a_baseline_of_something_else_is_refused() -> None:
    scenario = build(GOOD.scenario or {})
    cells = by_pairing([GOOD], "base.json")
    name = "write P1→D2"
    assert list(cells) == [name]
    refuse_other_matrix("base.json", cells, "model", {name: scenario})
    same_but_release = msgspec.structs.replace(scenario, release="0.27.0", overrides={"write_map": "floor"})
    refuse_other_matrix("base.json", cells, "model", {name: same_but_release})
    for other in ({"prompt_tokens": 64}, {"model": "layers=2,mla=8"}, {"faults": ("drop:transfer_id",)}, {"seed": 1}):
        with pytest.raises(InputError, match=next(iter(other))):
            refuse_other_matrix("base.json", cells, "model", {name: msgspec.structs.replace(scenario, **other)})
    with pytest.raises(InputError, match="tier"):
        refuse_other_matrix("base.json", cells, "connector", {name: scenario})
    with pytest.raises(InputError, match="read P1"):
        refuse_other_matrix("base.json", cells, "model", {"read P1→D2": scenario})
    with pytest.raises(InputError, match="two results"):
        by_pairing([GOOD, GOOD], "base.json")
