"""The findings in docs/findings.md: on the model, by release, and on the real connector where trees are at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcover import build, load, run
from kvcover.sim.results.verdict import PASS, judge_run

FOLDER = Path(__file__).parents[2] / "docs" / "findings"


def scenario(name: str, **fields: Any) -> dict[str, Any]:
    return {**load(FOLDER / f"{name}.toml"), **fields}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda path: str(path.stem))
def test_the_model_shows_it(path: Path) -> None:
    built = build(load(path))
    result = run(built)
    assert built.expect is not None
    assert built.expect.by_rank is not None
    assert (result.outcome, result.coverage) == (built.expect.outcome, built.expect.coverage)
    assert [rank.coverage for rank in result.by_rank] == list(built.expect.by_rank)
    assert judge_run(result, built.expect) == PASS


@pytest.mark.parametrize(("ms", "by_rank", "outcome"), [
    (2500, [1.0, 1.0], "degraded"),  # in the second round, in time for both layers
    (3500, [1.0, 0.5], "corrupt"),  # in time for the second layer only
    (4500, [1.0, 0.0], "hang"),  # too late for both
])  # fmt: skip
def test_the_window_of_a_late_handshake(ms: int, by_rank: list[float], outcome: str) -> None:
    """Closed form: with L layers and a timeout T the second round lasts from L·T to 2·L·T after the dial."""
    result = run(build(scenario("late-handshake", faults=[f"late-rank:D1,ms={ms}"])))
    assert [rank.coverage for rank in result.by_rank] == by_rank
    assert result.outcome == outcome


def test_a_read_that_is_put_off_is_named() -> None:
    result = run(build(scenario("one-read-a-step")))
    assert [finding.text for finding in result.findings if finding.kind == "read-put-off"] == [
        "request 1 ran without its KV: its step had handshakes, and read for another one"
    ]


@pytest.mark.parametrize(("release", "unheard"), [("0.27.0", "hang"), ("0.32.0", "hang"), ("0.33.0", "failed")])
def test_a_way_out_of_the_late_handshake(release: str, unheard: str) -> None:
    """Prefill says that it failed; up to 0.32.0 the message ends decode's notify thread, unless decode learns it as well."""
    told = {"sealing": "every_layer", "write_failure": "write_failed"}
    late = scenario("late-handshake", release=release)
    assert run(build({**late, "overrides": told})).outcome == unheard
    assert run(build({**late, "overrides": told | {"write_failed_heard": "understood"}})).outcome == "failed"


@pytest.mark.parametrize(("name", "release", "override"), [
    ("sliding-lookahead", "0.33.0", "windows=prompt_tail"),
    ("one-read-a-step", "0.26.0", "read_queue=all"),
    ("notice-while-running", "0.33.0", "late_report=ignored"),
    ("state-unknown-size", "0.33.0", "unknown_tp_states_write=zero_is_own"),
    ("mixed-layers-and-pools", "0.33.0", "slice_heads=of_layer"),
])  # fmt: skip
def test_the_other_ways_out(name: str, release: str, override: str) -> None:
    result = run(build(scenario(name, release=release, overrides=dict([override.split("=")]))))
    assert (result.outcome, result.coverage) == ("ok", 1.0)
    assert override in (FOLDER.parent / "findings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("release", "outcome"), [("0.27.0", "crash"), ("0.32.0", "crash"), ("0.33.0", "corrupt")])
def test_the_guard_is_asked_up_to_0_32(release: str, outcome: str) -> None:
    assert run(build(scenario("guard-and-pools", release=release))).outcome == outcome
    equal = scenario("guard-and-pools", release=release, decode={"tp": 4, "num_blocks": 16})
    assert run(build(equal)).outcome == "crash"
