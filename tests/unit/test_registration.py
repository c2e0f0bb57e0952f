"""A router that uses what an instance registered before: what leaves, what comes of it, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from kvcover import InputError, build, resolve, run, run_world
from kvcover.faults import FaultSyntaxError, parse_fault
from kvcover.real_backend.tiers.connector import connector_tier
from kvcover.real_backend.tiers.translate import to_trial
from tests.real.test_connector_tier import needs

TWO: dict[str, Any] = {"model": "layers=2,mla=64+16", "prefill": {"tp": 2}, "decode": {"tp": 2}, "fabric": "loopback"}

# Mode, fault, and what the real connectors of 0.26.0, 0.27.0 and 0.33.0 did: outcome and coverage.
MEASURED: list[tuple[str, str, list[tuple[str, float]]]] = [
    ("write", "decode,tp=1", [("corrupt", 0.5), ("corrupt", 0.5), ("hang", 0.5)]),
    ("read", "decode,tp=1", [("degraded", 1.0), ("ok", 1.0), ("ok", 1.0)]),
    ("write", "prefill,tp=1", [("corrupt", 0.5), ("ok", 1.0), ("failed", 0.5)]),
    ("read", "prefill,tp=1", [("degraded", 1.0), ("degraded", 1.0), ("degraded", 1.0)]),
    ("write", "decode,port=10", [("hang", 0.0), ("hang", 0.0), ("hang", 0.0)]),
    ("read", "decode,port=10", [("degraded", 1.0), ("ok", 1.0), ("ok", 1.0)]),
    ("write", "prefill,port=10", [("hang", 0.0), ("hang", 0.0), ("failed", 0.0)]),
    ("read", "prefill,port=10", [("corrupt", 0.0), ("crash", 0.0), ("crash", 0.0)]),
    ("write", "decode,dp=2", [("corrupt", 0.5), ("degraded", 1.0), ("degraded", 1.0)]),
    ("read", "decode,dp=2", [("degraded", 1.0), ("ok", 1.0), ("ok", 1.0)]),
]
RELEASES = ("0.26.0", "0.27.0", "0.33.0")
ROWS = [(release, mode, aim, seen) for mode, aim, each in MEASURED for release, seen in zip(RELEASES, each, strict=True)]


def scenario(release: str, mode: str, aim: str) -> dict[str, Any]:
    return TWO | {"release": release, "mode": mode, "faults": [f"stale-registration:{aim}"]}


@pytest.mark.parametrize(("release", "mode", "aim", "seen"), ROWS)
def test_the_model_does_what_was_measured(release: str, mode: str, aim: str, seen: tuple[str, float]) -> None:
    result = run(build(scenario(release, mode, aim)))
    assert (result.outcome, result.coverage) == seen
    assert result.faults[0].fired > 0


@pytest.mark.vllm
@pytest.mark.parametrize("release", RELEASES)
def test_the_real_connector_does_it_still(release: str) -> None:
    needs(release)
    rows = [row for row in ROWS if row[0] == release]
    results = connector_tier.many([build(scenario(*row[:3])) for row in rows])
    assert [(result.outcome, result.coverage) for result in results] == [row[3] for row in rows]
    assert all(result.faults[0].fired for result in results)


def test_it_is_in_the_legs_that_speak_of_the_instance() -> None:
    """The prefill leg names decode's sizes; the decode leg prefill's."""
    _, world = run_world(resolve(build(TWO | {"faults": ["stale-registration:decode,tp=8,dp=3"]})))
    prefill, decode = world.legs[0, "prefill"], world.legs[0, "decode"]
    assert (prefill["remote_tp_size"], prefill["remote_dp_size"]) == (8, 3)
    assert (decode["remote_tp_size"], decode["remote_dp_size"]) == (2, 1)
    sent = to_trial(build(TWO | {"faults": ["stale-registration:decode,tp=8,dp=3"]})).legs[0].prefill
    assert sent == prefill | {"transfer_id": sent["transfer_id"]}


def test_it_ends_when_the_new_registration_arrives() -> None:
    """0.33.0 in WRITE: a prefill leg with decode's former TP size of 1 hangs; one that leaves at 5 ms is right again."""
    requests = [{}, {"arrival_ns": 4_900_000}, {"arrival_ns": 5_000_000}]
    result = run(build(TWO | {"requests": requests, "faults": ["stale-registration:decode,tp=1,for=5"]}))
    assert result.by_request == ["hang", "hang", "ok"]
    assert result.faults[0].fired == 2


def test_a_router_that_sends_1_whatever_registered_is_not_touched() -> None:
    fields = TWO | {"router": "vllm-router 0.1.15", "faults": ["stale-registration:decode,tp=4"]}
    assert run(build(fields)).outcome == "vacuous"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "stale-registration:decode",
            "needs what was registered before, tp, dp or port; use stale-registration:prefill|decode,tp=N",
        ),
        ("stale-registration:decod,tp=1", "did you mean 'decode'"),
        ("stale-registration:decode,tp=0", "use 1 to 256"),
        ("stale-registration:decode,dp=0", "use 1 to 255"),
        ("stale-registration:decode,pt=1", "did you mean"),
    ],
)
def test_bad_syntax(text: str, words: str) -> None:
    with pytest.raises(FaultSyntaxError) as error:
        parse_fault(text)
    assert words in str(error.value)


def test_a_port_that_there_is_not() -> None:
    with pytest.raises(InputError, match="use -7300 to"):
        resolve(build(TWO | {"faults": ["stale-registration:decode,port=-20000"]}))
