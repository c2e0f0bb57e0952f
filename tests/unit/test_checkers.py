"""Each checker on a hand-written good and bad history, and a canary: a broken release that the suite must catch."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from kvcover import build, resolve
from kvcover.sim.kernel.events import KINDS, Counted, Message, Raised, Short, Stray
from kvcover.sim.kernel.history import History, Row
from kvcover.sim.releases.records import RELEASES
from kvcover.sim.results.checkers import CHECKERS, Plan, check_all
from kvcover.sim.simulate import run_world

PLAN = Plan(
    mode="write",
    needed={0: ("D0", "D1")},
    holders={0: ("P0", "P1")},
    users={0: ("D0", "D1")},
    intended={"P0": ("D0",), "P1": ("D1",)},
)
GOOD: list[Row] = [
    (0, "allocated", "D", "", 0, -1, None), (0, "allocated", "P", "", 0, -1, None),
    (1, "dialled", "P0", "D0", 0, -1, None), (1, "dialled", "P1", "D1", 0, -1, None),
    (5, "wrote", "P0", "D0", 0, 0, None), (5, "wrote", "P1", "D1", 0, 0, None),
    (6, "settled", "P0", "", 0, -1, None), (6, "settled", "P1", "", 0, -1, None),
    (6, "released", "P0", "", 0, -1, None), (6, "released", "P1", "", 0, -1, None), (6, "freed", "P", "", 0, -1, None),
    (7, "write_done", "D0", "P0", 0, -1, Counted(1)), (7, "write_done", "D1", "P1", 0, -1, Counted(1)),
    (7, "told", "D0", "P0", 0, -1, None), (7, "told", "D1", "P1", 0, -1, None),
    (8, "go", "D", "", 0, -1, None), (9, "ended", "D", "", 0, -1, None), (9, "freed", "D", "", 0, -1, None),
]  # fmt: skip
# checker: which kinds of event to take out of the good history, whose, and what to add, to make it bad
BAD: dict[str, tuple[tuple[tuple[str, str], ...], tuple[Row, ...]]] = {
    "coverage-at-go": ((), ((8, "short", "D1", "", 0, -1, Short(3, 4)),)),
    "told-written-needed": ((("wrote", "P1"),), ()),
    "completed-once": ((), ((7, "told", "D0", "P1", 0, -1, None),)),
    "no-use-before-landing": ((("freed", "P"),), ((12, "wrote", "P0", "D0", 0, 1, None), (13, "freed", "P", "", 0, -1, None))),
    "no-race": ((("settled", "P1"),), ()),
    "source-held": ((("freed", "P"),), ((4, "freed", "P", "", 0, -1, None),)),
    "no-stray-write": ((), ((6, "stray", "D0", "", 0, 0, Stray(3)),)),
    "dialled-is-intended": ((), ((2, "dialled", "P1", "D0", 0, -1, None),)),
    "every-request-ends": ((("ended", "D"),), ()),
    "nothing-held": ((("freed", "P"),), ()),
    "queues-bounded": ((), ((3, "undelivered", "D", "", 0, -1, Message("remote_blocks", "10.0.0.1", 61007)),)),
    "engine-alive": ((), ((3, "crashed", "P", "", 0, -1, Raised("KeyError", "0")),)),
}
# What is too late by the clock is a race too; these two are for tiers that see times and not what orders events.
BY_TIME = ("no-use-before-landing", "source-held")


def history_of(rows: list[Row]) -> History:
    history = History()
    history.rows = sorted(rows, key=lambda row: row[0])
    return history


def verdicts(rows: list[Row], plan: Plan = PLAN) -> dict[str, str]:
    return {check.name: check.verdict for check in check_all(history_of(rows), plan)}


def test_a_good_history_passes_every_checker() -> None:
    assert set(verdicts(list(GOOD)).values()) == {"pass"}


@pytest.mark.parametrize("name", [checker.name for checker in CHECKERS])
def test_a_bad_history_fails_its_checker(name: str) -> None:
    gone, added = BAD[name]
    rows = [row for row in GOOD if (row[1], row[2]) not in gone] + list(added)
    got = verdicts(rows, msgspec.structs.replace(PLAN, observed=frozenset(KINDS) - {"settled"}) if name in BY_TIME else PLAN)
    assert got[name] == "fail"
    others = [other for other, verdict in got.items() if verdict == "fail" and other != name]
    assert not others, f"{name} should be the only one to fail, {others} did too"


@pytest.mark.parametrize("name", BY_TIME)
def test_what_is_too_late_by_the_clock_is_a_race(name: str) -> None:
    gone, added = BAD[name]
    assert verdicts([row for row in GOOD if (row[1], row[2]) not in gone] + list(added))["no-race"] == "fail"


def test_nothing_seen_is_unknown_and_never_a_pass() -> None:
    got = verdicts([])
    assert {name for name, verdict in got.items() if verdict == "pass"} == {"queues-bounded", "engine-alive"}
    assert got["every-request-ends"] == "fail"


def test_every_checker_says_who_taught_it() -> None:
    assert all(checker.statement and "#" in checker.taught_by for checker in CHECKERS)


# -- canaries: one wrong policy in a release that is right, each must be caught ------------------------------------

RIGHT: dict[str, Any] = {"release": "reference", "model": "layers=2,kv_heads=8,head_dim=8"}
WRITE4: dict[str, Any] = {"prefill": {"tp": 4}, "decode": {"tp": 4}}
CANARIES: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
    ("the seed bug", {"peer_tp": "tp_size_or_1"}, WRITE4, "told-written-needed"),
    ("rank map of one rank", {"write_map": "floor", "write_plan": "local_strides", "write_done_to": "own_rank",
                              "completion": "first_message"}, {"prefill": {"tp": 2}, "decode": {"tp": 4}}, "every-request-ends"),
    ("told by own number", {"write_done_to": "own_rank", "completion": "first_message"},
     {"prefill": {"tp": 2}, "decode": {"tp": 4}}, "told-written-needed"),
    ("first message completes", {"completion": "first_message"},
     {"prefill": {"tp": 4}, "decode": {"tp": 2}, "faults": ["reorder-notice:write_done,from=P3,ms=50",
                                                             "delay-transfer:write,from=P3,ms=40"]}, "coverage-at-go"),
    ("blocks announced to too few", {"blocks_ready_width": "own_size"}, {"prefill": {"tp": 4}, "decode": {"tp": 2}}, "nothing-held"),
    ("no barrier", {"read_barrier": "none"}, {**WRITE4, "mode": "read", "model": "deepseek-v3"}, "coverage-at-go"),
    ("released by source", {"release_to": "sources"}, {"mode": "read", "prefill": {"tp": 4}, "decode": {"tp": 2},
                                                       "model": "layers=2,mla=64+16"}, "nothing-held"),
    ("no barrier, and reads that are there at once", {"read_barrier": "none"}, {**WRITE4, "mode": "read", "fabric": "loopback"}, "no-race"),
    ("first message completes, and the others are as fast", {"completion": "first_message"},
     {"prefill": {"tp": 4}, "decode": {"tp": 2}}, "no-race"),
    ("one ack is enough", {"acks": "any"}, {"mode": "read", "prefill": {"tp": 2}, "decode": {"tp": 4}}, "no-race"),
    ("only the last layer's status", {"read_done": "last_layer"}, {**WRITE4, "mode": "read", "rdma": {"queue_pairs": 2}}, "no-race"),
    ("ports collide", {"ports": "dp_plus_tp"}, {"decode": {"tp": 2, "dp": 2}, "prefill": {"tp": 2}}, "engine-alive"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "scenario", "caught_by"), [pytest.param(*c[1:], id=c[0]) for c in CANARIES])
def test_canary_is_caught(overrides: dict[str, str], scenario: dict[str, Any], caught_by: str) -> None:
    # without the timer by which the reference saves itself from whatever prefill does wrong
    patient = {"decode_timer": "none"}
    good, _ = run_world(resolve(build({**RIGHT, **scenario, "overrides": patient})))
    bad, _ = run_world(resolve(build({**RIGHT, **scenario, "overrides": patient | overrides})))
    assert {check.name: check.verdict for check in bad.checks}[caught_by] == "fail"
    assert {check.name: check.verdict for check in good.checks}[caught_by] == "pass"


def test_the_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        RELEASES["0.27.0"].peer_tp = "tp_size_or_1"  # type: ignore[misc]
    assert dataclasses.replace(RELEASES["0.27.0"], peer_tp="tp_size_or_1").peer_tp == "tp_size_or_1"
