"""A router's legs against releases: what is read of them, what comes of them, and legs that would work.

All on the model. Bytes take no time here (`fabric = "loopback"`), so that what is judged is the legs, and not whether a READ
without a barrier happens to be fast enough; the race is told.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvcover.faults.params import LEGS, LegName
from kvcover.sim.errors import InputError
from kvcover.sim.results.result import OUTCOMES, Result, raced
from kvcover.sim.results.verdict import Verdict as Judged
from kvcover.sim.results.verdict import judge_run
from kvcover.sim.scenario.legs_file import MODES, OwnLegs
from kvcover.sim.scenario.routers import ROUTERS, TOY_PROXY, Router, Template, get_router, own_router
from kvcover.sim.scenario.scenario import Scenario
from kvcover.sim.scenario.setup import resolve
from kvcover.sim.search.legs_read import Reading, read_by_engines
from kvcover.sim.simulate import replay_line, run_world

# One value of each type that JSON has; a number that is no size, and one that is not whole.
OTHER_TYPES: dict[str, Any] = {"null": None, "text": "x", "true": True, "list": [], "-1": -1, "1.5": 1.5}
_PEER = {"prefill": "decode", "decode": "prefill"}
_SIZES = ("remote_tp_size", "remote_dp_size")
_TRUE = {"remote_tp_size": "tp", "remote_dp_size": "dp", "remote_dp_rank": "dp_rank", "remote_dp_size_local": "dp_local",
         "remote_hosts": "hosts"}  # fmt: skip


_KNOWN = frozenset(key for router in ROUTERS.values() for mode in MODES for leg in router.legs(mode) for key in leg)


class Works(msgspec.Struct, frozen=True, kw_only=True):
    """Legs that are right for one mode and release: both, as `--router` takes them, and how they differ from what is sent.

    `needed` are the changes without which they are not right; `advised` put true what is read by others only.
    """

    prefill: Template
    decode: Template
    needed: list[str]
    advised: list[str]
    outcome: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the legs come to in one mode on one release, and what the judge says of it.

    `filled` are legs that were not given, and taken from the toy proxy of the release. `works` is None where nothing that was
    tried is right; `best` is then the best outcome of all that was.
    """

    mode: str
    release: str
    outcome: str
    coverage: float
    race: bool
    judged: Judged
    why: list[str]
    legs: dict[str, list[Reading]]
    filled: list[str]
    works: Works | None
    best: str
    command: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built

    @property
    def good(self) -> bool:
        """Whether all is well here. A race is none of the legs' doing, and not well all the same."""
        return self.judged.status != "fail"


def check_legs(own: OwnLegs, scenario: Scenario, releases: Sequence[str], name: str, types: bool = True) -> list[Verdict]:
    """A verdict a mode that the legs are for, and release. `types`: see as well what values of other types lead to.

    The scenario's release, mode, router and fabric are not read.
    """
    own_router(own, name, name)
    return [_verdict(own, scenario, mode, release, name, types) for mode in own.modes() for release in releases]


def _verdict(own: OwnLegs, scenario: Scenario, mode: str, release: str, name: str, types: bool) -> Verdict:
    here = msgspec.structs.replace(scenario, release=release, mode=mode, router=TOY_PROXY, fabric="loopback")
    filled: list[str] = [side for side in LEGS if (mode, side) not in own.legs]
    router = _whole(own, mode, release, name)
    result, legs = read_by_engines(here, router)
    works, best = (_as_they_are(here, router), "ok") if result.outcome == "ok" else _working(here, router, result)
    if types:
        right = router if works is None else _with(router, mode, {"prefill": works.prefill, "decode": works.decode})
        legs = {side: [_typed(here, right, reading, side, best) for reading in legs[side]] for side in LEGS}
    legs = {side: [_near(reading, legs[side]) for reading in legs[side]] for side in LEGS}
    given = replay_line(msgspec.structs.replace(here, router=name))
    return Verdict(
        mode=mode,
        release=release,
        outcome=result.outcome,
        coverage=result.coverage,
        race=raced(result.checks),
        judged=judge_run(result),
        why=[finding.text for finding in result.findings if finding.kind != "race"],
        legs=legs,
        filled=filled,
        works=works,
        best=best,
        command="" if name == "-" or filled else given,
    )


