"""From a finished run of any tier to its result: everything that a result says is a view of the record."""

from __future__ import annotations

from typing import Any

import msgspec

from kvcover.sim.results.checkers import check_all
from kvcover.sim.results.findings import find
from kvcover.sim.results.outcome import (
    percentiles,
    plan_of,
    rank_coverages,
    request_outcome,
    sets_of,
    times_to_go,
    transfer_times,
)
from kvcover.sim.results.races import find_races
from kvcover.sim.results.record import Record
from kvcover.sim.results.result import FaultFired, Result, raced, worst
from kvcover.sim.scenario.endpoint import Endpoint


def judge(record: Record, **told: Any) -> Result:
    """The result of a run. `told` are fields of it that only the tier knows: digest, events, seconds, replay and the like."""
    setup, scenario = record.setup, record.setup.scenario
    outcomes = [request_outcome(course) for course in record.courses]
    ranks = rank_coverages(record)
    sets = sets_of(record, ranks)
    plan = plan_of(record)
    checks = check_all(record.history, plan)
    races = find_races(record, plan) if raced(checks) else []
    go = [count for course in record.courses for count in course.cells]
    end = [count for course in record.courses for count in course.at_end]
    cells = sum(count.cells for count in go)
    faults = [FaultFired(fault=str(fault), fired=fired) for fault, fired in zip(setup.faults, record.fired, strict=True)]
    fields: dict[str, Any] = {"release": setup.prefill.release.name, "decode_release": setup.decode.release.name} | told
    return Result(
        tier=record.tier,
        mode=scenario.mode,
        model=scenario.model,
        router=setup.router.name,
        seed=scenario.seed,
        prefill=_sizes(setup.prefill),
        decode=_sizes(setup.decode),
        outcome=worst(outcomes) if all(fault.fired for fault in faults) else "vacuous",
        coverage=sum(count.covered for count in go) / cells,
        coverage_end=sum(count.covered for count in end) / cells,
        wrong=sum(count.wrong for count in go) / cells,
        stray=record.stray,
        by_rank=ranks,
        by_request=outcomes,
        sets=sets,
        findings=[found.told(by_model=record.tier != "model") for found in [*find(record, ranks, sets), *races]],
        checks=checks,
        faults=faults,
        transfer_ms=percentiles(transfer_times(record)),
        time_to_go_ms=percentiles(times_to_go(record)),
        scenario=msgspec.to_builtins(scenario),
        **fields,
    )


def _sizes(side: Endpoint) -> dict[str, int]:
    sizes = {"tp": side.tp, "dp": side.dp}
    return sizes | {"instances": side.side.instances} if side.side.instances > 1 else sizes
