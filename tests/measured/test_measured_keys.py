"""The model against `data/measured_keys.jsonl`: what one bad key did on the real connector of three releases."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvcover import Timing, run
from kvcover.sim.search.keys import KeyCase, key_cases, outcome_of

LINES: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "measured_keys.jsonl").read_text(encoding="utf-8").splitlines()
]
MEASURED = ("0.27.0", "0.32.0", "0.33.0")
NOT_MEASURED = ("0.27.0/read/decode/remote_notify_port/null",)  # the machine was too busy for a run that says anything
_OWN_LIST = (
    "prefill tells itself an empty list, which ends its notify threads: before or after decode's announcements came is up to time"
)
# Part of a case's id, and why the two differ.
KNOWN = {
    "write/prefill/transfer_id/other": "two requests under one id: whose writes come last is up to time",
    "write/decode/transfer_id/other": "two requests under one id: whose blocks come last is up to time",
    "read/prefill/transfer_id/other": "two requests under one id: the harness tells requests by their ids, and so whose timer fired",
    "transfer_id/stale": "an id that is used again: the harness tells requests by their ids, and so whose message it was",
    "0.27.0/write/prefill/do_remote_prefill/wrong-": _OWN_LIST,
    "0.32.0/write/prefill/do_remote_prefill/wrong-": _OWN_LIST,
}
# In WRITE a rank that had no one to write to does not wait for its first handshake: whether that is over in time is up to time.
QUICK_HANDSHAKES = "0.33.0/write/prefill/remote_tp_size/wrong-value"


@cache
def cases(release: str, mode: str) -> dict[str, KeyCase]:
    return {case.id: case for case in key_cases(release, mode)}


def case_of(line: dict[str, Any]) -> KeyCase:
    return cases(*line["id"].split("/")[:2])[line["id"]]


def known(line: dict[str, Any]) -> str:
    return next((reason for part, reason in KNOWN.items() if part in line["id"]), "")


def modelled(line: dict[str, Any]) -> list[str]:
    scenario = case_of(line).scenario
    assert scenario is not None
    if line["id"] == QUICK_HANDSHAKES:
        import msgspec

        scenario = msgspec.structs.replace(scenario, timing=Timing(handshake_ns=100_000))
    return run(scenario).by_request


@pytest.mark.parametrize("line", [line for line in LINES if not known(line)], ids=lambda line: line["id"])
def test_requests_end_as_on_the_real_connector(line: dict[str, Any]) -> None:
    """`varied`: the connector's own runs differ; one of them is as the model says."""
    assert case_of(line).fault == line["fault"]
    assert modelled(line) in line.get("varied", [line["by_request"]])


def test_ids_that_are_not_their_requests_differ_in_whom_they_hit() -> None:
    """And not in whether somebody is hit."""
    for line in LINES:
        if "transfer_id" not in line["id"] or not known(line):
            continue
        bad = [outcome != "ok" for outcome in line["by_request"]]
        assert any(bad), line["id"]
        assert any(outcome != "ok" for outcome in modelled(line)), line["id"]


def test_every_case_was_measured() -> None:
    measured = {line["id"] for line in LINES}
    for release in MEASURED:
        for mode in ("write", "read"):
            for case in cases(release, mode).values():
                if case.scenario is None or not (case.read or case.trouble == "wrong type"):
                    continue
                assert case.id in measured or case.id in NOT_MEASURED or run(case.scenario).outcome == "vacuous", case.id


def test_what_takes_everybody_along() -> None:
    """As measured: a wrong size in the first request, a type that raises in a scheduler."""
    everybody = {line["id"] for line in LINES if outcome_of(case_of(line), line["by_request"]).everybody}
    for release in MEASURED:
        for name in (
            "write/prefill/remote_block_ids/missing",
            "write/prefill/remote_tp_size/wrong-type",
            "read/decode/remote_dp_size/null",
        ):
            assert f"{release}/{name}" in everybody
    assert "0.27.0/write/prefill/remote_tp_size/wrong-value" in everybody
