"""Run a scenario on the model tier."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

import msgspec

from kvcover.faults import KINDS
from kvcover.sim.errors import TierError
from kvcover.sim.results.checkers import check_all
from kvcover.sim.results.findings import find
from kvcover.sim.results.outcome import (
    percentiles,
    plan_of,
    rank_coverages,
    request_outcome,
    request_tallies,
    sets_of,
    times_to_go,
    transfer_times,
)
from kvcover.sim.results.result import FaultFired, Result, worst
from kvcover.sim.scenario.scenario import Scenario, fault_of
from kvcover.sim.scenario.setup import Setup, resolve
from kvcover.sim.tiers import Capabilities, Tier
from kvcover.sim.world import World


def run(scenario: Scenario) -> Result:
    """Play the scenario to its end and say what came of it; raises InputError for a scenario that makes no sense."""
    return run_world(resolve(scenario))[0]


class ModelTier(Tier):
    """The model: everything is simulated, in virtual time, so that it runs anywhere and each run is the same."""

    name = "model"
    can = Capabilities(faults=frozenset(KINDS), virtual_time=True)

    def _run_all(
        self, scenarios: Sequence[Scenario], vllms: Sequence[str | None], keep_errors: bool
    ) -> Sequence[Result | TierError]:
        from kvcover.sim.results.show import progress  # rich, which a single run does not need

        setups = [resolve(scenario) for scenario in scenarios]
        return [run_world(setup)[0] for setup in progress(setups, "runs")]

    def _check(self, scenario: Scenario, vllm: str | None) -> None:
        resolve(scenario)


model_tier = ModelTier()


def run_world(setup: Setup) -> tuple[Result, World]:
    """As `run`, and the finished world with its history, for those who want to look closer."""
    started = time.perf_counter()
    world = World(setup)
    world.run()
    return judge(world, started), world


def judge(world: World, started: float) -> Result:
    """Everything that the result says is a view of the finished world."""
    setup, scenario = world.setup, world.setup.scenario
    tallies = [request_tallies(world, transfer) for transfer in world.transfers]
    outcomes = [request_outcome(world, t, tallies[t.index]) for t in world.transfers]
    ranks = rank_coverages(world, tallies)
    sets = sets_of(world, ranks)
    go = [tally.at_go for row in tallies for tally in row]
    end = [tally.at_end for row in tallies for tally in row]
    cells = sum(count.cells for count in go)
    unfired = [str(fault) for fault, fired in zip(setup.faults, world.fired, strict=True) if not fired]
    return Result(
        tier="model",
        release=setup.prefill.release.name,
        decode_release=setup.decode.release.name,
        mode=scenario.mode,
        model=scenario.model,
        router=setup.router.name,
        seed=scenario.seed,
        prefill={"tp": setup.prefill.tp, "dp": setup.prefill.dp},
        decode={"tp": setup.decode.tp, "dp": setup.decode.dp},
        outcome="vacuous" if unfired else worst(outcomes),
        coverage=sum(count.covered for count in go) / cells,
        coverage_end=sum(count.covered for count in end) / cells,
        wrong=sum(count.wrong for count in go) / cells,
        stray=world.stray,
        by_rank=ranks,
        by_request=outcomes,
        sets=sets,
        findings=find(world, ranks, sets),
        checks=check_all(world.history, plan_of(world)),
        faults=[FaultFired(fault=str(f), fired=n) for f, n in zip(setup.faults, world.fired, strict=True)],
        digest=world.history.digest(),
        events=world.clock.events,
        virtual_ns=world.history.last_ns(),
        seconds=time.perf_counter() - started,
        replay=replay_line(scenario),
        transfer_ms=percentiles(transfer_times(world)),
        time_to_go_ms=percentiles(times_to_go(world)),
        scenario=msgspec.to_builtins(scenario),
    )


def replay_line(scenario: Scenario) -> str:
    """A `kvcover run` command line that runs this scenario again."""
    fields = msgspec.to_builtins(scenario)
    words = ["kvcover", "run"]
    for name in ("prefill", "decode"):
        side = fields.pop(name, None) or {}
        if sizes := [f"{key}={side.pop(key)}" for key in ("tp", "dp") if key in side]:
            words += [f"--{name}", ",".join(sizes)]
        for key, value in side.items():
            words += ["--set", f"{name}.{key}={_value(value)}"]
    for fault in fields.pop("faults", ()):
        words += ["--fault", fault if isinstance(fault, str) else str(fault_of("faults", fault))]
    for key in ("release", "decode_release", "mode", "model", "router", "seed"):
        if key in fields:
            words += [f"--{key.replace('_', '-')}", str(fields.pop(key))]
    for key, value in fields.items():
        if isinstance(value, dict):
            for inner, item in value.items():
                words += ["--set", f"{key}.{inner}={_value(item)}"]
        elif key != "schema":
            words += ["--set", f"{key}={_value(value)}"]
    return shlex.join(words)


def _value(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
