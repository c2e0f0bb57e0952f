"""The model against `data/measured.toml`: what the real connector of each release did with tagged bytes.

Those rows were measured with a stand-in for vLLM's scheduler. `data/measured_scheduler.toml` has the same scenarios, as far as
they have been measured again, with vLLM's own."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvcover import Result, build, run

DATA = Path(__file__).parents[1] / "data"
ROWS: list[dict[str, Any]] = tomllib.loads((DATA / "measured.toml").read_text())["row"]
AGAIN: list[dict[str, Any]] = tomllib.loads((DATA / "measured_scheduler.toml").read_text())["row"]
# As those of the harness, in which a handshake is given up before blocks that nobody asks for.
SHORT_TIMERS = {"transfer_timeout_s": 1.5, "defer_timeout_s": 2.0}


def scenario_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row's inputs as a scenario; bytes land at once, as in the loopback `mori.io` that measured them."""
    return {
        "release": row["release"],
        "mode": row["mode"],
        "prefill": {**row["prefill"], "num_blocks": row["prefill_num_blocks"]},
        "decode": {**row["decode"], "num_blocks": row["decode_num_blocks"]},
        "model": row["model"],
        "kv_dtype": "fp32",
        "block_size": row["block_size"],
        "prompt_tokens": row["prompt_tokens"],
        "requests": row["requests"],
        "router": row["router"],
        "faults": row["faults"],
        "fabric": "loopback",
        "timers": SHORT_TIMERS,
    }


@pytest.mark.parametrize("row", ROWS + AGAIN, ids=[row["id"] for row in ROWS] + [f"again:{row['id']}" for row in AGAIN])
def test_model_agrees_with_the_real_connector(row: dict[str, Any]) -> None:
    result = run(build(scenario_of(row)))
    got = observed(result, row["expect"])
    assert {name: rounded(value) for name, value in got.items()} == row["expect"]


def rounded(value: Any) -> Any:
    """Numbers as they stand in the table."""
    return [round(each, 6) if isinstance(each, float) else each for each in value] if isinstance(value, list) else value


def observed(result: Result, wanted: dict[str, Any]) -> dict[str, Any]:
    """The same quantities as a row's `expect`, from a result. Cells that were never filled leave no trace when they land."""
    by_rank = zip(result.sets.needed, (rank for rank in result.by_rank if rank.coverage is not None), strict=True)
    empty = {name for name, rank in by_rank if rank.missing == 1 and not rank.coverage_end}
    got: dict[str, Any] = {
        "coverage": [rank.coverage for rank in result.by_rank],
        "wrong": [rank.wrong for rank in result.by_rank],
        "covered_plus_wrong": [(rank.coverage or 0.0) + (rank.wrong or 0.0) for rank in result.by_rank],
        "coverage_end": [rank.coverage_end for rank in result.by_rank],
        "told": result.sets.told,
        "written": [name for name in result.sets.written if name not in empty],
        "prefill_told": result.sets.prefill_told,
        "prefill_released": result.sets.prefill_released,
        "outcome": result.outcome,
    }
    return {name: got[name] for name in wanted}