def _whole(own: OwnLegs, mode: str, release: str, name: str) -> Router:
    """The legs as a router of this mode; one that is not given is the toy proxy's."""
    toy = dict(zip(LEGS, get_router(TOY_PROXY, release).legs(mode), strict=True))
    legs = {(mode, side): own.legs.get((mode, side), toy[side]) for side in LEGS}
    return own_router(msgspec.structs.replace(own, legs=legs), name, name)


# -- types -------------------------------------------------------------------------------------------------------


def _typed(scenario: Scenario, router: Router, reading: Reading, side: LegName, before: str) -> Reading:
    """What other types in place of a key that is sent and read lead to, where that is worse; in legs that work, if any do."""
    if not (reading.sent and reading.read):
        return reading
    worse = {}
    for kind, value in OTHER_TYPES.items():
        fault = f"set:{reading.key}={json.dumps(value)}@{side}"
        outcome = _outcome(msgspec.structs.replace(scenario, faults=(fault,)), router)
        if outcome in OUTCOMES and OUTCOMES.index(outcome) > OUTCOMES.index(before):
            worse[kind] = outcome
    return msgspec.structs.replace(reading, worse=worse)


def _near(reading: Reading, others: list[Reading]) -> Reading:
    """A key that nobody reads may be one that is missing, under another name."""
    if reading.read or not reading.sent or reading.key in _KNOWN:
        return reading
    missing = [*(other.key for other in others if other.read), *_KNOWN]
    close = difflib.get_close_matches(reading.key, missing, n=1, cutoff=0.8)
    return msgspec.structs.replace(reading, near=close[0] if close else "")


def _outcome(scenario: Scenario, router: Router) -> str:
    return run_world(resolve(scenario, router=router))[0].outcome


# -- legs that work ----------------------------------------------------------------------------------------------

Both = dict[LegName, Template]


def _working(scenario: Scenario, router: Router, before: Result) -> tuple[Works | None, str]:
    """Right legs as near as can be to the given ones, and the best outcome of all that were tried."""
    mode, best = scenario.mode, before.outcome
    own = dict(zip(LEGS, router.legs(mode), strict=True))
    for legs in _candidates(scenario, own):
        outcome = _outcome(scenario, _with(router, mode, legs))
        if OUTCOMES.index(outcome) < OUTCOMES.index(best):
            best = outcome
        if outcome == "ok":
            fewest = _fewest(scenario, router, own, legs)
            legs = _honest(scenario, router, fewest)
            return Works(
                **{side: {key: _sized(value, scenario) for key, value in legs[side].items()} for side in LEGS},
                needed=_changes(own, fewest, scenario),
                advised=[each for each in _changes(own, legs, scenario) if each not in _changes(own, fewest, scenario)],
                outcome=outcome,
            ), best
    return None, best


def _as_they_are(scenario: Scenario, router: Router) -> Works:
    legs = dict(zip(LEGS, router.legs(scenario.mode), strict=True))
    return Works(prefill=legs["prefill"], decode=legs["decode"], needed=[], advised=[], outcome="ok")


def _candidates(scenario: Scenario, own: Both) -> Iterator[Both]:
    """Legs that may work, the nearest first: with true sizes, with every key that is read, and the toy proxy's."""
    toy = dict(zip(LEGS, get_router(TOY_PROXY, scenario.release).legs(scenario.mode), strict=True))
    for base in (own, {side: own[side] | toy[side] for side in LEGS}, toy):
        for keys in (_SIZES, (*_SIZES, "tp_size"), tuple(_TRUE), (*_TRUE, "tp_size")):
            true = {side: {key: _true(key, side) for key in keys} for side in LEGS}
            leader = {"is_request_leader": True} if "remote_dp_rank" in keys else {}
            yield {"prefill": base["prefill"] | true["prefill"], "decode": base["decode"] | true["decode"] | leader}


