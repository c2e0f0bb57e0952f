"""Router × vLLM release × mode × TP pairing: which of them work together.

Most routers send the same legs for most pairings, so that far fewer runs are needed than there are cells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import msgspec

from kvcover.sim.results.result import OUTCOMES, Result, raced
from kvcover.sim.scenario.dispatch import values_of
from kvcover.sim.scenario.routers import ROUTERS, Router, get_router
from kvcover.sim.scenario.scenario import Mode, Scenario
from kvcover.sim.scenario.setup import Setup, resolve
from kvcover.sim.search.workers import executor
from kvcover.sim.simulate import replay_line, run_world
from kvcover.sim.tiers import Tier

MODES: tuple[Mode, Mode] = ("write", "read")


class Pairing(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill TP with one decode TP, and what came of it. `race`: it went well, but nothing but time orders it."""

    prefill: int
    decode: int
    outcome: str
    coverage: float
    race: bool
    command: str

    @property
    def good(self) -> bool:
        """Whether decode got what it needs, and nothing was held; a race is told beside it."""
        return self.outcome == "ok"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A router and a release in one mode. `works` says for which pairings: all, equal TP only, none, …, or for how many.

    `worst` is the worst outcome of the pairings that don't work, empty if all do.
    """

    router: str
    release: str
    mode: str
    works: str
    worst: str
    race: bool
    pairings: list[Pairing]


def compat_scenarios(
    scenario: Scenario,
    routers: Sequence[str],
    releases: Sequence[str],
    modes: Sequence[Mode],
    sizes: tuple[Sequence[int], Sequence[int]],
) -> list[Scenario]:
    """Every combination, in the order of its arguments; these five fields of the scenario are not read."""
    return [
        msgspec.structs.replace(
            scenario,
            router=router,
            release=release,
            mode=mode,
            fabric="loopback",  # bytes take no time: READ without a barrier is a race, and not bad by some microseconds
            prefill=msgspec.structs.replace(scenario.prefill, tp=p),
            decode=msgspec.structs.replace(scenario.decode, tp=d),
        )
        for router, release, mode, p, d in product(routers, releases, modes, *sizes)
    ]


def run_all(scenarios: Sequence[Scenario], tier: Tier, jobs: int | None = None) -> list[Result]:
    """A result a scenario, in order; legs that are the same are run once. `jobs`: processes for the model, None one a CPU."""
    setups = [resolve(scenario) for scenario in scenarios]
    keys = [_same_run(setup) for setup in setups]
    first = {key: index for index, key in reversed(list(enumerate(keys)))}
    chosen = [scenarios[index] for index in sorted(first.values())]
    results = _run_on_model(chosen, jobs) if tier.name == "model" else tier.many(chosen)
    by_key = dict(zip([keys[index] for index in sorted(first.values())], results, strict=True))
    return [by_key[key] for key in keys]


def count_runs(scenarios: Sequence[Scenario]) -> int:
    """How many runs that takes."""
    return len({_same_run(resolve(scenario)) for scenario in scenarios})


def _same_run(setup: Setup) -> str:
    """What decides a run: all but the router's name, and of its templates only what they come to."""
    router, mode = setup.router, setup.scenario.mode
    values = [values_of(setup, request, "$transfer_id") for request in setup.requests]
    legs = [_come_to(router, mode, each) for each in values]
    ends = [(request.prefill_dp, request.decode_dp, request.rejected) for request in setup.requests]
    own = msgspec.json.encode(msgspec.structs.replace(setup.scenario, router="")).decode()
    return json.dumps([own, legs, ends, router.registration_expiry_s])


def _come_to(router: Router, mode: str, values: dict[str, object]) -> list[object]:
    """Both legs of a request; of prefill's answer only what is taken of it."""
    echo = {key: f"$response.{key}" for leg in router.legs(mode) for value in leg.values() if (key := _answered(value))}
    legs = [router.prefill_leg(mode, values), router.decode_leg(mode, values, echo)]
    return [*legs, router.forwards_response and mode == "read"]


