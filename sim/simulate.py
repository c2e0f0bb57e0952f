"""Run a scenario on the model tier."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence

import msgspec

from kvcover.faults import KINDS
from kvcover.sim.cache.ledger import Count
from kvcover.sim.errors import InputError, TierError
from kvcover.sim.moriio.transfer import Transfer
from kvcover.sim.progress import progress, watched
from kvcover.sim.results.depart import Step, steps_of
from kvcover.sim.results.judge import judge
from kvcover.sim.results.record import Course, EngineEnd, Record
from kvcover.sim.results.result import Result
from kvcover.sim.scenario.context import Batch
from kvcover.sim.scenario.dispatch import Params
from kvcover.sim.scenario.scenario import Scenario, build, fault_of
from kvcover.sim.scenario.setup import Setup, resolve
from kvcover.sim.tiers import NOT_BEGUN, Capabilities, Pace, Tier
from kvcover.sim.world import World


def run(scenario: Scenario) -> Result:
    """Play the scenario to its end on the model and say what came of it; raises InputError for one that makes no sense.

    >>> result = run(Scenario(release="0.26.0", model="deepseek-v3", prefill=Side(tp=8), decode=Side(tp=8)))
    >>> result.outcome, result.coverage, result.sets.written
    ('corrupt', 0.125, ['D0'])
    >>> run(Scenario(prefill=Side(tp=-1)))
    Traceback (most recent call last):
    kvcover.sim.errors.InputError: prefill.tp: -1 is wrong; expected a whole number >= 1
    """
    return run_world(resolve(scenario))[0]


class ModelTier(Tier):
    """The model: everything is simulated, in virtual time, so that it runs anywhere and each run is the same."""

    name = "model"
    can = Capabilities(faults=frozenset(KINDS), virtual_time=True, policies=True)

    def _run_all(
        self, scenarios: Sequence[Scenario], vllms: Sequence[str | None], keep_errors: bool, pace: Pace
    ) -> Sequence[Result | TierError]:
        setups = [resolve(scenario) for scenario in scenarios]
        if len(setups) == 1:
            world = World(setups[0])
            with watched(lambda: f"{world.clock.events} events, {world.clock.now / 1e6:.0f} ms of virtual time"):
                return [played(world)]
        results: list[Result | TierError] = []
        with progress(len(setups), "runs") as bar:
            for position, setup in enumerate(setups):
                results.append(NOT_BEGUN if pace.over() else run_world(setup)[0])
                pace.done(position, results[-1])
                bar.advance()
        return results

    def _check(self, scenario: Scenario, vllm: str | None) -> None:
        resolve(scenario)


model_tier = ModelTier()


def run_world(setup: Setup, handed: Callable[[str, Params], Params] | None = None) -> tuple[Result, World]:
    """As `run`, and the finished world with its history, for those who want to look closer.

    `handed` makes of a leg, by its side, what the engine is given.

    >>> result, world = run_world(resolve(Scenario(release="0.27.0", prefill=Side(tp=2), decode=Side(tp=2))))
    >>> sorted(event.actor for event in world.history.events("told"))
    ['D0', 'D1']
    """
    world = World(setup)
    world.router.handed = handed or world.router.handed
    return played(world), world


def played(world: World) -> Result:
    """Play a world to its end and judge it."""
    started = time.perf_counter()
    world.run()
    return judge(
        record_of(world),
        digest=world.history.digest(),
        events=world.clock.events,
        virtual_ns=world.history.last_ns(),
        seconds=time.perf_counter() - started,
        replay=replay_line(world.setup.scenario),
    )


def record_of(world: World) -> Record:
    """What a finished world left behind, as any tier can: what `story` tells of.

    >>> result, world = run_world(resolve(Scenario(requests=2)))
    >>> [course.index for course in record_of(world).courses]
    [0, 1]
    """
    return Record(
        tier="model",
        setup=world.setup,
        history=world.history,
        courses=tuple(_course(world, transfer) for transfer in world.transfers),
        engines=tuple(
            EngineEnd(name=e.name, me=e.me, dp=e.dp, started=e.started, crashed=e.crashed, held=tuple(sorted(e.pool.held)))
            for e in world.engines
        ),
        legs=world.legs,
        fired=tuple(world.fired),
        stray=world.stray,
    )


def steps_of_result(place: str, result: Result) -> list[Step]:
    """The events of a run whose result this is: those that a real run kept; the model plays its again.

    Raises InputError, which names `place`, for a real result without events.
    """
    if result.digest is not None:
        return steps_of(run_world(resolve(build(result.scenario or {})))[1].history.rows)
    try:
        return msgspec.convert((result.backend or {})["events"], list[Step])
    except (KeyError, msgspec.ValidationError):
        raise InputError(place, "keeps no events of its run", "write it again with `kvcover run -o FILE`") from None


def traced(setup: Setup) -> tuple[Result, list[Step]]:
    """As `run_world`, and every event; batches with when they were posted, which the history does not have."""
    world = World(setup)
    posts: dict[Batch, int] = {}
    world.context.posts = posts
    result = played(world)
    steps = []
    for step, row in zip(steps_of(world.history.rows), world.history.rows, strict=True):
        at = posts.get(row[:6])
        steps.append(step if at is None else msgspec.structs.replace(step, time_ns=at, took_ns=row[0] - at))
    return result, steps


def _course(world: World, transfer: Transfer) -> Course:
    prefill, decode, index = world.prefills[transfer.prefill_dp], world.decodes[transfer.decode_dp], transfer.index
    return Course(
        request=transfer.request,
        prefill_dp=transfer.prefill_dp,
        decode_dp=transfer.decode_dp,
        at_go=tuple(transfer.at_go) if transfer.went else None,
        at_end=tuple(_end_count(world, transfer, tp) for tp in range(world.setup.decode.tp)),
        by_layer=_by_layer(world, transfer),
        bad_end=transfer.bad_end,
        admitted=bool(transfer.needs),
        ended=transfer.ended,
        lost=prefill.crashed or decode.crashed,
        held=index in prefill.pool.held or (transfer.ended and index in decode.pool.held),
        late=transfer.timer_fired,
        aborted=transfer.aborted,
        preempted=transfer.preempted,
        started_ns=transfer.started_ns,
        posted_ns=transfer.posted_ns,
        landed_ns=transfer.landed_ns,
        go_ns=transfer.go_ns,
    )


def _end_count(world: World, transfer: Transfer, tp: int) -> Count:
    """What rank `tp` holds of a request when the run is over; all missing if decode never allocated blocks."""
    if not transfer.needs:
        return Count(0, 0, world.setup.decode.needed(transfer.request))
    return world.decodes[transfer.decode_dp].ledger.count_all(tp, transfer.index, transfer.needs[tp])


def _by_layer(world: World, transfer: Transfer) -> tuple[list[Count], ...] | None:
    """What each rank held of each layer: at go, or at the end if it never went; None if decode never allocated blocks."""
    if transfer.went or not transfer.needs:
        return tuple(transfer.layers_at_go) or None
    ledger = world.decodes[transfer.decode_dp].ledger
    return tuple(ledger.count_each(tp, transfer.index, needs) for tp, needs in enumerate(transfer.needs))


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
    for field, policy in fields.pop("overrides", {}).items():
        words += ["--override", f"{field}={policy}"]
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