def _true(key: str, side: LegName) -> str:
    """The template for what the other side registered."""
    return f"${_PEER[side]}.{_TRUE.get(key, 'tp')}"


def _with(router: Router, mode: str, legs: Both) -> Router:
    return msgspec.structs.replace(router, **{f"{mode}_{side}": legs[side] for side in LEGS})


def _fewest(scenario: Scenario, router: Router, own: Both, legs: Both) -> Both:
    """Take back every change that is not needed."""
    for side in LEGS:
        for key in _differing(own[side], legs[side]):
            less = {each: dict(legs[each]) for each in LEGS}
            if key in own[side]:
                less[side][key] = own[side][key]
            else:
                del less[side][key]
            if _outcome(scenario, _with(router, scenario.mode, less)) == "ok":
                legs = less
    return legs


def _honest(scenario: Scenario, router: Router, legs: Both) -> Both:
    """The same with every size that is sent as it truly is, also one that nobody reads here, if that is right too."""
    true = {side: {key: _true(key, side) if key in _SIZES else value for key, value in legs[side].items()} for side in LEGS}
    return true if _outcome(scenario, _with(router, scenario.mode, true)) == "ok" else legs


def _changes(own: Both, legs: Both, scenario: Scenario) -> list[str]:
    told = []
    for side in LEGS:
        old, new = ({key: _sized(value, scenario) for key, value in leg[side].items()} for leg in (own, legs))
        told += [_change(side, key, old, new) for key in _differing(old, new)]
    return told


def _differing(own: Template, legs: Template) -> list[str]:
    return [key for key in {**own, **legs} if json.dumps(own.get(key, "$absent")) != json.dumps(legs.get(key, "$absent"))]


def _change(side: LegName, key: str, own: Template, legs: Template) -> str:
    if key not in legs:
        return f"{side}: without {key}"
    was = f", not {json.dumps(own[key])}" if key in own else ""
    return f"{side}: {key} = {json.dumps(legs[key])}{was}"


def _sized(value: Any, scenario: Scenario) -> Any:
    """Templates of sizes as the numbers of this pairing; what differs by request stays a template."""
    name = value[1:] if isinstance(value, str) and value.startswith("$") else ""
    side, _, size = name.partition(".")
    if side not in LEGS or size not in ("tp", "dp", "dp_local"):
        return value
    engine = getattr(scenario, side)
    return engine.dp // engine.pods if size == "dp_local" else getattr(engine, size)


def startable(scenario: Scenario) -> Scenario:
    """The same with a host for each DP rank of a side that has TP and DP, as its ranks can't share the ports of one host."""
    sides = {side: getattr(scenario, side) for side in LEGS}
    apart = {side: msgspec.structs.replace(s, pods=s.dp) for side, s in sides.items() if s.tp > 1 and s.dp > 1 and s.pods == 1}
    return msgspec.structs.replace(scenario, **apart)


def legs_as_file(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Legs that work, as a file for `--router`: one pair a mode. Raises InputError where one pair does not do for all releases."""
    found: dict[str, Any] = {}
    for verdict in verdicts:
        works = verdict.works
        if works is None:
            raise InputError("--legs-out", f"no legs that work were found for {verdict.mode.upper()} on {verdict.release}", "")
        legs = {"prefill": works.prefill, "decode": works.decode}
        if found.setdefault(verdict.mode, legs) != legs:
            problem = f"{verdict.mode.upper()} on {verdict.release} needs other legs than the releases before"
            raise InputError("--legs-out", problem, "name one release")
    return found