def _answered(value: object) -> str:
    return value.removeprefix("$response.") if isinstance(value, str) and value.startswith("$response.") else ""


def _run_on_model(scenarios: Sequence[Scenario], jobs: int | None) -> list[Result]:
    if len(scenarios) < 100:
        return [run_world(resolve(scenario))[0] for scenario in scenarios]
    with executor(jobs, None) as (pool, workers):
        if pool is None:
            return _run_some(scenarios)
        size = math.ceil(len(scenarios) / (4 * workers))
        parts = [scenarios[start : start + size] for start in range(0, len(scenarios), size)]
        return [result for part in pool.map(_run_some, parts) for result in part]


def _run_some(scenarios: Sequence[Scenario]) -> list[Result]:
    return [run_world(resolve(scenario))[0] for scenario in scenarios]


def cells(scenarios: Sequence[Scenario], results: Sequence[Result]) -> Iterator[Cell]:
    """One cell a router, release and mode, in order."""
    found: dict[tuple[str, str, str], list[tuple[Scenario, Result]]] = {}
    for scenario, result in zip(scenarios, results, strict=True):
        found.setdefault((scenario.router, scenario.release, scenario.mode), []).append((scenario, result))
    for (router, release, mode), mine in found.items():
        pairings = []
        for scenario, result in mine:
            tier = "" if result.tier == "model" else f" --tier {result.tier}"
            pairings.append(pairing_of(result, replay_line(scenario) + tier))
        yield cell_of(get_router(router, release).name, release, mode, pairings)


def cell_of(router: str, release: str, mode: str, pairings: list[Pairing]) -> Cell:
    """What its pairings come to."""
    bad = [pairing.outcome for pairing in pairings if not pairing.good]
    return Cell(
        router=router,
        release=release,
        mode=mode,
        works=_works(pairings),
        worst=max(bad, key=_badness, default=""),
        race=any(pairing.race for pairing in pairings),
        pairings=pairings,
    )


def pairing_of(result: Result, command: str) -> Pairing:
    """What came of a pairing, and the command that shows it."""
    outcome = result.outcome
    failed = [check.name for check in result.checks if check.verdict == "fail" and check.name != "no-race"]
    if outcome == "ok" and failed:
        outcome = f"ok, {failed[0]} failed"
    return Pairing(
        prefill=result.prefill["tp"],
        decode=result.decode["tp"],
        outcome=outcome,
        coverage=result.coverage,
        race=raced(result.checks),
        command=command,
    )


def _badness(outcome: str) -> int:
    return OUTCOMES.index(outcome) if outcome in OUTCOMES else 0


# Pairings of which people speak; what is not one of them is counted.
_KINDS: dict[str, Callable[[Pairing], bool]] = {
    "all": lambda pairing: True,
    "equal TP only": lambda pairing: pairing.prefill == pairing.decode,
    "P ≤ D only": lambda pairing: pairing.prefill <= pairing.decode,
    "P ≥ D only": lambda pairing: pairing.prefill >= pairing.decode,
    "none": lambda pairing: False,
}


def _works(pairings: Sequence[Pairing]) -> str:
    good = [pairing for pairing in pairings if pairing.good]
    for name, those in _KINDS.items():
        if good == [pairing for pairing in pairings if those(pairing)]:
            return name
    return f"P{good[0].prefill}→D{good[0].decode} only" if len(good) == 1 else f"{len(good)} of {len(pairings)}"


def confirmed(model: Sequence[Result], real: Sequence[Result]) -> list[bool]:
    """Of each run whether a real tier came to the outcome and coverage of the model."""
    return [a.outcome == b.outcome and abs(a.coverage - b.coverage) < 1e-9 for a, b in zip(model, real, strict=True)]


def default_routers() -> list[str]:
    """All that were recorded, by name."""
    return list(ROUTERS)
